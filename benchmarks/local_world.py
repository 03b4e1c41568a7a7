"""Rounds of workers that are threads: `LocalWorld(8)` with small and large tensors.

    OMP_NUM_THREADS=1 python benchmarks/local_world.py                  # on all cores
    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/local_world.py     # on one

Prints the milliseconds of a round, the best of three runs.
"""

from __future__ import annotations

import argparse
import time

import torch
from script import run_script

import thinwire as tw
from thinwire.average import Averager
from thinwire.comm import Communicator

WORKERS = 8
AVERAGERS = [tw.Mix(tw.Ring()), tw.Mean(tw.chain(tw.TopK(0.01), tw.QSGD(bits=4)), tw.ErrorFeedback())]


def average(comm: Communicator, numel: int, averager: Averager, rounds: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank)).view(-1, 10)
    state = averager.init([("x", x)], comm)
    for _ in range(rounds):
        averager.step(state, [("x", x)], comm).wait()
        averager.commit(state)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for numel, rounds in ((1000, 300), (100_000, 100), (10_000_000, 3)):
        for averager in AVERAGERS:
            times = []
            for _ in range(3):
                began = time.perf_counter()
                tw.LocalWorld(WORKERS).run(average, numel, averager, rounds)
                times.append((time.perf_counter() - began) / rounds)
            print(f"{numel:>10,} elements, {averager!r}: {1e3 * min(times):.1f} ms a round", flush=True)


if __name__ == "__main__":
    run_script(main)
