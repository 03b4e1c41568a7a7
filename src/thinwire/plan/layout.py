"""The layout of workers that follows from measured lines."""

from __future__ import annotations

from collections.abc import Sequence

from ..comm import Communicator, Layout
from ..topology.measured import bottleneck_ring, shares, sites, slowest_link
from .lines import UNEQUAL, Lines
from .measure import Effort, measure_lines


def layout_of(lines: Lines) -> Layout:
    """The layout for these lines. Equal lines give equal layouts, so workers that measured together need not compare it.

        sites    where round trips show several, all of as many workers: each is a run of ranks, led by the fastest line out
        ring     else: the order whose slowest link is fastest, if it is `UNEQUAL` times as fast as in the order of ranks
        shares   where lines differ `UNEQUAL` times: those of `topology.measured.shares`, by the slower direction of each line

    Example:
        >>> layout_of(Lines.of_rates([[0, 1, 9], [9, 0, 1], [1, 9, 0]])).order
        (0, 2, 1)
    """
    order, per_node = _order(lines)
    rates = [min(lines.out(rank), lines.into(rank)) for rank in order]
    differ = lines.size > 2 and max(rates) > UNEQUAL * min(rates)
    return Layout(order, per_node, shares(rates) if differ else ())


def measured_layout(comm: Communicator, effort: Effort = Effort()) -> Layout:
    """Measure the lines, and return their layout; all workers call it and get the same."""
    return layout_of(measure_lines(comm, effort)) if comm.size > 1 else Layout((0,))


def _order(lines: Lines) -> tuple[tuple[int, ...], int]:
    """The order of ranks, and how many stand in a site."""
    found = sites(lines.round_trip_seconds)
    per_node = len(found[0])
    # A `Layout` has one number of workers for all sites.
    if 1 < per_node < lines.size and all(len(site) == per_node for site in found):
        leaders = [max(site, key=lines.out) for site in found]  # the first of equal ones
        ring = bottleneck_ring(_among(lines, leaders))
        ordered = [(leaders[i], *(rank for rank in found[i] if rank != leaders[i])) for i in ring]
        return tuple(rank for site in ordered for rank in site), per_node
    given, ring = tuple(range(lines.size)), bottleneck_ring(lines.bytes_per_second)
    faster = slowest_link(lines.bytes_per_second, ring) > UNEQUAL * slowest_link(lines.bytes_per_second, given)
    return (ring if faster else given), 1


def _among(lines: Lines, ranks: Sequence[int]) -> list[list[float]]:
    return [[lines.bytes_per_second[i][j] for j in ranks] for i in ranks]
