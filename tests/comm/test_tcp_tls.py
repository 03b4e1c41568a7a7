"""TLS on connections of our own: the same bits, nothing to read on the line, and nobody else gets in."""

from __future__ import annotations

import contextlib
import logging
import random
import resource
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.keys import another, keys_of
from helpers.lost_connections import loses_all_connections
from helpers.program import wait_until
from helpers.spawn import logged, retire, spawn
from helpers.traffic import connections as connections_of_process

from thinwire.comm import Credentials
from thinwire.comm.addresses import own_address
from thinwire.comm.sockets import dial_small
from thinwire.comm.tcp import TcpCommunicator, connections
from thinwire.comm.tcp.channel import TcpChannel
from thinwire.comm.tcp.connections import Place
from thinwire.comm.tcp.endpoint import Meeting
from thinwire.comm.tcp.handshake import HELLO, greet, introduce
from thinwire.comm.tcp.identity import WorkerIdentity
from thinwire.comm.tls import keys, relay
from thinwire.testing import check_communicator

_engine = pytest.importorskip("thinwire.comm.tcp._engine")
CONNECT = socket.create_connection
PATTERN = b"nobody but the workers of this run may read this. "


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with those of four workers; of a revoked one, which all know of; and of one whose certificate has expired."""
    folder = tmp_path_factory.mktemp("run")
    keys_of(folder, *(f"worker{rank}" for rank in range(4)), "other", "revoked")
    revoked = keys.Issuer(folder / "worker0").revoke("revoked")
    for rank in range(1, 4):
        shutil.copy(revoked, folder / f"worker{rank}")
    with pytest.raises(ValueError, match="expired"):
        another(folder / "worker0", folder / "expired", "expired", days=-1e-3)
    keys_of(folder / "another", "worker0", "worker1", run="another-run")
    return folder


def over_tls(comm, folder: Path, fn: Callable, *args, timeout_seconds: float = 60.0):
    credentials = Credentials(folder / f"worker{comm.rank}")
    with TcpCommunicator.over(comm, timeout_seconds, credentials=credentials) as own:
        return fn(own, *args)


def conforms(comm) -> None:
    check_communicator(lambda operation: operation(comm))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_fulfils_the_contract(run, size):
    spawn(size, over_tls, run, conforms)


def sums(comm) -> list[torch.Tensor]:
    def noise(numel: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank)) * 10.0 ** (4 * comm.rank)

    return [comm.all_reduce(noise(numel)).wait() for numel in (1, 1000, 700_001, 3_000_000)]


def with_and_without(comm, folder: Path) -> None:
    with TcpCommunicator.over(comm, 60.0) as plain:
        expected = sums(plain)
    assert all(torch.equal(a, b) for a, b in zip(over_tls(comm, folder, sums), expected, strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_results_have_the_same_bits_with_and_without(run, size):
    spawn(size, with_and_without, run)


def test_an_exchange_goes_on_after_all_connections_were_lost(run):
    results = spawn(3, over_tls, run, loses_all_connections, 4_000_000, return_errors=True)
    assert [result[0] for result in results] == [True] * 3, results
    assert sum(result[1] for result in results) > 0


# ---- what passes on the line ----


class Line:
    """Forwards connections to an address, keeps what has passed, and may change it."""

    def __init__(self, target: tuple[str, int], change: Callable[[bytes], bytes] = bytes):
        self.passed: list[bytes] = []
        self._target, self._change = target, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], CONNECT(self._target)
                for source, sink in (ends, ends[::-1]):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while said := source.recv(1 << 16):
                self.passed.append(said)
                sink.sendall(self._change(said))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def every_line(change: Callable[[bytes], bytes] = bytes):
    """Have this process connect over a `Line` to whatever it connects to; yields them."""
    lines: dict[tuple[str, int], Line] = {}
    lock = threading.Lock()

    def over_a_line(address, *args, **kwargs):
        with lock:
            if address not in lines:
                lines[address] = Line(address, change)
        return CONNECT(lines[address].address, *args, **kwargs)

    socket.create_connection = over_a_line
    for module in (connections, relay):
        module.dial_small = lambda host, port, seconds: over_a_line((host, port), seconds)
    try:
        yield lines.values()
    finally:
        socket.create_connection = CONNECT
        for module in (connections, relay):
            module.dial_small = dial_small
        for line in lines.values():
            line.close()


def exchanges_words(comm) -> None:
    words = torch.frombuffer(bytearray(PATTERN * 20_000), dtype=torch.uint8)
    for size in (len(words), 2 * len(PATTERN)):  # by both kinds of connection
        theirs = torch.zeros(size, dtype=torch.uint8)
        comm.exchange({1 - comm.rank: words[:size]}, {1 - comm.rank: theirs}).wait()
        assert torch.equal(theirs, words[:size])
    channel = comm.open_channel([1 - comm.rank])
    if comm.rank == 0:
        channel.send(1, 5, words)
    assert torch.equal(channel.receive([1 - comm.rank]).payload, words)
    if comm.rank == 1:
        channel.send(0, 5, words)
    channel.close()


def overheard(comm, folder: Path | None) -> tuple[int, bool]:
    retire()  # threads of lines are left
    with every_line() as lines:
        if folder:
            over_tls(comm, folder, exchanges_words)
        else:
            with TcpCommunicator.over(comm, 60.0) as plain:
                exchanges_words(plain)
        passed = b"".join(said for line in lines for said in line.passed)
    return len(passed), PATTERN[:20] in passed


def test_nothing_can_be_read_on_the_line(run):
    count, is_readable = spawn(2, overheard, run)[1]  # rank 1 connects
    assert count > 4 * 20_000 * len(PATTERN) and not is_readable
    assert spawn(2, overheard, None)[1][1], "the test sees what is not encrypted"


class Damage:
    """Flips a bit after every megabyte or so, a number of times."""

    def __init__(self, times: int):
        self.left, self._chance, self._until = times, random.Random(0), 300

    def __call__(self, said: bytes) -> bytes:
        self._until -= len(said)
        if self.left == 0 or self._until > 0:
            return said
        self.left, self._until = self.left - 1, self._chance.randrange(2_000_000)
        place = self._chance.randrange(len(said))
        return said[:place] + bytes([said[place] ^ 4]) + said[place + 1 :]


def exchanges(comm) -> None:
    sent = torch.arange(3_000_000, dtype=torch.int32) + comm.rank
    received = torch.zeros_like(sent)
    for _ in range(3):
        comm.exchange({1 - comm.rank: sent}, {1 - comm.rank: received.zero_()}).wait()
        assert torch.equal(received, sent + 1 - 2 * comm.rank)


def bears_damage(comm, folder: Path) -> int:
    retire()  # threads of lines are left
    damage = Damage(20)
    with every_line(damage):
        over_tls(comm, folder, exchanges)
    return damage.left


def test_altered_records_are_refused_and_the_run_ends_with_the_right_bits(run):
    assert (
        sum(spawn(2, bears_damage, run)) < 30
    )  # of 40; rank 1 connects, and rank 0 too if it has lost all connections


# ---- who gets in ----


def session(connection: socket.socket, folder: Path, authority: Path):
    paths = [str(folder / "certificate.pem"), str(folder / "key.pem"), str(authority / "authority.pem")]
    made = _engine.Session(_engine.Context(*paths), connection.fileno(), False)
    made.settimeout(20.0)
    return made


def is_refused(stream, rank: int, secret: bytes, seconds: float = 20.0) -> bool:
    try:
        introduce(stream, rank, 0, secret, time.monotonic() + seconds)
    except OSError:
        return True
    return False


def without_certificate(connection: socket.socket, folder: Path) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(folder / "worker0" / "authority.pem")
    return context.wrap_socket(connection)


def attacks(comm, folder: Path) -> tuple[list[str], int]:
    """Rank 1 attacks rank 0, in all ways but one with the run's true secret."""
    lines = logged()

    def refused() -> list[str]:
        return [line for line in lines if "was silent for too long" not in line]

    address, secret = tuple(comm.gather_objects(comm._connections.contact[:2])[0]), comm._connections._secret
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if comm.rank == 1:
        knock = lambda: socket.create_connection(address, 20)  # noqa: E731
        workers = folder / "worker0"
        for name in ("another/worker1", "revoked", "expired", "other"):
            with knock() as connection:
                assert is_refused(session(connection, folder / name, workers), 1, secret), name
        with knock() as connection:
            assert is_refused(session(connection, folder / "worker1", workers), 1, b"?" * 32)
        with knock() as connection, contextlib.suppress(OSError):
            assert is_refused(without_certificate(connection, folder), 1, secret)
        with knock() as connection:
            assert is_refused(connection, 1, secret, seconds=0.5)  # in plain text: nothing comes, and it hangs up
        for said in (bytes(HELLO.size), b"GET / HTTP/1.1\r\n\r\n", random.Random(0).randbytes(20_000_000)):
            with knock() as connection:
                connection.settimeout(20)
                with contextlib.suppress(OSError):
                    connection.sendall(said)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
    doors = [socket.create_connection(address, 20) for _ in range(100 * comm.rank)]  # and says nothing
    conforms(comm)
    if comm.rank == 0:
        wait_until(lambda: len(refused()) >= 9 and len(lines) >= 9 + 20, "a line about each, also about the many")
    found = refused()
    comm.barrier()
    del doors
    return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory


