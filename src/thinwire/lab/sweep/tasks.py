"""The kinds of runs in a sweep: training a recipe, or consensus experiments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...algorithm import require
from ...messages import log
from ...suggestion import named
from ..files import write_json

if TYPE_CHECKING:
    from ...average import Averager

Plain = Mapping[str, Any]


class RunKind(ABC):
    """One kind of run: its configuration, how to run it, and how to show its progress and result."""

    reserved: frozenset[str]
    """Fields that the sweep itself sets."""

    @abstractmethod
    def base(self, recipe: str | None) -> Any:
        """The configuration before the sweep's values are set."""

    @abstractmethod
    def as_dict(self, config: Any) -> dict[str, Any]:
        """Plain values, as `config.json` holds them.

        Raises:
            ValueError: the configuration makes no run.
        """

    @abstractmethod
    def check(self, config: Any) -> None:
        """Check the configuration before anything runs, as far as possible without data.

        Raises:
            ValueError: the run would fail.
        """

    @abstractmethod
    def run(self, config: Any, folder: Path) -> None:
        """Run, or continue a stopped run. A finished run has `summary.json` in `folder`."""

    def collect(self, folders: Sequence[Path], output: Path) -> Path | None:
        """Write the joint result of the finished runs in these folders, if there is one; returns the file."""
        return None

    @abstractmethod
    def cores(self, config: Any) -> int:
        """How many cores a run keeps busy."""

    @abstractmethod
    def progress(self, config: Any, row: Plain) -> str:
        """The progress of a run, from its last row of metrics."""

    @abstractmethod
    def result(self, summary: Plain) -> str:
        """The result of a finished run, in a few words."""


class Train(RunKind):
    """`thinwire train`."""

    reserved = frozenset({"output", "name", "suffix", "overwrite", "resume", "requeue"})

    def base(self, recipe: str | None) -> Any:
        from ..recipes import recipes

        if recipe is None:
            raise ValueError('which recipe? Write recipe = "digits", say, at the top; see thinwire train --list')
        return named(recipes(), str(recipe), "recipe", "thinwire train --list").config

    def as_dict(self, config: Any) -> dict[str, Any]:
        try:
            return config.as_dict()
        except ValueError as error:  # of its notation
            raise ValueError(f"strategy: {str(error).removeprefix('strategy: ')}") from None

    def check(self, config: Any) -> None:
        from ..train.run.check import check_without_data

        check_without_data(config)

    def run(self, config: Any, folder: Path) -> None:
        from ..train import train

        # With `resume`, a stopped run goes on, and a new one begins.
        train(replace(config, output=folder.parent, name=folder.name, resume=True))

    def cores(self, config: Any) -> int:
        return config.workers * config.threads

    def progress(self, config: Any, row: Plain) -> str:
        share = row["epoch"] / config.epochs
        if config.max_steps is not None:
            share = max(share, row["step"] / config.max_steps)
        return f"{min(1.0, share):.0%}, step {row['step']:g}"

    def result(self, summary: Plain) -> str:
        final = summary["final"]
        metric = summary.get("metric", "test_accuracy")
        value = final.get(metric)
        shown = "diverged" if value is None else f"{value:.2%}" if metric.endswith("accuracy") else f"{value:.4g}"
        sent = summary["bytes_sent_per_worker"]  # a lone worker sends nothing
        sent_mb = f", {sent / 1e6:,.2f} MB sent" * bool(sent)
        return f"{metric.replace('_', ' ')} {shown}{sent_mb}, {summary['seconds']:.0f} s"


class Consensus(RunKind):
    """`thinwire consensus` with one averager and one step size in each run."""

    reserved = frozenset({"json", "figure"})

    def base(self, recipe: str | None) -> Any:
        from ..bench import ConsensusBench

        require(recipe is None, 'a sweep has a recipe or command = "consensus", not both')
        return ConsensusBench()

    def as_dict(self, config: Any) -> dict[str, Any]:
        from ...average import Averager
        from ..bench.rows import as_parsed

        one = len(config.averager) == 1 and len(config.step_sizes) <= 1
        require(one, "averager and step_sizes: one of each in a run; list several in [grid]")
        return {"command": "consensus"} | asdict(config) | {"averager": repr(as_parsed(config.averager[0], Averager))}

    def check(self, config: Any) -> None:
        from ...average import Averager
        from ..bench.rows import as_parsed

        _check_number_of_workers(as_parsed(config.averager[0], Averager), config.workers)

    def run(self, config: Any, folder: Path) -> None:
        from ..bench.consensus import reaching

        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.as_dict(config))
        rows = replace(config, json=folder / "consensus.json").run()
        first, last, reached = rows[0], rows[-1], reaching(rows, config.target)
        left = None if last["squared_error"] is None else last["squared_error"] / first["squared_error"]
        write_json(
            folder / "summary.json",
            {key: first[key] for key in ("averager", "step_size")}
            | {"workers": config.workers, "seed": config.seed, "target": config.target}
            | {f"{key}_to_target": reached and reached[key] for key in ("round", "bits_sent")}
            | {"bits_sent": last["bits_sent"], "error_left": left},
        )

    def collect(self, folders: Sequence[Path], output: Path) -> Path | None:
        """All rows, as one `thinwire consensus --json` with many averagers and step sizes writes them."""
        from ..report.consensus import measured

        joint, rows = output / "consensus.json", []
        for path in (folder / "consensus.json" for folder in folders):
            found = measured(path)
            if not found:
                log.warning(
                    f"{path} is damaged, so {joint} lacks its run; remove its folder, and the same command runs it"
                )
            rows += found
        write_json(joint, rows)
        return joint

    def cores(self, config: Any) -> int:
        return config.workers if config.processes else 1

    def progress(self, config: Any, row: Plain) -> str:
        return "running"

    def result(self, summary: Plain) -> str:
        left = "diverged" if summary["error_left"] is None else f"{summary['error_left']:.1e} of the error left"
        if summary["bits_sent_to_target"] is None:
            return f"{left}, {summary['target']:g} not reached"
        return f"{left}, {summary['target']:g} after {summary['bits_sent_to_target'] / 1e6:.3g} Mbit"


RUN_KINDS: dict[str, RunKind] = {"train": Train(), "consensus": Consensus()}
"""The tasks by the name of a sweep's `command`; the default is "train"."""


@cache  # a grid has many runs with the same averager
def _check_number_of_workers(averager: Averager, workers: int) -> None:
    """Raises a ValueError if the averager does not suit so many workers."""
    import torch

    from ...comm import LocalWorld

    LocalWorld(workers).run(lambda comm: averager.init([("x", torch.zeros(4, 4))], comm))
