"""Operations of an elastic round on its connections: over Gloo, or with credentials over our own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...algorithm import require
from ..background import Later
from ..gloo import GlooPeers, wait_and_copy
from ..handle import CommunicationError
from ..numbered import Numbers, Wait
from ..sums import Route, Sums
from ..tcp import TcpCommunicator, is_available
from ..tcp.connections import WrongContact
from ..tls.credentials import Credentials
from .lighthouse import Missing


class Groups(ABC):
    """The connections of a round. Each operation is started at the call, and returns a function that waits for its end.

    Args:
        timeout: how long an operation may take; over connections of our own, how long a line may be cut.

    Attributes:
        limit: how long to wait for a message; it may be changed.
        route: of all-reduces between those that are connected.
    """

    route: Route

    def __init__(self, timeout: timedelta):
        self.limit = self._timeout = timeout

    @abstractmethod
    def connect(self, store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
        """Connect with other workers, instead of those before.

        Args:
            store: where they meet.
            rank, size: of this worker in the round.
            limit: how long it may take.
        """

    @abstractmethod
    def hang_up(self) -> None:
        """Close the connections at once: workers that wait for this one fail."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections after what was sent has arrived."""

    @abstractmethod
    def _connected(self) -> GlooGroups | TcpCommunicator:
        """What sends tensors in main memory, within `limit`."""

    def all_reduce(self, tensor: Tensor) -> Wait:
        """Add up a tensor over all workers, in place."""
        sent = _in_main_memory(tensor)
        return partial(wait_and_copy, self._connected()._start_all_reduce(sent), [(tensor, sent)])

    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        """Give all workers the tensor of rank `root`, in place."""
        sent = _in_main_memory(tensor)
        return partial(wait_and_copy, self._connected()._start_broadcast(sent, root), [(tensor, sent)])

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        """Send a tensor to each of some ranks, and receive into a tensor from each of some."""
        landing, sent = ({peer: _in_main_memory(t) for peer, t in side.items()} for side in (receives, sends))
        wait = self._connected()._start_exchange(sent, landing)
        return partial(wait_and_copy, wait, [(receives[peer], tensor) for peer, tensor in landing.items()])


class GlooGroups(Groups):
    """Over Gloo."""

    def __init__(self, timeout: timedelta):
        super().__init__(timeout)
        self._gloo: GlooPeers | None = None  # before the first round, and while none is connected
        self._sums: Sums | None = None

    def connect(self, store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
        self.close()
        group: Any = dist.ProcessGroupGloo(store, rank, size, limit)
        group._set_default_timeout(self._timeout)  # only connecting is bounded by `limit`
        self._gloo = GlooPeers(group)
        # Workers of one host are few; to find them would take a step in each round.
        self.route = Route(rank, range(size))
        self._numbers = Numbers(size)
        self._sums = Sums(self.route, self._gloo.post, self._numbers, Later())

    def hang_up(self) -> None:
        if self._gloo is not None:
            self._gloo.hang_up()

    def close(self) -> None:
        self._gloo = self._sums = None  # the group closes its connections when it is deleted

    def _connected(self) -> GlooGroups:
        if self._gloo is None:
            raise CommunicationError("the round was given up")
        self._gloo.limit = self.limit  # Gloo's own one is that of connecting
        return self

    def _start_all_reduce(self, tensor: Tensor) -> Wait:
        assert self._sums is not None, "it is connected"
        return self._sums.start(tensor)

    def _start_broadcast(self, tensor: Tensor, root: int) -> Wait:
        assert self._gloo is not None, "it is connected"
        work = self._gloo.group.broadcast([tensor], _from_rank(root))
        return partial(self._gloo.wait, [(f"from rank {root}", work)])

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        assert self._gloo is not None, "it is connected"
        return self._gloo.post(self._numbers.sending(sends), self._numbers.receiving(receives))


class TcpGroups(Groups):
    """Over connections of our own, between workers that show certificates of the run.

    Args:
        timeout: see `Groups`.
        credentials: of this worker.
        listens, relay: see `ElasticCommunicator`.

    Raises:
        ValueError: the extension was not built.
    """

    def __init__(self, timeout: timedelta, credentials: Credentials, listens: bool, relay: str | None):
        require(
            is_available(),
            "elastic runs with credentials need the extension thinwire.comm.tcp._engine, which was not built",
        )
        super().__init__(timeout)
        self._credentials, self._listens, self._relay = credentials, listens, relay
        self._comm: TcpCommunicator | None = None

    def connect(self, store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
        self.hang_up()
        try:
            self._comm = TcpCommunicator.from_store(
                store,
                rank,
                size,
                timeout_seconds=self._timeout.total_seconds(),
                meeting_seconds=limit.total_seconds(),
                credentials=self._credentials,
                listens=self._listens,
                relay=self._relay,
            )
            self.route = self._comm.route
        except WrongContact as error:
            raise Missing([error.rank]) from error

    def hang_up(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort("this worker has given up the round")

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def _connected(self) -> TcpCommunicator:
        if self._comm is None:
            raise CommunicationError("the round was given up")
        self._comm.limit_seconds = self.limit.total_seconds()
        return self._comm


def _from_rank(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


def _in_main_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
