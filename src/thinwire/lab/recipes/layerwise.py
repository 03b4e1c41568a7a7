"""The compressors of the layer-wise study, without memory: each for every layer and for the entire model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import TaskMethod

SOURCE = "Dutta et al. 2020, layer-wise study, arXiv 1911.08250"

_COMPRESSORS = {
    "topk": ("a tenth of the coordinates, the largest", "TopK(0.1)"),
    "randomk": ("a tenth of the coordinates, at random", "RandomK(0.1)"),
    "threshold": ("coordinates of {threshold_about} or more", "Threshold({threshold!r})"),
    "adaptive-threshold": ("coordinates of half the largest or more", "AdaptiveThreshold()"),
    "terngrad": ("ternary, not clipped", "TernGrad(clip=None)"),
    "qsgd": ("255 levels of the L2 norm", "QSGD(levels=255, norm='l2', bucket_size=None)"),
    "qsgd-4bit": ("7 levels of the L2 norm", "QSGD(levels=7, norm='l2', bucket_size=None)"),
}
# The study trains these for more epochs.
_SLOW = ("randomk", "threshold")
_GRANULARITIES = {"": ("each layer", "layer"), "-model": ("the entire model", "model")}


def methods(slow: Mapping[str, Any], summed_over: int = 1) -> dict[str, TaskMethod]:
    """All compressors at both granularities, and the baselines in float32 and float16.

    Args:
        slow: fields of `RunConfig` for the methods with more epochs.
        summed_over: images over which the study adds losses, where thinwire takes their mean: its threshold of 0.001 is
            0.001 / summed_over here.
    """
    threshold = 0.001 / summed_over
    study = f" (0.001 of a loss summed over {summed_over} images)" if summed_over > 1 else ""
    values = {"threshold": threshold, "threshold_about": f"{threshold:.3g}{study}"}
    made = {
        "dense": TaskMethod("the gradients themselves"),
        "fp16": TaskMethod("the gradients as float16", "Gradients(Mean(Cast('float16'), min_ndim=0))"),
    }
    for end, (what, granularity) in _GRANULARITIES.items():
        for name, (sends, codec) in _COMPRESSORS.items():
            strategy = f"Gradients(Mean({codec.format(**values)}, granularity='{granularity}', min_ndim=0))"
            changes = slow if name in _SLOW else {}
            made[name + end] = TaskMethod(f"{sends.format(**values)}, of {what}", strategy, changes=changes)
    return made
