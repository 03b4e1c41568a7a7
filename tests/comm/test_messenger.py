"""Messengers: messages of any worker to any other, and how their threads end."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.program import wait_until
from helpers.spawn import WORLDS, run_threads

from thinwire.comm.messenger import Messenger


def talks(comm):
    """Everyone sends three messages to everyone, and rank 0 says goodbye; returns what comes, in order, by peer."""
    heard = {peer: [] for peer in range(comm.size) if peer != comm.rank}
    messenger = Messenger(
        comm,
        400,
        lambda message: heard[message.source].append(message.payload.view(torch.float32).tolist()),
        lambda peer, reason: heard[peer].append(reason),
    )
    messenger.start()
    for count in range(3):
        for peer in heard:
            messenger.post(peer, 1, torch.full((count,), float(comm.rank)))
    wait_until(lambda: all(len(said) >= 3 for said in heard.values()), "all messages")
    comm.barrier()  # nothing is sent to those who have said goodbye
    if comm.rank == 0:
        messenger.say_goodbye()
    else:
        wait_until(lambda: len(heard[0]) == 4, "the goodbye")
    comm.barrier()
    messenger.close()
    return heard


@pytest.mark.parametrize("world", WORLDS)
def test_messages_come_in_order_and_a_goodbye_behind_them(world):
    expected = [[[float(rank)] * count for count in range(3)] for rank in range(3)]
    expected[0].append(None)
    for heard in WORLDS[world](3, talks):
        for peer, said in heard.items():
            assert said[: len(expected[peer])] == expected[peer]  # others may have hung up after the last barrier


def returns_without_closing(comm):
    messenger = Messenger(comm, 0, lambda message: None, lambda peer, reason: None)
    messenger.start()
    return messenger


def test_no_thread_receives_when_all_peers_are_lost():
    """It asked again and again without a pause, as long as something kept the messenger, such as a traceback."""
    before = set(threading.enumerate())
    messengers = run_threads(2, returns_without_closing)
    wait_until(lambda: len(set(threading.enumerate()) - before) == 2, "the end of the threads that receive")
    for messenger in messengers:
        messenger.close()
    assert set(threading.enumerate()) <= before
