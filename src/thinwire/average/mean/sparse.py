"""Sparse gradients, put together: top-k in a few bits, error feedback, and a warm-up of the ratio by steps."""

from __future__ import annotations

from ...codec import QSGD, TopK, chain
from ...memory import ErrorFeedback
from ...options import require_integer
from ...schedule import GeometricWarmup, Schedule
from .mean import Mean


def sparse(
    ratio: float | Schedule = 0.01, bits: int | None = 4, warmup_steps: int = 100, exchange: str = "auto"
) -> Mean:
    """The largest few gradients of each layer, as one averager: `Mean(chain(TopK(...), QSGD(bits=4)), ErrorFeedback())`.

    Each worker sends the largest `ratio` of the coordinates of `g + e`, in `bits` bits each, of every tensor of two or more
    dimensions; e keeps the rest. It suits vision networks under SGD with momentum. Language
    models, Adam and Muon lose more by it than by `Mean(QSGD(bits=4))`.

    A small ratio from the first step costs a short run several points of accuracy, so the ratio falls by equal factors,
    from a quarter of the coordinates, over the first `warmup_steps` steps.

    Bytes per worker and step: those of the exchange, `(W-1) k (bits + log2(1/ratio) + 1.44)/8` and the scales by an
    all-gather, k = ratio n.

    Args:
        ratio: fraction of the coordinates that is sent after the warm-up; lower => smaller messages. A schedule is its own
            warm-up.
        bits: of each value; None sends float32.
        warmup_steps: over how many steps the ratio falls; 0 => the ratio is constant.
        exchange: as in `Mean`.

    Raises:
        ValueError: a value out of range.

    Source: Stich et al. 2018, Sparsified SGD with Memory, arXiv 1809.07599; the warm-up, Lin et al. 2018, arXiv 1712.01887.

    Example:
        >>> import thinwire as tw
        >>> tw.sparse(0.01, warmup_steps=0)
        Mean(chain(TopK(ratio=0.01), QSGD(bits=4)), ErrorFeedback())
        >>> ratio = tw.sparse(0.01).codec.sparsifier.ratio
        >>> [round(ratio.at(tw.schedule.Progress(step=step)), 3) for step in (0, 50, 100)]
        [0.242, 0.049, 0.01]
    """
    require_integer("sparse: warmup_steps", warmup_steps, 0)
    if warmup_steps > 0 and not isinstance(ratio, Schedule):
        # A ratio above a quarter starts at its final value.
        ratio = GeometricWarmup(ratio, warmup_steps, start=max(ratio, 0.25), unit="step")
    codec = TopK(ratio) if bits is None else chain(TopK(ratio), QSGD(bits=bits))
    return Mean(codec, ErrorFeedback(), exchange=exchange)
