"""The compressors of the layer-wise study, without memory: each for every layer and for the entire model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Method

SOURCE = "Dutta et al. 2020, layer-wise study, arXiv 1911.08250"

_COMPRESSORS = {
    "topk": ("a tenth of the coordinates, the largest", "TopK(0.1)"),
    "randomk": ("a tenth of the coordinates, at random", "RandomK(0.1)"),
    "threshold": ("coordinates of 0.001 or more", "Threshold(0.001)"),
    "adaptive-threshold": ("coordinates of half the largest or more", "AdaptiveThreshold()"),
    "terngrad": ("ternary, not clipped", "TernGrad(clip=None)"),
    "qsgd": ("255 levels of the L2 norm", "QSGD(levels=255, norm='l2', bucket_size=16777216)"),
}
_SLOW = ("randomk", "threshold")
_GRANULARITIES = {"": ("each layer", "layer"), "-model": ("the entire model", "model")}


def methods(slow: Mapping[str, Any]) -> dict[str, Method]:
    """All compressors at both granularities, and the baseline.

    Args:
        slow: fields of `RunConfig` for the methods with more epochs.
    """
    made = {"dense": Method("the gradients themselves")}
    for end, (what, granularity) in _GRANULARITIES.items():
        for name, (sends, codec) in _COMPRESSORS.items():
            averager = f"Mean({codec}, granularity='{granularity}', min_ndim=0)"
            changes = slow if name in _SLOW else {}
            made[name + end] = Method(f"{sends}, of {what}", averager, changes=changes)
    return made
