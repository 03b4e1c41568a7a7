"""What a plan must know of an averager, read from its fields: they are its whole configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..average import Averager
from ..average.mean.exchange import EXCHANGES, Exchange, find_exchange
from ..topology import Topology


def parts_of(averager: Averager) -> dict[str, Any]:
    """The fields of an averager, codec and memory among them."""
    return {f.name: getattr(averager, f.name) for f in dataclasses.fields(averager)}


def settings_of(averager: Averager) -> tuple[list[Averager], float]:
    """Averagers of fixed codecs in place of one that fits itself, and the share of a step that may wait for the line.

    Those of the most bytes come first. An averager that does not fit itself stands alone.
    """
    codec = parts_of(averager).get("codec")
    part = None if codec is None else codec.traits.adaptive
    if part is None or not part.settings():
        return [averager], 0.0
    changed: list[Averager] = [replace(averager, codec=setting) for setting in part.settings()]
    return changed, part.line_share or 0.0


def exchange_of(averager: Averager) -> tuple[bool, Exchange | None]:
    """Whether it is chosen when workers connect ("auto"), and the exchange that its configuration names, if any."""
    parts = parts_of(averager)
    # A rule needs the message of every worker, so it never sends over another exchange.
    word = "all_gather" if parts.get("rule") is not None else parts.get("exchange", "")
    return word == "auto", find_exchange(word)


def multiplies(averager: Averager) -> bool:
    """Whether it compresses by low-rank matrix products rather than with a codec."""
    return "rank" in parts_of(averager)


def adds_coordinates(averager: Averager) -> bool:
    """Whether workers may add selected coordinates on the way, so that what they send depends on which they select."""
    is_auto, exchange = exchange_of(averager)
    selects_again = is_auto or (exchange is not None and exchange.selects_again)
    return selects_again and parts_of(averager)["codec"].traits.sparse is not None


def has_leaders(averager: Averager) -> bool:
    """Whether the first worker of a node sends for all of it, and the others all do the same, with the same peers."""
    exchange = exchange_of(averager)[1]
    return exchange is not None and exchange.needs_nodes


def is_uniform(averager: Averager) -> bool:
    """Whether its exchange has all workers do the same, so that one of them, or a leader and a member, stands for all."""
    is_auto, exchange = exchange_of(averager)
    possible = EXCHANGES.values() if is_auto else [] if exchange is None else [exchange]
    return all(exchange.is_uniform for exchange in possible)


def uses_nodes(averager: Averager) -> bool:
    """Whether what it sends depends on which workers share a node."""
    return exchange_of(averager)[0] or has_leaders(averager)


def on_nodes(averager: Averager, workers_per_node: int) -> Averager:
    """The averager where so many consecutive ranks share a node; itself if it makes no use of that."""
    changes: dict[str, Any] = {"workers_per_node": workers_per_node} if uses_nodes(averager) else {}
    return replace(averager, **changes)


def planned(averager: Averager, size: int) -> Averager:
    """An averager that is quicker to simulate and whose rounds take as long; itself if there is none."""
    topology = topology_of(averager)
    # Other averagers may refuse the topology, and must name the one that they were given.
    if topology is None or not averager.traits.mixes_plainly:
        return averager
    changes: dict[str, Any] = {"topology": topology.planned(size)}
    return replace(averager, **changes)


def is_circulant(averager: Averager, size: int, shift: int) -> bool:
    """Whether the pattern of messages is the same for all of `size` ranks, shifted by `shift`."""
    topology = topology_of(averager)
    return topology is None or topology.is_circulant(size, shift)


def topology_of(averager: Averager) -> Topology | None:
    """Its topology, if it is a gossip averager."""
    found: Topology | None = parts_of(averager).get("topology")
    return found


def rounds_of(averager: Averager, size: int) -> Sequence[int]:
    """The rounds of a period, which repeat for ever: those of a topology that varies in time, or of the averager itself."""
    topology, period = topology_of(averager), averager.traits.period
    if topology is None:
        return range(period)
    steps = topology.steps(size)[-topology.period(size) :]
    return [steps[0] + i for i in range(math.lcm(period, len(steps)))] if period > 1 else steps
