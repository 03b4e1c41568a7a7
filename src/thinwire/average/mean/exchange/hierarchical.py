"""Dense inside a node, encoded between nodes: 1 + 2 steps, (L-1)(p + d) bytes from each of L nodes to the others.

A node is a run of N consecutive ranks. Its first rank is its leader.

    1. members send their tensors to their leader, which adds them in rank order        float32, inside the node
    2. leaders encode the mean of their node and send it to all leaders                 encoded, between nodes
    3. leaders send the result to their members                                         inside the node

In step 3 a leader sends the L messages if they are smaller than the float32 result, L (p + d) < 4n + d for n encoded
elements; else it sends the result. Both give the same bits. So each member sends and receives at most 4n + d bytes.
The result is `1/L sum_nodes C(mean of the node)`: it is encoded once, and a mean has less noise than one gradient.

Only leaders have memory; that of members stays zero. It is in units of the node's sum: N times what the payload did not
carry of the mean. So the sum of all memories holds everything that was not sent, as in all exchanges.

A leader sends (L-1)(p + d) + (N-1) min(L (p + d), 4n + d) bytes, and any other member 4n + d.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from .... import debug, kernels
from ....algorithm import require
from ....comm import Communicator, Handle
from ....comm.handle import nothing
from ....kernels import Flag
from .base import Job, Stages, Subgroup, add_dense, flatten, gather_messages, pack, split_like
from .contract import Exchange, Load


class HierarchicalReduce(Exchange):
    """The result is `1/L sum_nodes C(mean of the node)`, for any codec."""

    word = "hierarchical"
    needs_nodes = True
    is_uniform = True
    tells_support = False

    def steps(self, size: int, workers_per_node: int) -> int:
        return (size > workers_per_node) + 2 * (workers_per_node > 1)

    def num_bytes(self, size: int, workers_per_node: int, message: float) -> float:
        return (size // workers_per_node - 1) * message

    def suits(self, load: Load) -> bool:
        return load.workers_per_node > 1 and not (load.memory is not None and load.memory.needs_support)

    def begin(self, job: Job) -> Stages:
        node = Node(job.comm, job.workers_per_node)
        own = take(job)
        num_bytes = job.message_nbytes()
        # All workers decide alike: it follows from sizes that all of them know.
        forward = job.codec.traits.fixed_size and len(node.leaders) * num_bytes < 4 * own.numel()

        node_sum = yield from node.reduce(own)
        messages = [debug.empty(num_bytes, dtype=torch.uint8, device=own.device) for _ in node.leaders if forward]
        result = debug.empty_like(own)
        if node.is_leader:
            message = _encode(job, node_sum)
            messages = yield from node.meet(message, num_bytes, fixed=job.codec.traits.fixed_size)
            if not forward:
                # `result` is new memory, and `_decode` adds to the dense part.
                *totals, dense_total = split_like(result, [*job.tensors, job.dense])
                _decode(job, messages, totals, dense_total.zero_())
        else:
            yield from node.idle(1 if job.codec.traits.fixed_size else 2)
        handles = node.pass_on(messages if forward else [result])

        def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
            with job.clock("wait"):
                for handle in handles:
                    handle.wait()
            if forward:
                return _decode(job, messages, totals, dense_total)
            outs = [*totals, dense_total]
            torch._foreach_copy_(outs, split_like(result, outs))
            return kernels.all_finite([result])

        return finish


def take(job: Job) -> Tensor:
    """A copy of all that this worker contributes to its node; with a memory, the leader's alone keeps what is lost."""
    own = flatten([*job.tensors, job.dense], job.dense.device)
    if job.keep_residual and job.tensors:
        torch._foreach_zero_(job.tensors)
    return own


def _encode(job: Job, node_sum: Tensor) -> Tensor:
    """The leader's message: the dense sum of its node, and the encoded mean of the rest."""
    numel = node_sum.numel() - job.dense.numel()
    mean = split_like(node_sum[:numel] / job.workers_per_node, job.tensors)
    payload = job.encode(mean, job.keys)
    if job.keep_residual:
        for x, residual in zip(job.tensors, mean, strict=True):
            # Memory is in units of the node's sum, and this is the residual of the mean.
            torch.mul(residual, job.workers_per_node, out=x)
    return pack(node_sum[numel:], payload)


def _decode(job: Job, messages: list[Tensor], totals: list[Tensor], dense_total: Tensor) -> Flag:
    payloads = add_dense(messages, dense_total, 1.0 / job.comm.size)
    return job.decode(payloads, totals, job.scale / len(messages), job.keys)


