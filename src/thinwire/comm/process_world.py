"""Workers as processes of this machine, over Gloo: what `LocalWorld` runs in threads, run for real."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..algorithm import require
from ..messages import error_place, error_text
from .local_world import name_rank
from .process_group import ProcessGroupCommunicator

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext  # Windows has no fork server
    from multiprocessing.process import BaseProcess


@dataclass(frozen=True)
class ProcessWorld:
    """W workers in processes, connected over the loopback.

    Args:
        size: number of workers, W.
        timeout_seconds: how long a worker waits for a message before it gives up.

    Raises:
        ValueError: no workers.

    Example:
        >>> from operator import attrgetter
        >>> ProcessWorld(2).run(attrgetter("rank"))
        [0, 1]
    """

    size: int
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"ProcessWorld needs at least one worker, got size={self.size}.")

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `fn(comm, *args)` in every worker and returns the results in rank order.

        `fn`, `args` and the results must be picklable: a function at the top level of a module.

        Raises:
            ValueError: this process may not start others, see `require_may_start`.
            Exception: the first error that a worker raised, its rank put before its message; however it ends, no
                worker is left.
        """
        require_may_start()
        context, task = worker_context(["thinwire"]), pickle.dumps((fn, args))
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            store = f"file://{folder}/store"
            start = [(rank, self.size, store, self.timeout_seconds, task) for rank in range(self.size)]
            return _collect([_started(context, stack, arguments) for arguments in start])


def worker_context(preloaded: list[str]) -> ForkServerContext | SpawnContext:
    """How to start processes: a fork server imports modules once and not once a worker; without one, they are spawned."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded)
    return context


def require_may_start() -> None:
    """Check that this process may start workers.

    Raises:
        ValueError: it is a worker that is importing the main script, which starts workers again; or it is a daemon.
    """
    process = multiprocessing.current_process()
    require(
        not getattr(process, "_inheriting", False),  # so Python marks it
        "each worker imports the main script, which starts workers again; put what the script does below "
        "`if __name__ == '__main__':`",
    )
    require(not process.daemon, "a daemonic process, as of a Pool, may not start workers; start it with daemon=False")


def start_process(process: BaseProcess) -> None:
    """Start a process. It imports the main script, except one from standard input, which is no file."""
    main: Any = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or not os.path.basename(path).startswith("<"):
        process.start()
        return
    del main.__file__
    try:
        process.start()
    finally:
        main.__file__ = path


def _started(
    context: ForkServerContext | SpawnContext, stack: contextlib.ExitStack, arguments: tuple[Any, ...]
) -> Connection:
    """The parent's end of a new worker's pipe; leaving the stack ends the worker."""
    parent, child = context.Pipe()
    process = context.Process(target=_work, args=(child, *arguments), daemon=True)
    start_process(process)
    # Callbacks run in reverse order: first the kill, then the join.
    stack.callback(process.join)
    stack.callback(process.kill)
    child.close()  # so that the parent's end tells of the child's death
    return parent


def _collect(connections: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        ready = wait([c for rank, c in enumerate(connections) if rank not in results])
        for rank in [rank for rank, connection in enumerate(connections) if connection in ready]:
            try:
                succeeded, results[rank] = pickle.loads(connections[rank].recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank}: the process died without a word") from None
            if not succeeded:
                raise name_rank(results[rank], rank)
    return [results[rank] for rank in range(len(connections))]


def _work(connection: Connection, rank: int, size: int, store: str, timeout_seconds: float, task: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent answers it
    if sys.platform == "linux":
        # All workers are on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    watcher = threading.Thread(target=_end_with_parent, args=(connection,), daemon=True)
    watcher.start()
    try:
        dist.init_process_group("gloo", store, timedelta(seconds=120), world_size=size, rank=rank)
        fn, args = pickle.loads(task)
        answer = (True, fn(ProcessGroupCommunicator(timeout_seconds=timeout_seconds), *args))
    except Exception as error:
        answer = (False, _told(error, rank))
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        connection.send_bytes(_dumps(answer))
    watcher.join()  # until the parent has all answers and ends us: no early goodbyes


def _end_with_parent(connection: Connection) -> None:
    """Its end closes when it has all answers, fails or is killed; nothing it sends would make the pipe readable before."""
    connection.poll(None)
    os._exit(0)


def _told(error: Exception, rank: int) -> BaseException:
    """The error with its rank and, as its traceback does not reach the parent, with the line of the user's code.

    An error that cannot be made again from its arguments becomes a RuntimeError with its class and text.
    """
    place, text = error_place(error), error_text(error)
    named = name_rank(error, rank)
    if len(named.args) == 1:
        named.args = (f"{named.args[0]}{place}",)
    try:
        pickle.loads(pickle.dumps(named))
    except Exception:
        return RuntimeError(f"rank {rank}: {text}{place}")
    return named


def _dumps(answer: tuple[bool, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps((False, RuntimeError(f"{answer[1]!r} cannot be pickled: {error}")))
