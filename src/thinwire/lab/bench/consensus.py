"""`thinwire consensus`: averaging without training, its error against the bits that all workers have sent.

Every worker starts with its own matrix. Each averager, with each of its step sizes, moves the matrices towards their mean,
for the same number of rounds and from the same start values. The best step size of an averager reaches the target with the
fewest bits. If none reaches it, the best one ends with the smallest error.

The error is `1/W sum_i |z_i - mean|^2`; the target is a fraction of the error at the start.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...algorithm import require
from ...average import Averager
from ...comm import Communicator, LocalWorld, ProcessWorld
from ...options import require_integer, require_number
from ...strategy import ConsensusRecord, consensus
from ..report.consensus import TARGET, Row, best, error_against_bits, reaching
from .rows import as_parsed, check_writable, print_table, write_json
from .start_values import start_values

STEP_SIZE, THETA = "step_size", "theta"  # fields of the averagers that have them
DEFAULT_AVERAGERS = ("Mix()", "Choco()", "PowerGossip()")


@dataclass(frozen=True)
class ConsensusBench:
    """Average fixed tensors, and measure the distance from agreement against the bits sent."""

    averager: tuple[str, ...] = DEFAULT_AVERAGERS
    """Averagers in Python's notation, such as "PowerGossip(Ring(), rank=1)"."""
    workers: int = 8
    """Number of workers."""
    rounds: int = 500
    """Rounds of averaging; more => closer, for more bits."""
    data: Literal["normal", "offset", "sparse", "lognormal", "digits", "faces"] = "normal"
    """Start values: normal elements, the same plus the rank, a single 1, exp of normal, images of digits, or a face."""
    shape: tuple[int, int] = (64, 64)
    """Rows and columns of each worker's matrix; digits have 64 columns."""
    step_sizes: tuple[float, ...] = ()
    """Step sizes to try with every averager that has one (`step_size`), instead of its own."""
    thetas: tuple[float, ...] = ()
    """Bounds on the disagreement to try with every averager that has one (`theta`, as Moniqua), instead of its own."""
    target: float = TARGET
    """Fraction of the initial squared error at which bits are compared; lower => more rounds until then."""
    every: int = 1
    """Measure the error every this many rounds; higher => faster."""
    seed: int = 0
    """Seed of the start values and of the averagers."""
    processes: bool = False
    """Run workers as processes over Gloo instead of threads."""
    json: Path | None = None
    """Write all rows to this file: averager, step size, round, bits sent, messages, squared error, workers, data."""
    figure: Path | None = None
    """Draw the error against bits and against rounds to this file (.png, .svg or .pdf)."""

    def __post_init__(self):
        for name, least in (("workers", 2), ("rounds", 1), ("every", 1)):
            require_integer(name, getattr(self, name), least)
        require(min(self.shape) >= 1, f"shape must be two positive numbers, got {self.shape}")
        require_number("target", self.target, above=0, below=1)
        require(bool(self.averager), "averager: give at least one, such as 'Mix(Ring())'")

    def run(self) -> list[Row]:
        """Measure, print the table, write the files, return the rows."""
        given = [as_parsed(text, Averager) for text in self.averager]
        groups = [candidates(averager, self.step_sizes, self.thetas) for averager in given]
        start_values(self.data, self.shape, 0, self.workers, self.seed)  # before any worker starts
        check_writable(self.json, figure=self.figure)
        world = ProcessWorld(self.workers) if self.processes else LocalWorld(self.workers)
        runs = iter(world.run(_work, self, [averager for group in groups for averager in group])[0])
        measured = [[next(runs) for _ in group] for group in groups]
        rows = [row for runs in measured for run in runs for row in run]
        differ = rows[0]["squared_error"] != 0
        require(differ, "all workers start with the same values; choose other data, a larger shape or another seed")
        write_json(self.json, rows)
        chosen = [best(runs, self.target) for runs in measured]
        self._report({_label(text, run): run for text, run in zip(self.averager, chosen, strict=True)})
        return rows

    def _report(self, runs: Mapping[str, Sequence[Row]]) -> None:
        """Print the table and draw the figure of the best run of each averager."""
        where = (
            f"{self.workers} worker{'s' * (self.workers > 1)}, {self.shape[0]} x {self.shape[1]} of {self.data} data"
        )
        print_table(
            f"Consensus: {where}, {self.rounds} rounds",
            ["averager", f"rounds\nto {self.target:g}", f"Mbit\nto {self.target:g}", "Mbit\nin all", "error left"],
            [[label, *_cells(run, self.target)] for label, run in runs.items()],
            "Mbit (10^6 bits) sent by all workers together; error left: the final squared error over that at the start.",
        )
        if self.figure is not None:
            error_against_bits(runs, self.figure, self.target, where)
            print(f"  {self.figure}")


