"""How long workers take to average a tensor on a long line: averagers over our connections and over Gloo, beside hivemind.

    python benchmarks/peers.py                                          16 MB on `continent`, some ten minutes
    python benchmarks/peers.py --line ocean --congestion bbr --megabytes 4

Two hosts of the network lab. Each row is a run of its own: averagings for `--warm` seconds, then the median, least and most of
`--repetitions`. Floor: the time that the bytes sent by one worker take at the line's rate. hivemind averages with
`DecentralizedAverager`; its search for partners is not in its time, because it can run beside the training, and it does not
report its bytes. Its rows are left out if it is not installed (`pip install hivemind "numpy<2.4"`; 1.1.12 fails silently with
later ones). Linux and root only, as `netlab.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

from lines import LINES
from netlab import Lab
from script import run_script

AVERAGERS = ("Mean()", "Mean(QSGD(bits=8))", "Mean(QSGD(bits=4))")
ROWS = [(transport, averager) for transport in ("tcp", "gloo") for averager in AVERAGERS]
HIVEMIND = [("hivemind", "NoCompression"), ("hivemind", "Uniform8BitQuantization")]


def row_of(line: str, congestion: str, transport: str, what: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of one row, of a run of its own."""
    with Lab(2, line, congestion=congestion) as lab:
        numbers = [str(n) for n in (options.megabytes, options.warm, options.repetitions)]
        return lab.ask([sys.executable, __file__, "--worker", transport, what, *numbers])


def work(transport: str, what: str, megabytes: str, warm: str, repetitions: str, file: str) -> None:
    """One host."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(
        round(1e6 * float(megabytes)) // 4000, 1000, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    mean = x[:1].clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    average, result = with_hivemind(x, what) if transport == "hivemind" else with_thinwire(x, what, transport)
    average()
    # A codec loses a little; more than a tenth is a mistake.
    if (result()[:1] - mean).square().mean() > 0.1 * mean.square().mean():
        sys.exit(f"{transport} {what}: the result is not the mean")
    until, go_on = time.perf_counter() + float(warm), torch.ones(1)
    while go_on.item():
        average()
        go_on.fill_(time.perf_counter() < until)
        dist.broadcast(go_on, 0)
    results = [average() for _ in range(int(repetitions))]
    seconds = [s for s, _ in results]
    if dist.get_rank() == 0:
        row = {"seconds": median(seconds), "least": min(seconds), "most": max(seconds), "bytes": results[-1][1]}
        Path(file).write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)  # hivemind's processes would wait for each other


def with_thinwire(x, what: str, transport: str):
    """A function that averages once and gives its seconds and the bytes sent here; and one that gives the result."""
    import torch.distributed as dist

    from thinwire import parse
    from thinwire.comm.transport import connect

    comm, averager = connect(transport), parse(what)
    tensors = [("x", x)]
    state = averager.init(tensors, comm)

    def average() -> tuple[float, float]:
        dist.barrier()
        sent, begin = comm.ledger.bytes_sent, time.perf_counter()
        averager.step(state, tensors, comm).wait()
        seconds = time.perf_counter() - begin
        averager.commit(state)
        return seconds, comm.ledger.bytes_sent - sent

    return average, lambda: x


def with_hivemind(x, what: str):
    """The same, by hivemind."""
    import hivemind
    import torch.distributed as dist
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    from thinwire.comm.addresses import own_address

    rank, place = dist.get_rank(), [f"/ip4/{own_address()[1]}/tcp/0"]
    addresses = [None]
    if rank == 0:
        dht = hivemind.DHT(host_maddrs=place, start=True)
        addresses = [[str(address) for address in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(addresses, 0)
    if rank:
        dht = hivemind.DHT(initial_peers=addresses[0], host_maddrs=place, start=True)
    averager = DecentralizedAverager(
        [x], dht, start=True, prefix="peers", target_group_size=2, min_matchmaking_time=2.0,
        compression=getattr(hivemind.compression, what)(),
    )  # fmt: skip

    def average() -> tuple[float, float]:
        step = averager.step(wait=False, require_trigger=True, timeout=300)
        while step.stage != AveragingStage.AWAITING_TRIGGER:
            time.sleep(0.01)
        dist.barrier()
        begin = time.perf_counter()
        step.allow_allreduce()
        step.result()
        return time.perf_counter() - begin, float("nan")

    def result():
        with averager.get_tensors() as tensors:
            return tensors[0].clone()

    return average, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--line", default="continent", choices=list(LINES))
    parser.add_argument("--congestion", default="cubic", choices=["cubic", "bbr"])
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--warm", type=float, default=10.0, help="seconds before the measurement (default 10)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--over", nargs="+", default=["tcp", "gloo", "hivemind"], choices=["tcp", "gloo", "hivemind"])
    options = parser.parse_args()
    rate = min(LINES[options.line].up, LINES[options.line].down)
    rows = [row for row in ROWS + (HIVEMIND if importlib.util.find_spec("hivemind") else []) if row[0] in options.over]
    print(f"{options.megabytes:g} MB, two workers, {options.line}, {options.congestion}")
    print(
        f"{'over':9} {'what':24} {'MB sent':>8} {'floor s':>8} {'seconds':>8} {'least':>7} {'most':>7}  load",
        flush=True,
    )
    for transport, what in rows:
        row = row_of(options.line, options.congestion, transport, what, options)
        floor = 8 * row["bytes"] / rate
        print(
            f"{transport:9} {what:24} {row['bytes'] / 1e6:8.2f} {floor:8.2f} {row['seconds']:8.2f} {row['least']:7.2f} "
            f"{row['most']:7.2f} {os.getloadavg()[0]:5.1f}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        run_script(main)
