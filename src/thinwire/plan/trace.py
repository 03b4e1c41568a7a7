"""What one worker does, in the order of each of its threads: to be played on a network by `Replay`.

An entry is a list, ready for JSON:

    ["work", seconds]                             the thread computes
    ["messages", number, [sends, receives], ...]  it starts an operation of one or more steps; bytes by peer
    ["mark", number]                              it gets to here
    ["wait", number]                              it waits for the operation or the mark of this number

Computation is either the processor time of each thread between its calls, or what `compute` declares and nothing else.
Processor time in the communicator itself does not count. It stands for the network library's.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ..algorithm import require
from .operations import Moves

Entry = list[Any]


class Trace:
    """The trace of one worker. The thread that makes it is its first; others join by their first call.

    Args:
        measures: whether the processor time of threads counts; if not, only what `compute` declares.

    Example:
        >>> from thinwire.plan.operations import PeerMessages
        >>> trace = Trace(measures=False)
        >>> trace.compute(0.5)
        >>> trace.wait(trace.issue((PeerMessages(((1, 100),), ()),)))
        >>> trace.take()
        [[0, [['work', 0.5], ['messages', 0, [((1, 100),), ()]], ['wait', 0]]]]
    """

    def __init__(self, measures: bool):
        self._measures = measures
        self._lock = threading.Lock()
        self._entries: dict[int, list[Entry]] = {}
        self._num_threads = self._number = 0
        self._own = threading.local()
        self._thread()

    def compute(self, seconds: float) -> None:
        """The calling thread computes for so long, beside what is measured."""
        require(seconds >= 0, f"computation must take 0 seconds or more, got {seconds}")
        self._add(["work", seconds])

    def charge(self) -> None:
        """Count the processor time of the calling thread since its last call."""
        if not self._measures:
            return
        self._thread()
        # The time of this thread on a core, without its waits: the network model adds those.
        seconds = time.thread_time() - self._own.since
        if seconds > 0:
            self._add(["work", seconds])
        self.skip()

    def skip(self) -> None:
        """Leave out the processor time of the calling thread since its last call."""
        self._thread()
        self._own.since = time.thread_time()

    def issue(self, moves: Moves) -> int:
        """The calling thread starts an operation; returns its number."""
        self.charge()
        return self._numbered("messages", *([step.sends, step.receives] for step in moves))

    def mark(self) -> int:
        """A mark in the calling thread; returns its number."""
        self.charge()
        return self._numbered("mark")

    def wait(self, number: int) -> None:
        """The calling thread has waited for an operation, or for a mark of another thread."""
        self.charge()
        self._add(["wait", number])

    def take(self) -> list[list[Any]]:
        """The entries since the last call, as `[thread, entries]` for each thread that has some."""
        with self._lock:
            taken, self._entries = self._entries, {}
        return [[thread, entries] for thread, entries in taken.items()]

    def _numbered(self, kind: str, *what: Any) -> int:
        with self._lock:
            number, self._number = self._number, self._number + 1
        self._add([kind, number, *what])
        return number

    def _add(self, entry: Entry) -> None:
        thread = self._thread()
        with self._lock:
            self._entries.setdefault(thread, []).append(entry)

    def _thread(self) -> int:
        """The number of the calling thread."""
        if not hasattr(self._own, "number"):
            with self._lock:
                self._own.number, self._num_threads = self._num_threads, self._num_threads + 1
            self._own.since = time.thread_time()
        number: int = self._own.number
        return number
