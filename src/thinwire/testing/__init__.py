"""Conformance suites for your own algorithms: call one in a test of your package.

Each suite checks one algorithm, and raises `AssertionError` with a message if the algorithm breaks its contract. The suites
need only PyTorch, so they work with any test runner.
"""

from .attacks import check_robust
from .averager import check_averager
from .clip import check_clip
from .codec import check_codec, check_encoding, check_traits
from .communicator import check_communicator
from .exchange import check_exchange
from .fuzz import fuzz_codec
from .memory import check_memory
from .rule import check_rule
from .strategy import check_strategy
from .topology import check_topology

__all__ = [
    "check_averager",
    "check_clip",
    "check_codec",
    "check_communicator",
    "check_encoding",
    "check_exchange",
    "check_memory",
    "check_robust",
    "check_rule",
    "check_strategy",
    "check_topology",
    "check_traits",
    "fuzz_codec",
]
