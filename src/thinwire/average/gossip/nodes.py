"""One round of a `Hierarchical` topology, and the message that carries a push-sum weight.

    1. members send x to their leader, which takes the mean in rank order     float, inside the node
    2. leaders gossip their means along the inner topology                    as the averager encodes them
    3. leaders send the result and the push-sum weight to their members       float, inside the node

A member sends 4n bytes a round, n the number of elements. A leader sends its messages to other leaders, and 4n + 8 bytes to
each of its m - 1 members. Inside `Phases`, or inside another hierarchy, a hierarchy is the flat graph that it equals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import debug, kernels
from ...comm import Communicator
from ...comm.buffers import as_bytes
from ...streams import uploaded
from ...topology import Hierarchical, Neighbours
from .round import Arrive, GossipState
from .values import Parts

WEIGHT_NBYTES = 8


def mix_nodes(
    topology: Hierarchical,
    state: GossipState,
    comm: Communicator,
    own: Tensor,
    begin: Callable[[Neighbours, Parts], Arrive],
) -> Tensor:
    """Do one round as the module's docstring says; return the change of `own`.

    Args:
        topology: the nodes, and the graph between their leaders.
        state: of this worker.
        comm: all workers.
        own: this worker's flat vector.
        begin: starts the leaders' round, from the leader's neighbours and the mean of its node.
    """
    leader, *others = topology.members(comm.rank)
    step = state.progress.step - 1  # the round that is being waited for
    if comm.rank == leader:
        received = comm.exchange({}, {peer: debug.empty_like(own) for peer in others}).wait()
        mean = sum((received[peer] for peer in others), start=own) / (1 + len(others))
        apply, mixed = begin(_leaders(topology, comm, step), state.layout.parts(mean))(), mean.clone()
        state.finite = kernels.flags.both(state.finite, apply(state.layout.parts(mixed)))
        comm.exchange(dict.fromkeys(others, pack_weighted(state.weight, mixed)), {}).wait()
    else:
        # Sent before the wait: the leader answers only after it has heard from all members.
        up = comm.exchange({leader: own}, {})
        result = debug.empty(WEIGHT_NBYTES + own.element_size() * own.numel(), dtype=torch.uint8, device=own.device)
        comm.exchange({}, {leader: result}).wait()
        up.wait()
        # All members of a node have the same push-sum weight, and only the leader's gossip changes it.
        state.weight, mixed = unpack_weighted(result, own.dtype)
    return mixed - own


def _leaders(topology: Hierarchical, comm: Communicator, step: int) -> Neighbours:
    """The neighbours of this node in the inner topology, as the ranks of their leaders."""
    near = topology.inner.neighbours(topology.node(comm.rank), step, topology.num_nodes(comm.size))
    sends, receives = ({node * topology.workers_per_node: weight for node, weight in side.items()} for side in near[:2])
    return Neighbours(sends, receives, near.self_weight)


def pack_weighted(weight: float, *xs: Tensor) -> Tensor:
    """The message [w float64][x ...], as bytes; x in one part or in several.

    Example:
        >>> unpack_weighted(pack_weighted(0.5, torch.ones(2)), torch.float32)
        (0.5, tensor([1., 1.]))
    """
    w = uploaded(xs[0].device if xs else torch.device("cpu"), [weight], torch.float64)
    return torch.cat([as_bytes(part) for part in (w, *xs)])


def unpack_weighted(message: Tensor, dtype: torch.dtype) -> tuple[float, Tensor]:
    """The weight and the vector that `pack_weighted` was given. The message may start at any address.

    Args:
        message: bytes.
        dtype: of the vector.
    """
    weight = kernels.payload_as(message[:WEIGHT_NBYTES], torch.float64, "push-sum weight")
    return weight.item(), kernels.payload_as(message[WEIGHT_NBYTES:], dtype, "push-sum vector")
