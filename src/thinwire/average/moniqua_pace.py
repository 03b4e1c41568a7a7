"""A bound and a step size for Moniqua, from what workers see of their differences.

Moniqua's codes count levels: with the same random numbers on all workers, the codes of i and j differ by the number k of
rounding thresholds between x_i and x_j, modulo the M = 2^bits - 1 levels of a turn. So `k step` is an estimate of
`x_j - x_i` without bias, the two ends of an edge hold k and -k, and k is right while `|x_j - x_i| <= theta`, for

    step = 2 theta / (M - 1)        modulus B = M step

**Check of the bound.** Each worker sends `H = sum_e r_e u_e` modulo 2^64: u_e counts levels without the modulus, r_e are fixed
odd numbers. A receiver compares `H_j - H_i` with `sum_e r_e k_e`. If they differ, some element differed by more than theta,
and both ends leave the edge out of this round.

**The bound.** Workers agree by `Maxima` whether any edge failed in the last window. If one did, theta grows by a quarter, or
doubles if windows fail repeatedly; if none did, theta shrinks, by half in the beginning and later by a twentieth. It starts
at the range of all elements on all workers. It stays above what float32 resolves of the largest of them.

**The step size.** A round with step s changes `sum |x_i - mean|^2` on average by `-s A + s^2 (2 p N + mu A) / 2`, with A the
weighted squares of the differences, N the variance of k, p the largest weight, mu the largest eigenvalue of `I - P`. Workers
measure A and N, in steps: `A >= E k^2 - min(E|k|, 1/4)` and `A >= (E|k|)^2`, `N <= min(E|k|, 1/4)`. The best s is

    s = 1 / (2 p N / A + mu)

Workers take the largest N / A, so the smallest step. So disagreement shrinks in every round on average, down to what float32
resolves; updates of the parameters raise it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.scales import float32
from ..topology import Topology
from ..topology.speed import difference_rates
from .maxima import Maxima

MEMORY = 0.9  # of the running means of |k| and k^2
TRAILER_NBYTES = 20  # the check, then failure, N / A and the largest magnitude
RESOLUTION = 2.0**-18  # theta over the largest magnitude, at least: float32 has 24 bits
UNKNOWN = -1.0
EARLY, SHRINK, SHRINK_FAST, GROW, GROW_FAST = 0.5, 0.95, 0.8, 1.25, 2.0
LONG = 8  # windows without a failure, after which theta shrinks fast


@dataclass
class MoniquaPace:
    """What a worker knows of the differences between workers.

    Attributes:
        maxima: the windows in which workers agree.
        theta: the bound in force.
        step_size: the step size in force; zero until workers have agreed for the first time.
        num_levels: M, of a turn.
        fixed: the names of "theta" and "step_size" that are numbers of the user's.
        earlier_theta: the bound of the window before, to which the next report belongs.
        streak: windows without a failure in a row, or minus the number of those with one.
        has_failed: whether the bound was ever too low.
        seen: running means of |k| and k^2; below 0 if there are none yet.
        failed: whether an edge failed in this window.
    """

    maxima: Maxima
    theta: float
    step_size: float
    num_levels: int
    fixed: tuple[str, ...]
    earlier_theta: float
    seen: Tensor
    failed: Tensor
    streak: int = 0
    has_failed: bool = False
    weights: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, topology: Topology, size: int, device: torch.device, bits: int, theta: float, fixed: Mapping[str, float]
    ) -> MoniquaPace:
        """Nothing seen yet.

        Args:
            topology: who talks to whom.
            size: number of workers.
            device: of the tensors.
            bits: of a code.
            theta: the bound to start with.
            fixed: what the user has set of "theta" and "step_size".
        """
        maxima = Maxima(topology, size, torch.full((3,), UNKNOWN, device=device))
        seen, failed = torch.full((2,), UNKNOWN, device=device), float32(0.0, device)
        step_size = fixed.get("step_size", 0.0)
        return cls(maxima, theta, step_size, (1 << bits) - 1, tuple(fixed), theta, seen, failed)

    def check_of(self, x: Tensor, wrapped: Tensor, decoded: Tensor, modulus: float) -> Tensor:
        """H, int64: what neighbours compare their decoding with.

        Args:
            x: this worker's flat vector.
            wrapped: x modulo the modulus.
            decoded: what its codes stand for.
            modulus: B.
        """
        turns = ((x - wrapped) / modulus).round().long()
        codes = (decoded * (self.num_levels / modulus) + 0.5 * self.num_levels).round().long()
        return (self._weights(x) * (turns * self.num_levels + codes)).sum()

    def with_trailer(self, payload: Tensor, check: Tensor, x: Tensor, step: int) -> Tensor:
        """The message: the payload, the check, and what workers are agreeing on."""
        if self.maxima.age == 0:
            largest = x.abs().max().float() if x.numel() else self.failed.new_zeros(())
            noise = torch.where(self.seen[0] > 0, _noise(self.seen), UNKNOWN)
            own = torch.stack([self.failed, noise, torch.where(largest.isfinite(), largest, 0.0)])
            self.failed = torch.zeros_like(self.failed)
        else:
            own = self.maxima.flying
        numbers = self.maxima.sent(own, step)
        return torch.cat([payload, check.view(1).view(torch.uint8), numbers.view(torch.uint8)])

    def crossings(self, theirs: Tensor, own: Tensor, modulus: float) -> Tensor:
        """k of each element, float32: the thresholds between this worker's value and the neighbour's.

        Args:
            theirs, own: decoded codes.
            modulus: B.
        """
        half = 0.5 * (self.num_levels - 1)
        counts = ((theirs - own) * (self.num_levels / modulus)).round()
        return torch.remainder(counts + half, self.num_levels).sub_(half)

    def holds(self, k: Tensor, message: Tensor, check: Tensor) -> Tensor:
        """Whether the bound held for all elements of an edge: a flag on the device."""
        theirs = kernels.payload_as(message[-TRAILER_NBYTES : -TRAILER_NBYTES + 8], torch.int64, "Moniqua's check")[0]
        holds: Tensor = (self._weights(k) * k.long()).sum() == theirs - check
        return holds

    def observe(self, edges: list[tuple[Tensor, Tensor]]) -> None:
        """Count the differences of a round: for each edge its k, and whether the bound held."""
        for k, holds in edges:
            finite = k.sum().isfinite()
            self.failed = torch.where(holds | ~finite, self.failed, 1.0)
            if k.numel():
                size = k.abs()
                now = torch.stack([size.mean(dtype=torch.float64), size.square().mean(dtype=torch.float64)]).float()
                keep = MEMORY ** (1.0 / len(edges))
                mean = torch.where(self.seen < 0, now, keep * self.seen + (1.0 - keep) * now)
                self.seen = torch.where(holds & finite, mean, self.seen)

    def agree(self, messages: Mapping[int, Tensor]) -> None:
        """Take over what neighbours sent, and at the end of a window the bound and the step size that follow."""
        trailers = [kernels.payload_as(m[-TRAILER_NBYTES + 8 :], torch.float32, "Moniqua's") for m in messages.values()]
        agreed = self.maxima.received(trailers)
        if agreed is None:
            return
        failed, noise, largest = agreed.tolist()
        if "step_size" not in self.fixed and noise >= 0:
            self.step_size = self._best_step(noise)
        if "theta" not in self.fixed:
            self._adapt_theta(failed > 0, noise >= 0, RESOLUTION * largest)

    def _best_step(self, noise: float) -> float:
        """From N / A; see the module's docstring."""
        topology, size = self.maxima.topology, self.maxima.size
        weights = [w for step in topology.steps(size) for w in topology.neighbours(0, step, size).receives.values()]
        return 1.0 / (2.0 * max(weights, default=1.0) * noise + difference_rates(topology, size)[1])

    def _adapt_theta(self, failed: bool, seen: bool, least: float) -> None:
        before, self.earlier_theta = self.earlier_theta, self.theta
        if failed:
            self.has_failed, self.streak = True, min(self.streak, 0) - 1
            self.theta = max(self.theta, before * (GROW if self.streak > -3 else GROW_FAST))
        elif seen:
            self.streak = max(self.streak, 0) + 1
            late = SHRINK_FAST if self.streak > LONG else SHRINK
            self.theta = max(least, self.theta * (late if self.has_failed else EARLY))

    def _weights(self, like: Tensor) -> Tensor:
        """The odd numbers r_e, the same on all workers."""
        if self.weights is None or self.weights.numel() != like.numel():
            mixed = torch.arange(1, like.numel() + 1, device=like.device) * -7046029254386353131
            mixed = (mixed ^ (mixed >> 32)) * -4417276706812531889
            self.weights = (mixed ^ (mixed >> 29)) | 1
        return self.weights

    def facts(self) -> dict[str, float]:
        """The bound and the step size in force."""
        return {"step_size": self.step_size, "theta": self.theta}

    def state_dict(self) -> dict[str, Any]:
        """All of it, as tensors and numbers."""
        names = ("theta", "step_size", "earlier_theta", "streak", "has_failed")
        tensors = {"seen": self.seen.clone(), "failed": self.failed.clone(), "maxima": self.maxima.state_dict()}
        return {name: getattr(self, name) for name in names} | tensors

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.maxima.load_state_dict(saved["maxima"])
        self.seen, self.failed = (saved[name].to(self.seen.device, copy=True) for name in ("seen", "failed"))
        for name in ("theta", "step_size", "earlier_theta", "streak", "has_failed"):
            setattr(self, name, saved[name])


def _noise(seen: Tensor) -> Tensor:
    """N / A of the means of |k| and k^2."""
    size, square = seen
    variance = size.clamp(max=0.25)
    noise: Tensor = variance / torch.maximum(size.square(), square - variance)
    return noise
