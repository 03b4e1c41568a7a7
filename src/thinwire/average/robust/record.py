"""What a rule remembers of the workers: the last result, and who was wrong for how long."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels.checks import described
from ...membership import WHOLE, State, pending, shared
from ..base import Before
from .base import Combined, Messages, Rule, dots

HEAVY = 0.5  # a message that is clipped to less than this share of its norm counts as wrong


@dataclass
class Judgement:
    """What a round found out, until it is committed.

    Attributes:
        center: the result by tensor name, for rules that start from it.
        not_finite: workers whose messages were not finite, or could not be decoded.
        clipped: worker -> norm of what clipping dropped of its message.
        wrong: workers that count as wrong in this round.
        absent: workers that sent nothing.
    """

    center: dict[str, Tensor]
    not_finite: list[int]
    clipped: dict[int, float]
    wrong: list[int]
    absent: Collection[int] = ()


@dataclass
class RuleState(State):
    """The state of a rule; all of it is the same on all workers.

    Attributes:
        center: the last result, flat and unscaled, by tensor name; empty if the rule does not ask for it.
        wrong_rounds: for each worker, for how many rounds in a row it was wrong.
        set_aside: workers that are left out from now on.
        judgement: of the round under way.
        last: of the last round that was committed.
    """

    center: dict[str, Tensor] = shared()
    wrong_rounds: list[int] = shared(form=WHOLE, default_factory=list)
    set_aside: list[int] = shared(form=WHOLE, default_factory=list)
    judgement: Judgement | None = pending(default=None)
    last: Judgement | None = pending(default=None)

    @classmethod
    def of(cls, rule: Rule, tensors: Sequence[tuple[str, Tensor]], size: int) -> RuleState:
        """The state before the first round of `size` workers."""
        center = (
            {name: torch.zeros(t.numel(), dtype=torch.float32, device=t.device) for name, t in tensors}
            if rule.has_center
            else {}
        )
        return cls(center, [0] * size)

    def combine(
        self, rule: Rule, names: list[str], numels: list[int], rows: Tensor, seed: int, is_scaled: bool
    ) -> Tensor:
        """The result of a round, NaN if less than half of the workers take part.

        Args:
            rule: of all rounds.
            names: of the tensors.
            numels: of the tensors.
            rows: (W, n) float32, unscaled, the message of each worker; not finite where it could not be decoded.
            seed: the same on all workers.
            is_scaled: whether there is a loss scale, under which honest workers overflow now and then.
        """
        size = len(rows)
        if len(self.wrong_rounds) != size:  # continues a run of another number of workers
            self.regroup(None, size)
        finite = dots(rows, rows).isfinite().tolist()  # a square of float32 is finite in float64
        present = [rank for rank in range(size) if finite[rank] and rank not in self.set_aside]
        # Fewer than half may all be wrong: a result that is not finite stops the round on all workers.
        if not present or 2 * len(present) < size:
            return torch.full_like(rows[0], float("nan"))
        center = torch.cat([self.center[name] for name in names]) if rule.has_center else None
        kept = rows if len(present) == size else rows[present]
        combined = rule.combine(Messages(kept, numels, size - len(present), center, seed))
        _check(rule, combined, sum(numels))
        result, norms, dropped = combined
        parts = dict(zip(names, result.split(numels), strict=True)) if rule.has_center else {}
        not_finite = [rank for rank in range(size) if not finite[rank]]
        self.judgement = replace(self.judged(present, not_finite, norms, dropped, is_scaled), center=parts)
        return result

    def judged(
        self,
        present: Sequence[int],
        not_finite: list[int],
        norms: Tensor | None,
        dropped: Tensor | None,
        is_scaled: bool = False,
    ) -> Judgement:
        """Who was wrong in a round.

        Args:
            present: workers that a result was made from.
            not_finite: workers whose messages were not finite.
            norms, dropped: of those present; see `Combined`.
            is_scaled: whether there is a loss scale.
        """
        clipped, wrong = {}, [] if is_scaled else list(not_finite)
        if norms is not None and dropped is not None:
            clipped = {rank: lost for rank, lost in zip(present, dropped.tolist(), strict=True) if lost > 0}
            heavily = [rank for rank, heavy in zip(present, (dropped > HEAVY * norms).tolist(), strict=True) if heavy]
            # Where clipping hits most workers, it is the bound that is wrong.
            wrong += heavily if 2 * len(heavily) < len(present) else []
        heard = {*present, *not_finite}
        absent = [rank for rank in range(len(self.wrong_rounds)) if rank not in heard]
        return Judgement({}, not_finite, clipped, wrong, absent)

    def commit(self, rule: Rule) -> None:
        """Keep the result of the round, and set aside those who were wrong for too long."""
        found, self.judgement, self.last = self.judgement, None, self.judgement
        if found is None:
            return
        for name, part in found.center.items():
            self.center[name].copy_(part)
        self.wrong_rounds = [
            n if rank in found.absent else (n + 1) * (rank in found.wrong) for rank, n in enumerate(self.wrong_rounds)
        ]
        for rank, rounds in enumerate(self.wrong_rounds):
            if rule.patience is not None and rounds >= rule.patience and rank not in self.set_aside:
                self._set_aside(rule, rank, found)

    def _set_aside(self, rule: Rule, rank: int, found: Judgement) -> None:
        if 2 * (len(self.set_aside) + 1) >= len(self.wrong_rounds):
            return  # those who are left must be more than half
        self.set_aside = sorted([*self.set_aside, rank])
        what = "not finite" if rank in found.not_finite else "clipped to less than half"
        warnings.warn(
            f"rank {rank} is set aside: its messages were {what} for {rule.patience} rounds in a row, by {rule}. It is left "
            "out until workers join or leave without it; look for what is wrong with its data or its machine",
            RuntimeWarning,
            stacklevel=2,
        )

    def regroup(self, before: Before, size: int) -> None:
        """Follow workers to their new ranks; new ones start afresh."""
        old = [None] * size if before is None else before
        known = [rank if rank is not None and rank < len(self.wrong_rounds) else None for rank in old]
        self.set_aside = [new for new, rank in enumerate(known) if rank in self.set_aside]
        self.wrong_rounds = [0 if rank is None else self.wrong_rounds[rank] for rank in known]

    def diagnostics(self) -> dict[str, Any]:
        """What the last round found out; see `Mean.diagnostics`."""
        found = {f"set_aside/{rank}": 1.0 for rank in self.set_aside}
        if self.last is None:
            return found
        found |= {f"not_finite/{rank}": 1.0 for rank in self.last.not_finite}
        return found | {f"clipped/{rank}": lost for rank, lost in self.last.clipped.items()}


def _check(rule: Rule, combined: object, numel: int) -> None:
    """Raise ValueError unless a rule returned a result of all elements; in every round, so messages are built when raised."""
    result = combined.result if isinstance(combined, Combined) else None
    if not isinstance(result, Tensor) or result.dtype != torch.float32 or result.shape != (numel,):
        got = type(combined).__name__ if result is None else described(result)
        raise ValueError(f"{rule}: combine must return Combined(result) with {numel} elements of float32, got {got}")
