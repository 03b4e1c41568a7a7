"""Cores that the threads of a node share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine


@dataclass
class _Job:
    """One thread's work: seconds that are left of it on a core of its own, and what follows."""

    left: float
    done: Callable[[], None]


class Cores:
    """Processor sharing: n threads at work on c cores each run at `min(1, c / n)` of their speed.

    Args:
        engine: the clock.
        count: c; None for a core for each thread.
    """

    def __init__(self, engine: Engine, count: float | None):
        self._engine = engine
        self._count = float("inf") if count is None else count
        self._jobs: list[_Job] = []
        self._since = 0.0
        self._changes = 0

    def work(self, seconds: float, done: Callable[[], None]) -> None:
        """Begin work of `seconds` on a core of its own; `done` runs at its end."""
        if self._count == float("inf"):
            return self._engine.at(self._engine.now + seconds, done)
        self._progress()
        self._jobs.append(_Job(seconds, done))
        self._plan_next_end()

    @property
    def _speed(self) -> float:
        return min(1.0, self._count / len(self._jobs))

    def _progress(self) -> None:
        """Take what was done since the last change from all jobs."""
        if self._jobs:
            done = (self._engine.now - self._since) * self._speed
            for job in self._jobs:
                job.left -= done
        self._since = self._engine.now

    def _plan_next_end(self) -> None:
        # The heap keeps the ends that were planned before; by this number `_end` knows that they are out of date.
        self._changes += 1
        if self._jobs:
            shortest = min(self._jobs, key=lambda job: job.left)
            # Rounding may leave a job slightly below zero.
            end = self._engine.now + max(0.0, shortest.left) / self._speed
            self._engine.at(end, partial(self._end, shortest, self._changes))

    def _end(self, job: _Job, changes: int) -> None:
        if changes != self._changes:  # another job came or ended meanwhile
            return
        self._progress()
        self._jobs.remove(job)
        self._plan_next_end()
        job.done()
