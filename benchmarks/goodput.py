"""What unequal workers get done together: asynchronous local updates beside synchronous ones and DDP.

    python benchmarks/goodput.py
    python benchmarks/goodput.py --workers 4 --slow 3 --step-seconds 0.05 --batches 1200
    python benchmarks/goodput.py --methods asynchronous --kill-seconds 20 --batches 2400

Processes over Gloo train a classifier on data that a random network has labelled. A sleep stands for most of a step's
computation, so that a machine of few cores can hold several workers; the last worker sleeps `--slow` times as long. Every
method trains on the same number of batches, added up over workers. Reported are

    alone       batches a second that all workers make together without any communication, which is what they could do
    goodput     batches a second whose changes are merged, over those alone
    loss        of the final model, on data that no worker has seen

With `--kill-seconds`, a worker gets SIGKILL every so many seconds: the ranks 2, 1, 0, as long as others can go on. Only rounds
with a quorum survive it; the others' process groups end with their first worker. A worker that is killed does not come back.
What the workers could do is then added up while they live.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import signal
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
    results.put((rank, os.getpid(), {}))
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
        done = handle.committed_tokens
    else:
        while steps * options.workers < options.batches:
            step(steps)
            steps += 1
        done = steps
    facts = {"done": done, "seconds": time.perf_counter() - began, "steps": steps, "blocked": 0.0, "late": 0}
    if handle is not None:
        facts["blocked"] = handle.blocked_seconds
        facts["phases"] = {name: round(took, 2) for name, took in handle.seconds.items()}
        if method != "DDP":
            handle.synchronize()
        if method == "asynchronous":
            facts |= {"late": handle.committed.num_late, "rounds": handle.committed.rounds}
        handle.detach()
        x, y = batch(teacher, 7, 4096)
        with torch.no_grad():
            facts["loss"] = cross_entropy(model(x), y).item()
    results.put((rank, os.getpid(), facts))
    if not options.kill_seconds:
        dist.destroy_process_group()


def measure(options: argparse.Namespace, method: str) -> tuple[dict[int, dict[str, Any]], dict[int, float]]:
    """What each worker reports, by rank; and after how many seconds those that were killed died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire", "torch._dynamo", "numpy"])
    results, facts, killed = context.Queue(), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, options, method, f"{folder}/store", results))
            for rank in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        begun = [results.get(timeout=120) for _ in workers]
        began, pids = time.perf_counter(), {rank: pid for rank, pid, _ in begun}
        doomed = [2, 1, 0][: options.workers - 2] if options.kill_seconds and method == "asynchronous" else []
        while len(facts) + len(killed) < options.workers:
            due = began + options.kill_seconds * (len(killed) + 1) if len(killed) < len(doomed) else None
            try:
                left = 300.0 if due is None else max(0.0, due - time.perf_counter())
                rank, _, found = results.get(timeout=left)
                facts[rank] = found
                doomed = doomed[: len(killed)]  # the others are at their end too
            except queue.Empty:
                if due is None:
                    raise
                victim = doomed[len(killed)]
                os.kill(pids[victim], signal.SIGKILL)
                killed[victim] = time.perf_counter() - began
        for worker in workers:
            worker.join()
    return facts, killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, "asynchronous"], default=[*METHODS, "asynchronous"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=3.0, help="how many times as long the last worker's steps take")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--batches", type=int, default=1200, help="of all workers together")
    parser.add_argument("--alone-seconds", type=float, default=8.0)
    parser.add_argument("--kill-seconds", type=float, default=0.0, help="between two kills; 0 => nobody is killed")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asynchronous", default=f"asynchronous_diloco(every={EVERY})")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rates = {rank: one["done"] / one["seconds"] for rank, one in sorted(measure(options, "alone")[0].items())}
    text = f"{options.workers} workers, one {options.slow:g} times slower"
    print(f"{text}: {sum(rates.values()):.1f} batches a second alone", flush=True)
    for method in options.methods:
        facts, killed = measure(options, method)
        seconds = max(one["seconds"] for one in facts.values())
        merged = [one["done"] for one in facts.values()]
        done = max(merged) if method == "asynchronous" else sum(merged)
        could = sum(rate * min(seconds, killed.get(rank, seconds)) for rank, rate in rates.items())
        last = facts[max(facts)]
        line = f"{method:13} {done / seconds:6.1f} batches/s  goodput {done / could:.2f}  loss {last['loss']:.4f}"
        steps = "/".join(f"{facts[rank]['steps']:.0f}" if rank in facts else "killed" for rank in rates)
        waits = "/".join(f"{facts[rank]['blocked']:.1f}" if rank in facts else "-" for rank in rates)
        print(f"{line}  steps {steps}  waited {waits} s  late {last['late']}", flush=True)
        print(f"    {seconds:.1f} s, rank {max(facts)}: {last.get('rounds', '-')} rounds, {last['phases']}", flush=True)


if __name__ == "__main__":
    main()
