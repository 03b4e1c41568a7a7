"""Channels and collectives against peers that do not know the secret, and against peers that lie about sizes."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import socket
import struct
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.program import wait_until
from helpers.spawn import WORLDS
from helpers.threads import failing_once

import thinwire as tw
from thinwire.average.mean.exchange import base
from thinwire.average.mean.exchange.sparse_reduce import SparseReduction
from thinwire.comm import CommunicationError
from thinwire.comm.addresses import own_address
from thinwire.comm.tcp.channel import HEADER, TcpChannel
from thinwire.comm.tcp.connections import AT_ONCE, MAX_GREETINGS, MAX_REFUSALS, Connections, Contact, Place
from thinwire.comm.tcp.endpoint import Meeting
from thinwire.comm.tcp.handshake import HELLO, greet, introduce, proof
from thinwire.comm.tls.connections import Refused

_engine = pytest.importorskip("thinwire.comm.tcp._engine")
SECRET, OTHER = b"s" * 32, b"o" * 32


# ---- who knows the secret ----


def open_pair(outsiders, is_over=lambda: True):
    """Two workers in threads open a channel and talk, while `outsiders(host, port)` connects to rank 0.

    They hang up when `is_over`; what rank 0 has still to say of callers then, it does not say.
    """
    addresses, ready, heard = [None, None], threading.Barrier(2, timeout=400), {}

    def worker(rank):
        def gather(own):
            addresses[rank] = own
            if rank == 0:
                outsiders(own[0], own[1])
            ready.wait()
            return addresses

        meeting = Meeting(rank, 2, gather, Place(*own_address()), 20.0)
        with contextlib.closing(TcpChannel(meeting, [1 - rank], noted, 1000)) as channel:
            channel.send(1 - rank, 5)
            heard[rank] = channel.receive([1 - rank]).kind
            wait_until(is_over, "the end of the outsiders")
            ready.wait()

    threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_outsiders_are_dropped_with_a_line_and_the_run_goes_on(monkeypatch, caplog):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    connections = []

    def outsiders(host, port):
        for said in (b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO.size), HELLO.pack(1, b"n" * 32, b"p" * 32)):
            connections.append(socket.create_connection((host, port)))
            connections[-1].sendall(said)
        # It knows the form of a greeting, and the secret of another run.
        knows_another = socket.create_connection((host, port))
        connections.append(knows_another)
        knows_another.sendall(HELLO.pack(1, b"n" * 32, proof(OTHER, b"connect", 1, 0, b"?" * 64)))

        socket.create_connection((host, port)).close()  # as a worker that ends may, and is no outsider

    with caplog.at_level(logging.WARNING, "thinwire"):
        assert open_pair(outsiders, lambda: len(caplog.messages) == 3) == {0: 5, 1: 5}
    lines = caplog.messages
    assert len(lines) == len(connections) == 3
    assert all("\n" not in line and "rank 0 closed a connection from 127.0.0.1:" in line for line in lines)


def test_a_connection_that_is_reset_before_a_word_has_hung_up(monkeypatch, caplog):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def outsiders(host, port):
        caller = socket.create_connection((host, port))
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # `close` resets it
        caller.close()

    with caplog.at_level(logging.DEBUG, "thinwire"):
        assert open_pair(outsiders, lambda: "which has hung up" in caplog.text) == {0: 5, 1: 5}
    assert [record.levelname for record in caplog.records if "which has hung up" in record.message] == ["DEBUG"]


def test_a_crowd_of_silent_outsiders_is_sent_away(monkeypatch, caplog):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    connections = []
    crowd = MAX_GREETINGS + AT_ONCE + 20
    with caplog.at_level(logging.WARNING, "thinwire"):
        heard = open_pair(
            lambda *address: connections.extend(socket.create_connection(address) for _ in range(crowd)),
            lambda: sum("was silent for too long" in line for line in caplog.messages) >= 19,
        )
    assert heard == {0: 5, 1: 5}


def test_in_a_flood_of_outsiders_a_line_a_second_is_logged(caplog):
    connections = Connections(0, [1], 20.0, Place(socket.AF_INET, "127.0.0.1"))
    connections._secret = SECRET
    with caplog.at_level(logging.WARNING, "thinwire"):
        for _ in range(3 * MAX_REFUSALS):
            ours, theirs = socket.socketpair()
            with theirs:
                theirs.sendall(bytes(HELLO.size))
                connections._greeting[ours] = "10.0.0.9"
                connections._greet(ours, "10.0.0.9")
    connections.close()
    assert MAX_REFUSALS <= len(caplog.messages) < 2 * MAX_REFUSALS
    assert "which does not know the run's secret" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_a_flood_from_one_address_keeps_no_other_out(monkeypatch, caplog):
    """An old caller of another address stays, though the flood's callers came later."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    doors = []

    def strangers(*address):
        doors.append(socket.create_connection(address))
        for _ in range(MAX_GREETINGS + AT_ONCE + 20):
            doors.append(socket.create_connection(address, source_address=("127.0.0.2", 0)))

    def turned_away():
        return [line for line in caplog.messages if "was silent for too long" in line]

    with caplog.at_level(logging.WARNING, "thinwire"):
        assert open_pair(strangers, lambda: len(turned_away()) >= 19) == {0: 5, 1: 5}
    assert all("from 127.0.0.2:" in line for line in turned_away())


