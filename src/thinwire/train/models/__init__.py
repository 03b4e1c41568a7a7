"""Models: one family a file, each with a frozen configuration that builds it."""

from .digits import DigitsNet

__all__ = ["DigitsNet"]
