"""Deep Gradient Compression and its baseline."""

from __future__ import annotations

from .base import TaskMethod

SOURCE = "Lin et al. 2018, DGC, arXiv 1712.01887"


def methods(dense: str = "dense", warmup_epochs: int = 5) -> dict[str, TaskMethod]:
    """A thousandth of the coordinates, and the baseline.

    Args:
        dense: end of the baseline's name.
        warmup_epochs: epochs in which the ratio falls to 0.001; at most 2 in the small recipe.
    """

    def strategy(epochs: int) -> str:
        return f"Gradients(dgc(0.001, warmup_epochs={epochs}))"

    about = f"0.1 % of the coordinates{', after a warm-up' * (warmup_epochs > 0)}; momentum is corrected and masked"
    return {
        dense: TaskMethod("the gradients themselves"),
        "dgc": TaskMethod(about, strategy(warmup_epochs), strategy(min(warmup_epochs, 2))),
    }
