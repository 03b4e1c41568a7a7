"""An error in backward ends the process, with one worker and with three: nothing waits for a round that never ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("abandoned.py")
MEAN = "Mean(TopK(0.1), ErrorFeedback())"
LIMIT_SECONDS = 150  # of which starting Python and PyTorch takes most, on a busy machine


def ends(kind: str, averager: str, size: int, folder: Path) -> list[tuple[int, str]]:
    """Exit code and stderr of each worker, all of which must end by themselves."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    commands = [
        [sys.executable, str(SCRIPT), kind, averager, str(rank), str(size), str(folder / "store")]
        for rank in range(size)
    ]
    workers = [subprocess.Popen(c, env=environment, stderr=subprocess.PIPE, text=True) for c in commands]
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        errors = [worker.communicate(timeout=max(1.0, deadline - time.monotonic()))[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, text) for worker, text in zip(workers, errors, strict=True)]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "kind, averager",
    [("plain", MEAN), ("ddp", MEAN), ("ddp", "PowerSGD(rank=1)"), ("context", MEAN)],
    ids=["plain", "ddp", "ddp PowerSGD", "context manager"],
)
def test_an_error_in_backward_ends_all_processes(kind, averager, size, tmp_path):
    results = ends(kind, averager, size, tmp_path)
    assert "OutOfMemoryError: on purpose" in results[size // 2][1]
    assert all(code != 0 for code, _ in results), results


def test_an_interrupted_backward_ends_the_process(tmp_path):
    ((code, text),) = ends("interrupt", MEAN, 1, tmp_path)
    assert code != 0 and "KeyboardInterrupt" in text


def test_a_sparse_gradient_ends_the_process(tmp_path):
    ((code, text),) = ends("sparse", MEAN, 1, tmp_path)
    assert code != 0 and "the gradient of '0.weight' is sparse" in text
