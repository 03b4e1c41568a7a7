"""The thread that starts a communicator's operations, in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..streams import current_stream, refuse_capture, wait_for
from .background import Background
from .base import Start
from .handle import Wait


class Issuer(Background):
    """Starts operations; those on tensors of a GPU on a stream of its own, after the work that is on the caller's stream."""

    def __init__(self) -> None:
        super().__init__("thinwire-comm")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def issue(self, device: torch.device, start: Start, queued: list[Tensor] | None = None) -> Wait:
        """Start an operation; returns a function that waits for it.

        Where tensors of a GPU go through main memory, it lets the caller's current stream copy what came to where it belongs,
        after what the tensors were in use for before. Where the GPU does the operation itself, it makes the caller's current
        stream wait for the operation's end; see `streams.wait_for`.

        Args:
            device: of the tensors.
            start: starts the operation.
            queued: the tensors, if a GPU does the operation itself.

        Raises:
            ValueError: a CUDA graph is being captured.
        """
        refuse_capture(device)
        if device.type == "cpu":
            issued = self.submit(start)
            return lambda: issued.wait()()
        ready = current_stream(device).record_event()  # follows what is on the caller's stream now
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        if queued is not None:
            ended = self.submit(partial(_start_on_stream, side, ready, queued, start))
            return lambda: wait_for(ended.wait(), device)
        started = self.submit(partial(_start_after, side, ready, start))

        def wait() -> None:
            current_stream(device).wait_event(ready)
            started.wait()()

        return wait


def _start_after(side: torch.cuda.Stream, ready: torch.cuda.Event, start: Callable[[], Any]) -> Any:
    """Start an operation, which works on `side`, once `ready` has happened."""
    torch.cuda.set_device(side.device)  # this thread's own, which a stream's context falls back to
    with torch.cuda.stream(side):
        side.wait_event(ready)
        return start()


def _start_on_stream(
    side: torch.cuda.Stream, ready: torch.cuda.Event, tensors: list[Tensor], start: Start
) -> torch.cuda.Event:
    """Start an operation on `side` once `ready` has happened; the event returned follows its end."""
    for tensor in tensors:
        tensor.record_stream(side)  # keeps their memory from being handed out again while in use
    _start_after(side, ready, lambda: start()())  # waiting orders the stream, not the host
    # A thread that waits for it sleeps; it would spin, and take the processor from the threads that start kernels.
    ended: torch.cuda.Event = side.record_event(torch.cuda.Event(blocking=True))
    return ended
