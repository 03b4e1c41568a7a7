"""What is wrong with hosts and lines, and what follows from them. Pure functions from hosts and lines to findings.

`lab/bench/host.py` describes a host, and `measure.py` measures the lines.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from ..comm.tcp.communicator import LONG_SECONDS
from .lines import Lines

CONNECTIONS = 65  # to one peer, at most
OTHER_FILES = 256  # of Python, data loaders and results
SLOW = 2.0  # times slower than the others
LOSS = 0.01  # on a short line; more than what a sender's own bursts lose
LONG_LOSS = 0.001
CLOCK_SECONDS = 1.0
JITTER_SECONDS = 0.02
LEAST_MEMORY = 0.1  # of all
LEAST_TIMEOUT, SLACK, TRIPS = 30.0, 4.0, 100
HEARTBEAT_SECONDS = 3.0  # of the Lighthouse


@dataclass(frozen=True)
class Interface:
    """A network interface: its addresses without those of other families, its MTU in bytes, and whether it is up."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    is_up: bool = True


@dataclass(frozen=True)
class Host:
    """What one worker knows of its host and of itself.

    Args:
        name: of the host.
        versions: of python, torch, thinwire and the kernel.
        interfaces: all of them.
        address: at which the other workers reach this one.
        peers: addresses at the other ends of this process's connections.
        listening: where programs on this host listen, as address:port.
        taken: ports that thinwire would use by default, and other programs have.
        congestion: TCP's congestion control; empty where the system does not tell.
        available: congestion controls that the kernel has loaded.
        allowed: those that a program may choose without root.
        send_buffer_bytes, receive_buffer_bytes: the most that one TCP connection gets; 0 where the system does not tell.
        path_mtu: the smallest MTU on the way to a peer, as TCP knows it; 0 if unknown.
        max_files: file descriptors of this process.
        cores, load: that this process may use, and processes that want one.
        memory_bytes, free_bytes: of the host.
        gpus: their names.
        compiler: the C++ compiler, or None.
        missing: extensions of thinwire that were not built.
        gloo_interface: GLOO_SOCKET_IFNAME, or None.
        speeds: of computation, where they were measured.
    """

    name: str
    versions: Mapping[str, str]
    interfaces: tuple[Interface, ...]
    address: str
    peers: tuple[str, ...] = ()
    listening: tuple[str, ...] = ()
    taken: tuple[int, ...] = ()
    congestion: str = ""
    available: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    send_buffer_bytes: int = 0
    receive_buffer_bytes: int = 0
    path_mtu: int = 0
    max_files: int = 1 << 20
    cores: int = 1
    load: float = 0.0
    memory_bytes: int = 0
    free_bytes: int = 0
    gpus: tuple[str, ...] = ()
    compiler: str | None = None
    missing: tuple[str, ...] = ()
    gloo_interface: str | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)

    @property
    def interface(self) -> Interface | None:
        """The one that has the address."""
        return next((i for i in self.interfaces if self.address in i.addresses), None)

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can reach the address."""
        return ipaddress.ip_address(self.address).is_loopback

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Host:
        """The host that `as_dict` described, after a round trip through JSON."""
        interfaces = [i | {"addresses": tuple(i["addresses"])} for i in plain["interfaces"]]
        lists = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
        return cls(**{**plain, **lists, "interfaces": tuple(Interface(**i) for i in interfaces)})


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, on some ranks, and what to do about it."""

    ranks: tuple[int, ...]
    what: str
    remedy: str


@dataclass(frozen=True)
class Limit:
    """A time limit, and the measured numbers that it follows from."""

    name: str
    seconds: float
    why: str


Found = Iterator[tuple[int, str, str]]
"""Rank, what is wrong, and the remedy."""


