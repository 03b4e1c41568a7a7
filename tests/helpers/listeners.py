"""Which sockets of some processes wait for connections, from Linux's own tables; and callers that attack them."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Iterable
from pathlib import Path

from thinwire.comm import Credentials

LOOPBACK = "0100007F"


def listening(pid: int | str = "self") -> set[tuple[str, int]]:
    """Address, as a hexadecimal number, and port of each socket of a process that waits for connections."""
    links = set[str]()
    with contextlib.suppress(OSError):  # it has ended
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(os.readlink(path))
    found = set[tuple[str, int]]()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                row = line.split()
                address, _, port = row[1].partition(":")
                if row[3] == "0A" and f"socket:[{row[9]}]" in links:
                    found.add((address, int(port, 16)))
    return found


ATTACKS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "kill": b"POST /replica/worker_000000/kill HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "PyTorch's store": b"\x00" + struct.pack("<Q", 2**60) + b"key",
    "a size of 2^60": struct.pack("<qB", 2**60, 1) * 100,
    "rubbish for a pickle": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f." + bytes(range(256)) * 20,
    "half a handshake": b"\x16\x03\x01\x40\x00\x01",
    "an old greeting": struct.pack("<q", 0) + bytes(64),
}


def answers(port: int, words: bytes, seconds: float = 1.0) -> bytes:
    """What a caller without a certificate gets to read, after it has sent these words and no more."""
    got = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), seconds) as connection:
        connection.sendall(words)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(4096):
            got += part
    return got


def said_over_tls(port: int, credentials: Credentials | None, words: bytes = b"\x00" * 100) -> bytes:
    """What a caller gets to read who makes the handshake without checking, with a certificate of another run or with none."""
    if credentials is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
    else:
        context = credentials.context(server=False)
    context.verify_mode = ssl.CERT_NONE
    got = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2.0) as raw:
        connection = context.wrap_socket(raw)
        with contextlib.suppress(OSError):
            connection.sendall(words)
            while part := connection.recv(4096):
                got += part
        connection.close()
    return got


class Attacker:
    """Attacks each socket on which some processes listen, once; a third of them with many silent connections as well.

    Args:
        other: credentials of another run.

    Attributes:
        ports: that were attacked.
    """

    def __init__(self, other: Credentials):
        self._other = other
        self.ports = set[int]()
        self._heard: list[tuple[str, bytes]] = []
        self._silent: list[socket.socket] = []

    def attack(self, pids: Iterable[int]) -> None:
        """Attack what is new."""
        for pid in pids:
            for address, port in listening(pid):
                assert address == LOOPBACK, address  # the interface of the run
                if port not in self.ports:
                    self.ports.add(port)
                    self._attack_one(port)

    def _attack_one(self, port: int) -> None:
        for _ in range(100 if len(self.ports) % 3 == 1 else 0):
            with contextlib.suppress(OSError):
                self._silent.append(socket.create_connection(("127.0.0.1", port), 2.0))
        for name, words in ATTACKS.items():
            self._heard.append((name, answers(port, words)))
        for caller in (None, self._other):
            self._heard.append(("TLS", said_over_tls(port, caller)))

    def check(self) -> None:
        """Assert that nobody got more to read than an alert of TLS."""
        assert len(self._heard) == len(self.ports) * (len(ATTACKS) + 2) > 0
        for name, answer in self._heard:
            assert len(answer) <= 7 and answer[:1] in (b"", b"\x15"), (name, answer)
        for connection in self._silent:
            connection.close()


def resident_bytes(pids: Iterable[int]) -> int:
    """The memory of some processes, the most of each so far."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += 1024 * int(line.split()[1])
    return total
