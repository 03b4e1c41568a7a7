"""Where a run's workers come from: processes that this one starts, or those that torchrun has started.

On one machine, `train` starts a process per worker and watches them: whoever ends badly ends the run, with one line
that names the rank and the reason. Ctrl-C and SIGTERM end all workers at once, and a worker whose parent is gone ends
itself, so that nothing is left behind. Under torchrun this process is a worker, and torchrun watches.
"""

from __future__ import annotations

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
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from ..algorithm import require
from ..comm import ProcessGroupCommunicator
from ..comm.process_world import worker_context
from . import loop
from .config import RunConfig
from .interrupt import Interruption
from .records import write_json
from .run_folder import finished_run, make_folder
from .together import SharedMistake
from .weights_and_biases import check_installed

HOST = "127.0.0.1"
RENDEZVOUS = timedelta(seconds=120)  # time enough to import PyTorch on a busy machine
GRACE_SECONDS = 2  # between asking a worker to end and killing it
# Imported once by the server that workers are forked from, where the system can fork, and not once by every worker.
PRELOADED = ["thinwire.train.loop", "sklearn.datasets", "torch.utils.tensorboard", "torch._dynamo"]


class WorkerError(RuntimeError):
    """A worker ended badly; the message names its rank and the reason."""


def train(config: RunConfig) -> Path:
    """Run to the end; returns the run's folder. Under torchrun, each of its processes calls this.

    With `config.resume` it goes on where it left off, and what is finished isn't run again.

    Raises:
        ValueError: the configuration is wrong; nothing was started.
        WorkerError: a worker ended badly; all others have been stopped.
    """
    config.parsed_averager()
    check_installed(config)
    return finished_run(config) or (_join(config) if torchrun_size() else _spawn(config))


def torchrun_size() -> int | None:
    """Number of workers, if torchrun or something that sets the same variables has started this process as one."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def _join(config: RunConfig) -> Path:
    """Be one of torchrun's workers."""
    rank, size = int(os.environ["RANK"]), torchrun_size()
    require(config.workers == size, f"torchrun started {size} workers, not {config.workers}; leave --workers out")
    folder = _prepare(config) if rank == 0 else None
    try:
        dist.init_process_group("gloo", timeout=RENDEZVOUS)
        with ProcessGroupCommunicator() as comm:
            folder = Path(comm.gather_objects(str(folder))[0])
            interruption = Interruption()
            loop.run(config, folder, comm, interruption)
            interruption.settle()
        dist.destroy_process_group()
    except SharedMistake:
        raise  # rank 0 tells
    except Exception as error:
        raise WorkerError(f"worker {rank} failed: {_in_one_line(error)}") from error
    return folder


def _spawn(config: RunConfig) -> Path:
    """Start the workers and watch them."""
    _check_port(config.port)
    folder = _prepare(config)
    store = dist.TCPStore(HOST, config.port, is_master=True, wait_for_workers=False, timeout=RENDEZVOUS)
    context = worker_context(PRELOADED)
    ranks = range(config.workers)
    # No daemons: these may not have processes of their own, and data is loaded by such.
    workers = [context.Process(target=_worker, args=(rank, config, folder, store.port)) for rank in ranks]
    with _stopped_at_the_end(workers):
        with _for_children(config):
            for worker in workers:
                worker.start()
        try:
            _watch(workers, folder)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what was written so far is in {folder}") from None
    return folder


def _prepare(config: RunConfig) -> Path:
    folder = make_folder(config)
    write_json(folder / "config.json", config.as_dict())
    return folder


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            reason = f"port {port} cannot be used: {error.strerror}"
            raise ValueError(f"{reason}; choose another, or leave --port out and a free one is taken") from None


@contextmanager
def _for_children(config: RunConfig) -> Iterator[None]:
    """What processes started meanwhile inherit: thread pools of the right size, the loopback, deafness to Ctrl-C.

    Ctrl-C reaches every process of the terminal; the parent alone answers it, and ends the workers in good order.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    ours = {"OMP_NUM_THREADS": str(config.threads)}
    # C++ warns of lost connections beside the one line that tells why; what matters comes as an exception.
    ours["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    if loopback is not None:
        # The host's own name need not resolve.
        ours["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", loopback)
    before = {name: os.environ.get(name) for name in ours}
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        signal.signal(signal.SIGINT, handler)


@contextmanager
def _stopped_at_the_end(workers: list[BaseProcess]) -> Iterator[None]:
    """However the block ends, by SIGTERM too, no worker outlives it."""
    handler = signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        yield
    finally:
        started = [worker for worker in workers if worker.pid is not None]
        for worker in started:
            worker.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in started:
            worker.join(max(0.0, deadline - time.monotonic()))
            worker.kill()
            worker.join()
        signal.signal(signal.SIGTERM, handler)


def _exit_on_sigterm(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _watch(workers: list[BaseProcess], folder: Path) -> None:
    """Return when all workers have ended well; raise as soon as one has not."""
    running = list(workers)
    while running:
        wait([worker.sentinel for worker in running])
        if any(worker.exitcode not in (None, 0) for worker in workers):
            raise WorkerError(_diagnosis(workers, folder))
        running = [worker for worker in running if worker.exitcode is None]


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
    """The whole life of a process that `_spawn` started."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        store = dist.TCPStore(HOST, port, is_master=False, timeout=RENDEZVOUS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=config.workers)
        with ProcessGroupCommunicator() as comm:
            interruption = Interruption()
            loop.run(config, folder, comm, interruption)
            interruption.settle()
        dist.destroy_process_group()
    except BaseException as error:
        if isinstance(error, Exception):
            report = f"worker {rank} failed: {_in_one_line(error)}\n\n{traceback.format_exc()}"
            (folder / f"worker-{rank}-error.txt").write_text(report)
        os._exit(1)  # at once: threads that still wait for other workers would hold up an ordinary exit


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
