"""Starts the workers as processes on this machine and watches them.

A worker that fails, exits early or stays stopped (SIGSTOP) ends the run. One line names its rank and the reason. Ctrl-C,
SIGTERM and SIGUSR1 are passed on to the workers, which stop after their step with a checkpoint. Workers that do not stop in
time are killed; a second Ctrl-C kills all of them. Workers end with their launcher, even if they are stopped.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from ....comm.members import LeftOut
from ....comm.process_world import worker_context
from ....comm.store import listening_store
from ..config import RunConfig
from ..folder.checkpoint import latest
from ..results.callbacks import Callback
from ..run import loop
from ..run.interrupt import SIGNALS, Interrupted, Interruption
from ..shared_errors import SharedError
from .connect import RENDEZVOUS, connected
from .environment import LOOPBACK, Environment
from .parent_death import end_with_parent

LEFT_OUT = 3  # exit code of a worker of an elastic run that is left out of it, see `members.LeftOut`
NO_FORK_SERVER = 255  # what `multiprocessing` says of all workers whose fork server has died
MISTAKEN = 2  # exit code of a worker after a user error that all workers found
NOTICE_SECONDS = 5  # after which a worker under SIGSTOP is told of; --timeout ends the run
STOP_SECONDS = 30  # between asking workers to stop and killing them; as long as SLURM waits by default
FORK_SERVER_DIED = "the fork server, the process that starts the workers, was killed"
# The fork server imports these once, so that workers need not.
PRELOADED = [
    *("thinwire.lab.train.start.parent_death", "thinwire.lab.train.start.spawn"),
    *("sklearn.datasets", "torch.utils.tensorboard", "torch._dynamo"),
]


class WorkerError(RuntimeError):
    """A worker failed; the message names its rank and the reason."""


def spawn(config: RunConfig, folder: Path, callbacks: Sequence[Callback] = ()) -> None:
    """Start the workers and wait for their end.

    Raises:
        ValueError: the port is taken (then no worker was started), or all workers found the same user error.
        WorkerError: a worker failed; all others have been stopped.
        Interrupted: a signal stopped the run.
    """
    store = loopback_store(config.port)
    context = worker_context(PRELOADED)
    # No daemons: daemons cannot start processes, and data loaders are processes.
    workers = [
        context.Process(target=_worker, args=(rank, config, folder, store.port, callbacks))
        for rank in range(config.workers)
    ]
    with requests_passed_on(workers) as requests:
        with for_children(config):
            for worker in workers:
                worker.start()
        try:
            _watch(workers, folder, requests, store, config.timeout)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what was written so far is in {folder}") from None


def loopback_store(port: int) -> dist.TCPStore:
    """The store where the workers meet. It has no authentication, so it listens on the loopback only.

    Args:
        port: TCP port; 0 takes a free one.

    Raises:
        ValueError: the port is taken, or this user may not listen there.
    """
    try:
        return listening_store(LOOPBACK, port, RENDEZVOUS)
    except OSError as error:
        reason = f"port {port} cannot be used: {error.strerror}"
        raise ValueError(f"{reason}; choose another, or leave --port out and a free one is taken") from None


def connect_to(port: int) -> dist.TCPStore:
    """The launcher's store, in a worker."""
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=RENDEZVOUS)


@contextmanager
def for_children(config: RunConfig) -> Iterator[None]:
    """Context that sets what child processes inherit: the number of threads, and blocked signals.

    Workers unblock the signals when their handlers are ready. The fork server never does, so SLURM's signals cannot end it.
    """
    ours = {"OMP_NUM_THREADS": str(config.threads)}
    # Hides C++ warnings about lost connections: the exception has the reason.
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


