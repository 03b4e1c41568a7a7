"""Each worker reduces one shard and sends the encoded mean: 2 steps, about 2(W-1)/W (p + d) bytes per worker.

Every tensor is split into W pieces of consecutive elements, the first n mod W of them one longer. For codecs that need
shapes, pieces are consecutive rows. Worker r owns piece r of every tensor, in any bucket. The pieces of one owner are its
shard.

    1. each worker encodes its W shards and sends shard r to worker r                   all-to-all
    2. worker r decodes and adds them in rank order: m_r = 1/W sum_i C(x_i,r)
    3. worker r adds its own memory e_r, encodes m_r + e_r, and sends it to all          all-gather
    4. all workers decode the W shards

Messages stay small at any world size, at the price of a second loss. With a memory, the owner keeps what the second
encoding loses, as in DoubleSqueeze. Then the sum of all gradients is W times the sum of all results, plus all first
memories, plus W times all second memories. The result of an unbiased codec is unbiased.

Worker s sends the sum of n_r over r != s, plus (W-1) n_s bytes; n_r is the size of the message of shard r.

Source: Tang et al. 2019, DoubleSqueeze, arXiv 1905.05957; Alistarh et al. 2017, QSGD, arXiv 1610.02132.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import debug
from ....codec import Codec, Key
from ....comm import Communicator, Handle
from ....comm.check import announced_sizes
from ....kernels.flags import Flag, both
from ....memory import ErrorFeedback, ErrorFeedbackState
from ...base import NamedTensors
from .base import SUMMED, Job, Stages, gather_messages, message_nbytes, pack, piece_key, split_numel, unpack
from .contract import SECOND_LOSS_FACTOR, Exchange, Load

# The second encoding always uses plain error feedback: momentum, if any, is in the first memory.
OWNER_MEMORY = ErrorFeedback()


class Shard(NamedTuple):
    """The pieces of one owner that are not empty, and the positions of their tensors in the job."""

    positions: list[int]
    pieces: list[Tensor]


class ScatterReduce(Exchange):
    """The result is `C(1/W sum_i C(x_i) + e)`, for any codec; e is the owner's memory, if any."""

    word = "scatter_reduce"
    has_memory = True

    def steps(self, size: int, workers_per_node: int) -> int:
        return 2

    def num_bytes(self, size: int, workers_per_node: int, message: float) -> float:
        return 2 * workers_per_node * (size - workers_per_node) * message / size

    def message_nbytes(self, load: Load) -> int:
        """W times the message of the largest shard."""
        shapes = list(load.shapes)
        return load.size * max(shard_nbytes(load.codec, shapes, load.dense_numel, load.size, load.merged))

    def price(self, load: Load) -> float | None:
        return SECOND_LOSS_FACTOR * self.cost(load) if load.codec.traits.unbiased else None

    def init_memory(self, codec: Codec, tensors: NamedTensors, rank: int, size: int) -> ErrorFeedbackState:
        """Zero memory for the pieces of worker `rank`, in units of the mean."""
        shapes = [(name, t, piece_shape(codec, t.shape, size, rank)) for name, t in tensors]
        return OWNER_MEMORY.init([(name, debug.empty(*shape, device=t.device)) for name, t, shape in shapes])

    def begin(self, job: Job) -> Stages:
        return _scatter_reduce(job)


def _scatter_reduce(job: Job) -> Stages:
    comm, me = job.comm, job.comm.rank
    shards, dense_pieces = _split(job.tensors, job), job.dense.tensor_split(comm.size)
    masked = [shard.pieces for shard in _split(job.masked, job)]
    messages = [
        pack(dense, job.encode(shard.pieces, _piece_keys(job, shard, owner + 1), masked[owner]))
        for owner, (shard, dense) in enumerate(zip(shards, dense_pieces, strict=True))
    ]
    sizes = shard_nbytes(job.codec, [t.shape for t in job.tensors], job.dense.numel(), comm.size, job.merged)

    received = yield from _all_to_all(comm, job.codec, messages, sizes[me])
    dense_mean, mean = _reduce(job, [unpack(m, dense_pieces[me].numel()) for m in received], shards[me])

    x = _compensate(job, shards[me].positions, mean)
    message = pack(dense_mean, job.encode(x, _piece_keys(job, shards[me], SUMMED)))
    handle = yield from gather_messages(comm, message, sizes, fixed=job.codec.traits.fixed_size)

    def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
        with job.clock("wait"):
            gathered = handle.wait()
        outs, dense_outs = _split(totals, job), dense_total.tensor_split(comm.size)
        summed_keys = [piece_key(key, SUMMED) for key in job.keys]
        finite: Flag = True
        for shard_message, out, dense_out in zip(gathered, outs, dense_outs, strict=True):
            dense, payload = unpack(shard_message, dense_out.numel())
            keys = [summed_keys[i] for i in out.positions]
            finite = both(finite, job.decode([payload], out.pieces, job.scale, keys))
            dense_out.copy_(dense)
        return finite

    return finish


def _reduce(job: Job, received: list[tuple[Tensor, Tensor]], shard: Shard) -> tuple[Tensor, list[Tensor]]:
    """The means of the dense pieces and of the decoded pieces, added in rank order."""
    weight = 1.0 / job.comm.size
    mean = [debug.empty(*piece.shape, device=piece.device) for piece in shard.pieces]
    keys = _piece_keys(job, shard, job.comm.rank + 1)
    job.decode([payload for _, payload in received], mean, weight, keys)
    dense_mean = torch.zeros_like(received[0][0])
    for dense, _ in received:
        dense_mean.add_(dense, alpha=weight)
    return dense_mean, mean