def test_a_worker_that_can_start_no_thread_for_a_moment_goes_on_to_listen(monkeypatch, caplog):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start = failing_once(monkeypatch, "thinwire-greet")
    with caplog.at_level(logging.WARNING, "thinwire"):
        assert open_pair(lambda *address: None) == {0: 5, 1: 5}
    assert not start and "cannot take a connection from 127.0.0.1:" in caplog.text


def refused_as_rank_1(connections, host, caplog):
    """Rank 1 introduces itself from a host to rank 0, which closes the connection."""
    connections._secret = SECRET
    ours, theirs = socket.socketpair()
    connections._greeting[ours] = host
    greeting = threading.Thread(target=connections._greet, args=(ours, host))
    with caplog.at_level(logging.WARNING, "thinwire"), theirs:
        greeting.start()
        with pytest.raises(ConnectionResetError):
            introduce(theirs, 1, 0, SECRET, time.monotonic() + 20)
        greeting.join()
    connections.close()


def test_a_late_connection_of_a_worker_that_has_ended_is_no_outsider(caplog):
    connections = Connections(0, [1], 20.0, Place(socket.AF_INET, "127.0.0.1"))
    connections._lost.add(1)
    refused_as_rank_1(connections, "10.0.0.9", caplog)
    assert caplog.messages == []


def test_a_worker_has_no_more_connections_with_a_peer_than_a_line_takes(caplog):
    """A worker that kept connecting took all descriptors of another one."""
    connections = Connections(0, [1], 20.0, Place(socket.AF_INET, "127.0.0.1"))
    connections._engine = mock.Mock(counts=lambda peer: SimpleNamespace(connections=256))
    refused_as_rank_1(connections, "10.0.0.9", caplog)
    assert "rank 0 closed a connection from 10.0.0.9, which is rank 1, which has 256 connections already" in caplog.text
    connections._engine.attach.assert_not_called()


def test_a_process_does_not_wait_for_a_peer_to_connect_again(monkeypatch):
    """The thread that gives it a few seconds was none of those that end with the process."""
    timers, reported = [], [[(_engine.ENDED, 0, 0)], [(_engine.FAILED, 0, 0)]]
    monkeypatch.setattr(threading.Timer, "start", lambda timer: timers.append(timer))
    engine = mock.Mock(events=lambda seconds: reported.pop(0))
    connections = Connections(1, [0], 20.0, Place(socket.AF_INET, "127.0.0.1"))
    connections._engine, connections._contacts = engine, [Contact("127.0.0.1", 0, "", ""), connections.contact]
    connections._watch()
    connections.close()
    assert [timer.daemon for timer in timers] == [True]


def test_why_a_peer_was_given_up_is_known_also_to_an_operation_that_has_failed_by_itself():
    """Both have the same time limit: where the engine was first by a moment, nobody said that the peer cannot be reached."""
    error, reported = (
        OSError(errno.EHOSTUNREACH, "No route to host"),
        [[(_engine.GONE, 0, 0)], [(_engine.FAILED, 0, 0)]],
    )
    connections = Connections(1, [0], 20.0, Place(socket.AF_INET, "127.0.0.1"))
    connections._engine = mock.Mock(
        events=lambda seconds: reported.pop(0), counts=lambda peer: SimpleNamespace(connections=0)
    )
    connections._contacts = [Contact("127.0.0.1", 7, "", ""), connections.contact]
    connections._failed[0] = error
    connections._give_up(0, error)
    assert connections.trouble(0) == "rank 0 cannot be reached at 127.0.0.1:7: No route to host"
    connections._watch()  # it has come back, and ended
    assert connections.trouble(0) == ""
    connections.close()


