"""What is wrong with hosts and lines, and what follows from them. Pure functions from hosts and lines to findings.

`lab/bench/host.py` describes a host, and `measure.py` measures the lines.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from ..comm.elastic.lighthouse import HEARTBEAT_SECONDS
from ..comm.tcp.communicator import LONG_SECONDS
from .lines import Lines

CONNECTIONS = 65  # to one peer, at most
OTHER_FILES = 256  # of Python, data loaders and results
SLOW = 2.0  # times slower than the others
SLOW_RATE = 125_000.0  # bytes a second: a line on which most methods take minutes for a step
LOSS = 0.01  # on a short line; more than what a sender's own bursts lose
LONG_LOSS = 0.001
CLOCK_SECONDS = 1.0
JITTER_SECONDS = 0.02
LEAST_MEMORY = 0.1  # of all
LEAST_TIMEOUT, SLACK, TRIPS = 30.0, 4.0, 100


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

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Host:
        """The host that `dataclasses.asdict` described, after a round trip through JSON."""
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


Found = Iterator[tuple[str, str]]
"""What is wrong with one rank, and the remedy."""


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
    rules = [partial(rule, hosts) for rule in HOST_RULES]
    rules += [] if lines is None else [partial(rule, hosts, lines) for rule in LINE_RULES]
    ranks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rule in rules:
        for rank in range(len(hosts)):
            for found in rule(rank):
                ranks[found].append(rank)
    return [Finding(tuple(of), what, remedy) for (what, remedy), of in ranks.items()]


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
            f"{SLACK:g} dense all-reduces of {rounded(dense)} s on the slowest line, and {TRIPS} round trips of "
            f"{rounded(1e3 * longest)} ms; a cut of the line may last as long",
        ),
        Limit("a step, before it counts as stuck", SLACK * dense + longest, f"{SLACK:g} times the longest exchange"),
        Limit("joining an elastic run", max(120.0, 2 * timeout), "twice --timeout, at least 120 s"),
        Limit("heartbeats of an elastic run", HEARTBEAT_SECONDS, f"fixed; {heartbeat}"),
    ]


# ---- rules that need hosts alone ----


def _few_files(hosts: Sequence[Host], rank: int) -> Found:
    needed, have = OTHER_FILES + CONNECTIONS * (len(hosts) - 1), hosts[rank].max_files
    workers = f"{len(hosts)} worker{'s need' if len(hosts) > 1 else ' needs'}"
    if have < needed:
        yield f"at most {have} open files, and {workers} {needed}", "ulimit -n 65536 before the run"


def _missing_extensions(hosts: Sequence[Host], rank: int) -> Found:
    host = hosts[rank]
    if host.missing:
        compiler = "" if host.compiler else "install a C++17 compiler such as g++, then "
        what = "codecs or long lines are many times slower without, or elastic runs refused"
        yield f"not built: {', '.join(host.missing)}; {what}", f"{compiler}install thinwire again from its source"


def _busy(hosts: Sequence[Host], rank: int) -> Found:
    host = hosts[rank]
    num_workers = sum(other.name == host.name for other in hosts)
    if host.load > 1.5 * max(host.cores, num_workers):
        what = f"{host.load:.0f} processes want {host.cores} core{'s' * (host.cores > 1)}"
        yield what, "stop other programs, or start fewer workers"
    if host.memory_bytes and host.free_bytes < LEAST_MEMORY * host.memory_bytes:
        what = f"{host.free_bytes / 1e9:.1f} of {host.memory_bytes / 1e9:.1f} GB of memory are free"
        yield what, "stop other programs, or train a smaller batch"


def _ports_taken(hosts: Sequence[Host], rank: int) -> Found:
    for port in hosts[rank].taken:
        what = f"another program listens on port {port}, where launchers let workers meet"
        yield what, f"set MASTER_PORT to another port, such as {port + 17}"


def _interfaces(hosts: Sequence[Host], rank: int) -> Found:
    host, known = hosts[rank], [i.name for i in hosts[rank].interfaces]
    several = len({host.name for host in hosts}) > 1 or not all(host.is_loopback for host in hosts)
    if host.gloo_interface and host.gloo_interface not in known:
        what = f"GLOO_SOCKET_IFNAME names {host.gloo_interface}, which is none of {', '.join(known)}"
        yield what, "name one of these"
    elif host.is_loopback and several:
        remedy = f"name the interface that reaches them with --interface or GLOO_SOCKET_IFNAME: {', '.join(known)}"
        yield f"its address is {host.address}, which other hosts cannot reach", remedy
    elif host.interface is not None and not host.interface.is_up:
        yield f"{host.interface.name} is down", f"ip link set dev {host.interface.name} up"


def _mtu(hosts: Sequence[Host], rank: int) -> Found:
    host, interface = hosts[rank], hosts[rank].interface
    if interface is None or host.is_loopback:
        return
    mtus = [other.interface.mtu for other in hosts if other.interface is not None and not other.is_loopback]
    usual = Counter(mtus).most_common(1)[0][0]
    if len(hosts) == 2:  # no majority
        usual = 1500 if 1500 in mtus else max(mtus)
    if interface.mtu != usual:
        what = f"the MTU of {interface.name} is {interface.mtu}, and {usual} on the other hosts"
        yield what, f"ip link set dev {interface.name} mtu {usual}"
    if 0 < host.path_mtu < min(interface.mtu, usual):
        through = f"packets of more than {host.path_mtu} bytes do not get through"
        what = f"{through}, and the MTU of {interface.name} is {interface.mtu}"
        yield what, f"ip link set dev {interface.name} mtu {host.path_mtu}"


def _versions(hosts: Sequence[Host], rank: int) -> Found:
    for name in ("thinwire", "torch", "python"):
        versions = [host.versions.get(name, "") for host in hosts]
        usual = versions[0] if len(hosts) == 2 else Counter(versions).most_common(1)[0][0]
        compared = 2 if name == "python" else None  # 3.11.7 and 3.11.8 are as good as equal
        if versions[rank].split(".")[:compared] != usual.split(".")[:compared]:
            yield f"{name} {versions[rank]}, and {usual} on other hosts", f"install {name} {usual}"


def _nat(hosts: Sequence[Host], rank: int) -> Found:
    host, others = hosts[rank], [other.peers for r, other in enumerate(hosts) if r != rank]
    seen = {address for peers in others for address in peers}
    if not host.is_loopback and others and all(others) and host.address not in seen:
        as_others = ", ".join(sorted(seen - {host.address for host in hosts})) or "another address"
        what = f"behind NAT: its address is {host.address}, and the others see {as_others}"
        remedy = (
            "thinwire relay on a host that all reach, and --relay HOST:PORT; for Gloo and NCCL a VPN such as WireGuard"
        )
        yield what, f"the others cannot connect to it: {remedy}"


HOST_RULES = (_interfaces, _nat, _mtu, _versions, _missing_extensions, _few_files, _ports_taken, _busy)


# ---- rules that need the lines too ----


def _slow_lines(hosts: Sequence[Host], lines: Lines, rank: int) -> Found:
    for verb, rate in (("sends", lines.out), ("receives", lines.into)):
        own, usual = rate(rank), median(rate(other) for other in range(lines.size) if other != rank)
        if own * SLOW < usual:
            what = f"{verb} {megabits(own)}, and the others {megabits(usual)}"
            yield what, "find what else uses its line, or choose a method with fewer bytes (thinwire plan)"
        elif own < SLOW_RATE:
            yield f"{verb} less than {megabits(SLOW_RATE)}", "choose a method with fewer bytes (thinwire plan)"


def _losses(hosts: Sequence[Host], lines: Lines, rank: int) -> Found:
    worst, peer = max((loss or 0.0, -peer) for peer, loss in enumerate(lines.loss[rank]))
    is_long = max(lines.round_trip_seconds[rank]) > LONG_SECONDS
    if worst > (LONG_LOSS if is_long else LOSS):
        bears, look = "--transport tcp, whose connections bear loss", "look for a bad cable or a full switch"
        yield f"sends {100 * worst:.2g} % of its packets to rank {-peer} again", bears if is_long else look


def _congestion(hosts: Sequence[Host], lines: Lines, rank: int) -> Found:
    host, longest = hosts[rank], max(lines.round_trip_seconds[rank])
    if host.congestion in ("", "bbr") or longest < LONG_SECONDS:
        return
    line = f"a {1e3 * longest:.0f} ms line"
    what = f"TCP's congestion control is {host.congestion}, which slows down at each lost packet of {line}"
    load = "" if "bbr" in host.available else "modprobe tcp_bbr && "
    system = f"{load}sysctl -w net.ipv4.tcp_congestion_control=bbr"
    yield what, f"--transport tcp, whose connections choose theirs; for Gloo and NCCL, {system}"


def _buffers(hosts: Sequence[Host], lines: Lines, rank: int) -> Found:
    for verb, name, limit, pairs in (
        ("send", "tcp_wmem", hosts[rank].send_buffer_bytes, [(rank, peer) for peer in range(lines.size)]),
        ("receive", "tcp_rmem", hosts[rank].receive_buffer_bytes, [(peer, rank) for peer in range(lines.size)]),
    ):
        needed = max(2 * lines.bytes_per_second[i][j] * lines.round_trip_seconds[i][j] for i, j in pairs)
        if 0 < limit < needed:
            what = f"one connection may {verb} {limit / 1e6:.2g} MB ahead, and its line needs {needed / 1e6:.2g} MB"
            most = 1 << math.ceil(math.log2(needed))
            yield what, f"sysctl -w net.ipv4.{name}='4096 131072 {most}'"


def _clocks(hosts: Sequence[Host], lines: Lines, rank: int) -> Found:
    ahead = median(-lines.clock_seconds[rank][peer] for peer in range(lines.size) if peer != rank)
    if abs(ahead) > CLOCK_SECONDS and (lines.size > 2 or rank == 1):  # of two, nobody knows which is wrong
        what = f"its clock is {abs(ahead):.3g} s {'ahead of' if ahead > 0 else 'behind'} the others"
        yield what, "turn on NTP, such as timedatectl set-ntp true"


def _jitter(hosts: Sequence[Host], lines: Lines, rank: int) -> Found:
    worst = max(lines.jitter_seconds[rank])
    if worst > max(JITTER_SECONDS, max(lines.round_trip_seconds[rank])):
        what = f"its round trips vary by {1e3 * worst:.0f} ms"
        yield what, "find what else uses its line or its cores; methods with few rounds bear it"


LINE_RULES = (_slow_lines, _losses, _congestion, _buffers, _clocks, _jitter)


def megabits(bytes_per_second: float) -> str:
    """A rate for people.

    Example:
        >>> megabits(12_500_000)
        '100 Mb/s'
        >>> megabits(1.2345e9)
        '9,880 Mb/s'
    """
    return f"{rounded(8 * bytes_per_second / 1e6)} Mb/s"


def rounded(value: float) -> str:
    """Three digits of a number, for people.

    Example:
        >>> rounded(55_812.3), rounded(3.0)
        ('55,800', '3')
    """
    return f"{float(f'{value:.3g}'):,.10g}"
