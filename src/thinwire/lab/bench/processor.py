"""Processor time by thread: what a worker's core did during a step."""

from __future__ import annotations

import threading
import time
from pathlib import Path

TRAINING, OTHER = "training", "other"


def seconds_by_thread() -> dict[str, float]:
    """Processor seconds of this process so far, by the name of the thread; threads of one name count together.

    The calling thread is "training", and threads that have ended are "other". Outside Linux, "other" has all but the caller.

    Example:
        >>> seconds_by_thread()["training"] > 0
        True
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()} | {threading.get_native_id(): TRAINING}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
        except OSError:  # it has ended meanwhile
            continue
        found[name] = found.get(name, 0.0) + seconds
    found.setdefault(TRAINING, time.thread_time())
    found[OTHER] = max(0.0, time.process_time() - sum(found.values()))
    return found
