"""Workers as processes that this one starts and watches, on this machine.

Whoever ends badly ends the run, with one line that names the rank and the reason. Ctrl-C, SIGTERM and SIGUSR1 are passed
on to the workers, who stop after their step with a checkpoint; those that do not in time, and all of them at the second
Ctrl-C, are killed. A worker whose parent is gone ends itself, so that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from ...comm.process_world import worker_context
from . import loop
from .checkpoint import latest
from .config import RunConfig
from .connect import RENDEZVOUS, connected
from .environment import LOOPBACK, Environment
from .interrupt import SIGNALS, Interrupted, Interruption
from .shared_errors import SharedError

MISTAKEN = 2  # a worker's exit code when all found the same mistake of the user's
STOP_SECONDS = 30  # between asking workers to stop and killing them; as long as SLURM waits by default
# Imported once by the server that workers are forked from, where the system can fork, and not once by every worker.
PRELOADED = ["thinwire.lab.train.spawn", "sklearn.datasets", "torch.utils.tensorboard", "torch._dynamo"]


class WorkerError(RuntimeError):
    """A worker ended badly; the message names its rank and the reason."""


def spawn(config: RunConfig, folder: Path) -> None:
    """Start the workers and watch them to the end.

    Raises:
        ValueError: the port is taken, and nothing was started; or all workers found the same mistake.
        WorkerError: a worker ended badly; all others have been stopped.
        Interrupted: a signal asked the run to stop.
    """
    check_port(config.port)
    store = dist.TCPStore(LOOPBACK, config.port, is_master=True, wait_for_workers=False, timeout=RENDEZVOUS)
    context = worker_context(PRELOADED)
    # No daemons: these may not have processes of their own, and data is loaded by such.
    workers = [context.Process(target=_worker, args=(rank, config, folder, store.port)) for rank in range(config.workers)]
    with _requests_passed_on(workers) as requests:
        with _for_children(config):
            for worker in workers:
                worker.start()
        try:
            _watch(workers, folder, requests, store)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what was written so far is in {folder}") from None


def check_port(port: int) -> None:
    """
    Raises:
        ValueError: nobody may listen there, or somebody does already.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            reason = f"port {port} cannot be used: {error.strerror}"
            raise ValueError(f"{reason}; choose another, or leave --port out and a free one is taken") from None


@contextmanager
def _for_children(config: RunConfig) -> Iterator[None]:
    """What processes started meanwhile inherit: thread pools of the right size, and signals that wait.

    Workers take their signals once they listen; the fork server, whom SLURM's signals would end, never does.
    """
    ours = {"OMP_NUM_THREADS": str(config.threads)}
    # C++ warns of lost connections beside the one line that tells why; what matters comes as an exception.
    ours["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    before = {name: os.environ.get(name) for name in ours}
    resource_tracker.ensure_running()  # starting it later would unblock signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Requests:
    """Signals to this process, which are passed on to the workers."""

    def __init__(self, workers: list[BaseProcess]):
        self._workers = workers
        self.signal = 0
        self.deadline = float("inf")

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signal and number == signal.SIGINT and sys.stderr.isatty():
            print("\nthinwire: stopping after this step; Ctrl-C again stops at once", file=sys.stderr, flush=True)
        self.signal = self.signal or number
        self.deadline = min(self.deadline, time.monotonic() + STOP_SECONDS)
        self.pass_on()

    def pass_on(self) -> None:
        for worker in self._workers:
            if self.signal and worker.pid is not None and worker.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, self.signal)


@contextmanager
def _requests_passed_on(workers: list[BaseProcess]) -> Iterator[_Requests]:
    """However the block ends, no worker outlives it."""
    requests = _Requests(workers)
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


def _watch(workers: list[BaseProcess], folder: Path, requests: _Requests, store: dist.Store) -> None:
    """Return when all workers have ended well; raise as soon as one has not."""
    stopped = [128 + number for number in SIGNALS]
    running = list(workers)
    while running:
        wait([worker.sentinel for worker in running], timeout=1)
        if any(worker.exitcode == MISTAKEN for worker in workers):
            raise ValueError(store.get("mistake").decode())
        if any(worker.exitcode not in (None, 0, *stopped) for worker in workers):
            raise WorkerError(_diagnosis(workers, folder))
        running = [worker for worker in running if worker.exitcode is None]
        requests.pass_on()  # once more: a worker in the middle of its start may have missed it
        if running and time.monotonic() > requests.deadline:
            raise WorkerError(_too_slow(workers.index(running[0]), requests.signal, folder))
    if workers[0].exitcode:
        raise Interrupted(workers[0].exitcode - 128, latest(folder / "checkpoints"))


def _too_slow(rank: int, number: int, folder: Path) -> str:
    name = signal.Signals(number).name
    return f"worker {rank} did not stop within {STOP_SECONDS} seconds of {name} and was killed; what was saved is in {folder}"


def _diagnosis(workers: list[BaseProcess], folder: Path) -> str:
    """Who ended the run. Others lose their connection and fail after it, so a signal or the oldest report tells."""
    for rank, worker in enumerate(workers):
        if (worker.exitcode or 0) < 0:
            return f"worker {rank} was ended by {signal.Signals(-worker.exitcode).name}"
    reports = sorted(folder.glob("worker-*-error.txt"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        return f"{reports[0].read_text().splitlines()[0]} (traceback in {reports[0]})"
    rank, worker = next((rank, worker) for rank, worker in enumerate(workers) if worker.exitcode)
    return f"worker {rank} ended with exit code {worker.exitcode}"


def _worker(rank: int, config: RunConfig, folder: Path, port: int) -> None:
    """The whole life of a process that `spawn` started."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    environment = Environment("thinwire", rank, config.workers, rank, config.workers, LOOPBACK, port)
    os.environ.update(environment.variables())
    try:
        with Interruption() as interruption:
            store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=RENDEZVOUS)
            with connected(config, environment, store) as comm:
                loop.run(config, folder, comm, interruption)
                interruption.settle()
    except Interrupted as stop:
        os._exit(128 + stop.signal)
    except SharedError as mistake:
        store.set("mistake", str(mistake))
        os._exit(MISTAKEN)
    except BaseException as error:
        if isinstance(error, Exception):
            report = f"worker {rank} failed: {in_one_line(error)}\n\n{traceback.format_exc()}"
            with contextlib.suppress(OSError):
                (folder / f"worker-{rank}-error.txt").write_text(report)
        os._exit(1)  # at once: threads that still wait for other workers would hold up an ordinary exit


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def in_one_line(error: Exception) -> str:
    """A user's mistake in its own words, anything else with its kind before it."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
