"""The tables of the studies in benchmarks/, and the pages that they go into."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import cifar

from thinwire.lab.report import Run


def test_the_table_of_cifar10_names_each_strategy_whole():
    summary = {"final": {"test_accuracy": 0.5}, "bytes_sent_per_worker": 2e6, "dense_fp32_bytes": 8e6}
    (*_, line) = cifar.table([Run("4 bits", summary, [])])
    assert line == "| 4 bits | `Gradients(Mean(QSGD(bits=4)))` | 50.00% |  | 2.00 | 4.0 x |"
