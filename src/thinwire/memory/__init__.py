"""Memory: what happens to what was lost. `base` has the contract; one algorithm, one file."""

from .base import Memory
from .diana import DIANA
from .ef21 import EF21
from .error_feedback import ErrorFeedback, ErrorFeedbackState
from .local_momentum import LocalMomentum
from .loco import LoCo
from .momentum import MomentumCorrection
from .shift import Shift
from .sign_descent import SignDescent

__all__ = [
    "DIANA",
    "EF21",
    "ErrorFeedback",
    "ErrorFeedbackState",
    "LoCo",
    "LocalMomentum",
    "Memory",
    "MomentumCorrection",
    "Shift",
    "SignDescent",
]