class SlowSession:
    """A session with which the TLS handshake, in `sendall`, takes 0.2 seconds; it notes the time limit of the answer."""

    seconds = waits = 0.0

    def settimeout(self, seconds):
        self.seconds = seconds

    def sendall(self, data):
        time.sleep(0.2)

    def recv(self, size):
        self.waits = self.seconds
        raise TimeoutError("timed out")


def test_the_time_limit_of_a_greeting_holds_for_all_of_it():
    session = SlowSession()
    with pytest.raises(TimeoutError):
        greet(session, 0, SECRET, time.monotonic() + 1.0)
    assert session.waits <= 0.8


def test_a_recorded_proof_is_of_no_use_and_a_listener_must_know_the_secret_too():
    soon = time.monotonic() + 10
    (ours, line), (away, theirs) = socket.socketpair(), socket.socketpair()
    visitor = threading.Thread(target=introduce, args=(theirs, 1, 0, SECRET, soon), daemon=True)
    visitor.start()
    with ThreadPoolExecutor() as pool:
        greeted = pool.submit(greet, ours, 0, SECRET, soon)
        away.sendall(line.recv(32))
        recorded = away.recv(HELLO.size)
        line.sendall(recorded)
        peer, answer = greeted.result()
    away.sendall(answer)
    visitor.join(10)
    assert peer == 1 and not visitor.is_alive()

    door, replayer = socket.socketpair()
    replayer.sendall(recorded)
    with pytest.raises(Refused, match="does not know the run's secret"):
        greet(door, 0, SECRET, soon)

    impostor, visitor = socket.socketpair()
    impostor.sendall(b"n" * 32 + b"p" * 32)
    with pytest.raises(ConnectionError, match="does not know the run's secret"):
        introduce(visitor, 1, 0, SECRET, soon)