def findings(hosts: Sequence[Host], lines: Lines | None = None) -> list[Finding]:
    """What is wrong with the hosts of all workers, in rank order, and with the lines between them, if they were measured.

    Example:
        >>> from dataclasses import replace
        >>> host = Host("node1", {}, (Interface("eth0", ("10.0.0.1",), 1500),), "10.0.0.1")
        >>> findings([host])
        []
        >>> findings([replace(host, max_files=64)])[0].what
        'at most 64 open files, and 1 worker needs 256'
    """
    found = [one for rule in HOST_RULES for one in rule(hosts)]
    found += [one for rule in LINE_RULES for one in rule(hosts, lines)] if lines is not None else []
    merged: dict[tuple[str, str], list[int]] = {}
    for rank, what, remedy in found:
        merged.setdefault((what, remedy), []).append(rank)
    return [Finding(tuple(ranks), what, remedy) for (what, remedy), ranks in merged.items()]


def limits(lines: Lines, num_bytes: float) -> list[Limit]:
    """The time limits that suit these lines.

    Args:
        lines: between all workers.
        num_bytes: of the largest tensor list that is averaged, such as 4 bytes a parameter.

    Example:
        >>> limit = limits(Lines.of_rates([[0, 1e6], [1e6, 0]]), 40e6)[0]
        >>> limit.name, limit.seconds
        ('--timeout', 160)
    """
    slowest = min(lines.bytes_per_second[i][j] for i, j in lines.pairs())
    longest = max(lines.round_trip_seconds[i][j] + lines.jitter_seconds[i][j] for i, j in lines.pairs())
    dense = 2 * (lines.size - 1) / lines.size * num_bytes / slowest
    timeout = max(LEAST_TIMEOUT, 10 * math.ceil((SLACK * dense + TRIPS * longest) / 10))
    heartbeat = "enough" if HEARTBEAT_SECONDS > 4 * longest else "too short for these lines"
    return [
        Limit(
            "--timeout",
            timeout,
            f"{SLACK:g} dense all-reduces of {dense:.3g} s on the slowest line, and {TRIPS} round trips of "
            f"{1e3 * longest:.3g} ms; a cut of the line may last as long",
        ),
        Limit("a step, before it counts as stuck", SLACK * dense + longest, f"{SLACK:g} times the longest exchange"),
        Limit("joining an elastic run", max(120.0, 2 * timeout), "twice --timeout, at least 120 s"),
        Limit("heartbeats of an elastic run", HEARTBEAT_SECONDS, f"fixed; {heartbeat}"),
    ]


# ---- rules that need hosts alone ----


def _few_files(hosts: Sequence[Host]) -> Found:
    needed = OTHER_FILES + CONNECTIONS * (len(hosts) - 1)
    workers = f"{len(hosts)} worker{'s need' if len(hosts) > 1 else ' needs'}"
    for rank, host in enumerate(hosts):
        if host.max_files < needed:
            yield rank, f"at most {host.max_files} open files, and {workers} {needed}", "ulimit -n 65536 before the run"


def _missing_extensions(hosts: Sequence[Host]) -> Found:
    for rank, host in enumerate(hosts):
        if host.missing:
            compiler = "" if host.compiler else "install a C++17 compiler such as g++, then "
            what = f"not built: {', '.join(host.missing)}; codecs or long lines are many times slower without"
            yield rank, what, f"{compiler}install thinwire again from its source"


def _busy(hosts: Sequence[Host]) -> Found:
    workers = Counter(host.name for host in hosts)
    for rank, host in enumerate(hosts):
        if host.load > 1.5 * max(host.cores, workers[host.name]):
            what = f"{host.load:.0f} processes want {host.cores} core{'s' * (host.cores > 1)}"
            yield rank, what, "stop other programs, or start fewer workers"
        if host.memory_bytes and host.free_bytes < LEAST_MEMORY * host.memory_bytes:
            what = f"{host.free_bytes / 1e9:.1f} of {host.memory_bytes / 1e9:.1f} GB of memory are free"
            yield rank, what, "stop other programs, or train a smaller batch"


