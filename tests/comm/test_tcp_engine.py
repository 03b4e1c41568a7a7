"""The engine that moves messages over several connections: what is lost comes again, and lies are refused."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from helpers.keys import keys_of
from helpers.program import wait_until

_engine = pytest.importorskip("thinwire.comm.tcp._engine")
HEADER = struct.Struct("<IIQQQ")  # kind, length, number, total, offset; as in native/wire/frame.hpp
DATA, ACK, ASK, WANT, BYE, FAIL = range(0x74570001, 0x74570007)


def described(number: int, tensor: torch.Tensor, peer: int) -> tuple[int, int, int, int]:
    return peer, number, tensor.data_ptr(), tensor.nbytes


def connected(*engines, contexts=()) -> list[tuple[socket.socket, socket.socket]]:
    """A connection between two engines, by TLS with contexts; returned are handles on both ends, to cut it."""
    ends = socket.socketpair()
    handles = tuple(end.dup() for end in ends)
    for rank, (engine, end) in enumerate(zip(engines, ends, strict=True)):
        session = _engine.Session(contexts[rank], end.fileno(), bool(rank)) if contexts else None
        engine.attach(1 - rank, end.detach(), session)
    return handles


@pytest.fixture(scope="module")
def contexts(tmp_path_factory) -> list:
    workers = keys_of(tmp_path_factory.mktemp("run"), "worker0", "worker1")
    return [_engine.Context(str(own.certificate), str(own.key), str(own.authority)) for own in workers]


def cut(handles) -> None:
    for handle in handles:
        handle.shutdown(socket.SHUT_RDWR)
        handle.close()


def finished(engine, operation: int, seconds: float = 60.0) -> None:
    assert engine.wait(operation, seconds), "the operation did not end"


@pytest.fixture
def pair() -> Iterator:
    engines = [_engine.Engine(rank, 2, 60.0) for rank in range(2)]
    yield engines


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("is_encrypted", "early_bytes"), [(False, 64 << 20), (True, 64 << 20), (False, 100_000)])
@pytest.mark.parametrize("seed", range(3))
def test_messages_survive_connections_that_are_cut_in_their_midst(contexts, seed, is_encrypted, early_bytes):
    """Each byte of 60 messages of all sizes arrives once, while each connection lives for milliseconds."""
    pair = [_engine.Engine(rank, 2, 60.0, early_bytes=early_bytes) for rank in range(2)]
    chance, connect = random.Random(seed), partial(connected, *pair, contexts=contexts if is_encrypted else ())
    sizes = [chance.choice([1, 900, 20_000, 700_000, 3_000_000]) for _ in range(60)]
    sent = [noise(size, i) for i, size in enumerate(sizes)]
    received = [torch.zeros_like(tensor) for tensor in sent]
    live = [connect(), connect()]
    expected = [pair[1].post([], [described(i, tensor, 0)]) for i, tensor in enumerate(received[:30])]
    operations = []
    lost = socket.socketpair()
    pair[0].attach(1, lost[0].detach())  # this one's chunks are lost for certain
    for i, tensor in enumerate(sent):
        memory = tensor.clone()
        operations.append((pair[0].post([described(i, memory, 1)], []), memory))
    lost[1].settimeout(60.0)
    assert lost[1].recv(HEADER.size, socket.MSG_WAITALL)
    lost[1].close()
    late = [pair[1].post([], [described(30 + i, tensor, 0)]) for i, tensor in enumerate(received[30:])]
    for _ in range(25):
        time.sleep(chance.random() * 0.004)
        cut(live.pop(chance.randrange(len(live))))
        live.append(connect())
    for operation, memory in operations:
        finished(pair[0], operation)
        memory.zero_()  # the caller may write to it now, whatever has to be sent again
        if chance.random() < 0.3:
            cut(live.pop(0))
            live.append(connect())
    for operation in expected + late:
        finished(pair[1], operation)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))
    assert pair[0].counts(1).resent > 0


def test_a_lost_connection_is_reported_with_how_many_are_left(pair):
    handles = [connected(*pair), connected(*pair)]
    cut(handles[0])
    for rank, engine in enumerate(pair):
        events = []
        wait_until(lambda engine=engine, events=events: events.extend(engine.events(1.0)) or events, "the event")
        assert events[0] == (_engine.ENDED, 1 - rank, 1)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_fork_can_drop_an_engine(is_closed):
    """It aborted the workers of data loaders, where garbage was collected in which one was that had been closed."""
    engine = _engine.Engine(0, 2, 60.0)
    if is_closed:
        engine.close(1.0)
    child = os.fork()
    if child == 0:
        del engine
        os._exit(42)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_a_peer_sees_the_end_of_a_connection_whose_socket_a_fork_has_too():
    """Such as a worker of a DataLoader; a second descriptor is the same to the system."""
    engine, (ours, theirs) = _engine.Engine(0, 2, 60.0), socket.socketpair()
    with ours.dup():
        engine.attach(1, ours.detach())
        engine.cut()
        theirs.settimeout(60.0)
        assert theirs.recv(1) == b""


def test_closing_waits_until_all_has_arrived(pair):
    connected(*pair)
    sent, received = noise(5_000_000, 0), torch.zeros(5_000_000, dtype=torch.uint8)
    finished(pair[0], pair[0].post([described(0, sent, 1)], []))
    pair[0].close(30.0)
    finished(pair[1], pair[1].post([], [described(0, received, 0)]))  # begun after the goodbye
    assert torch.equal(sent, received)
    with pytest.raises(RuntimeError, match="rank 0 has closed its communicator"):
        pair[1].wait(pair[1].post([], [described(1, received, 0)]), 30.0)


def test_the_first_bytes_of_a_chunk_again_and_again_are_no_sign_of_life():
    """Where large packets are lost on the way, a worker waited for ever: each new connection brought a little."""
    engine = _engine.Engine(0, 2, 1.0)
    first, second = torch.zeros(10, dtype=torch.uint8), torch.zeros(100_000, dtype=torch.uint8)
    small = HEADER.pack(DATA, 10, 0, 10, 0) + bytes(10)
    large = HEADER.pack(DATA, 100_000, 1, 100_000, 0) + bytes(500)
    ours, theirs = socket.socketpair()
    engine.attach(1, ours.detach())
    with theirs:
        theirs.sendall(small)
        wait_until(lambda: engine.begun([(1, 0)], 0.1) == 0, "the small message")  # the time limit is short
        operations = [engine.post([], [described(i, tensor, 1)]) for i, tensor in enumerate((first, second))]
        finished(engine, operations[0])
    ended, deadline = False, time.monotonic() + 60.0
    with pytest.raises(RuntimeError, match="nothing came from rank 1 in 1 seconds"):
        while not ended and time.monotonic() < deadline:
            ours, theirs = socket.socketpair()
            engine.attach(1, ours.detach())
            with theirs:
                theirs.sendall(small + large)
                ended = engine.wait(operations[1], 0.3)


WITHOUT_MEMORY = """
import os, resource, signal
from thinwire.comm.tcp._engine import Engine
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = os.listdir("/proc/self/fd")
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))  # no stack fits
try:
    Engine(0, 2, 60.0)
