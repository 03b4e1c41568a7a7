"""Submits a sweep as a SLURM job array with submitit: one array task for each run.

A task starts the run's process and waits for it. When SLURM is about to end the task (preemption or time limit), the run
gets a signal, saves a checkpoint if it can, and is requeued. It then continues.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...algorithm import require
from ..files import write_json
from .execute import read_run, start, write_down
from .file import PlannedRun
from .local import GRACE_SECONDS, POLL_SECONDS
from .status import is_locked
from .tasks import read_json

EXAMPLE = "--slurm partition=gpu,time=2:00:00"
MOST_REQUEUES = 1000  # of a run after time limits; each attempt gets further than the one before
# Options with their own names in submitit; all others are passed to sbatch.
SHARED = {"nodes": "nodes", "cpus_per_task": "cpus_per_task", "gpus_per_node": "gpus_per_node"}


class Job:
    """The work of an array task. submitit requeues a job whose class has a `checkpoint` method."""

    def __init__(self):
        self.process: subprocess.Popen | None = None

    def __call__(self, run_file: str) -> int | None:
        """Execute the run of this `run.json`; None if it is running elsewhere."""
        self.process = start(read_run(Path(run_file)))
        return None if self.process is None else self.process.wait()

    def checkpoint(self, run_file: str) -> Any:
        """Stop the run and ask submitit to requeue it. A signal handler calls this."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            self.process.terminate()
            # Poll the lock: `wait` is not reentrant, and the signal has interrupted one.
            deadline = time.monotonic() + GRACE_SECONDS
            while is_locked(Path(run_file).with_name("lock")) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return DelayedSubmission(Job(), run_file)


def submit(runs: Sequence[PlannedRun], options: str, folder: Path, cluster: str = "slurm") -> list[str]:
    """Submit runs as one job array; returns the jobs' identifiers.

    Args:
        runs: at least one.
        options: of sbatch, as in "partition=gpu,time=2:00:00,gres=gpu:2".
        folder: for submitit's own files.
        cluster: "slurm", or one of submitit's stand-ins: "local" for processes here, "debug" for this process.

    Raises:
        ValueError: submitit is not installed, SLURM is not here or refuses the job, or an option cannot be read.
    """
    given = parsed_options(options)
    executor = _executor(folder, cluster)
    processors = max(run.task.workers(run.config) * run.task.threads(run.config) for run in runs)
    executor.update_parameters(**_parameters({"cpus_per_task": str(processors)} | given))
    for run in runs:
        write_down(run)
    try:
        jobs = executor.map_array(Job(), [str(run.records / "run.json") for run in runs])
    except Exception as error:  # submitit and sbatch raise many types
        raise ValueError(f"SLURM refused the job array: {' '.join(str(error).split())}") from None
    for run, job in zip(runs, jobs, strict=True):
        write_json(run.records / "job.json", {"id": job.job_id})
    return [job.job_id for job in jobs]


def queued(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs whose job from an earlier submission is still queued or running.

    Raises:
        ValueError: SLURM is not installed here.
    """
    _check_here()
    listed = subprocess.run(["squeue", "--me", "--noheader", "--array", "--format=%i"], capture_output=True, text=True)
    alive = set(listed.stdout.split())
    jobs = {run.identity: read_json(run.records / "job.json") or {} for run in runs}
    return [run for run in runs if jobs[run.identity].get("id") in alive]


def parsed_options(text: str) -> dict[str, str]:
    """Options of sbatch by name. A comma separates options only if a name and "=" follow it.

    Example:
        >>> parsed_options("partition=a,b,time=1:30:00,cpus-per-task=4")
        {'partition': 'a,b', 'time': '1:30:00', 'cpus_per_task': '4'}
    """
    pairs = [part.partition("=") for part in re.split(r",(?=[\w-]+=)", text)]
    for name, equals, value in pairs:
        complete = name and equals and value
        require(bool(complete), f"--slurm takes name=value, with commas between, got {text!r}; as in {EXAMPLE}")
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}


def minutes(time: str) -> int:
    """SLURM's notation of a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    Example:
        >>> [minutes(text) for text in ("90", "90:00", "1:30:00", "2-0", "1-12:30")]
        [90, 90, 90, 2880, 2190]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise ValueError(f"time must be minutes, hours:minutes:seconds or days-hours:minutes, got {time!r}")
    days, *parts = (int(part or 0) for part in match.groups())
    if match[1] is not None or match[4] is not None:
        hours, mins, seconds = parts
    else:
        hours, (mins, seconds) = 0, parts[:2]
    return max(1, (days * 24 + hours) * 60 + mins + (seconds > 0))


def _check_here() -> None:
    there = shutil.which("sbatch") is not None
    require(there, "--slurm: there is no sbatch here; submit from a machine of the cluster, or run with --local 1")


def _executor(folder: Path, cluster: str) -> Any:
    try:
        import submitit
    except ImportError:
        raise ValueError("--slurm needs submitit: pip install thinwire[slurm]") from None
    if cluster == "slurm":
        _check_here()
    return submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=MOST_REQUEUES)


def _parameters(options: dict[str, str]) -> dict[str, Any]:
    """Translate options into submitit's parameters."""
    from submitit.slurm.slurm import SlurmExecutor

    values = {name: int(value) if value.isdigit() else value for name, value in options.items()}
    parameters: dict[str, Any] = {"name": "thinwire-sweep"}
    require("time" in values, f"--slurm needs a time, as in {EXAMPLE}; a run that takes longer is requeued and goes on")
    values.pop("time")
    parameters["timeout_min"] = minutes(options["time"])
    known = SlurmExecutor._valid_parameters()
    for name, value in values.items():
        if name in SHARED:
            parameters[SHARED[name]] = value
        elif name in known:
            parameters[f"slurm_{name}"] = value
        else:
            parameters.setdefault("slurm_additional_parameters", {})[name.replace("_", "-")] = value
    return parameters
