"""Each worker reduces one shard and sends the encoded mean: 2 steps, about 2(W-1)/W (p + d) bytes per worker.

Every tensor is split into W pieces of consecutive elements, the first n mod W of them one longer. For codecs that need
shapes, pieces are consecutive rows. Worker r owns piece r of every tensor, in any bucket. The pieces of one owner are its
shard.

    1. each worker encodes its W shards and sends shard r to worker r                   all-to-all
    2. worker r decodes and adds them in rank order: m_r = 1/W sum_i C(x_i,r)
    3. worker r adds its own memory e_r, encodes m_r + e_r, and sends it to all          all-gather
    4. all workers decode the W shards

On measured lines a worker owns more or less than 1/W of every tensor: f_r of it (`Layout.shares`), so that slow lines carry
less. Worker s then moves about n (1 + (W-2) f_s) each way for n bytes of messages.

Messages stay small at any world size, at the price of a second loss. With a memory, the owner keeps what the second
encoding loses, as in DoubleSqueeze. Then the sum of all gradients is W times the sum of all results, plus all first
memories, plus W times all second memories. The result of an unbiased codec is unbiased.

Worker s sends the sum of n_r over r != s, plus (W-1) n_s bytes; n_r is the size of the message of shard r.

Source: Tang et al. 2019, DoubleSqueeze, arXiv 1905.05957; Alistarh et al. 2017, QSGD, arXiv 1610.02132.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import debug
from ....codec import Codec, Key
from ....codec.base import add_sections, join_payloads, split_payload
from ....comm import Communicator, Handle
from ....comm.check import announced_sizes
from ....kernels import Flag, flags
from ....membership import config, cut
from ....memory import ErrorFeedback, ErrorFeedbackState
from ....streams import uploaded
from .base import (
    SUMMED,
    Job,
    Shares,
    Stages,
    add_dense,
    gather_messages,
    message_nbytes,
    pack,
    pack_each,
    piece_key,
    split,
    split_bounds,
    split_numel,
    unpack,
)
from .contract import Exchange, Load

# The second encoding always uses plain error feedback: momentum, if any, is in the first memory.
OWNER_MEMORY = ErrorFeedback()


class Whole(NamedTuple):
    """A tensor that owners cut between its rows, each of `width` elements."""

    rows: int
    width: int
    device: torch.device

    @classmethod
    def of(cls, codec: Codec, t: Tensor) -> Whole:
        """As the codec sees the tensor."""
        shape = piece_shape(codec, t.shape, 1, 0)
        return cls(shape[0], shape[1:].numel(), t.device)


@dataclass
class OwnerMemory(ErrorFeedbackState):
    """What the second encoding lost of the pieces that this worker owns, in units of the mean.

    Attributes:
        wholes: the tensors that are cut, by name.
        owner: rank and number of workers for which they are cut.
        shares: which part each of them owns.
    """

    residual: dict[str, Tensor] = cut()
    wholes: dict[str, Whole] = config(default_factory=dict)
    owner: tuple[int, int] = config(default=(0, 1))
    shares: Shares = config(default=())

    @classmethod
    def of(cls, wholes: dict[str, Whole], rank: int, size: int, shares: Shares = ()) -> OwnerMemory:
        """Zero memory of worker `rank` of `size`."""
        memory = cls({}, {}, wholes=wholes, owner=(rank, size), shares=shares)
        for name, whole in wholes.items():
            numel = split_numel(whole.rows, size, rank, shares) * whole.width
            memory.residual[name], memory.spare[name] = (
                torch.zeros(numel, dtype=torch.float32, device=whole.device) for _ in range(2)
            )
        return memory

    def place(self, name: str, rank: int, size: int) -> slice:
        rows, width, _ = self.wholes[name]
        bounds = split_bounds(rows, size, self.shares)
        return slice(bounds[rank] * width, bounds[rank + 1] * width)

    def gather(self, old: OwnerMemory | None, comm: Communicator) -> None:
        """Take over the pieces that are owned now from all workers: one all-reduce. Pieces of the dead are zero.

        Args:
            old: what this worker has owned so far; None if it is new.
            comm: the workers of the next round.
        """
        if not self.wholes:
            return
        wholes = {
            name: torch.zeros(w.rows * w.width, dtype=torch.float32, device=w.device) for name, w in self.wholes.items()
        }
        if old is not None:
            for name, whole in wholes.items():
                whole[old.place(name, *old.owner)] = old.residual[name]
        flat = comm.all_reduce(torch.cat(list(wholes.values()))).wait()
        for name, total in zip(wholes, flat.split([whole.numel() for whole in wholes.values()]), strict=True):
            self.residual[name].copy_(total[self.place(name, *self.owner)])


class Shard(NamedTuple):
    """The pieces of one owner that are not empty, and the positions of their tensors in the job."""

    positions: list[int]
    pieces: list[Tensor]


class ScatterReduce(Exchange):
    """The result is `C(1/W sum_i C(x_i) + e)`, for any codec; e is the owner's memory, if any."""

    word = "scatter_reduce"
    is_uniform = True
    has_owners = True

    def steps(self, size: int, workers_per_node: int) -> int:
        return 2 * (size > 1)

    def num_bytes(self, size: int, workers_per_node: int, message: float) -> float:
        return 2 * workers_per_node * (size - workers_per_node) * message / size

    def message_nbytes(self, load: Load) -> int:
        """W times the message of the largest shard."""
        shapes = list(load.shapes)
        return load.size * max(shard_nbytes(load.codec, shapes, load.dense_numel, load.size, load.merged))

    def suits(self, load: Load) -> bool:
        return load.codec.traits.unbiased

    def begin(self, job: Job) -> Stages:
        comm, me = job.comm, job.comm.rank
        shards, dense_pieces = _split(job.tensors, job), split(job.dense, comm.size, job.shares)
        messages = _encode_shards(job, shards, dense_pieces)
        shapes = [t.shape for t in job.tensors]
        sizes = shard_nbytes(job.codec, shapes, job.dense.numel(), comm.size, job.merged, job.shares)

        received = yield from _all_to_all(comm, job.codec, messages, sizes[me])
        dense_mean = torch.zeros_like(dense_pieces[me])
        x = _compensate(job, shards[me].positions, _reduce(job, received, dense_mean, shards[me]))
        message = pack(dense_mean, job.of(shards[me].positions).encode(x, _piece_keys(job, shards[me], SUMMED)))
        handle = yield from gather_messages(comm, message, sizes, fixed=job.codec.traits.fixed_size)

        def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
            with job.clock("wait"):
                gathered = handle.wait()
            dense_outs = split(dense_total, comm.size, job.shares)
            parts = [unpack(message, out.numel()) for message, out in zip(gathered, dense_outs, strict=True)]
            for (dense, _), dense_out in zip(parts, dense_outs, strict=True):
                dense_out.copy_(dense)
            return _decode_shards(job, _split(totals, job), [payload for _, payload in parts])

        return finish


