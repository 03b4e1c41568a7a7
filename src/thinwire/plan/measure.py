"""One measurement of the lines between all workers, over any communicator.

    pairs      in rounds of a tournament, in which each worker has one peer and all pairs measure at once:
                   round trips of 8 bytes, with the peer's clock, as NTP does
                   messages in both directions at once, each four times as large as the last one, until one takes long enough
    together   all workers at once: the rate, and the costs of short messages (`measure_together`)

The growing messages open TCP's windows. The last one takes many round trips and is not much faster than the one before, so that
its rate is near that of the line.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm import require
from ..comm import Communicator
from ..comm.sockets import tcp_info
from ..options import require_number
from .lines import Lines
from .network import Link

FIRST_BYTES, GROWTH = 1 << 15, 4
FASTER = 1.25
LEAST_TRIPS = 3
MESSAGE_TRIPS = 10  # round trips that the last message of a pair takes at least, if it may have as many bytes
TOGETHER_SECONDS = 0.1  # of one large message while all send; on long lines, a round trip
TOGETHER_REPETITIONS, TOGETHER_BYTES = 7, 4_000_000
_TIMES = 8


@dataclass(frozen=True)
class Effort:
    """How much a measurement may send, and about how long it may take; more => finer.

    Args:
        seconds: of all rounds together; long or very slow lines take longer, for a message must take several round trips.
        pair_bytes: that a worker sends to each other one; below `FIRST_BYTES` it is that.
        round_trips: with each peer.

    Raises:
        ValueError: a number that is not positive.

    Example:
        >>> Effort(seconds=10).announced(4)[:43]
        'sends at most 192 MB from each worker to th'
    """

    seconds: float = 10.0
    pair_bytes: int = 64_000_000
    round_trips: int = 20

    def __post_init__(self) -> None:
        for name in ("seconds", "pair_bytes", "round_trips"):
            require_number(name, getattr(self, name), above=0)

    @property
    def together_bytes(self) -> int:
        """Of the smaller of the two large messages while all send."""
        return max(1, min(TOGETHER_BYTES, self.pair_bytes // 8))

    def enough_for(self, lines: Lines) -> int:
        """The `pair_bytes` to measure these lines with, which took too few of them; 0 if they took enough.

        While TCP's windows grow, a message is slower than its line. So it should take many round trips, and its rate, if it did
        not, is less than the line's.

        Example:
            >>> lines = Lines.of_rates([[0, 8e6], [8e6, 0]], [[0, 0.1], [0.1, 0]])
            >>> Effort(pair_bytes=8_000_000).enough_for(lines), Effort(pair_bytes=64_000_000).enough_for(lines)
            (64000000, 0)
        """
        carried = max(lines.bytes_per_second[i][j] * lines.round_trip_seconds[i][j] for i, j in lines.pairs())
        return int(GROWTH * 2 * MESSAGE_TRIPS * carried) if self.pair_bytes < 2 * MESSAGE_TRIPS * carried else 0

    def announced(self, size: int) -> str:
        """What a measurement of `size` workers will do, in words."""
        each = (size - 1) * max(self.pair_bytes, FIRST_BYTES)
        at_once = 3 * (TOGETHER_REPETITIONS + 1) * self.together_bytes
        return (
            f"sends at most {each / 1e6:.3g} MB from each worker to the others, one after another, then {at_once / 1e6:.3g} "
            f"MB to the next one while all send, in about {self.seconds:.3g} s"
        )


class _Row(NamedTuple):
    """What a worker measured with one peer: of round trips only the one with the lower rank."""

    round_trip: float
    jitter: float
    clock: float
    rate: float
    """Of what came from the peer."""
    loss: float | None
    """Of what went to the peer."""


def measure_lines(comm: Communicator, effort: Effort = Effort()) -> Lines:
    """Measure the lines between all workers. All of them call it together and get the same record, bit for bit.

    Raises:
        ValueError: a single worker.

    Example:
        >>> import thinwire as tw
        >>> lines = tw.LocalWorld(3).run(measure_lines, Effort(seconds=0.1, pair_bytes=1000, round_trips=3))
        >>> lines[0] == lines[2] and lines[0].bytes_per_second[2][1] > 0
        True
    """
    require(comm.size >= 2, "measure_lines needs at least two workers")
    rounds = tournament(comm.size)
    own: dict[int, _Row] = {}
    comm.barrier()
    for pairs in rounds:
        if comm.rank in pairs:
            own[pairs[comm.rank]] = _pair(comm, pairs[comm.rank], effort, effort.seconds / (len(rounds) + 1))
    rows = [{int(peer): _Row(*row) for peer, row in of_worker.items()} for of_worker in comm.gather_objects(own)]
    measured = [row for of_worker in rows for row in of_worker.values()]
    rates, longest = [row.rate for row in measured], max(row.round_trip for row in measured)
    num_bytes = max(1, min(effort.together_bytes, int(min(rates) * max(TOGETHER_SECONDS, longest))))
    together = measure_together(comm, TOGETHER_REPETITIONS, num_bytes)
    together = replace(together, bytes_per_second=min(together.bytes_per_second, max(rates)))

    def matrix(value: Callable[[int, int], Any]) -> tuple[tuple[Any, ...], ...]:
        ranks = range(comm.size)
        return tuple(tuple(0.0 if i == j else value(i, j) for j in ranks) for i in ranks)

    def timed(i: int, j: int) -> _Row:
        return rows[min(i, j)][max(i, j)]

    return Lines(
        round_trip_seconds=matrix(lambda i, j: timed(i, j).round_trip),
        jitter_seconds=matrix(lambda i, j: timed(i, j).jitter),
        bytes_per_second=matrix(lambda i, j: rows[j][i].rate),
        loss=matrix(lambda i, j: rows[i][j].loss),
        clock_seconds=matrix(lambda i, j: timed(i, j).clock if i < j else -timed(i, j).clock),
        together=together,
    )


def tournament(size: int) -> list[dict[int, int]]:
    """Rounds in which all pairs meet once, by the circle method: the peer of each worker that has one in this round.

    Example:
        >>> tournament(4)
        [{0: 3, 3: 0, 1: 2, 2: 1}, {0: 2, 2: 0, 3: 1, 1: 3}, {0: 1, 1: 0, 2: 3, 3: 2}]
    """
    places = [*range(size), *[-1] * (size % 2)]  # -1: without a peer
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = [(a, b) for a, b in zip(places[:half], reversed(places[half:]), strict=True) if -1 not in (a, b)]
        rounds.append({rank: peer for a, b in pairs for rank, peer in ((a, b), (b, a))})
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _pair(comm: Communicator, peer: int, effort: Effort, seconds: float) -> _Row:
    """Measure with one peer, which does the same, for about `seconds`."""
    swap = partial(_swap, comm, peer)
    trips, clocks = [], []
    swap(0.0)  # the first opens connections, and waits for a peer that is late
    until = time.monotonic() + seconds / 3
    goes_on = True
    while goes_on:
        start, began = time.time(), time.perf_counter()
        if comm.rank < peer:
            comm.exchange({peer: _number(start)}, {}).wait()
            there = _received(comm, peer)
        else:
            _received(comm, peer)
            there = time.time()
            comm.exchange({peer: _number(there)}, {}).wait()
        trips.append(time.perf_counter() - began)
        clocks.append(there - start - trips[-1] / 2)
        # The lower rank decides for both. The question takes a round trip too, so it comes only now and then.
        enough = len(trips) >= LEAST_TRIPS and (len(trips) >= effort.round_trips or time.monotonic() > until)
        goes_on = len(trips) % LEAST_TRIPS != 0 or not max(swap(float(enough and comm.rank < peer)))
    fastest = min(range(len(trips)), key=trips.__getitem__)
    jitter = fmean(abs(a - b) for a, b in zip(trips[1:], trips[:-1], strict=True))
    seconds = max(swap(max(seconds / 12, MESSAGE_TRIPS * trips[fastest])))
    rate, loss = _rate(comm, peer, effort.pair_bytes, seconds, trips[fastest] / 2)
    return _Row(trips[fastest], jitter, clocks[fastest], rate, loss)


def _rate(comm: Communicator, peer: int, most_bytes: int, seconds: float, latency: float) -> tuple[float, float | None]:
    """Bytes per second from the peer, and the loss of what went to it.

    Messages grow until one takes `seconds`, and was not much faster than the one before: then TCP's windows are open.
    """
    left, num_bytes, before = max(most_bytes, FIRST_BYTES), FIRST_BYTES, segments()
    rate = 0.0
    while num_bytes > 0:
        came, last = _both_ways(comm, peer, num_bytes), rate
        rate = num_bytes / max(came - latency, came / 2)  # a short message may come sooner than the latency says
        left -= num_bytes
        is_long, is_faster = (max(_swap(comm, peer, value)) for value in (came > seconds, rate > FASTER * last))
        num_bytes = 0 if (is_long and not is_faster) or left < num_bytes else min(left, GROWTH * num_bytes)
    sent = [now - then for now, then in zip(segments(), before, strict=True)]
    return rate, min(1.0, max(0.0, sent[1] / sent[0])) if sent[0] > 0 else None


def _both_ways(comm: Communicator, peer: int, num_bytes: int) -> float:
    """Send so many bytes to the peer, which sends as many; returns the seconds until all of its bytes came."""
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    start = time.perf_counter()
    coming, going = comm.exchange({}, {peer: torch.empty_like(sent)}), comm.exchange({peer: sent}, {})
    coming.wait()
    came = time.perf_counter() - start
    going.wait()
    return came


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device="cpu")


def _received(comm: Communicator, peer: int) -> float:
    got = _number(0.0)
    comm.exchange({}, {peer: got}).wait()
    return got.item()


def _swap(comm: Communicator, peer: int, value: float) -> tuple[float, float]:
    """This worker's number and the peer's."""
    got = _number(0.0)
    comm.exchange({peer: _number(value)}, {peer: got}).wait()
    return value, got.item()


# ---- what the kernel knows ----


def segments() -> tuple[int, int]:
    """TCP segments with data that this process has sent over its open connections, and those that were sent again.

    Zeros where the kernel does not tell: elsewhere than on Linux.
    """
    sent = again = 0
    for connection in connections():
        with contextlib.suppress(OSError, struct.error):
            one_again, one_sent = tcp_info(connection, 100, 156)  # tcpi_total_retrans, tcpi_data_segs_out
            sent, again = sent + one_sent, again + one_again
    return sent, again


def connections() -> Iterator[socket.socket]:
    """The open TCP connections of this process, those of extensions too; none elsewhere than on Linux."""
    if sys.platform != "linux":
        return
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(entry).startswith("socket:"):
                # A copy, because closing a socket closes its descriptor.
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.getpeername()  # an error where it listens
                        yield connection


# ---- all workers at once ----


def measure_together(
    comm: Communicator,
    repetitions: int = TOGETHER_REPETITIONS,
    large_bytes: int = TOGETHER_BYTES,
    typical: Callable[[list[float]], float] = median,
) -> Link:
    """The link of every worker while all use theirs, with the costs of short messages. All workers call it and get the same.

    A repetition of a short operation takes as long as workers take in the mean: they leave a barrier up to a latency apart,
    and what the later ones wait less, the earlier ones wait more. That of a large one takes as long as the slowest worker.
    With W workers, and one byte where nothing else is said,

        exchange      everyone sends to the next worker                   operation + latency + message
        all-gather    everyone sends to all                               operation + latency + (W-1) message
        both          sizes first, then everyone sends to all             operation + 2 (latency + (W-1) message)
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
        >>> links = tw.LocalWorld(2).run(lambda comm: measure_together(comm, 3, 1000))
        >>> links[0] == links[1] and links[0].bytes_per_second > 0
        True
    """
    require(comm.size >= 2, "measure_together needs at least two workers")
    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def exchange(num_bytes: int = 1, times: int = 1) -> None:
        sent = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        gots = [torch.empty_like(sent) for _ in range(times)]
        for handle in [comm.exchange({following: sent}, {before: got}) for got in gots]:
            handle.wait()

    def timed(call: Callable[[], object], of_workers: Callable[[Iterable[float]], float] = fmean) -> float:
        trips = []
        for _ in range(repetitions + 1):  # the first opens connections
            comm.barrier()
            start = time.perf_counter()
            call()
            trips.append(time.perf_counter() - start)
        return typical([of_workers(trip) for trip in zip(*comm.gather_objects(trips[1:]), strict=True)])

    single = timed(exchange)
    gather = timed(lambda: comm.all_gather(byte).wait()) if comm.size > 2 else single
    if comm.size > 2:
        message = (gather - single) / (comm.size - 2)
    else:
        message = (timed(lambda: exchange(times=_TIMES)) - single) / (_TIMES - 1)
    message = max(message, 0.0)
    both = timed(lambda: comm.all_gather(byte, variable=True).wait())
    latency = max(min(both - gather - (comm.size - 1) * message, single - message), 0.0)
    large, larger = (timed(partial(exchange, n), max) for n in (large_bytes, 2 * large_bytes))
    rate = large_bytes / max(larger - large, 1e-9)
    return Link(rate, latency, message, max(single - latency - message, 0.0))
