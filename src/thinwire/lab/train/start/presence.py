"""Names the worker that is gone or stopped, where a launcher started the workers and no process of ours watches them.

Each worker counts in the store while it lives, whatever its training does. When a collective fails, a worker looks which of
the others do not count any more, and which have reported a failure of their own. Then it reports what it has found, because it
ends, and one that looks later must not blame it. Rank 0, which may hold the store, waits until others have looked. So a look
must not take long: it is one question for all workers, however many, and each worker has one key for all that it says.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from ....comm import CommunicationError
from ....comm.exit import until_exit
from ....comm.store import Store, answered

BEAT_SECONDS = 1.0
SILENT_BEATS = 4  # without a sign of life, before a worker is named
ANSWER_BEATS = 15  # for the store to tell all this


class Sign(NamedTuple):
    """What a worker says of itself."""

    beats: int = 0
    """Grows while it lives."""
    failed: str = ""
    """Why it fails."""
    ended: str = ""
    """What it has found to blame, before it ends."""


class Presence:
    """Counts for this worker in the background; use it as a context.

    Args:
        store: the store of all workers.
        rank: of this worker.
        size: number of workers.
        beat_seconds: time between two counts.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> with Presence(store, rank=0, size=2, beat_seconds=0.01) as present:
        ...     present.silent()
        [1]
    """

    def __init__(self, store: Store, rank: int, size: int, beat_seconds: float = BEAT_SECONDS):
        self._store, self._rank, self._size, self._beat_seconds = store, rank, size, beat_seconds
        self._own, self._lock, self._ended = Sign(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._count, name="thinwire-presence", daemon=True)

    def __enter__(self) -> Presence:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(self._beat_seconds)  # the store may be gone, and keep it waiting

    def _count(self) -> None:
        number = 1  # one that has not begun has 0
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the run
            while True:
                with until_exit():
                    self._say(beats=number)
                if self._ended.wait(self._beat_seconds):
                    return
                number += 1

    def _say(self, **news: Any) -> None:
        with self._lock:  # what is older must not come later
            self._own = self._own._replace(**news)
            self._store.set(f"present/{self._rank}", json.dumps(self._own))

    def report(self, reason: str) -> None:
        """Tell the others why this worker fails."""
        with contextlib.suppress(RuntimeError):
            self._say(failed=reason)

    def explained(self, error: CommunicationError) -> CommunicationError:
        """The same error, with the worker that is to blame for it if there is one."""
        try:
            found = answered(partial(self._explained, error), ANSWER_BEATS * self._beat_seconds)
        except CommunicationError as silence:
            return CommunicationError(f"{error}; {silence}")
        if self._rank == 0:
            time.sleep(SILENT_BEATS * self._beat_seconds)  # others look too
        return found

    def _explained(self, error: CommunicationError) -> CommunicationError:
        silent: list[int] = []
        try:
            signs = self._read()
            # A report tells more than silence, and may come while this worker looks for who is silent.
            if not any(sign.failed for sign in signs):
                signs, silent = self._later(signs)
        except RuntimeError:
            return CommunicationError(f"{error}; the store is gone, which worker 0 or its launcher holds")
        for rank, sign in enumerate(signs):
            if sign.failed:
                return CommunicationError(f"{error}; worker {rank} failed first: {sign.failed}")
        blame = ""
        if silent := [rank for rank in silent if not signs[rank].ended]:
            gone = ("worker " if len(silent) == 1 else "workers ") + ", ".join(map(str, silent))
            seconds = SILENT_BEATS * self._beat_seconds
            blame = f"no sign of life for {seconds:g} seconds from {gone}: killed, stopped or cut off"
        elif first := [(rank, sign.ended) for rank, sign in enumerate(signs) if sign.ended and rank != self._rank]:
            rank, why = first[0]
            blame = f"worker {rank} ended first: {why}"
        with contextlib.suppress(RuntimeError):
            self._say(ended=blame or str(error))
        return CommunicationError(f"{error}; {blame}") if blame else error

    def silent(self) -> list[int]:
        """The ranks that do not count any more; it takes some beats to find out."""
        return self._later(self._read())[1]

    def _later(self, before: list[Sign]) -> tuple[list[Sign], list[int]]:
        """What the workers say some beats later, and the ranks that do not count any more."""
        time.sleep(SILENT_BEATS * self._beat_seconds)
        after = self._read()
        counts = enumerate(zip(before, after, strict=True))
        return after, [rank for rank, (was, now) in counts if rank != self._rank and was.beats == now.beats]

    def _read(self) -> list[Sign]:
        keys = [f"present/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            for key in keys:  # of a worker that has not begun
                self._store.compare_set(key, "", "")
        return [Sign(*json.loads(value)) if value else Sign() for value in self._store.multi_get(keys)]