def listening_addresses():
    """Addresses on which this process listens, from Linux's tables."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(descriptor.readlink()))
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.append(fields[1].split(":")[0])
    return found


def test_a_channel_listens_on_the_chosen_interface_only(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before, during = listening_addresses(), []
    open_pair(lambda *_: during.extend(listening_addresses()))
    new = list(during)
    for address in before:
        new.remove(address)
    assert new
    assert set(new) == {"0100007F"}  # 127.0.0.1


# ---- sizes that a sender chooses ----


DATA, BYE = 0x74570001, 0x74570005  # as in native/wire/frame.hpp


def frame(number, said, total=None):
    return struct.pack("<IIQQQ", DATA, len(said), number, total or len(said), 0) + said


@contextlib.contextmanager
def channel_to(timeout_seconds=5.0):
    """A channel of rank 0, and the connection of a rank 1 that knows the secret, and says what it likes."""
    theirs = socket.socket()

    def connect(host, port, secret):
        theirs.connect((host, port))
        introduce(theirs, 1, 0, bytes.fromhex(secret), time.monotonic() + 20)
        theirs.settimeout(None)
        theirs.sendall(frame(0, b"x"))

    def gather(own):
        host, port, *_, secret = own
        threading.Thread(target=connect, args=(host, port, secret), daemon=True).start()
        return [own, ["127.0.0.1", 1, "", "", ""]]

    meeting = Meeting(0, 2, gather, Place(socket.AF_INET, "127.0.0.1"), timeout_seconds)
    with contextlib.closing(TcpChannel(meeting, [1], noted, 1000)) as channel, theirs:
        yield channel, theirs


def noted(*_):
    """Count nothing."""


@pytest.mark.parametrize(("num_bytes", "kind"), [(1001, 1), (2**60, 7), (-1, 1), (5, 0)])
def test_a_header_chooses_no_memory(num_bytes, kind):
    with channel_to(timeout_seconds=60.0) as (channel, peer):
        peer.sendall(frame(1, HEADER.pack(num_bytes, kind)))
        began = time.monotonic()
        with pytest.raises(
            CommunicationError, match=rf"rank 1 announced .*{kind} and {num_bytes} bytes, expected at most"
        ):
            channel.receive([1])
        assert time.monotonic() - began < 30  # not the time limit
        with pytest.raises(ValueError, match="exceeds the channel's limit of 1000"):
            channel.send(1, 1, torch.zeros(251))


@pytest.mark.parametrize(
    "said", [frame(1, bytes(8)), frame(1, bytes(10)), frame(1, HEADER.pack(900, 1)) + frame(2, bytes(901))]
)
def test_a_message_of_another_size_than_was_announced_is_refused(said):
    with channel_to(timeout_seconds=60.0) as (channel, peer):
        peer.sendall(said)
        with pytest.raises(CommunicationError, match=r"rank 1 sent a message of \d+ bytes, expected (9|900);"):
            channel.receive([1])


def test_a_peer_that_trickles_does_not_prolong_the_time_limit():
    with channel_to(timeout_seconds=1.0) as (channel, peer):

        def trickle():
            with contextlib.suppress(OSError):
                peer.sendall(frame(1, HEADER.pack(1000, 1)))
                for byte in frame(2, bytes(1000)):
                    peer.sendall(bytes([byte]))
                    time.sleep(0.1)

        threading.Thread(target=trickle, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(CommunicationError, match="receive from rank 1 took more than 1 seconds"):
            channel.receive([1])
        assert time.monotonic() - began < 50  # less than half of what the peer takes


def test_what_a_lost_peer_announced_takes_no_memory():
    with channel_to(timeout_seconds=60.0) as (channel, peer):
        peer.sendall(frame(1, HEADER.pack(900, 1)))
        wait_until(
            lambda: channel.receive([1], timeout_seconds=0.1) is None and channel._expected[1].memory.numel() == 900,
            "the announcement",
        )
        memory = weakref.ref(channel._expected[1].memory)
        peer.sendall(struct.pack("<IIQQQ", BYE, 0, 0, 0, 0))
        for _ in range(2):
            with pytest.raises(CommunicationError, match="rank 1 has hung up"):
                channel.receive([1])
        channel._endpoint._forget()
        gc.collect()
        assert memory() is None


def gathers_too_much(comm):
    try:
        comm.all_gather(torch.zeros(5 + 20 * comm.rank, dtype=torch.uint8), variable=True, limit=10).wait()
    except CommunicationError as error:
        return str(error)


@pytest.mark.parametrize("world", WORLDS)
def test_an_announced_size_has_a_limit(world):
    for said in WORLDS[world](2, gathers_too_much):
        assert "rank 1 announced 25 elements, expected 0 to 10" in said


def test_text_that_is_no_json_names_its_sender(monkeypatch):
    def worker(comm):
        if comm.rank == 1:
            monkeypatch.setattr("thinwire.comm.base.json.dumps", lambda obj: "[" * 100_000)
        comm.barrier()
        return comm.gather_objects([1])

    with pytest.raises(CommunicationError, match="rank 0 sent 100000 bytes that are no JSON"):
        tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize("lie", [(0, 2**30), (0, -1), (1, 2**30), (1, -5)])
def test_headers_of_a_sparse_all_reduce_choose_no_memory(lie, monkeypatch):
    place, value = lie
    original = SparseReduction._encode

    def lying(self):
        selected, headers, messages = original(self)
        if self.team.rank == 1:
            headers[0] = headers[0].clone()
            headers[0][place] = value
        return selected, headers, messages

    monkeypatch.setattr(SparseReduction, "_encode", lying)

    def worker(comm):
        averager = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), exchange="sparse_reduce")
        gradients = [("w", torch.randn(50, 40))]
        state = averager.init(gradients, comm)
        averager.step(state, gradients, comm).wait()

    with pytest.raises(ValueError, match=r"rank 0: worker 1 of 2 announced .*expected at most"):
        tw.LocalWorld(2).run(worker)


def test_a_message_shorter_than_its_dense_part_is_refused():
    with pytest.raises(ValueError, match="begins with 3 dense elements, 12 bytes, got 4 bytes"):
        base.unpack(torch.zeros(4, dtype=torch.uint8), 3)
