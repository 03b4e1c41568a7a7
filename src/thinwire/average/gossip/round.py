"""The small records of gossip: an averager's state, and one worker's part in one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import debug, kernels
from ...algorithm import require
from ...clock import Clock
from ...codec import Key
from ...comm import Communicator
from ...membership import config, nested, pending, restart
from ...schedule import Progress
from ...topology import Topology
from ..base import AveragerState
from .layout import FlatLayout
from .values import Apply, Parts

Arrive = Callable[[], Apply]
"""Waits for the messages of a round."""

Merged = TypeVar("Merged")


def add_vector(change: Tensor) -> Apply:
    """Add a change that is one flat vector."""

    def apply(targets: Parts) -> kernels.Flag:
        kernels.mix.add_flat(targets, change)
        return kernels.all_finite([change])

    return apply


def add_differences(own: Tensor, theirs: list[Tensor], weights: list[float], own_weight: float = 0.0) -> Apply:
    """Add `own_weight own + sum_k weights[k] (theirs[k] - own)`, vectors of float32 or float64, as they were sent."""
    # The kernel adds float32 alone.
    if own.dtype == torch.float32:
        return lambda targets: kernels.mix.add(targets, own, theirs, weights, own_weight)
    return lambda targets: add_vector(kernels.mix.change_of(own, theirs, weights, own_weight))(targets)


@dataclass
class GossipState(AveragerState):
    """What changes while an averager gossips.

    Attributes:
        layout: where each tensor lies in the flat vector.
        seed: the seed of all random numbers of the run.
        topology: who talks to whom, among the workers of the round.
        memory: the algorithm's own state; None without memory.
        step_control: the state of step sizes that follow from what workers measure, with `diagnostics`;
            None if they are numbers.
        weight: push-sum's w, 1.0 for all others. The estimate of the mean is `tensors / weight`.
        in_flight: whether a round has begun and has not been waited for.
    """

    layout: FlatLayout = config()
    seed: int = config()
    topology: Topology = config()
    memory: Any = nested(default=None)
    step_control: Any = restart(default=None)
    weight: float = restart(value=1.0, default=1.0)
    in_flight: bool = pending(default=False)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, keyed by tensor name. Workers differ, so each saves its own.

        Raises:
            ValueError: a round is in flight; its messages would be lost.
        """
        require(
            not self.in_flight,
            "a gossip round is in flight; wait() for it before saving, or where an error broke it off, go on from an earlier "
            "checkpoint, so that nothing is lost",
        )
        return super().state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: a round is in flight, or the saved state is of another averager or other tensors.
        """
        require(not self.in_flight, "a gossip round is in flight; wait() for it before loading")
        super().load_state_dict(saved)


@dataclass(frozen=True)
class Round:
    """One worker's part in one round.

    Attributes:
        comm: all workers.
        clock: measures the seconds of each phase.
        progress: when the round is.
        sends: peer -> weight that the peer gives to what this worker sends.
        receives: peer -> weight that this worker gives to what the peer sends.
        self_weight: weight of its own value.
    """

    comm: Communicator
    clock: Clock
    progress: Progress
    sends: dict[int, float]
    receives: dict[int, float]
    self_weight: float

    def exchange(
        self, message: Tensor | dict[int, Tensor], merge: Callable[[dict[int, Tensor]], Merged]
    ) -> Callable[[], Merged]:
        """Send one message to each neighbour, and receive one of the same size from each.

        Args:
            message: one tensor for all neighbours, or peer -> its tensor.
            merge: takes what came, {peer: message} in the order of ranks.

        Returns:
            A function that waits, and returns what `merge` makes of it.
        """
        messages = message if isinstance(message, dict) else dict.fromkeys(self.sends, message)
        # A worker without neighbours in this step has no message to size buffers by.
        like = (
            message
            if isinstance(message, Tensor)
            else next(iter(message.values()), torch.empty(0, dtype=torch.float32, device="cpu"))
        )
        receives = {peer: debug.empty_like(like) for peer in sorted(self.receives)}
        handle = self.comm.exchange(messages, receives)

        def arrive() -> Merged:
            with self.clock("wait"):
                received = handle.wait()
            return merge(received)

        return arrive


def tensor_keys(state: GossipState, round: Round) -> list[Key]:
    """The random key of each tensor, for this worker and round."""
    rank, step = round.comm.rank, round.progress.step
    return [Key.of(state.seed, name, rank, step) for name in state.layout.names]
