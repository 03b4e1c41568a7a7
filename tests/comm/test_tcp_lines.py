"""Connections of our own that are slow, on lines of the network lab too: they are not dead."""

from __future__ import annotations

import socket
import subprocess
import sys

import netlab
import pytest
import torch
from helpers.lab import needs_lab

_engine = pytest.importorskip("thinwire.comm.tcp._engine")


def test_a_peer_that_does_not_read_loses_no_connection():
    """A worker that is late keeps only so much of what comes early. Its connections were given up after 10 seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    engine, memory = _engine.Engine(0, 2, 60.0), torch.zeros(1 << 25, dtype=torch.uint8)
    engine.attach(1, ours.detach())
    engine.post([(1, 0, memory.data_ptr(), memory.nbytes)], [])
    with theirs:
        assert engine.events(12.5) == []
    assert engine.events(10.0) == [(_engine.RESET, 1, 0)]  # bytes were left unread


# Rank 0 sends so many bytes to rank 1. Both print whether they have lost a connection: later ones have small packets.
SENDS = """
import datetime, os, sys
import torch, torch.distributed as dist
from thinwire.comm.tcp import TcpCommunicator
rank, size, numel = int(os.environ["RANK"]), 2, int(sys.argv[1])
store = dist.TCPStore(os.environ["MASTER_ADDR"], 29500, size, rank == 0, timeout=datetime.timedelta(seconds=120))
with TcpCommunicator.from_store(store, rank, size, interface="eth0") as comm:
    sent, received = torch.arange(numel) % 251, torch.empty(numel, dtype=torch.uint8)
    comm.exchange({} if rank else {1: sent.to(torch.uint8)}, {0: received} if rank else {}).wait()
    assert rank == 0 or torch.equal(received, sent.to(torch.uint8))
    comm.barrier()
    print("lost a connection" if comm.packet_bytes else "lost none", flush=True)
"""


@needs_lab("long queues are")
def test_bytes_that_wait_in_a_long_queue_are_no_dead_line(capfd):
    """At 64 kb/s they wait for up to 20 seconds, and so do the answers to probes of connections on which nothing is sent."""
    with netlab.Lab(2, "1gbit", congestion="reno") as lab:
        for port in ("port0", "port1"):
            queue = "rate 64kbit burst 6000 limit 250000"
            command = f"tc -n {lab.switch} qdisc replace dev {port} root handle 9: tbf {queue}"
            subprocess.run(command.split(), check=True)
        assert lab.run([sys.executable, "-c", SENDS, "160000"]) == 0
    said = capfd.readouterr().out
    assert said.count("lost none") == 2, said


# Rank 0 expects nothing, and keeps 256 KB. Rank 1 sends more, and looks for events once what is left is held back.
HOLDS_BACK = """
import os, socket, time
import torch, torch.distributed as dist
from thinwire.comm.tcp import _engine
rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], 29500, 2, rank == 0)
engine, address = _engine.Engine(rank, 2, 60.0, early_bytes=1 << 18), (os.environ["MASTER_ADDR"], 29511)
if rank == 0:
    with socket.create_server(address) as listener:
        store.set("listens", "")
        line, _ = listener.accept()
else:
    store.get("listens")
    line = socket.create_connection(address)
engine.attach(1 - rank, line.detach())
if rank == 1:
    memory, chunks = torch.zeros(4 << 20, dtype=torch.uint8), -1
    engine.post([(0, 0, memory.data_ptr(), memory.nbytes)], [])
    while (before := chunks) != (chunks := engine.counts(0).chunks):
        time.sleep(0.5)
    engine.events(0.01)  # from before it was held back
    assert engine.counts(0).round_trip_seconds > 0.01 and 0 < chunks < 20, engine.counts(0)
    events = engine.events(1.0)
    assert events == [], events
    store.set("is_over", "")
else:  # it holds the store, and ends as soon as it has this
    store.get("is_over")
"""


@needs_lab("long lines are")
def test_a_message_that_the_peer_does_not_expect_yet_asks_for_no_connections():
    """It asked for more every four round trips, up to 65, though the line was idle."""
    with netlab.Lab(2, "1gbit,round_trip=20ms") as lab:
        assert lab.run([sys.executable, "-c", HOLDS_BACK]) == 0
