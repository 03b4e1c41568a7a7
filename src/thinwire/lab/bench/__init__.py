"""Benchmarks: the speed of codecs, the time of a training step, and the convergence of averaging alone.

`codecs` needs one core, `step` a process group; `benchmarks/netlab.py` makes a network of a given rate for it.
"""

from .codecs import CodecsBench
from .consensus import ConsensusBench
from .step import StepBench

__all__ = ["CodecsBench", "ConsensusBench", "StepBench"]
