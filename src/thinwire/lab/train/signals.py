"""The signals that stop a run with a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

# If several arrive at once, the first in this order counts. The last comes when a terminal closes, as after a lost ssh.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those of the signals that this process may handle: all but a SIGHUP that it was started to ignore, as by `nohup`."""
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def ignore_requests() -> None:
    """Ignore the signals. For helper processes: SLURM signals all processes of a job."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Context that blocks signals; the processes that it starts never get them, unless they unblock them."""
    resource_tracker.ensure_running()  # starting it later would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
