"""A thin wire to measure on: network namespaces as hosts, joined by a bridge, each on a link of a given rate.

    python benchmarks/netlab.py --hosts 2 --rate 1gbit -- python train.py
    python benchmarks/netlab.py --hosts 2 --rate 100mbit --check

Linux, root and iproute2 (`ip`, `tc`) only. The command runs once per host with RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and NETLAB_RATE set, so `torch.distributed.init_process_group` needs no
arguments beyond the backend. As a library:

    with Lab(hosts=2, rate="1gbit") as lab:
        exit_code = lab.run(["python", "train.py"])

Every link is shaped in both directions: what a host sends at its own end, what it receives at the bridge's end. The
bridge and all links live inside the namespaces, so nothing of the machine's own network is touched, and deleting the
namespaces removes everything. There is no added delay or loss: only the rate is thin.

Hosts share out the cores of the machine, where there is one for each of them, so that no host computes on another's.

Each namespace's name holds the process id and start time of its lab. A lab that was killed outright (SIGKILL) cannot
clean up, so the next one to start removes every namespace whose lab no longer lives, with the processes in it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

INTERFACE = "eth0"
MASTER_PORT = 29500
SUBNET = "198.18.0"  # RFC 2544: addresses set aside for benchmarks
MAX_HOSTS = 250
MAX_GSO_BYTES = 65536  # the largest packet that TCP hands to a link before segmentation
MIN_GSO_BYTES = 4096
BURST_SECONDS = 0.001  # what a link may send at once after a pause; must outlast the kernel timer's delays
QUEUE_SECONDS = 0.05  # what may wait in front of a link before packets are dropped
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
NAME = re.compile(r"netlab-(\d+)-(\d+)-\d+-\w+")
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_numbers = itertools.count()


class LabError(Exception):
    """The lab cannot be built or used; the message is one line for the user."""


def parse_rate(text: str) -> float:
    """Bits per second of a rate such as `"100mbit"` or `"2.5gbit"` (tc's words, powers of ten)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower())
    if not match or float(match[1]) == 0:
        raise LabError(f"rate {text!r} is not a rate: give a number and kbit, mbit or gbit, such as 100mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


class Lab:
    """`hosts` network namespaces joined by a bridge, each link shaped to `rate` in both directions.

    Args:
        hosts: number of hosts, 1 to 250. Host i has the address 198.18.0.(i+1).
        rate: rate of every host's link, in tc's words: "10mbit", "1gbit".

    Raises:
        LabError: not Linux, not root, no `ip` or `tc`, a rate that is none, or a kernel that refuses.
    """

    def __init__(self, hosts: int = 2, rate: str = "1gbit"):
        if not 1 <= hosts <= MAX_HOSTS:
            raise LabError(f"hosts={hosts}: give 1 to {MAX_HOSTS}")
        self.bits_per_second = parse_rate(rate)
        self.hosts, self.rate = hosts, rate
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
                processes.append(self._start(rank, command, env or {}))
            return _first_failure(processes)
        finally:
            with _signals_held():
                _stop(processes)

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"{SUBNET}.{host + 1}"

    def _build(self) -> None:
        for namespace in [self.switch, *self.namespaces]:
            _call("ip", "netns", "add", namespace)
        _call("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for host, namespace in enumerate(self.namespaces):
            self._plug_in(host, namespace)

    def _plug_in(self, host: int, namespace: str) -> None:
        port = f"port{host}"
        _call("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", INTERFACE, "netns", namespace)
        _call("ip", "-n", self.switch, "link", "set", port, "master", "bridge")
        _call("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        _call("ip", "-n", namespace, "link", "set", "lo", "up")
        self._shape(self.switch, port)
        self._shape(namespace, INTERFACE)

    def _shape(self, namespace: str, link: str) -> None:
        gso, burst = self.shaping()
        limit = int(max(4 * burst, self.bits_per_second / 8 * QUEUE_SECONDS))
        _call("ip", "-n", namespace, "link", "set", link, "gso_max_size", str(gso), "up")
        _call("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", "tbf",
              "rate", f"{self.bits_per_second:.0f}bit", "burst", str(burst), "limit", str(limit))  # fmt: skip

    def shaping(self) -> tuple[int, int]:
        """The largest packet in front of a link, and what an idle link takes at once, in bytes."""
        bytes_per_second = self.bits_per_second / 8
        # A packet larger than the bucket would be cut up in software, so packets are bounded first: by what the
        # link carries in BURST_SECONDS, or slow links would get tens of milliseconds for nothing after each pause.
        gso = int(min(MAX_GSO_BYTES, max(MIN_GSO_BYTES, bytes_per_second * BURST_SECONDS)))
        return gso, int(max(gso + 1024, bytes_per_second * BURST_SECONDS))  # 1024: GSO sizes leave out link headers

    def _start(self, rank: int, command: list[str], env: dict[str, str]) -> subprocess.Popen:
        env = {**os.environ, **self._rank_env(rank), **env}
        pipe = {} if rank == 0 else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
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
            "GLOO_SOCKET_IFNAME": INTERFACE, "NETLAB_RATE": self.rate,
        }  # fmt: skip


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
    dead = [name for name in names if (match := NAME.fullmatch(name)) and not _lives(int(match[1]), int(match[2]))]
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


def _lives(pid: int, start_ticks: int) -> bool:
    return _start_ticks(pid) == start_ticks


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


class _signals_held:
    """Holds back Ctrl-C and its kin for as long as cleaning up takes (signals reach the main thread only)."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __enter__(self):
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self.NUMBERS)

    def __exit__(self, *_):
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)


def _raise_exit(number: int, _frame) -> None:
    raise SystemExit(128 + number)


def probe(seconds: float) -> None:
    """The two ends of `--check`: rank 1 sends to rank 0 for `seconds`; rank 0 prints the goodput it saw."""
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(address) as server:
            print_goodput(server.accept()[0], os.environ["NETLAB_RATE"])
    elif rank == 1:
        send_for(seconds, address)


def send_for(seconds: float, address: tuple[str, int]) -> None:
    for _ in range(100):  # the other end may not listen yet
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    data, end = bytes(1 << 16), time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(data)
    connection.close()


def print_goodput(connection: socket.socket, rate: str) -> None:
    buffer, received = bytearray(1 << 20), 0
    connection.recv_into(buffer)  # the first bytes start the clock
    start = time.monotonic()
    while count := connection.recv_into(buffer):
        received += count
    goodput = 8 * received / (time.monotonic() - start)
    print(f"TCP goodput {goodput / 1e6:.2f} Mb/s on a {rate} link: {goodput / parse_rate(rate):.3f} of the rate "
          f"(at most 0.956: the rest is headers)")  # fmt: skip


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="netlab.py", usage="netlab.py [--hosts N] [--rate RATE] -- COMMAND...",
                                     description="Runs a command on N hosts joined by thin links.")  # fmt: skip
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts, one process each (default 2)")
    parser.add_argument("--rate", default="1gbit", help="rate of each link: 10mbit, 1gbit, ... (default 1gbit)")
    parser.add_argument("--check", action="store_true", help="measure TCP goodput from host 1 to host 0, and stop")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long --check sends (default 3)")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options, command = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if options.probe:
        return probe(options.seconds) or 0
    if options.check:
        command = [sys.executable, __file__, "--probe", "--seconds", str(options.seconds)]
        options.hosts = max(options.hosts, 2)
    if not command:
        parser.error("give the command to run after '--', or --check")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise_exit)
    with Lab(options.hosts, options.rate) as lab:
        return lab.run(command)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        sys.exit(f"netlab: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
