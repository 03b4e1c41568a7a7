"""Memory: what happens to what was lost. `base` has the contract; one algorithm, one file."""

from .base import Memory
from .diana import DIANA
from .ef21 import EF21
from .error_feedback import ErrorFeedback, ErrorFeedbackState
from .local_momentum import LocalMomentum, LocalMomentumState
from .loco import LoCo, LoCoState
from .momentum import MomentumCorrection, MomentumState
from .shift import Shift, ShiftState
from .sign_descent import SignDescent

__all__ = [
    "DIANA",
    "EF21",
    "ErrorFeedback",
    "ErrorFeedbackState",
    "LoCo",
    "LoCoState",
    "LocalMomentum",
    "LocalMomentumState",
    "Memory",
    "MomentumCorrection",
    "MomentumState",
    "Shift",
    "ShiftState",
    "SignDescent",
]
