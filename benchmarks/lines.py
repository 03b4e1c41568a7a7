"""Lines between hosts of the network lab: rates, delay, loss, and the forwarder that imitates them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

QUEUE_SECONDS = 0.05  # what may wait in front of a rate before packets are dropped
SOURCE = Path(__file__).with_name("forwarder.cpp")
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class LabError(Exception):
    """The lab cannot be built or used; the message is one line for the user."""


@dataclass(frozen=True)
class Line:
    """How a host reaches the others.

    Between two hosts, each direction has a quarter of the sum of both round trips and of both jitters, and the mean of both
    losses and of both reorderings. So between two hosts with equal lines, the values are those of the line.

    Args:
        up, down: rates in bits per second, of what the host sends and receives.
        round_trip: seconds between two hosts with this line, without queues.
        jitter: the round trip varies by up to so many seconds in both directions.
        loss: fraction of packets lost in each direction.
        reorder: fraction of packets held back by 1 to 5 ms while later ones pass.
    """

    up: float = 1e9
    down: float = 1e9
    round_trip: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0

    def __post_init__(self) -> None:
        if min(self.up, self.down) <= 0 or min(self.round_trip, self.jitter) < 0:
            raise LabError(f"{self}: rates are above 0, and times at least 0")
        if not (0 <= self.loss < 1 and 0 <= self.reorder < 1):
            raise LabError(f"{self}: loss and reorder are at least 0 and below 1 (100%)")
        if 2 * self.jitter > self.round_trip:
            raise LabError(f"{self}: jitter is at most half of the round trip")

    @property
    def only_rates(self) -> bool:
        """Whether the kernel's own token bucket is enough."""
        return not (self.round_trip or self.jitter or self.loss or self.reorder)


LINES = {
    "lan": Line(),
    "metro": Line(5e8, 5e8, round_trip=0.005),
    "continent": Line(3e8, 3e8, round_trip=0.040, jitter=0.001, loss=1e-4),
    "ocean": Line(2e8, 2e8, round_trip=0.100, loss=1e-3),
    "home": Line(2e7, 1e8, round_trip=0.030, jitter=0.002, loss=1e-4),
    "bad": Line(2e7, 2e7, round_trip=0.200, jitter=0.020, loss=1e-2, reorder=1e-2),
}


def parse_rate(text: str) -> float:
    """Bits per second of a rate such as `"100mbit"` or `"2.5gbit"` (tc's words, powers of ten)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower())
    if not match or float(match[1]) == 0:
        raise LabError(f"rate {text!r} is not a rate: give a number and kbit, mbit or gbit, such as 100mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


def parse_line(text: str) -> Line:
    """A line from its name, a rate, and changes of single values, separated by commas.

    Example:
        >>> parse_line("ocean,loss=1%,up=20mbit")
        Line(up=20000000.0, down=200000000.0, round_trip=0.1, jitter=0.0, loss=0.01, reorder=0.0)
    """
    line = Line()
    for number, word in enumerate(text.split(",")):
        key, equals, value = word.strip().partition("=")
        if equals:
            line = dataclasses.replace(line, **{key: _parse_value(key, value)})
        elif number == 0 and key in LINES:
            line = LINES[key]
        elif number == 0 and key[:1].isdigit():
            line = dataclasses.replace(line, up=parse_rate(key), down=parse_rate(key))
        else:
            raise LabError(
                f"line {text!r}: {key!r} is not a line: give one of {', '.join(LINES)}, or a rate such as 1gbit"
            )
    return line


def _parse_value(key: str, text: str) -> float:
    if key in ("up", "down"):
        return parse_rate(text)
    units = {"round_trip": ("s", "ms"), "jitter": ("s", "ms"), "loss": ("", "%"), "reorder": ("", "%")}
    if key not in units:
        raise LabError(
            f"{key!r} is not a value of a line: give one of {', '.join(f.name for f in dataclasses.fields(Line))}"
        )
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|%|)", text.strip())
    if not match or match[2] not in units[key]:
        raise LabError(f"{key}={text}: give a number and {' or '.join(unit or 'no unit' for unit in units[key])}")
    return float(match[1]) * {"ms": 1e-3, "%": 1e-2}.get(match[2], 1.0)


class Forwarder:
    """The process that carries packets between the TUN devices `eth0` of network namespaces.

    Args:
        namespaces: one for each host.
        lines: one for each host.
        sites: one number for each host; hosts of the same site have only their rates between them.
        public: IPv4 address of each host.
        private: address behind NAT of each host, or None without NAT.
        seed: of losses, jitter and reordering.
    """

    def __init__(
        self,
        namespaces: list[str],
        lines: list[Line],
        sites: list[int],
        public: list[str],
        private: list[str | None],
        seed: int = 0,
    ):
        self.lines, self.sites = list(lines), sites
        self._process = subprocess.Popen(
            [str(program()), str(seed), *namespaces],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._expect("ready")
        for host, line in enumerate(lines):
            self.tell("address", host, public[host], private[host] or "")
            self.set_line(host, line)

    def set_line(self, host: int, line: Line) -> None:
        """Change the line of a host; packets under way keep their times."""
        self.lines[host] = line
        self.tell("rate", host, line.up, line.down, QUEUE_SECONDS)
        for other in range(len(self.lines)):
            for path in ((host, other), (other, host)):
                self.tell("path", *path, *self._path(*path))

    def _path(self, start: int, end: int) -> tuple[float, ...]:
        if self.sites[start] == self.sites[end]:
            return 0.0, 0.0, 0.0, 0.0
        a, b = self.lines[start], self.lines[end]
        delay, jitter = (a.round_trip + b.round_trip) / 4, (a.jitter + b.jitter) / 4
        return delay, jitter, (a.loss + b.loss) / 2, (a.reorder + b.reorder) / 2

    def tell(self, *words: object) -> None:
        """Give a command of forwarder.cpp, and wait until it is carried out."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        self._expect("ok")

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._process.kill()
        self._process.communicate()

    def _expect(self, answer: str) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline().strip()
        if line != answer:
            self._process.kill()
            raise LabError(self._process.stderr.read().strip() or f"the forwarder answered {line!r}, not {answer!r}")


def program() -> Path:
    """The compiled forwarder; compiles it if there is none for this source."""
    # The name changes with the source, so an old program is never taken.
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    file = Path(__file__).parents[1] / "build" / f"forwarder-{digest}"
    if not file.exists():
        compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
        if compiler is None:
            raise LabError("lines with delay or loss need a C++ compiler: install g++")
        file.parent.mkdir(exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}")
        done = subprocess.run([compiler, "-O2", "-std=c++17", "-o", made, SOURCE], capture_output=True, text=True)
        if done.returncode:
            raise LabError(f"{SOURCE.name} does not compile: {done.stderr.strip().splitlines()[0]}")
        # Whole or not at all: two labs may compile at once.
        made.rename(file)
    return file
