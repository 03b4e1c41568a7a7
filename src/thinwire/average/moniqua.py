"""Moniqua: gossip on values modulo a bound, in a few bits and without memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import debug, kernels
from ..algorithm import require
from ..topology import Ring, Topology
from .gossip_base import Gossip
from .gossip_checks import check_doubly_stochastic, check_number
from .gossip_round import Change, GossipState, Round


@dataclass(frozen=True, repr=False)
class Moniqua(Gossip):
    """Gossip modulo `B = 2 theta / (1 - 2 delta)`, for neighbours that differ by at most theta in every element:

        c_i = Q(x_i mod B)                           is sent, `bits` bits an element
        x^_j - x_i = (c_j - x_i) mod B               what i recovers of its neighbour j
        x^_i - x_i = c_i - (x_i mod B)               what i's neighbours recover of i
        x_i += step_size sum_j P_ij (x^_j - x^_i)

    `mod B` takes values in [-B/2, B/2). Q rounds at random and without bias to `2^bits` levels, evenly spaced from -B/2
    to B/2. So `|Q(y) - y| <= delta B` with `delta = 1 / (2^bits - 1)`. For 2 bits, delta is 1/3 and B is 6 theta. All
    workers use the same random numbers, so equal values give equal codes, and workers that agree go on agreeing.

    Check: while theta holds, `|x^_j - x_j| <= delta B`, all workers recover the same values, and a round keeps the mean.
    If theta does not hold, differences are wrong by multiples of B, and no error is raised: choose theta with a margin.
    The rounding error does not vanish as workers agree: disagreement settles at a level that grows with step_size and
    theta. So step_size is below 1 by default; at 2 bits, step_size 1 exceeds any theta. In the paper's notation it is the
    slack matrix `step_size P + (1 - step_size) I`.

    A worker sends `4 + ceil(bits (n + 1) / 8)` bytes to each neighbour in one step: B/2 as float32, then the codes of all
    n elements and of B/2 itself. There is no memory. The topology must be doubly stochastic. A vector with a NaN or
    infinite element makes all elements of its neighbours non-finite.

    Args:
        topology: who talks to whom, with which weights.
        theta: bound on the difference between neighbours in any element; lower => more precise, until it is exceeded.
        bits: bits an element, 2 to 8; lower => smaller messages, larger rounding error.
        step_size: in (0, 1]; higher => faster, and more disagreement in the end.

    Raises:
        ValueError: a field is out of range. In `init`: a topology that does not keep the mean.

    Source: Lu and De Sa 2020, Moniqua: Modulo Quantized Communication in Decentralized SGD, arXiv 2002.11787.

    Example:
        >>> import thinwire as tw
        >>> averager = tw.Moniqua(tw.Ring(), theta=0.5)
        >>> averager.delta, averager.modulus
        (0.3333333333333333, 3.0)
    """

    topology: Topology = field(default_factory=Ring)
    theta: float = 1.0
    bits: int = 2
    step_size: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.theta, (int, float)) and 0 < self.theta < float("inf"),
            f"Moniqua: theta must be positive and finite, got {self.theta!r}",
        )
        require(
            isinstance(self.bits, int) and 2 <= self.bits <= 8,
            f"Moniqua: bits must be an integer from 2 to 8, got {self.bits!r}; at 1 bit rounding exceeds the modulus",
        )
        check_number(self, "step_size", self.step_size)

    @property
    def num_steps(self) -> int:
        """Steps from the lowest level to the highest."""
        return (1 << self.bits) - 1

    @property
    def delta(self) -> float:
        """Bound of the rounding error, as a fraction of the modulus."""
        return 1.0 / self.num_steps

    @property
    def modulus(self) -> float:
        """B = 2 theta / (1 - 2 delta)."""
        return 2.0 * self.theta * self.num_steps / (self.num_steps - 2)

    def check_topology(self, size: int) -> None:
        check_doubly_stochastic(self, size)

    def begin(self, state: GossipState, round: Round, own: Tensor) -> Change:
        with state.clock("encode"):
            wrapped = self._wrap(own)
            key = kernels.mix_key(state.seed, 0, round.progress.step)
            payload = self._encode(wrapped, key)
        wait = round.exchange(payload)

        def finish() -> Tensor:
            with state.clock("wait"):
                received = wait()
            with state.clock("decode"):
                change = torch.zeros_like(own)
                own_error = self._decode(payload, own.numel()) - wrapped
                for peer, theirs in received.items():
                    difference = self._wrap(self._decode(theirs, own.numel()) - own) - own_error
                    change.add_(difference, alpha=self.step_size * round.receives[peer])
                return change

        return finish

    def _wrap(self, x: Tensor) -> Tensor:
        """x modulo B, in [-B/2, B/2)."""
        half = self.modulus / 2
        return torch.remainder(x + half, self.modulus).sub_(half)

    def _encode(self, wrapped: Tensor, key: int) -> Tensor:
        # The kernel scales by the largest magnitude, so an extra element of B/2 sets the scale.
        x = torch.cat([wrapped, wrapped.new_tensor([self.modulus / 2])])
        quantizer = kernels.quantize.Quantizer(self.bits, self.num_steps, x.numel())
        payload = debug.empty(quantizer.nbytes([x.numel()]), dtype=torch.uint8, device=x.device)
        kernels.quantize.encode([x], payload, [key], quantizer)
        return payload

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        out = torch.zeros(numel + 1, device=payload.device)
        kernels.quantize.decode_add(
            payload, [out], 1.0, kernels.quantize.Quantizer(self.bits, self.num_steps, numel + 1)
        )
        return out[:-1]
