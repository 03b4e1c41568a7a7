"""The quantizers of the paper on adaptive quantization, with 3 bits, and their baseline."""

from __future__ import annotations

from dataclasses import replace

from .base import TaskMethod

SOURCE = "Faghri et al. 2020, ALQ and AMQ, arXiv 2010.12460"
EARLY = "update_steps=(2, 10, 50, 200), update_every=1000"
"""When levels are updated in runs of a few hundred steps; the paper's first update is at step 100, of 80,000."""
SMALL_NUQSGD = "NUQSGD(bits=3, bucket_size=128, zero=False)"
"""For runs of about a hundred steps. The squared error of buckets of d normal coordinates is about `d / 64 - 1` times their
square: 1.3 for 128, and 127 for the paper's 8192, with which such a run learns nothing."""


def methods(
    num_components: int, bucket_size: int = 8192, dense: str = "dense", update_every: int = 10_000
) -> dict[str, TaskMethod]:
    """All quantizers, and the baseline. Buckets run through the whole network, and the last, short one is sent dense.

    Args:
        num_components: buckets of largest norm that make the mixture of truncated normals.
        bucket_size: elements that share a norm.
        dense: end of the baseline's name.
        update_every: steps from one update of the levels to the next, after those at steps 100 and 2000.
    """
    shared = f"bucket_size={bucket_size}"
    fitted = f"{shared}, num_buckets={num_components}"
    # The default is not written out.
    late = "" if update_every == 10_000 else f", update_every={update_every}"
    made = {dense: TaskMethod("the gradients themselves (SuperSGD in the paper)")}
    for name, about, averager in (
        ("alq", "levels adapt to a mixture of truncated normals", "ALQ({})"),
        ("alq-gd", "likewise, by gradient descent", "ALQ({}, search='gradient')"),
        ("alq-n", "levels adapt to one truncated normal", "ALQ({}, distribution='pooled')"),
        ("amq", "levels +-p^j, of which p adapts", "AMQ({})"),
        ("amq-n", "likewise, to one truncated normal", "AMQ({}, distribution='pooled')"),
    ):
        full, small = (_mean(averager.format(options)) for options in (fitted + late, f"{fitted}, {EARLY}"))
        made[name] = TaskMethod(f"3 bits, {about}", full, small)
    for name, about, codec in (
        ("nuqsgd", "3 bits, levels +-2^-j of the L2 norm (1908.06077)", f"NUQSGD(bits=3, {shared}, zero=False)"),
        (
            "qsgdinf",
            "3 bits, even levels of the largest magnitude (1610.02132)",
            f"QSGD(bits=3, norm='max', {shared}, zero=False)",
        ),
        ("terngrad", "ternary, not clipped (1705.07878)", f"TernGrad(clip=None, {shared})"),
    ):
        made[name] = TaskMethod(about, _mean(codec))
    made["nuqsgd"] = replace(made["nuqsgd"], small_strategy=_mean(SMALL_NUQSGD))
    return made


def _mean(codec: str) -> str:
    return f"Gradients(Mean(DenseLast({codec}), granularity='model', min_ndim=0))"