except RuntimeError as error:
    assert str(error).startswith("no thread for the engine: "), error
    assert os.listdir("/proc/self/fd") == before and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    print("refused")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux has it")
def test_where_no_thread_can_be_started_nothing_is_left_behind():
    """All signals stayed blocked in the thread that had asked, so that Ctrl-C did nothing, and two descriptors open."""
    said = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=600)
    assert said.stdout == "refused\n", said.stderr


# ---- streams ----


def test_streams_are_numbered_on_their_own(pair):
    """Messages of two streams have equal numbers, and are received in another order than they were sent."""
    connected(*pair)
    stream = 5 << _engine.STREAM_SHIFT
    sent = {number: noise(40_000, seed) for seed, number in enumerate((0, stream, stream + 1, 1))}
    for number, tensor in sent.items():
        finished(pair[0], pair[0].post([described(number, tensor, 1)], []))
    for number in (stream, 0, 1, stream + 1):
        received = torch.zeros(40_000, dtype=torch.uint8)
        finished(pair[1], pair[1].post([], [described(number, received, 0)]))
        assert torch.equal(received, sent[number])


def test_a_receiver_sees_which_message_has_begun_to_come(pair):
    connected(*pair)
    stream = 3 << _engine.STREAM_SHIFT
    assert pair[1].begun([(0, stream)], 0.01) == -1
    sent = torch.ones(10, dtype=torch.uint8)
    pair[0].post([described(stream, sent, 1)], [])
    wait_until(lambda: pair[1].begun([(0, 0), (0, stream)], 0.1) == 1, "the message")
    pair[1].lose(0, "rank 0 has died")
    with pytest.raises(RuntimeError, match="rank 0 has died"):
        pair[1].begun([(0, stream + 1)], 30.0)


