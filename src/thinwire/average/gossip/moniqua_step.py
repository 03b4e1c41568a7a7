"""A bound and a step size for Moniqua, from what workers see of their differences.

Moniqua's codes count levels: with the same random numbers on all workers, the codes of i and j differ by the number k of
rounding thresholds between x_i and x_j, modulo the M = 2^bits - 1 levels of a turn. So `k step` is an estimate of
`x_j - x_i` without bias, the two ends of an edge hold k and -k, and k is right while `|x_j - x_i| <= theta`, for

    step = 2 theta / (M - 1)        modulus B = M step

**Check of the bound.** Each worker sends `H = sum_e r_e u_e` modulo 2^64: u_e counts levels without the modulus, r_e are odd
numbers, the same on all workers in a round. A receiver compares `H_j - H_i` with `sum_e r_e k_e`. If they differ, some element
differed by more than theta, and both ends leave the edge out of this round.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import kernels
from ...kernels.scales import float32
from ...membership import State, config, restart
from ...topology import Topology
from ...topology.speed import difference_rates, largest_weight
from .maxima import Maxima

MEMORY = 0.9  # of the running means of |k| and k^2
TRAILER_NBYTES = 20  # the check, then failure, N / A and the largest magnitude
RESOLUTION = 2.0**-18  # theta over the largest magnitude, at least: float32 has 24 bits
UNKNOWN = -1.0
EARLY, SHRINK, SHRINK_FAST, GROW, GROW_FAST = 0.5, 0.95, 0.8, 1.25, 2.0
LONG = 8  # windows without a failure, after which theta shrinks fast


@dataclass(frozen=True)
class Edge:
    """What a worker sees of one neighbour in a round.

    Attributes:
        sums: of the crossings k, int64: the check's, of `|k|` and of `k^2`.
        holds: whether no element differed by more than the bound.
        is_finite: whether both ends' values were finite.
    """

    sums: Tensor
    holds: bool
    is_finite: bool

    @classmethod
    def of(cls, own: Tensor, theirs: Tensor, sums: Tensor) -> Edge:
        """From both messages and the sums of their crossings."""
        is_finite = kernels.flags.read(kernels.all_finite([_half(own), _half(theirs)]))
        # int64 wraps, so the sums compare modulo 2^64.
        return cls(sums, bool(sums[0] == _check(theirs) - _check(own)), is_finite)


@dataclass
class MoniquaStepControl(State):
    """What a worker knows of the differences between workers.

    Attributes:
        maxima: the windows in which workers agree.
        theta: the bound in force.
        step_size: the step size in force; zero until workers have agreed for the first time.
        fixed: the names of "theta" and "step_size" that are numbers of the user's.
        earlier_theta: the bound of the window before, to which the next report belongs.
        streak: windows without a failure in a row, or minus the number of those with one.
        has_failed: whether the bound was ever too low.
        seen: running means of |k| and k^2; below 0 if there are none yet.
        failed: whether an edge failed in this window.
    """

    maxima: Maxima = restart()
    theta: float = restart()
    step_size: float = restart()
    fixed: tuple[str, ...] = config()
    earlier_theta: float = restart()
    seen: Tensor = restart()
    failed: Tensor = restart()
    streak: int = restart(default=0)
    has_failed: bool = restart(default=False)

    @classmethod
    def of(
        cls, topology: Topology, size: int, device: torch.device, theta: float, fixed: Mapping[str, float]
    ) -> MoniquaStepControl:
        """Nothing seen yet.

        Args:
            topology: who talks to whom.
            size: number of workers.
            device: of the tensors.
            theta: the bound to start with.
            fixed: what the user has set of "theta" and "step_size".
        """
        maxima = Maxima(topology, size, torch.full((3,), UNKNOWN, dtype=torch.float32, device=device))
        seen, failed = torch.full((2,), UNKNOWN, dtype=torch.float32, device=device), float32(0.0, device)
        step_size = fixed.get("step_size", 0.0)
        return cls(maxima, theta, step_size, tuple(fixed), theta, seen, failed)

    def with_trailer(self, payload: Tensor, check: Tensor, largest: Tensor, step: int) -> Tensor:
        """The message: the payload, the check, and what workers are agreeing on.

        Args:
            payload: of the round.
            check: H, int64.
            largest: the largest magnitude of this worker's values, float32.
            step: of the round.
        """
        if self.maxima.age == 0:
            noise = torch.where(self.seen[0] > 0, _noise(self.seen), UNKNOWN)
            own = torch.stack([self.failed, noise, torch.where(largest.isfinite(), largest, 0.0)])
            self.failed.zero_()
        else:
            own = self.maxima.flying
        numbers = self.maxima.sent(own, step)
        return torch.cat([payload, check.view(1).view(torch.uint8), numbers.view(torch.uint8)])

    def observe(self, edges: list[Edge], numel: int) -> None:
        """Count the differences of a round.

        Args:
            edges: what this worker saw of each neighbour.
            numel: elements.
        """
        for edge in edges:
            # Values that are not finite say nothing about the bound.
            if not edge.is_finite:
                continue
            if not edge.holds:
                self.failed.fill_(1.0)
            elif numel:
                now = (edge.sums[1:].double() / numel).float()
                # All edges of a round together count as one step of the running mean.
                keep = MEMORY ** (1.0 / len(edges))
                self.seen.copy_(torch.where(self.seen < 0, now, keep * self.seen + (1.0 - keep) * now))

    def agree(self, messages: Mapping[int, Tensor]) -> None:
        """Merge what neighbours sent; at the end of a window, set the bound and the step size from it."""
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
        return 1.0 / (2.0 * largest_weight(topology, size) * noise + difference_rates(topology, size)[1])

    def _adapt_theta(self, failed: bool, seen: bool, least: float) -> None:
        before, self.earlier_theta = self.earlier_theta, self.theta
        if failed:
            self.has_failed, self.streak = True, min(self.streak, 0) - 1
            # The failure was at the bound of the window before, so that one grows.
            self.theta = max(self.theta, before * (GROW if self.streak > -3 else GROW_FAST))
        elif seen:
            self.streak = max(self.streak, 0) + 1
            late = SHRINK_FAST if self.streak > LONG else SHRINK
            self.theta = max(least, self.theta * (late if self.has_failed else EARLY))

    def diagnostics(self) -> dict[str, float]:
        """The bound and the step size in force."""
        return {"step_size": self.step_size, "theta": self.theta}


def codes_of(message: Tensor) -> Tensor:
    """The payload of a message."""
    return message[:-TRAILER_NBYTES]


def _half(message: Tensor) -> Tensor:
    return kernels.payload_as(message[:4], torch.float32, "Moniqua's scale")


def _check(message: Tensor) -> Tensor:
    return kernels.payload_as(message[-TRAILER_NBYTES : -TRAILER_NBYTES + 8], torch.int64, "Moniqua's check")[0]


def _noise(seen: Tensor) -> Tensor:
    """N / A of the means of |k| and k^2."""
    size, square = seen
    variance = size.clamp(max=0.25)
    noise: Tensor = variance / torch.maximum(size.square(), square - variance)
    return noise
