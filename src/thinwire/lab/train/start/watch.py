"""Watches the workers of this machine, whose number is fixed.

A worker that fails, exits early or stays stopped (SIGSTOP) ends the run. One line names its rank and the reason. Ctrl-C,
SIGTERM and SIGUSR1 are passed on to the workers, which stop after their step with a checkpoint. Workers that do not stop in
time are killed; a second Ctrl-C kills all of them.

`torch.multiprocessing` and `torch.distributed.elastic` watch processes too, but they cannot replace this file. They end all
workers when one fails. They do not see a stopped worker, do not wait for a checkpoint after a signal, do not tell a user error
of all workers from the failure of one, and blame the worker that ended first, which may only have lost its connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from ..folder.checkpoint import latest
from ..run.interrupt import Interrupted
from ..signals import SIGNALS
from .presence import Store
from .worker import MISTAKEN

log = logging.getLogger("thinwire")

NO_FORK_SERVER = 255  # what `multiprocessing` says of all workers whose fork server has died
NOTICE_SECONDS = 5  # after which a worker under SIGSTOP is reported; --timeout ends the run
STOP_SECONDS = 30  # between asking workers to stop and killing them; as long as SLURM waits by default
FORK_SERVER_DIED = "the fork server, the process that starts the workers, was killed"


class WorkerError(RuntimeError):
    """A worker failed; the message names its rank and the reason."""


class Requests:
    """Signals to this process, which are passed on to the workers."""

    def __init__(self, workers: Sequence[BaseProcess]):
        self._workers = workers
        self.signal = 0
        self.deadline = float("inf")

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal and number == signal.SIGINT and sys.stderr.isatty():
            log.info("stopping after this step; Ctrl-C again stops at once")
        self.signal = self.signal or number
        self.deadline = min(self.deadline, time.monotonic() + STOP_SECONDS)
        self.pass_on()

    def pass_on(self) -> None:
        for worker in self._workers:
            if self.signal and worker.pid is not None and worker.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, self.signal)


@contextmanager
def requests_passed_on(workers: Sequence[BaseProcess]) -> Iterator[Requests]:
    """Context that passes signals on to the workers, and kills all that are left at its end."""
    requests = Requests(workers)
    handlers = {number: signal.signal(number, requests.receive) for number in SIGNALS}
    try:
        yield requests
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def watch(workers: Sequence[BaseProcess], folder: Path, requests: Requests, store: Store, limit_seconds: float) -> None:
    """Return when all workers have finished; raise if one fails or stays stopped for longer than the limit.

    A worker that is stopped for some seconds is reported on stderr, as all others wait for it.
    """
    signalled = [128 + number for number in SIGNALS]
    running, stopped_since, reported = list(workers), dict[int, float](), set[int]()
    while running:
        wait([worker.sentinel for worker in running], timeout=1)
        if any(worker.exitcode == MISTAKEN for worker in workers):
            raise ValueError(store.get("mistake").decode())
        for rank, worker in enumerate(workers):  # first: the others fail because it is gone
            if worker.exitcode == 0 and not store.check([f"finished/{rank}"]):
                raise WorkerError(
                    f"worker {rank} left the run before its end, with exit code 0; what was saved is in {folder}"
                )
        if any(worker.exitcode not in (None, 0, *signalled) for worker in workers):
            raise WorkerError(diagnosis(workers, folder, store))
        running = [worker for worker in running if worker.exitcode is None]
        requests.pass_on()  # again: a worker that was still starting may have missed it
        now = time.monotonic()
        stopped_since = {rank: stopped_since.get(rank, now) for rank in stopped(workers)}
        reported &= stopped_since.keys()
        for rank, since in stopped_since.items():
            if now - since >= limit_seconds:
                raise WorkerError(diagnosis(workers, folder, store))
            if now - since >= NOTICE_SECONDS and rank not in reported:
                reported.add(rank)
                pid = workers[rank].pid
                log.warning(
                    f"worker {rank} (process {pid}) is stopped (SIGSTOP), and the others wait for it; "
                    f"kill -CONT {pid} lets it go on; after {limit_seconds:g} seconds (--timeout) the run ends"
                )
        if running and now > requests.deadline:
            raise WorkerError(too_slow(workers, requests.signal, folder))
    if workers[0].exitcode:
        saved = latest(folder / "checkpoints")
        assert saved is not None, "a worker saves a checkpoint before it ends with a signal's exit code"
        raise Interrupted(workers[0].exitcode - 128, saved)


def stopped(workers: Sequence[BaseProcess]) -> list[int]:
    """Ranks of the workers that are stopped, as after SIGSTOP."""
    return [rank for rank, worker in enumerate(workers) if worker.exitcode is None and _state(worker.pid) == "T"]


def _state(pid: int | None) -> str:
    """The state letter of a process on Linux, "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def too_slow(workers: Sequence[BaseProcess], number: int, folder: Path) -> str:
    """The message for workers that did not stop in time. If one is stopped by SIGSTOP, the others wait for it."""
    late = stopped(workers) or [rank for rank, worker in enumerate(workers) if worker.exitcode is None]
    name = signal.Signals(number).name
    return (
        f"worker {late[0]} did not stop within {STOP_SECONDS} seconds of {name} and was killed"
        f"{'; it was stopped by SIGSTOP' * bool(stopped(workers))}; what was saved is in {folder}"
    )


def diagnosis(workers: Sequence[BaseProcess], folder: Path, store: Store) -> str:
    """The worker that failed first, and why. The others fail after it, because they lose their connection."""
    for rank, worker in enumerate(workers):
        exitcode = worker.exitcode or 0
        if exitcode < 0:
            name = signal.Signals(-exitcode).name
            memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
            return f"worker {rank} was ended by {name}{memory}; what was saved is in {folder}"
    for rank in stopped(workers):
        pid = workers[rank].pid
        return f"worker {rank} (process {pid}) was stopped by SIGSTOP and did not go on; what was saved is in {folder}"
    silent = [
        (rank, worker.exitcode)
        for rank, worker in enumerate(workers)
        if worker.exitcode and not store.check([f"failed/{rank}"])
    ]
    if silent:  # it did not come as far as to say why; those that did have lost their connection to it
        rank, code = silent[0]
        if code == NO_FORK_SERVER:
            return f"{FORK_SERVER_DIED}, and all workers with it; what was saved is in {folder}"
        return f"worker {rank} ended with exit code {code} and gave no reason; what was saved is in {folder}"
    reports = [store.get(name).decode() for rank in range(len(workers)) if store.check([name := f"failed/{rank}"])]
    first = min(reports, key=lambda report: int(report.split()[0])).split(maxsplit=1)[1]
    return first if folder.is_dir() else f"{first}; the run's folder {folder} was removed"
