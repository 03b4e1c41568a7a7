"""When a round of asynchronous local updates is committed, and how much each change counts: `Quorum`, and its arithmetic."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...algorithm import Algorithm
from ...average.robust.median_norm import MedianNorm
from ...options import require_integer, require_kind, require_number
from .staleness import DelayedNesterov, Staleness

NUM_DURATIONS = 100  # of steps, from which a worker's speed follows


@dataclass(frozen=True, repr=False)
class Quorum(Algorithm):
    """Makes `Local` asynchronous: a round merges the changes of those workers that have sent theirs.

        g = sum_i factor(s_i) n_i g_i / sum_i n_i,    over the K or more workers i that have come

    A worker sends its change when it has done its steps, and trains on. A round is committed when all workers have come, or
    when K have and a grace window has passed that uses up the rest of the delay:

        grace = clamp(grace (delay t_step - t_quorum - t_send), 0, max_grace_seconds)

    t_step are the seconds of a step, t_quorum those from the round's first change to its K-th, and t_send those that it takes
    to send a change. A change that misses its round is merged in a later one, s rounds late, as `stale` says. n_i are the
    tokens (or samples) that the change was made from, see `LocalUpdates.count_tokens`.

    Args:
        workers: K; fewer do not make a round, unless fewer are left. Higher => fewer late changes, more waiting. None => all
            that are left.
        stale: the rule for late changes: `DelayedNesterov()`, `CosineGate()`, `PlainWeights()` or `Drop()`.
        grace: the share of the time left that a round waits for more workers.
        max_grace_seconds: the most that it waits for them.
        follow_speed: whether a worker takes fewer steps between two rounds in proportion to its speed, so that all come at the
            same time: `H_i = round(H v_i / max v)`, v the 90th percentile of its last steps per second (DyLU). Its delay is
            scaled in the same way. Speeds are told within the first period, and then with each change.
        patience_seconds: after so long a round is committed with fewer than K.
        rule: clips the changes of a round to a multiple of their median norm, tensor by tensor, so that one worker cannot move
            the anchor much further than the others do; changes that are not finite are left out. A worker that is clipped to
            less than half, or not finite, for `patience` rounds in a row is set aside and named. It takes as much memory as
            the changes of a round, in float32; None => changes are added as they come, and one that is not finite spoils its
            round.

    Raises:
        ValueError: a value out of range.

    Source: Liu et al. 2024, Asynchronous Local-SGD, arXiv 2401.09135; Douillard et al. 2026, Decoupled DiLoCo,
        arXiv 2604.21428.

    Example:
        >>> import thinwire as tw
        >>> tw.Local(tw.Mean(), every=30, outer=tw.OuterSGD(), delay=5, quorum=Quorum(workers=2))
        Local(Mean(), every=30, outer=OuterSGD(), delay=5, quorum=Quorum(workers=2))
    """

    workers: int | None = None
    stale: Staleness = DelayedNesterov()
    grace: float = 1.0
    max_grace_seconds: float = 60.0
    follow_speed: bool = True
    patience_seconds: float = 60.0
    rule: MedianNorm | None = MedianNorm(factor=2.0)

    def __post_init__(self) -> None:
        require_integer("Quorum: workers", self.workers, 1, or_none=True)
        require_kind("Quorum: stale", self.stale, Staleness, "a rule such as DelayedNesterov() or Drop()")
        hint = "; other rules need the messages of all workers"
        require_kind("Quorum: rule", self.rule, MedianNorm, "MedianNorm()", or_none=True, hint=hint)
        for name in ("grace", "max_grace_seconds", "patience_seconds"):
            require_number(f"Quorum: {name}", getattr(self, name), least=0)

    def grace_seconds(self, delay_seconds: float, quorum_seconds: float, send_seconds: float) -> float:
        """How long a round waits for more workers once it has its quorum.

        Example:
            >>> Quorum(grace=0.5).grace_seconds(delay_seconds=3.0, quorum_seconds=0.5, send_seconds=0.5)
            1.0
        """
        left = self.grace * (delay_seconds - quorum_seconds - send_seconds)
        return min(max(left, 0.0), self.max_grace_seconds)

    def weights(self, tokens: Sequence[int], staleness: Sequence[int]) -> list[float]:
        """The weight of each change of a round, `factor(s_i) n_i / sum n`. What is dropped counts in no sum.

        Example:
            >>> from thinwire.strategy.local.staleness import Drop
            >>> Quorum(stale=Drop()).weights(tokens=[10, 30, 10], staleness=[0, 0, 2])
            [0.25, 0.75, 0.0]
        """
        factors = [self.stale.factor(s) for s in staleness]
        total = sum(n for n, factor in zip(tokens, factors, strict=True) if factor > 0)
        return [factor * (n / total) if total else 0.0 for n, factor in zip(tokens, factors, strict=True)]


def steps_of(every: int, speed: float, speeds: Iterable[float]) -> int:
    """Steps between two rounds of a worker, in proportion to its speed: `max(1, round(H v_i / max v))`.

    DyLU takes the floor. It costs a worker of nearly the highest speed a whole step, for which it then waits; rounding is
    late by half a step at most, which the delay hides.

    Args:
        every: H, of the fastest worker.
        speed: of this worker, in steps a second; 0.0 if it is not known yet.
        speeds: of all workers whose speed is known.

    Example:
        >>> steps_of(30, 10.0, [30.0, 10.0, 20.0]), steps_of(30, 30.0, [30.0, 10.0]), steps_of(30, 29.7, [30.0])
        (10, 30, 30)
    """
    fastest = max(speeds, default=0.0)
    if speed <= 0 or fastest <= speed:
        return every
    return max(1, round(every * speed / fastest))


class StepTimer:
    """Measures the steps of this worker, without the time that it waits for others.

    Example:
        >>> timer = StepTimer()
        >>> timer.durations.extend([0.1] * 8 + [0.5, 0.05])
        >>> timer.speed  # the 90th percentile
        10.0
    """

    def __init__(self) -> None:
        self.durations: deque[float] = deque(maxlen=NUM_DURATIONS)
        self._began: float | None = None

    def stepped(self) -> None:
        """A step has ended."""
        if self._began is not None:
            self.durations.append(max(self.now() - self._began, 1e-9))  # above 0, because speeds divide by it

    def resume(self) -> None:
        """The next step begins."""
        self._began = self.now()

    @staticmethod
    def now() -> float:
        """Seconds on the clock that steps are measured with."""
        return time.perf_counter()

    @property
    def speed(self) -> float:
        """The 90th percentile of the last steps' speeds, in steps a second; 0.0 if there are none."""
        ordered = sorted(self.durations)
        return 1.0 / ordered[len(ordered) // 10] if ordered else 0.0  # a high speed is a short duration

    @property
    def step_seconds(self) -> float:
        """The median of the last steps' seconds; 0.0 if there are none."""
        ordered = sorted(self.durations)
        return ordered[len(ordered) // 2] if ordered else 0.0
