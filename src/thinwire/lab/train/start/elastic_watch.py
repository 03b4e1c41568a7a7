"""Watches the workers of an elastic run on this machine, and starts those that die again.

A worker that a signal ends (SIGKILL, the kernel's memory killer, a crash) is started again, and healed by the others. One that
stays stopped (SIGSTOP) is killed first. A worker that is left out of the run is started again after a while. All workers end
with the fork server; they and it are started again too. A worker that fails with an error of its own ends the run.

The agent of `torch.distributed.elastic` (torchrun) restarts all workers when one dies. Here the others train on meanwhile.
"""

from __future__ import annotations

import logging
import signal
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ....comm.elastic.forming import LEFT_OUT_SECONDS
from ..config import RunConfig
from ..folder.checkpoint import latest
from ..run.interrupt import Interrupted
from ..signals import SIGNALS
from .watch import FORK_SERVER_DIED, NO_FORK_SERVER, Requests, WorkerError, diagnosis, stopped, too_slow
from .worker import LEFT_OUT, MISTAKEN

log = logging.getLogger("thinwire")

MAX_RESTARTS = 20
"""How often one worker is started again; a worker that dies more often would die for ever."""
STOPPED_SECONDS = 15.0
"""After which a worker under SIGSTOP is killed, and started again."""
LAST_SECONDS = 30.0
"""How long workers may still run after another one has finished the run."""


class ElasticWatch:
    """Watches the workers of this machine."""

    def __init__(
        self, workers: list[BaseProcess], start: Any, folder: Path, requests: Requests, store: Any, config: RunConfig
    ):
        self.workers, self.start, self.folder, self.requests, self.store = workers, start, folder, requests, store
        self.config = config
        self.restarts = [0] * len(workers)
        self.stopped_since: dict[int, float] = {}
        self.left_out_since: dict[int, float] = {}
        self.end = float("inf")

    def until_the_end(self) -> None:
        """Return when the run has ended; raise as `spawn` says."""
        endings = [0, *(128 + number for number in SIGNALS)]
        while running := [worker for worker in self.workers if worker.exitcode not in endings]:
            wait([worker.sentinel for worker in running if worker.exitcode is None], timeout=0.2)
            if any(worker.exitcode == MISTAKEN for worker in self.workers):
                raise ValueError(self.store.get("mistake").decode())
            now = time.monotonic()
            if any(worker.exitcode in endings for worker in self.workers):
                self.end = min(self.end, now + LAST_SECONDS)
            for place, worker in enumerate(self.workers):
                if worker.exitcode is not None and worker.exitcode not in endings:
                    self._replace(place)
            self._end_stopped(now)
            self.requests.pass_on()
            if now > self.requests.deadline:
                raise WorkerError(too_slow(self.workers, self.requests.signal, self.folder))
            if now > self.end:
                break
        self._check_end()

    def _replace(self, place: int) -> None:
        worker = self.workers[place]
        assert worker.exitcode is not None
        if self.end < float("inf"):  # the others need it no more
            return
        number, has_ended_too_often = self.config.first_worker + place, self.restarts[place] == MAX_RESTARTS
        if worker.exitcode == LEFT_OUT:
            since = self.left_out_since.setdefault(place, time.monotonic())
            if (has_ended_too_often and any(w.exitcode is None for w in self.workers)) or (
                time.monotonic() < since + LEFT_OUT_SECONDS
            ):
                return
            del self.left_out_since[place]
            why = f"worker {number} was left out"
        elif worker.exitcode == NO_FORK_SERVER:
            why = f"{FORK_SERVER_DIED}, and worker {number} with it"
        elif worker.exitcode < 0:
            why = f"worker {number} was ended by {signal.Signals(-worker.exitcode).name}"
        else:
            raise WorkerError(diagnosis(self.workers, self.folder, self.store))
        if has_ended_too_often:
            raise WorkerError(diagnosis(self.workers, self.folder, self.store))
        self.restarts[place] += 1
        log.warning(f"{why}; it is started again")
        self.workers[place] = self.start(place, True)

    def _end_stopped(self, now: float) -> None:
        limit = min(self.config.timeout, STOPPED_SECONDS)
        self.stopped_since = {place: self.stopped_since.get(place, now) for place in stopped(self.workers)}
        for place, since in self.stopped_since.items():
            if now - since >= limit:
                number = self.config.first_worker + place
                log.warning(f"worker {number} was stopped (SIGSTOP) for {limit:g} seconds, and is killed")
                self.workers[place].kill()

    def _check_end(self) -> None:
        codes = [worker.exitcode or 0 for worker in self.workers]
        number = max((code - 128 for code in codes if code > 128), default=0)
        if number:
            saved = latest(self.folder / "checkpoints")
            assert saved is not None, "a worker saves a checkpoint before it ends with a signal's exit code"
            raise Interrupted(number, saved)
        if not (self.folder / "summary.json").exists():
            raise WorkerError(f"the run ended before its last step; what was saved is in {self.folder}")
