"""Stops a run after a signal: all workers stop after the same step, with a checkpoint.

A signal only sets a flag. The flags of a step are summed over the workers during the next step, and read at its end. So no
worker waits for the sum, and all stop one step after the signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType

import torch

from ....comm import Communicator, Handle
from ..signals import SIGNALS

SAVED = 75  # EX_TEMPFAIL of sysexits.h: not finished, run again


class Interrupted(Exception):
    """A signal stopped the run, and it was saved.

    Args:
        signal: number of the signal.
        checkpoint: folder of the checkpoint.
    """

    def __init__(self, signal: int, checkpoint: Path):
        super().__init__(signal, checkpoint)
        self.signal = signal
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signal).name}, saved in {self.checkpoint}"

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, as in shells; else 75."""
        return 128 + self.signal if self.signal == signal.SIGINT else SAVED


class Interruption:
    """Handles SIGINT, SIGTERM and SIGUSR1 and unblocks them. Use it in the main thread.

    Example:
        >>> import os, signal
        >>> from thinwire.comm import LocalWorld
        >>> with Interruption() as interruption:
        ...     os.kill(os.getpid(), signal.SIGUSR1)
        ...     LocalWorld(1).run(lambda comm: [interruption.requested(comm) for step in range(2)]) == [[0, signal.SIGUSR1]]
        True
    """

    def __init__(self):
        self.received = 0
        self._vote: Handle | None = None

    def __enter__(self) -> Interruption:
        # A launcher of ours has blocked them until now, so that none is lost.
        self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def requested(self, comm: Communicator, at_once: bool = False) -> int:
        """The signal that any worker had received by its previous call, or 0; the same on all workers.

        Args:
            comm: sums 12 bytes over the workers, which all call this after each step.
            at_once: return the signals received by now, and wait for the slowest worker.
        """
        vote, self._vote = self._begin_vote(comm) if at_once else self._vote, None
        votes = vote.wait().tolist() if vote else []
        agreed = next((number for number, count in zip(SIGNALS, votes, strict=False) if count), 0)
        if not (agreed or at_once):
            self._vote = self._begin_vote(comm)
        return int(agreed)

    def _begin_vote(self, comm: Communicator) -> Handle:
        return comm.all_reduce(torch.tensor([number == self.received for number in SIGNALS], dtype=torch.int32))

    def settle(self) -> None:
        """Wait for the vote that the last step began. Call it before closing the connections."""
        if self._vote:
            self._vote.wait()


def requeue() -> str:
    """Requeue this SLURM job; returns a short message about the result."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    # A task of a job array is requeued alone.
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
    if not job:
        return "not requeued: this is no SLURM job"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not requeued: scontrol requeue {job}: {error}"
    return f"not requeued: {done.stderr.strip()}" if done.returncode else f"SLURM will start job {job} again"