def candidates(averager: Averager, step_sizes: Sequence[float], thetas: Sequence[float] = ()) -> list[Averager]:
    """The averager with each step size and each theta, as far as it has these fields and any are given.

    Example:
        >>> import thinwire as tw
        >>> candidates(tw.Choco(), [0.1, 0.5]), candidates(tw.PushSum(), [0.1, 0.5])
        ([Choco(step_size=0.1), Choco(step_size=0.5)], [PushSum()])
        >>> candidates(tw.Moniqua(), [], [0.5, 1.0])
        [Moniqua(theta=0.5), Moniqua(theta=1.0)]
    """
    found = [averager]
    for name, values in ((STEP_SIZE, step_sizes), (THETA, thetas)):
        if values and hasattr(averager, name):
            found = [dataclasses.replace(one, **{name: value}) for one in found for value in values]
    return found


def _work(comm: Communicator, bench: ConsensusBench, averagers: list[Averager]) -> list[list[Row]]:
    """One worker's part in all runs; all of them return the same."""
    from ..train.results.terminal import Terminal

    start = start_values(bench.data, bench.shape, comm.rank, comm.size, bench.seed)
    rows, rounds = [], bench.rounds
    with closing(Terminal("consensus", rounds * len(averagers))) if comm.rank == 0 else nullcontext() as terminal:
        for number, averager in enumerate(averagers):

            def show(record: ConsensusRecord, number: int = number, averager: Averager = averager) -> None:
                if terminal is not None:
                    error = f"{averager}: squared error {record.squared_error:.2e}"
                    terminal.show(rounds * number + record.round, error)

            named = [("x", start.clone())]  # averaged in place, and the next averager begins there too
            records = consensus(named, averager, rounds, comm, bench.seed, bench.every, show)
            rows.append([_row(bench, averager, record) for record in records])
    return rows


def _row(bench: ConsensusBench, averager: Averager, record: ConsensusRecord) -> Row:
    """A row for JSON; an error that is not finite is None."""
    return {
        "averager": repr(averager),
        "step_size": getattr(averager, STEP_SIZE, None),
        **record._asdict(),
        "theta": getattr(averager, THETA, None),
        "workers": bench.workers,
        "data": bench.data,
        "shape": list(bench.shape),
        "seed": bench.seed,
        "squared_error": record.squared_error if math.isfinite(record.squared_error) else None,  # JSON has no infinity
    }


def _label(text: str, run: Sequence[Row]) -> str:
    """The averager as given, and the step size and theta that were chosen for it."""
    chosen = {"step size": run[0]["step_size"], "theta": run[0]["theta"]}
    return ", ".join([text, *(f"{name} {value:g}" for name, value in chosen.items() if value is not None)])


def _cells(run: Sequence[Row], target: float) -> list[str]:
    """The cells of a line of the table, without its label."""
    reached, first, last = reaching(run, target), run[0], run[-1]
    until = ["never", "-"] if reached is None else [str(reached["round"]), f"{reached['bits_sent'] / 1e6:.3g}"]
    left = "diverged" if last["squared_error"] is None else f"{last['squared_error'] / first['squared_error']:.1e}"
    return [*until, f"{last['bits_sent'] / 1e6:.3g}", left]
