"""Channels: messages in no common order, in threads and in processes; deaths, silence and outsiders."""

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
from helpers.program import wait_until
from helpers.spawn import WORLDS, retire, run_tcp, run_threads, spawn
from helpers.traffic import connections

from thinwire.comm import CommunicationError
from thinwire.comm.addresses import own_address
from thinwire.comm.tcp.channel import TcpChannel
from thinwire.comm.tcp.connections import Place
from thinwire.comm.tcp.endpoint import Meeting


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
    assert 0.19 < waited < 30  # half of the time limit


def alive_but_quiet(comm):
    """For longer than the time limit, rank 1 says nothing, and does not even listen."""
    channel = comm.open_channel(everyone(comm))
    if comm.rank == 1:
        time.sleep(5.0)
    channel.send(1 - comm.rank, 5)
    return channel.receive(everyone(comm)).kind


def test_who_says_nothing_is_alive():
    assert spawn(2, alive_but_quiet, comm_timeout_seconds=2) == [5, 5]


def with_a_failing_peer(comm, how, folder):
    """Rank 2 fails, and the others name it, each time that they ask; then they talk with each other."""
    channel, over, pid = comm.open_channel(everyone(comm)), folder / "over", folder / "pid"
    if comm.rank == 2:
        pid.write_text(str(os.getpid()))
    comm.barrier()
    if comm.rank == 2:
        if how == "closed":
            channel.close()
        if how in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        wait_until(over.exists, "the others' end")
        return None
    try:
        return names_rank_2(comm, channel, how)
    finally:
        over.touch()  # the other one has got as far, for it has answered
        if how == "stopped":
            os.kill(int(pid.read_text()), signal.SIGCONT)


def names_rank_2(comm, channel, how):
    with pytest.raises(CommunicationError) as caught:
        if how == "busy":
            channel.send(2, 1, torch.zeros(25_000_000))
        channel.receive([2])
    with pytest.raises(CommunicationError, match="rank 2"):
        channel.send(2, 1)
    for _ in range(2):
        with pytest.raises(CommunicationError, match="rank 2"):
            channel.receive([2])
    other = 1 - comm.rank
    channel.send(other, 6, torch.full((100_000,), float(comm.rank)))
    assert channel.receive([other]).payload.view(torch.float32).unique().tolist() == [float(other)]
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "message", "limit"),
    [
        ("killed", "rank 2 has died or hung up", 60),
        ("closed", "hung up", 60),
        ("stopped", "nothing came from rank 2 in 5 seconds", 5),
        ("busy", "nothing could be sent to rank 2 in 5 seconds", 5),
    ],
)
def test_a_peer_that_fails_is_named_and_lost_alone(how, message, limit, tmp_path):
    for said in spawn(3, with_a_failing_peer, how, tmp_path, comm_timeout_seconds=limit, return_errors=True)[:2]:
        assert message in str(said)


def last_words(comm):
    """Rank 1 sends and closes; rank 0 begins to receive only then, and hears all of it before the error."""
    channel = comm.open_channel(everyone(comm))
    if comm.rank == 1:
        for count in range(3):
            channel.send(0, 7 + count, torch.full((count * 500_000,), float(count)))
        channel.close()
    comm.barrier()
    if comm.rank == 1:
        return None
    heard = [channel.receive([1]) for _ in range(3)]
    with pytest.raises(CommunicationError, match="rank 1 .*hung up"):
        channel.receive([1])
    return [(m.kind, m.payload.view(torch.float32).unique().tolist()) for m in heard]


def test_last_words_come_before_the_error():
    assert spawn(2, last_words)[0] == [(7, []), (8, [1.0]), (9, [2.0])]


def loses_its_lines(comm):
    """In the midst of messages, both ways at once, rank 1 shuts down all connections of its process, again and again."""
    retire()
    other, heard = 1 - comm.rank, []
    channel = comm.open_channel([other])
    for count in range(20):
        channel.send(other, 1 + count, torch.full((300_000,), float(count)))
        if comm.rank == 1 and count % 4 == 3:
            for connection in connections():
                connection.shutdown(socket.SHUT_RDWR)
        heard.append(channel.receive([other]))
    channel.close()
    return [(m.kind, m.payload.view(torch.float32).unique().tolist()) for m in heard]


def test_a_line_that_is_cut_is_no_error():
    assert run_tcp(2, loses_its_lines) == [[(1 + count, [float(count)]) for count in range(20)]] * 2


def leaves(comm):
    channel = comm.open_channel(everyone(comm))
    if comm.rank:
        channel.receive([0])


def test_a_thread_that_has_returned_is_named():
    with pytest.raises(CommunicationError, match="rank 0 has hung up"):
        run_threads(2, leaves)


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


def open_among(outsiders, timeout_seconds, rank_1_comes=True):
    """Two workers in threads talk while `outsiders(port)` connects to rank 0; how long that took, or the error."""
    barrier, addresses = threading.Barrier(2), [None, None]
    ended = threading.Event()

    def gather(rank, own):
        addresses[rank] = own
        if rank == 0:
            threading.Thread(target=outsiders, args=(own[0], own[1], ended), daemon=True).start()
            time.sleep(0.3)
        barrier.wait()
        return addresses

    def worker(rank):
        began = time.monotonic()
        place = Place(*own_address())
        if rank == 1 and not rank_1_comes:
            return gather(rank, [place.host, 1, "", "", ""])
        try:
            with contextlib.closing(
                TcpChannel(Meeting(rank, 2, partial(gather, rank), place, timeout_seconds), [1 - rank], noted, 1000)
            ):
                barrier.wait()
                return time.monotonic() - began
        except CommunicationError as error:
            return str(error), time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(worker, range(2)))
    ended.set()
    return found


NUM_OUTSIDERS = 20


def noted(*_):
    """Count nothing."""


def idle(host, port, ended):
    connections = [socket.create_connection((host, port)) for _ in range(NUM_OUTSIDERS)]
    ended.wait(400)
    [connection.close() for connection in connections]


def trickling(host, port, ended):
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        connections = [stack.enter_context(socket.create_connection((host, port))) for _ in range(NUM_OUTSIDERS)]
        while not ended.wait(0.2):
            for connection in connections:
                connection.sendall(b"x")


@pytest.mark.parametrize("outsiders", [idle, trickling])
def test_outsiders_who_are_slow_or_silent_delay_nobody(outsiders, monkeypatch):
    """They were read one after the other, 5 seconds each."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    took = open_among(outsiders, 150.0)
    assert max(took) < 60.0, took


@pytest.mark.parametrize("outsiders", [idle, trickling])
def test_the_deadline_holds_whatever_outsiders_do(outsiders, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (said, took), _ = open_among(outsiders, 2.0, rank_1_comes=False)
    assert "nothing came from rank 1 in 2 seconds" in said
    assert took < 60.0
