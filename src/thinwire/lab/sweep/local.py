"""A sweep on this machine: a few runs at a time, each in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..files import read_json, write_json
from ..train.signals import heard
from .execute import start
from .file import PlannedRun
from .show import print_ended
from .status import status_of

POLL_SECONDS = 0.2
GRACE_SECONDS = 60  # in which a run that is asked to stop may finish its step and save a checkpoint
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Running = list[tuple[PlannedRun, subprocess.Popen]]


def run_locally(
    runs: Sequence[PlannedRun], at_once: int, watch: Callable[[Sequence[PlannedRun]], None] = print_ended
) -> None:
    """Start or resume all runs that are neither finished nor running, `at_once` at a time; a failure stops no other run.

    Args:
        runs: in this order.
        at_once: how many run at a time; each of them starts its own workers.
        watch: called several times a second with the runs that have ended since the last call, in whatever way.

    Raises:
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, when all runs have ended in good order.
        ValueError: a run cannot be started; likewise.
    """
    running: Running = []
    with _Interrupts() as interrupts:
        try:
            for run in runs:
                while len(running) >= at_once:
                    running = _still_running(running, watch)
                with interrupts.held():
                    process = None if status_of(run).state == "finished" else start(run)
                    running += [] if process is None else [(run, process)]
            while running:
                running = _still_running(running, watch)
        except BaseException as error:
            try:
                stop([process for _, process in running])
            finally:  # a second Ctrl-C ends the waiting only
                for run, _ in running:
                    ended = read_json(run.records / "ended.json") or {}
                    if ended.get("code") is None:  # the signal came before the run could write how it ends
                        write_json(run.records / "ended.json", {"code": 128 + signal.SIGTERM})
            if not isinstance(error, KeyboardInterrupt):
                raise
            raise KeyboardInterrupt(f"runs under way: {len(running)}; the same command goes on") from None


def _still_running(running: Running, watch: Callable[[Sequence[PlannedRun]], None]) -> Running:
    time.sleep(POLL_SECONDS)
    watch([run for run, process in running if process.poll() is not None])
    return [(run, process) for run, process in running if process.returncode is None]


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """SIGTERM to all; SIGKILL, workers included, to those that stay."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Interrupts:
    """Treat SIGTERM and SIGHUP as Ctrl-C, and delay all three while a run starts, so that no started run is forgotten.

    Under `nohup`, SIGHUP stays ignored.
    """

    def __enter__(self) -> _Interrupts:
        self._is_held, self._came = False, False
        self._before = {number: signal.signal(number, self._receive) for number in heard(STOPPING)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context at whose end the interrupts of meanwhile come."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._came:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: object) -> None:
        self._came = True
        if not self._is_held:
            raise KeyboardInterrupt
