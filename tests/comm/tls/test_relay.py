"""Workers that can only dial out: who connects with whom, and the relay for those that cannot reach each other."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.command import thinwire
from helpers.keys import keys_of
from helpers.listeners import listening
from helpers.program import programs, wait_until
from helpers.traffic import connections

from thinwire.comm import CommunicationError, Credentials
from thinwire.comm.addresses import parse_address
from thinwire.comm.tcp import TcpCommunicator, is_available
from thinwire.comm.tcp.connections import Contact
from thinwire.comm.tls import relay
from thinwire.comm.tls.relay import (
    CONNECT,
    HELLO,
    JOINED,
    MAGIC,
    MAX_UNPAIRED,
    WAIT,
    Relay,
    await_other,
    own_address_at,
    reach,
)
from thinwire.lab.cli.relay import relay_command

engine = pytest.mark.skipif(not is_available(), reason="the extension was not built")


@pytest.fixture
def server() -> Iterator[Relay]:
    with Relay("127.0.0.1") as server:
        yield server


def ends(server: Relay, token: bytes) -> tuple[socket.socket, socket.socket]:
    """Two connections that the relay has joined."""
    waiting = reach(server.address, WAIT, token, 10.0)
    connecting = reach(server.address, CONNECT, token, 10.0)
    for connection in (waiting, connecting):
        await_other(connection, 10.0)
    return waiting, connecting


def read(connection: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size and (part := connection.recv(size - len(said))):
        said += part
    return said


# ---- the relay ----


def test_what_one_end_says_the_other_hears(server):
    one, other = ends(server, bytes(32))
    data = secrets.token_bytes(3_000_000)
    for first, second in ((one, other), (other, one)):
        first.settimeout(30.0)
        second.settimeout(30.0)
        sent, received = memoryview(data), bytearray()
        first.setblocking(False)
        while len(received) < len(data):
            with contextlib.suppress(BlockingIOError):
                sent = sent[first.send(sent) :] if sent else sent
            received += second.recv(1 << 16)
        assert received == data
        first.settimeout(30.0)
    one.sendall(b"the last words")
    one.shutdown(socket.SHUT_WR)
    assert read(other, 100) == b"the last words"  # and the end of what it says
    other.sendall(b"an answer")
    other.close()
    assert read(one, 100) == b"an answer"


def test_a_relay_that_cannot_start_says_why(monkeypatch):
    def full():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    raised = []

    def begin():
        try:
            Relay("127.0.0.1")
        except OSError as error:
            raised.append(error.errno)

    monkeypatch.setattr("asyncio.events.new_event_loop", full)
    beginning = threading.Thread(target=begin, daemon=True)
    beginning.start()
    beginning.join(10)
    assert raised == [errno.EMFILE]


def test_pairs_with_other_tokens_are_kept_apart(server):
    tokens = [bytes([i]) * 32 for i in range(8)]
    waiting = [reach(server.address, WAIT, token, 10.0) for token in tokens]
    connecting = [reach(server.address, CONNECT, token, 10.0) for token in reversed(tokens)]
    for connection, token in zip(connecting, reversed(tokens), strict=True):
        await_other(connection, 10.0)
        connection.sendall(token)
    for connection, token in zip(waiting, tokens, strict=True):
        await_other(connection, 10.0)
        assert read(connection, 32) == token


def test_one_that_has_hung_up_is_not_joined(server):
    gone = reach(server.address, WAIT, bytes(32), 10.0)
    wait_until(lambda: server._waiting, "the relay's notice")
    gone.close()
    wait_until(lambda: not server._waiting, "the relay's notice")
    waiting, connecting = ends(server, bytes(32))
    connecting.sendall(b"x")
    assert read(waiting, 1) == b"x"


def test_those_that_say_something_else_are_sent_away(server):
    for said in (b"GET / HTTP/1.1\r\n\r\n".ljust(41), b"thinwire!" + bytes(32), b"thinwire"):
        with socket.create_connection(server.address) as outsider:
            outsider.sendall(said)
            outsider.shutdown(socket.SHUT_WR)
            assert outsider.recv(1) == b""
    impatient = reach(server.address, WAIT, bytes(32), 10.0)
    impatient.sendall(b"something before it was joined")
    assert impatient.recv(1) == b""


def test_a_flood_of_connections_is_turned_away(server):
    """Those that wait for another are bounded; joined ones go on meanwhile."""
    one, other = ends(server, bytes(32))
    flood = [socket.create_connection(server.address, 60) for _ in range(3 * MAX_UNPAIRED)]
    assert [connection.recv(1) for connection in flood[2 * MAX_UNPAIRED :]] == [b""] * MAX_UNPAIRED
    wait_until(lambda: server._unpaired["127.0.0.1"] <= MAX_UNPAIRED, "the turning away")
    wait_until(lambda: len(server._tasks) <= MAX_UNPAIRED + 4, "the end of what turned them away")
    one.sendall(b"still here")
    assert read(other, 10) == b"still here"
    for connection in flood:
        connection.close()
    wait_until(lambda: server._unpaired["127.0.0.1"] == 0, "the end of the flood")
    for connection in ends(server, b"x" * 32):
        connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_pairs_of_one_address_keep_no_other_out(monkeypatch, caplog):
    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 20)
    with Relay("127.0.0.1") as server, contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING, "thinwire"):
        for number in range(10):
            caller = socket.create_connection(server.address, 10, source_address=("127.0.0.2", 0))
            stack.enter_context(caller).sendall(HELLO.pack(MAGIC, (WAIT, CONNECT)[number % 2], bytes(32)))
            assert number % 2 == 0 or caller.recv(1) == JOINED
        with socket.create_connection(server.address, 10, source_address=("127.0.0.2", 0)) as one_more:
            assert one_more.recv(1) == b""
        for connection in ends(server, b"x" * 32):
            connection.close()
    assert len(caplog.messages) == 1 and "turned away 127.0.0.2, which has too many connections" in caplog.text


def test_a_relay_takes_no_more_than_it_has_descriptors_for(monkeypatch):
    resource = pytest.importorskip("resource")
    for soft, most in ((256, 128), (1024, 896), (1 << 20, 2048), (resource.RLIM_INFINITY, 2048)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, soft=soft: (soft, soft))
        with Relay("127.0.0.1") as server:
            assert server._max == most


def test_memory_is_bounded_when_a_receiver_is_slow(server):
    """The relay stops reading from who sends more than the other one takes."""
    one, other = ends(server, bytes(32))
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    one.settimeout(1.0)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 1 << 30:
            sent += one.send(bytes(1 << 16))
    assert sent < 1 << 26  # what both kernels and the relay keep
    other.close()


def test_it_tells_where_a_worker_comes_from(server):
    assert own_address_at(server.address) == "127.0.0.1"
    with socket.socket() as bound:  # so that nobody else listens there
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="the relay at 127.0.0.1"):
            own_address_at(bound.getsockname(), seconds=0.2)


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:65536", "host:-1", "host:8o"])
def test_addresses_are_checked(text):
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        parse_address(text)


# ---- who connects with whom ----


PUBLIC, SILENT = Contact("10.0.0.1", 5, "10.0.0.1", ""), Contact("10.0.0.2", 0, "10.0.0.2", "")
BEHIND, BESIDE = Contact("192.168.0.2", 5, "7.7.7.7", ""), Contact("192.168.0.3", 5, "7.7.7.7", "")
OTHER = Contact("192.168.0.2", 5, "8.8.8.8", "")


@pytest.mark.parametrize(
    "one, by, expected",
    [
        (PUBLIC, BEHIND, True),
        (PUBLIC, SILENT, True),
        (SILENT, PUBLIC, False),
        (BEHIND, PUBLIC, False),
        (BEHIND, OTHER, False),
        (BEHIND, BESIDE, True),  # behind the same NAT
        (BEHIND._replace(seen_as=""), PUBLIC._replace(seen_as=""), True),  # without a relay, nobody knows
    ],
)
def test_who_can_be_dialled(one, by, expected):
    assert one.is_reached_by(by) is expected


def works(comm, rounds: int) -> None:
    """Exchanges of several megabytes, with sums that are known."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for round in range(rounds):
        sent = torch.arange(500_000, dtype=torch.int32) + comm.rank + round
        received = torch.zeros_like(sent)
        handle = comm.exchange({right: sent}, {left: received})
        if comm.rank == 1 and round:
            for connection in connections():  # a cut of the line, to the relay too
                connection.shutdown(socket.SHUT_RDWR)
        handle.wait()
        assert torch.equal(received, sent - comm.rank + left), round
        assert float(comm.all_reduce(torch.ones(1)).wait()) == comm.size
    channel = comm.open_channel({left, right})
    channel.send(right, 5, sent)
    assert torch.equal(channel.receive([left]).payload.view(torch.int32), received)
    channel.close()


