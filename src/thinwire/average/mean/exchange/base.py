"""The contract of an exchange: how workers exchange the payloads of one call of `Mean.step`.

An exchange is an object without fields. `begin` takes a `Job`, encodes its tensors and returns `finish(totals, dense_total)`:

    finish         waits, decodes all payloads and adds them in rank order, so that all workers have the same bits
    totals         one buffer per tensor, in any state before; afterwards the mean times `job.scale`
    dense_total    zeroed before; afterwards the mean of the dense vectors
    returns        whether all of `totals` is finite; the decoder knows it without another pass

The caller may overwrite the job's tensors before it calls `finish`. With `keep_residual`, they hold what the payload did
not carry after `finish` has returned.

Order. An exchange of one step sends before it returns `finish`. An exchange of several steps is a generator: it issues a
collective, yields its handle, and receives the result; then it issues the next. It returns `finish` after it has issued
the last one. `PendingExchange` drives it. A run uses one exchange only, so all workers issue the same collectives in the
same order. A worker that takes no part in a collective yields `Handle(nothing)` in its place: exchanges of several buckets
advance one stage at a time, and over NCCL, which runs one operation after another, workers whose stages differ in number
would wait for each other.

Message    [dense float32][payload]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .... import debug, kernels
from ....algorithm import require
from ....clock import Clock
from ....codec import Codec, Key, Selection
from ....comm import Communicator, Handle
from ....comm.check import announced_sizes
from ....kernels import Flag
from ....kernels.checks import described
from ....kernels.flags import Unread
from ....memory import ErrorFeedbackState
from ....streams import uploaded

Finish = Callable[[list[Tensor], Tensor], Flag]
Stages = Generator[Handle, Any, Finish]
Observe = Callable[[Codec, Sequence[Tensor], Sequence[Key]], None]

Shares = tuple[float, ...]
"""Which part of every tensor each worker owns, adding up to 1; empty for equal parts."""

SUMMED = 0xFFFF
"""The part of a `piece_key` for what the owner of a piece encodes of the sum of all workers."""

_PART_SHIFT = 48  # the stream of a key: tensor below bit 32, then rank, then part of the tensor


@dataclass
class Job:
    """One call of `Mean.step`.

    Args:
        comm: all workers.
        codec: the codec of this round.
        clock: measures the seconds of each phase.
        tensors: the values to encode; with `keep_residual`, contiguous float32 buffers that receive the residual.
        names: the name of each tensor.
        keys: the random key of each tensor.
        merged: whether all tensors are encoded as one segment, with the first key, or each as its own.
        keep_residual: whether there is a memory.
        dense: float32 vector of all tensors that are not encoded.
        scale: factor of the encoded result, since memory is unscaled and gradients may be scaled.
        owner_memory: the memory of the second encoding, for exchanges that encode twice.
        workers_per_node: how many consecutive ranks share a node.
        shares: which part of every tensor each worker owns, for exchanges with owners; empty for equal parts.
        masked: empty, or for each tensor a contiguous float32 buffer to be zeroed wherever something was sent.
        selection: what the codec selects of `tensors`, if memory has selected already.
        by_senders: whether each element is divided by the number of workers that sent it, rather than by W.
        combine: makes the result of what all workers sent, decoded, (W, n): encoded tensors first, then the dense vector, both
            multiplied by the loss scale. None for the mean.
        observe: receives codec, segments and keys before they are encoded, so that an adaptive codec can learn.
    """

    comm: Communicator
    codec: Codec
    clock: Clock
    tensors: list[Tensor]
    names: list[str]
    keys: list[Key]
    merged: bool
    keep_residual: bool
    dense: Tensor
    scale: float
    owner_memory: ErrorFeedbackState | None = None
    workers_per_node: int = 1
    shares: Shares = ()
    masked: list[Tensor] = field(default_factory=list)
    selection: Selection | None = None
    by_senders: bool = False
    combine: Callable[[Tensor], Tensor] | None = None
    observe: Observe | None = None

    def encode(self, parts: Sequence[Tensor], keys: Sequence[Key], masked: Sequence[Tensor] = ()) -> Tensor:
        """Encode `parts` with one call to the codec; with `keep_residual`, leave the residual in them.

        Args:
            parts: the tensors to encode.
            keys: the key of each part.
            masked: empty, or for each part a buffer to be zeroed wherever something was sent.
        """
        return self.encode_groups([parts], [keys], [masked])

    def encode_groups(
        self, groups: Sequence[Sequence[Tensor]], keys: Sequence[Sequence[Key]], masked: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """`encode` of several groups of parts, each merged for itself, still with one call: `split_payload` takes it apart."""
        with self.clock("encode"):
            segments = [part for group in groups for part in group]
            if not segments:
                return torch.empty(0, dtype=torch.uint8, device=self.dense.device)
            if self.merged:
                filled = [group for group in groups if group]
                segments = [flatten(group, self.dense.device) for group in filled]
            used = self._used(keys)
        if self.observe is not None:
            with self.clock("adapt"):
                self.observe(self.codec, segments, used)
        with self.clock("encode"):
            residuals = segments if self.keep_residual else None
            sparse = None if self.selection is None else self.codec.traits.sparse
            if self.selection is None or sparse is None:
                payload = self.codec.encode(segments, used, residuals)
            else:
                # Memory has selected, so there is one, and the segments receive their residuals.
                flat = [s.flatten() for s in segments]
                payload = sparse.encode_topk(self.selection, flat, [key.mixed() for key in used], flat)
            # Merged segments are copies, so their residuals go back into the tensors.
            if self.merged and self.keep_residual:
                for group, segment in zip(filled, segments, strict=True):
                    store_segments([segment], group, merged=True)
            if any(masked):
                self._mask(payload, used, [mask for mask in masked if mask])
            self.selection = None  # as large as the tensors, where a warm-up begins
            return payload

    def of(self, positions: Sequence[int]) -> Job:
        """The job with the codec of the tensors at `positions`, to encode and decode pieces of these alone."""
        codec = self.codec.pick(positions)
        return self if codec is self.codec else replace(self, codec=codec)

    def _mask(self, payload: Tensor, keys: Sequence[Key], masked: Sequence[Sequence[Tensor]]) -> None:
        buffers = [buffer for group in masked for buffer in group]
        numels = [sum(m.numel() for m in group) for group in masked] if self.merged else [m.numel() for m in buffers]
        sent = self.selection or self.codec.support(payload, numels, list(keys))
        if sent is None:  # the codec sends every element
            torch._foreach_zero_(buffers)
        elif self.merged:
            for group, indices, count in zip(masked, sent.indices.split(sent.counts), sent.counts, strict=True):
                self.clear(group, indices, [count])
        else:
            self.clear(buffers, sent.indices, sent.counts)

    def clear(self, masked: Sequence[Tensor], indices: Tensor, counts: list[int], where: Tensor | None = None) -> None:
        """Zero `masked` at the indices, `counts[i]` of which are of segment i; only those `where` it is true, if given."""
        segments = flat_segments(masked, self.merged)
        if where is None:
            kernels.scatter.clear(segments, indices, counts)
        else:
            overwrite(segments, indices, counts, where, 0.0)
        store_segments(segments, masked, self.merged)

    def decode(self, payloads: Sequence[Tensor], parts: Sequence[Tensor], weight: float, keys: Sequence[Key]) -> Flag:
        """Overwrite `parts` with `weight` times the sum of the payloads; return whether all of it is finite.

        A codec with `votes` combines the unweighted sum, and its result takes the place of the mean.

        Args:
            payloads: what workers sent, added in this order.
            parts: contiguous float32 buffers.
            weight: factor of the sum.
            keys: the keys that the parts were encoded with; a codec without `shared_key` ignores them.
        """
        return self.decode_groups(payloads, [parts], weight, [keys])

    def decode_groups(
        self,
        payloads: Sequence[Tensor],
        groups: Sequence[Sequence[Tensor]],
        weight: float,
        keys: Sequence[Sequence[Key]],
    ) -> Flag:
        """`decode` of several groups of parts, each merged for itself, still with one call."""
        with self.clock("decode"):
            filled = [group for group in groups if group]
            if not filled:
                return True
            segments = [part for group in filled for part in group]
            if self.merged:
                sizes = [sum(part.numel() for part in group) for group in filled]
                segments = [debug.empty(size, dtype=torch.float32, device=self.dense.device) for size in sizes]
            votes, used = self.codec.traits.votes, self._used(keys)
            if self.by_senders:
                # `decode_mean` divides by the senders, so this undoes the division by W.
                finite = self.codec.decode_mean(payloads, segments, weight * len(payloads), used)
            else:
                finite = self.codec.decode_sum(payloads, segments, 1.0 if votes else weight, used)
            if votes:
                self.codec.combine(segments)
                torch._foreach_mul_(segments, weight * len(payloads))
                finite = kernels.all_finite(segments)
            if self.merged:
                for group, segment in zip(filled, segments, strict=True):
                    store_segments([segment], group, merged=True)
            return finite

    def _used(self, keys: Sequence[Sequence[Key]]) -> list[Key]:
        """The key of each segment, from those of each group's parts."""
        return [key for group in keys for key in (group[:1] if self.merged else group)]

    def decode_messages(self, messages: Sequence[Tensor], totals: list[Tensor], dense_total: Tensor) -> Flag:
        """The `finish` of an exchange in which every worker gets all messages, one of each worker, in rank order."""
        if self.combine is not None:
            return self._combine_messages(self.combine, messages, totals, dense_total)
        payloads = add_dense(messages, dense_total, 1.0 / self.comm.size)
        return self.decode(payloads, totals, self.scale / self.comm.size, self.keys)

    def decode_weighted(
        self, messages: Sequence[Tensor], weights: Sequence[float], totals: list[Tensor], dense_total: Tensor
    ) -> Flag:
        """As `decode_messages`, each message with a weight of its own. With equal weights it has the same bits."""
        flags, others = list[Flag](), totals
        # Messages of one weight are decoded together, in one pass.
        for weight, group in groupby(zip(weights, messages, strict=True), key=itemgetter(0)):
            payloads = add_dense([message for _, message in group], dense_total, weight)
            flags.append(self.decode(payloads, others, weight, self.keys))
            # The first weight writes into `totals`; the others write into buffers that are added.
            if totals and others is not totals:  # PyTorch refuses an empty list
                torch._foreach_add_(totals, others)
            others = [debug.empty_like(total) for total in totals]
        return kernels.flags.all_of(flags)

    def _combine_messages(
        self, combine: Callable[[Tensor], Tensor], messages: Sequence[Tensor], totals: list[Tensor], dense_total: Tensor
    ) -> Flag:
        outs = [*totals, dense_total]
        rows = debug.empty(
            len(messages), sum(out.numel() for out in outs), dtype=torch.float32, device=self.dense.device
        )
        for message, row in zip(messages, rows, strict=True):
            *parts, dense_part = split_like(row, outs)
            try:
                dense, payload = unpack(message, self.dense.numel())
                dense_part.copy_(dense)
                self.decode([payload], parts, self.scale, self.keys)
            except ValueError:  # of one wrong worker, which must not stop the others
                row.fill_(float("nan"))
        torch._foreach_copy_(outs, split_like(combine(rows), outs))
        return kernels.all_finite(totals)

    def message_nbytes(self) -> int:
        """Bytes of a message of all tensors and the dense vector; an upper bound if the codec's size is not fixed."""
        return message_nbytes(self.codec, [t.shape for t in self.tensors], self.dense.numel(), self.merged)


