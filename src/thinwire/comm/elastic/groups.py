"""Operations of an elastic round on its connections: over torchft's Gloo and NCCL, or with credentials over our own."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...algorithm import require
from ..handle import CommunicationError
from ..process_group import HANG_UP_TAG, wait_for_all
from ..tcp import TcpCommunicator, is_available
from ..tcp.connections import WrongContact
from ..tls.credentials import Credentials
from .lighthouse import Missing, store_at, torchft

Wait = Callable[[], Any]


class Groups(ABC):
    """The connections of a round. Each operation is started at the call, and returns a function that waits for its end.

    Attributes:
        limit: how long to wait for a message between processors; it may be changed.
        nccl: what sends tensors between GPUs; None if they go through main memory.
    """

    limit: timedelta
    nccl: Any = None

    @abstractmethod
    def connect(self, place: str, rank: int, size: int, limit: timedelta) -> None:
        """Connect with other workers, instead of those before.

        Args:
            place: "host:port/prefix" of a store where they meet.
            rank, size: of this worker in the round.
            limit: how long it may take.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Wait:
        """Add up a tensor over all workers, in place."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        """Give all workers the tensor of rank `root`, in place."""

    @abstractmethod
    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        """Send a tensor to each of some ranks, and receive into a tensor from each of some."""

    @abstractmethod
    def hang_up(self) -> None:
        """Close the connections at once: workers that wait for this one fail."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections after what was sent has arrived."""

    @abstractmethod
    def errored(self) -> Exception | None:
        """Wait for the operations between GPUs; returns why one failed. Other operations have said so before."""


class GlooGroups(Groups):
    """Over Gloo, and NCCL for tensors on GPUs if asked for.

    Args:
        timeout: how long an operation may take. Each wait names it, as Gloo's own limit is that of connecting.
        on_gpus: whether tensors on GPUs go over NCCL.

    Raises:
        ValueError: torchft is not installed.
    """

    def __init__(self, timeout: timedelta, on_gpus: bool):
        ft = torchft()
        self.limit, self.nccl = timeout, ft.nccl_group(timeout) if on_gpus else None
        self._group = ft.reconfigurable_group(timeout, self.nccl)
        self._gloo: Any = None  # before the first round, and while one is connected
        self._rank, self._size = 0, 1

    def connect(self, place: str, rank: int, size: int, limit: timedelta) -> None:
        self._gloo = None
        self._group.connect(place, rank, size, limit)
        self._gloo, self._rank, self._size = self._group.parent, rank, size

    def all_reduce(self, tensor: Tensor) -> Wait:
        if self._goes_over_nccl(tensor):
            return partial(_order_stream, self.nccl.allreduce([tensor], dist.AllreduceOptions()))
        sent = _in_main_memory(tensor)
        work = self._gloo.allreduce([sent], dist.AllreduceOptions())
        return partial(wait_for_all, [("", work)], [(tensor, sent)], self.limit)

    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if self._goes_over_nccl(tensor):
            return partial(_order_stream, self.nccl.broadcast([tensor], options))
        sent = _in_main_memory(tensor)
        work = self._gloo.broadcast([sent], options)
        return partial(wait_for_all, [(f"from rank {root}", work)], [(tensor, sent)], self.limit)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        if any(map(self._goes_over_nccl, (*sends.values(), *receives.values()))):
            return partial(_order_stream, self.nccl.exchange(sends, receives))
        landing = {peer: _in_main_memory(tensor) for peer, tensor in receives.items()}
        works = [(f"from rank {peer}", self._gloo.recv([tensor], peer, 0)) for peer, tensor in landing.items()]
        works += [(f"to rank {peer}", self._gloo.send([_in_main_memory(t)], peer, 0)) for peer, t in sends.items()]
        copies = [(receives[peer], tensor) for peer, tensor in landing.items()]
        return partial(wait_for_all, works, copies, self.limit)

    def hang_up(self) -> None:
        """Over Gloo, a receive that runs into its time limit closes all connections; see `process_group.py`."""
        if self.nccl is not None:
            self.nccl.abort()
        for peer in range(self._size if self._gloo is not None else 0):
            if peer != self._rank:
                with contextlib.suppress(RuntimeError, ValueError):
                    self._gloo.recv([torch.empty(1, device="cpu")], peer, HANG_UP_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """The group closes its connections when it is deleted."""

    def errored(self) -> Exception | None:
        error: Exception | None = self._group.errored()
        return error

    def _goes_over_nccl(self, tensor: Tensor) -> bool:
        return self.nccl is not None and tensor.device.type == "cuda"


class TcpGroups(Groups):
    """Over connections of our own, between workers that show certificates of the run.

    Args:
        timeout: how long a line may be cut.
        credentials: of this worker.
        listens, relay: see `ElasticCommunicator`.

    Raises:
        ValueError: the extension was not built.
    """

    def __init__(self, timeout: timedelta, credentials: Credentials, listens: bool = True, relay: str | None = None):
        require(
            is_available(),
            "elastic runs with credentials need the extension thinwire.comm.tcp._engine, which was not built",
        )
        self.limit, self._timeout, self._credentials = timeout, timeout, credentials
        self._listens, self._relay = listens, relay
        self._comm: TcpCommunicator | None = None

    def connect(self, place: str, rank: int, size: int, limit: timedelta) -> None:
        self.hang_up()
        try:
            self._comm = TcpCommunicator.from_store(
                store_at(place, limit, self._credentials),
                rank,
                size,
                timeout_seconds=self._timeout.total_seconds(),
                meeting_seconds=limit.total_seconds(),
                credentials=self._credentials,
                listens=self._listens,
                relay=self._relay,
            )
        except WrongContact as error:
            raise Missing([error.rank]) from error

    def all_reduce(self, tensor: Tensor) -> Wait:
        sent = _in_main_memory(tensor)
        return partial(_copied, self._connected()._start_all_reduce(sent), [(tensor, sent)])

    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        sent = _in_main_memory(tensor)
        return partial(_copied, self._connected()._start_broadcast(sent, root), [(tensor, sent)])

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        landing = {peer: _in_main_memory(tensor) for peer, tensor in receives.items()}
        wait = self._connected()._start_exchange({peer: _in_main_memory(t) for peer, t in sends.items()}, landing)
        return partial(_copied, wait, [(receives[peer], tensor) for peer, tensor in landing.items()])

    def hang_up(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort("this worker has given up the round")

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def errored(self) -> None:
        """There are no operations between GPUs."""

    def _connected(self) -> TcpCommunicator:
        if self._comm is None:
            raise CommunicationError("the round was given up")
        self._comm.limit_seconds = self.limit.total_seconds()
        return self._comm


def _copied(wait: Wait, copies: list[tuple[Tensor, Tensor]]) -> None:
    wait()
    for tensor, received in copies:
        if received is not tensor:
            tensor.copy_(received)


def _order_stream(work: Any) -> None:
    """Make the current stream wait; the host does not."""
    work.wait()


def _in_main_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
