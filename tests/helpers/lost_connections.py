"""What a worker does in the tests of connections that are lost, plain and encrypted."""

from __future__ import annotations

import ctypes
import socket
import time

import torch

from thinwire.comm.sockets import SMALL_PACKET
from thinwire.testing import check_communicator

from .spawn import retire
from .traffic import connections


def reset(connection: socket.socket) -> None:
    """Break a connection off, as who gives it up does: connecting to an address of no family disconnects."""
    nowhere = ctypes.create_string_buffer(16)
    assert ctypes.CDLL(None).connect(connection.fileno(), nowhere, len(nowhere)) == 0


def loses_all_connections(comm, numel: int) -> tuple[bool, int]:
    """In the midst of an exchange, again and again, rank 1 resets every connection that its process has."""
    retire()  # the outer process group is broken too
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = torch.arange(numel, dtype=torch.int32) + comm.rank
    received = torch.zeros_like(sent)
    for round in range(5):
        handle = comm.exchange({right: sent}, {left: received})
        if comm.rank == 1:
            time.sleep(0.003 * round)
            for connection in connections():
                reset(connection)
        handle.wait()
        assert torch.equal(received, sent - comm.rank + left), round
        received.zero_()
    check_communicator(lambda operation: operation(comm))
    if comm.rank == 1:  # larger packets may have been lost on the way, so new connections send small ones
        segments = [connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) for connection in connections()]
        assert segments and max(segments) < SMALL_PACKET == comm.packet_bytes, segments
    comm.barrier()  # a worker that ends closes its connections, and rank 1 looks at them
    return True, comm.counts(right).resent
