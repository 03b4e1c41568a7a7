"""Handwritten digits: a run of seconds that shows the effect of a method on accuracy and bytes."""

from __future__ import annotations

from ..train import RunConfig
from .base import Task, TaskMethod


def digits() -> RunConfig:
    """A small convolutional network on scikit-learn's 8x8 handwritten digits; seconds on two cores."""
    return RunConfig(recipe="digits")


TASKS = (
    Task("Digits, a small convolutional network", digits(), {"": TaskMethod("seconds on two cores; try any strategy")}),
)

DEMO = {
    "dense": "Gradients(Mean())",
    "4-bit": "Gradients(Mean(QSGD(bits=4)))",
    "sparse": "Gradients(Mean(TopK(0.005), ErrorFeedback()))",
    "sparse + 4-bit": "Gradients(Mean(chain(TopK(0.005), QSGD(bits=4)), ErrorFeedback()))",
}
"""What `thinwire demo` compares on this recipe: label -> strategy."""
