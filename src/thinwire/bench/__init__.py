"""Benchmarks: how fast the codecs are, and how long a training step takes.

`codecs` needs one core, `step` a process group; `benchmarks/netlab.py` makes a network of a given rate for it.
"""

from .codecs import CodecsBench
from .step import StepBench

__all__ = ["CodecsBench", "StepBench"]