def _compensate(job: Job, positions: list[int], mean: list[Tensor]) -> list[Tensor]:
    """The mean plus the owner's memory of earlier second encodings, if there is one."""
    if job.owner_memory is None:
        return mean
    names = [job.names[i] for i in positions]
    return [
        OWNER_MEMORY.compensate(job.owner_memory, name, m).view(m.shape) for name, m in zip(names, mean, strict=True)
    ]


def recut(
    codec: Codec, tensors: NamedTensors, owned: Sequence[dict[str, Tensor]], rank: int, size: int
) -> dict[str, Tensor]:
    """The owner's memory of worker `rank` of `size`. It belongs to coordinates, so all of it is kept as it is.

    Args:
        codec: of the averager.
        tensors: those that are encoded.
        owned: the pieces of each worker before, by tensor name, in rank order.
        rank: of this worker.
        size: the new number of workers.
    """
    pieces = {}
    for name, t in tensors:
        whole = torch.cat([one[name] for one in owned]).to(t.device)
        pieces[name] = whole[_place(codec, t.shape, size, rank)].clone()
    return pieces


def gathered_pieces(
    codec: Codec, tensors: NamedTensors, own: dict[str, Tensor] | None, owner: tuple[int, int], comm: Communicator
) -> dict[str, Tensor]:
    """The pieces that this worker owns among those of `comm`: one all-reduce of all tensors. Pieces of the dead are zero.

    Args:
        codec: of the averager.
        tensors: those that are encoded.
        own: the pieces that this worker has owned so far; None for a worker that is new.
        owner: rank and number of workers for which these were cut.
        comm: the workers of the next round.
    """
    if not tensors:
        return {}
    wholes = [torch.zeros(t.numel(), device=t.device) for _, t in tensors]
    for (name, t), whole in zip(tensors, wholes, strict=True):
        if own is not None:
            whole[_place(codec, t.shape, owner[1], owner[0])] = own[name]
    flat = comm.all_reduce(torch.cat(wholes)).wait()
    return {
        name: whole[_place(codec, t.shape, comm.size, comm.rank)].clone()
        for (name, t), whole in zip(tensors, flat.split([whole.numel() for whole in wholes]), strict=True)
    }


def _place(codec: Codec, shape: torch.Size, size: int, rank: int) -> slice:
    """Where the piece of worker `rank` of `size` lies in the flat tensor."""
    first = sum(piece_shape(codec, shape, size, before).numel() for before in range(rank))
    return slice(first, first + piece_shape(codec, shape, size, rank).numel())


def _split(tensors: list[Tensor], job: Job) -> list[Shard]:
    """The shard of each owner; the pieces of contiguous tensors are views."""
    size, seen = job.comm.size, [t if job.codec.traits.needs_shape and t.ndim else t.reshape(-1) for t in tensors]
    pieces, rows = [t.tensor_split(size) for t in seen], [t.shape[0] if t.numel() else 0 for t in seen]
    owned = [[i for i, n in enumerate(rows) if rank < n] for rank in range(size)]
    return [Shard(positions, [pieces[i][rank] for i in positions]) for rank, positions in enumerate(owned)]


def piece_shape(codec: Codec, shape: torch.Size, size: int, rank: int) -> torch.Size:
    """The shape of the piece that belongs to worker `rank`.

    Example:
        >>> import thinwire as tw
        >>> [piece_shape(tw.TopK(0.1), torch.Size([5, 2]), 4, rank)[0] for rank in range(4)]
        [3, 3, 2, 2]
    """
    rows, *others = shape if codec.traits.needs_shape and shape else [shape.numel()]
    return torch.Size([split_numel(rows, size, rank), *others])


def shard_nbytes(codec: Codec, shapes: list[torch.Size], dense_numel: int, size: int, merged: bool) -> list[int]:
    """Bytes of the message of each owner's shard; upper bounds if the codec's size is not fixed."""
    wholes = [piece_shape(codec, shape, 1, 0) for shape in shapes]
    # From one of these ranks to the next, all owners have pieces of the same shapes.
    changes = sorted({0, dense_numel % size, *(whole[0] % size for whole in wholes), size})
    messages = []
    for first, end in pairwise(changes):
        pieces = [piece_shape(codec, shape, size, first) for shape in shapes]
        nonempty = [p for p in pieces if p.numel()]
        num_bytes = message_nbytes(codec, nonempty, split_numel(dense_numel, size, first), merged)
        messages += [num_bytes] * (end - first)
    return messages


def _piece_keys(job: Job, shard: Shard, part: int) -> list[Key]:
    """A key for each piece: `part` is its owner's rank + 1 in the first encoding, and `SUMMED` in the second."""
    return [piece_key(job.keys[i], part) for i in shard.positions]


def _all_to_all(
    comm: Communicator, codec: Codec, messages: list[Tensor], num_bytes: int
) -> Generator[Handle, Any, list[Tensor]]:
    """The messages of all workers, of `num_bytes`; if this is only a bound, sizes travel first."""
    sizes = [num_bytes] * comm.size
    if not codec.traits.fixed_size:
        lengths = torch.tensor([m.numel() for m in messages], device=messages[0].device)
        sizes = announced_sizes(torch.cat((yield comm.all_to_all(list(lengths.split(1))))).tolist(), num_bytes)
    received: list[Tensor] = yield comm.all_to_all(messages, sizes)
    return received
