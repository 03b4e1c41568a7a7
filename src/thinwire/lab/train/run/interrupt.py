"""Stops a run after a signal: all workers stop after the same step, with a checkpoint.

A signal only sets a flag. The flags of a step are summed over the workers during the next step, and read at its end. So no
worker waits for the sum, and all stop one step after the signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
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
        checkpoint: folder of the checkpoint; None if the run had not begun, so that there is nothing to save.
    """

    def __init__(self, signal: int, checkpoint: Path | None):
        super().__init__(signal, checkpoint)
        self.signal = signal
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        saved = "before it began" if self.checkpoint is None else f"saved in {self.checkpoint}"
        return f"stopped by {signal.Signals(self.signal).name}, {saved}"

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, as in shells; else 75."""
        return 128 + self.signal if self.signal == signal.SIGINT else SAVED


class Interruption:
    """Handles SIGINT, SIGTERM and SIGUSR1 and unblocks them. Use it in the main thread.

    Args:
        end: called in another thread with a signal that comes before `has_begun`. It ends the process, whose main thread may
            wait for other workers in C++ or Rust. None: such a signal waits for the first step.

    Attributes:
        has_begun: whether the run has begun, so that there may be something to save.
        received: the first signal; 0 for none.

    Example:
        >>> import os, signal
        >>> from thinwire.comm import LocalWorld
        >>> with Interruption() as interruption:
        ...     os.kill(os.getpid(), signal.SIGUSR1)
        ...     LocalWorld(1).run(lambda comm: [interruption.requested(comm) for step in range(2)]) == [[0, signal.SIGUSR1]]
        True
    """

    def __init__(self, end: Callable[[int], object] | None = None):
        self.received, self.has_begun = 0, False
        self._vote: Handle | None = None
        self._end = end

    def __enter__(self) -> Interruption:
        if self._end is not None:
            # Python writes each signal here at once, whatever the main thread does.
            reads, self._writes = os.pipe()
            os.set_blocking(self._writes, False)
            signal.set_wakeup_fd(self._writes)
            threading.Thread(target=self._listen, args=(reads, self._end), name="thinwire-signals", daemon=True).start()
        # A launcher of ours has blocked them until now, so that none is lost.
        self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._end is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._writes)  # ends the thread

    def _listen(self, reads: int, end: Callable[[int], object]) -> None:
        while number := os.read(reads, 1):
            if not self.has_begun and number[0] in SIGNALS:
                end(number[0])
        os.close(reads)

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