def _ports_taken(hosts: Sequence[Host]) -> Found:
    for rank, host in enumerate(hosts):
        for port in host.taken:
            what = f"another program listens on port {port}, where launchers let workers meet"
            yield rank, what, f"set MASTER_PORT to another port, such as {port + 17}"


def _interfaces(hosts: Sequence[Host]) -> Found:
    several = len({host.name for host in hosts}) > 1 or not all(host.is_loopback for host in hosts)
    for rank, host in enumerate(hosts):
        known = ", ".join(i.name for i in host.interfaces)
        if host.gloo_interface and host.gloo_interface not in {i.name for i in host.interfaces}:
            yield rank, f"GLOO_SOCKET_IFNAME names {host.gloo_interface}, which is none of {known}", "name one of these"
        elif host.is_loopback and several:
            what = f"its address is {host.address}, which other hosts cannot reach"
            yield rank, what, f"name the interface that reaches them with --interface or GLOO_SOCKET_IFNAME: {known}"
        elif host.interface is not None and not host.interface.is_up:
            yield rank, f"{host.interface.name} is down", f"ip link set dev {host.interface.name} up"


def _mtu(hosts: Sequence[Host]) -> Found:
    mtus = {r: host.interface for r, host in enumerate(hosts) if host.interface is not None and not host.is_loopback}
    usual, _ = Counter(i.mtu for i in mtus.values()).most_common(1)[0] if mtus else (0, 0)
    if len(hosts) == 2 and mtus:  # no majority
        usual = 1500 if 1500 in {i.mtu for i in mtus.values()} else max(i.mtu for i in mtus.values())
    for rank, interface in mtus.items():
        if interface.mtu != usual:
            what = f"the MTU of {interface.name} is {interface.mtu}, and {usual} on the other hosts"
            yield rank, what, f"ip link set dev {interface.name} mtu {usual}"
        path = hosts[rank].path_mtu
        if 0 < path < min(interface.mtu, usual):
            what = f"packets of more than {path} bytes do not get through, and the MTU of {interface.name} is {interface.mtu}"
            yield rank, what, f"ip link set dev {interface.name} mtu {path}"


def _versions(hosts: Sequence[Host]) -> Found:
    for name in ("thinwire", "torch", "python"):
        versions = [host.versions.get(name, "") for host in hosts]
        usual = versions[0] if len(hosts) == 2 else Counter(versions).most_common(1)[0][0]
        for rank, version in enumerate(versions):
            if _compared(name, version) != _compared(name, usual):
                yield rank, f"{name} {version}, and {usual} on other hosts", f"install {name} {usual}"


