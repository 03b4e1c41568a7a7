"""Each worker reduces one shard and sends it on, encoded again: 2 steps, about 2(W-1)/W (p + d) bytes per worker.

Every tensor is split in W pieces of consecutive elements, the first n mod W of them one longer (of consecutive rows for
codecs that need shapes); piece r of every tensor belongs to worker r, whatever bucket the tensor lies in. Together the
pieces of one owner are a shard.

    1. each worker encodes its W shards and sends shard r to worker r                   all-to-all
    2. worker r adds what came, in rank order: m_r = 1/W sum_i C(x_i,r)
    3. worker r adds its own memory, e_r, encodes m_r + e_r again, and sends it to all   all-gather
    4. everyone decodes the W shards

Messages stay small whatever the world size, at the price of a second loss. With a memory, what the second encoding
loses is remembered by the owner and not lost either (the double compression of DoubleSqueeze): the sum of all gradients
is W times the sum of all results, plus all first memories, plus W times all second ones. An unbiased codec stays so.

Sends worker s: sum of m_r over r != s, and (W-1) m_s, where m_r is the size of the message of shard r.

Source: Tang et al. 2019, DoubleSqueeze, arXiv 1905.05957; Alistarh et al. 2017, QSGD, arXiv 1610.02132.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import debug
from ...codec import Codec, Key
from ...comm import Communicator
from ...memory import ErrorFeedback, ErrorFeedbackState
from ..base import NamedTensors
from .base import Finish, Job, message_nbytes, pack, unpack

# Whatever the memory of gradients is, with momentum or not, that of their mean only repairs the second encoding.
OWNER_MEMORY = ErrorFeedback()

_PIECE_SHIFT = 48  # the stream of a key: tensor below bit 32, then rank, then what is encoded of the tensor
_MEAN = 0xFFFF


class Shard(NamedTuple):
    """The pieces of one owner that are not empty: their tensors' positions, and the pieces."""

    positions: list[int]
    pieces: list[Tensor]


def scatter_reduce(job: Job) -> Finish:
    """Any codec; what each worker sends is encoded once, and the mean a second time."""
    comm, me = job.comm, job.comm.rank
    shards, dense_pieces = _split(job.tensors, job), job.dense.tensor_split(comm.size)
    masked = [shard.pieces for shard in _split(job.masked, job)]
    messages = [
        pack(dense, job.encode(shard.pieces, _piece_keys(job, shard, owner + 1), masked[owner]))
        for owner, (shard, dense) in enumerate(zip(shards, dense_pieces, strict=True))
    ]
    sizes = [job.message_nbytes(shard.pieces, dense) for shard, dense in zip(shards, dense_pieces, strict=True)]

    def finish(totals: list[Tensor], dense_total: Tensor) -> bool:
        with job.clock("wait"):
            received = _all_to_all(comm, job.codec, messages, sizes[me])
        dense_mean, mean = _reduce(job, [unpack(m, dense_pieces[me].numel()) for m in received], shards[me])

        x = _compensate(job, shards[me].positions, mean)
        message = pack(dense_mean, job.encode(x, _piece_keys(job, shards[me], _MEAN)))
        with job.clock("wait"):
            gathered = _all_gather(comm, job.codec, message, sizes)

        finite, outs, dense_outs = True, _split(totals, job), dense_total.tensor_split(comm.size)
        for shard_message, out, dense_out in zip(gathered, outs, dense_outs, strict=True):
            dense, payload = unpack(shard_message, dense_out.numel())
            finite &= job.decode([payload], out.pieces, job.scale, _piece_keys(job, out, _MEAN))
            dense_out.copy_(dense)
        return finite

    return finish


