"""Dense inside a node, encoded between nodes: 1 + 2 steps, (L-1)(p + d) bytes from each of L nodes to the others.

A node is a run of N consecutive ranks, and its first rank leads it.

    1. members send their tensors to their leader, which adds them up in rank order     float32, inside the node
    2. leaders encode the mean of their node and send it to all leaders                 encoded, between nodes
    3. leaders pass on what came, and everyone decodes it in rank order                 inside the node

In step 3 the L messages travel as they are where that is less than the float32 result, L (p + d) < 4n + d for n encoded
elements, and the result otherwise; so no worker's bits differ, and a node's inner traffic is at most twice 4n + d per
member. The result is `1/L sum_nodes C(mean of the node)`: one loss, and that of a mean, which has less noise than a
gradient.

Memory is the leader's alone and members keep zero. It is kept in units of the node's sum, N times what the payload
failed to carry of its mean, so that with all memories together nothing is lost, as everywhere.

Sends a leader: (L-1)(p + d) + (N-1) min(L (p + d), 4n + d); another member: 4n + d.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import debug, kernels
from ...algorithm import require
from ...comm import Communicator, Handle
from .base import Finish, Job, flatten, pack, split_like, unpack


def hierarchical(job: Job) -> Finish:
    """Any codec; the mean of each node is encoded once."""
    node = Node(job.comm, job.workers_per_node)
    own = flatten([*job.tensors, job.dense], job.dense.device)  # a copy, for the tensors may be overwritten
    if job.keep_residual:
        for x in job.tensors:
            x.zero_()
    num_bytes = job.message_nbytes(job.tensors, job.dense)
    forward = job.codec.fixed_size and len(node.leaders) * num_bytes < 4 * own.numel()

    def finish(totals: list[Tensor], dense_total: Tensor) -> bool:
        with job.clock("wait"):
            node_sum = node.reduce(own)
        if node.is_leader:
            message = _encode(job, node_sum)
            with job.clock("wait"):
                messages = node.meet(message, num_bytes if job.codec.fixed_size else None)
        else:
            messages = [debug.empty(num_bytes, dtype=torch.uint8, device=own.device) for _ in node.leaders if forward]
        if forward:
            with job.clock("wait"):
                node.pass_on(messages)
        if forward:
            return _decode(job, messages, totals, dense_total)
        if node.is_leader:
            _decode(job, messages, totals, dense_total)
        outs = [*totals, dense_total]
        result = flatten(outs, own.device)
        with job.clock("wait"):
            node.pass_on([result])
        torch._foreach_copy_(outs, split_like(result, outs))
        return kernels.all_finite([result])

    return finish


def _encode(job: Job, node_sum: Tensor) -> Tensor:
    """The leader's message: the dense sum of its node, and the encoded mean."""
    numel = node_sum.numel() - job.dense.numel()
    mean = split_like(node_sum[:numel] / job.workers_per_node, job.tensors)
    payload = job.encode(mean, job.keys)
    if job.keep_residual:
        for x, residual in zip(job.tensors, mean, strict=True):
            torch.mul(residual, job.workers_per_node, out=x)
    return pack(node_sum[numel:], payload)


def _decode(job: Job, messages: list[Tensor], totals: list[Tensor], dense_total: Tensor) -> bool:
    parts = [unpack(m, job.dense.numel()) for m in messages]
    for dense, _ in parts:
        dense_total.add_(dense, alpha=1.0 / job.comm.size)
    return job.decode([payload for _, payload in parts], totals, job.scale / len(messages), job.keys)


@dataclass(frozen=True)
class Node:
    """The node of this worker: `workers_per_node` consecutive ranks, led by the first."""

    comm: Communicator
    workers_per_node: int

    @property
    def leader(self) -> int:
        return self.comm.rank - self.comm.rank % self.workers_per_node

    @property
    def is_leader(self) -> bool:
        return self.comm.rank == self.leader

    @property
    def members(self) -> range:
        """All ranks of the node but the leader."""
        return range(self.leader + 1, self.leader + self.workers_per_node)

    @property
    def leaders(self) -> range:
        """The leaders of all nodes."""
        return range(0, self.comm.size, self.workers_per_node)

    def reduce(self, own: Tensor) -> Tensor:
        """On the leader the sum over the node, added in rank order; members send and keep theirs."""
        if not self.is_leader:
            self.comm.exchange({self.leader: own}, {}).wait()
            return own
        total = own.clone()
        for part in self.comm.exchange({}, {member: debug.empty_like(own) for member in self.members}).wait().values():
            total += part
        return total

    def meet(self, message: Tensor, num_bytes: int | None) -> list[Tensor]:
        """Among leaders: the messages of all nodes in their order; sizes travel first where they are not known."""
        others = [leader for leader in self.leaders if leader > self.leader]
        others += [leader for leader in self.leaders if leader < self.leader]  # no leader is flooded
        lengths = {leader: torch.tensor([num_bytes or 0], device=message.device) for leader in others}
        if num_bytes is None:
            length = torch.tensor([message.numel()], device=message.device)
            self.comm.exchange(dict.fromkeys(others, length), lengths).wait()
        received = {
            leader: debug.empty(int(lengths[leader]), dtype=message.dtype, device=message.device) for leader in others
        }
        self.comm.exchange(dict.fromkeys(others, message), received).wait()
        return [received.get(leader, message) for leader in self.leaders]

    def pass_on(self, tensors: list[Tensor]) -> None:
        """Overwrite the members' tensors with those of their leader."""
        handles: list[Handle] = []
        for tensor in tensors:
            sends = dict.fromkeys(self.members, tensor) if self.is_leader else {}
            handles.append(self.comm.exchange(sends, {} if self.is_leader else {self.leader: tensor}))
        for handle in handles:
            handle.wait()


def agree_on_nodes(workers_per_node: int | None, comm: Communicator) -> int:
    """How many workers share a node: as given, or else as `torchrun` says in LOCAL_WORLD_SIZE.

    Raises:
        ValueError: on all workers, where it is unknown, differs between them, or does not divide their number.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE") if workers_per_node is None else workers_per_node
    comm.check_agreement({"workers per node": given})
    require(
        given is not None,
        "exchange='hierarchical' needs to know which workers share a node; launch them with torchrun, which sets "
        "LOCAL_WORLD_SIZE, or give Mean(workers_per_node=...)",
    )
    require(
        str(given).isdecimal() and int(given) >= 1 and comm.size % int(given) == 0,
        f"{comm.size} workers cannot be nodes of {given} each; workers_per_node (or LOCAL_WORLD_SIZE) must divide them",
    )
    return int(given)


def launched_nodes(comm: Communicator) -> int:
    """How many consecutive ranks share a node, as the launcher says in its environment; 1 where that is of no use.

    It is 1 without a launcher, on a single node, for a part of the launcher's workers, and, with a warning, where nodes
    differ in size or ranks are not dealt out node by node. Workers of several nodes exchange a few bytes.
    """
    local_size, size = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if local_size is None or size != str(comm.size) or local_size == size:
        return 1
    places = comm.gather_objects([local_size, os.environ.get("LOCAL_RANK", "0")])
    nodes = int(local_size) if local_size.isdecimal() else 0
    if nodes and all(place == [local_size, str(rank % nodes)] for rank, place in enumerate(places)):
        return nodes
    if comm.rank == 0:
        warnings.warn(
            f"Mean(exchange='auto') ignores nodes: ranks {places} (LOCAL_WORLD_SIZE, LOCAL_RANK) are not nodes of equal "
            "size filled in order; start as many workers on each node, or choose an exchange",
            stacklevel=2,
        )
    return 1
