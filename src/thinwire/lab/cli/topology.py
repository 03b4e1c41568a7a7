"""`thinwire topology`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...algorithm import able_to, require
from .options import parsed, shown_as

_MOST_WORKERS = 2048  # which take up to half a minute in most graphs; the time grows with their cube


@dataclass(frozen=True)
class TopologyFacts:
    """Print the properties of a topology, such as "Exponential()", and draw it."""

    graph: Annotated[str, shown_as("GRAPH")]
    """The topology in Python's notation, such as Exponential()."""
    workers: int = 16
    """Number of workers."""
    output: Path | None = None
    """Draw it to this file (.png, .svg or .pdf)."""


def topology_command(options: list[str]) -> None:
    """Print the properties of a topology and draw it."""
    asked = parsed(TopologyFacts, options, "thinwire topology")
    from ...topology import Topology, describe, draw
    from ..bench.rows import as_parsed

    topology = as_parsed(asked.graph, Topology)
    fits = asked.workers <= _MOST_WORKERS
    require(fits, f"a topology is described for at most {_MOST_WORKERS:,} workers, got {asked.workers:,}")
    rows = describe(topology, asked.workers)
    if asked.output is not None:
        with able_to(f"write {asked.output}", "choose another file"):
            rows.append(("drawing", str(draw(topology, asked.workers, asked.output))))
    for name, value in rows:
        print(f"  {name:18} {value}")
