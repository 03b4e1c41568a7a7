"""`thinwire sweep`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...algorithm import require
from ...options import require_integer
from .options import parsed, show, shown_as
from .originals import SWEEP

if TYPE_CHECKING:
    from ..sweep import Sweep


@dataclass(frozen=True)
class SweepCommand:
    """Start all runs of a TOML file: a recipe or `consensus`, with fixed values and a grid of others.

    Finished runs are recognised by their configuration and skipped. So the same command continues a stopped sweep, and
    tries failed runs again.
    """

    file: Annotated[Path, shown_as("FILE")]
    """The TOML file, such as examples/sweeps/digits.toml."""
    local: int | None = None
    """Run on this machine, this many runs at a time. The default is 1."""
    slurm: str | None = None
    """Submit a SLURM job array with these options of sbatch, such as "partition=gpu,time=2:00:00"."""
    pack: int = 1
    """With --slurm, runs of a job, one after the other; higher => fewer jobs."""
    dry_run: bool = False
    """List the runs and their states, and start nothing. With --slurm, write the batch file and submit nothing."""
    status: bool = False
    """Show the state of all runs, live on a terminal. Works while the sweep runs in another terminal."""

    def __post_init__(self):
        given = [self.local is not None, self.slurm is not None, self.dry_run and self.slurm is None, self.status]
        require(sum(given) <= 1, "--local, --slurm, --dry-run and --status: choose one of them")
        require_integer("--pack", self.pack, 1)
        require(self.pack == 1 or self.slurm is not None, "--pack is for the jobs of --slurm")
        require_integer("--local", self.local, 1, or_none=True)


def sweep_command(options: list[str]) -> None:
    """Run a sweep, or show its state."""
    asked = parsed(SweepCommand, options, "thinwire sweep", originals=SWEEP)
    from ..sweep import read_sweep
    from ..sweep.file import has_begun, where_it_runs
    from ..sweep.show import plan_table, show_failures, watch

    sweep = read_sweep(asked.file)
    if asked.slurm is not None:
        _submit(sweep, asked)
    elif asked.dry_run:
        show(plan_table(sweep))
    elif asked.status:
        sweep = where_it_runs(sweep)
        if not has_begun(sweep):
            print(f"nothing has been started in {sweep.output.absolute()}; call --status where the sweep was started")
        watch(sweep)
        show_failures(sweep)
    else:
        _run_here(sweep, asked.local or 1)
        _collect(sweep)
        if show_failures(sweep):
            sys.stdout.flush()  # `main` does not flush after SystemExit
            raise SystemExit(1)


def _run_here(sweep: Sweep, at_once: int) -> None:
    """Run on this machine; show a table on a terminal, and one line for each run elsewhere."""
    from rich.console import Console

    from ..output import WhileOpen
    from ..sweep import run_locally
    from ..sweep.show import LiveTable, counted, statuses_of

    console = Console(file=WhileOpen().as_text)
    if console.is_terminal:
        with LiveTable(sweep, console) as table:
            run_locally(sweep.runs, at_once, table.refresh)
        return
    print(f"{sweep.output}: {counted(statuses_of(sweep.runs))}", flush=True)
    run_locally(sweep.runs, at_once)
    print(f"{sweep.output}: {counted(statuses_of(sweep.runs))}")


def _submit(sweep: Sweep, asked: SweepCommand) -> None:
    """Submit the runs that are not finished, running or queued; with --dry-run, write the batch file of the first two."""
    from ..sweep.slurm import queued, submit, write_script
    from ..sweep.status import status_of

    options = asked.slurm or ""
    left = [run for run in sweep.runs if status_of(run).state not in ("finished", "running")]
    if asked.dry_run:
        require(bool(left), "all runs are finished or running; there is nothing to submit")
        print(f"  sbatch {shlex.quote(str(write_script(left, options, asked.pack)))}")
        return
    # Asked only now, so that --dry-run needs no SLURM.
    waiting = {run.identity for run in queued(left)}
    left = [run for run in left if run.identity not in waiting]
    if left:
        jobs = submit(left, options, asked.pack)
        print(f"{sweep.output}: {len(left)} run{'s' * (len(left) > 1)} submitted, {jobs[0]} to {jobs[-1]}")
    print(f"  {len(sweep.runs) - len(left)} runs are finished, running or queued already")
    print(f"  thinwire sweep {sweep.file} --status")


def _collect(sweep: Sweep) -> None:
    """Write the joint result of the finished runs, if their task has one."""
    from ..sweep.status import result_of

    folders = [run.folder for run in sweep.runs if result_of(run) is not None]
    collected = sweep.runs[0].task.collect(folders, sweep.output)
    if collected is not None:
        print(f"  {collected}")
