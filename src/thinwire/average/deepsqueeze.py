"""DeepSqueeze: gossip on compressed values; each worker adds the codec's error to its next value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..codec import QSGD, Codec
from ..comm import Communicator
from ..membership import dealt, norm_of
from ..schedule import resolve
from ..topology import Ring, Topology
from .base import NamedTensors
from .gossip_base import Gossip
from .gossip_checks import check_codec, check_fixed_undirected, check_number
from .gossip_round import Change, GossipState, Round, tensor_keys
from .layout import Layout


@dataclass
class DeepSqueezeMemory:
    """What the last payload did not carry, `d_i`.

    Attributes:
        layout: where each tensor lies in the flat vector.
        lost: d_i, flat.
    """

    layout: Layout
    lost: Tensor

    def state_dict(self) -> dict[str, Tensor]:
        """The error, keyed by tensor name."""
        return self.layout.named(self.lost)

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.layout.load(self.lost, saved)


@dataclass(frozen=True, repr=False)
class DeepSqueeze(Gossip):
    """Error-compensated gossip, with a memory `d_i` that starts at zero:

        v_i = x_i + d_i;   C(v_i) is sent;   d_i = v_i - C(v_i);   x_i += step_size sum_j P_ij (C(v_j) - C(v_i))

    A round keeps the mean over workers. It compresses the values, not their differences, so the codec's error does not
    vanish as workers agree: disagreement settles at a level that falls with step_size. With `Identity()` and step_size 1
    it is `Mix`. A worker sends the codec's payload to each neighbour in one step. Memory is one float32 copy of the
    tensors. The topology must be static and undirected.

    The codec's error must be smaller than its input, `E|C(x) - x|^2 < |x|^2`. This holds for sparsifiers, `SignNorm` and
    fine quantizers. It does not hold for `QSGD(bits=2)` with its buckets of 512, which makes no progress.

    A round with a non-finite vector leaves memory as it was. Non-finite parameters spread, as in any gossip.

    Args:
        topology: who talks to whom, with which weights.
        codec: encodes the values; tensors are its segments.
        step_size: in (0, 1]; higher => faster, until it diverges. A coarser codec needs a lower one. The default is
            stable on a ring of 8 down to `TopK(0.01)`; `QSGD(bits=4)` is stable at 0.05 and above.

    Raises:
        ValueError: step_size is out of range, or the codec's payloads vary in size. In `init`: a directed or
            time-varying topology.

    Source: Tang et al. 2019, arXiv 1907.07346.

    Example:
        >>> import thinwire as tw
        >>> tw.DeepSqueeze(tw.Ring(), tw.QSGD(bits=4), step_size=0.1)
        DeepSqueeze(step_size=0.1)
    """

    topology: Topology = field(default_factory=Ring)
    codec: Codec = field(default_factory=lambda: QSGD(bits=4))
    step_size: float = 0.005

    def __post_init__(self) -> None:
        super().__post_init__()
        check_codec(self, self.codec)
        check_number(self, "step_size", self.step_size)

    def check_topology(self, size: int) -> None:
        check_fixed_undirected(self, size)

    def init_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> DeepSqueezeMemory:
        return DeepSqueezeMemory(state.layout, torch.zeros_like(state.layout.flatten(tensors)))

    def own_norm(self, state: GossipState) -> float:
        return norm_of([state.memory.lost])

    def deal_memory(self, saved: list[Any], rank: int, size: int) -> Any:
        return {name: dealt([one[name] for one in saved], rank, size) for name in saved[0]}

    def adopt_memory(self, state: GossipState, shared: Any) -> None:
        state.memory.lost.zero_()

    def begin(self, state: GossipState, round: Round, own: Tensor) -> Change:
        memory, codec = state.memory, resolve(self.codec, round.progress)
        with state.clock("encode"):
            v = own + memory.lost
            segments = state.layout.split(v)
            payload = codec.encode(segments, tensor_keys(state, round), segments)
            if kernels.all_finite([v]):
                memory.lost = v
        wait = round.exchange(payload)

        def finish() -> Tensor:
            with state.clock("wait"):
                received = wait()
            with state.clock("decode"):
                change = torch.zeros_like(own)
                parts = state.layout.split(change)
                for peer, theirs in received.items():
                    codec.decode_add(theirs, parts, self.step_size * round.receives[peer])
                codec.decode_add(payload, parts, -self.step_size * sum(round.receives.values()))
                return change

        return finish