def _watch(
    workers: Sequence[BaseProcess], folder: Path, requests: Requests, store: dist.Store, limit_seconds: float
) -> None:
    """Return when all workers have finished; raise if one fails or stays stopped for longer than the limit.

    A worker that is stopped for some seconds is told of on stderr, as all others wait for it.
    """
    signalled = [128 + number for number in SIGNALS]
    running, stopped_since, told = list(workers), dict[int, float](), set[int]()
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
        told &= stopped_since.keys()
        for rank, since in stopped_since.items():
            if now - since >= limit_seconds:
                raise WorkerError(diagnosis(workers, folder, store))
            if now - since >= NOTICE_SECONDS and rank not in told:
                told.add(rank)
                pid = workers[rank].pid
                print(
                    f"thinwire: worker {rank} (process {pid}) is stopped (SIGSTOP), and the others wait for it; "
                    f"kill -CONT {pid} lets it go on; after {limit_seconds:g} seconds (--timeout) the run ends",
                    file=sys.stderr,
                    flush=True,
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


def diagnosis(workers: Sequence[BaseProcess], folder: Path, store: dist.Store) -> str:
    """The worker that failed first, and why. The others fail after it, because they lose their connection."""
    for rank, worker in enumerate(workers):
        exitcode = worker.exitcode or 0
        if exitcode < 0:
            name = signal.Signals(-exitcode).name
            return f"worker {rank} was ended by {name}; what was saved is in {folder}"
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


def report_failure(store: dist.Store | None, folder: Path, rank: int, error: Exception) -> None:
    """Tell the launcher why this worker failed, and write the traceback to the folder if possible."""
    came, line = time.time_ns(), failure(rank, error)
    path = folder / f"worker-{rank}-error.txt"
    with contextlib.suppress(OSError):
        path.write_text(f"{line}\n\n{traceback.format_exc()}")
        line += f" (traceback in {path})"
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the launcher is gone
            store.set(f"failed/{rank}", f"{came} {line}")


def _worker(rank: int, config: RunConfig, folder: Path, port: int, callbacks: Sequence[Callback]) -> None:
    """The main function of a worker process."""
    environment = Environment("thinwire", rank, config.workers, rank, config.workers, LOOPBACK, port)

    def train(interruption: Interruption, store: dist.Store) -> None:
        with connected(config, environment, store) as comm:
            loop.run(config, folder, comm, interruption, callbacks)
            interruption.settle()

    work_and_exit(environment, folder, train)


def work_and_exit(environment: Environment, folder: Path, work: Callable[[Interruption, dist.Store], None]) -> None:
    """Do the work of a worker process, tell the launcher how it ended, and leave with an exit code that says so.

    Args:
        environment: of the worker; its port is that of the launcher's store.
        folder: of the run.
        work: gets the signals to this worker, and the store.
    """
    end_with_parent()
    threading.Thread(target=end_with_launcher, daemon=True).start()
    threading.excepthook = ignore_file_errors
    os.environ.update(environment.variables())
    rank, store = environment.rank, None
    try:
        with Interruption() as interruption:
            store = connect_to(environment.master_port)
            work(interruption, store)
            store.set(f"finished/{rank}", "")
    except Interrupted as stop:
        os._exit(128 + stop.signal)
    except SharedError as mistake:
        assert store is not None, "workers share an error only once they are connected"
        store.set("mistake", str(mistake))
        os._exit(MISTAKEN)
    except LeftOut as error:
        print(f"thinwire: {error}", file=sys.stderr, flush=True)
        os._exit(LEFT_OUT)
    except BaseException as error:
        if isinstance(error, Exception):
            report_failure(store, folder, rank, error)
        os._exit(1)  # at once: a normal exit would wait for threads that wait for other workers


def end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "a worker is a child process"
    launcher.join()
    os._exit(1)


def ignore_file_errors(raised: threading.ExceptHookArgs) -> None:
    """Hide the traceback of a thread that cannot write a file; TensorBoard raises the error again in the main thread."""
    if not isinstance(raised.exc_value, OSError):
        threading.__excepthook__(raised)


def failure(rank: int, error: Exception) -> str:
    """Say in one line why this worker failed. A gradient that is not finite stops all workers; its error names the first."""
    return str(error) if isinstance(error, FloatingPointError) else f"worker {rank} failed: {in_one_line(error)}"


def in_one_line(error: Exception) -> str:
    """An error as one line. A ValueError keeps its text, an OSError gets the name of its number, others get their type.

    Example:
        >>> in_one_line(OSError(28, "No space left on device", "runs/a/metrics.jsonl"))
        "ENOSPC: No space left on device: 'runs/a/metrics.jsonl'; free some space, and go on with --resume"
    """
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        name = errno.errorcode.get(error.errno)
        if name is not None:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "; free some space, and go on with --resume" * is_full
            return f"{name}: {error.strerror}: {os.fsdecode(error.filename)!r}{remedy}"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
