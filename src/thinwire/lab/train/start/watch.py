"""Watches the workers of this machine.

A worker that fails, exits early or stays stopped (SIGSTOP) ends the run. One line names its number and the reason. Ctrl-C,
SIGTERM, SIGUSR1 and SIGHUP are passed on to the workers, which stop after their step with a checkpoint. Workers that do not
stop in time are killed; a second Ctrl-C kills all of them.

In an elastic run, a worker that a signal ends (SIGKILL, the kernel's memory killer, a crash) is started again, and healed by
the others. One that stays stopped is killed first. A worker that is left out of the run is started again after a while. All
workers end with the fork server; they and it are started again too.

`torch.multiprocessing` and `torch.distributed.elastic` watch processes too, but they cannot replace this file. They end or
restart all workers when one fails; in an elastic run the others train on here. They do not see a stopped worker, do not wait
for a checkpoint after a signal, do not tell a user error of all workers from the failure of one, and blame the worker that
ended first, which may only have lost its connection.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from ....comm.elastic.forming import LEFT_OUT_SECONDS
from ....comm.store import Store
from ....messages import log
from ..folder.checkpoint import latest
from ..run.interrupt import Interrupted
from ..signals import SIGNALS, heard
from .worker import LEFT_OUT, MISTAKEN

NO_FORK_SERVER = 255  # what `multiprocessing` says of all workers whose fork server has died
NOTICE_SECONDS = 5  # after which a worker under SIGSTOP is reported; --timeout ends the run
STOP_SECONDS = 30  # between asking workers to stop and killing them; as long as SLURM waits by default
MAX_RESTARTS = 20  # of one worker of an elastic run; one that dies more often would die for ever
STOPPED_SECONDS = 15.0  # after which a worker of an elastic run under SIGSTOP is killed, and started again
LAST_SECONDS = 30.0  # how long workers of an elastic run may still run after another one has finished it
ENDINGS = (0, *(128 + number for number in SIGNALS))  # exit codes of workers that have ended well
FORK_SERVER_DIED = "the fork server, the process that starts the workers, was killed"


class WorkerError(RuntimeError):
    """A worker failed; the message names its number and the reason."""


class Requests:
    """Signals to this process, which are passed on to the workers."""

    def __init__(self, workers: Sequence[BaseProcess]):
        self._workers = workers
        self.signal = 0
        self.deadline = float("inf")

    def receive(self, number: int, frame: FrameType | None) -> None:
        # The second Ctrl-C ends all at once.
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal and number == signal.SIGINT and sys.stderr.isatty():
            log.info("stopping, after the step that is under way; Ctrl-C again stops at once")
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
    handlers = {number: signal.signal(number, requests.receive) for number in heard(SIGNALS)}
    try:
        yield requests
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Watch:
    """Watches the workers of this machine.

    Args:
        workers: by place; those that are started again replace others in this list.
        folder: of the run.
        requests: signals to this process.
        store: the launcher's.
        limit_seconds: how long a worker may stay stopped.
        restart: starts the worker of a place in an elastic run again; None where the number of workers is fixed.
        first_worker: number of the worker at place 0.
    """

    def __init__(
        self,
        workers: list[BaseProcess],
        folder: Path,
        requests: Requests,
        store: Store,
        limit_seconds: float,
        restart: Callable[[int], BaseProcess] | None = None,
        first_worker: int = 0,
    ):
        self.workers, self.folder, self.requests, self.store = workers, folder, requests, store
        self.restart, self.first_worker = restart, first_worker
        self.limit_seconds = limit_seconds if restart is None else min(limit_seconds, STOPPED_SECONDS)
        self.restarts = [0] * len(workers)
        self.stopped_since: dict[int, float] = {}
        self.reported: set[int] = set()
        self.left_out_since: dict[int, float] = {}
        self.end = float("inf")

    def until_the_end(self) -> None:
        """Return when the run has ended.

        Raises:
            ValueError: all workers found the same user error.
            WorkerError: a worker failed, or stayed stopped for longer than the limit; in an elastic run, died too often.
            Interrupted: a signal stopped the run.
        """
        while running := [worker for worker in self.workers if worker.exitcode not in ENDINGS]:
            wait([worker.sentinel for worker in running if worker.exitcode is None], timeout=0.2)
            if any(worker.exitcode == MISTAKEN for worker in self.workers):
                raise ValueError(self.store.get("mistake").decode())
            for place, worker in enumerate(self.workers):  # first: the others fail because it is gone
                number = self.first_worker + place
                if worker.exitcode == 0 and not self.store.check([f"finished/{number}"]):
                    raise self._ended(f"worker {number} left the run before its end, with exit code 0")
            now = time.monotonic()
            if self.restart is not None and any(worker.exitcode in ENDINGS for worker in self.workers):
                self.end = min(self.end, now + LAST_SECONDS)
            for place, worker in enumerate(self.workers):
                if worker.exitcode is not None and worker.exitcode not in ENDINGS:
                    self._has_died(place, worker.exitcode, now)
            self._look_at_stopped(now)
            self.requests.pass_on()  # again: a worker that was still starting may have missed it
            if now > self.requests.deadline and any(worker.exitcode is None for worker in self.workers):
                raise self._too_slow()
            if now > self.end:
                break
        self._check_end()

    def _has_died(self, place: int, code: int, now: float) -> None:
        """Start a worker of an elastic run again, unless it failed with an error of its own. Otherwise end the run."""
        if self.restart is None:
            raise self._failure()
        if self.end < float("inf"):  # the others need it no more
            return
        number, has_ended_too_often = self.first_worker + place, self.restarts[place] == MAX_RESTARTS
        if code == LEFT_OUT:
            since = self.left_out_since.setdefault(place, now)
            others_go_on = any(worker.exitcode is None for worker in self.workers)
            if (has_ended_too_often and others_go_on) or now < since + LEFT_OUT_SECONDS:
                return
            del self.left_out_since[place]
            why = f"worker {number} was left out"
        elif code == NO_FORK_SERVER:
            why = f"{FORK_SERVER_DIED}, and worker {number} with it"
        elif code < 0:
            why = f"worker {number} was ended by {signal.Signals(-code).name}"
        else:
            raise self._failure()
        if has_ended_too_often:
            raise self._failure()
        self.restarts[place] += 1
        log.warning(f"{why}; it is started again")
        self.workers[place] = self.restart(place)

    def _look_at_stopped(self, now: float) -> None:
        """Report workers that are stopped: where their number is fixed, all others wait for them."""
        self.stopped_since = {place: self.stopped_since.get(place, now) for place in stopped(self.workers)}
        self.reported &= self.stopped_since.keys()
        for place, since in self.stopped_since.items():
            pid = self.workers[place].pid
            if now - since >= self.limit_seconds:
                if self.restart is None:
                    raise self._failure()
                number = self.first_worker + place
                log.warning(f"worker {number} was stopped (SIGSTOP) for {self.limit_seconds:g} seconds, and is killed")
                self.workers[place].kill()
            elif self.restart is None and now - since >= NOTICE_SECONDS and place not in self.reported:
                self.reported.add(place)
                log.warning(
                    f"worker {place} (process {pid}) is stopped (SIGSTOP), and the others wait for it; "
                    f"kill -CONT {pid} lets it go on; after {self.limit_seconds:g} seconds (--timeout) the run ends"
                )

    def _check_end(self) -> None:
        code = max(worker.exitcode or 0 for worker in self.workers if worker.exitcode in ENDINGS)
        if code:
            raise Interrupted(code - 128, latest(self.folder / "checkpoints"))
        if not (self.folder / "summary.json").exists():
            raise self._ended("the run ended before its last step")

    # ---- why the run ended ----

    def _ended(self, why: str) -> WorkerError:
        return WorkerError(f"{why}; what was saved is in {self.folder}")

    def _too_slow(self) -> WorkerError:
        """The error of workers that did not stop in time. If one is stopped by SIGSTOP, the others wait for it."""
        held = stopped(self.workers)
        late = held or [place for place, worker in enumerate(self.workers) if worker.exitcode is None]
        name = signal.Signals(self.requests.signal).name
        return self._ended(
            f"worker {self.first_worker + late[0]} did not stop within {STOP_SECONDS} seconds of {name} and was killed"
            f"{'; it was stopped by SIGSTOP' * bool(held)}"
        )

    def _failure(self) -> WorkerError:
        """The worker that failed first, and why. The others fail after it, because they lose their connection."""
        codes = {number: worker.exitcode or 0 for number, worker in enumerate(self.workers, start=self.first_worker)}
        for number, code in codes.items():
            if code < 0:
                return self._ended(how_it_ended(number, code))
        for place in stopped(self.workers):
            number, pid = self.first_worker + place, self.workers[place].pid
            return self._ended(f"worker {number} (process {pid}) was stopped by SIGSTOP and did not go on")
        said = [number for number in codes if self.store.check([f"failed/{number}"])]
        for number, code in codes.items():
            # It did not come as far as to say why; those that did have lost their connection to it.
            if code and number not in said:
                return self._ended(how_it_ended(number, code))
        reports = [self.store.get(f"failed/{number}").decode() for number in said]
        first = min(reports, key=lambda report: int(report.split()[0])).split(maxsplit=1)[1]
        removed = "" if self.folder.is_dir() else f"; the run's folder {self.folder} was removed"
        return WorkerError(f"{first}{removed}")


def how_it_ended(number: int, code: int) -> str:
    """How a worker ended that gave no reason.

    Example:
        >>> how_it_ended(1, -9)
        'worker 1 was ended by SIGKILL, as the kernel does when memory runs out'
    """
    if code == NO_FORK_SERVER:
        return f"{FORK_SERVER_DIED}, and all workers with it"
    if code >= 0:
        return f"worker {number} ended with exit code {code} and gave no reason"
    name = signal.Signals(-code).name
    memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"worker {number} was ended by {name}{memory}"


def stopped(workers: Sequence[BaseProcess]) -> list[int]:
    """Places of the workers that are stopped, as after SIGSTOP."""
    return [place for place, worker in enumerate(workers) if worker.exitcode is None and _state(worker.pid) == "T"]


def _state(pid: int | None) -> str:
    """The state letter of a process on Linux, "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
