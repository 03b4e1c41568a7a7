"""Tests an installed wheel: that it has the C++ kernels, and that these write the golden bytes.

python scripts/try_wheel.py        with the Python that the wheel was installed for
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import thinwire
from thinwire import kernels

TESTS = Path(__file__).parents[1] / "tests"
# The tests of Triton's kernels need the extra `gpu`.
FILES = [TESTS / "codec/test_golden.py", TESTS / "test_notation.py", *sorted(TESTS.glob("kernels/test_*.py"))]


def main() -> int:
    """Returns the exit code of the tests."""
    installed = Path(thinwire.__file__)
    if TESTS.parent in installed.parents and "site-packages" not in installed.parts:
        sys.exit(f"{installed} is the working tree, not an installed wheel")
    with kernels.use_backend("cpu"):
        print(f"thinwire {thinwire.__version__} from {installed.parent}, with the C++ kernels")
    return pytest.main(["-n", "0", "-p", "no:cacheprovider", *map(str, FILES)])


if __name__ == "__main__":
    sys.exit(main())
