"""A communicator on TCP connections of its own, for tensors in main memory.

A C++ thread (`native/wire/engine.cpp`) moves messages over several connections with each peer; Python composes collectives
from them:

    exchange, all_gather, all_to_all   messages straight to their receivers
    all_reduce                         in one, two or four steps; see `sums.py`
    reduce_scatter, reduce             the first half of an all_reduce; then the sums go to one worker
    broadcast                          a binomial tree

Operations start in the thread that calls them. What follows on the first messages of an operation (the sums and the second
half of an all_reduce, the tensors behind the sizes of an all_gather) runs in threads of its own, so that operations go on while
nobody waits for them. Messages between two workers are numbered in the order of the calls; the numbers of such later messages
are taken at the call.

A line that is cut is no error as long as it comes back within the time limit; see `connections.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import check
from ..addresses import own_address, parse_address
from ..background import Later
from ..base import Communicator, Start
from ..buffers import as_bytes, flat_like
from ..channel import Channel
from ..handle import CommunicationError, Handle, Wait, nothing
from ..ledger import Ledger, broadcast_tree
from ..notice import START_SECONDS
from ..numbered import Numbers, TaggedMessage
from ..process_group import ProcessGroupCommunicator
from ..reduction import Reduction, summing
from ..store import gathering, host_of
from ..sums import Route, Sums
from .channel import TcpChannel
from .connections import Place
from .endpoint import CLOSE_SECONDS, Endpoint, Meeting
from .tagged import MAX_TAG, Tagged

if TYPE_CHECKING:
    from ..tls.credentials import Credentials
    from ._engine import Counts

SHARD_BYTES = 1 << 22  # from which each of two near workers adds up one half of an all_reduce, and not both the whole
LONG_SECONDS = 0.003
"""Round trip from which a line is a long one: its delay counts more than what passes over memory cost."""


class TcpCommunicator(Communicator):
    """A communicator on connections of its own, between workers that meet. It sends from main memory only.

    `over` connects the workers of another communicator, and `from_store` those that meet in a store.

    Args:
        meeting: of all workers. The addresses and the run's secret travel over it, and nothing else.
        meeting_seconds: how long each operation may take while it connects.

    Attributes:
        limit_seconds: how long to wait for an operation, whatever comes meanwhile; it may be changed.

    Raises:
        ValueError: the extension was not built.
        CommunicationError: a worker could not be reached.
    """

    def __init__(self, meeting: Meeting, meeting_seconds: float = math.inf):
        super().__init__(meeting.rank, meeting.size)
        self.global_ranks, self.limit_seconds = meeting.global_ranks, meeting_seconds
        self._meeting = meeting._replace(gather=self.gather_objects)  # for channels, which meet over this one
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._endpoint = Endpoint(meeting, peers)
        self._engine, self._connections = self._endpoint.engine, self._endpoint.connections
        self._numbers, self._later = Numbers(self.size), Later()
        self.route = Route(self.rank, self._connections.hosts)
        self._sums = Sums(self.route, self._post, self._numbers, self._later)
        self._tagged = Tagged(peers, self._endpoint, self._wait, meeting.timeout_seconds)
        try:
            self.barrier()  # all are connected
            trips = [self.counts(peer).round_trip_seconds for peer in peers]
            if self.all_true(max(trips, default=0.0) < LONG_SECONDS):
                self.route.shard_bytes = SHARD_BYTES
        except (CommunicationError, ValueError):
            # At once: what was sent to a worker that never came would not arrive however long this one waited.
            self._end(partial(self._hang_up, 0.0))
            raise
        # What connecting took is no traffic of the run.
        self.ledger, self.limit_seconds = Ledger(self.size), math.inf

    @classmethod
    def over(
        cls, comm: ProcessGroupCommunicator, timeout_seconds: float = 300.0, *, credentials: Credentials | None = None
    ) -> TcpCommunicator:
        """Connect the workers of another communicator, which may be closed afterwards. All of them call it.

        Args:
            comm: where they meet.
            timeout_seconds: how long an operation may wait without a byte from a worker, and how long a line may be cut.
            credentials: this worker's. Then all connections are encrypted, and only workers of the same run are connected; None
                encrypts nothing, and connects all that know the run's secret.

        Raises:
            ValueError, CommunicationError: as above.

        Example:
            >>> import torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> with ProcessGroupCommunicator() as meeting, TcpCommunicator.over(meeting) as comm:
            ...     comm.all_reduce(torch.ones(2)).wait()
            tensor([1., 1.])
            >>> dist.destroy_process_group()
        """
        place = Place(*own_address(), credentials)
        own = cls(Meeting(comm.rank, comm.size, comm.gather_objects, place, timeout_seconds, comm.global_ranks))
        comm.barrier()  # all are connected
        return own

    @classmethod
    def from_store(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_seconds: float = 300.0,
        interface: str | None = None,
        credentials: Credentials | None = None,
        meeting_seconds: float | None = None,
        listens: bool = True,
        relay: str | None = None,
    ) -> TcpCommunicator:
        """Connect the workers that meet in a store. No process group is needed; all of them call it.

        The addresses travel through the store, and the secret by which workers know each other. So without credentials, who
        can read the store can take part. Workers that connect several times over one store do so in the same order.

        Args:
            store: any store of torch.distributed that all workers reach.
            rank: this worker, 0..size-1.
            size: number of workers.
            timeout_seconds, credentials: see `over`.
            interface: the network interface that reaches the other workers, such as eth0; None takes GLOO_SOCKET_IFNAME, or the
                one that reaches the host of the store, or MASTER_ADDR.
            meeting_seconds: how long to wait for the others at the start; None for `timeout_seconds`.
            listens: whether others can dial this worker. If not, it dials them.
            relay: HOST:PORT of a `Relay`, the same on all workers, which carries what goes between two workers that cannot
                reach each other; it also tells who is behind NAT.

        Raises:
            ValueError: `rank` is not below `size`, the extension was not built, or two workers can only dial out and there is
                no relay.
            CommunicationError: a worker did not come to the store in time, or could not be reached.

        Example:
            >>> import torch, torch.distributed as dist
            >>> with TcpCommunicator.from_store(dist.HashStore(), rank=0, size=1) as comm:
            ...     comm.all_reduce(torch.ones(2)).wait()
            tensor([1., 1.])
        """
        if not 0 <= rank < size:
            raise ValueError(f"expected a rank in 0..{size - 1}, got {rank}")
        limit = timeout_seconds if meeting_seconds is None else meeting_seconds
        gather, own = gathering(store, rank, size, limit), own_address(interface, host_of(store))
        at = None if relay is None else parse_address(relay)
        place = Place(*own, credentials, listens, at, min(limit, START_SECONDS))
        return cls(Meeting(rank, size, gather, place, timeout_seconds), limit)

    def another(self) -> TcpCommunicator:
        """A second communicator of the same workers, which meet over this one. All of them call it."""
        return TcpCommunicator(self._meeting)

    def reordered(self, order: Sequence[int]) -> TcpCommunicator:
        if self._meeting.place.credentials is not None:
            raise ValueError(f"rank {self.rank}: workers with credentials keep their ranks; leave layout out.")

        def gather(own: Any) -> list[Any]:
            told = self.gather_objects(own)
            return [told[rank] for rank in order]

        ranks = [self.global_ranks[rank] for rank in order] if self.global_ranks else ()
        return TcpCommunicator(self._meeting._replace(rank=order.index(self.rank), gather=gather, global_ranks=ranks))

    def counts(self, peer: int) -> Counts:
        """What the connections with `peer` are and have done: `connections`, `round_trip_seconds`, `hedged`, ..."""
        return self._engine.counts(peer)

    @property
    def packet_bytes(self) -> int:
        """The most that packets have which this worker sends, since it has lost connections; 0 for what the system chooses."""
        return self._connections.packet_bytes

    # ---- operations beyond the contract ----

    def reduce(self, tensor: Tensor, reduction: Reduction = summing, root: int | None = None) -> Handle:
        """Combine `tensor` over all workers, in place. `wait()` returns it.

        Args:
            tensor: any dtype that `reduction` takes, the same on all workers.
            reduction: combines parts of the tensors, of which it gets those of all workers in rank order.
            root: the one worker whose tensor becomes the result; None for all.
        """
        check.tensor(self, "reduce", tensor)
        traffic = self.route.traffic(tensor, reduction, root)
        start = partial(self._start_all_reduce, tensor.detach(), reduction, root)
        return self._submit("all_reduce" if root is None else "reduce", [tensor], start, tensor, traffic)

    def reduce_scatter(self, parts: list[Tensor], out: Tensor, reduction: Reduction = summing) -> Handle:
        """Combine `parts[self.rank]` over all workers into `out`. `wait()` returns it.

        Sends all parts but the own one, straight to whose they are.

        Args:
            parts: W tensors; part r has as many elements on all workers, and their dtype is the same.
            out: as large as the own part; it may be that part.
            reduction: see `reduce`.
        """
        check.parts(self, "reduce_scatter", parts, out)
        sent = sum(part.nbytes for part in self._others(parts).values())
        received = (self.size - 1) * out.nbytes
        start = partial(self._sums.start_reduce_scatter, [part.detach() for part in parts], out.detach(), reduction)
        messages = sum(part.numel() > 0 for part in self._others(parts).values())
        return self._submit("reduce_scatter", [*parts, out], start, out, (messages, sent, received), parts)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle:
        """Send a tensor to one peer, which calls `receive` with the same tag; see `tagged.py`."""
        self._check_tagged("send", tensor, peer, tag)
        start, num_bytes = partial(self._tagged.start_send, as_bytes(tensor), peer, tag), tensor.nbytes
        return self._submit("send", [tensor], start, tensor, (1 + (num_bytes > 0), num_bytes + 1, 1), [tensor])

    def receive(self, tensor: Tensor, peer: int | None = None, tag: int = 0) -> Handle:
        """Receive a tensor of exactly this size, in place; `wait()` returns the rank that it came from.

        Messages with one tag from one peer are received in the order in which they were sent.

        Args:
            tensor: is written.
            peer: who sends; None for the next message of any peer.
            tag: 0..MAX_TAG.
        """
        self._check_tagged("receive", tensor, peer, tag)
        source = [] if peer is None else [peer]
        start = partial(self._tagged.start_receive, as_bytes(tensor), tag, source)
        handle = self._submit("receive", [tensor], start, source, (1, 1, tensor.nbytes + 1))
        return Handle(lambda: handle.wait()[0])

    def _check_tagged(self, operation: str, tensor: Tensor, peer: int | None, tag: int) -> None:
        check.peers(self, operation, "peer", [] if peer is None else [peer])
        check.tensor(self, operation, tensor)
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"rank {self.rank}: {operation} expects a tag in 0..{MAX_TAG}, got {tag}.")

    def abort(self, reason: str = "the communicator was aborted") -> None:
        """Close at once. Operations in flight fail, here and on all workers that wait for this one; later ones fail too."""
        for peer in range(self.size):
            if peer != self.rank:
                self._engine.lose(peer, reason)
        self._end(partial(self._hang_up, 0.0), reason)

    def _close(self) -> None:
        self._later.end()  # what follows on earlier messages still needs the endpoint
        self._hang_up(math.inf)

    def _abandon(self) -> None:
        self._hang_up(CLOSE_SECONDS)

    def _hang_up(self, seconds: float) -> None:
        self._endpoint.close(seconds)  # what is under way fails
        self._later.end()
        self._tagged.close()

    # ---- issuing ----

    def _issue(self, tensors: list[Tensor], start: Start) -> Wait:
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"rank {self.rank}: TcpCommunicator sends from main memory, got a tensor on {tensor.device}. Use "
                    "ProcessGroupCommunicator for GPUs."
                )
        return start()

    def _open_channel(self, peers: list[int], max_bytes: int) -> Channel:
        return TcpChannel(self._meeting, peers, self._record_channel, max_bytes)

    # ---- messages ----

    def _post(self, sends: list[TaggedMessage], receives: list[TaggedMessage]) -> Wait:
        """Start an operation of the engine; returns a function that waits for it."""
        if not sends and not receives:
            return nothing
        return partial(self._wait, self._endpoint.begin(sends, receives))

    def _wait(self, operation: int) -> None:
        self._endpoint.wait(operation, self.limit_seconds)

    # ---- primitives ----

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        return self._post(self._numbers.sending(sends), self._numbers.receiving(receives))

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor], limit: int) -> Wait:
        length = torch.tensor([tensor.numel()], device="cpu")
        lengths = [length if rank == self.rank else torch.empty_like(length) for rank in range(self.size)]
        wait = self._start_all_gather([as_bytes(part) for part in lengths])
        # Numbers are taken now, and not in `_post_parts`, for the messages that follow, even if they turn out to be empty.
        sends = [(peer, self._numbers.next_sent(peer)) for peer in self._others(lengths)]
        receives = [(peer, self._numbers.next_received(peer)) for peer in self._others(lengths)]

        def finish() -> Wait:
            wait()
            sizes = check.announced_sizes(torch.cat(lengths).tolist(), limit)
            result.extend(tensor if rank == self.rank else flat_like(tensor, n) for rank, n in enumerate(sizes))
            own = as_bytes(tensor)
            return self._post(
                [TaggedMessage(peer, number, own) for peer, number in sends],
                [TaggedMessage(peer, number, as_bytes(result[peer])) for peer, number in receives],
            )

        return self._later.follow(finish)

    def _start_broadcast(self, tensor: Tensor, root: int) -> Wait:
        parents, children = broadcast_tree(self.size, self.rank, root)
        sends = self._numbers.sending(dict.fromkeys(children, tensor))
        receives = self._numbers.receiving(dict.fromkeys(parents, tensor))
        if not parents or not children:
            return self._post(sends, receives)
        received = self._post([], receives)

        def finish() -> Wait:
            received()
            return self._post(sends, [])

        return self._later.follow(finish)

    def _start_all_reduce(self, tensor: Tensor, reduction: Reduction = summing, root: int | None = None) -> Wait:
        return self._sums.start(tensor, reduction, root)
