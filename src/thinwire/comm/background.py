"""Threads beside the training, for what waits for messages and decodes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any
from weakref import finalize, ref

from .exit import until_exit
from .handle import Handle, Wait, nothing


class Background:
    """One daemon thread that runs calls in order; it ends when closed, or when this object is garbage-collected.

    A daemon, so that a process can exit while its neighbours are silent.

    Args:
        name: of the thread.

    Example:
        >>> background = Background("adder")
        >>> handles = [background.submit(lambda n=n: n + 1) for n in range(3)]
        >>> [handle.wait() for handle in handles]
        [1, 2, 3]
        >>> background.close()
    """

    def __init__(self, name: str):
        self._name = name
        self._calls: SimpleQueue[Any] = SimpleQueue()
        # The last call's future, as a weak reference, so that nothing is kept alive.
        self._last: Callable[[], Any] = nothing
        self._thread: threading.Thread | None = None
        self._close = finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], Any]) -> Handle:
        """Run `call` after those before it; the handle has its result or its error."""
        if self._thread is None:
            # The thread refers to the queue alone, so that this object can become garbage while it runs.
            thread = threading.Thread(target=_run, args=(self._calls,), name=self._name, daemon=True)
            thread.start()
            self._thread = thread  # only now: one that the system did not start cannot be joined
        future: Future[Any] = Future()
        self._last = ref(future)
        self._calls.put((future, call))
        return Handle(future.result)

    def drain(self, seconds: float | None = None) -> None:
        """Wait until the calls so far have ended, with or without an error, at most so many seconds.

        In this thread itself, go on at once.
        """
        last = self._last()
        if last is not None and threading.current_thread() is not self._thread:
            wait([last], seconds)

    def close(self) -> None:
        """End the thread after the calls so far. Calling it again does nothing."""
        self._close()

    def join(self, seconds: float | None = None) -> bool:
        """After `close`, wait until the thread has ended, at most so many seconds; whether it has."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()


class Later:
    """Threads for what follows on messages of an operation: one for each of its later steps.

    In one thread, an operation's third step could wait behind another operation's second, which waits, over other workers,
    for that third step.
    """

    STEPS = 3

    def __init__(self) -> None:
        self._threads = [Background("thinwire-later") for _ in range(self.STEPS)]

    def follow(self, call: Callable[[], Wait], step: int = 0) -> Wait:
        """Run `call` after the earlier calls of this step; it returns what to wait for."""
        handle = self._threads[step].submit(call)
        return lambda: handle.wait()()

    def end(self, seconds: float | None = None) -> bool:
        """End the threads after the calls so far, and wait for each at most so many seconds; whether all have ended."""
        for thread in self._threads:  # each of them gives work to the next
            thread.close()
            if not thread.join(seconds):
                return False
        return True


def _run(calls: SimpleQueue[Any]) -> None:
    for future, call in iter(calls.get, None):
        with until_exit():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del future, call  # so that an idle thread keeps nothing alive
