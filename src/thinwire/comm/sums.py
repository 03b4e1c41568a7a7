"""All-reduces in few steps: messages straight to whoever adds a part, and back.

    2 workers                 each sends the whole tensor, and both add: one step
    more                      worker r gets shard r of all others, adds in rank order, and sends the sum to all: two steps
    several on each of        inside its host, worker j adds up part j; then a shard of it, with those of its place in other
      L hosts                 hosts; sums go back the same way: four steps, two of them between hosts

Each worker sends and receives 2 (W-1)/W n bytes, as around a ring, which takes 2 (W-1) steps. With N workers on each host,
shards would leave a host 2 N (W-N)/W times; by hosts they leave it 2 (L-1)/L times.

The first messages are sent at the call. What follows on them is sent in threads, so that sums go on while nobody waits for
them. All messages are numbered at the call. What a sum overwrites has been sent: it comes only after that has arrived whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from torch import Tensor

from .. import debug
from .background import Later
from .buffers import Spare
from .handle import Wait, nothing
from .numbered import Numbers, Post
from .reduction import Reduction, reduce_into, summing

PIECE_BYTES, SWAP_BYTES, MAX_PIECES = 1 << 21, 1 << 20, 8  # of a tensor: added while the next piece is on its way
HOST_BYTES = 1 << 16  # from which the lines between hosts count more than two steps inside them


class Route:
    """Which messages a worker sends and receives in all-reduces.

    Args:
        rank: this worker.
        hosts: of all workers, in rank order: alike for those of one host.

    Attributes:
        shard_bytes: from which each of two workers adds up one half of a tensor, and not both the whole.
    """

    def __init__(self, rank: int, hosts: Sequence[Hashable]):
        self.rank, self.size = rank, len(hosts)
        self.shard_bytes = math.inf
        self._by_hosts = [team for team in places(hosts, rank) if team]

    def teams(self, num_bytes: int, reduction: Reduction = summing, root: int | None = None) -> Sequence[Sequence[int]]:
        """The ranks that each add up a part; by hosts, then those that each add up a shard of it. None for a swap."""
        if self.size == 2 and root is None and num_bytes < self.shard_bytes:
            return []
        is_by_hosts = self._by_hosts and root is None and reduction is summing and num_bytes >= HOST_BYTES
        return self._by_hosts if is_by_hosts else [range(self.size)]

    def num_pieces(self, num_bytes: int, is_swap: bool) -> int:
        """Into how many pieces a tensor is cut, each of which takes all steps."""
        return max(1, min(MAX_PIECES, num_bytes // (SWAP_BYTES if is_swap else PIECE_BYTES)))

    def traffic(self, tensor: Tensor, reduction: Reduction = summing, root: int | None = None) -> tuple[int, int, int]:
        """Messages sent, bytes sent and bytes received for a tensor.

        Example:
            >>> import torch
            >>> [Route(rank, range(3)).traffic(torch.ones(4)) for rank in range(3)]
            [(4, 24, 24), (4, 20, 20), (4, 20, 20)]
        """
        item_bytes, teams = tensor.element_size(), self.teams(tensor.nbytes, reduction, root)
        num_pieces = self.num_pieces(tensor.nbytes, not teams)
        messages = sent = received = 0
        for piece in range(num_pieces):
            n = _part(tensor.numel(), num_pieces, piece)
            if not teams:
                messages, sent, received = messages + (n > 0), sent + n, received + n
            for team in teams:
                others, own = len(team) - 1, _part(n, len(team), team.index(self.rank))
                receivers = others if root is None else int(root != self.rank)
                messages += min(n, len(team)) - (own > 0) + receivers * (own > 0)
                sent += n - own + receivers * own
                received += others * own + (n - own if root in (None, self.rank) else 0)
                n = own
        return messages, sent * item_bytes, received * item_bytes


class Sums:
    """Starts all-reduces.

    Args:
        route: of this worker.
        post: starts messages.
        numbers: of the messages; operations that share them do not mix.
        later: where later steps run.
    """

    def __init__(self, route: Route, post: Post, numbers: Numbers, later: Later):
        self._route, self._rank, self._size = route, route.rank, route.size
        self._post, self._numbers, self._later, self._spare = post, numbers, later, Spare()

    def start(self, tensor: Tensor, reduction: Reduction = summing, root: int | None = None) -> Wait:
        """Combine a contiguous tensor of all workers, in place.

        Args:
            tensor: in main memory.
            reduction: combines parts of the tensors of all workers, in rank order; by hosts if it is a sum.
            root: the one worker whose tensor becomes the result, all others keep theirs; None for all.
        """
        flat = tensor.view(-1)
        if self._size == 1 or flat.numel() == 0:
            reduction([flat], flat)
            return nothing
        teams = self._route.teams(flat.nbytes, reduction, root)
        start: Callable[[Tensor], Wait]
        if not teams:
            start = partial(self._start_whole, reduction=reduction)
        elif len(teams) == 2:
            start = partial(self._start_by_hosts, inside=teams[0], across=teams[1])
        else:
            start = partial(self._start_shards, reduction=reduction, root=root)
        waits = [start(piece) for piece in flat.tensor_split(self._route.num_pieces(flat.nbytes, not teams))]
        # Our own engine copies less, the later it is asked for an operation; a swap adds while the next piece comes.
        in_order = waits[::-1] if teams else waits
        return lambda: [wait() for wait in in_order]

    def start_reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, reduction: Reduction) -> Wait:
        """Combine the own one of W parts over all workers into `out`."""
        sent, reduced = self._start_reducing(dict(enumerate(parts)), out, reduction)
        return lambda: (reduced(), sent())[0]

    def _start_whole(self, tensor: Tensor, reduction: Reduction) -> Wait:
        """Between two workers: both have the whole tensors, and the thread that waits combines them."""
        peer, theirs = 1 - self._rank, self._spare.take(tensor)
        wait = self._post(self._numbers.sending({peer: tensor}), self._numbers.receiving({peer: theirs}))

        def finish() -> None:
            wait()
            # In rank order, so that both have the same bits, also of NaN.
            reduce_into(tensor, [tensor, theirs] if self._rank == 0 else [theirs, tensor], reduction)
            self._spare.give_back(theirs)

        return finish

    def _start_shards(self, tensor: Tensor, reduction: Reduction, root: int | None) -> Wait:
        """Worker r combines shard r, and sends it to all, or to the root; the tensors of others stay as they are."""
        shards = dict(enumerate(tensor.tensor_split(self._size)))
        is_result = root is None or self._rank == root
        own, others = shards[self._rank], self._besides(shards)
        out = own if is_result else debug.empty_like(own)
        sent, reduced = self._start_reducing(shards, out, reduction)
        sends = self._numbers.sending(dict.fromkeys(others if root is None else {root} - {self._rank}, out))
        received = self._post([], self._numbers.receiving(others if is_result else {}))

        def finish() -> Wait:
            reduced()
            passed_on = self._post(sends, [])
            return lambda: (received(), passed_on(), sent())[0]

        return self._later.follow(finish)

    def _start_by_hosts(self, tensor: Tensor, inside: Sequence[int], across: Sequence[int]) -> Wait:
        parts = dict(zip(inside, tensor.tensor_split(len(inside)), strict=True))
        part, beside = parts[self._rank], self._besides(parts)
        shards = dict(zip(across, part.tensor_split(len(across)), strict=True))
        shard, elsewhere = shards[self._rank], self._besides(shards)
        sent, summed = self._start_reducing(parts, part, summing)
        to_hosts = self._numbers.sending(elsewhere)
        of_all = self._start_combining(shards, shard, summing)
        back_to_hosts = self._numbers.sending(dict.fromkeys(elsewhere, shard))
        come = self._post([], self._numbers.receiving(elsewhere))
        back_inside = self._numbers.sending(dict.fromkeys(beside, part))
        rest = self._post([], self._numbers.receiving(beside))

        def second() -> Wait:
            summed()
            return self._later.follow(partial(third, self._post(to_hosts, [])), 1)

        def third(passed: Wait) -> Wait:
            of_all()
            return self._later.follow(partial(fourth, passed, self._post(back_to_hosts, [])), 2)

        def fourth(passed: Wait, passed_back: Wait) -> Wait:
            come()
            waits = [passed, passed_back, self._post(back_inside, []), rest, sent]
            return lambda: [wait() for wait in waits][0]

        return self._later.follow(second)

    def _start_reducing(self, parts: dict[int, Tensor], out: Tensor, reduction: Reduction) -> tuple[Wait, Wait]:
        """Two functions: one waits until the parts of others are sent, the other one combines the own part."""
        reduced = self._start_combining(parts, out, reduction)
        return self._post(self._numbers.sending(self._besides(parts)), []), reduced

    def _start_combining(self, parts: dict[int, Tensor], out: Tensor, reduction: Reduction) -> Wait:
        """A function that combines what comes from the ranks of `parts` with the own part."""
        own = parts[self._rank]
        copies = {rank: own if rank == self._rank else self._spare.take(own) for rank in parts}
        received = self._post([], self._numbers.receiving(self._besides(copies)))

        def combined() -> None:
            received()
            flat = out.view(-1)
            reduce_into(flat, [flat if copy is out else copy.view(-1) for copy in copies.values()], reduction)
            for copy in self._besides(copies).values():
                self._spare.give_back(copy)

        return combined

    def _besides(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        """Those of others, in the order rank+1, rank+2, ..., so that no worker is flooded."""
        peers = sorted(tensors.keys() - {self._rank}, key=lambda peer: (peer - self._rank) % self._size)
        return {peer: tensors[peer] for peer in peers}


def places(hosts: Sequence[Hashable], rank: int) -> tuple[list[int], list[int]]:
    """The ranks of a worker's host, and those of its place in all hosts; none if hosts have not equally many, several.

    Example:
        >>> places(["a", "b", "a", "b"], rank=1), places(["a", "b", "a"], rank=1)
        (([1, 3], [0, 1]), ([], []))
    """
    ranks: dict[Hashable, list[int]] = {}
    for one, host in enumerate(hosts):
        ranks.setdefault(host, []).append(one)
    inside = ranks[hosts[rank]]
    if len(ranks) < 2 or len(inside) < 2 or len(set(map(len, ranks.values()))) > 1:
        return [], []
    return inside, [of_host[inside.index(rank)] for of_host in ranks.values()]


def _part(numel: int, num_parts: int, index: int) -> int:
    """Elements of part `index` in `tensor_split`."""
    return numel // num_parts + (index < numel % num_parts)
