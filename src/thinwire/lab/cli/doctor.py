"""`thinwire doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...options import require_integer, require_number
from .options import fail, parsed
from .plan import parse_count

if TYPE_CHECKING:
    from torch.distributed import Store

    from ...comm import Communicator
    from ...plan import Effort, Lines
    from ...plan.doctor import Finding, Host, Limit

MOST_COLUMNS = 10  # of a matrix
MOST_PORTS = 8  # of a host


@dataclass(frozen=True)
class Doctor:
    """Say what is wrong with this host; under torchrun, srun or mpirun, or with --workers, also with the lines between workers.

    One table has the hosts, and others the rate, round trip and loss of each pair. Then comes what follows from them, which is
    transport, method and time limits; and what is wrong, with its remedy.
    """

    workers: int = 1
    """Number of workers to start on this host, unless a launcher has started them."""
    seconds: float = 10.0
    """About how long to measure; more => finer."""
    megabytes: float = 64.0
    """What a worker sends to each other one at most; more => finer on fast lines."""
    transport: Literal["auto", "tcp", "gloo"] = "auto"
    """What carries the messages, as for `thinwire train`."""
    timeout: float = 60.0
    """Seconds for the workers to meet, and that one may be silent."""
    parameters: str = "100M"
    """Number of parameters of the model that methods and time limits are for."""
    compute: float = 0.25
    """Seconds of computation in one of its steps."""
    speed: bool = False
    """Also measure how fast each host computes."""
    json: Path | None = None
    """Write host descriptions, measurements and findings to this file."""

    def __post_init__(self) -> None:
        require_integer("workers", self.workers, 1)
        require_number("timeout", self.timeout, above=0, hint=" seconds")
        require_number("seconds", self.seconds, above=0)
        require_number("megabytes", self.megabytes, above=0)
        require_number("compute", self.compute, least=0, hint=" seconds")
        parse_count(self.parameters)  # a wrong number is found before the measurement

    @property
    def effort(self) -> Effort:
        """Of the measurement."""
        from ...plan import Effort

        return Effort(self.seconds, round(1e6 * self.megabytes))


@dataclass
class Diagnosis:
    """All that one run finds out."""

    hosts: Sequence[Host]
    lines: Lines | None = None
    transport: str = ""
    connections: int = 0
    """With each peer, at most."""
    findings: Sequence[Finding] = ()
    limits: Sequence[Limit] = ()
    method: str = ""
    strategy: str = ""


def doctor_command(options: list[str]) -> None:
    """Diagnose this host, or all hosts of a run."""
    asked = parsed(Doctor, options, "thinwire doctor")
    from ..bench.rows import check_writable
    from ..bench.workers import in_workers
    from ..train.start.environment import set_variables

    check_writable(asked.json)
    if set_variables() is not None or asked.workers > 1:
        in_workers(examine_all, asked, asked.workers)
    else:
        from ..bench.host import this_host

        _report(asked, _diagnosed(asked, Diagnosis([this_host(False, asked.speed)])))


def examine_all(asked: Doctor) -> None:
    """The work of one worker: describe its host to the others, connect, measure, and report on rank 0.

    Descriptions go through the store where workers meet, so that they are known where the workers cannot connect.
    """
    import torch

    from ...comm.tcp import TcpCommunicator
    from ...plan import measure_lines
    from ...plan.doctor import Host
    from ...plan.measure import FIRST_BYTES
    from ..bench.host import this_host
    from ..bench.workers import joined, meeting

    hosts: list[Host] = []
    effort, rank, size = asked.effort, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0 and size > 1:
        print(f"The measurement {effort.announced(size)}.", flush=True)
    try:
        store = meeting(asked.timeout)
        hosts = _exchange_hosts(store, rank, size, lambda: this_host(True, asked.speed))
        with joined(store, transport=asked.transport, timeout_seconds=asked.timeout) as comm:
            # Where large packets are lost on the way, connections are lost now, and not while lines are measured.
            comm.all_gather(torch.zeros(FIRST_BYTES, dtype=torch.uint8)).wait()
            lines = measure_lines(comm, effort) if comm.size > 1 else None
            # The load is from before: the measurement itself keeps cores busy.
            now = replace(this_host(True), load=hosts[rank].load, speeds=hosts[rank].speeds)  # with its connections
            if isinstance(comm, TcpCommunicator) and comm.packet_bytes:
                now = replace(now, path_mtu=comm.packet_bytes)
            hosts = [Host.of(plain) for plain in comm.gather_objects(asdict(now))]
            transport = "tcp" if isinstance(comm, TcpCommunicator) else "gloo"
            connections = max(comm.gather_objects(_connections(comm)))
    except RuntimeError as error:  # PyTorch's and ours
        if rank == 0 or not hosts:
            of_whom = "" if hosts else f"rank {rank} alone"
            _report(asked, _diagnosed(asked, Diagnosis(hosts or [this_host(True, asked.speed)])), of_whom)
        # PyTorch appends the C++ stack.
        reason = str(error).strip().splitlines()[0].partition(". Exception raised from")[0]
        fail(f"rank {rank} could not connect with the others: {reason}; see whether a firewall stands between them", 1)
        sys.exit(1)
    if rank == 0:
        _report(asked, _diagnosed(asked, Diagnosis(hosts, lines, transport, connections)))


def _exchange_hosts(store: Store, rank: int, size: int, describe: Callable[[], Host]) -> list[Host]:
    """The hosts of all workers. Rank 0 describes its own last: then the store is connected with all others."""
    from ...comm import CommunicationError
    from ...comm.store import ANSWER_SECONDS, answered
    from ...plan.doctor import Host

    def read(other: int) -> Host:
        seconds: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # PyTorch's types lack it
        try:
            return Host.of(json.loads(answered(partial(store.get, f"doctor/{other}"), seconds + ANSWER_SECONDS)))
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise CommunicationError(f"rank {other} did not come to the store within {seconds:g} seconds") from error

    others = [read(other) for other in range(1, size)] if rank == 0 else []
    store.set(f"doctor/{rank}", json.dumps(asdict(describe())))
    return [read(0), *others] if rank == 0 else [read(other) for other in range(size)]


def _connections(comm: Communicator) -> int:
    from ...comm.tcp import TcpCommunicator

    if not isinstance(comm, TcpCommunicator):
        return 1
    return max((comm.counts(peer).connections for peer in range(comm.size) if peer != comm.rank), default=0)


def _diagnosed(asked: Doctor, found: Diagnosis) -> Diagnosis:
    """With what follows from hosts and lines."""
    from ...plan import Network, predict
    from ...plan.doctor import findings, limits
    from .plan import recommended, verdict

    found.findings = findings(found.hosts, found.lines)
    if found.lines is not None:
        numel, per_node = parse_count(asked.parameters), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = found.lines.size
        # `Network` takes equal nodes only, and hosts may have unequal numbers of workers.
        network = found.lines.on_network(Network(workers, per_node if workers % per_node == 0 else 1))
        found.limits = limits(found.lines, 4 * numel)
        rows = predict(numel, asked.compute, network)
        found.method, found.strategy = verdict(rows), recommended(rows).strategy
    return found


# ---- tables ----


def _report(asked: Doctor, found: Diagnosis, of_whom: str = "") -> None:
    """Print everything, and write the file."""
    from ...plan.doctor import rounded

    if asked.json is not None:
        asked.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    _print_hosts(found.hosts, of_whom)
    if found.lines is not None:
        _print_lines(found.lines)
        if enough := asked.effort.enough_for(found.lines):
            print("  The messages were short for these lines, which may be faster; measure with", end=" ")
            print(f"--megabytes {enough / 1e6:.0f}.")
        print("What follows")
        connections = f"{found.connections} connection{'s' * (found.connections > 1)} with each peer"
        print(f"  transport         --transport {found.transport}, {connections}")
        print(f"  method            {found.method}")
        for limit in found.limits:
            print(f"  {limit.name}: {rounded(limit.seconds)} s ({limit.why})")
    print("What is wrong" if found.findings else "Nothing is wrong.")
    for finding in found.findings:
        print(f"  {_named(finding.ranks, found.hosts)}: {finding.what}. Remedy: {finding.remedy}")


def _named(ranks: Sequence[int], hosts: Sequence[Host]) -> str:
    names = ", ".join(dict.fromkeys(hosts[rank].name for rank in ranks))
    if len(hosts) == 1:
        return names
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} ({names})"


def _print_hosts(hosts: Sequence[Host], of_whom: str) -> None:
    from ..bench.rows import print_table

    def buffers(host: Host) -> str:
        return f"{host.send_buffer_bytes / 1e6:.3g}, {host.receive_buffer_bytes / 1e6:.3g}"

    def listening(host: Host) -> str:
        ports = sorted({int(end.rpartition(":")[2]) for end in host.listening})
        more = f" and {len(ports) - MOST_PORTS} more" if len(ports) > MOST_PORTS else ""
        return ", ".join(f":{port}" for port in ports[:MOST_PORTS]) + more

    properties: dict[str, Callable[[Host], str]] = {
        "host": lambda host: host.name,
        "address": lambda host: host.address,
        "interface, MTU": lambda h: f"{h.interface.name}, {h.interface.mtu}" if h.interface else "none has the address",
        "other interfaces": lambda h: ", ".join(f"{i.name} {i.mtu}" for i in h.interfaces if i != h.interface),
        "GLOO_SOCKET_IFNAME": lambda host: host.gloo_interface or "not set",
        "congestion control": lambda host: host.congestion,
        "  available": lambda host: ", ".join(host.available),
        "  allowed without root": lambda host: ", ".join(host.allowed),
        "most MB sent, received ahead": buffers,
        "listening": listening,
        "open files": lambda host: f"{host.max_files:,}",
        "cores, load": lambda host: f"{host.cores}, {host.load:.1f}",
        "GB of memory, free": lambda host: f"{host.memory_bytes / 1e9:.1f}, {host.free_bytes / 1e9:.1f}",
        "GPUs": lambda host: ", ".join(host.gpus) or "none",
        "compiler": lambda host: host.compiler or "none",
        "not built": lambda host: ", ".join(host.missing) or "nothing",
    }
    shown = hosts[:MOST_COLUMNS]
    rows = [[name, *[text(host) for host in shown]] for name, text in properties.items()]
    rows += [[name, *[host.versions.get(name, "") for host in shown]] for name in shown[0].versions]
    rows += [[name, *[f"{host.speeds[name] / 1e9:.3g} G/s" for host in shown]] for name in shown[0].speeds]
    columns = ["", *[f"rank {rank}" for rank in range(len(shown))]] if len(hosts) > 1 else ["", of_whom]
    left_out = f"The table has {len(shown)} of {len(hosts)} workers; --json has all." if len(hosts) > len(shown) else ""
    print_table("Hosts", columns, rows, left_out, num_texts=len(shown))


def _print_lines(lines: Lines) -> None:
    from ...plan.doctor import megabits
    from ..bench.rows import print_table

    def table(title: str, cell: Callable[[int, int], str], caption: str) -> None:
        shown = range(min(lines.size, MOST_COLUMNS))
        rows = [[f"from rank {i}", *["" if i == j else cell(i, j) for j in shown]] for i in range(lines.size)]
        print_table(title, ["", *[f"to {j}" for j in shown]], rows, caption)

    def lost(i: int, j: int) -> str:
        loss = lines.loss[i][j]
        return "?" if loss is None else f"{100 * loss:.2g}"

    table(
        "Mb/s",
        lambda i, j: megabits(lines.bytes_per_second[i][j]).removesuffix(" Mb/s"),
        "Each pair alone, both directions at once.",
    )
    table(
        "Round trip, ms",
        lambda i, j: f"{1e3 * lines.round_trip_seconds[i][j]:.3g} ± {1e3 * lines.jitter_seconds[i][j]:.2g}",
        "The shortest, and the mean difference between one and the next.",
    )
    table("Packets sent again, %", lost, "As TCP counts them; bursts of the sender itself are among them.")
