"""Programs in processes of their own that start in milliseconds, for tests of how a process ends.

A program is a function. It runs in a process forked from the server, which has imported PyTorch and thinwire already. It
has its own environment, streams and exit code. At the end the interpreter is finalised as after a script: it waits for
threads, runs exit handlers, and destroys what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .spawn import CONTEXT


class Program:
    """`function(*arguments)` as the main program of a process, which starts at once.

    Args:
        function: of a test file or a module that it imports; it is pickled by name.
        arguments: picklable.
        folder: a folder that exists; streams are written to files in it.
        environment: variables to add to this process's environment.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, folder: Path, **environment: str):
        self._streams = tempfile.mkdtemp(dir=folder)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
        self._process = CONTEXT.Process(target=_main, args=(function, arguments, env, self._streams))
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def stdout(self) -> str:
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        return self._read("stderr")

    def _read(self, name: str) -> str:
        path = Path(self._streams, name)
        return path.read_text() if path.exists() else ""

    def wait_for_line(self, line: str, timeout_seconds: float = 60.0) -> None:
        """Waits until the program has printed `line`; an error if it ends before."""
        end = time.monotonic() + timeout_seconds
        while line not in self.stdout.splitlines():
            assert self._process.exitcode is None, f"the program ended with {self._process.exitcode}: {self.stderr}"
            assert time.monotonic() < end, f"the program did not print {line!r} in {timeout_seconds} seconds"
            time.sleep(0.01)

    def wait(self, timeout_seconds: float = 60.0) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: the program was still at work after `timeout_seconds`; it is killed.
        """
        self._process.join(timeout_seconds)
        if self._process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(str(self._process), timeout_seconds, self.stdout, self.stderr)
        return self._process.exitcode

    def interrupt(self) -> None:
        """Sends SIGINT, as Ctrl-C does."""
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def programs(
    function: Callable[..., None], arguments: list[tuple], folder: Path, **environment: str
) -> Iterator[list[Program]]:
    """One program for each tuple of arguments; those that still run at the end are killed."""
    started: list[Program] = []
    try:
        for values in arguments:
            started.append(Program(function, *values, folder=folder, **environment))
        yield started
    finally:
        for program in started:
            program.kill()


def _main(function: Callable[..., None], arguments: tuple, environment: dict[str, str], streams: str) -> None:
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(f"{streams}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a launcher under test blocks signals while it starts the server
    gc.freeze()  # what the server has imported: the collections at the end need not look at it
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
