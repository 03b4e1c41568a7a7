"""Work on a GPU beside the training: on a stream of its own, so that the backward pass never queues behind it.

A strategy encodes and decodes on its `WorkStream`; the communicator has streams of its own for messages.

    training   backward of layer 3 | backward of layer 2 | backward of layer 1 | waits for work | optimizer
    work                 encode 3 ...         encode 2 ...   decode 3    encode 1 ...  decode 2   decode 1
    messages                      exchange 3 .........   exchange 2 .........  exchange 1 .........

`after_caller` queues work behind what the training has queued so far. A thread that waits for messages does so in
`continued`: there `Handle.wait` blocks the thread until the data has come, and only then queues the decoding. So the work
stream never waits for a message, and later encoding is not held up by an earlier exchange. `join` makes the training wait
for the work, at the end of a round.

Memory. What is allocated inside of these contexts belongs to the work stream, which is the only one to use it, so it may be
freed at any time. Tensors of the training stream that the work uses must be kept until `join`. Where their owner is
dropped in the middle of a round, the training stream waits for the work before their memory is free.

For tensors in main memory all of this does nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

_thread = threading.local()


class WorkStream:
    """The stream for the work of one strategy on one device; see the module's text.

    Args:
        device: of the tensors. There is no stream in main memory.
        owner: holds tensors of the training stream that the work uses. When it is dropped, that stream waits for the work.

    Example:
        >>> work = WorkStream(torch.device("cpu"))
        >>> with work.after_caller():
        ...     x = torch.ones(2)
        >>> work.join()
    """

    def __init__(self, device: torch.device, owner: object = None):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if has_streams(device):
            self._stream = torch.cuda.Stream(device, priority=-1)  # small kernels, for which messages wait
            self._training = current_stream(device)
            if owner is not None:
                weakref.finalize(owner, self._let_go).atexit = False  # then all memory is freed

    @contextmanager
    def after_caller(self) -> Iterator[None]:
        """Context in which work begins after what is queued on the caller's current stream.

        Raises:
            ValueError: the caller captures a CUDA graph.
        """
        refuse_capture(self._device)
        if self._stream is None:
            yield
            return
        self._training = current_stream(self._device)
        self._stream.wait_event(self._training.record_event())
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def continued(self) -> Iterator[None]:
        """Context, in any thread, in which work goes on, and waiting for messages blocks the thread and not the stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            _thread.blocks = True
            try:
                yield
            finally:
                _thread.blocks = False

    def join(self) -> None:
        """Make the caller's current stream wait for all work so far; the host does not wait."""
        if self._stream is not None:
            current_stream(self._device).wait_event(self._stream.record_event())

    def _let_go(self) -> None:
        """Make the training's stream wait before the owner's memory is free; not if a graph is captured, which would break."""
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            self._training.wait_event(self._stream.record_event())


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """`torch.cuda.current_stream` of a device, several times as fast: a bucket asks for it about twenty times."""
    index = cast("int | None", device.index)
    if index is None:  # the device that is current in this thread
        return torch.cuda.current_stream(device)
    place = index, torch._C._cuda_getCurrentRawStream(index)
    stream = _streams.get(place)
    if stream is None:
        stream = _streams[place] = torch.cuda.current_stream(device)
    return stream


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and handle; PyTorch never ends a stream


def wait_for(event: torch.cuda.Event, device: torch.device) -> None:
    """Wait for an event: the current stream does, or in `WorkStream.continued` the calling thread."""
    if getattr(_thread, "blocks", False):
        event.synchronize()
    else:
        current_stream(device).wait_event(event)


def note_stream(streams: set[torch.cuda.Stream], device: torch.device) -> None:
    """Add the current stream to those on which something was made; in main memory there is none."""
    if has_streams(device):
        streams.add(current_stream(device))


def wait_for_streams(streams: set[torch.cuda.Stream], device: torch.device) -> None:
    """Make the current stream wait for what is queued on each of these."""
    for stream in streams:
        if stream != (now := current_stream(device)):
            now.wait_event(stream.record_event())


def hand_over(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Record an event after the work that made a tensor, for a thread that reads it next; None in main memory."""
    return current_stream(tensor.device).record_event() if has_streams(tensor.device) else None


def take_over(tensor: torch.Tensor, made: torch.cuda.Event | None) -> None:
    """In the thread that reads a tensor: make the current stream wait for `hand_over`'s event, and keep the memory for it."""
    if made is not None:
        current_stream(tensor.device).wait_event(made)
        in_use(tensor)


def in_use(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a tensor's memory until the work that is on the current stream when it is freed has ended; returns the tensor.

    For tensors that other streams have made, and that may be freed while this one still reads them.
    """
    if has_streams(tensor.device):
        tensor.record_stream(current_stream(tensor.device))
    return tensor


def refuse_capture(device: torch.device) -> None:
    """Raise a ValueError if a CUDA graph is being captured on a device's current stream.

    A graph replays kernels only: no threads, no messages, and no uploads of random keys or tables of addresses.

    Raises:
        ValueError: a graph is being captured.
    """
    if has_streams(device) and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a CUDA graph is being captured, and thinwire cannot be part of it: a graph replays neither messages nor "
            "threads nor uploads. Capture the forward pass alone, and leave backward() and optimizer.step() out of the graph"
        )


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued on streams."""
    return device.type == "cuda"


_solvers = threading.Lock()
_loaded: set[torch.device] = set()


def load_solvers(device: torch.device) -> None:
    """Let one thread alone load the solvers of `torch.linalg` for a GPU; call it before one is used.

    They are loaded with the first decomposition, and a second thread that asks for one meanwhile gets a RuntimeError, "lazy
    wrapper should be called at most once".
    """
    if has_streams(device) and device not in _loaded:
        with _solvers:
            if device not in _loaded:
                torch.linalg.qr(torch.ones(1, 1, dtype=torch.float32, device=device))
                _loaded.add(device)


def uploaded(device: torch.device, numbers: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A new tensor of numbers on a device; the host does not wait for the upload to a GPU.

    Example:
        >>> uploaded(torch.device("cpu"), [[1, 2], [3, 4]])
        tensor([[1, 2],
                [3, 4]])
    """
    refuse_capture(device)
    # The default device may be a GPU, and the host waits for uploads from memory that is not pinned.
    made = torch.tensor(numbers, dtype=dtype, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if has_streams(device) else made.to(device)
