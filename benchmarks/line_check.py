"""`netlab.py --check`: measures the line between hosts 0 and 1, and compares it with what was asked for.

Datagrams measure rate, round trip, loss and reordering, because TCP's congestion control hides them. One and sixteen TCP
connections then show what a program gets.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from netlab import Lab

PACKET = 1472  # bytes of a datagram that fills a packet of 1,500 bytes
HEADERS = 28
SO_RCVBUFFORCE = 33  # Linux; beyond the limit for ordinary users
CATCH_UP_SECONDS = 0.04  # after a pause of the scheduler, a sender makes up for no more than this
PINGS, PING_SECONDS = 60, 0.02
LOST_SECONDS = 10.0  # without a datagram: the end of the stream was lost
Result = TypeVar("Result")
LAST = 0xFFFFFFFF  # in place of the number, in a datagram that ends a stream; the stream follows


def check(lab: Lab, seconds: float) -> set[str]:
    """Measure each value for some seconds, print a table, and return the names of the values that are not as asked."""
    here, there = lab.lines[0], lab.lines[1]
    one_site = lab.sites[0] == lab.sites[1]
    rates = {"0 to 1": min(here.up, there.down), "1 to 0": min(there.up, here.down)}
    measured = lab.ask([sys.executable, __file__, json.dumps(rates), str(seconds)])

    def between(name: str) -> float:
        return 0.0 if one_site else (getattr(here, name) + getattr(there, name)) / 2

    asked, got = between("round_trip"), measured["round_trip"]
    fits = abs(got - asked) <= max(0.1 * asked, 0.002) + between("jitter")
    rows = [("round trip", asked, got, "s", fits)]
    for way, rate in rates.items():
        got = measured[way]
        rows.append((f"rate, {way}", rate / 1e6, got["rate"] / 1e6, "Mb/s", abs(got["rate"] - rate) <= 0.1 * rate))
        for name in ("loss", "reorder"):
            asked = between(name)
            expected = asked * got["sent"]
            fits = abs(got[name] * got["sent"] - expected) <= 4 * math.sqrt(expected) + 3
            rows.append((f"{name}, {way}", asked, got[name], f"of {got['sent']:,} packets", fits))
    print(f"{'':16} {'asked':>9} {'measured':>9}")
    for name, asked, got, unit, fits in rows:
        print(f"{name:16} {asked:9.4g} {got:9.4g} {unit}{'' if fits else '   DIFFERS'}")
    rate = rates["1 to 0"]
    for connections, goodput in measured["tcp"].items():
        print(
            f"TCP goodput, 1 to 0, {connections} connections: {goodput / 1e6:.1f} Mb/s, {goodput / rate:.3f} of the rate"
        )
    return {name for name, *_, fits in rows if not fits}


def work(rates: dict[str, float], seconds: float, file: Path) -> None:
    """One host. Host 1 connects, sends first, and drives; both go through the same phases."""
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank > 1:
        return
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 25)
    if rank == 0:
        datagrams.bind(address)
        with socket.create_server(address, backlog=64) as server:
            phases(file, rates, seconds, datagrams, server.accept()[0], address, server)
    else:
        datagrams.connect(address)
        phases(file, rates, seconds, datagrams, connect(address), address, None)


def phases(
    file: Path,
    rates: dict[str, float],
    seconds: float,
    datagrams: socket.socket,
    connection: socket.socket,
    address: tuple[str, int],
    server: socket.socket | None,
) -> None:
    """Measure; host 0 has the server, host 1 writes the file."""
    result: dict[str, Any] = {}
    control, rank = connection.makefile("rwb"), 0 if server is not None else 1
    if rank == 0:
        while (received := datagrams.recvfrom(PACKET))[0] != b"end":
            datagrams.sendto(*received)
        datagrams.connect(received[1])
    else:
        result["round_trip"] = ping(datagrams)
    for way, rate in rates.items():
        sender = int(way[0])
        if rank == sender:
            swap(control)
            send(datagrams, 0, 1.2 * rate, seconds / 2)
            steady = send(datagrams, 1, rate / 2, seconds)
            got = swap(control)
            result[way] = {"rate": got[0]["rate"], "sent": steady, "loss": 1 - got[1]["received"] / steady,
                           "reorder": got[1]["late"] / steady}  # fmt: skip
        else:
            swap(control)
            swap(control, [receive(datagrams, stream) for stream in range(2)])
    result.update(swap(control, result))
    result["tcp"] = {}
    for connections in (1, 16):
        swap(control)
        goodput = fill(address, connections, seconds) if server is None else drain(server, connections, seconds)
        result["tcp"][connections] = swap(control, goodput)
    if rank == 1:
        file.write_text(json.dumps(result))


def swap(control: BinaryIO, message: Any = None) -> Any:
    """Wait for the other host, and exchange messages with it."""
    control.write(json.dumps(message).encode() + b"\n")
    control.flush()
    return json.loads(control.readline())


def ping(datagrams: socket.socket) -> float:
    """The least seconds of a round trip on an idle line."""
    seconds = []
    datagrams.settimeout(1.0)
    for number in range(PINGS):
        start = time.monotonic()
        datagrams.send(struct.pack("!I", number))
        try:
            while datagrams.recv(PACKET) != struct.pack("!I", number):
                pass
            seconds.append(time.monotonic() - start)
        except TimeoutError:
            pass
        time.sleep(PING_SECONDS)
    # Any of these may be lost.
    for _ in range(8):
        datagrams.send(b"end")
    datagrams.settimeout(None)
    return min(seconds)


def send(datagrams: socket.socket, stream: int, rate: float, seconds: float) -> int:
    """Send numbered datagrams at `rate` bits per second, headers included; returns how many, one at least."""
    body, number, interval = bytearray(PACKET), 0, 8 * (PACKET + HEADERS) / rate
    due = end = time.monotonic()
    end += seconds
    while (now := time.monotonic()) < end or number == 0:  # a busy machine may start it late
        due = max(due, now - CATCH_UP_SECONDS)
        while due <= now:
            struct.pack_into("!I", body, 0, number)
            datagrams.send(body)
            number, due = number + 1, due + interval
        time.sleep(min(0.0005, interval))
    time.sleep(0.1)  # the queue drains
    # Any of these may be lost.
    for _ in range(8):
        datagrams.send(struct.pack("!II", LAST, stream))
        time.sleep(0.01)
    return number


def receive(datagrams: socket.socket, stream: int) -> dict[str, float]:
    """Count the datagrams of one stream: bits per second, how many came, and how many after a later one."""
    buffer, received, late, highest = bytearray(PACKET), 0, 0, -1
    first = last = 0.0
    datagrams.settimeout(LOST_SECONDS)
    while True:
        try:
            size = datagrams.recv_into(buffer)
        except TimeoutError:
            break
        number = struct.unpack_from("!I", buffer)[0]
        if number == LAST and struct.unpack_from("!I", buffer, 4)[0] == stream:
            break
        if size < PACKET:
            continue
        last = time.monotonic()
        first = first or last
        received += 1
        late += number < highest
        highest = max(highest, number)
    seconds = last - first  # none where a busy machine let the sender send only one
    rate = 8 * (PACKET + HEADERS) * (received - 1) / seconds if seconds else 0.0
    return {"rate": rate, "received": received, "late": late}


def fill(address: tuple[str, int], connections: int, seconds: float) -> None:
    """Send as much as TCP allows over some connections for some seconds, and drop what is still queued."""

    def send_for(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@qq", 0, 100_000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        data, end = bytes(1 << 16), time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                connection.send(data)
        connection.close()

    opened = [connect(address) for _ in range(connections)]
    for connection in opened:
        connection.recv(1)
    at_once(send_for, opened)


def drain(server: socket.socket, connections: int, seconds: float) -> float:
    """Bits per second that came over some connections within some seconds."""

    def drain_one(connection: socket.socket) -> int:
        buffer, count, end = bytearray(1 << 18), 0, time.monotonic() + seconds
        connection.settimeout(0.1)
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError, ConnectionError):
                count += connection.recv_into(buffer)
        connection.close()
        return count

    accepted = [server.accept()[0] for _ in range(connections)]
    for connection in accepted:
        connection.send(b"!")  # the other host waits for it, or it could end before it is accepted
    return 8 * sum(at_once(drain_one, accepted)) / seconds


def at_once(function: Callable[[socket.socket], Result], connections: list[socket.socket]) -> list[Result]:
    """Call the function with all connections, each in a thread of its own."""
    with ThreadPoolExecutor(len(connections)) as pool:
        return list(pool.map(function, connections))


def connect(address: tuple[str, int]) -> socket.socket:
    for _ in range(200):  # the other end may not listen yet
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise SystemExit(f"line_check: nobody listens at {address}")


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
