"""What the operating system says was sent: the counters of TCP connections, and of the loopback interface.

    cd tests; python -m helpers.traffic

runs every collective and prints, as JSON, the ledgers beside the counters. Run it in a network namespace of its own,
where the loopback interface carries nothing else.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from thinwire.plan.measure import connections

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


def controls() -> Iterator[tuple[socket.socket, str]]:
    """Each connection of this process, open until the next one, and its congestion control."""
    for connection in connections():
        yield connection, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def tcp_bytes() -> dict[tuple, tuple[int, int]]:
    """Bytes that this process has sent and received over each of its TCP connections, once all are acknowledged."""
    deadline = time.monotonic() + 200
    while any(unacknowledged_bytes(connection) for connection in connections()) and time.monotonic() < deadline:
        time.sleep(0.002)
    counted = {}
    for connection in connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        sent, received = (struct.unpack_from("Q", info, place)[0] for place in (BYTES_ACKED, BYTES_RECEIVED))
        counted[connection.getsockname(), connection.getpeername()] = sent, received
    return counted


def unacknowledged_bytes(connection: socket.socket) -> int:
    """What waits in the connection's send buffer, or was sent and not acknowledged yet."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


def difference(after: dict[tuple, tuple[int, int]], before: dict[tuple, tuple[int, int]]) -> tuple[int, int]:
    """What was sent and received in between; connections of an earlier test may have been closed since."""
    pairs = [(counts, before.get(ends, (0, 0))) for ends, counts in after.items()]
    return sum(new[0] - old[0] for new, old in pairs), sum(new[1] - old[1] for new, old in pairs)


def bytes_sent_to(comm) -> list[int]:
    """Bytes that this process has sent to each of the others so far, over all of its connections. All workers call it."""
    comm.barrier()
    counted = tcp_bytes()
    owner = {}  # by both ends: connections to different listeners may share a local port, also those of two processes
    for rank, ends in enumerate(comm.gather_objects([[list(own), list(other)] for own, other in counted])):
        owner |= {(tuple(own), tuple(other)): rank for own, other in ends}
    sent = [0] * comm.size
    for (own, other), (num_bytes, _) in counted.items():
        if (other, own) in owner:
            sent[owner[other, own]] += num_bytes
    return sent


def measure(comm, name: str) -> dict:
    """The ledger and the counters of this worker's connections, for one operation and the barrier before it.

    Without that barrier, a worker that is ahead could send its part before the others look at their counters.
    """
    comm.barrier()
    before, ledger = tcp_bytes(), comm.ledger.snapshot()
    comm.barrier()
    run_operation(comm, name)
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
    from multiprocessing import forkserver

    from helpers.spawn import spawn

    forkserver.set_forkserver_preload(["torch.distributed", "thinwire.comm", "helpers.spawn"])

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
