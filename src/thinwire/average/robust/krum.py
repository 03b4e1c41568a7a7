"""Krum: the messages that lie closest to many others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...options import require_integer
from .base import Combined, Messages, Rule, gram, mean_of_rows


@dataclass(frozen=True, repr=False)
class Krum(Rule):
    """The mean of the `selected` messages with the smallest scores; Multi-Krum if `selected` is above 1.

    The score of a message is the sum of its `k - m - 2` smallest squared distances to others. Ties go to the lower rank.

    Args:
        faulty: m, the number of wrong workers to bear; needs 2m + 2 < W.
        selected: how many messages are averaged, at most W - m. More => less noise; with W - m or fewer, none of the
            messages far away from the others is among them.
        patience: as of `Rule`.

    Raises:
        ValueError: faulty is not an integer, 0 or more, or selected not a positive integer. In `init`: too few workers.

    Source: Blanchard et al. 2017, Machine Learning with Adversaries, arXiv 1703.02757.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.average.robust.base import Messages
        >>> rows = torch.tensor([[1.0], [2.0], [2.5], [3.0], [100.0]])
        >>> tw.average.Krum(faulty=1, selected=2).combine(Messages(rows, numels=[1])).result
        tensor([2.2500])
    """

    faulty: int = 1
    selected: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("Krum: faulty", self.faulty, 0)
        require_integer("Krum: selected", self.selected, 1)

    @property
    def min_workers(self) -> int:
        return max(2 * self.faulty + 3, self.faulty + self.selected)

    def combine(self, messages: Messages) -> Combined:
        rows, faulty = messages.rows, messages.faulty(self.faulty)
        products = gram(rows)
        squares = products.diagonal()
        distances = (squares[:, None] + squares[None] - 2 * products).clamp(min=0)
        # A message is no neighbour of itself.
        distances.fill_diagonal_(float("inf"))
        # If more workers than expected are left out, the published number may be below one.
        nearest = distances.sort(1).values[:, : max(1, min(len(rows) - 1, len(rows) - faulty - 2))]
        # Python adds in the order of the list, on every machine.
        scores = torch.tensor([sum(each) for each in nearest.tolist()], dtype=torch.float64, device="cpu")
        # In rank order again, because the bits of a sum depend on its order.
        chosen = scores.sort(stable=True).indices[: min(self.selected, len(rows) - faulty)].sort().values
        return Combined(mean_of_rows(rows[chosen.to(rows.device)]))