def worker(rank: int, listens: list[bool], folder: str, address: str) -> None:
    store = dist.FileStore(f"{folder}/store", len(listens))
    comm = TcpCommunicator.from_store(
        store, rank, len(listens), timeout_seconds=60.0, listens=listens[rank], relay=address or None
    )
    assert bool(listening()) is listens[rank]
    works(comm, 4)
    comm.close()


@engine
@pytest.mark.parametrize("listens", [[False, True], [True, False], [False, False], [False, True, False]], ids=str)
def test_workers_that_do_not_listen_take_part(tmp_path, server, listens):
    """Neither of two can be dialled: all goes through the relay. Connections are cut on the way, and made anew."""
    through = sum(listens) < len(listens) - 1
    address = f"127.0.0.1:{server.address[1]}" if through else ""
    with programs(worker, [(r, listens, str(tmp_path), address) for r in range(len(listens))], tmp_path) as started:
        for program in started:
            assert program.wait(400) == 0, program.stderr


@engine
def test_two_that_only_dial_out_need_a_relay(tmp_path):
    with programs(worker, [(rank, [False, False], str(tmp_path), "") for rank in range(2)], tmp_path) as started:
        for program in started:
            assert program.wait(400) == 1
            assert "ranks 0 and 1 can only dial out; name a relay that both reach" in program.stderr