REFUSED = {
    "self-signed certificate|unable to get local issuer certificate|certificate signature failure": 1,
    "certificate revoked": 1,
    "certificate has expired": 1,
    "has the certificate of 'other', and not that of rank 1, 'worker1'": 1,
    "does not know the run's secret": 1,
    "peer did not return a certificate": 1,
    "is not of this run": 7,
}


def test_others_are_refused_and_the_run_goes_on(run):
    lines, kilobytes = spawn(2, over_tls, run, attacks, run)[0]
    for words, count in REFUSED.items():
        assert sum(any(word in line for word in words.split("|")) for line in lines) == count, (words, lines)
    assert len(lines) == 9 and all("rank 0 closed a connection from 127.0.0.1:" in line for line in lines)
    assert kilobytes < 60_000


def is_revoked(comm, folder: Path) -> str:
    """In the midst of the run, ranks 0 and 1 learn that rank 2's certificate was revoked."""
    conforms(comm)
    if comm.rank == 0:
        shutil.copy(keys.Issuer(folder / "worker0").revoke("worker2"), folder / "worker1")
    text, mine = "", torch.full((1000,), float(comm.rank))
    theirs = torch.zeros_like(mine)
    deadline = time.monotonic() + 60
    while not text and time.monotonic() < deadline:
        try:
            comm.exchange({(comm.rank + 1) % 3: mine}, {(comm.rank - 1) % 3: theirs}).wait()
        except Exception as error:
            text = str(error)
    return text


