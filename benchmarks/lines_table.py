"""How much of a line collectives use: our own connections beside Gloo, on the lines of the network lab.

    python benchmarks/lines_table.py                                                        all rows, over an hour
    python benchmarks/lines_table.py --lines ocean --congestion cubic --megabytes 4 100     some of them
    python benchmarks/lines_table.py --hosts 4 --json table.json

Each line, congestion control, transport and size is a run of its own: warm up for `--warm` seconds, then a median
of several. Share: the time of the bytes that each worker sends at the line's rate, by the time that the operation took; of
unequal lines, the slower direction counts. Processor: seconds of one worker in one operation, all its threads. Linux and root
only, as `netlab.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

from lines import LINES
from netlab import Lab
from script import run_script

OPERATIONS = ("all_reduce", "all_gather", "exchange")
WARM_BYTES, WARM_LARGE_BYTES = 4_000_000, 8_000_000  # large messages have connections of their own
REPETITIONS, MOST_SECONDS = 9, 20.0


def rows_of(
    hosts: int, line: str, congestion: str, transport: str, megabytes: float, warm: float
) -> dict[str, list[float]]:
    """Seconds and processor seconds by operation, of a run of its own."""
    with Lab(hosts, line, congestion=congestion) as lab:
        return lab.ask([sys.executable, __file__, "--worker", transport, str(megabytes), str(warm)])


def work(transport: str, megabytes: str, warm: str, file: str) -> None:
    """One host."""
    import torch

    from thinwire.lab.bench.workers import joined

    torch.set_num_threads(1)
    with joined(transport=transport) as comm:  # type: ignore[arg-type]
        following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x = torch.zeros(round(1e6 * float(megabytes)) // 4)
        # Small messages would not open the connections of large ones.
        warming = torch.zeros((WARM_LARGE_BYTES if 4 * x.numel() > WARM_BYTES else WARM_BYTES) // 4)
        received = torch.zeros_like(x)
        operations = {
            "all_reduce": lambda: comm.all_reduce(x),
            "all_gather": lambda: comm.all_gather(x),
            "exchange": lambda: comm.exchange({following: x}, {before: received}),
        }
        until = time.perf_counter() + float(warm)
        while comm.all_true(time.perf_counter() < until):
            comm.all_reduce(warming).wait()
        result = {}
        for name in OPERATIONS:
            times, processor = [], time.process_time()
            until = time.perf_counter() + MOST_SECONDS
            while len(times) < REPETITIONS and comm.all_true(len(times) < 1 or time.perf_counter() < until):
                comm.barrier()
                begin = time.perf_counter()
                operations[name]().wait()
                times.append(time.perf_counter() - begin)
            result[name] = max(comm.gather_objects([median(times), (time.process_time() - processor) / len(times)]))
        if comm.rank == 0:
            Path(file).write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--lines", nargs="+", default=list(LINES), choices=list(LINES))
    parser.add_argument("--congestion", nargs="+", default=["cubic", "bbr"])
    parser.add_argument("--megabytes", nargs="+", type=float, default=[0.1, 4.0, 100.0])
    parser.add_argument("--transports", nargs="+", default=["tcp", "gloo"], choices=["tcp", "gloo"])
    parser.add_argument("--warm", type=float, default=10.0, help="seconds before the measurement (default 10)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    columns = "".join(f" {name + ' s':>8} {'share':>6} {'processor s':>11}" for name in options.transports)
    others = options.hosts - 1
    copies = {"all_reduce": 2 * others / options.hosts, "all_gather": others, "exchange": 1}  # that a worker sends
    print(f"{'line':10} {'control':8} {'MB':>6} {'operation':11}{columns}   load", flush=True)
    rows = []
    for line in options.lines:
        rate = min(LINES[line].up, LINES[line].down)
        for congestion in options.congestion:
            for megabytes in options.megabytes:
                measured = {
                    t: rows_of(options.hosts, line, congestion, t, megabytes, options.warm) for t in options.transports
                }
                for operation in OPERATIONS:
                    cells = ""
                    for transport in options.transports:
                        seconds, processor = measured[transport][operation]
                        share = copies[operation] * 8e6 * megabytes / rate / seconds
                        cells += f" {seconds:8.3f} {share:6.3f} {processor:11.3f}"
                        rows.append(
                            {"hosts": options.hosts, "line": line, "congestion": congestion, "megabytes": megabytes,
                             "operation": operation, "transport": transport, "seconds": seconds, "share": share,
                             "processor_seconds": processor}
                        )  # fmt: skip
                    load = f"{os.getloadavg()[0]:6.1f}"
                    print(f"{line:10} {congestion:8} {megabytes:6g} {operation:11}{cells} {load}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        run_script(main)