class Node:
    """The node of this worker: `workers_per_node` consecutive ranks, led by the first.

    Args:
        comm: all workers.
        workers_per_node: how many.

    Attributes:
        leader: the rank of its leader.
        members: all other ranks of the node.
        leaders: the leaders of all nodes.
    """

    def __init__(self, comm: Communicator, workers_per_node: int):
        self.comm = comm
        self.leader = comm.rank - comm.rank % workers_per_node
        self.is_leader = comm.rank == self.leader
        self.members = range(self.leader + 1, self.leader + workers_per_node)
        self.leaders = range(0, comm.size, workers_per_node)

    def reduce(self, own: Tensor) -> Generator[Handle, Any, Tensor]:
        """Send `own` to the leader. Returns the sum in rank order on the leader, and `own` on other members."""
        if not self.is_leader:
            yield self.comm.exchange({self.leader: own}, {})
            return own
        parts = yield self.comm.exchange({}, {member: debug.empty_like(own) for member in self.members})
        # Parts come in rank order, so the sum has the same bits in every run.
        total = own.clone()
        for part in parts.values():
            total += part
        return total

    def idle(self, stages: int) -> Generator[Handle, Any, None]:
        """On a member: go through the stages in which leaders meet, without a message; see the order in `base`."""
        for _ in range(stages):
            yield Handle(nothing)

    def meet(self, message: Tensor, num_bytes: int, fixed: bool) -> Generator[Handle, Any, list[Tensor]]:
        """Exchange messages between leaders. Returns those of all nodes in order.

        Args:
            message: of this node.
            num_bytes: size of all messages, or an upper bound.
            fixed: whether it is exact; if not, the exact sizes travel first.
        """
        team = Subgroup(self.comm, self.leaders)
        gathering = gather_messages(team, message, [num_bytes] * team.size, fixed)
        messages: list[Tensor] = yield (yield from gathering)
        return messages

    def pass_on(self, tensors: list[Tensor]) -> list[Handle]:
        """Overwrite the members' tensors with the leader's, once the handles have been waited for."""
        handles: list[Handle] = []
        for tensor in tensors:
            sends = dict.fromkeys(self.members, tensor) if self.is_leader else {}
            handles.append(self.comm.exchange(sends, {} if self.is_leader else {self.leader: tensor}))
        return handles


def agree_on_nodes(workers_per_node: int | None, comm: Communicator, must_fit: bool = True) -> int:
    """How many workers share a node: the given number; or that of the layout; or LOCAL_WORLD_SIZE as `torchrun` sets it.

    Args:
        workers_per_node: the given number.
        comm: all workers.
        must_fit: whether nodes of unequal size are an error; if not, every worker counts as a node then.

    Raises:
        ValueError: on all workers, if the number is unknown, differs between them, or does not divide their number.
    """
    launched = os.environ.get("LOCAL_WORLD_SIZE") if comm.layout is None else comm.layout.workers_per_node
    given = launched if workers_per_node is None else workers_per_node
    if must_fit:
        comm.check_agreement({"workers per node": given})
    elif len(set(comm.gather_objects(given))) > 1:
        return 1
    if given is None:
        raise ValueError(
            "exchange='hierarchical' needs to know which workers share a node; launch them with torchrun, which sets "
            "LOCAL_WORLD_SIZE, or give Mean(workers_per_node=...)"
        )
    # A number from the environment is text.
    nodes = int(given) if str(given).isdecimal() else 0
    if nodes and comm.size % nodes and not must_fit:
        return 1
    require(
        nodes >= 1 and comm.size % nodes == 0,
        f"{comm.size} workers cannot form nodes of {given} each; workers_per_node (or LOCAL_WORLD_SIZE) must divide "
        f"{comm.size}",
    )
    return nodes


def launched_nodes(comm: Communicator) -> int:
    """How many consecutive ranks share a node, by the layout or else the launcher's environment; 1 if nodes do not matter.

    It is 1 without a launcher, on a single node, and for a part of the launcher's workers. It is 1 with a warning if
    nodes differ in size, or if their ranks are not consecutive. Workers of several nodes exchange a few bytes.
    """
    if comm.layout is not None:
        return comm.layout.workers_per_node
    local_size, size = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    # A part of the launcher's workers need not fill its nodes.
    if local_size is None or size != str(comm.size) or local_size == size:
        return 1
    places = comm.gather_objects([local_size, os.environ.get("LOCAL_RANK", "0")])
    nodes = int(local_size) if local_size.isdecimal() else 0
    if nodes and all(place == [local_size, str(rank % nodes)] for rank, place in enumerate(places)):
        return nodes
    # All workers have the same list, so that one warning is enough.
    if comm.rank == 0:
        warnings.warn(
            f"Mean(exchange='auto') ignores nodes: ranks {places} (LOCAL_WORLD_SIZE, LOCAL_RANK) are not nodes of equal "
            "size with consecutive ranks; start as many workers on each node, or choose an exchange",
            stacklevel=2,
        )
    return 1