@engine
def test_a_relay_that_is_not_there_is_named():
    with socket.socket() as bound:  # so that nobody else listens there
        bound.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(
            CommunicationError, match=f"rank 0: the relay at {at}: Connection refused; start `thinwire relay` there"
        ):
            TcpCommunicator.from_store(dist.HashStore(), 0, 2, timeout_seconds=2.0, relay=at)


def dies(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    comm = TcpCommunicator.from_store(store, rank, 2, timeout_seconds=600.0, listens=rank == 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError, match="rank 1 has died or hung up: its connections ended"):
        comm.all_reduce(torch.ones(1000)).wait()
    print("named")


@engine
def test_a_worker_that_dialled_out_and_died_is_named_long_before_the_limit(tmp_path):
    with programs(dies, [(rank, str(tmp_path)) for rank in range(2)], tmp_path) as started:
        assert started[0].wait(400) == 0, started[0].stderr
        assert started[0].stdout == "named\n"


def speaks(rank: int, folder: str, address: str, is_sealed: bool) -> None:
    store = dist.FileStore(f"{folder}/store-{is_sealed}", 2)
    credentials = Credentials(Path(folder) / f"worker{rank}") if is_sealed else None
    comm = TcpCommunicator.from_store(
        store, rank, 2, timeout_seconds=60.0, listens=False, relay=address, credentials=credentials
    )
    said = torch.frombuffer(bytearray(PATTERN * 1000), dtype=torch.uint8)
    heard = comm.all_gather(said).wait()
    assert torch.equal(heard[1 - rank], said)
    comm.close()


PATTERN = b"nobody but the workers of this run may read this. "


@engine
@pytest.mark.parametrize("is_sealed", [False, True])
def test_with_credentials_the_relay_can_read_nothing(tmp_path, server, monkeypatch, is_sealed):
    """What it forwards is recorded: without credentials, the message is in it."""
    passed = bytearray()

    class Recorder:
        def __init__(self, reader):
            self._reader = reader

        async def read(self, size: int) -> bytes:
            data = await self._reader.read(size)
            passed.extend(data)
            return data

    pump = relay._pump
    monkeypatch.setattr(relay, "_pump", lambda reader, writer: pump(Recorder(reader), writer))
    keys_of(tmp_path, "worker0", "worker1")
    address = f"127.0.0.1:{server.address[1]}"
    with programs(speaks, [(rank, str(tmp_path), address, is_sealed) for rank in range(2)], tmp_path) as started:
        for program in started:
            assert program.wait(400) == 0, program.stderr
    assert len(passed) > 2 * 1000 * len(PATTERN)
    assert (PATTERN in passed) is not is_sealed


# ---- the commands ----


@engine
def test_training_goes_through_the_relay(tmp_path, server):
    """Neither worker listens, and the averager's communicator meets over the run's."""
    address = f"127.0.0.1:{server.address[1]}"
    words = ["--workers", "2", "--max-steps", "3", "--no-listen", "--relay", address]
    ended = thinwire("train", "digits", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_the_command_forwards_until_ctrl_c(tmp_path):
    with programs(relay_command, [(["--bind", "127.0.0.1:0"],)], tmp_path) as (program,):
        program.wait_until(lambda: "the relay listens at 127.0.0.1:" in program.stderr, "the line")
        address = parse_address(program.stderr.split()[-1])
        assert own_address_at(address) == "127.0.0.1"
        program.send_signal(signal.SIGINT)
        program.wait(60)
        assert "KeyboardInterrupt" in program.stderr  # `thinwire` makes it exit code 130


@pytest.mark.parametrize("bind, message", [("nowhere", "expected HOST:PORT"), ("203.0.113.7:1", "cannot listen at")])
def test_a_wrong_address_of_the_command_is_one_line(bind, message):
    with pytest.raises(ValueError, match=message):
        relay_command(["--bind", bind])