class PendingExchange:
    """An exchange under way, from its first collective to `finish`.

    Args:
        begin: of an exchange.
        job: what it exchanges. The job's clock adds up the time that is spent waiting between collectives.
        counts: whether to count `num_bytes`, which takes a few microseconds.

    Attributes:
        finish: set once the last collective is issued.
        sent: when the first collective was issued.
        waited: how long the caller had waited for messages by then; it says so itself.
        steps: how many collectives were issued, one after the other.
        num_bytes: what this worker has sent so far; 0 without `counts`.
    """

    def __init__(self, begin: Callable[[Job], Finish | Stages], job: Job, counts: bool):
        self._begin, self.job, self._counts = begin, job, counts
        self._stages: Stages | None = None
        self._pending: Handle | None = None
        self.finish: Finish | None = None
        self.waited, self.steps, self.num_bytes = 0.0, 0, 0
        self.advance()
        self.sent = time.perf_counter()

    def advance(self) -> None:
        """Wait for the collective that was issued last, and issue the next one; do nothing after the last."""
        if self.finish is None:
            before = self._bytes_sent()
            self.finish = self._issue()
            self.steps += 1
            self.num_bytes += self._bytes_sent() - before

    def _bytes_sent(self) -> int:
        return self.job.comm.ledger.bytes_sent if self._counts else 0

    def _issue(self) -> Finish | None:
        result = None
        if self._stages is None:
            begun = self._begin(self.job)
            if not isinstance(begun, Generator):
                return self._checked(begun)
            self._stages = begun
        elif self._pending is not None:
            with self.job.clock("wait"):
                result = self._pending.wait()
        try:
            self._pending = self._stages.send(result)
        except StopIteration as end:
            return self._checked(end.value)
        if not isinstance(self._pending, Handle):
            raise self._broken("begin must yield the handle of each collective", self._pending)
        return None

    def finished(self, totals: list[Tensor], dense_total: Tensor) -> Flag:
        """Call `finish`, which is set; returns whether all of `totals` is finite."""
        assert self.finish is not None
        finite: object = self.finish(totals, dense_total)
        if not isinstance(finite, (bool, Unread)):
            raise self._broken("finish(totals, dense_total) must return whether all of totals is finite", finite)
        return finite

    def _checked(self, finish: Any) -> Finish:
        """`finish`; without one, the round would advance for ever."""
        if not callable(finish):  # in every round, so the message is built only when it is raised
            raise self._broken("begin must return finish(totals, dense_total), at its end if it is a generator", finish)
        checked: Finish = finish
        return checked

    def _broken(self, demand: str, got: object) -> ValueError:
        """The error of an exchange that breaks the contract."""
        exchange = type(getattr(self._begin, "__self__", self)).__name__
        return ValueError(f"rank {self.job.comm.rank}: {exchange}.{demand}, got {described(got)}")


