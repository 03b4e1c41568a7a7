"""The files check_*.py beside this one pass in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_kernels_write_the_bytes_of_the_reference():
    checks = sorted(map(str, HERE.glob("check_*.py")))
    assert checks
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::RuntimeWarning",
            *checks,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2000:]
