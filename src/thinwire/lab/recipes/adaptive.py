"""The quantizers of the paper on adaptive quantization, with 3 bits, and their baseline."""

from __future__ import annotations

from .base import Method

SOURCE = "Faghri et al. 2020, ALQ and AMQ, arXiv 2010.12460"
EARLY = "update_steps=(2, 10, 50, 200), update_every=1000"
"""When levels are updated in runs of a few hundred steps; the paper's first update is at step 100, of 80,000."""


def methods(num_buckets: int, bucket_size: int = 8192, dense: str = "dense") -> dict[str, Method]:
    """All quantizers, and the baseline.

    Args:
        num_buckets: components of the mixture for the levels.
        bucket_size: elements that share a norm.
        dense: end of the baseline's name.
    """
    shared = f"bucket_size={bucket_size}"
    fitted = f"{shared}, num_buckets={num_buckets}"
    made = {dense: Method("the gradients themselves (SuperSGD in the paper)")}
    for name, about, averager in (
        ("alq", "levels adapt to a mixture of truncated normals", "ALQ({})"),
        ("alq-n", "levels adapt to one truncated normal", "ALQ({}, distribution='pooled')"),
        ("amq", "levels +-p^j, of which p adapts", "AMQ({})"),
        ("amq-n", "likewise, to one truncated normal", "AMQ({}, distribution='pooled')"),
    ):
        full, small = (f"Mean({averager.format(options)})" for options in (fitted, f"{fitted}, {EARLY}"))
        made[name] = Method(f"3 bits, {about}", full, small)
    for name, about, codec in (
        ("nuqsgd", "3 bits, levels +-2^-j of the L2 norm (1908.06077)", f"NUQSGD(bits=3, {shared})"),
        ("qsgdinf", "3 bits, even levels of the largest magnitude (1610.02132)", f"QSGD(bits=3, norm='max', {shared})"),
        ("terngrad", "ternary (1705.07878)", f"TernGrad({shared})"),
    ):
        made[name] = Method(about, f"Mean({codec})")
    return made
