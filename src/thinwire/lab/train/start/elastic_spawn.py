"""Starts the workers of an elastic run on this machine, and starts those that are killed again.

A worker that a signal ends (SIGKILL, the kernel's memory killer, a crash) is started again, and healed by the others. One that
stays stopped (SIGSTOP) is killed first. A worker that is left out of the run is started again after a while. All workers end
with the fork server; they and it are started again too. A worker that fails with an error of its own ends the run.
"""

from __future__ import annotations

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
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

from ....algorithm import require
from ....comm import ElasticCommunicator, Lighthouse
from ....comm.forming import LEFT_OUT_SECONDS
from ....comm.process_world import worker_context
from ..config import RunConfig
from ..device import choose_device
from ..folder.checkpoint import latest
from ..results.callbacks import Callback
from ..run import loop
from ..run.interrupt import SIGNALS, Interrupted, Interruption
from ..shared_errors import same_error_on_all
from .connect import choose_interface, has_own_gpu
from .environment import LOOPBACK, Environment
from .spawn import (
    FORK_SERVER_DIED,
    LEFT_OUT,
    MISTAKEN,
    NO_FORK_SERVER,
    PRELOADED,
    Requests,
    WorkerError,
    diagnosis,
    for_children,
    loopback_store,
    requests_passed_on,
    stopped,
    too_slow,
    work_and_exit,
)

MAX_RESTARTS = 20
"""How often one worker is started again; a worker that dies more often would die for ever."""
STOPPED_SECONDS = 15.0
"""After which a worker under SIGSTOP is killed, and started again."""
LAST_SECONDS = 30.0
"""How long workers may still run after another one has finished the run."""


@contextmanager
def lighthouse_of(config: RunConfig, host: str) -> Iterator[str]:
    """Context that yields the address of the run's Lighthouse, which it starts unless the configuration has one."""
    if config.lighthouse is not None:
        require(
            urlsplit(config.lighthouse).hostname is not None,
            f"lighthouse must be an address such as http://node1:29510, got {config.lighthouse!r}",
        )
        yield config.lighthouse
        return
    lighthouse = Lighthouse(config.min_workers, host, join_seconds=config.timeout)
    text = f"others join with --elastic --lighthouse {lighthouse.address} --first-worker {config.workers}"
    print(f"thinwire: {text}", file=sys.stderr, flush=True)
    try:
        yield lighthouse.address
    finally:
        lighthouse.close()


def communicator(
    config: RunConfig, lighthouse: str, number: int, local_size: int, is_late: bool = False
) -> ElasticCommunicator:
    """The communicator of one worker of a run.

    Args:
        config: of the run.
        lighthouse: address of the Lighthouse.
        number: of the worker.
        local_size: number of workers on this machine.

    Raises:
        SharedError: NCCL was asked for, and workers have no GPU of their own.
    """
    logging.getLogger("torchft").setLevel(logging.CRITICAL)  # what it has to say, errors say too
    with same_error_on_all():
        device = choose_device(config)
        require(
            config.backend != "nccl" or has_own_gpu(device, local_size),
            f"backend 'nccl' needs a GPU of its own for every worker, and worker {number} has none; choose "
            "--backend gloo, or fewer workers",
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seconds = max(120.0, 2 * config.timeout)
    on_gpus: Literal["gloo", "nccl"] = "nccl" if config.backend == "nccl" else "gloo"
    return ElasticCommunicator(lighthouse, number, config.min_workers, config.timeout, seconds, on_gpus, is_late)


def spawn_elastic(config: RunConfig, folder: Path, callbacks: Sequence[Callback] = ()) -> None:
    """Start the workers, and wait for the end of the run.

    Raises:
        ValueError: the port is taken, torchft is not installed, or the configuration or the data are wrong.
        WorkerError: a worker failed with an error, or was killed too often.
        Interrupted: a signal stopped the run.
    """
    store = loopback_store(config.port)
    context = worker_context(PRELOADED)
    with lighthouse_of(config, LOOPBACK) as address:

        def started(place: int, is_restart: bool) -> BaseProcess:
            arguments = (place, config, folder, address, store.port, callbacks, is_restart)
            process = context.Process(target=_worker, args=arguments)
            with for_children(config):
                _start(process)
            return process

        workers: list[BaseProcess] = []
        with requests_passed_on(workers) as requests:
            workers += [started(place, False) for place in range(config.workers)]
            try:
                _Watch(workers, started, folder, requests, store, config).until_the_end()
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"what was written so far is in {folder}") from None


def _start(process: BaseProcess, seconds: float = 10.0) -> None:
    """Start a process; a fork server that was killed just now still refuses, until its end is seen and another one starts."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return process.start()
        except (ConnectionRefusedError, ConnectionResetError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class _Watch:
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
        """Return when the run has ended; raise as `spawn_elastic` says."""
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
        print(f"thinwire: {why}; it is started again", file=sys.stderr, flush=True)
        self.workers[place] = self.start(place, True)

    def _end_stopped(self, now: float) -> None:
        limit = min(self.config.timeout, STOPPED_SECONDS)
        self.stopped_since = {place: self.stopped_since.get(place, now) for place in stopped(self.workers)}
        for place, since in self.stopped_since.items():
            if now - since >= limit:
                number = self.config.first_worker + place
                text = f"worker {number} was stopped (SIGSTOP) for {limit:g} seconds, and is killed"
                print(f"thinwire: {text}", file=sys.stderr, flush=True)
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


def _worker(
    place: int,
    config: RunConfig,
    folder: Path,
    lighthouse: str,
    port: int,
    callbacks: Sequence[Callback],
    is_restart: bool,
) -> None:
    """The main function of a worker process."""
    number, host = config.first_worker + place, urlsplit(lighthouse).hostname or LOOPBACK

    def train(interruption: Interruption, store: Any) -> None:
        with same_error_on_all():
            choose_interface(config.interface, one_node=host == LOOPBACK)
        comm = communicator(config, lighthouse, number, config.workers, is_late=is_restart)
        with comm:
            loop.run(config, folder, comm, interruption, callbacks, is_restart)

    work_and_exit(Environment("thinwire", place, config.workers, place, config.workers, host, port), folder, train)
    os._exit(0)  # at once: torchft's threads wait for others
