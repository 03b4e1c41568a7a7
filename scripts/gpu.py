"""Run what needs a GPU: `make test-gpu`, or `make bench-gpu`.

python scripts/gpu.py test      kernels against the reference, golden bytes and conformance suites with Triton, streams
                                under load, two workers on one GPU over Gloo, one over NCCL; kernels once more under
                                compute-sanitizer, where that is installed
python scripts/gpu.py bench     the speed of every codec, as a share of a device copy; training steps of two workers
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
COMPILED = ROOT / "tests/kernels/triton/check_compiled.py"  # needs no GPU
TOOLS = ("memcheck", "racecheck")


def test() -> int:
    """Run all checks, also after a failure; return how many runs failed."""
    kernels = sorted(set((ROOT / "tests/kernels/triton").glob("check_*.py")) - {COMPILED})
    runs = [[*PYTEST, *map(str, kernels), *map(str, sorted((ROOT / "tests/gpu").glob("check_*.py")))]]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not installed, so its checks are left out")
    else:
        runs += [[sanitizer, "--tool", tool, "--error-exitcode", "1", *PYTEST, *map(str, kernels)] for tool in TOOLS]
    # So that cuBLAS gives the same bits on every stream.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return sum(subprocess.run(run, cwd=ROOT, env=environment).returncode != 0 for run in runs)


def bench() -> int:
    """Print the table of codecs, and that of training steps."""
    from thinwire.lab.bench import CodecsBench, StepBench

    CodecsBench(device="cuda", megabytes=100.0, reference_repetitions=1).run()
    StepBench(device="cuda").run()
    return 0


def main(command: str) -> int:
    """Run `test` or `bench`; exit with one line where there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("no GPU: PyTorch sees no CUDA or ROCm device, so nothing was run")
    return {"test": test, "bench": bench}[command]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
