"""Predict a training step before you buy the network: seconds, bytes and memory of each method.

    predictions = thinwire.plan.predict(
        100_000_000, compute_seconds=0.25, network=Network(16, workers_per_node=4, outer=Link.of("1gbit", "0.1ms"))
    )

`record` runs the real averagers on tensors without values and notes what they send, in which order. `simulate` plays
these programs on a model of the network. So the message schedules stand in one place: the code that sends.
"""

from __future__ import annotations

from .layout import layout_of, measured_layout
from .lines import Lines
from .measure import Effort, measure_lines
from .methods import Method, methods
from .network import Link, Network, parse_rate, parse_seconds
from .predict import Prediction, Workload, ddp_buckets, predict, predict_method, tensors_of
from .record import Program, record
from .simulate import simulate
from .speeds import Speeds
from .traced import SimulatedWorld, TracedCommunicator

__all__ = [
    "Effort",
    "Lines",
    "Link",
    "Method",
    "Network",
    "Prediction",
    "Program",
    "SimulatedWorld",
    "Speeds",
    "TracedCommunicator",
    "Workload",
    "ddp_buckets",
    "layout_of",
    "measure_lines",
    "measured_layout",
    "methods",
    "parse_rate",
    "parse_seconds",
    "predict",
    "predict_method",
    "record",
    "simulate",
    "tensors_of",
]
