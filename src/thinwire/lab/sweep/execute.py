"""Starts and executes one run of a sweep, in a process of its own.

`run.json` holds the run's recipe and values. So later changes of the sweep's file do not affect it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from ...algorithm import able_to
from ..files import read_json, write_json
from .file import PlannedRun, planned
from .status import BEGINS, locked, result_of

# Variables of a launcher (torchrun, srun, mpirun) that started the sweep. Runs must not see them: they start their own workers.
LAUNCHER = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_\w+|MASTER_\w+|TORCHELASTIC_\w+"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|STEP_\w+)|OMPI_\w+|PMI_\w+|PMIX_\w+|MPI_\w+"
)


def start(run: PlannedRun) -> subprocess.Popen | None:
    """Start a run's process and append its output to its log; None if the run is already running, here or elsewhere.

    Raises:
        ValueError: its files cannot be written, or the system starts no process.
    """
    write_down(run)
    able = able_to(f"start the run {run.folder.name}", "the same command tries again")
    with able, open(run.records / "lock", "w") as lock, open(run.records / "log.txt", "a") as log:
        with able_to(f"lock a file in {run.records}", "choose an output on a file system that has locks"):
            is_free = locked(lock)
        if not is_free:
            return None
        print(f"{BEGINS}{time.strftime('%Y-%m-%d %H:%M:%S')}, on {os.uname().nodename}", file=log, flush=True)
        # Stays if the process dies, also before it has read its run.
        write_json(run.records / "ended.json", {"code": None})
        outer = {name: value for name, value in os.environ.items() if not LAUNCHER.fullmatch(name)}
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "thinwire.lab.sweep", str(run.records / "run.json")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=outer | {"OMP_NUM_THREADS": "1"},  # workers get as many as their configuration says
            # The lock belongs to the open file, so the child keeps it after this process closes it.
            pass_fds=[lock.fileno()],
            start_new_session=True,  # Ctrl-C reaches only the sweep, which then stops its runs
        )


def write_down(run: PlannedRun) -> None:
    """Write `run.json` and its folder.

    Raises:
        ValueError: it cannot be written.
    """
    with able_to(f"write to {run.folder.parent}", "choose another output"):
        run.records.mkdir(parents=True, exist_ok=True)
        plain = {"command": run.command, "values": run.values, "varied": run.varied}
        write_json(run.records / "run.json", plain | {"folder": str(run.folder)})


def read_run(path: Path) -> PlannedRun:
    """The run that `write_down` wrote."""
    plain = read_json(path)
    if plain is None:
        raise ValueError(f"{path} holds no run of a sweep")
    fixed = {name: value for name, value in plain["values"].items() if name not in plain["varied"]}
    return planned(plain["command"], None, fixed, plain["varied"], Path(plain["folder"]).parent)


def execute(path: Path) -> int:
    """Run in this process; returns the exit code and writes it to `ended.json`."""
    run = read_run(path)
    try:
        code = 0 if result_of(run) is not None else _code_of(run)  # maybe another process has finished it
    except SystemExit as exit:  # a signal
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    write_json(run.records / "ended.json", {"code": code})
    return code


def _code_of(run: PlannedRun) -> int:
    from ..train import Interrupted, WorkerError

    try:
        run.task.run(run.config, run.folder)
        return 0
    except Interrupted as stop:
        print(f"thinwire: {stop}", flush=True)
        return stop.exit_code
    except (ValueError, WorkerError, KeyboardInterrupt) as error:
        print(f"thinwire: {' '.join(str(error).split()) or 'stopped'}", flush=True)
        return 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, ValueError) else 1