def _encode_shards(job: Job, shards: list[Shard], dense: Sequence[Tensor]) -> list[Tensor]:
    """The message to each owner."""
    masked = [shard.pieces for shard in _split(job.masked, job)]
    keys = [_piece_keys(job, shard, owner + 1) for owner, shard in enumerate(shards)]
    sections = _sections(job)
    if sections is None:
        return [
            pack(part, job.of(shard.positions).encode(shard.pieces, key, mask))
            for part, shard, key, mask in zip(dense, shards, keys, masked, strict=True)
        ]
    payloads = split_payload(job.encode_groups([shard.pieces for shard in shards], keys, masked), sections)
    return pack_each([[part.view(torch.uint8), *payload] for part, payload in zip(dense, payloads, strict=True)])


def _decode_shards(job: Job, shards: list[Shard], payloads: list[Tensor]) -> Flag:
    """Overwrite the pieces of all owners with what they encoded of the sum; returns whether all is finite."""
    keys = [_piece_keys(job, shard, SUMMED) for shard in shards]
    sections = _sections(job)
    if sections is None:
        each = zip(shards, payloads, keys, strict=True)
        return flags.all_of(
            [job.of(shard.positions).decode([p], shard.pieces, job.scale, key) for shard, p, key in each]
        )
    pieces = [shard.pieces for shard in shards]
    return job.decode_groups([join_payloads(payloads, sections)], pieces, job.scale, keys)


def _sections(job: Job) -> list[tuple[int, ...]] | None:
    """The sections of each owner's payload, to serve all owners with one call of the codec; None for a call for each."""
    # In main memory a call costs less than a copy of its payload, but for a sparse one.
    if flags.in_main_memory(job.dense.device) and job.codec.traits.sparse is None:
        return None
    return _shard_sections(job.codec, tuple(t.shape for t in job.tensors), job.comm.size, job.merged, job.shares)


def _reduce(job: Job, received: list[Tensor], dense_mean: Tensor, shard: Shard) -> list[Tensor]:
    """The means of the decoded pieces, added in rank order; that of the dense pieces is added to `dense_mean`."""
    weight = 1.0 / job.comm.size
    payloads = add_dense(received, dense_mean, weight)
    mean = [debug.empty(piece.shape, dtype=torch.float32, device=piece.device) for piece in shard.pieces]
    keys = _piece_keys(job, shard, job.comm.rank + 1)
    job.of(shard.positions).decode(payloads, mean, weight, keys)
    return mean


