"""Writes a sweep as a batch file of SLURM: one job array, with one or several runs in a job; and submits it.

A job starts its runs one after the other, each in a process of its own, and skips those that are finished. Before SLURM ends
the job, its run gets a signal and saves a checkpoint, and the job is requeued. It then goes on.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...algorithm import require
from ..files import read_json, write_json
from ..train.run.interrupt import SAVED, requeue
from .execute import read_run, write_down
from .file import PlannedRun
from .local import run_locally
from .status import status_of

EXAMPLE = "--slurm partition=gpu,time=2:00:00"
WARNING_SECONDS = 90  # before the end of a job's time; more than a run has for its checkpoint

SCRIPT = """\
#!/bin/bash
# Number of runs: {num_runs}, of jobs: {num_jobs}. Read it, change it, and submit it with: sbatch {file}
# A job skips runs that are finished. Before its time ends it saves a checkpoint, is requeued, and goes on.
{options}

pack={pack}  # runs of a job, one after the other
runs=(
{names}
)
srun {python} -m thinwire.lab.sweep job {records} "${{runs[@]:SLURM_ARRAY_TASK_ID * pack:pack}}"
"""


def write_script(runs: Sequence[PlannedRun], options: str, pack: int = 1) -> Path:
    """Write the batch file, and what its jobs read; returns its path.

    Args:
        runs: at least one.
        options: of sbatch, as in "partition=gpu,time=2:00:00,gres=gpu:2"; "array-parallelism=8" runs eight jobs at once.
        pack: runs of a job; lower => more jobs at a time.

    Raises:
        ValueError: an option cannot be read, or the files cannot be written.
    """
    given = parsed_options(options)
    require("time" in given, f"--slurm needs a time, as in {EXAMPLE}; a job that takes longer is requeued and goes on")
    for run in runs:
        write_down(run)
    records = runs[0].records.parent
    file = records / "slurm" / f"{records.parent.name}.sbatch"
    at_once = given.pop("array-parallelism", "")
    jobs = -(-len(runs) // pack)
    lines = {
        "job-name": records.parent.name,
        "chdir": str(Path.cwd()),
        "array": f"0-{jobs - 1}" + f"%{at_once}" * bool(at_once),
        "output": str(file.with_name("%A_%a.log")),
        # A requeued job goes on in the same log.
        "open-mode": "append",
        # A run starts its own workers.
        "ntasks": "1",
        "cpus-per-task": str(max(run.task.cores(run.config) for run in runs)),
        "signal": f"{signal.SIGUSR2.name.removeprefix('SIG')}@{WARNING_SECONDS}",
    } | given
    text = SCRIPT.format(
        num_runs=len(runs),
        num_jobs=jobs,
        file=shlex.quote(str(file)),
        options="\n".join(
            [*(f"#SBATCH --{name}={_quoted(value)}" for name, value in lines.items()), "#SBATCH --requeue"]
        ),
        pack=pack,
        names="\n".join(f"  {run.folder.name}" for run in runs),
        python=shlex.quote(sys.executable),
        records=shlex.quote(str(records)),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def submit(runs: Sequence[PlannedRun], options: str, pack: int = 1) -> list[str]:
    """Submit runs as one job array; returns each run's job. Arguments and errors are those of `write_script`.

    Raises:
        ValueError: SLURM is not here, or refuses the job.
    """
    _check_here()
    file = write_script(runs, options, pack)
    done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    require(done.returncode == 0, f"SLURM refused {file}: {' '.join(done.stderr.split())}")
    array = done.stdout.strip().partition(";")[0]  # the cluster's name may follow
    jobs = [f"{array}_{i // pack}" for i in range(len(runs))]
    for run, job in zip(runs, jobs, strict=True):
        write_json(run.records / "job.json", {"id": job})
    return jobs


def work(records: Path, names: Sequence[str]) -> int:
    """The work of a job: these runs, one after the other; returns the exit code.

    Args:
        records: the folder with the runs' own folders.
        names: of the runs.
    """
    is_ending = False

    def end(number: int, frame: object) -> None:
        nonlocal is_ending
        is_ending = True
        signal.raise_signal(signal.SIGTERM)  # which stops the runs in good order

    signal.signal(signal.SIGUSR2, end)
    runs = [read_run(records / name / "run.json") for name in names]
    try:
        run_locally(runs, 1)
    except KeyboardInterrupt:
        print(f"thinwire: {requeue() if is_ending else 'stopped'}", flush=True)
        return SAVED
    return int(any(status_of(run).state == "failed" for run in runs))


def queued(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs whose job from an earlier submission is still queued or running.

    Raises:
        ValueError: SLURM is not installed here, or does not list its jobs.
    """
    _check_here()
    listed = subprocess.run(["squeue", "--me", "--noheader", "--array", "--format=%i"], capture_output=True, text=True)
    why = " ".join(listed.stderr.split())
    require(
        listed.returncode == 0, f"squeue does not say which jobs are queued: {why}; try again, nothing was submitted"
    )
    alive = set(listed.stdout.split())
    jobs = {run.identity: read_json(run.records / "job.json") or {} for run in runs}
    return [run for run in runs if jobs[run.identity].get("id") in alive]


def parsed_options(text: str) -> dict[str, str]:
    """Options of sbatch by name. A comma separates options only if a name and "=" follow it.

    Example:
        >>> parsed_options("partition=a,b,time=1:30:00,cpus-per-task=4")
        {'partition': 'a,b', 'time': '1:30:00', 'cpus-per-task': '4'}
    """
    pairs = [part.partition("=") for part in re.split(r",(?=[\w-]+=)", text)]
    for name, equals, value in pairs:
        complete = name and equals and value
        require(bool(complete), f"--slurm takes name=value, with commas between, got {text!r}; as in {EXAMPLE}")
    return {name.strip().replace("_", "-"): value.strip() for name, _, value in pairs}


def _quoted(value: str) -> str:
    """A value as sbatch reads it: quotes group characters, and a backslash escapes the next one, between quotes too.

    Example:
        >>> _quoted("1:30:00"), _quoted("my runs")
        ('1:30:00', '"my runs"')
    """
    return value if shlex.quote(value) == value else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _check_here() -> None:
    there = shutil.which("sbatch") is not None
    require(there, "--slurm: there is no sbatch here; submit from a machine of the cluster, or run with --local 1")
