"""What docs/anywhere.md says of machines of different kinds."""

from __future__ import annotations

import unlike


def test_workers_that_compute_differently_stay_close():
    """On a processor without AVX both compute in the same way, and the distance is zero."""
    (distance,), _ = unlike.measure(20, alike=False, method=("Gradients(Mean(QSGD(bits=4)))", "AdamW", "float32"))
    assert distance < 1e-6
