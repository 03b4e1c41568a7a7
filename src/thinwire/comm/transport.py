"""Which communicator carries a run's messages: over PyTorch's backends, or over our own connections."""

from __future__ import annotations

import ipaddress
from typing import Literal

import torch

from .addresses import own_address
from .base import Communicator
from .ledger import Ledger
from .process_group import Group, ProcessGroupCommunicator
from .tcp import TcpCommunicator, is_available
from .tls.credentials import Credentials

Transport = Literal["auto", "tcp", "gloo", "nccl", "mpi"]


def connect(
    transport: Transport,
    group: Group | None = None,
    timeout_seconds: float = 300.0,
    device: torch.device | None = None,
) -> Communicator:
    """A communicator over the ranks of a process group. All of them call it.

    Args:
        transport: "tcp" for connections of our own; a name of a backend for those of the group. "auto" takes our own if
            tensors are in main memory, the extension was built on all workers, and they meet over a network. Our own are
            encrypted if THINWIRE_CREDENTIALS names this worker's credentials, as it must for all workers or none. The group
            over which they meet is not.
        group, timeout_seconds, device: see `ProcessGroupCommunicator`.

    Raises:
        ValueError: "tcp" was asked for, and tensors are on a GPU or the extension was not built.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with connect("auto") as comm:
        ...     type(comm).__name__
        'ProcessGroupCommunicator'
        >>> dist.destroy_process_group()
    """
    on_cpu = device is None or device.type == "cpu"
    if transport == "tcp" and not on_cpu:
        raise ValueError(f"transport 'tcp' sends from main memory, got device {device}; choose 'auto'")
    comm = ProcessGroupCommunicator(group, timeout_seconds, device)
    is_possible = transport == "auto" and comm.size > 1
    if transport == "tcp" or (is_possible and comm.all_true(on_cpu and has_own_connections())):
        with comm:
            return TcpCommunicator.over(comm, timeout_seconds, credentials=Credentials.from_environment())
    comm.ledger = Ledger(comm.size)  # the question above is no traffic of the run
    return comm


def has_own_connections() -> bool:
    """Whether this worker can take connections of our own: the extension was built, and a network reaches it."""
    return is_available() and not ipaddress.ip_address(own_address()[1]).is_loopback
