"""Moniqua: gossip on values modulo a bound, in a few bits and without memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ... import debug, kernels
from ...algorithm import required
from ...comm import Communicator
from ...options import require_integer, require_number
from ...topology import Ring, Topology
from ..base import NamedTensors
from ..traits import AveragerTraits
from .base import GossipAverager
from .checks import check_doubly_stochastic, check_stable, check_step_size
from .moniqua_step import Edge, MoniquaStepControl, codes_of
from .round import Apply, Arrive, GossipState, Round
from .values import Parts, flat


@dataclass(frozen=True, repr=False)
class Moniqua(GossipAverager):
    """Gossip modulo `B = 2 theta / (1 - 2 delta)`, for neighbours that differ by at most theta in every element:

        c_i = Q(x_i mod B)                           is sent, `bits` bits an element
        x^_j - x_i = (c_j - x_i) mod B               what i recovers of its neighbour j
        x^_i - x_i = c_i - (x_i mod B)               what i's neighbours recover of i
        x_i += step_size sum_j P_ij (x^_j - x^_i)

    `mod B` takes values in [-B/2, B/2). Q rounds at random and without bias to `2^bits` levels, evenly spaced from -B/2
    to B/2. So `|Q(y) - y| <= delta B` with `delta = 1 / (2^bits - 1)`. For 2 bits, delta is 1/3 and B is 6 theta. All
    workers use the same random numbers, so equal values give equal codes, and workers that agree go on agreeing.

    Check: while theta holds, `|x^_j - x_j| <= delta B`, all workers recover the same values, and a round keeps the mean.

    By default theta and step_size follow from what workers see of their differences, as `moniqua_step.py` derives it: theta
    falls as workers agree, and a check in each message finds out when it was too low. Then B is `2 theta / (1 - delta)`,
    half of the paper's at 2 bits, because the two ends of an edge subtract their codes, `c_j - c_i mod B`, which share their
    rounding. A failed edge is left out of the round at both ends; on a directed graph this moves the mean a little.
    `averager.diagnostics(state)` shows both values. Nothing moves until all workers have heard of each other.

    With numbers for both, the equations above hold as they are. If theta does not hold then, differences are wrong by
    multiples of B, and no error is raised: choose theta with a margin. The rounding error does not vanish as workers agree:
    disagreement settles at a level that grows with step_size and theta. At 2 bits, 0.1 is a good step size, and 1 exceeds
    any theta. In the paper's notation it is the slack matrix `step_size P + (1 - step_size) I`. With a number for one of
    them, the other one is adapted.

    A worker sends `4 + ceil(bits (n + 1) / 8)` bytes to each neighbour in one step: B/2 as float32, then the codes of all
    n elements and of B/2 itself; and 20 bytes more unless both are numbers. There is no memory of the size of
    the values. The topology must be doubly stochastic. A vector with a NaN or infinite element makes all elements of its
    neighbours non-finite.

    Args:
        topology: who talks to whom, with which weights.
        theta: bound on the difference between neighbours in any element; lower => more precise, until it is exceeded.
            None => tracked.
        bits: bits an element, 2 to 8; lower => smaller messages, larger rounding error.
        step_size: above 0; higher => faster, and more disagreement in the end. None => from theory, adapted.

    Raises:
        ValueError: a field is out of range. In `init`: a topology that does not keep the mean, or on which gossip with
            this step size diverges.

    Source: Lu and De Sa 2020, Moniqua: Modulo Quantized Communication in Decentralized SGD, arXiv 2002.11787.

    Example:
        >>> import thinwire as tw
        >>> tw.Moniqua(tw.Ring(), theta=0.5).modulus
        3.0
    """

    topology: Topology = field(default_factory=Ring)
    theta: float | None = None
    bits: int = 2
    step_size: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("Moniqua: theta", self.theta, above=0, or_none=True)
        require_integer("Moniqua: bits", self.bits, 2, 8, hint="; at 1 bit rounding exceeds the modulus")
        check_step_size(self, self.step_size, or_none=True)

    @cached_property
    def traits(self) -> AveragerTraits:
        return replace(super().traits, couples_tensors=self.theta is None or self.step_size is None)

    @property
    def num_steps(self) -> int:
        """Steps from the lowest level to the highest."""
        return (1 << self.bits) - 1

    @property
    def modulus(self) -> float:
        """B = 2 theta / (1 - 2 delta), for a theta that is a number."""
        theta = required(self.theta, f"{self}: theta is tracked, so the modulus changes; see diagnostics(state)")
        return 2.0 * theta * self.num_steps / (self.num_steps - 2)

    def check_topology(self, size: int) -> None:
        check_doubly_stochastic(self, size)
        check_stable(self, self.step_size, size)

    def init_step_control(
        self, state: GossipState, tensors: NamedTensors, comm: Communicator
    ) -> MoniquaStepControl | None:
        given = {"theta": self.theta, "step_size": self.step_size}
        fixed = {name: value for name, value in given.items() if value is not None}
        if len(fixed) == len(given):
            return None
        x = state.layout.flatten(tensors)
        theta = fixed["theta"] if "theta" in fixed else _range_of_all(x, comm)
        return MoniquaStepControl.of(state.topology, comm.size, x.device, theta, fixed)

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        control: MoniquaStepControl | None = state.step_control
        if control is not None:
            return self._begin_adapted(state, control, round, own)
        assert self.step_size is not None
        modulus, step_size = self.modulus, self.step_size
        with state.clock("encode"):
            payload = self._payload(own, state)
            kernels.modular.encode(own, payload, self._key(state, round), self.bits, modulus)
            x = flat(own)  # differences are taken to these values, which may change while the messages fly

        def merge(received: dict[int, Tensor]) -> Apply:
            payloads, weights = [payload, *received.values()], [step_size * round.receives[peer] for peer in received]
            return lambda targets: kernels.modular.recover_add(targets, x, payloads, weights, self.bits, modulus)

        return round.exchange(payload, merge)

    def _begin_adapted(self, state: GossipState, control: MoniquaStepControl, round: Round, own: Parts) -> Arrive:
        """`begin` with a bound or a step size from measurements."""
        modulus, step_size, key = self._modulus_at(control), control.step_size, self._key(state, round)
        with state.clock("encode"):
            payload = self._payload(own, state)
            check, largest = kernels.modular.encode(own, payload, key, self.bits, modulus)
            message = control.with_trailer(payload, check, largest, round.progress.step)
        numel = state.layout.numel

        def merge(received: dict[int, Tensor]) -> Apply:
            with state.clock("decode"):
                edges = {
                    peer: Edge.of(
                        message, theirs, kernels.modular.sums(payload, codes_of(theirs), numel, key, self.bits)
                    )
                    for peer, theirs in received.items()
                }

            def apply(targets: Parts) -> kernels.Flag:
                holding = [peer for peer, edge in edges.items() if edge.holds and edge.is_finite]
                weights = [step_size * round.receives[peer] * modulus / self.num_steps for peer in holding]
                payloads = [payload, *(codes_of(received[peer]) for peer in holding)]
                kernels.modular.add(targets, payloads, weights, self.bits)
                finite = all(edge.is_finite for edge in edges.values())
                # Codes cannot carry NaN, and values that are not finite spread in any gossip.
                if not finite:
                    for target in targets:
                        target.fill_(math.nan)
                control.observe(list(edges.values()), numel)
                control.agree(received)
                return finite

            return apply

        return round.exchange(message, merge)

    def _payload(self, own: Parts, state: GossipState) -> Tensor:
        size = kernels.modular.nbytes(state.layout.numel, self.bits)
        return debug.empty(size, dtype=torch.uint8, device=own[0].device if own else None)

    def _modulus_at(self, control: MoniquaStepControl) -> float:
        """The paper's for a theta that is a number; the smaller one that differences of codes need for a tracked one."""
        if self.theta is not None:
            return self.modulus
        return 2.0 * control.theta * self.num_steps / (self.num_steps - 1)

    def _key(self, state: GossipState, round: Round) -> int:
        """The key of the round's random numbers, the same on all workers."""
        return kernels.mix_key(state.seed, 0, round.progress.step)


def _range_of_all(x: Tensor, comm: Communicator) -> float:
    """The largest element of all workers minus the smallest: no two workers differ by more. 1 if that is zero."""
    # Tensors on the meta device, which plans use, have no values.
    finite = x[x.isfinite()] if not x.is_meta else x[:0]
    own = (finite.min().item(), finite.max().item()) if finite.numel() else None
    bounds = [pair for pair in comm.gather_objects(own) if pair is not None]
    return (max(high for _, high in bounds) - min(low for low, _ in bounds) if bounds else 0.0) or 1.0
