"""The signals that stop a run with a checkpoint."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # if several arrive at once, the first in this order counts


def ignore_requests() -> None:
    """Ignore the signals. For helper processes: SLURM signals all processes of a job."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
