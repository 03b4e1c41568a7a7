"""The training step of local updates over a thin wire of network namespaces, with and without a delay.

    sudo env "PATH=$PATH" python benchmarks/delay_netlab.py [--rate 20mbit] [--hosts 2]

A perceptron trains on every host, on a core of its own where there are enough. Every method trains `--steps` steps, and the
shortest of `--repetitions` is taken, because other programs disturb the cores; methods take turns. The ratio is the step
divided by that of the computation alone, which exchanges nothing. On a machine that others use too, `--pause` keeps the cores
that they take out of the step: the training rests for so long instead of computing.

The table goes into docs/benchmarks.md, between two markers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from netlab import Lab
from script import run_script
from tables import DOCS, publish, table_head, table_row
from torch import nn

import thinwire as tw
from thinwire.comm import Communicator
from thinwire.lab.bench.workers import joined

EVERY, FRAGMENTS, DELAY = 20, 4, 5
ALONE = "computation alone"
METHODS: dict[str, tw.strategy.Strategy | None] = {
    ALONE: None,
    "streaming, 4 bits, delay 5": tw.streaming_diloco(EVERY, FRAGMENTS, DELAY),
    "streaming, 4 bits, no delay": tw.streaming_diloco(EVERY, FRAGMENTS, 0),
    "DiLoCo, float32": tw.diloco(EVERY),
    "SparseLoCo": tw.sparse_loco(EVERY),
}
WIDTH, LAYERS, BATCH = 512, 4, 384  # 1.05 million parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=BATCH, help="examples of a step; more => longer computation")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of rest instead of forward and backward")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    with Lab(options.hosts, options.rate) as lab:
        rows = lab.ask([sys.executable, *sys.argv, "--worker"])
    alone = rows[ALONE]["step"]
    lines = table_head(["method", "step", "ratio", "blocked a step", "bytes a step", "peak bytes"])
    for name, row in rows.items():
        times = [f"{1e3 * row['step']:.1f} ms", f"{row['step'] / alone:.2f}", f"{1e3 * row['blocked']:.1f} ms"]
        lines.append(table_row([name, *times, f"{row['bytes']:,.0f}", f"{row['peak']:,.0f}"]))
    publish(DOCS / "benchmarks.md", "delay, network lab", lines)


def work(options: argparse.Namespace) -> None:
    """One host; host 0 writes the rows."""
    with joined(transport="gloo") as comm:
        rows: dict[str, dict[str, float]] = {}
        for _ in range(options.repetitions):
            for name, strategy in METHODS.items():
                row = measured(comm, strategy, options)
                # Other programs only make steps longer, so the shortest is kept.
                if name not in rows or row["step"] < rows[name]["step"]:
                    rows[name] = row
        if comm.rank == 0:
            options.worker.write_text(json.dumps(rows))


def measured(
    comm: Communicator, strategy: tw.strategy.Strategy | None, options: argparse.Namespace
) -> dict[str, float]:
    """Seconds and bytes of a step of the slowest worker, over whole periods after a first one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = None if strategy is None else tw.attach(model, optimizer, strategy)
    inputs = torch.randn(options.batch_size, WIDTH, generator=torch.Generator().manual_seed(comm.rank))

    def compute() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()

    def train(count: int) -> None:
        for _ in range(count):
            if options.pause:
                time.sleep(options.pause)  # with the gradients of the step before
            else:
                compute()
            optimizer.step()

    compute()
    train(EVERY)
    comm.barrier()
    waited = blocked(handle)
    sent = 0 if handle is None else handle.ledger.bytes_sent
    began = time.perf_counter()
    train(options.steps)
    seconds = torch.tensor([time.perf_counter() - began, blocked(handle) - waited]) / options.steps
    comm.barrier()
    seconds = torch.stack(comm.all_gather(seconds).wait()).amax(0)
    row = {"step": seconds[0].item(), "blocked": seconds[1].item(), "bytes": 0.0, "peak": 0.0}
    if handle is not None:
        row |= {"bytes": (handle.ledger.bytes_sent - sent) / options.steps, "peak": handle.ledger.peak_bytes_sent}
        handle.detach()
    return row


def blocked(handle: tw.strategy.Attachment | None) -> float:
    """Seconds so far that the training waited for messages."""
    return 0.0 if handle is None else handle.blocked_seconds


if __name__ == "__main__":
    run_script(main)