def test_a_worker_that_is_revoked_during_the_run_is_shut_out(tmp_path):
    keys_of(tmp_path, "worker0", "worker1", "worker2")
    results = spawn(3, over_tls_briefly, tmp_path, is_revoked, tmp_path, return_errors=True)
    for text in results[:2]:
        assert isinstance(text, str) and "rank 2" in text, results


def renews(comm, folder: Path) -> int:
    """Rank 0 reads its certificate again, and so both get new connections; returns the most that their packets may have."""

    def ends() -> set:
        return {(connection.getsockname(), connection.getpeername()) for connection in connections_of_process()}

    old = ends()
    comm.barrier()
    if comm.rank == 0:
        (folder / "worker0" / "certificate.pem").touch()
    wait_until(lambda: old - ends(), "the end of old connections")
    conforms(comm)
    return comm.packet_bytes


def test_new_credentials_are_no_sign_that_large_packets_are_lost(tmp_path):
    keys_of(tmp_path, "worker0", "worker1")
    assert spawn(2, over_tls, tmp_path, renews, tmp_path) == [0, 0]


def over_tls_briefly(comm, folder: Path, fn: Callable, *args):
    return over_tls(comm, folder, fn, *args, timeout_seconds=4.0)


# ---- channels ----


def talks(comm) -> list[tuple[int, int, int]]:
    """Everyone sends messages of different sizes to everyone, and receives what comes."""
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    channel, heard = comm.open_channel(others), []
    for count in range(3):
        for peer in others:
            channel.send(peer, 7 + count, torch.full((count * 100_000,), float(comm.rank)))
    while len(heard) < 3 * len(others):
        heard.append(channel.receive(others))
    assert channel.receive(others, timeout_seconds=0.05) is None
    comm.barrier()
    channel.close()
    assert all(message.payload.view(torch.float32).unique().tolist() in ([], [message.source]) for message in heard)
    return [(message.source, message.kind, message.payload.numel()) for message in heard]