def test_closing_ends_what_others_wait_for(pair):
    connected(*pair)
    operation = pair[1].post([], [described(0, torch.zeros(10, dtype=torch.uint8), 0)])
    pair[1].close(0.1)
    with pytest.raises(RuntimeError, match="the communicator was closed"):
        pair[1].wait(operation, 30.0)


# ---- operations that the peer has not begun ----

EARLY_BYTES = 1 << 20


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("num_connections", [1, 2])
def test_what_comes_early_holds_up_no_operation_that_the_peer_has_begun(num_connections, is_begun):
    """As where an all-reduce is followed by a large all-gather, which its peers begin when the all-reduce has ended.

    The early bytes of the second operation stopped all connections, and with them the second half of the first.
    """
    engines = [_engine.Engine(rank, 2, 60.0, early_bytes=EARLY_BYTES) for rank in range(2)]
    for _ in range(num_connections):
        connected(*engines)
    first, second = (torch.zeros(n, dtype=torch.uint8) for n in (300_000, 8 * EARLY_BYTES))
    sent = [noise(tensor.numel(), seed) for seed, tensor in enumerate((first, second))]
    begun = [engines[1].post([], [described(0, first, 0)])] if is_begun else []
    large = engines[0].post([described(1, sent[1], 1)], [])
    small = engines[0].post([described(0, sent[0], 1)], [])
    if not is_begun:
        wait_until(lambda: engines[1].begun([(0, 0)], 0.1) == 0, "the message, or word of it")
        begun = [engines[1].post([], [described(0, first, 0)])]
    finished(engines[1], begun[0])
    finished(engines[0], small)
    assert not engines[0].wait(large, 0.0)
    finished(engines[1], engines[1].post([], [described(1, second, 0)]))
    finished(engines[0], large)
    assert torch.equal(first, sent[0]) and torch.equal(second, sent[1])


