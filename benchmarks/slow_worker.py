"""How much one slow worker slows the others: asynchronous pairwise averaging beside data-parallel training.

    python benchmarks/slow_worker.py
    python benchmarks/slow_worker.py --workers 4 --step-seconds 0.03 --slow 10

Processes over Gloo train a real model; a sleep stands for the rest of a step's computation, so that a machine of few cores can
hold several workers, and the slow worker sleeps so many times as long. Only one method and one slow rank at a time. Reported is
the mean time of a step of the workers that are not slow, and its ratio to the same with nobody slow.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from script import run_script

import thinwire as tw

WIDTH = 256
METHODS = ["Asynchronous()", "Gradients(Mean())"]


def work(comm: tw.comm.Communicator, options: argparse.Namespace, method: str, slow: int | None) -> float:
    """Mean seconds of a step of this worker."""
    layers = [[torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()] for _ in range(4)]
    model = torch.nn.Sequential(*sum(layers, []), torch.nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = tw.attach(model, optimizer, method, comm=comm)
    x, y = torch.randn(16, WIDTH), torch.randint(0, 10, (16,))
    sleep = options.step_seconds * (options.slow if comm.rank == slow else 1)
    # The slow worker makes fewer steps where it may, so that others' times are taken while it trains.
    steps = options.steps if method != METHODS[0] or comm.rank != slow else max(1, int(options.steps / options.slow))
    comm.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        time.sleep(sleep)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    seconds = (time.perf_counter() - began) / steps
    handle.detach()
    return seconds


def measure(options: argparse.Namespace, method: str, slow: int | None) -> float:
    """Mean seconds of a step of the workers that are not slow."""
    seconds = tw.comm.ProcessWorld(options.workers).run(work, options, method, slow)
    return statistics.mean(value for rank, value in enumerate(seconds) if rank != slow)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.03)
    parser.add_argument("--slow", type=float, default=10.0, help="how many times as long the slow worker sleeps")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options = parser.parse_args()
    print(f"{options.workers} workers, sleep {1000 * options.step_seconds:g} ms a step, slow: {options.slow:g} times")
    for method in options.methods:
        baseline = measure(options, method, None)
        print(f"{method:17} nobody slow   {1000 * baseline:7.2f} ms a step", flush=True)
        for slow in (0, 1):
            seconds = measure(options, method, slow)
            ratio = seconds / baseline
            print(f"{method:17} rank {slow} slow   {1000 * seconds:7.2f} ms a step of the others, {ratio:.3f} times")


if __name__ == "__main__":
    run_script(main)