def complete(flight: PendingExchange, flights: Sequence[PendingExchange]) -> None:
    """Advance all exchanges under way until this one of them has issued its last collective, and has its `finish`.

    They all advance at least once, so that what they send next travels while this one is waited for.
    """
    while True:
        for under_way in flights:
            under_way.advance()
        if flight.finish is not None:
            return


class Subgroup:
    """Some of the workers, as a team of their own: collectives that only they call.

    Args:
        comm: all workers.
        ranks: of the members, this worker's own among them.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int]):
        self._comm, self._ranks = comm, list(ranks)
        self.rank, self.size, self.device = self._ranks.index(comm.rank), len(self._ranks), comm.device

    def all_to_all(self, tensors: list[Tensor], sizes: list[int] | None = None) -> Handle:
        """Send `tensors[i]` to member i; entry i of the result comes from member i, of `sizes[i]` elements."""
        return self._comm.all_to_all(tensors, sizes, self._ranks)

    def all_gather(self, tensor: Tensor, sizes: list[int] | None = None) -> Handle:
        """Give every member the tensors of all."""
        return self.all_to_all([tensor] * self.size, [tensor.numel()] * self.size if sizes is None else sizes)


Team = Communicator | Subgroup
"""Workers that call collectives together."""


def gather_messages(team: Team, message: Tensor, sizes: list[int], fixed: bool) -> Generator[Handle, Any, Handle]:
    """All-gather messages; returns their handle.

    Args:
        team: the workers that take part.
        message: of this worker.
        sizes: of all workers' messages, or an upper bound of each.
        fixed: whether `sizes` are exact; if not, the exact ones travel first.
    """
    if not fixed:
        length = uploaded(team.device, [message.numel()])
        sizes = announced_sizes(torch.cat((yield team.all_gather(length))).tolist(), max(sizes))
    return team.all_gather(message, sizes)


def piece_key(key: Key, part: int) -> Key:
    """The key of a part of a tensor that is encoded for itself: `part` tells these apart, 1 to `SUMMED`."""
    return Key(key.seed, key.stream | part << _PART_SHIFT, key.step)


def split_bounds(numel: int, size: int, shares: Shares = ()) -> list[int]:
    """Where the parts of `size` owners begin, and where the last one ends; equal parts are those of `Tensor.tensor_split`.

    Example:
        >>> split_bounds(5, 4), split_bounds(10, 3, (0.5, 0.0, 0.5))
        ([0, 2, 3, 4, 5], [0, 5, 5, 10])
    """
    if not shares:
        return [rank * (numel // size) + min(rank, numel % size) for rank in range(size + 1)]
    # The sum of shares is only near 1: no bound may lie beyond the end, and the last one is exact.
    return [0, *(round(numel * min(1.0, end)) for end in list(accumulate(shares))[:-1]), numel]


def split_numel(numel: int, size: int, rank: int, shares: Shares = ()) -> int:
    """Elements of part `rank` of the `split_bounds`.

    Example:
        >>> [split_numel(5, 4, rank) for rank in range(4)]
        [2, 1, 1, 1]
    """
    if not shares:
        return numel // size + (rank < numel % size)
    bounds = split_bounds(numel, size, shares)
    return bounds[rank + 1] - bounds[rank]


def split(t: Tensor, size: int, shares: Shares = ()) -> tuple[Tensor, ...]:
    """The parts of all owners: views, cut between rows."""
    return t.tensor_split(split_bounds(t.shape[0], size, shares)[1:-1] if shares else size)


def message_nbytes(codec: Codec, shapes: Sequence[torch.Size], dense_numel: int, merged: bool) -> int:
    """Bytes of one message; an upper bound if the codec's size is not fixed."""
    if not shapes:
        return 4 * dense_numel
    return codec.nbytes([sum(s.numel() for s in shapes)] if merged else list(shapes)) + 4 * dense_numel