def test_messages_of_a_channel_arrive_whole_and_in_order(run):
    for rank, heard in enumerate(spawn(3, over_tls, run, talks)):
        for peer in {0, 1, 2} - {rank}:
            assert [m for m in heard if m[0] == peer] == [(peer, 7 + count, 400_000 * count) for count in range(3)]


def test_a_channel_refuses_others(run, monkeypatch, caplog):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told, both, heard, refused = [None, None], threading.Barrier(2, timeout=400), {}, []

    def knock() -> None:
        host, port, *_, secret = told[0]
        for name in ("another/worker1", "revoked", "other"):
            with socket.create_connection((host, port), 20) as connection:
                stream = session(connection, run / name, run / "worker0")
                refused.append(is_refused(stream, 1, bytes.fromhex(secret)))

    def work(rank: int) -> None:
        def gather(own: list) -> list:
            told[rank] = own
            both.wait()
            if rank == 1:
                knock()
            return told

        place = Place(*own_address(), Credentials(run / f"worker{rank}"))
        channel = TcpChannel(Meeting(rank, 2, gather, place, 20.0), [1 - rank], lambda *_: None, 1000)
        with contextlib.closing(channel):
            channel.send(1 - rank, 5)
            heard[rank] = channel.receive([1 - rank]).kind
            wait_until(lambda: all(any(words in line for line in caplog.messages) for words in why), "all lines")
            both.wait()

    why = "is not of this run: ", "certificate revoked", "has the certificate of 'other', and not that of rank 1"
    with caplog.at_level(logging.WARNING, "thinwire"):
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert heard == {0: 5, 1: 5} and refused == [True] * 3


# ---- sessions ----


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("has_said", [False, True])
def test_a_peer_that_hangs_up_in_a_handshake_is_told_from_one_that_is_refused(run, is_reset, has_said):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        ours = listener.accept()[0]
        if has_said:
            with pytest.raises(TimeoutError):
                (stream := session(theirs, run / "worker1", run / "worker0")).settimeout(0.05)
                stream.sendall(b"x")
        if is_reset:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        listening = WorkerIdentity(Credentials(run / "worker0")).session(ours, accepts=True)
        with ours, pytest.raises((ConnectionResetError, BrokenPipeError)):
            greet(listening, 0, b"s" * 32, time.monotonic() + 20)


def test_keys_are_renewed_after_a_number_of_records(run):
    """A key of AES-GCM must not serve for more than 2^24.5 records; here it serves for 10."""
    folders = [run / f"worker{rank}" for rank in range(2)]
    contexts = [
        _engine.Context(
            *(str(folder / f"{name}.pem") for name in ("certificate", "key", "authority")), records_per_key=10
        )
        for folder in folders
    ]
    ends = socket.socketpair()
    sessions = [_engine.Session(contexts[i], ends[i].fileno(), bool(i)) for i in range(2)]
    engines = [_engine.Engine(rank, 2, 60.0) for rank in range(2)]
    for rank in range(2):
        engines[rank].attach(1 - rank, ends[rank].detach(), sessions[rank])
    sent = torch.randint(0, 256, (30_000_000,), dtype=torch.uint8)
    received = torch.zeros_like(sent)
    operations = [
        engines[0].post([(1, 0, sent.data_ptr(), sent.nbytes)], []),
        engines[1].post([], [(0, 0, received.data_ptr(), sent.nbytes)]),
    ]
    for engine, operation in zip(engines, operations, strict=True):
        assert engine.wait(operation, 60.0)
    assert torch.equal(sent, received)
    assert sessions[0].renewals >= sent.nbytes // 16384 // 10 - 1
    assert engines[0].counts(1).resent == 0


def test_what_is_missing_is_named(run, tmp_path):
    good = [str(run / "worker0" / f"{name}.pem") for name in ("certificate", "key", "authority")]
    assert _engine.Context(*good).name == "worker0"
    for place, words in enumerate(["a certificate in", "the certificate's key in", "the authority's certificate in"]):
        paths = list(good)
        paths[place] = str(tmp_path / "nothing.pem")
        with pytest.raises(RuntimeError, match=f"cannot read {words} .*nothing.pem: "):
            _engine.Context(*paths)
    paths = [good[0], str(run / "worker1" / "key.pem"), good[2]]
    with pytest.raises(RuntimeError, match="cannot read the certificate's key in .*: key values mismatch"):
        _engine.Context(*paths)
