"""Stops a run after a signal: all workers stop after the same step, with a checkpoint.

A signal only sets a flag. The flags of a step are summed over the workers during the next step, and read at its end. So no
worker waits for the sum, and all stop one step after the signal.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from ....comm import Communicator, Handle
from ....comm.notice import NOTICE_SECONDS
from ....messages import log
from ..signals import SIGNALS, heard

LOOK_SECONDS = 0.2  # after a signal, between two looks at whether this worker waits
SAVED = 75  # EX_TEMPFAIL of sysexits.h: not finished, run again


class Interrupted(Exception):
    """A signal stopped the run, and it was saved.

    Args:
        signal: number of the signal.
        checkpoint: folder of the last checkpoint; None if there is none, as before the run has begun.
    """

    def __init__(self, signal: int, checkpoint: Path | None):
        super().__init__(signal, checkpoint)
        self.signal = signal
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        saved = "without a checkpoint" if self.checkpoint is None else f"saved in {self.checkpoint}"
        return f"stopped by {signal.Signals(self.signal).name}, {saved}"

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, as in shells; else 75."""
        return 128 + self.signal if self.signal == signal.SIGINT else SAVED


class Interruption:
    """Handles `SIGNALS` and unblocks them; under `nohup`, SIGHUP stays ignored. Use it in the main thread.

    Args:
        end: called in another thread with a signal that comes while the main thread waits for other workers, before the run
            has begun or for long. It ends the process, because that thread may wait in C++ or Rust. None: such a signal
            waits for the next step.

    Attributes:
        waits_since: when the main thread began to wait for other workers; None while it trains.
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
        self.received = 0
        self.waits_since: float | None = -math.inf
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
        self._handlers = {number: signal.signal(number, self._receive) for number in heard(SIGNALS)}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._end is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._writes)  # ends the thread

    def _listen(self, reads: int, end: Callable[[int], object]) -> None:
        first = 0
        while not select.select([reads], [], [], LOOK_SECONDS if first else None)[0] or (number := os.read(reads, 1)):
            first = first or (number[0] if number[0] in SIGNALS else 0)
            since = self.waits_since
            if first and since is not None and time.monotonic() - since > NOTICE_SECONDS:
                if since > -math.inf and os.environ.get("LOCAL_RANK", "0") == "0":
                    log.warning(
                        "stopped while it waited for other workers; what was trained after the last checkpoint is lost"
                    )
                end(first)
        os.close(reads)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the main thread may wait for other workers."""
        self.waits_since = self.waits_since or time.monotonic()
        yield
        self.waits_since = None

    def requested(self, comm: Communicator, at_once: bool = False) -> int:
        """The signal that any worker had received by its previous call, or 0; the same on all workers.

        Args:
            comm: sums 16 bytes over the workers, which all call this after each step.
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
