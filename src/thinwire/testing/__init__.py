"""Conformance suites for algorithms of your own: call one in a test of your package.

Each suite runs plain assertions on one algorithm and raises `AssertionError` with a message where a promise of the
contract is broken. They need PyTorch alone, so any test runner serves.
"""

from .averager import check_averager
from .codec import check_codec
from .communicator import check_communicator
from .memory import check_memory

__all__ = ["check_averager", "check_codec", "check_communicator", "check_memory"]
