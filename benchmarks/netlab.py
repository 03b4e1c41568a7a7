"""A network to measure on: network namespaces as hosts, each on a line of a given rate, delay and loss.

    python benchmarks/netlab.py --hosts 2 --line 1gbit -- python train.py
    python benchmarks/netlab.py --hosts 4 --line ocean --sites 2 --congestion cubic -- python train.py
    python benchmarks/netlab.py --line home --check

Linux, root and iproute2 (`ip`, `tc`) only. The command runs once per host with RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and NETLAB_LINE set, so `torch.distributed.init_process_group` needs no
arguments beyond the backend. As a library:

    with Lab(hosts=2, line="ocean") as lab:
        exit_code = lab.run(["python", "train.py"])

`--line` takes a name (`--check` shows the values), a rate, and changes of single values: "ocean,loss=1%,up=20mbit". Several
lines are those of host 0, 1, ...; the last one serves the hosts that are left.

Lines with nothing but rates are veth pairs on a bridge. The kernel shapes them in both directions: what a host sends at its
own end, what it receives at the bridge's end. All other lines are TUN devices, and one process, forwarder.cpp, carries
packets of 1,500 bytes between them: up to hundreds of Mb/s, on one core. Both live inside the namespaces, so nothing of the
machine's own network is touched, and deleting the namespaces removes everything.

Hosts share out the cores of the machine, where there is one for each of them, so that no host computes on another's.

Each namespace's name holds the process id and start time of its lab. A lab that was killed outright (SIGKILL) cannot
clean up, so the next one to start removes every namespace whose lab no longer lives, with the processes in it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lines import LINES, QUEUE_SECONDS, Forwarder, LabError, Line, parse_line

INTERFACE = "eth0"
MASTER_PORT = 29500
SUBNET = "198.18.0"  # RFC 2544: addresses set aside for benchmarks
PRIVATE = "192.168"  # of hosts behind NAT
MAX_HOSTS = 250
MAX_GSO_BYTES = 65536  # the largest packet that TCP hands to a link before segmentation
MIN_GSO_BYTES = 4096
BURST_SECONDS = 0.001  # what a link may send at once after a pause; must outlast the kernel timer's delays
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
NAME = re.compile(r"netlab-(\d+)-(\d+)-\d+-\w+")
_numbers = itertools.count()


class Lab:
    """`hosts` network namespaces, each on a line of its own.

    Args:
        hosts: number of hosts, 1 to 250. Host i has the address 198.18.0.(i+1).
        line: of all hosts, or a list whose last entry serves the hosts that are left; a `Line`, or text for `parse_line`.
        sites: in how many sites the hosts stand, in equal runs; between hosts of a site there are only rates. 0: each alone.
        nat: the hosts behind NAT, which can open connections but not be reached.
        congestion: the hosts' TCP congestion control, such as "cubic"; None for the machine's default.
        seed: of losses, jitter and reordering.

    Raises:
        LabError: not Linux, not root, no `ip` or `tc`, a line that is none, or a kernel that refuses.
    """

    def __init__(
        self,
        hosts: int = 2,
        line: str | Line | Sequence[str | Line] = "1gbit",
        sites: int = 0,
        nat: Collection[int] = (),
        congestion: str | None = None,
        seed: int = 0,
    ):
        if not 1 <= hosts <= MAX_HOSTS:
            raise LabError(f"hosts={hosts}: give 1 to {MAX_HOSTS}")
        if not 0 <= sites <= hosts or (sites and hosts % sites):
            raise LabError(f"sites={sites}: {hosts} hosts stand in as many equal sites as divide their number")
        if stray := sorted(set(nat) - set(range(hosts))):
            raise LabError(f"nat={stray}: there are hosts 0 to {hosts - 1}")
        given = [line] if isinstance(line, (str, Line)) else list(line)
        if not 1 <= len(given) <= hosts:
            raise LabError(f"{len(given)} lines for {hosts} hosts: give one, or one for each host")
        given += given[-1:] * (hosts - len(given))
        self.lines = [each if isinstance(each, Line) else parse_line(each) for each in given]
        self.hosts, self.nat, self.congestion, self.seed = hosts, frozenset(nat), congestion, seed
        self.line_text = line if isinstance(line, str) else ";".join(map(str, given))
        self.sites = [host * sites // hosts if sites else host for host in range(hosts)]
        self.forwarder: Forwarder | None = None
        self._by_kernel = all(each.only_rates for each in self.lines) and not nat
        prefix = f"netlab-{os.getpid()}-{_start_ticks(os.getpid())}-{next(_numbers)}"
        self.switch = f"{prefix}-switch"
        self.namespaces = [f"{prefix}-host{host}" for host in range(hosts)]

    def __enter__(self) -> Lab:
        require_privileges()
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Kills what still runs in the namespaces and removes them; safe to call twice."""
        with _signals_held():
            if self.forwarder is not None:
                self.forwarder.close()
            for namespace in [*self.namespaces, self.switch]:
                remove_namespace(namespace)

    def run(self, command: list[str], env: dict[str, str] | None = None) -> int:
        """Runs `command` on every host; returns 0, or the exit code of the first that failed (128 + n for signal n).

        When one fails, the others are stopped. Host 0 writes straight to our output, the others through a `[rank]`
        prefix. `env` is added to each process's environment.
        """
        processes = []
        try:
            for rank in range(self.hosts):
                # One after the other, so that those that run are stopped if the next one cannot start.
                processes.append(self._start(rank, command, env or {}))
            return _first_failure(processes)
        finally:
            with _signals_held():
                _stop(processes)

    def ask(self, command: list[str], **env: str) -> Any:
        """Runs `command` on every host with a file's name behind it; returns the JSON that one of them writes there.

        Raises:
            LabError: a host failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "answer.json")
            # In a namespace without a name server, PyTorch warns of each connection that it cannot name.
            quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
            if code := self.run([*command, str(file)], {"OMP_NUM_THREADS": "1", **quiet, **env}):
                raise LabError(f"a host failed with exit code {code}")
            return json.loads(file.read_text())

    def address(self, host: int) -> str:
        """IPv4 address at which others see a host."""
        return f"{SUBNET}.{host + 1}"

    def set_line(self, host: int, line: str | Line) -> None:
        """Change a host's line while the lab runs.

        Raises:
            LabError: a lab whose lines had only rates gets delay or loss.
        """
        line = line if isinstance(line, Line) else parse_line(line)
        if self.forwarder is not None:
            self.forwarder.set_line(host, line)
        elif line.only_rates:
            self._shape(self.namespaces[host], INTERFACE, line.up)
            self._shape(self.switch, f"port{host}", line.down)
        else:
            raise LabError(f"{line}: a lab that began with nothing but rates cannot change to delay or loss")
        self.lines[host] = line

    def cut(self, host: int) -> None:
        """Drop all packets from and to a host; it sees no other sign of it."""
        if self.forwarder is not None:
            self.forwarder.tell("cut", host)
        else:
            _call("ip", "-n", self.switch, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """End a cut."""
        if self.forwarder is not None:
            self.forwarder.tell("mend", host)
        else:
            _call("ip", "-n", self.switch, "link", "set", f"port{host}", "master", "bridge")

    def _build(self) -> None:
        for namespace in [self.switch, *self.namespaces]:
            _call("ip", "netns", "add", namespace)
        if self._by_kernel:
            self._build_bridge()
        else:
            self._build_forwarder()
        for namespace in self.namespaces:
            _call("ip", "-n", namespace, "link", "set", "lo", "up")
            if self.congestion is not None:
                set_congestion(namespace, self.congestion)

    def _build_bridge(self) -> None:
        _call("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for host, namespace in enumerate(self.namespaces):
            port = f"port{host}"
            _call("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", INTERFACE, "netns", namespace)
            _call("ip", "-n", self.switch, "link", "set", port, "master", "bridge")
            _call("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            self._shape(self.switch, port, self.lines[host].down)
            self._shape(namespace, INTERFACE, self.lines[host].up)

    def _build_forwarder(self) -> None:
        public = [self.address(host) for host in range(self.hosts)]
        private = [f"{PRIVATE}.{host}.2" if host in self.nat else None for host in range(self.hosts)]
        self.forwarder = Forwarder(self.namespaces, self.lines, self.sites, public, private, self.seed)
        for host, namespace in enumerate(self.namespaces):
            _call("ip", "-n", namespace, "address", "add", f"{private[host] or public[host]}/24", "dev", INTERFACE)
            # A sender's bursts wait in the forwarder's queue, not in the device's, which would drop them.
            _call("ip", "-n", namespace, "link", "set", INTERFACE, "txqueuelen", "10000", "up")
            if private[host]:
                _call("ip", "-n", namespace, "route", "add", f"{SUBNET}.0/24", "dev", INTERFACE)

    def _shape(self, namespace: str, link: str, rate: float) -> None:
        """Limit what leaves by a link. A queue of an earlier rate is dropped: its packets may not fit into the bucket."""
        gso, burst = shaping(rate)
        handle = f"{1 + next(_numbers) % 0xFFFE:x}:"  # a new one, or tc would keep the queue
        limit = int(max(4 * burst, rate / 8 * QUEUE_SECONDS))
        _call("ip", "-n", namespace, "link", "set", link, "gso_max_size", str(gso), "up")
        _call("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", "handle", handle, "tbf",
              "rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(limit))  # fmt: skip

    def _start(self, rank: int, command: list[str], env: dict[str, str]) -> subprocess.Popen:
        env = {**os.environ, **self._rank_env(rank), **env}
        pipe = {} if rank == 0 else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            # In a session of its own, the host and all that it starts can be stopped together.
            ["ip", "netns", "exec", self.namespaces[rank], *command],
            stdin=subprocess.DEVNULL, env=env, start_new_session=True, preexec_fn=partial(_begin, self._cores(rank)), **pipe,
        )  # fmt: skip
        if rank:
            threading.Thread(target=_forward, args=(rank, process.stdout), daemon=True).start()
        return process

    def _cores(self, rank: int) -> set[int]:
        cores = sorted(os.sched_getaffinity(0))
        return set(cores[rank :: self.hosts] if self.hosts <= len(cores) else cores)

    def _rank_env(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank), "WORLD_SIZE": str(self.hosts), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0), "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE, "NETLAB_LINE": self.line_text,
        }  # fmt: skip


def shaping(rate: float) -> tuple[int, int]:
    """The largest packet in front of a link of this rate, and what an idle link takes at once, in bytes."""
    # A packet larger than the bucket would be cut up in software, so packets are bounded first: by what the
    # link carries in BURST_SECONDS, or slow links would get tens of milliseconds for nothing after each pause.
    gso = int(min(MAX_GSO_BYTES, max(MIN_GSO_BYTES, rate / 8 * BURST_SECONDS)))
    return gso, int(max(gso + 1024, rate / 8 * BURST_SECONDS))  # 1024: GSO sizes leave out link headers


def set_congestion(namespace: str, name: str) -> None:
    """Choose a namespace's TCP congestion control.

    Linux gives a namespace no algorithm that is not allowed on the whole machine, so it is allowed there, and stays so.
    """
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if name not in available:
        raise LabError(f"congestion {name!r}: this kernel has {', '.join(available)}")
    if name not in allowed.read_text().split():
        allowed.write_text(f"{allowed.read_text().strip()} {name}")
    _call("ip", "netns", "exec", namespace, "sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={name}")


def require_privileges() -> None:
    """Raises LabError, saying what is missing, where no lab can be built."""
    if sys.platform != "linux":
        raise LabError(f"netlab needs Linux's network namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise LabError("netlab needs root to make network namespaces: run it with sudo")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LabError(f"netlab needs the command '{tool}': install iproute2")


def remove_leftovers() -> list[str]:
    """Removes the namespaces of labs that no longer live, with the processes in them; returns their names."""
    names = [line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.strip()]
    labs = {name: match for name in names if (match := NAME.fullmatch(name))}
    dead = [name for name, match in labs.items() if _start_ticks(int(match[1])) != int(match[2])]
    for name in dead:
        remove_namespace(name)
    return dead


def remove_namespace(name: str) -> None:
    """Kills the processes in a namespace and deletes it; one that does not exist is no error."""
    if not Path("/run/netns", name).exists():
        return
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    for pid in pids:
        _signal(os.kill, int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise LabError(f"'{' '.join(command)}' failed: {lines[-1]}")
    return done.stdout


def _start_ticks(pid: int) -> int:
    """When a process started, in ticks since boot: with its id, this names a process once and for all."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # field 22; the name before it may hold spaces