def _compared(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "python" else version


def _nat(hosts: Sequence[Host]) -> Found:
    own = {host.address for host in hosts}
    for rank, host in enumerate(hosts):
        others = [other.peers for r, other in enumerate(hosts) if r != rank]
        if host.is_loopback or not others or not all(others):
            continue
        seen = {address for peers in others for address in peers}
        if host.address not in seen:
            as_others = ", ".join(sorted(seen - own)) or "another address"
            what = f"behind NAT: its address is {host.address}, and the others see {as_others}"
            yield rank, what, "join the hosts by a VPN such as WireGuard: the others cannot connect to it"


HOST_RULES: tuple[Callable[[Sequence[Host]], Found], ...] = (
    _interfaces,
    _nat,
    _mtu,
    _versions,
    _missing_extensions,
    _few_files,
    _ports_taken,
    _busy,
)


# ---- rules that need the lines too ----


def _slow_lines(hosts: Sequence[Host], lines: Lines) -> Found:
    for verb, rate in (("sends", lines.out), ("receives", lines.into)):
        rates = [rate(rank) for rank in range(lines.size)]
        for rank, own in enumerate(rates):
            usual = median(rates[:rank] + rates[rank + 1 :])
            if own * SLOW < usual:
                what = f"{verb} {megabits(own)}, and the others {megabits(usual)}"
                yield rank, what, "find what else uses its line, or choose a method with fewer bytes (thinwire plan)"


def _losses(hosts: Sequence[Host], lines: Lines) -> Found:
    for rank in range(lines.size):
        row = [loss for loss in lines.loss[rank] if loss is not None]
        is_long = max(lines.round_trip_seconds[rank]) > LONG_SECONDS
        if max(row, default=0.0) > (LONG_LOSS if is_long else LOSS):
            what = f"sends {100 * max(row):.2g} % of its packets to rank {row_argmax(lines, rank)} again"
            bears = (
                "--transport tcp, whose connections bear loss" if is_long else "look for a bad cable or a full switch"
            )
            yield rank, what, bears


def row_argmax(lines: Lines, rank: int) -> int:
    """The peer to which a worker loses most."""
    return max((peer for _, peer in lines.pairs() if peer != rank), key=lambda peer: lines.loss[rank][peer] or 0.0)


def _congestion(hosts: Sequence[Host], lines: Lines) -> Found:
    for rank, host in enumerate(hosts):
        longest = max(lines.round_trip_seconds[rank])
        if host.congestion in ("", "bbr") or longest < LONG_SECONDS:
            continue
        line = f"a {1e3 * longest:.0f} ms line"
        what = f"TCP's congestion control is {host.congestion}, which slows down at each lost packet of {line}"
        load = "" if "bbr" in host.available else "modprobe tcp_bbr && "
        system = f"{load}sysctl -w net.ipv4.tcp_congestion_control=bbr"
        yield rank, what, f"--transport tcp, whose connections choose theirs; for Gloo and NCCL, {system}"


def _buffers(hosts: Sequence[Host], lines: Lines) -> Found:
    for rank, host in enumerate(hosts):
        for verb, name, limit, pairs in (
            ("send", "tcp_wmem", host.send_buffer_bytes, [(rank, peer) for peer in range(lines.size)]),
            ("receive", "tcp_rmem", host.receive_buffer_bytes, [(peer, rank) for peer in range(lines.size)]),
        ):
            needed = max(2 * lines.bytes_per_second[i][j] * lines.round_trip_seconds[i][j] for i, j in pairs)
            if 0 < limit < needed:
                what = f"one connection may {verb} {limit / 1e6:.2g} MB ahead, and its line needs {needed / 1e6:.2g} MB"
                most = 1 << math.ceil(math.log2(needed))
                yield rank, what, f"sysctl -w net.ipv4.{name}='4096 131072 {most}'"


def _clocks(hosts: Sequence[Host], lines: Lines) -> Found:
    for rank in range(lines.size):
        ahead = median(-lines.clock_seconds[rank][peer] for peer in range(lines.size) if peer != rank)
        if abs(ahead) > CLOCK_SECONDS and (lines.size > 2 or rank == 1):  # of two, nobody knows which is wrong
            way = "ahead of" if ahead > 0 else "behind"
            yield (
                rank,
                f"its clock is {abs(ahead):.3g} s {way} the others",
                "turn on NTP, such as timedatectl set-ntp true",
            )


def _jitter(hosts: Sequence[Host], lines: Lines) -> Found:
    for rank in range(lines.size):
        worst = max(lines.jitter_seconds[rank])
        if worst > max(JITTER_SECONDS, max(lines.round_trip_seconds[rank])):
            what = f"its round trips vary by {1e3 * worst:.0f} ms"
            yield rank, what, "find what else uses its line or its cores; methods with few rounds bear it"


LINE_RULES: tuple[Callable[[Sequence[Host], Lines], Found], ...] = (
    _slow_lines,
    _losses,
    _congestion,
    _buffers,
    _clocks,
    _jitter,
)


def megabits(bytes_per_second: float) -> str:
    """A rate for people.

    Example:
        >>> megabits(12_500_000)
        '100 Mb/s'
    """
    return f"{8 * bytes_per_second / 1e6:.3g} Mb/s"
