"""How much one slow worker slows the others: asynchronous pairwise averaging beside data-parallel training.

    python benchmarks/slow_worker.py
    python benchmarks/slow_worker.py --workers 4 --step-seconds 0.03 --slow 10

Processes over Gloo train a real model; a sleep stands for the rest of a step's computation, so that a machine of few cores can
hold several workers, and the slow worker sleeps so many times as long. Only one method and one slow rank at a time. Reported is
the mean time of a step of the workers that are not slow, and its ratio to the same with nobody slow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

import thinwire as tw

WIDTH = 256
METHODS = ["Asynchronous()", "Gradients(Mean())"]


def work(rank: int, options: argparse.Namespace, method: str, slow: int | None, store: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.workers)
    layers = [[torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()] for _ in range(4)]
    model = torch.nn.Sequential(*sum(layers, []), torch.nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = tw.attach(model, optimizer, method)
    x, y = torch.randn(16, WIDTH), torch.randint(0, 10, (16,))
    sleep = options.step_seconds * (options.slow if rank == slow else 1)
    # The slow worker makes fewer steps where it may, so that others' times are taken while it trains.
    steps = options.steps if method != METHODS[0] or rank != slow else max(1, int(options.steps / options.slow))
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        time.sleep(sleep)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    seconds = (time.perf_counter() - began) / steps
    handle.detach()
    results.put((rank, seconds))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, method: str, slow: int | None) -> float:
    """Mean seconds of a step of the workers that are not slow."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, method, slow, f"{folder}/store", results)
        workers = [context.Process(target=work, args=(rank, *arguments)) for rank in range(options.workers)]
        for worker in workers:
            worker.start()
        seconds = dict(results.get(timeout=120) for _ in workers)
        for worker in workers:
            worker.join()
    return statistics.mean(value for rank, value in seconds.items() if rank != slow)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.03)
    parser.add_argument("--slow", type=float, default=10.0, help="how many times as long the slow worker sleeps")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(f"{options.workers} workers, sleep {1000 * options.step_seconds:g} ms a step, slow: {options.slow:g} times")
    for method in options.methods:
        baseline = measure(options, method, None)
        print(f"{method:17} nobody slow   {1000 * baseline:7.2f} ms a step", flush=True)
        for slow in (0, 1):
            seconds = measure(options, method, slow)
            ratio = seconds / baseline
            print(f"{method:17} rank {slow} slow   {1000 * seconds:7.2f} ms a step of the others, {ratio:.3f} times")


if __name__ == "__main__":
    main()
