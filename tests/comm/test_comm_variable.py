"""all_gather of tensors whose sizes nobody else knows: on threads and on real processes over Gloo."""

from __future__ import annotations

import pytest
import torch
from helpers.spawn import WORLDS, spawn

import thinwire as tw
from thinwire.comm import CommunicationError, LocalWorld


@pytest.fixture(params=WORLDS)
def run(request):
    return WORLDS[request.param]


def own(rank: int, round: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Of a size that depends on both; some are empty."""
    return (torch.arange((rank * 37 + round * 11) % 5 * 1000) % 97 + rank).to(dtype)


def gathers(comm) -> None:
    for dtype in (torch.uint8, torch.float32, torch.int64):
        for round in range(5):
            mine = own(comm.rank, round, dtype)
            gathered = comm.all_gather(mine, variable=True).wait()
            assert gathered[comm.rank].data_ptr() == mine.data_ptr()
            assert len(gathered) == comm.size
            for rank, part in enumerate(gathered):
                assert part.dtype == dtype
                assert torch.equal(part, own(rank, round, dtype))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_everyone_gets_everything(run, size):
    run(size, gathers)


def many_in_flight(comm) -> None:
    """Mixed with other operations, all begun before any is waited for, and waited for backwards."""
    handles = []
    for round in range(20):
        handles.append((round, comm.all_gather(own(comm.rank, round), variable=True)))
        handles.append((None, comm.all_reduce(torch.ones(10))))
    for round, handle in reversed(handles):
        result = handle.wait()
        if round is None:
            assert torch.equal(result, torch.full((10,), float(comm.size)))
        else:
            assert all(torch.equal(part, own(rank, round)) for rank, part in enumerate(result))


def test_many_in_flight(run):
    run(3, many_in_flight)


def ledger(comm):
    handle = comm.all_gather(torch.zeros(100 * comm.rank), variable=True)
    handle.wait()
    handle.wait()  # counts once
    traffic = comm.ledger.collectives["all_gather"]
    return traffic.calls, traffic.messages, traffic.bytes_sent, traffic.bytes_received


def test_the_ledger_counts_sizes_and_payloads(run):
    size = 3
    for rank, (calls, messages, sent, received) in enumerate(run(size, ledger)):
        assert calls == 1
        assert messages == (size - 1) * (2 if rank else 1)
        assert sent == (size - 1) * (8 + 400 * rank)
        assert received == 8 * (size - 1) + sum(400 * r for r in range(size) if r != rank)


def dies(comm) -> str:
    comm.barrier()
    if comm.rank == 1:
        return ""  # leaves without a word
    with pytest.raises(CommunicationError, match="all_gather failed") as caught:
        comm.all_gather(torch.zeros(10), variable=True).wait()
    return str(caught.value)


def test_a_peer_that_left_is_an_error():
    assert LocalWorld(3).run(dies)[0].startswith("rank 0: all_gather failed")


def test_mistakes():
    with LocalWorld(1).run(lambda comm: comm)[0] as comm:
        with pytest.raises(ValueError, match="Leave one of them out"):
            comm.all_gather(torch.zeros(3), sizes=[3], variable=True)
        with pytest.raises(ValueError, match="1-D"):
            comm.all_gather(torch.zeros(3, 2), variable=True)


def train(comm, averager) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(comm.rank)
    tensors = [("w", torch.randn(40, 30, generator=generator)), ("b", torch.randn(7, generator=generator))]
    state = averager.init(tensors, comm)
    handles = [averager.step(state, [pair], comm) for pair in tensors]
    for handle in handles:
        handle.wait()
    averager.commit(state)
    return [t for _, t in tensors]


@pytest.mark.parametrize("codec", [tw.Threshold(1.0), tw.AdaptiveThreshold(0.5), tw.TopK(0.1, sample=0.1)], ids=repr)
def test_mean_over_processes_equals_mean_over_threads(codec):
    averager = tw.Mean(codec, tw.ErrorFeedback(), exchange="all_gather")
    threads, processes = LocalWorld(3).run(train, averager), spawn(3, train, averager)
    for a, b in zip(threads, processes, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