def _compensate(job: Job, positions: list[int], mean: list[Tensor]) -> list[Tensor]:
    """The mean plus the owner's memory of earlier second encodings, if there is one."""
    if job.owner_memory is None:
        return mean
    names = [job.names[i] for i in positions]
    return [OWNER_MEMORY.compensate(job.owner_memory, name, m).view_as(m) for name, m in zip(names, mean, strict=True)]


def _split(tensors: list[Tensor], job: Job) -> list[Shard]:
    """The shard of each owner; the pieces of contiguous tensors are views."""
    size, seen = job.comm.size, [t if job.codec.traits.needs_shape and t.ndim else t.reshape(-1) for t in tensors]
    pieces, rows = [split(t, size, job.shares) for t in seen], [t.shape[0] if t.numel() else 0 for t in seen]
    if job.shares:
        owned = [[i for i, piece in enumerate(pieces) if piece[rank].numel()] for rank in range(size)]
    else:
        # Equal parts: an owner has a piece of each tensor with more rows than its rank. It saves asking each piece.
        owned = [[i for i, n in enumerate(rows) if rank < n] for rank in range(size)]
    return [Shard(positions, [pieces[i][rank] for i in positions]) for rank, positions in enumerate(owned)]


def piece_shape(codec: Codec, shape: torch.Size, size: int, rank: int, shares: Shares = ()) -> torch.Size:
    """The shape of the piece that belongs to worker `rank`.

    Example:
        >>> import thinwire as tw
        >>> [piece_shape(tw.TopK(0.1), torch.Size([5, 2]), 4, rank)[0] for rank in range(4)]
        [3, 3, 2, 2]
    """
    rows, *others = shape if codec.traits.needs_shape and shape else [shape.numel()]
    return torch.Size([split_numel(rows, size, rank, shares), *others])


def shard_nbytes(
    codec: Codec, shapes: Sequence[torch.Size], dense_numel: int, size: int, merged: bool, shares: Shares = ()
) -> list[int]:
    """Bytes of the message of each owner's shard; upper bounds if the codec's size is not fixed."""
    messages = []
    for ranks, owned in _alike(codec, shapes, dense_numel, size, shares):
        dense = split_numel(dense_numel, size, ranks[0], shares)
        messages += [message_nbytes(codec.pick(list(owned)), list(owned.values()), dense, merged)] * len(ranks)
    return messages


@lru_cache(maxsize=256)
def _shard_sections(
    codec: Codec, shapes: tuple[torch.Size, ...], size: int, merged: bool, shares: Shares
) -> list[tuple[int, ...]] | None:
    """The sections of each owner's payload; None if a payload for all owners cannot be cut, or is empty."""
    shaped, found = codec.traits.needs_shape, []
    if not shapes or codec.traits.by_layer:
        return None
    for ranks, owned in _alike(codec, shapes, 0, size, shares):
        pieces = list(owned.values())
        if merged and pieces:
            pieces = [torch.Size([sum(piece.numel() for piece in pieces)])]
        sections = add_sections(codec.section_nbytes(piece if shaped else piece.numel()) for piece in pieces)
        if sections is None:
            return None
        found += [sections] * len(ranks)
    return found if any(found) else None


def _alike(
    codec: Codec, shapes: Sequence[torch.Size], dense_numel: int, size: int, shares: Shares
) -> Iterator[tuple[range, dict[int, torch.Size]]]:
    """Runs of owners whose pieces have the same shapes: these, but for empty ones, by the positions of their tensors."""
    wholes = [piece_shape(codec, shape, 1, 0) for shape in shapes]
    # In equal parts, only owners below n mod W have one more, so shapes change at these ranks alone.
    changes = sorted({0, dense_numel % size, *(whole[0] % size for whole in wholes), size})
    if shares:
        changes = list(range(size + 1))
    for first, end in pairwise(changes):
        pieces = [piece_shape(codec, shape, size, first, shares) for shape in shapes]
        yield range(first, end), {i: piece for i, piece in enumerate(pieces) if piece.numel()}


def _piece_keys(job: Job, shard: Shard, part: int) -> list[Key]:
    """A key for each piece: `part` is its owner's rank + 1 in the first encoding, and `SUMMED` in the second."""
    return [piece_key(job.keys[i], part) for i in shard.positions]


def _all_to_all(
    comm: Communicator, codec: Codec, messages: list[Tensor], num_bytes: int
) -> Generator[Handle, Any, list[Tensor]]:
    """The messages of all workers, of `num_bytes`; if this is only a bound, sizes travel first."""
    sizes = [num_bytes] * comm.size
    if not codec.traits.fixed_size:
        lengths = uploaded(comm.device, [m.numel() for m in messages])
        sizes = announced_sizes(torch.cat((yield comm.all_to_all(list(lengths.split(1))))).tolist(), num_bytes)
    received: list[Tensor] = yield comm.all_to_all(messages, sizes)
    return received
