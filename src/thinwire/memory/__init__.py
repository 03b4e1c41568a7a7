"""Memory: what happens to what was lost. `base` has the contract; one algorithm, one file."""

from .base import Memory
from .ef21 import EF21, EF21State
from .error_feedback import ErrorFeedback, ErrorFeedbackState
from .momentum import MomentumCorrection, MomentumState
from .sign_descent import SignDescent

__all__ = [
    "EF21",
    "EF21State",
    "ErrorFeedback",
    "ErrorFeedbackState",
    "Memory",
    "MomentumCorrection",
    "MomentumState",
    "SignDescent",
]
