"""Measure links: between two workers by ping-pong, or of all workers at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from ..algorithm import require
from ..comm import Communicator
from .network import Link

_LARGE_BYTES = 4_000_000
_TIMES = 8


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


def measure_lines(
    comm: Communicator,
    repetitions: int = 15,
    large_bytes: int = _LARGE_BYTES,
    typical: Callable[[list[float]], float] = median,
) -> Link:
    """The link of every worker while all use theirs, with the costs of short messages. All workers call it and get the same.

    A repetition takes as long as its slowest worker. With W workers, and one byte where nothing else is said,

        exchange      everyone sends to the next worker                   operation + latency + message
        all-gather    everyone sends to all                               operation + latency + (W-1) message
        all-reduce    a ring of 2(W-1) steps                              operation + 2(W-1) (latency + message)
        large         the exchange, with `large_bytes` and twice as many  their difference gives the rate

    On two workers, where the all-gather is an exchange, `message` is what each of several exchanges at once takes longer.

    Args:
        comm: connects the workers.
        repetitions: of each measurement.
        large_bytes: size of the large message.
        typical: makes one time of all repetitions; `min` where other programs disturb the measurement.

    Raises:
        ValueError: a single worker.

    Example:
        >>> import thinwire as tw
        >>> links = tw.LocalWorld(2).run(lambda comm: measure_lines(comm, 3, 1000))
        >>> links[0] == links[1] and links[0].bytes_per_second > 0
        True
    """
    require(comm.size >= 2, "measure_lines needs at least two workers")
    byte, following, before = (
        torch.zeros(1, dtype=torch.uint8, device="cpu"),
        (comm.rank + 1) % comm.size,
        (comm.rank - 1) % comm.size,
    )

    def exchange(num_bytes: int = 1, times: int = 1) -> None:
        sent, got = (
            torch.zeros(num_bytes, dtype=torch.uint8, device="cpu"),
            torch.empty(num_bytes, dtype=torch.uint8, device="cpu"),
        )
        gots = [got, *(torch.empty_like(got) for _ in range(times - 1))]
        for handle in [comm.exchange({following: sent}, {before: got}) for got in gots]:
            handle.wait()

    def timed(call: Callable[[], object]) -> float:
        trips = []
        for _ in range(repetitions + 1):  # the first opens connections
            comm.barrier()
            start = time.perf_counter()
            call()
            trips.append(time.perf_counter() - start)
        return typical([max(trip) for trip in zip(*comm.gather_objects(trips[1:]), strict=True)])

    single = timed(exchange)
    if comm.size > 2:
        message = (timed(lambda: comm.all_gather(byte).wait()) - single) / (comm.size - 2)
    else:
        message = (timed(lambda: exchange(times=_TIMES)) - single) / (_TIMES - 1)
    message = max(message, 0.0)
    steps = 2 * (comm.size - 1)
    ring = timed(lambda: comm.all_reduce(torch.zeros(comm.size, device="cpu")).wait())
    latency = max(min((ring - single) / (steps - 1), single) - message, 0.0)
    large, larger = (timed(partial(exchange, n)) for n in (large_bytes, 2 * large_bytes))
    rate = large_bytes / max(larger - large, 1e-9)
    return Link(rate, latency, message, max(single - latency - message, 0.0))


def _ping_pong(comm: Communicator, other: int, num_bytes: int, repetitions: int) -> float:
    """Half the median round trip, in seconds; 0.0 on workers that take no part."""
    if comm.rank not in (0, other):
        return 0.0
    message, answer = (
        torch.zeros(num_bytes, dtype=torch.uint8, device="cpu"),
        torch.empty(num_bytes, dtype=torch.uint8, device="cpu"),
    )
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
