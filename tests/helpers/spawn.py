"""Runs a function on several workers, as real processes over Gloo or as threads.

    spawn(size, fn, *args)        -> [fn(comm, *args) on rank 0, on rank 1, ...], in processes
    run_threads(size, fn, *args)  -> the same, in threads of a LocalWorld

`fn` and `args` must be picklable for processes: a function at the top level of a test file. Processes are reused by
later calls, unless the function failed, left threads behind, or called `retire`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm import Communicator, LocalWorld, ProcessGroupCommunicator
from thinwire.comm.local_world import name_rank
from thinwire.comm.transport import connect

# One server for all processes that tests start: it imports what they need once, and forks them in milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    *(name for name in ("helpers.simulated_gpu",) if name in sys.modules),  # it must be imported before PyTorch
    *("torch", "torch.distributed", "torch._dynamo"),  # optimizers import the last one
    *("thinwire.strategy", "thinwire.codec", "pytest", "hypothesis.strategies"),
]

_is_retired = False

_idle: list[tuple[BaseProcess, Connection]] = []  # workers of earlier calls, which have imported the test files already


def logged() -> list[str]:
    """What thinwire logs in this process from now on; `caplog` hears only the process of pytest."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    return lines


def spawn(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 400.0,
    comm_timeout_seconds: float = 60.0,
    return_errors: bool = False,
) -> list:
    """Runs `fn(comm, *args)` in `size` processes and returns the results in rank order.

    The first error is raised here, its rank before its message, and the other workers are killed. With
    `return_errors` nothing is raised but for the timeout: each worker's error stands in its place among the results.

    Raises:
        TimeoutError: when workers are still at work after `timeout_seconds`; it names them.
        RuntimeError: when a worker died without a word.
    """
    task = pickle.dumps((fn, args))  # by value: torch's own pickling would share tensors' memory between workers
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workers = [_take(stack) for _ in range(size)]
        for rank, (_, connection) in enumerate(workers):
            connection.send((sys.path, rank, size, folder, comm_timeout_seconds, task))
        results = _collect(workers, time.monotonic() + timeout_seconds, return_errors)
        for _, connection in workers:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"all are done")  # only now may workers hang up on each other
        for process, connection in workers:
            if _is_free(connection):
                _idle.append((process, connection))
            else:
                process.kill()
        stack.pop_all()  # the others live on
    return results


def run_threads(size: int, fn: Callable[..., Any], *args: Any) -> list:
    return LocalWorld(size).run(fn, *args)


def retire() -> None:
    """Have this process of `spawn` serve no other call, because it changed what cannot be changed back."""
    global _is_retired
    _is_retired = True


def meet(name: str, ranks: Iterable[int] = range(2)) -> None:
    """Wait until all of these workers of `spawn` have called it; no connection of theirs is needed for that.

    A barrier does less: what one worker needs to leave it may still be under way when another one has left it, and ends.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{dist.get_rank()}", "")
    store.wait([f"{name}/{rank}" for rank in ranks], timedelta(seconds=400))


def device_mesh(*sizes: int, names: tuple[str, ...] = ("replicate", "shard")) -> dist.DeviceMesh:
    """A mesh over all workers of `spawn`.

    PyTorch caches meshes by value, and with them process groups: a process that made one cannot make an equal one again.
    """
    retire()
    return dist.init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])


def run_tcp(size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list:
    """As `spawn`, over connections of our own."""
    return spawn(size, _over_tcp, fn, args, options.get("comm_timeout_seconds", 60.0), **options)


def _over_tcp(comm: Communicator, fn: Callable[..., Any], args: tuple, timeout_seconds: float) -> Any:
    own = connect("tcp", timeout_seconds=timeout_seconds)
    result = fn(own, *args)
    own.close()  # not after an error, which would look like a goodbye to the others
    return result


WORLDS = {"threads": run_threads, "processes": spawn, "tcp": run_tcp}


def _take(stack: contextlib.ExitStack) -> tuple[BaseProcess, Connection]:
    """A worker that waits for its task; it is killed when the stack unwinds."""
    if _idle:
        process, parent = _idle.pop()
    else:
        parent, child = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(child,), daemon=True)
        process.start()
        child.close()  # so that the parent's end reports the child's death
    stack.callback(process.kill)
    return process, parent


def _is_free(connection: Connection) -> bool:
    """Whether a worker says that it can take another task; a dead one, or one with threads left, cannot."""
    try:
        return connection.poll(10) and connection.recv_bytes() == b"free"
    except (EOFError, OSError):
        return False


def _collect(workers: list, deadline: float, return_errors: bool) -> list:
    results: list = [None] * len(workers)
    waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(workers)} did not finish in time")
        for connection in ready:
            rank = waiting.pop(connection)
            results[rank] = _receive(workers[rank][0], connection)
        failed = [rank for rank, result in enumerate(results) if isinstance(result, Exception)]
        if failed and not return_errors:
            # The errors of others, whose connections broke, may have come before this process looked. A death has no time.
            first = min(failed, key=lambda rank: vars(results[rank]).get("raised_at", 0.0))
            raise name_rank(results[first], first)
    return results


def _receive(process: Any, connection: Connection) -> Any:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        process.join(60)
        return RuntimeError(f"died without a word, exit code {process.exitcode}")


def _serve(connection: Connection) -> None:
    """The life of a worker: one task after the other, each with a process group of its own."""
    gc.freeze()  # what the server has imported: the collection after each task need not look at it
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM}
    )  # `thinwire train` may have started the server, and blocks it
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    environment, random_state = dict(os.environ), torch.get_rng_state()
    with contextlib.suppress(EOFError):
        while True:
            sys.path, *task = connection.recv()
            torch.set_num_threads(1)
            torch.set_rng_state(random_state)
            _work(connection, *task)
            os.environ.clear()
            os.environ.update(environment)
            gc.collect()
            if threading.active_count() > 1 or _is_retired:
                return  # what the task left running would disturb the next
            connection.send_bytes(b"free")


def _work(connection: Connection, rank: int, size: int, folder: str, timeout: float, task: bytes) -> None:
    try:
        store = dist.FileStore(f"{folder}/store", size)
        store.set(f"come/{rank}", "")
        # Before the time limit counts, which a test may have chosen short.
        store.wait([f"come/{other}" for other in range(size)], timedelta(seconds=400))
        dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=timeout), world_size=size, rank=rank)
        comm = ProcessGroupCommunicator(timeout_seconds=timeout)
        fn, args = pickle.loads(task)
        answer = _dumps(fn(comm, *args))
    except Exception as error:
        error.raised_at = time.monotonic()  # type: ignore[attr-defined]  # a clock that all processes share
        error.__cause__ = RuntimeError("\n" + traceback.format_exc())
        connection.send_bytes(_dumps(error))
        os._exit(1)  # as a crash would: without goodbyes to the others
    connection.send_bytes(answer)
    connection.recv_bytes()
    comm.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _dumps(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        return pickle.dumps(RuntimeError(f"{value!r} cannot be pickled: {error}"))
