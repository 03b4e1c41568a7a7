"""The state of a run, read from its files alone, so that any process can read it during a sweep.

    finished    summary.json is in its folder, and config.json there has the run's identity
    running     its lock is held
    stopped     it was ended on purpose, and goes on when the sweep does
    failed      it ended otherwise; the log says why, in its last line or, if the process died, in the first one with an error
    waiting     none of these

The lock is a file that the run's process holds with `flock`: the system lets go of it however the process ends.
`filelock` cannot replace it: its locks are exclusive, so two processes that look at a run at once would each see it running.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ..files import read_json
from ..train.run.interrupt import SAVED
from .file import PlannedRun
from .identity import identity

State = Literal["waiting", "running", "stopped", "failed", "finished"]
STOPPED_CODES = (SAVED, 130, 143)  # with a checkpoint; after Ctrl-C; after SIGTERM, before the first step
TAIL_BYTES = 16384
BEGINS = "--- "  # a line of the log that says when a process of the run was started
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b|\S+: No module named ")


@dataclass(frozen=True)
class Status:
    """A run's state, and in a few words how far it is, what it found or why it failed."""

    state: State
    detail: str = ""


def status_of(run: PlannedRun) -> Status:
    """What the files say of a run."""
    result = result_of(run)
    if result is not None:
        return Status("finished", result)
    if is_locked(run.records / "lock"):
        return Status("running", _progress(run))
    code = (read_json(run.records / "ended.json") or {}).get("code", 0)
    if code in STOPPED_CODES:
        return Status("stopped", _progress(run))
    if code != 0:  # after a good end, somebody has taken the result away
        return Status("failed", _reason(run, code))
    job = (read_json(run.records / "job.json") or {}).get("id")
    return Status("waiting", f"job {job}" if job else "")


def result_of(run: PlannedRun) -> str | None:
    """The result of this very configuration, in a few words; None if it has not finished, or a file is damaged."""
    config, summary = (read_json(run.folder / name) for name in ("config.json", "summary.json"))
    if config is None or summary is None or identity(config) != run.identity:
        return None
    try:
        return run.task.result(summary)
    except (LookupError, TypeError, ValueError, AttributeError):  # it is of something else
        return None


def is_locked(path: Path) -> bool:
    """Whether some process holds this lock; only looks."""
    try:
        with open(path) as file:
            # Shared, or two processes that look at once would each see the other's lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def locked(file: IO[str]) -> bool:
    """Try to lock this file; False if another process holds the lock. One that only looks keeps nobody out."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if is_locked(Path(file.name)):
                return False
            time.sleep(0.01)


def log_tail(run: PlannedRun, num_lines: int) -> list[str]:
    """The last lines of a run's log that are not empty."""
    return _last_lines(run.records / "log.txt")[-num_lines:]


def _progress(run: PlannedRun) -> str:
    for line in reversed(_last_lines(run.folder / "metrics.jsonl")):
        try:
            return run.task.progress(run.config, json.loads(line))
        except (ValueError, LookupError, TypeError, RecursionError):  # half a line, at either end of what was read
            continue
    return ""


def _reason(run: PlannedRun, code: int | None) -> str:
    if code is None:
        lines = _last_lines(run.records / "log.txt")
        begin = max((i for i, line in enumerate(lines) if line.startswith(BEGINS)), default=-1)
        errors = (line for line in lines[begin + 1 :] if ERROR.match(line))
        return next(errors, "ended without a word: killed, or out of memory?")
    return "".join(log_tail(run, 1)).removeprefix("thinwire: ") or f"exit code {code}"


def _last_lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]
