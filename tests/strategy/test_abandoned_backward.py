"""An error in backward ends the process, with one worker and with three: nothing waits for a round that never ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import abandoned
import pytest
from helpers.program import programs

MEAN = "Mean(TopK(0.1), ErrorFeedback())"
LIMIT_SECONDS = 100  # for a busy machine; without the property a process waits for ever


def ends(kind: str, averager: str, size: int, folder: Path) -> list[tuple[int, str]]:
    """Exit code and stderr of each worker, all of which must end by themselves."""
    deadline = time.monotonic() + LIMIT_SECONDS
    arguments = [(kind, averager, rank, size, str(folder / "store")) for rank in range(size)]
    with programs(abandoned.main, arguments, folder) as workers:
        codes = [worker.wait(max(1.0, deadline - time.monotonic())) for worker in workers]
        return [(code, worker.stderr) for code, worker in zip(codes, workers, strict=True)]


@pytest.mark.parametrize(
    "kind, averager, size",
    [("plain", MEAN, 1), ("plain", MEAN, 3), ("ddp", MEAN, 3), ("ddp", "PowerSGD(rank=1)", 1), ("context", MEAN, 3)],
    ids=["plain alone", "plain", "ddp", "ddp PowerSGD alone", "context manager"],
)
def test_an_error_in_backward_ends_all_processes(kind, averager, size, tmp_path):
    results = ends(kind, averager, size, tmp_path)
    assert "OutOfMemoryError: on purpose" in results[size // 2][1]
    assert all(code != 0 for code, _ in results), results


def test_an_error_in_backward_ends_a_script(tmp_path):
    """The same in an interpreter that nothing was forked from."""
    arguments = [sys.executable, abandoned.__file__, "plain", MEAN, "0", "1", str(tmp_path / "store")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 1 and "OutOfMemoryError: on purpose" in done.stderr


def test_an_interrupted_backward_ends_the_process(tmp_path):
    ((code, text),) = ends("interrupt", MEAN, 1, tmp_path)
    assert code != 0 and "KeyboardInterrupt" in text


def test_a_sparse_gradient_ends_the_process(tmp_path):
    ((code, text),) = ends("sparse", MEAN, 1, tmp_path)
    assert code != 0 and "the gradient of '0.weight' is sparse" in text
