"""The workers of a measurement: processes of this machine, or those of a launcher; and how they join."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist

from ...algorithm import required
from ...comm import Communicator, parent_death
from ...comm.notice import said_if_late
from ...comm.process_world import worker_context
from ...comm.store import connected_store, gathering
from ...comm.transport import Transport, connect
from ...messages import log
from ..output import FULL, UNREAD, drop

CPU = torch.device("cpu")


def in_workers(work: Callable[[Any], Any], task: Any, workers: int, preloaded: Sequence[str] = ()) -> Any:
    """Run `work(task)` in a launcher's worker, and return its result; without one, in new processes: None.

    These end with this one.

    Args:
        work: a function that processes can import.
        task: what it gets.
        workers: number of processes, where there is no launcher.
        preloaded: modules that a fork server imports once for all of them.

    Raises:
        ValueError: that of a worker.
        OSError: that of a worker whose output nobody reads, or no disk holds.
        SystemExit: a worker has ended, and it or this process has said why.
    """
    from ..train.signals import blocked
    from ..train.start.connect import loopback_store
    from ..train.start.watch import how_it_ended

    if "RANK" in os.environ:
        return work(task)
    store = loopback_store(0)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it warns of each worker that it ends
    method = worker_context([parent_death.__name__, __name__, *preloaded]).get_start_method()
    if method == "forkserver":
        # Ctrl-C reaches all processes of a terminal. This one answers it, and ends the others, which are daemons.
        with blocked([signal.SIGINT]):
            forkserver.ensure_running()
    given = (work, task, workers, store.port)
    try:
        torch.multiprocessing.start_processes(_started, given, workers, daemon=True, start_method=method)
    except torch.multiprocessing.ProcessExitedException as end:
        mistake = f"mistake/{end.error_index}"
        if store.check([mistake]):
            arguments = json.loads(store.get(mistake))
            raise (OSError if len(arguments) > 1 else ValueError)(*arguments) from None
        if end.exit_code != 1:
            log.error(how_it_ended(end.error_index, end.exit_code))
        sys.exit(1)


def _started(rank: int, work: Callable[[Any], Any], task: Any, workers: int, port: int) -> None:
    from ..train.start.environment import LOOPBACK, Environment

    parent_death.end_with_parent()
    os.environ.update(Environment("thinwire", rank, workers, rank, workers, LOOPBACK, port).variables())
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the parent process has the store, as torchrun's agent has
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    try:
        work(task)
    except (ValueError, OSError) as error:
        arguments: list[Any] = [str(error)]
        if isinstance(error, OSError):
            if error.errno not in (*FULL, *UNREAD):
                raise
            drop(1)
            arguments = [error.errno, error.strerror]
        connected_store(LOOPBACK, port, timedelta(minutes=1)).set(f"mistake/{rank}", json.dumps(arguments))
        sys.exit(2)


def meeting(timeout_seconds: float) -> dist.Store:
    """The store by which the workers that the launcher's environment names find each other."""
    from ..train.start.connect import meeting_store
    from ..train.start.environment import launched

    environment = required(launched(), "RANK is in the environment without WORLD_SIZE; is it left over?")
    return meeting_store(environment, seconds=timeout_seconds)


@contextmanager
def joined(
    store: dist.Store | None = None,
    device: torch.device = CPU,
    transport: Transport = "auto",
    timeout_seconds: float = 300.0,
) -> Iterator[Communicator]:
    """Join the workers that the launcher's environment names: over Gloo, and tensors on GPUs over NCCL if each has its own.

    Args:
        store: by which they meet; None for that of `meeting`.
        device: of the tensors that are sent.
        transport: see `comm.transport.connect`.
        timeout_seconds: how long the others may be silent.
    """
    from ..train.start.connect import choose_interface, connecting, has_own_gpu, init_process_group

    choose_interface(None, one_node=False)
    rank, size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    with said_if_late(connecting(rank, timeout_seconds)):
        store = store or meeting(timeout_seconds)
        gathering(store, rank, size, timeout_seconds)(None)
        is_alone = has_own_gpu(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        init_process_group("cpu:gloo,cuda:nccl" if is_alone else "gloo", store, rank, size, timeout_seconds)
    try:
        with connect(transport, timeout_seconds=timeout_seconds, device=device) as comm:
            yield comm
            dist.barrier()  # no worker exits while others wait for its messages
    finally:
        dist.destroy_process_group()
