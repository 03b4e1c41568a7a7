"""Measure a link between two workers: ping-pong over the communicator."""

from __future__ import annotations

import time
from statistics import median

import torch

from ..algorithm import require
from ..comm import Communicator
from ..network import Link

_LARGE_BYTES = 4_000_000


def measure_link(comm: Communicator, other: int, repetitions: int = 15, large_bytes: int = _LARGE_BYTES) -> Link:
    """The link between rank 0 and rank `other`. All workers call it and get the same.

    Latency is half the median round trip of one byte. The rate follows from the median round trip of `large_bytes`.

    Raises:
        ValueError: `other` is no other worker.

    Example:
        >>> import thinwire as tw
        >>> links = tw.LocalWorld(2).run(lambda comm: measure_link(comm, 1, 3, 1000))
        >>> links[0] == links[1] and links[0].bytes_per_second > 0
        True
    """
    require(
        0 < other < comm.size, f"rank {comm.rank}: measure_link needs a rank from 1 to {comm.size - 1}, got {other}"
    )
    comm.barrier()
    seconds = [_ping_pong(comm, other, num_bytes, repetitions) for num_bytes in (1, large_bytes)]
    small, large = comm.gather_objects(seconds)[0]
    return Link(large_bytes / max(large - small, 1e-9), small)


def _ping_pong(comm: Communicator, other: int, num_bytes: int, repetitions: int) -> float:
    """Half the median round trip, in seconds; 0.0 on workers that take no part."""
    if comm.rank not in (0, other):
        return 0.0
    message, answer = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    peer, trips = other if comm.rank == 0 else 0, []
    for _ in range(repetitions + 1):  # the first opens the connection
        start = time.perf_counter()
        if comm.rank == 0:
            comm.exchange({peer: message}, {}).wait()
            comm.exchange({}, {peer: answer}).wait()
        else:
            comm.exchange({}, {peer: answer}).wait()
            comm.exchange({peer: message}, {}).wait()
        trips.append(time.perf_counter() - start)
    return median(trips[1:]) / 2
