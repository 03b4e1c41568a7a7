"""A communicator on TCP connections of its own, for tensors in main memory.

A C++ thread (`native/wire/engine.cpp`) moves messages over several connections with each peer; Python composes collectives
from them:

    exchange, all_gather, all_to_all   messages straight to their receivers
    all_reduce                         worker r gets shard r of all others, adds them in rank order, and sends the sum to all
    all_reduce, where delay counts     of 2 workers, each sends the whole tensor, and both add: as many bytes in one step
    all_reduce, of several workers     inside each host, worker j adds up part j; then a shard of it, with those of its place in
      on each of L hosts               other hosts; sums go back the same way, so that a host sends 2 (L-1)/L n
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
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import debug
from .. import check
from ..addresses import own_address, parse_address
from ..background import Background
from ..base import Communicator, Start
from ..buffers import Spare, as_bytes, flat_like
from ..channel import Channel
from ..handle import CommunicationError, Handle, nothing
from ..ledger import Ledger, broadcast_tree, ring_all_reduce_bytes
from ..notice import START_SECONDS
from ..process_group import Group, ProcessGroupCommunicator
from ..reduction import Reduction, reduce_into, summing
from ..store import gathering, host_of
from .channel import TcpChannel
from .connections import Place
from .endpoint import CLOSE_SECONDS, Endpoint, Meeting, TaggedMessage
from .tagged import MAX_TAG, Tagged

if TYPE_CHECKING:
    from ..tls.credentials import Credentials
    from ._engine import Counts

PIECE_BYTES, SWAP_BYTES, MAX_PIECES = 1 << 21, 1 << 20, 8  # of an all_reduce: added while the next piece is on its way
SHARD_BYTES = 1 << 22  # from which each of two near workers adds up one half of an all_reduce, and not both the whole
HOST_BYTES = 1 << 16  # from which the lines between hosts count more than two steps inside them
LONG_SECONDS = 0.003
"""Round trip from which a line is a long one: its delay counts more than what passes over memory cost."""


class TcpCommunicator(Communicator):
    """A communicator over the ranks of a process group, on connections of its own. It sends from main memory only.

    `from_store` connects workers that have no process group.

    Args:
        group: whose ranks to connect; None for all. The addresses and the run's secret travel over it, and nothing else.
        timeout_seconds: how long an operation may wait without getting a byte from a worker, and how long a line may be cut.
        interface: the network interface that reaches the other workers, such as eth0; None takes GLOO_SOCKET_IFNAME, or the
            one that reaches MASTER_ADDR.
        credentials: this worker's. Then all connections are encrypted, and only workers of the same run are connected; None
            encrypts nothing, and connects all that know the run's secret.

    Attributes:
        limit_seconds: how long to wait for an operation, whatever comes meanwhile; it may be changed.
        is_near: whether no two workers are a long line apart, `LONG_SECONDS`.

    Raises:
        ValueError: torch.distributed is not initialised, this process is not in `group`, or the extension was not built.
        CommunicationError: a worker could not be reached.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with TcpCommunicator() as comm:
        ...     comm.all_reduce(torch.ones(2)).wait()
        tensor([1., 1.])
        >>> dist.destroy_process_group()
    """

    limit_seconds = math.inf

    def __init__(
        self,
        group: Group | None = None,
        timeout_seconds: float = 300.0,
        *,
        interface: str | None = None,
        credentials: Credentials | None = None,
    ):
        with ProcessGroupCommunicator(group, timeout_seconds) as meeting:
            place = Place(*own_address(interface), credentials)
            self._join(Meeting(meeting.rank, meeting.size, meeting.gather_objects, place, timeout_seconds))
            self.global_ranks = meeting.global_ranks
            meeting.barrier()  # all are connected

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
            timeout_seconds, interface, credentials: as above; the host of a store stands in for MASTER_ADDR.
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
        comm = cls.__new__(cls)
        # The limit of the meeting holds while it connects, and no longer.
        comm.limit_seconds = limit
        comm._join(Meeting(rank, size, gather, place, timeout_seconds))
        comm.limit_seconds = math.inf
        return comm

    def _join(self, meeting: Meeting) -> None:
        """Connect with all others."""
        super().__init__(meeting.rank, meeting.size)
        self._meeting = meeting._replace(gather=self.gather_objects)  # for channels, which meet over this one
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._endpoint = Endpoint(meeting, peers)
        self._engine, self._connections = self._endpoint.engine, self._endpoint.connections
        self._sent, self._received = ([count() for _ in range(self.size)] for _ in range(2))  # messages, by peer
        self._spare = Spare()
        self._later = [
            Background("thinwire-comm") for _ in range(3)
        ]  # a thread for each step of an operation but the first
        self._inside, self._across = _places(self._connections.hosts, self.rank)
        self._tagged = Tagged(peers, self._endpoint, self._wait, meeting.timeout_seconds)
        try:
            self.barrier()  # all are connected
            trips = [self.counts(peer).round_trip_seconds for peer in peers]
            self.is_near = self.all_true(max(trips, default=0.0) < LONG_SECONDS)
        except (CommunicationError, ValueError):
            self.abandon()
            raise
        # What connecting took is no traffic of the run.
        self.ledger = Ledger(self.size)

    def another(self) -> TcpCommunicator:
        """A second communicator of the same workers, which meet over this one. All of them call it."""
        comm = type(self).__new__(type(self))
        comm.global_ranks = self.global_ranks
        comm._join(self._meeting)
        return comm

    def reordered(self, order: Sequence[int]) -> TcpCommunicator:
        """`another`, in which rank r is this one's rank `order[r]`."""

        def gather(own: Any) -> list[Any]:
            told = self.gather_objects(own)
            return [told[rank] for rank in order]

        comm = type(self).__new__(type(self))
        comm.global_ranks = [self.global_ranks[rank] for rank in order] if self.global_ranks else ()
        comm._join(self._meeting._replace(rank=order.index(self.rank), gather=gather))
        return comm

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
        num_bytes, others = check.num_bytes(tensor), self.size - 1
        half, whole = others * num_bytes // self.size, ring_all_reduce_bytes(self.size, num_bytes)
        if root is None:
            messages, sent, received = 2 * others, whole, whole
        elif root == self.rank:
            messages, sent, received = others, half, whole
        else:
            messages, sent, received = others + 1, num_bytes, half
        start = partial(self._start_all_reduce, tensor.detach(), reduction, root)
        name = "all_reduce" if root is None else "reduce"
        return self._submit(name, [tensor], start, tensor, (messages if num_bytes else 0, sent, received))

    def reduce_scatter(self, parts: list[Tensor], out: Tensor, reduction: Reduction = summing) -> Handle:
        """Combine `parts[self.rank]` over all workers into `out`. `wait()` returns it.

        Sends all parts but the own one, straight to whose they are.

        Args:
            parts: W tensors; part r has as many elements on all workers, and their dtype is the same.
            out: as large as the own part; it may be that part.
            reduction: see `reduce`.
        """
        check.parts(self, "reduce_scatter", parts, out)
        sent = sum(check.num_bytes(part) for part in self._others(parts).values())
        received = (self.size - 1) * check.num_bytes(out)
        start = partial(self._start_reduce_scatter, [part.detach() for part in parts], out.detach(), reduction)
        messages = sum(part.numel() > 0 for part in self._others(parts).values())
        return self._submit("reduce_scatter", [*parts, out], start, out, (messages, sent, received), parts)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Handle:
        """Send a tensor to one peer, which calls `receive` with the same tag; see `tagged.py`."""
        self._check_tagged("send", tensor, peer, tag)
        start, num_bytes = partial(self._tagged.start_send, as_bytes(tensor), peer, tag), check.num_bytes(tensor)
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
        start: Start = (
            partial(self._tagged.start_receive_any, as_bytes(tensor), tag, source)
            if peer is None
            else partial(self._tagged.start_receive, as_bytes(tensor), peer, tag)
        )
        handle = self._submit("receive", [tensor], start, source, (1, 1, check.num_bytes(tensor) + 1))
        return Handle(lambda: handle.wait()[0])

    def _check_tagged(self, operation: str, tensor: Tensor, peer: int | None, tag: int) -> None:
        check.peers(self, operation, "peer", {} if peer is None else {peer: tensor})
        check.tensor(self, operation, tensor)
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"rank {self.rank}: {operation} expects a tag in 0..{MAX_TAG}, got {tag}.")

    def abort(self, reason: str = "the communicator was aborted") -> None:
        """Close at once. Operations in flight fail, here and on all workers that wait for this one."""
        for peer in range(self.size):
            if peer != self.rank:
                self._engine.lose(peer, reason)
        self._end(partial(self._hang_up, 0.0))

    def _close(self) -> None:
        for later in self._later:  # each of them gives work to the next; what follows still needs the endpoint
            later.close()
            later.join()
        self._hang_up(math.inf)

    def _abandon(self) -> None:
        self._hang_up(CLOSE_SECONDS)

    def _hang_up(self, seconds: float) -> None:
        self._endpoint.close(seconds)  # what is under way fails
        for later in self._later:
            later.close()
            later.join()
        self._tagged.close()

    # ---- issuing ----

    def _issue(self, tensors: list[Tensor], start: Start) -> Callable[[], Any]:
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

    def _sending(self, tensors: dict[int, Tensor]) -> list[TaggedMessage]:
        """The next messages to some peers, numbered; those without bytes are not sent."""
        return _numbered(self._sent, tensors)

    def _receiving(self, tensors: dict[int, Tensor]) -> list[TaggedMessage]:
        return _numbered(self._received, tensors)

    def _post(self, sends: list[TaggedMessage], receives: list[TaggedMessage]) -> Callable[[], None]:
        """Start an operation of the engine; returns a function that waits for it."""
        if not sends and not receives:
            return nothing
        return partial(self._wait, self._endpoint.begin(sends, receives))

    def _wait(self, operation: int) -> None:
        self._endpoint.wait(operation, self.limit_seconds)

    # ---- primitives ----

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        return self._post(self._sending(sends), self._receiving(receives))

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor], limit: int) -> Callable[[], Any]:
        length = torch.tensor([tensor.numel()], device="cpu")
        lengths = [length if rank == self.rank else torch.empty_like(length) for rank in range(self.size)]
        wait = self._start_all_gather([as_bytes(part) for part in lengths])
        # Numbers are taken now, and not in `_post_parts`, for the messages that follow, even if they turn out to be empty.
        sends = [(peer, next(self._sent[peer])) for peer in self._others(lengths)]
        receives = [(peer, next(self._received[peer])) for peer in self._others(lengths)]

        def finish() -> Callable[[], None]:
            wait()
            sizes = check.announced_sizes(torch.cat(lengths).tolist(), limit)
            result.extend(tensor if rank == self.rank else flat_like(tensor, n) for rank, n in enumerate(sizes))
            own = as_bytes(tensor)
            return self._post(
                [TaggedMessage(peer, number, own) for peer, number in sends],
                [TaggedMessage(peer, number, as_bytes(result[peer])) for peer, number in receives],
            )

        return self._continued(finish)

    def _continued(self, call: Callable[[], Callable[[], None]], step: int = 0) -> Callable[[], None]:
        """Run `call` after the earlier ones, in the thread for what comes later; it returns what to wait for.

        Each later step of an operation has another thread. In one thread, an operation's third step could wait behind another
        operation's second, which waits, over other workers, for that third step.
        """
        handle = self._later[step].submit(call)
        return lambda: handle.wait()()

    def _start_broadcast(self, tensor: Tensor, root: int) -> Callable[[], Any]:
        parents, children = broadcast_tree(self.size, self.rank, root)
        sends = self._sending(dict.fromkeys(children, tensor))
        receives = self._receiving(dict.fromkeys(parents, tensor))
        if not parents or not children:
            return self._post(sends, receives)
        received = self._post([], receives)

        def finish() -> Callable[[], None]:
            received()
            return self._post(sends, [])

        return self._continued(finish)

    def _start_all_reduce(
        self, tensor: Tensor, reduction: Reduction = summing, root: int | None = None
    ) -> Callable[[], Any]:
        flat = tensor.view(-1)
        if self.size == 1 or flat.numel() == 0:
            reduction([flat], flat)
            return nothing
        num_bytes = check.num_bytes(flat)
        is_swap = self.size == 2 and root is None and not (self.is_near and num_bytes >= SHARD_BYTES)
        pieces = flat.tensor_split(max(1, min(MAX_PIECES, num_bytes // (SWAP_BYTES if is_swap else PIECE_BYTES))))
        is_by_hosts = bool(self._inside) and root is None and reduction is summing and num_bytes >= HOST_BYTES
        waits = [
            self._start_pair(piece, reduction)
            if is_swap
            else self._start_by_hosts(piece)
            if is_by_hosts
            else self._start_shards(piece, reduction, root)
            for piece in pieces
        ]
        # The later the engine is asked for an operation, the less it has to copy; a swap adds while the next piece comes.
        in_order = waits if is_swap else waits[::-1]
        return lambda: [wait() for wait in in_order]

    def _start_pair(self, tensor: Tensor, reduction: Reduction) -> Callable[[], None]:
        """Between two workers: both have the whole tensors, and the thread that waits combines them."""
        peer, theirs = 1 - self.rank, self._spare.take(tensor)
        wait = self._start_exchange({peer: tensor}, {peer: theirs})

        def finish() -> None:
            wait()
            reduce_into(tensor, [tensor, theirs] if self.rank == 0 else [theirs, tensor], reduction)
            self._spare.give_back(theirs)

        return finish

    def _start_shards(self, tensor: Tensor, reduction: Reduction, root: int | None) -> Callable[[], None]:
        """Worker r combines shard r, and sends it to all, or to the root; the tensors of others stay as they are."""
        shards = list(tensor.tensor_split(self.size))
        is_result = root is None or self.rank == root
        own = shards[self.rank]
        out = own if is_result else debug.empty_like(own)
        sent, reduced = self._start_reducing(dict(enumerate(shards)), out, reduction)
        to = self._others(shards) if root is None else {root: own}
        to.pop(self.rank, None)
        sends = self._sending(dict.fromkeys(to, out))
        # A sum may overwrite the shard that was sent for it: it comes only after that shard has arrived whole.
        received = self._post([], self._receiving(self._others(shards) if is_result else {}))

        def finish() -> Callable[[], None]:
            reduced()
            passed_on = self._post(sends, [])
            return lambda: (received(), passed_on(), sent())[0]

        return self._continued(finish)

    def _start_reduce_scatter(self, parts: list[Tensor], out: Tensor, reduction: Reduction) -> Callable[[], None]:
        sent, reduced = self._start_reducing(dict(enumerate(parts)), out, reduction)
        return lambda: (reduced(), sent())[0]

    def _start_reducing(
        self, parts: dict[int, Tensor], out: Tensor, reduction: Reduction
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Two functions: one waits until the parts of others are sent, the other one reduces the own part."""
        reduced = self._start_combining(parts, out, reduction)
        return self._post(self._sending(self._besides(parts)), []), reduced

    def _start_combining(self, parts: dict[int, Tensor], out: Tensor, reduction: Reduction) -> Callable[[], None]:
        """A function that combines what comes from the ranks of `parts` with the own part."""
        own = parts[self.rank]
        copies = {rank: own if rank == self.rank else self._spare.take(own) for rank in parts}
        received = self._post([], self._receiving(self._besides(copies)))

        def combined() -> None:
            received()
            flat = out.view(-1)
            reduce_into(flat, [flat if copy is out else copy.view(-1) for copy in copies.values()], reduction)
            for copy in self._besides(copies).values():
                self._spare.give_back(copy)

        return combined

    def _start_by_hosts(self, tensor: Tensor) -> Callable[[], None]:
        """Add up inside each host, then between hosts: W = N L workers in L hosts of N.

        Worker j of a host has part j of its host, and then shard l of that part of all, in host l. Each worker sends as much
        as without hosts, 2 (W-1)/W n, and a host 2 (L-1)/L n in place of 2 N (W-N)/W n.
        """
        parts = dict(zip(self._inside, tensor.tensor_split(len(self._inside)), strict=True))
        part = parts[self.rank]
        shards = dict(zip(self._across, part.tensor_split(len(self._across)), strict=True))
        shard = shards[self.rank]
        # All messages are numbered now. What is written comes only after what is sent of the same memory has arrived.
        sent, summed = self._start_reducing(parts, part, summing)
        to_hosts = self._sending(self._besides(shards))
        of_all = self._start_combining(shards, shard, summing)
        back_to_hosts = self._sending(dict.fromkeys(self._besides(shards), shard))
        come = self._post([], self._receiving(self._besides(shards)))
        back_inside = self._sending(dict.fromkeys(self._besides(parts), part))
        rest = self._post([], self._receiving(self._besides(parts)))

        def second() -> Callable[[], None]:
            summed()
            passed = self._post(to_hosts, [])
            return self._continued(partial(third, passed), 1)

        def third(passed: Callable[[], None]) -> Callable[[], None]:
            of_all()
            passed_back = self._post(back_to_hosts, [])
            return self._continued(partial(fourth, [passed, passed_back]), 2)

        def fourth(under_way: list[Callable[[], None]]) -> Callable[[], None]:
            come()
            under_way += [self._post(back_inside, []), rest, sent]
            return lambda: [wait() for wait in under_way][0]

        return self._continued(second)

    def _besides(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        """Those of others, in the order rank+1, rank+2, ..."""
        peers = sorted(tensors.keys() - {self.rank}, key=lambda peer: (peer - self.rank) % self.size)
        return {peer: tensors[peer] for peer in peers}


def _places(hosts: Sequence[Hashable], rank: int) -> tuple[list[int], list[int]]:
    """The ranks of this worker's host, and those of its place in all hosts; none if hosts have not equally many, several.

    Example:
        >>> _places(["a", "b", "a", "b"], rank=1), _places(["a", "b", "a"], rank=1)
        (([1, 3], [0, 1]), ([], []))
    """
    ranks = {host: [rank for rank, one in enumerate(hosts) if one == host] for host in hosts}
    if len(ranks) < 2 or len(set(map(len, ranks.values()))) > 1 or len(ranks[hosts[rank]]) < 2:
        return [], []
    inside = ranks[hosts[rank]]
    return inside, [of_host[inside.index(rank)] for of_host in ranks.values()]


def _numbered(numbers: Sequence[Iterator[int]], tensors: dict[int, Tensor]) -> list[TaggedMessage]:
    return [TaggedMessage(p, next(numbers[p]), as_bytes(tensor)) for p, tensor in tensors.items() if tensor.numel()]
