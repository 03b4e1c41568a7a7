"""Operations of an elastic round, on its connections."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor

from ..buffers import all_staged, staged_tensor, wait_and_copy
from ..handle import CommunicationError, Wait
from ..sums import Route
from ..tcp import TcpCommunicator
from ..tcp.connections import WrongContact
from ..tcp.endpoint import require_engine
from ..tls.credentials import Credentials
from .meeting import Missing


class Groups:
    """The connections of a round. Each operation is started at the call, and returns a function that waits for its end.

    Args:
        timeout: how long a line may be cut.
        credentials: of this worker; None for runs without.
        listens, relay: see `ElasticCommunicator`.

    Attributes:
        limit: how long to wait for a message; it may be changed.
        route: of all-reduces between those that are connected.

    Raises:
        ValueError: the extension was not built.
    """

    route: Route

    def __init__(
        self,
        timeout: timedelta,
        credentials: Credentials | None = None,
        listens: bool = True,
        relay: str | None = None,
    ):
        require_engine("elastic runs")
        self.limit = self._timeout = timeout
        self._credentials, self._listens, self._relay = credentials, listens, relay
        self._comm: TcpCommunicator | None = None  # before the first round, and while none is connected

    def connect(self, store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
        """Connect with other workers, instead of those before.

        Args:
            store: where they meet.
            rank, size: of this worker in the round.
            limit: how long each step of it may take.
        """
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
        """Close the connections at once: workers that wait for this one fail."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort("this worker has given up the round")

    def close(self) -> None:
        """Close the connections after what was sent has arrived."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def all_reduce(self, tensor: Tensor) -> Wait:
        """Add up a tensor over all workers, in place."""
        sent = staged_tensor(tensor)
        return partial(wait_and_copy, self._connected()._start_all_reduce(sent), [(tensor, sent)])

    def broadcast(self, tensor: Tensor, root: int) -> Wait:
        """Give all workers the tensor of rank `root`, in place."""
        comm = self._connected()
        is_root = comm.rank == root
        sent = staged_tensor(tensor, copied=is_root)
        return partial(wait_and_copy, comm._start_broadcast(sent, root), [] if is_root else [(tensor, sent)])

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        """Send a tensor to each of some ranks, and receive into a tensor from each of some."""
        landing = {peer: staged_tensor(tensor, copied=False) for peer, tensor in receives.items()}
        wait = self._connected()._start_exchange(all_staged(sends), landing)
        return partial(wait_and_copy, wait, [(receives[peer], tensor) for peer, tensor in landing.items()])

    def _connected(self) -> TcpCommunicator:
        """What sends tensors in main memory, within `limit`."""
        if self._comm is None:
            raise CommunicationError("the round was given up")
        self._comm.limit_seconds = self.limit.total_seconds()
        return self._comm
