"""The communicator's contract.

A communicator connects W workers, ranked 0..W-1. Its operations are *collectives in call order*: every worker calls
the same operations in the same order, from any of its threads, but for `exchange`, which concerns only the peers it
names. (A channel, `channel.py`, is for messages in no common order.) An operation returns at once, with a `Handle`; it is
started by the one thread that issues all operations of its communicator, without waiting for earlier ones to end, so that
many may be in flight. `Handle.wait()` blocks until the result is there. Collectives are never started from the completion
of others.

Tensors    Contiguous, of any shape where nothing else is said. `all_reduce` takes the dtypes in `SUMMABLE`; the others
           move bytes and take any dtype. Zero elements are fine: nothing is sent.
Ownership  From the call until `wait()` returns, tensors belong to the operation: do not write to any of them, nor read
           those that it writes. Results are new tensors, or the caller's own where the operation is in place; the own
           entry in the result of `all_gather` and `all_to_all` *is* the tensor that was passed in. Tensors that are
           sent may alias each other; tensors that are received into may alias nothing. In debug mode (`debug.py`)
           `wait()` raises a ValueError if somebody wrote into a sent tensor.
Equality   `all_reduce` leaves the same bits on every worker, whatever the backend; the order of addition is the
           backend's own, so that backends may differ from each other in the last bits.
Devices    CUDA tensors are read after the work that the caller's current stream holds at the call, and `wait()` makes
           the stream that is current then wait for the result; the host waits over Gloo alone.
Errors     What the caller did wrong is a ValueError, raised at the call, before anything is sent or counted. What goes
           wrong on the way is a `CommunicationError`, raised by `wait()`: it names this rank, the operation and, where
           it is known, the peer. It comes within the timeout, at once if a peer has died. A communicator that has
           failed once is of no further use.
Ledger     Counts the bytes of each operation at its call, but those that an `all_gather` of variable size receives
           at its `wait()`; see `ledger.py`.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import debug
from . import check
from .agreement import fingerprint, raise_disagreement
from .channel import Channel
from .ledger import Ledger, broadcast_children, ring_all_reduce_bytes

Start = Callable[[], Callable[[], Any]]  # starts an operation; returns what waits for it


class CommunicationError(RuntimeError):
    """A message could not be sent or received."""


class Handle:
    """The result of an operation that may still be under way.

    Args:
        finish: waits for the operation and returns its result; it is called once, in the first thread that waits.

    Example:
        >>> Handle(lambda: 42).wait()
        42
    """

    def __init__(self, finish: Callable[[], Any]):
        self._finish: Callable[[], Any] | None = finish
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """Blocks until the operation is done and returns its result, or raises its error; again if called again."""
        with self._lock:
            if self._finish is not None:
                try:
                    self._result = self._finish()
                except Exception as error:
                    self._error = error
                self._finish = None  # lets go of buffers and works
        if self._error is not None:
            raise self._error
        return self._result


class Communicator(ABC):
    """Moves tensors between W workers. Backends implement the `_start_*` primitives, `_issue` and `close`.

    Attributes:
        rank: this worker, 0..W-1.
        size: number of workers, W.
        ledger: bytes that this worker has sent and received.
    """

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.ledger = Ledger(size)
        self._lock = threading.Lock()  # the order of calls: in the ledger as on the wire
        self._closed = False

    # ---- operations ----

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sums `tensor` over all workers, in place: x <- sum_r x_r. `wait()` returns it.

        Sends and receives 2 (W-1)/W n bytes per worker, in 2 (W-1) steps.
        """
        check.summable(self, tensor)
        num_bytes = ring_all_reduce_bytes(self.size, check.num_bytes(tensor))
        messages = 2 * (self.size - 1) if num_bytes else 0
        start = partial(self._start_all_reduce, tensor.detach())
        return self._submit("all_reduce", [tensor], start, tensor, (messages, num_bytes, num_bytes))

    def all_gather(self, tensor: Tensor, sizes: list[int] | None = None, variable: bool = False) -> Handle:
        """Gives every worker the tensors of all: `wait()` returns a list of W tensors in rank order.

        Sends (W-1) n bytes per worker, in one step; worker r sends to r+1, r+2, ... so that no receiver is flooded.

        Args:
            tensor: (n,) any dtype, the same on all workers.
            sizes: number of elements on each worker, where they differ; None if all are the same.
            variable: whether sizes differ and are known to nobody else. The issuing thread then sends them first, 8
                bytes to each worker, and waits for those of the others before it issues anything further.
        """
        if variable:
            return self._gather_variable(tensor, sizes)
        sizes = check.gather_sizes(self, tensor, sizes)
        return self._gather("all_gather", tensor, sizes)

    def all_to_all(self, tensors: list[Tensor], sizes: list[int] | None = None) -> Handle:
        """Sends `tensors[p]` to worker p: `wait()` returns a list of W tensors, entry p from worker p.

        Args:
            tensors: W tensors (n_p,), one dtype; the own entry stays here.
            sizes: number of elements that comes from each worker; None if from each as many as go to it.
        """
        sizes = check.all_to_all_sizes(self, tensors, sizes)
        received = [_flat_like(tensor, n) for tensor, n in zip(tensors, sizes, strict=True)]
        received[self.rank] = tensors[self.rank]
        sends, receives = self._others(tensors), self._others(received)
        return self._submit_exchange("all_to_all", sends, receives, received)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Handle:
        """Sends one tensor to each of some peers and receives one from each of some; `wait()` returns `receives`.

        Receives are posted first. Between two workers, messages are matched in the order of the calls; a message and
        the tensor it is received into must have as many bytes.

        Args:
            sends: peer -> tensor of any shape and dtype.
            receives: peer -> tensor, written in place.
        """
        check.peers(self, "exchange", "sends", sends)
        check.peers(self, "exchange", "receives", receives)
        return self._submit_exchange("exchange", sends, receives, receives)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Overwrites `tensor` with that of worker `root`, in place. `wait()` returns it.

        A binomial tree of ceil(log2 W) steps: every worker but the root receives n bytes, and sends n to each of its
        children in the tree.
        """
        check.tensor(self, "broadcast", tensor)
        check.rank(self, "broadcast", "root", root)
        num_bytes = check.num_bytes(tensor)
        children = broadcast_children(self.size, self.rank, root) if num_bytes else 0
        traffic = (children, children * num_bytes, num_bytes * (self.rank != root))
        start = partial(self._start_broadcast, as_bytes(tensor), root)
        sent = [tensor] if self.rank == root else []
        return self._submit("broadcast", [tensor], start, tensor, traffic, sent)

    def barrier(self) -> None:
        """Returns when every worker has called it."""
        token = torch.zeros(1, dtype=torch.uint8, device=self._object_device)
        self._gather("barrier", token, [1] * self.size).wait()
        if token.is_cuda:
            torch.cuda.current_stream(token.device).synchronize()

    def gather_objects(self, obj: Any) -> list[Any]:
        """Returns what every worker passed in, in rank order, as JSON gives it back (tuples become lists). Blocks.

        For small objects: sizes travel first, then the text, both counted in the ledger.
        """
        text = json.dumps(obj).encode()
        payload = torch.tensor(list(text), dtype=torch.uint8, device=self._object_device)
        length = torch.tensor([len(text)], device=self._object_device)
        lengths = [int(n) for n in self._gather("gather_objects", length, [1] * self.size).wait()]
        texts = self._gather("gather_objects", payload, lengths).wait()
        return [json.loads(bytes(text.tolist())) for text in texts]

    def check_agreement(self, what: dict[str, Any]) -> None:
        """Makes sure that all workers passed in equal dictionaries, comparing keys and the `repr` of values. Blocks.

        Costs 32 bytes a message while workers agree; the dictionaries travel only when they do not.

        Raises:
            ValueError: on every worker alike; it names each key that differs, its values, and the ranks that hold them.
        """
        described = {str(key): repr(value) for key, value in what.items()}
        digest = torch.tensor(list(fingerprint(described)), dtype=torch.uint8, device=self._object_device)
        digests = self._gather("check_agreement", digest, [digest.numel()] * self.size).wait()
        if any(other.tolist() != digest.tolist() for other in digests):
            raise_disagreement(self.gather_objects(described))

    def open_channel(self, peers: Iterable[int]) -> Channel:
        """Connects this worker with some peers for messages in no common order; see `channel.py`. All workers call it.

        Args:
            peers: ranks of others; if worker a names b, b must name a.
        """
        peers = sorted(set(peers))
        check.peers(self, "open_channel", "peers", dict.fromkeys(peers, torch.empty(0)))
        return self._open_channel(peers)

    @abstractmethod
    def close(self) -> None:
        """Ends the communicator; operations must have been waited for. Calling it again does nothing."""

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- what a backend implements; a primitive starts an operation and returns a callable that waits for it ----

    _object_device = torch.device("cpu")

    @abstractmethod
    def _issue(self, tensors: list[Tensor], start: Start) -> Callable[[], Any]:
        """Has `start` run in call order, and returns a callable that waits until the operation is done."""

    @abstractmethod
    def _start_all_reduce(self, tensor: Tensor) -> Callable[[], Any]: ...

    @abstractmethod
    def _start_all_gather(self, gathered: list[Tensor]) -> Callable[[], Any]:
        """`gathered[r]`: where the bytes of worker r belong; the own entry holds what is to be sent."""

    @abstractmethod
    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        """Flat uint8 tensors, none of them empty."""

    @abstractmethod
    def _start_broadcast(self, tensor: Tensor, root: int) -> Callable[[], Any]: ...

    @abstractmethod
    def _open_channel(self, peers: list[int]) -> Channel: ...

    # ---- shared by the operations ----

    def _record_channel(self, messages: int, bytes_sent: int, bytes_received: int) -> None:
        with self._lock:
            self.ledger.record("channel", messages, bytes_sent, bytes_received)

    def _others(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        """Peer -> its tensor, in the order rank+1, rank+2, ..."""
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        return {peer: tensors[peer] for peer in peers}

    def _gather(self, operation: str, tensor: Tensor, sizes: list[int]) -> Handle:
        # One allocation each, so that every message is aligned and may be viewed as floats.
        gathered = [tensor if rank == self.rank else _flat_like(tensor, n) for rank, n in enumerate(sizes)]
        others = self._others(gathered).values()
        num_bytes, received = check.num_bytes(tensor), sum(map(check.num_bytes, others))
        messages = self.size - 1 if num_bytes else 0
        start = partial(self._start_all_gather, [as_bytes(part) for part in gathered])
        traffic = (messages, messages * num_bytes, received)
        return self._submit(operation, gathered, start, gathered, traffic, [tensor])

    def _gather_variable(self, tensor: Tensor, sizes: list[int] | None) -> Handle:
        """Sizes, then tensors: two messages to each worker, started as one operation, so that the order holds."""
        check.flat(self, "all_gather", tensor)
        if sizes is not None:
            raise ValueError(f"rank {self.rank}: all_gather got sizes and variable=True. Leave one of them out.")
        result: list[Tensor] = []
        start = partial(self._start_gather_variable, tensor.detach(), result)
        others, num_bytes = self.size - 1, check.num_bytes(tensor)
        messages = others * (2 if num_bytes else 1)
        traffic = (messages, others * (8 + num_bytes), 8 * others)
        handle = self._submit("all_gather", [tensor], start, result, traffic, [tensor])
        return Handle(partial(self._count_received, handle))

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor]) -> Callable[[], Any]:
        """`result` is empty, and receives a tensor for each worker, of a size that comes with it."""
        length = torch.tensor([tensor.numel()], device=tensor.device)
        lengths = [length if rank == self.rank else debug.empty_like(length) for rank in range(self.size)]
        self._start_all_gather([as_bytes(part) for part in lengths])()
        sizes = torch.cat(lengths).tolist()
        result += [tensor if rank == self.rank else _flat_like(tensor, n) for rank, n in enumerate(sizes)]
        return self._start_all_gather([as_bytes(part) for part in result])

    def _count_received(self, handle: Handle) -> list[Tensor]:
        result: list[Tensor] = handle.wait()
        others = self._others(result).values()
        with self._lock:
            self.ledger.add_received("all_gather", sum(map(check.num_bytes, others)))
        for part in others:
            if part.is_cuda:
                part.record_stream(torch.cuda.current_stream(part.device))  # it was allocated on the issuing stream
        return result

    def _submit_exchange(
        self, operation: str, sends: dict[int, Tensor], receives: dict[int, Tensor], result: Any
    ) -> Handle:
        wire_sends = {peer: as_bytes(tensor) for peer, tensor in sends.items() if tensor.numel()}
        wire_receives = {peer: as_bytes(tensor) for peer, tensor in receives.items() if tensor.numel()}
        sent, received = (sum(t.numel() for t in side.values()) for side in (wire_sends, wire_receives))
        start = partial(self._start_exchange, wire_sends, wire_receives)
        tensors = [*sends.values(), *receives.values()]
        return self._submit(operation, tensors, start, result, (len(wire_sends), sent, received), list(sends.values()))

    def _submit(
        self,
        operation: str,
        tensors: list[Tensor],
        start: Start,
        result: Any,
        traffic: tuple[int, int, int],
        sent: Sequence[Tensor] = (),
    ) -> Handle:
        """`sent`: the tensors that nobody may write before the end; debug mode compares their checksums."""
        messages = [as_bytes(tensor) for tensor in sent] if debug.enabled else []
        before = debug.checksums(messages)
        with self._lock:
            if self._closed:
                raise ValueError(f"rank {self.rank}: {operation} on a communicator that was closed. Close it last.")
            wait = self._issue(tensors, start)
            self.ledger.record(operation, *traffic)
        unchanged = partial(self._check_unchanged, operation, messages, before)
        return Handle(partial(self._finish, operation, wait, result, unchanged))

    def _finish(self, operation: str, wait: Callable[[], Any], result: Any, check_unchanged: Callable[[], None]) -> Any:
        try:
            wait()
        except Exception as error:
            raise CommunicationError(f"rank {self.rank}: {operation} failed: {error}") from error
        check_unchanged()
        return result

    def _check_unchanged(self, operation: str, messages: list[Tensor], before: list[int]) -> None:
        for i, (expected, got) in enumerate(zip(before, debug.checksums(messages), strict=True)):
            if got != expected:
                raise ValueError(
                    f"rank {self.rank}: somebody wrote into a tensor while {operation} owned it: sent tensor {i} of "
                    f"{messages[i].numel()} bytes, checksum {expected:08x} at the call and {got:08x} at the end. Call "
                    f"wait() before writing to it, or send a copy."
                )


def _flat_like(tensor: Tensor, numel: int) -> Tensor:
    """A new flat tensor of the same dtype and device, to receive into."""
    return debug.empty(numel, dtype=tensor.dtype, device=tensor.device)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as (num_bytes,) uint8."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:  # the stride of a single element may be anything, and `view` asks for 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
