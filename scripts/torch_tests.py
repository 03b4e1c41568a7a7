"""Run PyTorch's own tests of process groups, which its wheel contains, on the backend "thinwire".

    python scripts/torch_tests.py [PATTERN ...]                    # such as "test_all_reduce*"; without any, all tests
    BACKEND=mpi python scripts/torch_tests.py "test_all_to_all*"   # PyTorch runs these for MPI only

Each test runs in processes of its own, forked from this one. PyTorch skips a test for backends that it does not know, so the
tests are told that the backend is Gloo, or MPI; what they then start is ours. Tests that need a GPU skip themselves. The last
line counts them and names those that failed. It needs the package expecttest.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import time
import unittest
import warnings

WORKERS = 4
os.environ.setdefault("BACKEND", "gloo")
os.environ.update(WORLD_SIZE=str(WORKERS), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
os.environ.setdefault("TEMP_DIR", f"/tmp/thinwire-torch-tests-{os.getpid()}")
for folder in ("", "/barrier", "/test_dir", "/init_dir"):
    os.makedirs(os.environ["TEMP_DIR"] + folder, exist_ok=True)
warnings.simplefilter("ignore")

import torch  # noqa: E402 - its tests read the environment when they are imported
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import distributed_test as theirs  # noqa: E402

import thinwire.comm.backend  # noqa: E402, F401

_init, _new_group = dist.init_process_group, dist.new_group


def init_process_group(*args, backend=None, **options):  # type: ignore[no-untyped-def]
    """Ours, whatever the test asks for."""
    return _init(*args, backend="thinwire", **options)


def new_group(*args, backend=None, **options):  # type: ignore[no-untyped-def]
    """The same for groups of fewer ranks."""
    return _new_group(*args, backend="thinwire", **options)


dist.init_process_group, dist.new_group = init_process_group, new_group


class OnThinwire(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    """PyTorch's tests, in forked processes."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def main() -> int:
    torch.set_num_threads(1)
    patterns = sys.argv[1:] or ["test_*"]
    names = [
        n for n in unittest.TestLoader().getTestCaseNames(OnThinwire) if any(fnmatch.fnmatch(n, p) for p in patterns)
    ]
    passed, skipped, failed = [], [], []
    for name in names:
        started, result = time.monotonic(), unittest.TestResult()
        OnThinwire(name).run(result)
        problems = [text for _, text in (*result.failures, *result.errors)]
        (failed if problems else skipped if result.skipped else passed).append(name)
        word = "failed" if problems else "skipped" if result.skipped else "passed"
        print(f"{word:8}{name}  {time.monotonic() - started:.1f} s", flush=True)
        if problems:
            print("    " + problems[0].strip().replace("\n", "\n    "), flush=True)
    print(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped: {' '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
