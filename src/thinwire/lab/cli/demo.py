"""`thinwire demo`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ...options import require_integer
from .options import parsed, show
from .train import trained


@dataclass(frozen=True)
class Demo:
    """Compare four runs of the digits recipe: dense, with 4 bits, sparse, and sparse with 4 bits."""

    output: Path = Path("demo")
    """Folder for the runs and the figure. Replaces the runs of an earlier demo."""
    workers: int = 4
    """Number of worker processes."""
    seed: int = 0
    """Seed of all four runs."""
    max_steps: int | None = None
    """Stop each run after this many steps; fewer => a faster, worse demo."""

    def __post_init__(self):
        require_integer("workers", self.workers, 2, hint=": one worker sends nothing")


def demo_command(options: list[str]) -> None:
    """Train four runs, and show a table and a figure."""
    demo = parsed(Demo, options, "thinwire demo", Demo())
    from ..recipes.digits import DEMO, digits
    from ..report import accuracy_against_bytes, read_run, summary_table

    shared = replace(digits(), workers=demo.workers, seed=demo.seed, max_steps=demo.max_steps, overwrite=True)
    runs = []
    for label, strategy in DEMO.items():
        name = re.sub(r"\W+", "-", label)
        folder = trained(replace(shared, strategy=strategy, output=demo.output, name=name))
        runs.append(read_run(folder, label))
    figure = demo.output / "accuracy-against-bytes.png"
    accuracy_against_bytes(runs, figure)
    show(summary_table(runs, title=f"Handwritten digits, {demo.workers} workers, seed {demo.seed}"))
    print(f"  {figure}")
