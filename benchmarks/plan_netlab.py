"""Predictions of `thinwire.plan` against real rounds over a thin wire of network namespaces.

    sudo env "PATH=$PATH" python benchmarks/plan_netlab.py [--hosts 2 4 8] [--rates 100mbit 1gbit] [--parameters N]

On each network, hosts average random gradients with each method, in the buckets of DDP and without a model. Latency and rate
are measured by ping-pong between the first host and the last one. The communication part of a round is its time less that in
which the worker encodes, decodes and adds its memory. The prediction takes the measured link and codecs that take no time.
The table goes into docs/benchmarks.md, between two markers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from netlab import Lab
from studies import replace_part

import thinwire as tw
from thinwire.comm import Communicator
from thinwire.lab.bench.step import joined
from thinwire.plan import Link, Method, Network, Speeds, Workload, ddp_buckets, predict_method, tensors_of
from thinwire.plan.measure import measure_link

PARAMETERS, ROUNDS = 2_000_000, 5
SPARSE = tw.chain(tw.TopK(0.01), tw.QSGD(bits=4))
METHODS = {
    "dense": tw.Mean(exchange="all_reduce"),
    "4 bits, all_gather": tw.Mean(tw.QSGD(bits=4), exchange="all_gather"),
    "top-k 1 %, 4 bits, all_gather": tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="all_gather"),
    "top-k 1 %, 4 bits, sparse_reduce": tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="sparse_reduce"),
    "PowerSGD, rank 4": tw.PowerSGD(rank=4),
}
BUSY = ("compensate", "encode", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options.worker, options.parameters)
    rows = [
        row for hosts in options.hosts for rate in options.rates for row in compare(hosts, rate, options.parameters)
    ]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    lines = [*table(rows), "", f"Median error: {100 * median(errors):.0f} %."]
    print("\n".join(lines))
    replace_part(Path(__file__).parent.parent / "docs/benchmarks.md", "plan, network lab", lines)


def compare(hosts: int, rate: str, parameters: int) -> list[dict[str, Any]]:
    """A row for each method on one network."""
    with tempfile.TemporaryDirectory() as folder, Lab(hosts, rate) as lab:
        file = Path(folder, "rows.json")
        command = [sys.executable, __file__, "--worker", str(file), "--parameters", str(parameters)]
        code = lab.run(command, {"OMP_NUM_THREADS": "1"})
        if code:
            sys.exit(f"a worker failed with exit code {code}")
        found = json.loads(file.read_text())
    network = Network(hosts, outer=Link(**found["link"]))
    workload, no_work = Workload(tensors_of(parameters), 0.0), Speeds(copy_bytes_per_second=float("inf"))
    rows = []
    for name, measured in found["seconds"].items():
        predicted, _ = predict_method(Method(name, METHODS[name], ""), workload, network, no_work)
        rows.append({"hosts": hosts, "rate": rate, "method": name, "measured": measured, "predicted": predicted})
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a table."""
    lines = ["| hosts | rate | method | measured | predicted | error |", "|---|---|---|---|---|---|"]
    for row in rows:
        measured, predicted = row["measured"], row["predicted"]
        error = f"{100 * (predicted / measured - 1):+.0f} %"
        cells = [str(row["hosts"]), row["rate"], row["method"], f"{measured:.3f} s", f"{predicted:.3f} s", error]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def work(file: Path, parameters: int) -> None:
    """One host: measure the link and every method; rank 0 writes them to `file`."""
    torch.set_num_threads(1)
    with joined() as comm:
        link = measure_link(comm, comm.size - 1, repetitions=5)
        seconds = {name: communication_seconds(comm, averager, parameters) for name, averager in METHODS.items()}
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps({"link": link.__dict__, "seconds": seconds}))


def communication_seconds(comm: Communicator, averager: tw.Averager, parameters: int) -> float:
    """Median over the rounds, of the slowest worker."""
    generator = torch.Generator().manual_seed(comm.rank)
    shapes = tensors_of(parameters)
    named = [(f"t{i}", torch.empty(shape)) for i, shape in enumerate(shapes)]
    buckets, rest = [], named[::-1]
    for bucket in ddp_buckets(shapes):
        buckets.append(rest[: len(bucket)])
        rest = rest[len(bucket) :]
    state = averager.init(named, comm)
    rounds = []
    for _ in range(1 + ROUNDS):
        for _, t in named:
            t.normal_(generator=generator)
        before = busy_seconds(state)
        comm.barrier()
        start = time.perf_counter()
        for handle in [averager.step(state, bucket, comm) for bucket in buckets]:
            handle.wait()
        rounds.append(time.perf_counter() - start - (busy_seconds(state) - before))
        averager.commit(state)
    return max(comm.gather_objects(median(rounds[1:])))


def busy_seconds(state: Any) -> float:
    """Seconds in which the worker encoded, decoded and added its memory."""
    return sum(state.clock.seconds.get(phase, 0.0) for phase in BUSY)


if __name__ == "__main__":
    main()
