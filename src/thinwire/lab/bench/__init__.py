"""Benchmarks: how fast the codecs are, how long a training step takes, and how fast averaging alone agrees.

`codecs` needs one core, `step` a process group; `benchmarks/netlab.py` makes a network of a given rate for it.
"""

from .codecs import CodecsBench
from .consensus import ConsensusBench
from .step import StepBench

__all__ = ["CodecsBench", "ConsensusBench", "StepBench"]
