"""Programs in processes of their own that start in milliseconds, for tests of how a process ends.

A program is a function. It runs in a process forked from the server, which has imported PyTorch and thinwire already. It
has its own environment, streams and exit code. At the end the interpreter is finalised as after a script: it waits for
threads, runs exit handlers, and destroys what is left.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .spawn import CONTEXT

_all: weakref.WeakSet[Program] = weakref.WeakSet()


class Program:
    """`function(*arguments)` as the main program of a process, which starts at once, with the methods of `subprocess.Popen`.

    Args:
        function: of a test file or a module that it imports; it is pickled by name.
        arguments: picklable.
        folder: a folder that exists; streams are written to files in it.
        environment: variables to add to this process's environment.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, folder: Path, **environment: str):
        self._streams = tempfile.mkdtemp(dir=folder)
        for name in ("stdout", "stderr"):
            Path(self._streams, name).touch()
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._process = CONTEXT.Process(target=_main, args=(function, arguments, env, self._streams))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        _all.add(self)

    @property
    def stdout(self) -> str:
        """What the program has written to stdout until now."""
        return Path(self._streams, "stdout").read_text()

    @property
    def stderr(self) -> str:
        return Path(self._streams, "stderr").read_text()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the program was still at work after `timeout` seconds; it is killed.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0, self.stdout, self.stderr)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What the program wrote until its end, to stdout and stderr."""
        self.wait(timeout)
        return self.stdout, self.stderr

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Waits until the condition holds; fails if the program ends before."""
        wait_until(lambda: self.returncode is not None or condition(), what)
        assert condition(), f"ended with exit code {self.returncode} before {what}: {self.stderr}"

    def wait_for_line(self, line: str) -> None:
        self.wait_until(lambda: line in self.stdout.splitlines(), f"the line {line!r}")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def wait_until(condition: Callable[[], object], what: str, seconds: float = 400, poll: float = 0.02) -> None:
    """Waits until the condition holds; fails after so many seconds, which a loaded machine may need."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {what}"
        time.sleep(poll)


def below(pid: int) -> list[int]:
    """All processes below one, from the kernel's own table: workers, fork server and resource tracker."""
    found, new = list[int](), [pid]
    while new:
        new = [child for one in new for child in _children(one)]
        found += new
    return found


def _children(pid: int) -> list[int]:
    found = list[int]()
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def workers_of(pid: int) -> list[int]:
    """The processes below that have a thread pool, in the order of their start: numbers begin anew after the largest."""
    found = list[tuple[int, int]]()
    for one in below(pid):
        with contextlib.suppress(OSError):  # it has just ended
            if len(os.listdir(f"/proc/{one}/task")) > 4:
                found.append((int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[19]), one))
    return [one for _, one in sorted(found)]


@contextlib.contextmanager
def programs(
    function: Callable[..., None], arguments: list[tuple], folder: Path, **environment: str
) -> Iterator[list[Program]]:
    """One program for each tuple of arguments; those that still run at the end are killed."""
    started: list[Program] = []
    try:
        for values in arguments:
            started.append(Program(function, *values, folder=folder, GLOO_SOCKET_IFNAME="lo", **environment))
        yield started
    finally:
        for program in started:
            program.kill()


@contextlib.contextmanager
def killed_after_an_error() -> Iterator[None]:
    """Context in which programs that start are killed if it raises: a test that fails leaves none at work beside the others."""
    before = set(_all)
    try:
        yield
    except BaseException:
        for program in set(_all) - before:
            program.kill()
        raise


def _main(function: Callable[..., None], arguments: tuple, environment: dict[str, str], streams: str) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{streams}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a launcher under test blocks signals while it starts the server
    gc.freeze()  # what the server has imported: the collections at the end need not look at it
    if sys.version_info >= (3, 13):  # `multiprocessing` has cleared what was registered when the server imported it
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    code = 0
    try:
        function(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.pythonapi.Py_Exit(code)  # `multiprocessing` would end the process without finalising the interpreter
