"""What the operating system says was sent: the counters of TCP connections, and of the loopback interface.

    cd tests; python -m helpers.traffic

runs every collective and prints, as JSON, the ledgers beside the counters. Run it in a network namespace of its own,
where the loopback interface carries nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import time
from pathlib import Path

import torch

NUM_BYTES = 6_000_000
BYTES_ACKED, BYTES_RECEIVED = 120, 128  # offsets in struct tcp_info of linux/tcp.h, two uint64
HEADER_BYTES = 20 + 20  # of a packet, at the least: IPv4, TCP; the loopback interface counts no Ethernet header
OPERATIONS = ["all_reduce", "all_gather", "all_gather_uneven", "all_to_all", "exchange", "broadcast"]


def run_operation(comm, name: str) -> None:
    """One large collective; each worker's share depends on the rank where the collective allows it."""
    size, rank = comm.size, comm.rank
    x = torch.ones(NUM_BYTES // 4)
    if name == "all_reduce":
        comm.all_reduce(x).wait()
    elif name == "all_gather":
        comm.all_gather(x).wait()
    elif name == "all_gather_uneven":
        sizes = [NUM_BYTES // 4 // (1 + r) for r in range(size)]
        comm.all_gather(x[: sizes[rank]], sizes).wait()
    elif name == "all_to_all":
        comm.all_to_all(list(x.chunk(size)), [len(x.chunk(size)[rank])] * size).wait()
    elif name == "exchange":
        comm.exchange({(rank + 1) % size: x}, {(rank - 1) % size: torch.empty_like(x)}).wait()
    elif name == "broadcast":
        comm.broadcast(x, root=1).wait()


def tcp_bytes() -> dict[tuple, tuple[int, int]]:
    """Bytes that this process has sent (and that were acknowledged) and received over each of its TCP connections."""
    counted = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                ends = connection.getsockname(), connection.getpeername()
        except OSError:
            continue  # closed by now, or not a TCP connection
        counted[ends] = tuple(struct.unpack_from("Q", info, place)[0] for place in (BYTES_ACKED, BYTES_RECEIVED))
    return counted


def difference(after: dict[tuple, tuple[int, int]], before: dict[tuple, tuple[int, int]]) -> tuple[int, int]:
    """What was sent and received in between; connections of an earlier test may have been closed since."""
    pairs = [(counts, before.get(ends, (0, 0))) for ends, counts in after.items()]
    return sum(new[0] - old[0] for new, old in pairs), sum(new[1] - old[1] for new, old in pairs)


def measure(comm, name: str) -> dict:
    """The ledger and the counters of this worker's connections, for one operation."""
    comm.barrier()
    time.sleep(0.05)  # for the last acknowledgements
    before, ledger = tcp_bytes(), comm.ledger.snapshot()
    run_operation(comm, name)
    time.sleep(0.05)
    counted, after = comm.ledger.since(ledger), tcp_bytes()
    comm.barrier()
    return {
        "ledger": (counted.bytes_sent, counted.bytes_received),
        "tcp": difference(after, before),
        "messages": counted.messages,
    }


def loopback_payload() -> int:
    """Bytes sent without headers, of this process's network namespace, which /sys would not show."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[9]) - HEADER_BYTES * int(fields[10])


def ledger_of(comm, name: str) -> int:
    run_operation(comm, name)
    return comm.ledger.bytes_sent


def main() -> None:
    from helpers.spawn import spawn

    for size in (2, 3, 4):
        for name in OPERATIONS:
            # On a machine with other work TCP sends some segments twice; the least of a few counts has the fewest of them.
            counts = []
            for _ in range(4):
                before = loopback_payload()
                ledgers = spawn(size, ledger_of, name)
                counts.append(loopback_payload() - before)
                if counts[-1] <= 1.01 * sum(ledgers):
                    break
            print(json.dumps([size, name, sum(ledgers), min(counts)]))


if __name__ == "__main__":
    main()
