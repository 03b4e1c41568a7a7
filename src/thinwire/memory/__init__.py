"""Memory: what happens to what was lost. `base` has the contract; one algorithm, one file."""

from .base import Memory
from .clip import Clip, ClipByNorm, ClipByValue, ClipValueByGlobalNorm
from .error_feedback import ErrorFeedback, ErrorFeedbackState
from .momentum import MomentumCorrection, MomentumState

__all__ = [
    "Clip",
    "ClipByNorm",
    "ClipByValue",
    "ClipValueByGlobalNorm",
    "ErrorFeedback",
    "ErrorFeedbackState",
    "Memory",
    "MomentumCorrection",
    "MomentumState",
]
