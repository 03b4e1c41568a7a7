"""What docs/anywhere.md says of machines of different kinds."""

from __future__ import annotations

import unlike


def test_workers_that_compute_differently_agree_after_each_round():
    """Three processes, one of which computes without AVX."""
    averager = 'ByName({"5.weight": PowerSGD(rank=16), "*": Mean(QSGD(bits=4))})'
    method = (f"Local({averager}, every=4, outer=OuterSGD(0.7))", "AdamW", "float32")
    assert unlike.measure(20, alike=False, method=method)[0] == [0.0]
