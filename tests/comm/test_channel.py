"""Channels: messages in no common order, in threads and in processes; deaths, silence and strangers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers.spawn import WORLDS, run_threads, spawn

from thinwire.comm import CommunicationError, connect
from thinwire.comm.connect import own_address


def everyone(comm):
    return [peer for peer in range(comm.size) if peer != comm.rank]


def talk(comm):
    """Everyone sends three messages of different sizes to everyone, and receives whatever comes."""
    channel, heard = comm.open_channel(everyone(comm)), []
    for count in range(3):
        for peer in everyone(comm):
            channel.send(peer, 7 + count, torch.full((count * 100_000,), float(comm.rank)))
    while len(heard) < 3 * (comm.size - 1):
        heard.append(channel.receive(everyone(comm)))
    comm.barrier()
    ledger = comm.ledger.snapshot().collectives["channel"]
    channel.close()
    return [(m.source, m.kind, m.payload.view(torch.float32).tolist()[:1], m.payload.numel()) for m in heard], ledger


@pytest.mark.parametrize("world", WORLDS)
def test_messages_arrive_whole_and_in_the_order_of_each_sender(world):
    for rank, (heard, ledger) in enumerate(WORLDS[world](3, talk)):
        for peer in {0, 1, 2} - {rank}:
            expected = [(peer, 7 + c, [float(peer)] * (c > 0), 400_000 * c) for c in range(3)]
            assert [m for m in heard if m[0] == peer] == expected
        num_bytes = 2 * (3 * 9 + 1_200_000)
        assert (ledger.messages, ledger.bytes_sent, ledger.bytes_received) == (6, num_bytes, num_bytes)


def choose(comm):
    """Who is not named is not heard, and not lost; a wait ends in time, and by waking."""
    channel = comm.open_channel(everyone(comm))
    if comm.rank:
        channel.send(0, comm.rank)
        comm.barrier()
        return None
    kinds = [channel.receive([2]).kind, channel.receive([1, 2]).kind]
    began = time.monotonic()
    nothing = [channel.receive([1, 2], timeout_seconds=0.2)]
    waited = time.monotonic() - began
    channel.wake()
    nothing.append(channel.receive([1, 2]))
    threading.Timer(0.2, channel.wake).start()
    nothing.append(channel.receive([1, 2]))
    comm.barrier()
    return kinds, nothing, waited


@pytest.mark.parametrize("world", WORLDS)
def test_sources_timeout_and_waking(world):
    kinds, nothing, waited = WORLDS[world](3, choose)[0]
    assert kinds == [2, 1]
    assert nothing == [None] * 3
    assert 0.19 < waited < 5


def alive_but_quiet(comm):
    """Longer than the time limit nothing is said; both listen, and so give signs of life."""
    channel = comm.open_channel(everyone(comm))
    assert channel.receive(everyone(comm), timeout_seconds=5.0) is None
    comm.barrier()
    traffic = comm.ledger.collectives["channel"]
    return traffic.messages, traffic.bytes_sent


def test_who_listens_is_alive_and_the_ledger_counts_the_signs():
    for messages, bytes_sent in spawn(2, alive_but_quiet, comm_timeout_seconds=2):
        assert 3 <= messages <= 11  # ten, on a machine that is not busy
        assert bytes_sent == 9 * messages


def with_a_failing_peer(comm, how):
    channel = comm.open_channel(everyone(comm))
    comm.barrier()
    if comm.rank == 2 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 2 and how == "closed":
        channel.close()
    if comm.rank == 2:
        time.sleep(6)
        return None
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        if how == "sending":
            channel.send(2, 1, torch.zeros(50_000_000))
        channel.receive([2])
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "message", "at_least", "at_most"),
    [
        ("killed", r"rank 2 has hung up or died", 0.0, 20.0),
        ("closed", r"rank 2 has hung up or died", 0.0, 20.0),
        ("silent", r"nothing came from rank 2 in 2 seconds", 2.0, 20.0),
        ("sending", r"send to rank 2 took more than 2 seconds", 2.0, 20.0),
    ],
)
def test_a_peer_that_fails_is_named(how, message, at_least, at_most):
    results = spawn(3, with_a_failing_peer, how, comm_timeout_seconds=2, return_errors=True)
    for text, seconds in results[:2]:
        assert message in text
        assert at_least <= seconds < at_most


def leaves(comm):
    channel = comm.open_channel(everyone(comm))
    if comm.rank:
        channel.receive([0])


def test_a_thread_that_has_returned_is_named():
    with pytest.raises(CommunicationError, match="rank 0 has hung up"):
        run_threads(2, leaves)


def knocked_at(comm):
    """A stranger connects first and says nothing that we know."""
    if comm.rank == 1:
        original = connect._connect

        def after_a_stranger(rank, peer, told, *others):
            stranger = socket.create_connection(told[:2])
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b" " * 20)
            return original(rank, peer, told, *others)

        connect._connect = after_a_stranger
    channel = comm.open_channel(everyone(comm))
    channel.send(1 - comm.rank, 5)
    return channel.receive(everyone(comm)).kind


def test_strangers_are_turned_away():
    assert spawn(2, knocked_at) == [5, 5]


def test_the_interface_is_chosen_as_for_gloo(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address()[1] == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_address()[1] in ("127.0.0.1", "::1")


def names_itself(comm):
    comm.open_channel([comm.rank])


def test_a_channel_to_oneself_is_a_mistake():
    with pytest.raises(ValueError, match="open_channel has this worker itself in peers"):
        run_threads(2, names_itself)


def open_among(strangers, timeout_seconds):
    """Open a channel of two workers in threads while `strangers(port)` bothers rank 0; how long that took, or the error."""
    barrier, addresses = threading.Barrier(2), [None, None]
    ended = threading.Event()

    def gather(rank, own):
        addresses[rank] = own
        if rank == 0:
            threading.Thread(target=strangers, args=(own[0], own[1], ended), daemon=True).start()
            time.sleep(0.3)
        barrier.wait()
        return addresses

    def worker(rank):
        began = time.monotonic()
        try:
            with contextlib.closing(
                connect.open_sockets(rank, [1 - rank], partial(gather, rank), timeout_seconds, noted, 1000)
            ):
                return time.monotonic() - began
        except CommunicationError as error:
            return str(error), time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(worker, range(2)))
    ended.set()
    return found


def noted(*_):
    """Count nothing."""


def idle(host, port, ended):
    connections = [socket.create_connection((host, port)) for _ in range(3)]
    ended.wait(60)
    [connection.close() for connection in connections]


def trickling(host, port, ended):
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        connections = [stack.enter_context(socket.create_connection((host, port))) for _ in range(3)]
        while not ended.wait(0.2):
            for connection in connections:
                connection.sendall(b"x")


@pytest.mark.parametrize("strangers", [idle, trickling])
def test_strangers_who_are_slow_or_silent_delay_nobody(strangers, monkeypatch):
    """They were read one after the other, 5 seconds each."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    took = open_among(strangers, 30.0)
    assert max(took) < 12.0, took


@pytest.mark.parametrize("strangers", [idle, trickling])
def test_the_deadline_holds_whatever_strangers_do(strangers, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(connect, "_connect", lambda *_: (socket.socket(), None))  # rank 1 never comes
    (said, took), _ = open_among(strangers, 2.0)
    assert "rank 0: ranks [1] did not connect" in said
    assert took < 12.0
