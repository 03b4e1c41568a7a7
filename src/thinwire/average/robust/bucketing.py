"""Bucketing: average small random groups before a rule sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import debug
from ...codec import Codec
from ...options import require_integer, require_kind
from .base import Combined, Messages, Rule, mean_of_rows


@dataclass(frozen=True, repr=False)
class Bucketing(Rule):
    """Shuffles the messages, averages groups of `s`, and gives the means to another rule.

    The means differ less than the messages, which helps rules where workers' data differ. But a group with one wrong worker is
    wrong: with m wrong workers the rule bears as many among `W/s` groups, so a median needs `2m < W/s`. The order is random,
    another one in each round, and the same on all workers.

    Args:
        rule: what combines the means. Its own `patience` is not used.
        s: messages in a group; the last group may have fewer. 1 is the rule alone.
        patience: as of `Rule`.

    Raises:
        ValueError: rule is not a rule, or s is not a positive integer. In `init`: too few workers.

    Source: Karimireddy, He and Jaggi 2022, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, arXiv
    2006.09365.

    Example:
        >>> import thinwire as tw
        >>> rule = tw.average.Bucketing(tw.average.TrimmedMean(faulty=1))
        >>> rule, rule.min_workers
        (Bucketing(TrimmedMean()), 5)
    """

    rule: Rule
    s: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kind("Bucketing: rule", self.rule, Rule, "a rule such as TrimmedMean(faulty=1)")
        require_integer("Bucketing: s", self.s, 1)

    @property
    def has_center(self) -> bool:
        return self.rule.has_center

    @property
    def min_workers(self) -> int:
        return (self.rule.min_workers - 1) * self.s + 1

    def check_codec(self, codec: Codec) -> None:
        self.rule.check_codec(codec)

    def combine(self, messages: Messages) -> Combined:
        # On the CPU, because generators of other devices draw other numbers.
        generator = torch.Generator().manual_seed(messages.seed)
        order = torch.randperm(len(messages.rows), generator=generator, device="cpu").to(messages.rows.device)
        means = torch.stack([mean_of_rows(messages.rows[group]) for group in order.split(self.s)])
        result, *clipped = self.rule.combine(replace(messages, rows=means))
        return Combined(result, *(self._per_row(each, order) for each in clipped))

    def _per_row(self, values: Tensor | None, order: Tensor) -> Any:
        """The value of each row's group."""
        if values is None:
            return None
        each = values.repeat_interleave(self.s)[: len(order)]
        return debug.empty_like(each).index_copy_(0, order, each)