def _reduce(job: Job, received: list[tuple[Tensor, Tensor]], shard: Shard) -> tuple[Tensor, list[Tensor]]:
    """The mean of the dense pieces and of the decoded pieces that came, added in rank order."""
    weight = 1.0 / job.comm.size
    mean = [debug.empty(*piece.shape, device=piece.device) for piece in shard.pieces]
    keys = _piece_keys(job, shard, job.comm.rank + 1)
    job.decode([payload for _, payload in received], mean, weight, keys)
    dense_mean = torch.zeros_like(received[0][0])
    for dense, _ in received:
        dense_mean.add_(dense, alpha=weight)
    return dense_mean, mean


def _compensate(job: Job, positions: list[int], mean: list[Tensor]) -> list[Tensor]:
    """What is to be encoded of the mean: with what the owner's earlier encodings lost, if there is a memory."""
    if job.owner_memory is None:
        return mean
    names = [job.names[i] for i in positions]
    return [
        OWNER_MEMORY.compensate(job.owner_memory, name, m).view(m.shape) for name, m in zip(names, mean, strict=True)
    ]


def init_owner_memory(codec: Codec, tensors: NamedTensors, comm: Communicator) -> ErrorFeedbackState:
    """Zero memory of this worker's pieces; its units are those of the mean."""
    shapes = [(name, t, piece_shape(codec, t.shape, comm.size, comm.rank)) for name, t in tensors]
    return OWNER_MEMORY.init([(name, debug.empty(*shape, device=t.device)) for name, t, shape in shapes])


def _split(tensors: list[Tensor], job: Job) -> list[Shard]:
    """The shard of each owner, as views where a tensor is contiguous."""
    pieces = [(t if job.codec.needs_shape and t.ndim else t.reshape(-1)).tensor_split(job.comm.size) for t in tensors]
    owned = [[i for i, of_tensor in enumerate(pieces) if of_tensor[rank].numel()] for rank in range(job.comm.size)]
    return [Shard(positions, [pieces[i][rank] for i in positions]) for rank, positions in enumerate(owned)]


def piece_shape(codec: Codec, shape: torch.Size, size: int, rank: int) -> torch.Size:
    """The shape of the piece that belongs to worker `rank`.

    Example:
        >>> import thinwire as tw
        >>> [piece_shape(tw.TopK(0.1), torch.Size([5, 2]), 4, rank)[0] for rank in range(4)]
        [3, 3, 2, 2]
    """
    rows, *others = shape if codec.needs_shape and shape else [shape.numel()]
    return torch.Size([rows // size + (rank < rows % size), *others])


def shard_nbytes(codec: Codec, shapes: list[torch.Size], dense_numel: int, size: int, merged: bool) -> list[int]:
    """Size of the message of each owner's shard: an upper bound where the codec's size is not fixed."""
    messages = []
    for rank in range(size):
        pieces = [piece_shape(codec, shape, size, rank) for shape in shapes]
        dense = dense_numel // size + (rank < dense_numel % size)
        messages.append(message_nbytes(codec, [p for p in pieces if p.numel()], dense, merged))
    return messages


def _piece_keys(job: Job, shard: Shard, part: int) -> list[Key]:
    """A key for each piece: `part` is its owner's rank + 1 in the first encoding, and _MEAN in the second."""
    keys = [job.keys[i] for i in shard.positions]
    return [key._replace(stream=key.stream | part << _PIECE_SHIFT) for key in keys]


def _all_to_all(comm: Communicator, codec: Codec, messages: list[Tensor], num_bytes: int) -> list[Tensor]:
    """Sizes travel first where they are not fixed."""
    if codec.fixed_size:
        return comm.all_to_all(messages, [num_bytes] * comm.size).wait()
    lengths = torch.tensor([m.numel() for m in messages], device=messages[0].device)
    sizes = torch.cat(comm.all_to_all(list(lengths.split(1))).wait())
    return comm.all_to_all(messages, sizes.tolist()).wait()


def _all_gather(comm: Communicator, codec: Codec, message: Tensor, sizes: list[int]) -> list[Tensor]:
    if not codec.fixed_size:
        length = torch.tensor([message.numel()], device=message.device)
        sizes = torch.cat(comm.all_gather(length).wait()).tolist()
    return comm.all_gather(message, sizes).wait()
