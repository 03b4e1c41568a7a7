"""The result of a collective that may still be on its way, as `torch.distributed` wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exit import until_exit
from ..handle import CommunicationError, Handle

Limit = timedelta | None


class ThinwireWork(dist.Work):
    """One collective of a process group.

    The first thread that waits finishes it. A future, or a time limit, needs a thread of its own, because a callback
    of a future may wait for the next collective.

    Args:
        name: of the collective.
        handle: its `wait()` blocks until the tensors are there; it may return the rank that they came from.
        tensors: the results.
        limit: of `wait`, unless it gets one; None for the process group's, which holds while nothing arrives.
    """

    def __init__(self, name: str, handle: Handle, tensors: list[Tensor], limit: Limit = None):
        super().__init__()
        self._name, self._handle, self._tensors, self._limit = name, handle, tensors, limit
        self._source: Any = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._over = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: Limit = None) -> bool:
        """Block until the tensors are there, or raise why they never will be.

        Raises:
            CommunicationError: the collective failed, or took longer than `timeout`.
        """
        limit = timeout or self._limit
        if limit is None:
            self._finish()
        else:
            self.get_future()
            if not self._over.wait(limit.total_seconds()):
                raise CommunicationError(f"{self._name} took longer than {limit.total_seconds():g} seconds")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the list of results."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._over.is_set():
                    self._settle(self._future)
                else:
                    threading.Thread(target=self._finish_future, name="thinwire-future", daemon=True).start()
            return self._future

    def is_completed(self) -> bool:
        if not self._over.is_set():
            self.get_future()  # somebody has to finish it
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        return int(self._source)

    def _source_rank(self) -> int:
        return self.source_rank()

    def _finish(self) -> None:
        try:
            # Threads have modes of their own, and tensors made under `torch.inference_mode` can be written in it alone.
            with torch.inference_mode(any(tensor.is_inference() for tensor in self._tensors)):
                self._source = self._handle.wait()
        except Exception as error:
            self._error = error
        self._over.set()

    def _finish_future(self) -> None:
        with until_exit():
            self._finish()
            assert self._future is not None
            self._settle(self._future)

    def _settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]  # PyTorch's type asks for a result


def finished_after(handles: list[Handle], then: Callable[[], Any] | None = None) -> Handle:
    """A handle that waits for all of these, and then calls a function, whose result it has."""

    def finish() -> Any:
        results = [handle.wait() for handle in handles]
        return then() if then is not None else results[0] if results else None

    return Handle(finish)
