"""What follows from measured lines, as pure functions of matrices: a ring, shares of the work, sites.

Matrices are (W, W) with the sender as row; their diagonals are not read. Equal input gives equal results, bit for bit, so
workers that hold the same measurement agree without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Rows = Sequence[Sequence[float]]

EXACT = 16
"""Up to so many workers the ring is the best there is."""
GAP = 3.0
"""How many times longer the shortest round trip between sites must be than the longest link inside one."""


def slowest_link(rates: Rows, ring: Sequence[int]) -> float:
    """The rate of the slowest link of a ring."""
    return min(_links(rates, ring))


def _links(rates: Rows, ring: Sequence[int]) -> list[float]:
    """The rates of a ring's links: each worker sends to the next."""
    return [rates[a][b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]


def bottleneck_ring(rates: Rows) -> tuple[int, ...]:
    """The order of workers in a ring whose slowest link is as fast as possible; rank 0 is first.

    A ring all-reduce takes 2(W-1)/W n / (rate of the slowest link). The best bottleneck is found by bisection over the rates:
    for each, a Hamiltonian cycle of the faster links is sought by dynamic programming over subsets. Above `EXACT` workers, the
    ring is improved by reversing parts of it (2-opt) and by moving workers, and may not be the best.

    Args:
        rates: from each worker to each other one, (W, W).

    Example:
        >>> bottleneck_ring([[0, 1, 9], [9, 0, 1], [1, 9, 0]])
        (0, 2, 1)
    """
    size = len(rates)
    given = tuple(range(size))
    if size <= 2:
        return given
    if size > EXACT:
        return _improved(rates)
    known = sorted({rates[i][j] for i in range(size) for j in range(size) if i != j})
    low, high, best = 0, len(known) - 1, given
    while low <= high:
        middle = (low + high) // 2
        ring = _cycle(rates, known[middle])
        if ring is None:
            high = middle - 1
        else:
            best, low = ring, middle + 1
    # A ring that is no faster is no reason to change the order.
    return given if slowest_link(rates, given) >= slowest_link(rates, best) else best


def _cycle(rates: Rows, least: float) -> tuple[int, ...] | None:
    """A ring over links of at least this rate, or None: reach[S] has the workers at which a path from 0 through S can end."""
    others = len(rates) - 1  # worker v + 1 is bit v
    links = np.array(rates) >= least
    into = [sum(1 << u for u in range(others) if u != v and links[u + 1, v + 1]) for v in range(others)]
    masks = np.arange(1 << others)
    sizes = sum((masks >> v) & 1 for v in range(others))
    reach = np.zeros(1 << others, dtype=np.int64)
    for v in range(others):
        reach[1 << v] = (1 << v) * int(links[0, v + 1])
    for size in range(1, others):
        layer = masks[sizes == size]
        for v in range(others):
            grown = layer[((layer >> v) & 1 == 0) & (reach[layer] & into[v] != 0)] | (1 << v)
            reach[grown] |= 1 << v
    back = sum(1 << v for v in range(others) if links[v + 1, 0])
    subset, ends, path = (1 << others) - 1, int(reach[-1]) & back, []
    while subset:
        if not ends:
            return None
        # The lowest of several ends, so that equal input gives an equal ring.
        last = (ends & -ends).bit_length() - 1
        path.append(last + 1)
        subset &= ~(1 << last)
        ends = int(reach[subset]) & into[last]
    return (0, *reversed(path))


def _improved(rates: Rows) -> tuple[int, ...]:
    """Nearest neighbours, then 2-opt and moves, while the slowest link improves, or with the same one the sum of link times."""
    size = len(rates)

    def quality(ring: Sequence[int]) -> tuple[float, float]:
        links = _links(rates, ring)
        return min(links), -sum(1 / max(rate, 1e-300) for rate in links)  # a rate may be 0

    greedy, left = [0], set(range(1, size))
    while left:
        # Sorted, so that ties go to the lowest rank on every worker.
        greedy.append(max(sorted(left), key=lambda peer: rates[greedy[-1]][peer]))
        left.remove(greedy[-1])
    ring = max([tuple(range(size)), tuple(greedy)], key=quality)
    better = True
    while better:
        better = False
        for start in range(1, size):
            for end in range(1, size):
                rest = (*ring[:start], *ring[start + 1 :])
                moved = (*rest[:end], ring[start], *rest[end:])
                turned = (*ring[:start], *reversed(ring[start : end + 1]), *ring[end + 1 :]) if start < end else moved
                # The present ring comes first: `max` keeps it among equals, so the loop ends.
                best = max([ring, moved, turned], key=quality)
                if best != ring:
                    ring, better = best, True
    return ring


def shares(rates: Sequence[float]) -> tuple[float, ...]:
    """Which part of the result each worker should own in a `scatter_reduce`, so that the slowest one ends as early as possible.

    Worker i moves n (1 + (W-2) f_i) each way over a line of rate b_i. Over the k workers with T b_i > 1,

        f_i = (T b_i - 1) / (W-2),    T = (k + W - 2) / sum b,    and 0 for the others

    Args:
        rates: of each worker's line, (W,); 0 owns nothing.

    Example:
        >>> [round(f, 3) for f in shares([1, 1, 1, 0.25])]
        [0.333, 0.333, 0.333, 0.0]
    """
    size = len(rates)
    if size <= 2 or not any(rates):
        return (1 / size,) * size
    # A share below zero means none: leave out the slowest until all shares are positive.
    fastest = sorted((rate for rate in rates if rate > 0), reverse=True)
    while fastest:
        time = (len(fastest) + size - 2) / sum(fastest)
        if time * fastest[-1] > 1 or len(fastest) == 1:
            break
        fastest.pop()
    raw = [max(0.0, time * rate - 1) for rate in rates]
    return tuple(part / sum(raw) for part in raw)


def sites(round_trips: Rows) -> tuple[tuple[int, ...], ...]:
    """The sites that workers stand in: single linkage on the logarithm of the round trips, cut at its widest gap.

    Without a gap of `GAP` times, all stand in one site.

    Args:
        round_trips: seconds between each two workers, (W, W).

    Returns:
        The workers of each site, ascending; sites by their first worker.

    Example:
        >>> far, near = 0.08, 0.001
        >>> sites([[0, far, near], [far, 0, far], [near, far, 0]])
        ((0, 2), (1,))
    """
    merges = _merges(round_trips)
    lengths = [max(length, 1e-9) for length, _ in merges]  # zero has no logarithm
    gaps = [math.log(b / a) for a, b in pairwise(lengths)]
    widest = max(range(len(gaps)), key=gaps.__getitem__, default=-1)
    if widest < 0 or gaps[widest] < math.log(GAP):
        return (tuple(range(len(round_trips))),)
    groups = merges[widest][1]
    return tuple(tuple(worker for worker, at in enumerate(groups) if at == group) for group in dict.fromkeys(groups))


def _merges(round_trips: Rows) -> list[tuple[float, list[int]]]:
    """Each length at which two groups join, the shortest first, and the group of each worker from then on."""
    size = len(round_trips)
    groups, merges = list(range(size)), []
    for length, a, b in sorted((round_trips[i][j], i, j) for j in range(size) for i in range(j)):
        if groups[a] != groups[b]:
            groups = [groups[a] if at == groups[b] else at for at in groups]
            merges.append((length, groups))
    return merges