def _begin(cores: set[int]) -> None:
    """Die with the parent, and keep to the host's cores."""
    os.sched_setaffinity(0, cores)
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _forward(rank: int, pipe) -> None:
    for line in pipe:
        sys.stdout.buffer.write(f"[{rank}] ".encode() + line)
        sys.stdout.buffer.flush()


def _first_failure(processes: list[subprocess.Popen]) -> int:
    while True:
        # The others may wait for the failed one for ever, so the first failure counts.
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.02)


def _stop(processes: list[subprocess.Popen]) -> None:
    """Stops whole process groups: SIGTERM, then SIGKILL to those that still live after GRACE_SECONDS."""
    for process in processes:
        if process.poll() is None:
            _signal(os.killpg, process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.02)
    for process in processes:
        if process.poll() is None:
            _signal(os.killpg, process.pid, signal.SIGKILL)
        process.wait()


def _signal(send, pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        send(pid, number)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Holds back Ctrl-C and its kin for as long as cleaning up takes (signals reach the main thread only)."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raise_exit(number: int, _frame) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def cuts(lab: Lab, timetable: Sequence[str]) -> Iterator[None]:
    """Cut lines by a timetable of "HOST:START:SECONDS", counted from now, while the block runs."""
    timers, ended = [], threading.Event()

    def cut(host: int, seconds: float) -> None:
        lab.cut(host)
        ended.wait(seconds)  # since the line was cut, which may be late on a busy machine
        lab.mend(host)

    for entry in timetable:
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", entry)
        if not match or int(match[1]) >= lab.hosts:
            raise LabError(f"cut {entry!r}: give HOST:START:SECONDS, with a host from 0 to {lab.hosts - 1}")
        host, start, seconds = int(match[1]), float(match[2]), float(match[3])
        timers.append(threading.Timer(start, cut, (host, seconds)))
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        ended.set()
        for timer in timers:
            timer.cancel()
            timer.join()


def main(argv: list[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="netlab.py",
        usage="netlab.py [options] -- COMMAND...",
        description="Runs a command on N hosts, each on a line of a given rate, delay and loss.",
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts, one process each (default 2)")
    parser.add_argument(
        "--line",
        nargs="+",
        default=["1gbit"],
        help=f"of all hosts, or of host 0, 1, ...: {', '.join(LINES)}, a rate, or ocean,loss=1%%,up=20mbit (default 1gbit)",
    )
    parser.add_argument("--sites", type=int, default=0, help="sites of equal size; only rates lie between their hosts")
    parser.add_argument("--nat", type=int, nargs="+", default=[], metavar="HOST", help="hosts behind NAT")
    parser.add_argument("--congestion", help="TCP congestion control of the hosts: cubic, bbr, reno")
    parser.add_argument(
        "--cut", nargs="+", default=[], metavar="HOST:START:SECONDS", help="when to cut lines, and for how long"
    )
    parser.add_argument("--seed", type=int, default=0, help="of losses, jitter and reordering")
    parser.add_argument("--check", action="store_true", help="measure the line between hosts 0 and 1, and stop")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long --check measures each value (default 3)")
    options, command = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not command and not options.check:
        parser.error("give the command to run after '--', or --check")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise_exit)
    hosts = max(options.hosts, 2) if options.check else options.hosts
    line = options.line if len(options.line) > 1 else options.line[0]
    with Lab(hosts, line, options.sites, options.nat, options.congestion, options.seed) as lab:
        if options.check:
            from line_check import check

            return 1 if check(lab, options.seconds) else 0
        with cuts(lab, options.cut):
            return lab.run(command)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        sys.exit(f"netlab: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