def read_held(end: socket.socket) -> int:
    """The bytes of messages that come until the engine asks about message 0."""
    num_bytes = 0
    while (header := read_header(end))[0] == DATA:
        num_bytes += len(end.recv(header[1], socket.MSG_WAITALL))
    assert header == (ASK, 0, 1, 0, 0)
    return num_bytes


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_message_goes_on_when_its_peer_has_said_that_it_expects_it(is_lost):
    """What a peer may have to keep is bounded. A question that is lost with its connection comes again."""
    engine, ends = _engine.Engine(0, 2, 60.0, early_bytes=EARLY_BYTES), [socket.socketpair() for _ in range(2)]
    engine.attach(1, ends[0][0].detach())
    memory, theirs = noise(3 * EARLY_BYTES, 0), ends[0][1]
    operation = engine.post([described(0, memory, 1)], [])
    num_bytes = read_held(theirs)
    if is_lost:
        theirs.close()
        engine.attach(1, ends[1][0].detach())
        theirs = ends[1][1]
        num_bytes = read_held(theirs)
    while select.select([theirs], [], [], 0.2 if num_bytes > EARLY_BYTES // 2 else 60.0)[0]:
        num_bytes += len(theirs.recv(read_header(theirs)[1], socket.MSG_WAITALL))
    assert EARLY_BYTES // 2 < num_bytes <= EARLY_BYTES and not engine.wait(operation, 0.0)
    theirs.sendall(HEADER.pack(ACK, 0, 0, 0, 1))
    while num_bytes < memory.numel():
        num_bytes += len(theirs.recv(read_header(theirs)[1], socket.MSG_WAITALL))
    finished(engine, operation)


def test_a_peer_learns_when_a_message_is_expected():
    engine, _, _, theirs = said(HEADER.pack(ASK, 0, 6, 0, 0), HEADER.pack(ASK, 0, 1, 0, 0))
    theirs.settimeout(30.0)
    assert read_header(theirs)[::4] == (ACK, 1)
    assert engine.begun([(1, 4), (1, 5)], 30.0) == 1
    engine.post([], [described(5, torch.zeros(10, dtype=torch.uint8), 1)])
    assert read_header(theirs)[::4] == (ACK, 6)


def test_what_came_early_and_comes_again_takes_no_more_memory():
    """After a connection was lost: at the bound, the copies stopped those that they came over, and what came behind them."""
    engine, (ours, theirs) = _engine.Engine(0, 2, 60.0, early_bytes=EARLY_BYTES), socket.socketpair()
    engine.attach(1, ours.detach())
    theirs.settimeout(60.0)
    theirs.sendall(data(0, 700_000, number=1, total=700_000) * 2)
    wait_until(lambda: engine.counts(1).duplicates == 1, "the copy")


# ---- whose memory it is ----


def read_message(end: socket.socket, total: int) -> bytes:
    """The bytes of a message, of which the chunks may come in any order; nothing is acknowledged."""
    message = bytearray(total)
    left = total
    while left:
        _, length, _, _, offset = HEADER.unpack(end.recv(HEADER.size, socket.MSG_WAITALL))
        message[offset : offset + length] = end.recv(length, socket.MSG_WAITALL)
        left -= length
    return bytes(message)


def test_memory_that_nobody_waits_for_is_given_back_when_all_is_acknowledged():
    engine, *_, theirs = said()
    memory = noise(400_000, 0)
    operation = engine.post([described(0, memory, 1)], [])
    assert read_message(theirs, 400_000) == memory.numpy().tobytes()
    assert operation not in engine.finished()
    theirs.sendall(HEADER.pack(ACK, 0, 400_000 + 2 * HEADER.size, 0, 0))
    wait_until(lambda: operation in engine.finished(), "the end of the operation")


@pytest.mark.parametrize("is_connected_again", [True, False])
def test_closing_waits_while_a_line_is_cut(is_connected_again):
    """What was under way goes over a new connection, though this worker is closing; a peer that is dead is not waited for."""
    engine, *_, first = said()
    memory = noise(8_000_000, 0)  # more than the system keeps for a peer that does not read
    engine.post([described(0, memory, 1)], [])
    assert not engine.drained(0.0)
    closing = threading.Thread(target=engine.close, args=(60.0,), daemon=True)
    closing.start()
    first.close()
    wait_until(lambda: engine.counts(1).connections == 0, "the loss")
    closing.join(0.1)
    assert closing.is_alive()
    if is_connected_again:
        ours, second = socket.socketpair()
        engine.attach(1, ours.detach())
        assert read_message(second, 8_000_000) == memory.numpy().tobytes()
        assert HEADER.unpack(second.recv(HEADER.size, socket.MSG_WAITALL))[0] == ASK
        num_chunks = -(-8_000_000 // (1 << 18))
        second.sendall(HEADER.pack(ACK, 0, 8_000_000 + num_chunks * HEADER.size, 0, 0))
        assert HEADER.unpack(second.recv(HEADER.size, socket.MSG_WAITALL))[0] == BYE
        second.close()
    else:
        engine.lose(1, "rank 1 has died")
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize("is_lost_before", [False, True])
def test_memory_that_was_given_back_is_not_read_again(is_lost_before):
    """What was not acknowledged is sent again with the bytes that it had, whether the connection is lost before or later."""
    engine, *_, first = said()
    memory = noise(400_000, 0)
    expected = memory.numpy().tobytes()
    operation = engine.post([described(0, memory, 1)], [])
    assert read_message(first, 400_000) == expected
    if is_lost_before:
        first.close()
        wait_until(lambda: engine.counts(1).connections == 0, "the loss")
    finished(engine, operation)
    assert operation in engine.finished()
    memory.fill_(7)
    first.close()
    wait_until(lambda: engine.counts(1).connections == 0, "the loss")
    ours, second = socket.socketpair()
    engine.attach(1, ours.detach())
    assert read_message(second, 400_000) == expected


def test_a_peer_that_never_acknowledges_takes_bounded_memory():
    """It reads all; what it has not acknowledged is kept for another connection, so after a while it gets no more."""
    engine, *_, theirs = said()
    memory, num_read = noise(1 << 20, 0), 0
    operations = [engine.post([described(number, memory, 1)], []) for number in range(160)]

    def read() -> None:
        nonlocal num_read
        num_read += len(theirs.recv(1 << 20))
        theirs.sendall(HEADER.pack(ACK, 0, 0, num_read, 0))  # that it expects all messages

    theirs.settimeout(60.0)
    while num_read <= 128 << 20:
        read()
    theirs.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while True:
            read()
    assert num_read < 130 << 20
    theirs.sendall(HEADER.pack(ACK, 0, num_read, 0, 0))
    theirs.settimeout(30.0)
    while num_read < (160 << 20) + 640 * HEADER.size:
        read()
    finished(engine, operations[-1])


def test_questions_of_a_peer_take_bounded_memory():
    engine, operation, *_, theirs = said()
    theirs.sendall(HEADER.pack(WANT, 0, 9, 0, 0) * 1000 + HEADER.pack(ASK, 0, 0, 0, 0))
    theirs.recv(HEADER.size)  # all was read
    assert engine.events(1.0) == [(_engine.WANT, 1, 9)]
    with contextlib.suppress(ConnectionError):
        theirs.sendall(HEADER.pack(ASK, 0, 0, 0, 0) * 2000)
    with pytest.raises(RuntimeError, match="rank 1 asks for too many acknowledgements"):
        engine.wait(operation, 30.0)


def test_questions_about_messages_take_bounded_memory():
    """About messages that are not expected, they get no answer yet; about others, not too many."""
    engine, operation, *_, theirs = said(HEADER.pack(ASK, 0, 8, 0, 0) * 5000 + HEADER.pack(ASK, 0, 0, 0, 0))
    assert read_header(theirs) == (ACK, 0, 5001 * HEADER.size, 0, 0)
    with contextlib.suppress(ConnectionError):
        theirs.sendall(HEADER.pack(ASK, 0, 1, 0, 0) * 2000)
    with pytest.raises(RuntimeError, match="rank 1 asks for too many acknowledgements"):
        engine.wait(operation, 30.0)


# ---- a peer that reads nothing ----


def test_who_waits_for_a_peer_that_reads_nothing_learns_it_in_time():
    """The whole message is one chunk, so nothing of it waits for a connection: that had no time limit."""
    engine, (ours, theirs) = _engine.Engine(0, 2, 1.0), socket.socketpair()
    engine.attach(1, ours.detach())
    memory = noise(1 << 18, 0)  # more than the system keeps
    operation = engine.post([described(0, memory, 1)], [])
    with pytest.raises(RuntimeError, match="nothing could be sent to rank 1 in 1 seconds"):
        engine.wait(operation, 20.0)
    assert HEADER.unpack(theirs.recv(HEADER.size))[0] == DATA


def test_signs_of_life_are_no_messages():
    """On a channel, a worker says every quarter of the limit that it is there: that counted as progress of its messages."""
    engine, ends = _engine.Engine(0, 2, 1.0, True), [socket.socketpair() for _ in range(2)]
    for ours, _ in ends:
        engine.attach(1, ours.detach())
    memory = noise(3 << 18, 0)
    operation = engine.post([described(0, memory, 1)], [])
    with pytest.raises(RuntimeError, match="nothing could be sent to rank 1 in 1 seconds"):
        engine.wait(operation, 20.0)
    assert HEADER.unpack(ends[0][1].recv(HEADER.size))[0] == ACK  # on the connection for small messages


# ---- chunks that are late, and so on several connections ----

LINE_SECONDS = 0.006  # from which each connection gets chunks of `LONG_CHUNK` bytes
LONG_CHUNK = 1 << 16


def on_a_long_line(count: int) -> tuple:
    """An engine with so many connections to rank 1, whose system keeps only little of what rank 1 has not read.

    A listener with TCP_DEFER_ACCEPT ends a handshake with the first byte. It comes late here, so the round trip is long.
    """
    engine, theirs = _engine.Engine(0, 2, 60.0), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
        for _ in range(count):
            end = socket.socket()
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            end.connect(listener.getsockname())
            time.sleep(LINE_SECONDS)
            end.sendall(b"x")
            ours, _ = listener.accept()
            assert ours.recv(1) == b"x"
            engine.attach(1, ours.detach())
            theirs.append(end)
    return engine, theirs


def read_header(end: socket.socket) -> tuple[int, int, int, int, int]:
    return HEADER.unpack(end.recv(HEADER.size, socket.MSG_WAITALL))


needs_deferring = pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="only Linux has it")


@needs_deferring
def test_memory_that_was_given_back_is_not_sent_from_by_another_connection():
    """A chunk is acknowledged on one connection, while another one has sent only a part of it."""
    engine, ends = on_a_long_line(3)
    memory = torch.ones(LONG_CHUNK, dtype=torch.uint8)
    operation = engine.post([described(0, memory, 1)], [])
    wait_until(lambda: engine.counts(1).hedged == 2, "the chunk on all connections")
    assert read_message(ends[1], LONG_CHUNK) == bytes([1]) * LONG_CHUNK
    ends[1].sendall(HEADER.pack(ACK, 0, HEADER.size + LONG_CHUNK, 0, 0))
    wait_until(lambda: operation in engine.finished(), "the end of the operation")
    memory.fill_(7)
    assert read_message(ends[2], LONG_CHUNK) == bytes([1]) * LONG_CHUNK


@needs_deferring
def test_an_operation_ends_if_a_chunk_arrives_over_another_connection_than_the_lost_one():
    """The chunk waits to be sent again when its other copy is acknowledged; the operation waited for that for ever."""
    engine, (small, *large) = on_a_long_line(3)
    memory = noise(2 * LONG_CHUNK, 0)
    operation = engine.post([described(0, memory, 1)], [])
    wait_until(lambda: engine.counts(1).hedged, "a chunk on two connections")
    offset = read_header(small)[4]
    lost, stuck = sorted(large, key=lambda end: read_header(end)[4] != offset)
    for end in (small, lost):
        assert len(end.recv(LONG_CHUNK, socket.MSG_WAITALL)) == LONG_CHUNK
    lost.close()
    wait_until(lambda: engine.counts(1).connections == 2, "the loss")
    small.sendall(HEADER.pack(ACK, 0, HEADER.size + LONG_CHUNK, 0, 0))
    stuck.recv(LONG_CHUNK, socket.MSG_WAITALL)
    finished(engine, operation)


# ---- a peer that lies ----


def said(*frames: bytes, expects: int = 100_000) -> tuple:
    """An engine that expects one message from rank 1, which has said these frames."""
    engine = _engine.Engine(0, 2, 60.0)
    ours, theirs = socket.socketpair()
    engine.attach(1, ours.detach())
    memory = torch.zeros(expects, dtype=torch.uint8)
    operation = engine.post([], [described(0, memory, 1)])
    for frame in frames:
        theirs.sendall(frame)
    return engine, operation, memory, theirs


def data(offset: int, length: int, number: int = 0, total: int = 100_000, fill: int = 1) -> bytes:
    return HEADER.pack(DATA, length, number, total, offset) + bytes([fill]) * length


LIES = {
    "sent chunks that overlap": [data(0, 50_000), data(49_999, 50_001)],
    "announced a message of 1152921504606846976 bytes": [HEADER.pack(DATA, 5000, 0, 1 << 60, 0)],
    "sent a message of 99999 bytes, expected 100000": [data(0, 5000, total=99_999)],
    "sent a chunk beyond the end": [HEADER.pack(DATA, 5000, 0, 100_000, 96_000)],
    "sent a chunk of 1048577 bytes": [HEADER.pack(DATA, (1 << 20) + 1, 0, 1 << 30, 0)],
    "sent a chunk of 0 bytes": [HEADER.pack(DATA, 0, 0, 100_000, 0)],
    "sent a chunk that is too small": [data(0, 7)],
    "is too many messages ahead": [HEADER.pack(DATA, 5000, 1 << 63, 100_000, 0)],
    "is too many messages ahead$": [HEADER.pack(ASK, 0, 2 << 20, 0, 0)],
    "acknowledged what was never sent": [HEADER.pack(ACK, 0, 1, 0, 0)],
    "acknowledged what was never sent$": [HEADER.pack(ACK, 0, 0, 1, 0)],
    "sent what is no frame": [b"GET / HTTP/1.1\r\nHost: rank 0\r\n\r\n\r\n"],
    "sent a control frame with a body": [HEADER.pack(BYE, 1, 0, 0, 0)],
    "has closed its communicator": [HEADER.pack(BYE, 0, 0, 0, 0)],
    "has failed: it lost rank 2": [HEADER.pack(FAIL, 0, 2, 0, 0)],
}


@pytest.mark.parametrize("words", LIES)
def test_a_peer_that_lies_is_named(words):
    engine, operation, *_ = said(*LIES[words])
    with pytest.raises(RuntimeError, match=f"rank 1 {words}"):
        engine.wait(operation, 30.0)


def test_a_message_of_another_size_that_came_early_is_refused():
    engine, operation, _, theirs = said(data(0, 5000, number=1, total=5000))
    wait_until(lambda: engine.counts(1).connections, "the connection")
    time.sleep(0.05)
    memory = torch.zeros(6000, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="rank 1 sent a message of 5000 bytes, expected 6000"):
        engine.wait(engine.post([], [described(1, memory, 1)]), 30.0)


def test_what_comes_twice_is_dropped_and_counted():
    """The same chunk, over the same and over another connection, before and after its message is whole."""
    engine, operation, memory, theirs = said(data(0, 50_000), data(0, 50_000, fill=9), data(50_000, 50_000, fill=2))
    finished(engine, operation)
    theirs.sendall(data(50_000, 50_000, fill=9))
    wait_until(lambda: engine.counts(1).duplicates == 2, "both copies")
    assert memory.tolist() == [1] * 50_000 + [2] * 50_000


def test_a_late_copy_never_touches_memory_that_was_given_back():
    """A connection is in the middle of a chunk when the same chunk is whole by another one."""
    engine, operation, memory, first = said(data(0, 50_000), data(50_000, 50_000)[:30_000])
    ours, second = socket.socketpair()
    engine.attach(1, ours.detach())
    second.sendall(data(50_000, 50_000, fill=2))
    finished(engine, operation)
    memory.fill_(7)
    first.sendall(bytes([9]) * (50_032 - 30_000) + HEADER.pack(ASK, 0, 0, 0, 0))
    assert HEADER.unpack(first.recv(HEADER.size))[0] == ACK  # all was read
    assert memory.unique().tolist() == [7]


def test_what_comes_too_early_takes_bounded_memory():
    """Of messages that nobody expects, so much is taken; then the peer has to wait, until they are expected."""
    engine, _, _, theirs = said()
    chunk, number, rest, taken = bytes([1]) * (1 << 20), 1, b"", 0

    def send() -> None:
        nonlocal number, rest, taken
        if not rest:
            rest, number = HEADER.pack(DATA, 1 << 20, number, 1 << 20, 0) + chunk, number + 1
        count = theirs.send(rest)
        rest, taken = rest[count:], taken + count

    theirs.settimeout(60.0)
    while taken <= 63 << 20:
        send()
    theirs.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        while taken < 200 << 20:
            send()
    assert taken < 70 << 20
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    finished(engine, engine.post([], [described(1, memory, 1)]))
    assert memory.unique().tolist() == [1]


def test_small_messages_that_come_too_early_take_bounded_memory():
    engine, _, _, theirs = said()
    frames = b"".join(HEADER.pack(DATA, 1, number, 1, 0) + b"x" for number in range(1, 400_000))
    taken = 200_000 * (HEADER.size + 1)  # within the bound
    theirs.settimeout(60.0)
    theirs.sendall(frames[:taken])
    theirs.settimeout(1.0)
    with pytest.raises(TimeoutError):
        theirs.sendall(frames[taken:])
    memory = torch.zeros(1, dtype=torch.uint8)
    finished(engine, engine.post([], [described(200_000, memory, 1)]))
