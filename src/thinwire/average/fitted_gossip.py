"""The base of gossip through a codec whose step size is fitted or pinned: CHOCO and DeepSqueeze."""

from __future__ import annotations

from ..codec import Codec
from ..comm import Communicator
from .base import NamedTensors
from .fitted_step import FittedStep
from .gossip_base import Gossip
from .gossip_checks import check_codec, check_fixed_undirected, check_stable, check_step_size
from .gossip_round import GossipState


class FittedGossip(Gossip):
    """Subclasses have the fields `codec` and `step_size`; None => from theory, adapted (`fitted_step.py`)."""

    codec: Codec
    step_size: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_codec(self, self.codec)
        if self.step_size is not None:
            check_step_size(self, self.step_size)

    def check_topology(self, size: int) -> None:
        check_fixed_undirected(self, size)
        if self.step_size is not None:
            check_stable(self, self.step_size, size)

    def init_pace(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> FittedStep | None:
        if self.step_size is not None:
            return None
        return FittedStep.of(state.topology, comm.size, state.layout.flatten(tensors).device)
