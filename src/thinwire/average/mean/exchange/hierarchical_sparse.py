"""Dense inside a node, a sparse all-reduce between nodes: 1 + 3 + 1 steps, about 2(L-1)/L (p + d) bytes a leader.

A node is a run of N consecutive ranks, and its first rank leads it; L = W/N.

    1. members send their tensors to their leader, which adds them up in rank order     float32, inside the node
    2. leaders run a sparse all-reduce of the sums of their nodes (`sparse_reduce.py`)  encoded, between nodes
    3. leaders pass on the coordinates that were kept                                   inside the node

The message of step 3 is [dense vectors][kept values, float32][their indices, Elias-Fano][marks], and the marks are one bit
for each kept coordinate if the memory masks: whether this node delivered it. So members learn all that leaders know.

Memory is the leader's alone and members keep zero, in units of the node's sum, as in `hierarchical`. Every worker of a
node masks what the node delivered.

Sends a leader: what `sparse_reduce` says for L workers, and (N-1) (4 k + indices + k/8 + d); another member: 4n + d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .... import debug, kernels
from ....codec import Codec
from ....kernels import Flag
from .base import Job, Stages, Subgroup, flat_segments, split_like, store_segments
from .contract import Exchange, Load
from .hierarchical import Node, take
from .regions import Regions
from .sparse_reduce import SparseReduction, Summed, layout_of, leave, parts_of, regions_nbytes


class HierarchicalSparse(Exchange):
    """The result is that of `sparse_reduce` among nodes, of the sum of each node."""

    word = "hierarchical_sparse"
    needs_nodes = True
    is_uniform = True
    selects_again = True

    def steps(self, size: int, workers_per_node: int) -> int:
        return 3 * (size > workers_per_node) + 2 * (workers_per_node > 1)

    def num_bytes(self, size: int, workers_per_node: int, message: float) -> float:
        num_nodes = size // workers_per_node
        return 2 * (num_nodes - 1) * message / num_nodes

    def message_nbytes(self, load: Load) -> int:
        return regions_nbytes(load, load.size // load.workers_per_node)

    def suits(self, load: Load) -> bool:
        return load.workers_per_node > 1 and load.memory is not None and load.codec.traits.sparse is not None

    def check(self, codec: Codec) -> None:
        parts_of(codec)

    def begin(self, job: Job) -> Stages:
        node = Node(job.comm, job.workers_per_node)
        parts = parts_of(job.codec)
        layout = layout_of(parts, [t.numel() for t in job.tensors], len(node.leaders), job.merged)
        own = take(job)
        node_sum = yield from node.reduce(own)
        message = debug.empty(sum(_sizes(layout, job)), dtype=torch.uint8, device=own.device)
        if node.is_leader:
            *tensors, dense = split_like(node_sum, [*job.tensors, job.dense])
            segments = flat_segments(tensors, job.merged)
            reduction = SparseReduction(job, Subgroup(job.comm, node.leaders), segments, dense)
            messages = yield (yield from reduction.deliver())
            with job.clock("decode"):
                summed = reduction.collect(messages)
                delivered = reduction.delivered(summed)
                if job.keep_residual and tensors:
                    reduction.settle(summed)
                    store_segments(segments, tensors, job.merged)
                    torch._foreach_copy_(job.tensors, tensors)
                _write(message, summed, delivered, layout, job)
        else:
            yield from node.idle(3 if parts.fixed_size else 4)
        (handle,) = node.pass_on([message])

        def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
            with job.clock("wait"):
                handle.wait()
            with job.clock("decode"):
                summed, delivered = _read(message, layout, job)
                if job.masked:
                    job.clear(job.masked, *layout.of_kept(summed.positions), delivered)
                return leave(summed, layout, totals, dense_total, job)

        return finish


def _sizes(layout: Regions, job: Job) -> list[int]:
    """Bytes of the parts of the message: dense vectors, values, indices, marks."""
    k, counts, numels = sum(layout.kept), list(layout.kept), list(layout.numels)
    indices = sum(kernels.indices.nbytes(count, numel) for count, numel in zip(counts, numels, strict=True))
    return [4 * job.dense.numel(), 4 * k, indices, kernels.words.nbytes(k, 1) if job.masked else 0]


def _write(message: Tensor, summed: Summed, delivered: Tensor, layout: Regions, job: Job) -> None:
    dense, values, codes, marks = message.split(_sizes(layout, job))
    dense.copy_(summed.dense.view(torch.uint8))
    values.copy_(summed.values.view(torch.uint8))
    kernels.indices.encode(layout.within(summed.positions), list(layout.kept), list(layout.numels), codes)
    if job.masked:
        kernels.words.encode(delivered.int(), [delivered.numel()], 1, marks)


def _read(message: Tensor, layout: Regions, job: Job) -> tuple[Summed, Tensor]:
    dense, values, codes, marks = message.split(_sizes(layout, job))
    within = kernels.indices.decode(codes, list(layout.kept), list(layout.numels))
    summed = Summed(layout.globally(within), values.view(torch.float32), dense.view(torch.float32))
    # Without masks no marks were sent, and nobody reads these.
    delivered = kernels.words.decode(marks, [sum(layout.kept)], 1) if job.masked else torch.zeros_like(within)
    return summed, delivered.bool()
