"""`thinwire topology`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .options import first_word, parsed


@dataclass(frozen=True)
class TopologyFacts:
    """Print the properties of a topology, such as "Exponential()", and draw it."""

    workers: int = 16
    """Number of workers."""
    output: Path | None = None
    """Draw it to this file (.png, .svg or .pdf)."""


def topology_command(options: list[str]) -> None:
    """Print the properties of a topology and draw it."""
    graph, options = first_word(options, "the graph", 'thinwire topology "Exponential()" --workers 16')
    asked = parsed(TopologyFacts, options, "thinwire topology GRAPH")
    from ...topology import Topology, describe, draw
    from ..bench.rows import as_parsed

    topology = as_parsed(graph, Topology)
    rows = describe(topology, asked.workers)
    if asked.output is not None:
        try:
            rows.append(("drawing", str(draw(topology, asked.workers, asked.output))))
        except OSError as error:
            raise ValueError(f"cannot write {asked.output}: {error.strerror}; choose another file") from None
    for name, value in rows:
        print(f"  {name:18} {value}")
