"""The connection between a run's workers: over which network interface, and through which of PyTorch's backends."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ...algorithm import require
from ...comm import Communicator, ProcessGroupCommunicator
from .config import RunConfig
from .environment import Environment
from .loop import choose_device
from .shared_errors import same_error_on_all

RENDEZVOUS = timedelta(seconds=120)  # time enough to import PyTorch on a busy machine


@contextmanager
def connected(config: RunConfig, environment: Environment, store: dist.Store | None = None) -> Iterator[Communicator]:
    """Join the other workers, in PyTorch's default process group and a communicator of its own.

    Args:
        config: says device, backend and interface.
        environment: this worker's place.
        store: where the workers meet; by default, at the environment's address.

    Raises:
        ValueError: the interface or the backend cannot be used here.
    """
    choose_interface(config.interface, environment.one_node)
    device = choose_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.backend == "mpi":
        dist.init_process_group("mpi", timeout=RENDEZVOUS)
    else:
        rank, size = environment.rank, environment.size
        if store is None:
            store = fresh(next(dist.rendezvous("env://", rank, size, timeout=RENDEZVOUS))[0], rank, size)
        with same_error_on_all():
            backend = choose_backend(config.backend, device, environment, store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=RENDEZVOUS)
    with ProcessGroupCommunicator(timeout_seconds=config.timeout) as comm:
        yield comm
    dist.destroy_process_group()


def fresh(store: dist.Store, rank: int, size: int) -> dist.Store:
    """A part of the store for this start of the workers alone.

    torchrun's store outlives the workers: after a restart it still holds the addresses of those that are gone. So rank 0
    chooses a word, and tells it to those who have greeted it until they have all heard: an answer is for one greeting.
    """
    own = uuid.uuid4().hex
    store.set(f"greeting/{rank}", own)
    if rank == 0:
        _tell(store, own, set(range(1, size)))
        return dist.PrefixStore(own, store)
    word = store.get(f"answer/{own}").decode()
    store.set(f"heard/{word}/{rank}", "")
    return dist.PrefixStore(word, store)


def _tell(store: dist.Store, word: str, waiting: set[int]) -> None:
    deadline = time.monotonic() + RENDEZVOUS.total_seconds()
    while waiting := {rank for rank in waiting if not store.check([f"heard/{word}/{rank}"])}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(waiting)} did not come within {RENDEZVOUS.total_seconds():.0f} seconds")
        for rank in waiting:
            if store.check([f"greeting/{rank}"]):
                store.set(f"answer/{store.get(f'greeting/{rank}').decode()}", word)
        time.sleep(0.02)


def choose_interface(name: str | None, one_node: bool) -> None:
    """Tell Gloo and NCCL which network interface to use; by default the loopback where no other node takes part.

    Raises:
        ValueError: there is no such interface.
    """
    known = [known for _, known in socket.if_nameindex()]
    require(
        name is None or name in known,
        f"{socket.gethostname()} has no network interface {name!r}; choose --interface among {', '.join(known)}",
    )
    loopback = next((known for known in known if known in ("lo", "lo0")), None)
    if name is not None:
        os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)
    elif one_node and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # the host's own name need not resolve


def choose_backend(name: str, device: torch.device, environment: Environment, store: dist.Store) -> str:
    """PyTorch's name of the backend, the same for all workers: NCCL (beside Gloo, for metrics) or Gloo alone.

    Raises:
        ValueError: NCCL was asked for, and a worker has no GPU of its own.
    """
    shared = device.type != "cuda" or environment.local_size > torch.cuda.device_count()
    store.set(f"thinwire/no-gpu/{environment.rank}", str(int(shared or not dist.is_nccl_available())))
    without = [rank for rank in range(environment.size) if store.get(f"thinwire/no-gpu/{rank}") == b"1"]
    require(
        name != "nccl" or not without,
        f"backend 'nccl' needs a GPU of its own for every worker, and rank {(without or [0])[0]} has none; choose "
        "--backend gloo, or fewer workers",
    )
    return "gloo" if name == "gloo" or without else "cpu:gloo,cuda:nccl"


def check_mpi() -> None:
    """
    Raises:
        ValueError: PyTorch was built without MPI.
    """
    require(
        dist.is_mpi_available(),
        "backend 'mpi' needs a PyTorch that was built with MPI, and this one was not; choose --backend gloo, which works "
        "under mpirun too",
    )
