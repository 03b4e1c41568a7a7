"""Predictions of `thinwire.plan` against real rounds over a thin wire of network namespaces.

    sudo env "PATH=$PATH" python benchmarks/plan_netlab.py [--hosts 2 4 8] [--rates 100mbit 1gbit] [--rows FILE]

On each network, hosts send what a round of each method sends, in the buckets of DDP: the operations that the real averager
issues, in its order and sizes, without encoding and decoding. That is the communication part of the round. It keeps cores
that hosts share out of the comparison, as the planner gives each worker its own. Rates and the costs of short messages are
measured in the same run (`measure_together`), with messages that have nothing to do with the methods. The burst of the lab's
token buckets is known. Each time is the shortest of several repetitions, because other programs disturb the cores.
With --rows, the rows of earlier calls are kept in a file. The table goes into docs/benchmarks.md, between two markers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lines import parse_rate
from netlab import Lab, shaping
from script import run_script
from tables import DOCS, publish, table_head, table_row

import thinwire as tw
from thinwire.comm import Communicator, Handle
from thinwire.lab.bench.workers import joined
from thinwire.plan import Link, Method, Network, Speeds, Workload, predict_method, tensors_of
from thinwire.plan.measure import measure_together
from thinwire.plan.predict import programs_of
from thinwire.plan.record import Action, Program, Wait

PARAMETERS = 4_000_000
ROUNDS, MOST_ROUNDS, SECONDS = 5, 60, 2.0  # at least so many rounds, more of those that take less time
SPARSE = tw.chain(tw.TopK(0.01), tw.QSGD(bits=4))
METHODS = {
    "dense": tw.Gradients(tw.Mean(exchange="all_reduce")),
    "4 bits, all_gather": tw.Gradients(tw.Mean(tw.QSGD(bits=4), exchange="all_gather")),
    "top-k 1 %, 4 bits, all_gather": tw.Gradients(tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="all_gather")),
    "top-k 1 %, 4 bits, sparse_reduce": tw.Gradients(tw.Mean(SPARSE, tw.ErrorFeedback(), exchange="sparse_reduce")),
    "PowerSGD, rank 4": tw.Gradients(tw.PowerSGD(rank=4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--rows", type=Path, help="keeps the rows of this call and of earlier ones")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options.worker, options.parameters)
    for rate in options.rates:  # a wrong one is found before the first measurement
        parse_rate(rate)
    rows = [
        row for hosts in options.hosts for rate in options.rates for row in compare(hosts, rate, options.parameters)
    ]
    if options.rows is not None:
        earlier = json.loads(options.rows.read_text()) if options.rows.exists() else []
        rows = sorted([*earlier, *rows], key=lambda row: (row["hosts"], row["rate"]))
        options.rows.write_text(json.dumps(rows))
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    lines = [*table(rows), "", f"Median error: {100 * median(errors):.0f} %."]
    publish(DOCS / "benchmarks.md", "plan, network lab", lines)


def compare(hosts: int, rate: str, parameters: int) -> list[dict[str, Any]]:
    """A row for each method on one network."""
    with Lab(hosts, rate) as lab:
        found = lab.ask([sys.executable, __file__, "--parameters", str(parameters), "--worker"])
    # A burst goes out at once after a pause, which a measured rate does not show.
    network = Network(hosts, outer=replace(Link(**found["link"]), burst_bytes=shaping(parse_rate(rate))[1]))
    print(network.outer, flush=True)
    workload, no_work = Workload(tensors_of(parameters), 0.0), Speeds(copy_bytes_per_second=float("inf"))
    rows = []
    for name, measured in found["seconds"].items():
        predicted, _ = predict_method(Method(name, METHODS[name]), workload, network, no_work)
        rows.append({"hosts": hosts, "rate": rate, "method": name, "measured": measured, "predicted": predicted})
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a table."""
    lines = table_head(["hosts", "rate", "method", "measured", "predicted", "error"])
    for row in rows:
        times = [f"{1e3 * row[key]:.1f} ms" for key in ("measured", "predicted")]
        error = f"{100 * (row['predicted'] / row['measured'] - 1):+.0f} %"
        lines.append(table_row([row["hosts"], row["rate"], row["method"], *times, error]))
    return lines


def work(file: Path, parameters: int) -> None:
    """One host: measure the links and every method; rank 0 writes them to `file`."""
    torch.set_num_threads(1)
    with joined() as comm:
        link = measure_together(comm, repetitions=25, large_bytes=2_000_000, typical=min)
        seconds = {name: communication_seconds(comm, strategy, parameters) for name, strategy in METHODS.items()}
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps({"link": link.__dict__, "seconds": seconds}))


def communication_seconds(comm: Communicator, strategy: tw.Gradients, parameters: int) -> float:
    """Of the slowest worker, in the round that other programs disturbed least."""
    (made,) = programs_of(strategy, tensors_of(parameters), comm.size, 1)
    programs = [node[0].shifted(comm.rank, comm.size) for _, node in made]
    fastest, done, num_rounds = float("inf"), 0, ROUNDS
    while done < num_rounds:
        comm.barrier()
        start = time.perf_counter()
        play(comm, programs)
        taken = max(comm.gather_objects(time.perf_counter() - start))
        if done == 0:  # it opened connections
            num_rounds = max(ROUNDS, min(MOST_ROUNDS, round(SECONDS / taken)))
        else:
            fastest = min(fastest, taken)
        done += 1
    return fastest


def play(comm: Communicator, programs: list[Program]) -> None:
    """Send what a round sends, in the order in which the planner lets a worker do it."""
    handles: list[list[Handle]] = [[] for _ in programs]
    stages = [deque(program.stages) for program in programs]

    def advance(number: int) -> None:
        perform(comm, stages[number].popleft() if stages[number] else (), handles[number])

    for bucket, program in enumerate(programs):
        perform(comm, program.step, handles[bucket])
        for earlier in range(bucket):
            advance(earlier)
    for bucket, program in enumerate(programs):
        while True:
            for under_way in range(bucket, len(programs)):
                advance(under_way)
            if not stages[bucket]:
                break
        perform(comm, program.wait, handles[bucket])


def perform(comm: Communicator, actions: Sequence[Action], handles: list[Handle]) -> None:
    """Issue operations, and wait for those of the same bucket."""
    for action in actions:
        if isinstance(action, tuple) and len(action) == 1:
            # Every worker does the same with peers as far away, so what comes has the size of what goes the other way.
            around = {(2 * comm.rank - peer) % comm.size: buffer(round(n)) for peer, n in action[0].sends}
            handles.append(comm.exchange({peer: buffer(round(n)) for peer, n in action[0].sends}, around))
        elif isinstance(action, tuple):  # no method here broadcasts
            first, last = (step.sends[0][1] for step in action)
            is_sum = first == last
            handles.append(
                comm.all_reduce(buffer(round(last * comm.size)).view(torch.float32))
                if is_sum
                else comm.all_gather(buffer(round(last)), variable=True)
            )
        elif isinstance(action, Wait):
            handles[action.operation].wait()


def buffer(num_bytes: int) -> torch.Tensor:
    """Bytes to send or to receive."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


if __name__ == "__main__":
    run_script(main)
