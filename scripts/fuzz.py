"""Decode millions of damaged payloads of every codec: `python scripts/fuzz.py [--inputs N] [--seed S]`.

The inputs are dealt out to the codecs of `tests/helpers/codecs.py` in runs of 1,000. Memory is limited, so an allocation
that a payload chooses is an error. It prints a line for each codec, and ends with 1 at the first defect.
`scripts/sanitize.sh fuzz` does the same to the C++ kernels alone, under AddressSanitizer.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.codecs import CODECS

from thinwire.testing import fuzz_codec

RUN = 1000
ROOM = 1 << 30  # bytes that may be allocated beyond what importing took


def limit_memory() -> None:
    """Let no allocation exceed `ROOM`, where the system can limit it."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))


def main() -> None:
    """Deal out the inputs, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="damaged payloads of all codecs together")
    parser.add_argument("--seed", type=int, default=0, help="chooses the damage")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tried, refused, began = Counter[str](), Counter[str](), time.monotonic()
    limit_memory()
    for number in range(-(-arguments.inputs // RUN)):
        codec = CODECS[number % len(CODECS)]
        tried[repr(codec)] += RUN
        refused[repr(codec)] += fuzz_codec(codec, RUN, seed=arguments.seed * 1_000_000 + number)
    for name in tried:
        print(f"{tried[name]:9,} tried {refused[name]:9,} refused  {name}")
    took = time.monotonic() - began
    print(f"{tried.total():9,} damaged payloads in {took:.0f} s, {refused.total():,} refused, no defect")


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        sys.exit(f"fuzz: {error}")
