"""The step of a sharded model in two replicas over a thin wire: compressed between replicas, against plain HSDP.

    sudo env "PATH=$PATH" python benchmarks/sharded_netlab.py [--rate 1gbit] [--shards 2] [--repetitions 15]

Two hosts, network namespaces with a link of the given rate between them, hold a replica each; the ranks of a host are its
shards. Plain HSDP is `fully_shard(model, mesh=mesh)` on a mesh of two dimensions. The other methods shard over
`mesh["shard"]` and attach `compress_gradients(..., replicas=mesh["replicate"])`. A last row exchanges nothing between
replicas. All methods take turns step by step, so that other programs disturb them alike. A time is that of the slowest rank,
and a ratio is that of two steps of one turn; medians. The table goes into docs/benchmarks.md, between two markers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from netlab import Lab
from script import run_script
from tables import DOCS, publish, table_head, table_row
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.comm import Communicator, ProcessGroupCommunicator
from thinwire.lab.bench.step import SyntheticTraining, mlp

HOSTS, WARMUP = 2, 2
PLAIN, ALONE = "plain HSDP", "no exchange between replicas"
METHODS = {
    "`Mean(QSGD(bits=4))`": tw.Mean(tw.QSGD(bits=4)),
    "`Mean(chain(TopK(0.01), QSGD(bits=4)), ErrorFeedback())`": tw.Mean(
        tw.chain(tw.TopK(0.01), tw.QSGD(bits=4)), tw.ErrorFeedback()
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--shards", type=int, default=2, help="ranks of a host")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        torch.multiprocessing.spawn(work, args=(int(os.environ["RANK"]), options), nprocs=options.shards)
        return
    with Lab(HOSTS, options.rate) as lab:
        found = lab.ask([sys.executable, *sys.argv, "--worker"])
    publish(DOCS / "benchmarks.md", "sharded, network lab", table(found["seconds"], found["num_bytes"]))


def table(seconds: dict[str, list[float]], num_bytes: dict[str, float]) -> list[str]:
    """A row for each method; the ratios are of steps of the same turn."""
    lines = table_head(["between replicas", "step", "to plain HSDP", "in half of the turns", "MB sent a step"])
    for name, times in seconds.items():
        ratios = sorted(t / plain for t, plain in zip(times, seconds[PLAIN], strict=True))
        quarter = len(ratios) // 4
        spread = f"{ratios[quarter]:.2f}–{ratios[-1 - quarter]:.2f}"
        cells = [name, f"{median(times):.3f} s", f"{median(ratios):.2f}", spread, f"{num_bytes[name] / 1e6:.2f}"]
        lines.append(table_row(cells))
    return lines


def work(local_rank: int, host: int, options: argparse.Namespace) -> None:
    """One rank: a model for each method, and steps of all in turn; rank 0 writes what it found."""
    torch.set_num_threads(1)
    rank, size = host * options.shards + local_rank, HOSTS * options.shards
    dist.init_process_group("gloo", rank=rank, world_size=size)
    mesh = dist.init_device_mesh("cpu", (HOSTS, options.shards), mesh_dim_names=("replicate", "shard"))
    with ProcessGroupCommunicator() as comm, contextlib.ExitStack() as stack:
        plain = model_of(options, mesh)
        handles = {}
        steps: dict[str, Any] = {PLAIN: SyntheticTraining(plain, options.batch_size, rank)}
        for name, averager in METHODS.items():
            model = model_of(options, mesh["shard"])
            handles[name] = stack.enter_context(tw.compress_gradients(model, averager, replicas=mesh["replicate"]))
            steps[name] = SyntheticTraining(model, options.batch_size, rank)
        # The model of the last method, without its exchange.
        steps[ALONE] = partial(without_exchange, handles[name], steps[name])
        measure(comm, steps, WARMUP)
        before = {name: handle.ledger.bytes_sent for name, handle in handles.items()}
        seconds = measure(comm, steps, options.repetitions)
        # Two replicas: a ring all-reduce sends the shard once.
        num_bytes = {PLAIN: 4.0 * sum(p.to_local().numel() for p in plain.parameters()), ALONE: 0.0}
        for name, handle in handles.items():
            num_bytes[name] = (handle.ledger.bytes_sent - before[name]) / options.repetitions
        if rank == 0:
            options.worker.write_text(json.dumps({"seconds": seconds, "num_bytes": num_bytes}))
        dist.barrier()
    dist.destroy_process_group()


def model_of(options: argparse.Namespace, mesh: Any) -> torch.nn.Module:
    """A perceptron, each layer a unit of FSDP."""
    model = mlp(options.hidden, options.layers)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def without_exchange(handle: Any, training: SyntheticTraining) -> None:
    with handle.no_sync():
        training()


def measure(comm: Communicator, steps: dict[str, Any], repetitions: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank for each step, all methods in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            comm.barrier()
            start = time.perf_counter()
            step()
            seconds[name].append(max(comm.gather_objects(time.perf_counter() - start)))
    return seconds


if __name__ == "__main__":
    run_script(main)
