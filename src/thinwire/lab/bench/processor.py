"""Processor time by thread: what a worker's core did during a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

TRAINING, OTHER = "training", "other"


def seconds_by_thread() -> Callable[[], dict[str, float]]:
    """Begin to count the processor seconds of this process by thread; the result, when called, gives them.

    Threads of one name count together. The calling thread is "training", and threads that have ended are "other". Outside
    Linux, "other" has all but the caller. What it takes to look at the other threads is not counted.

    Example:
        >>> seconds = seconds_by_thread()
        >>> _ = [n * n for n in range(10_000)]
        >>> seconds()["training"] > 0
        True
    """
    before = _of_others()
    own, whole = time.thread_time(), time.process_time()

    def seconds() -> dict[str, float]:
        training, total = time.thread_time() - own, time.process_time() - whole
        found = {name: count - before.get(name, 0.0) for name, count in _of_others().items()}
        return {TRAINING: training, **found, OTHER: max(0.0, total - training - sum(found.values()))}

    return seconds


def _of_others() -> dict[str, float]:
    """Processor seconds so far of the threads that are not the caller."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").glob("*"):
        if int(task.name) == threading.get_native_id():
            continue
        try:
            # In nanoseconds; `stat` counts in ticks, most often of 10 ms.
            count = int((task / "schedstat").read_text().split()[0]) / 1e9
            # Only the kernel knows the names of C++ threads.
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
        except OSError:  # it has ended meanwhile
            continue
        found[name] = found.get(name, 0.0) + count
    return found
