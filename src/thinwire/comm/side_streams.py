"""Operations on a GPU's tensors, which a communicator's thread starts on a stream of its own.

An operation begins after the work that is on the caller's current stream at the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..streams import current_stream, wait_for
from .background import Background
from .base import Start


class SideStreams:
    """A stream for each GPU.

    Args:
        issuer: the thread that starts operations.
    """

    def __init__(self, issuer: Background):
        self._issuer = issuer
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def issue_copied(self, device: torch.device, start: Start) -> Callable[[], None]:
        """Start an operation whose tensors go through main memory.

        Returns:
            A function that waits, and lets the caller's current stream copy what came to where it belongs, after what
            the tensors were in use for before.
        """
        side, ready = self._prepare(device)
        issued = self._issuer.submit(partial(_start_after, side, ready, start))

        def wait() -> None:
            current_stream(device).wait_event(ready)
            issued.wait()()

        return wait

    def issue_queued(self, device: torch.device, tensors: list[Tensor], start: Start) -> Callable[[], None]:
        """Start an operation that the GPU does itself.

        Returns:
            A function that makes the caller's current stream wait for the operation's end; see `streams.wait_for`.
        """
        side, ready = self._prepare(device)
        ended = self._issuer.submit(partial(_start_on_stream, side, ready, tensors, start))
        return lambda: wait_for(ended.wait(), device)

    def _prepare(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
        """The stream, and an event that follows what is on the caller's stream now."""
        ready = current_stream(device).record_event()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device], ready


def _start_after(side: torch.cuda.Stream, ready: torch.cuda.Event, start: Start) -> Callable[[], None]:
    """Start an operation that copies into main memory, which it does on `side`, once `ready` has happened."""
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
    torch.cuda.set_device(side.device)  # this thread's own, which a stream's context falls back to
    with torch.cuda.stream(side):
        side.wait_event(ready)
        start()()  # waiting orders the stream, not the host
        # A thread that waits for it sleeps; it would spin, and take the processor from the threads that start kernels.
        ended: torch.cuda.Event = side.record_event(torch.cuda.Event(blocking=True))
        return ended
