"""What unequal workers get done together: asynchronous local updates beside synchronous ones and DDP.

    python benchmarks/goodput.py
    python benchmarks/goodput.py --workers 4 --slow 3 --step-seconds 0.05 --batches 1200

Processes over Gloo train a classifier on data that a random network has labelled. A sleep stands for most of a step's
computation, so that a machine of few cores can hold several workers; the last worker sleeps `--slow` times as long. Every
method trains on the same number of batches, added up over workers. Reported are

    alone       batches a second that all workers make together without any communication, which is what they could do
    goodput     batches a second whose changes are merged, over those alone
    loss        of the final model, on data that no worker has seen
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import thinwire as tw

EVERY = 12
METHODS = {"DDP": "Gradients(Mean())", "synchronous": f"diloco(every={EVERY})"}


def network(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))


def batch(teacher: nn.Module, seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, teacher(x).argmax(1)


def work(rank: int, options: argparse.Namespace, method: str, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.workers)
    teacher, model = network(64, 1000), network(options.width, options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    handle = None if method == "alone" else tw.attach(model, optimizer, METHODS.get(method, options.asynchronous))
    seconds = options.step_seconds * (options.slow if rank == options.workers - 1 else 1)

    def step(number: int) -> None:
        x, y = batch(teacher, 10**6 * (options.seed + 1) + 10**4 * number + rank, 32)
        time.sleep(seconds)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    dist.barrier()
    began, steps = time.perf_counter(), 0
    if method == "alone":
        while time.perf_counter() - began < options.alone_seconds:
            step(steps)
            steps += 1
        done: float = steps
    elif method == "asynchronous":
        while handle.committed_tokens < options.batches:
            step(steps)
            steps += 1
        done = handle.committed_tokens / options.workers  # added up over workers below
    else:
        while steps * options.workers < options.batches:
            step(steps)
            steps += 1
        done = steps
    took = time.perf_counter() - began
    facts = {"done": done, "seconds": took, "steps": steps, "blocked": 0.0, "late": 0}
    if handle is not None:
        facts["blocked"] = handle.blocked_seconds
        if method != "DDP":
            handle.synchronize()
        if method == "asynchronous":
            facts["late"] = handle.committed.num_late
        handle.detach()
        x, y = batch(teacher, 7, 4096)
        with torch.no_grad():
            facts["loss"] = cross_entropy(model(x), y).item()
    results.put((rank, facts))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, method: str) -> list[dict[str, float]]:
    """What each worker reports, by rank."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, options, method, f"{folder}/store", results))
            for rank in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        facts = dict(results.get(timeout=300) for _ in workers)
        for worker in workers:
            worker.join()
    return [facts[rank] for rank in range(options.workers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=3.0, help="how many times as long the last worker's steps take")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--batches", type=int, default=1200, help="of all workers together")
    parser.add_argument("--alone-seconds", type=float, default=8.0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", default=f"asynchronous_diloco(every={EVERY}, delay=3)")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    alone = sum(one["done"] / one["seconds"] for one in measure(options, "alone"))
    print(
        f"{options.workers} workers, one {options.slow:g} times slower: {alone:.1f} batches a second alone", flush=True
    )
    for method in (*METHODS, "asynchronous"):
        facts = measure(options, method)
        rate = sum(one["done"] for one in facts) / max(one["seconds"] for one in facts)
        steps = "/".join(f"{one['steps']:.0f}" for one in facts)
        waits = "/".join(f"{one['blocked']:.1f}" for one in facts)
        line = f"{method:13} {rate:6.1f} batches/s  goodput {rate / alone:.2f}  loss {facts[0]['loss']:.4f}"
        print(f"{line}  steps {steps}  waited {waits} s  late {facts[0]['late']:.0f}", flush=True)


if __name__ == "__main__":
    main()