def pack(dense: Tensor, payload: Tensor) -> Tensor:
    """Join a dense float32 vector and a payload into one message."""
    return torch.cat([dense.view(torch.uint8), payload]) if dense.numel() else payload


def pack_each(messages: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Join the parts of each message, in one buffer: with one launch on a GPU.

    Messages begin at multiples of 16 bytes: what stays on this worker is decoded as fast as what arrives.
    """
    whole = [[part for part in parts if part.numel()] for parts in messages]
    if all(len(parts) == 1 for parts in whole):  # nothing to join
        return [parts[0] for parts in whole]
    sizes, gap = [sum(map(Tensor.numel, parts)) for parts in whole], messages[0][0].new_zeros(15)
    buffer = torch.cat([part for parts, n in zip(whole, sizes, strict=True) for part in (*parts, gap[: -n % 16])])
    return list(buffer.split([size for n in sizes for size in (n, -n % 16)])[::2])


def unpack(message: Tensor, dense_numel: int) -> tuple[Tensor, Tensor]:
    """Split a message into its dense vector and its payload. The message may start at any address.

    Raises:
        ValueError: the message is shorter than its dense vector.

    Example:
        >>> unpack(pack(torch.ones(2), torch.tensor([7], dtype=torch.uint8)), 2)
        (tensor([1., 1.]), tensor([7], dtype=torch.uint8))
    """
    if dense_numel == 0:
        return message.new_empty(0, dtype=torch.float32), message
    require(
        message.numel() >= 4 * dense_numel,
        f"a message begins with {dense_numel} dense elements, {4 * dense_numel} bytes, got {message.numel()} bytes",
    )
    return kernels.payload_as(message[: 4 * dense_numel], torch.float32, "dense"), message[4 * dense_numel :]


def add_dense(messages: Sequence[Tensor], total: Tensor, weight: float) -> list[Tensor]:
    """Add the dense vector of each message, times `weight`, to `total` in their order; returns their payloads."""
    parts = [unpack(message, total.numel()) for message in messages]
    for dense, _ in parts:
        kernels.mix.add([total], dense, own_weight=weight)
    return [payload for _, payload in parts]


def flatten(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """A new float32 vector of all elements."""
    if not parts:
        return torch.empty(0, dtype=torch.float32, device=device)
    return torch.cat([t.ravel().float() for t in parts])


def split_like(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive pieces of `flat`, in the shapes of `parts`."""
    pieces = flat.split([p.numel() for p in parts])
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]


def flat_segments(tensors: Sequence[Tensor], merged: bool) -> list[Tensor]:
    """One vector of all elements, a copy, if `merged`; else each tensor as a float32 vector, a view if possible."""
    if merged:
        return [flatten(tensors, tensors[0].device)] if tensors else []
    return [t.ravel().float() for t in tensors]


def store_segments(segments: Sequence[Tensor], tensors: Sequence[Tensor], merged: bool) -> None:
    """Copy back what `flat_segments` copied."""
    if merged and tensors:
        torch._foreach_copy_(list(tensors), split_like(segments[0], tensors))


def overwrite(
    segments: Sequence[Tensor], indices: Tensor, counts: list[int], where: Tensor, values: Tensor | float
) -> None:
    """Write `values` at the indices, `counts[i]` of which are of segment i, where `where` is true.

    All indices are written, the others with what is there: to leave these out, the host would have to read their number.
    """
    old = kernels.scatter.gather(segments, indices, counts)
    kernels.scatter.write(segments, indices, torch.where(where, values, old), counts)
