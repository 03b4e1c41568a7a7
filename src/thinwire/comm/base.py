"""The communicator's contract.

A communicator connects W workers, ranked 0..W-1. Its operations are *collectives in call order*: every worker calls the same
operations in the same order, from any of its threads. Only `exchange` is for the peers that it names. (`channel.py` has
messages in no common order.) Where rounds run beside the training (`round_thread`), an operation of another thread waits until
they have ended, so that its place among theirs is the same on all workers. An operation returns a `Handle` at once. One thread
per communicator starts all operations and does not wait for earlier ones, so many may be in flight. `Handle.wait()` blocks
until the result is there. No operation is started from the completion of another.

Tensors    Contiguous, of any shape unless the operation says otherwise. `all_reduce` takes the dtypes in `SUMMABLE`; the
           others move bytes and take any dtype. A tensor without elements sends nothing.
Ownership  From the call until `wait()` returns, tensors belong to the operation: do not write to them, and do not read
           tensors that it writes. Results are new tensors, or the caller's own if the operation works in place. The own
           entry in the result of `all_gather` and `all_to_all` *is* the tensor that was passed in. Sent tensors may share
           memory; received ones may not. In debug mode (`debug.py`), `wait()` raises a ValueError if a sent tensor changed.
Equality   `all_reduce` leaves the same bits on every worker. The backend chooses the order of addition, so results of
           different backends may differ in the last bits.
Devices    CUDA tensors are read after the work that is on the caller's current stream at the call. `wait()` makes the
           current stream wait for the result. The host waits over Gloo, and on a thread of `WorkStream.continued`.
Errors     A mistake of the caller is a ValueError, raised at the call, before anything is sent or counted. A failure on the
           way is a `CommunicationError`, raised by `wait()`: it names this rank, the operation and, if known, the peer. It
           comes within the timeout, or at once if a peer has died. After a failure the communicator cannot be used.
Rounds     Only an elastic communicator (`elastic/communicator.py`) has any: there the workers, rank and size change between
           rounds, and a failure ends the round, not the run. Strategies ask `is_elastic`.
Ledger     Counts the bytes of each operation at its call, except those that an `all_gather` of variable size receives,
           which it counts at `wait()`; see `ledger.py`.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import debug
from . import check
from .background import Background
from .buffers import as_bytes, flat_like
from .channel import MAX_BYTES, Channel
from .compare import FAILURE, fingerprint, parsed, raise_disagreement
from .handle import CommunicationError, Handle, Wait
from .ledger import Ledger, broadcast_tree
from .rounds import Rounds
from .sums import Route

if TYPE_CHECKING:
    from .layout import Layout

MAX_OBJECT_BYTES = 1 << 26  # of one worker's text in `gather_objects`
LENGTH, FIRST_BYTES = struct.Struct("<q"), 256  # of the text, before what of it travels in the first step
Start = Callable[[], Wait]  # starts an operation


class Communicator(Rounds, ABC):
    """Moves tensors between W workers. Backends implement the `_start_*` primitives, `_issue` and `close`.

    Attributes:
        rank: this worker, 0..W-1, in process number `process`, and in no fork of it.
        size: number of workers, W.
        ledger: counts the bytes that this worker has sent and received.
        global_ranks: the rank of each worker in torch.distributed; empty where workers are no processes of it.
        device: on which it can send anything: main memory, or this worker's GPU where the backend sends from GPUs only.
        layout: how its ranks lie on the lines, if these were measured; see `layout.py`.
        route: of its all-reduces; see `sums.py`.
        round_thread: the thread of rounds beside the training. All strategies of this communicator share it, so that workers
            run them in one order.
    """

    global_ranks: Sequence[int] = ()
    layout: Layout | None = None
    device = torch.device("cpu")

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.process = rank, size, os.getpid()
        self.ledger = Ledger(size)
        self.route = Route(rank, range(size))  # each worker has a host of its own, unless a backend knows better
        self.round_thread = self.background("thinwire-round")
        self._lock, self._closed = threading.Lock(), False  # the ledger counts in the order of the calls
        self._aborted = ""  # why

    # ---- operations ----

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum `tensor` over all workers, in place: x <- sum_r x_r. `wait()` returns it.

        Sends and receives 2 (W-1)/W n bytes per worker, in 1, 2 or 4 steps; see `sums.py`.
        """
        check.summable(self, tensor)
        start = partial(self._start_all_reduce, tensor.detach())
        return self._submit("all_reduce", [tensor], start, tensor, self.route.traffic(tensor))

    def all_gather(
        self, tensor: Tensor, sizes: list[int] | None = None, variable: bool = False, limit: int = MAX_BYTES
    ) -> Handle:
        """Send `tensor` to all workers: `wait()` returns a list of W tensors in rank order.

        Sends (W-1) n bytes per worker, in one step. Worker r sends to r+1, r+2, ..., which spreads the load on receivers.

        Args:
            tensor: (n,) any dtype, the same on all workers.
            sizes: number of elements on each worker; None if all are the same.
            variable: whether each worker knows its own size only. The issuing thread then sends sizes first, 8 bytes to
                each worker, and waits for those of the others before it issues anything else.
            limit: with `variable`, how many elements a worker may send; more is a `CommunicationError`.
        """
        if variable:
            return self._gather_variable(tensor, sizes, limit)
        sizes = check.gather_sizes(self, tensor, sizes)
        return self._gather("all_gather", tensor, sizes)

    def all_to_all(
        self, tensors: list[Tensor], sizes: list[int] | None = None, ranks: Sequence[int] | None = None
    ) -> Handle:
        """Send `tensors[p]` to worker p: `wait()` returns a list of W tensors, entry p from worker p.

        Args:
            tensors: W tensors (n_p,), one dtype; the own entry stays here.
            sizes: number of elements to receive from each worker; None if it equals the number sent to that worker.
            ranks: the workers that take part and call it; None for all. Entry p then belongs to worker `ranks[p]`.
        """
        ranks = check.team(self, ranks)
        sizes = check.all_to_all_sizes(self, tensors, sizes, ranks)
        received = [flat_like(tensor, n) for tensor, n in zip(tensors, sizes, strict=True)]
        own = ranks.index(self.rank)
        received[own] = tensors[own]
        others = [(own + step) % len(ranks) for step in range(1, len(ranks))]  # so that no worker is flooded
        sends = {ranks[i]: tensors[i] for i in others}
        receives = {ranks[i]: received[i] for i in others}
        return self._submit_exchange("all_to_all", sends, receives, received)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Handle:
        """Send one tensor to each of some peers, and receive one from each of some; `wait()` returns `receives`.

        Receives are posted first. Messages between two workers are matched in the order of the calls. A message and the
        tensor that receives it must have the same number of bytes.

        Args:
            sends: peer -> tensor of any shape and dtype.
            receives: peer -> tensor, written in place.
        """
        for name, side in {"sends": sends, "receives": receives}.items():
            check.peers(self, "exchange", name, side)
            for tensor in side.values():
                check.tensor(self, "exchange", tensor)
        return self._submit_exchange("exchange", sends, receives, receives)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Handle:
        """Overwrite `tensor` with that of worker `root`, in place. `wait()` returns it.

        A binomial tree of ceil(log2 W) steps: every worker except the root receives n bytes, and every worker sends n to
        each of its children in the tree.
        """
        check.tensor(self, "broadcast", tensor)
        check.rank(self, "broadcast", "root", root)
        num_bytes = tensor.nbytes
        parents, children = broadcast_tree(self.size, self.rank, root) if num_bytes else ([], [])
        traffic = (len(children), len(children) * num_bytes, len(parents) * num_bytes)
        start = partial(self._start_broadcast, as_bytes(tensor), root)
        sent = [tensor] if self.rank == root else []
        return self._submit("broadcast", [tensor], start, tensor, traffic, sent)

    def barrier(self) -> None:
        """Return when every worker has called it."""
        self.start_barrier().wait()
        # On a GPU, `wait` holds up the stream and not the host.
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def start_barrier(self) -> Handle:
        """`barrier`, of which `wait()` waits for the others."""
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        return self._gather("barrier", token, [1] * self.size)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Return what every worker passed in, in rank order, after a round trip through JSON (tuples become lists). Blocks.

        For small objects: one step, and a second one if a text is longer than `FIRST_BYTES`. The ledger counts both.
        """

        def gathered(text: bytes, sizes: list[int]) -> list[bytes]:
            payload = torch.tensor(list(text), dtype=torch.uint8, device=self.device)
            return [bytes(one.tolist()) for one in self._gather("gather_objects", payload, sizes).wait()]

        text = json.dumps(obj).encode()
        first, rest = LENGTH.pack(len(text)) + text[:FIRST_BYTES], text[FIRST_BYTES:]
        texts = gathered(first.ljust(LENGTH.size + FIRST_BYTES), [LENGTH.size + FIRST_BYTES] * self.size)
        lengths = check.announced_sizes([LENGTH.unpack_from(text)[0] for text in texts], MAX_OBJECT_BYTES)
        if max(lengths) > FIRST_BYTES:
            rests = gathered(rest, [max(0, length - FIRST_BYTES) for length in lengths])
            texts = [text + more for text, more in zip(texts, rests, strict=True)]
        # JSON may end in spaces.
        return [parsed(text[LENGTH.size :], rank) for rank, text in enumerate(texts)]

    def all_true(self, flag: bool) -> bool:
        """Return whether every worker passed True. Blocks; sends a byte to each worker."""
        token = torch.tensor([flag], dtype=torch.uint8, device=self.device)
        return bool(torch.cat(self._gather("all_true", token, [1] * self.size).wait()).all())  # in one read of a GPU

    def gather_if_different(self, described: dict[str, Any]) -> list[dict[str, Any]]:
        """`gather_objects` of dictionaries that are mostly equal on all workers: then it costs 32 bytes a message. Blocks."""
        digest = torch.tensor(list(fingerprint(described)), dtype=torch.uint8, device=self.device)
        digests = self._gather("check_agreement", digest, [digest.numel()] * self.size).wait()
        own = digest.tolist()
        if any(other is not digest and other.tolist() != own for other in digests):
            return self.gather_objects(described)
        return [described] * self.size

    def check_agreement(self, what: dict[str, Any]) -> None:
        """Check that all workers passed in equal dictionaries, by keys and the `repr` of values. Blocks.

        It costs 32 bytes a message while workers agree; the dictionaries travel only if they differ.

        Raises:
            ValueError: on every worker; it names each key that differs, its values, and their ranks. On the others, where one
                calls `tell_failure` in its place.
        """
        described = {str(key): repr(value) for key, value in what.items()}
        found = self.gather_if_different(described)
        if any(one != described for one in found):
            raise_disagreement(found)

    def tell_failure(self, text: str) -> None:
        """Let `check_agreement` of the other workers raise an error with this text. Blocks."""
        self.gather_if_different({FAILURE: text})

    def open_channel(self, peers: Iterable[int], max_bytes: int = MAX_BYTES) -> Channel:
        """Connect this worker with some peers for messages in no common order; see `channel.py`. All workers call it.

        Args:
            peers: other ranks; if worker a names b, b must name a.
            max_bytes: of the payload of a message, the same on all workers.
        """
        peers = sorted(set(peers))
        check.peers(self, "open_channel", "peers", peers)
        return self._open_channel(peers, max_bytes)

    def reordered(self, order: Sequence[int]) -> Communicator:
        """Another communicator of the same workers, in which rank r is this one's rank `order[r]`. All of them call it.

        Raises:
            ValueError: its ranks cannot change.
        """
        raise ValueError(f"rank {self.rank}: {type(self).__name__} has ranks that cannot change; leave layout out.")

    def background(self, name: str) -> Background:
        """A thread in which calls that use this communicator run in order, beside the caller."""
        return Background(name)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or abandoned."""
        return self._closed

    def close(self) -> None:
        """Close the communicator; wait for all operations before. Calling it again does nothing."""
        self._end(self._close)

    def abandon(self) -> None:
        """Close the communicator after an error, without waiting for other workers: what is under way may never end."""
        self._end(self._abandon)

    def _end(self, end: Callable[[], None], aborted: str = "") -> None:
        """Call `end`, unless the communicator has ended before; `aborted` says why later operations fail."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._aborted = True, aborted
        end()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close() if kind is None else self.abandon()

    # ---- what a backend implements; a primitive starts an operation and returns a function that waits for it ----

    @abstractmethod
    def _close(self) -> None:
        """Called once, after the last operation was issued."""

    def _abandon(self) -> None:
        """Called once in place of `_close`, after an error."""
        self._close()

    @abstractmethod
    def _issue(self, tensors: list[Tensor], start: Start) -> Wait:
        """Run `start` in call order; return a function that waits until the operation is done."""

    @abstractmethod
    def _start_all_reduce(self, tensor: Tensor) -> Wait: ...

    def _start_all_gather(self, gathered: list[Tensor]) -> Wait:
        """`gathered[r]` receives the bytes of worker r; the own entry holds the bytes to send. Nothing empty is sent."""
        own, others = gathered[self.rank], self._others(gathered)
        return self._start_exchange(
            {peer: own for peer in others if own.numel()}, {peer: part for peer, part in others.items() if part.numel()}
        )

    def _slot_bytes(self, device: torch.device, sizes: list[int]) -> int | None:
        """What every worker sends to each other one in an `all_gather` of messages of so many bytes, a multiple of 16.

        None if each sends its message alone. Padding is sent, so it counts.
        """
        return None

    def _start_slots(self, own: Tensor, slots: Tensor) -> Wait:
        """Gather equal slots, (W, `_slot_bytes`) uint8; `own` holds the bytes to send."""
        raise NotImplementedError

    @abstractmethod
    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        """The tensors are flat uint8, and none is empty."""

    @abstractmethod
    def _start_broadcast(self, tensor: Tensor, root: int) -> Wait: ...

    @abstractmethod
    def _open_channel(self, peers: list[int], max_bytes: int) -> Channel: ...

    # ---- shared by the operations ----

    def _record_channel(self, messages: int, bytes_sent: int, bytes_received: int) -> None:
        with self._lock:
            self.ledger.record("channel", messages, bytes_sent, bytes_received)

    def _others(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        """Peer -> its tensor, in the order rank+1, rank+2, ..."""
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        return {peer: tensors[peer] for peer in peers}

    def _gather(self, operation: str, tensor: Tensor, sizes: list[int]) -> Handle:
        slot = self._slot_bytes(tensor.device, [n * tensor.element_size() for n in sizes])
        if slot is None:
            # One allocation each, so that every message is aligned and may be viewed as floats.
            gathered = [tensor if rank == self.rank else flat_like(tensor, n) for rank, n in enumerate(sizes)]
            num_bytes = tensor.nbytes
            received = sum(part.nbytes for part in self._others(gathered).values())
            start, used = partial(self._start_all_gather, [as_bytes(part) for part in gathered]), gathered
        else:
            slots = debug.empty(self.size, slot, dtype=torch.uint8, device=tensor.device)
            gathered = [
                row[: n * tensor.element_size()].view(tensor.dtype) for row, n in zip(slots, sizes, strict=True)
            ]
            gathered[self.rank] = tensor
            num_bytes, received = slot, (self.size - 1) * slot
            # All of the slots: a single worker gets no view of them, and nothing else would keep their memory.
            start, used = partial(self._start_slots, as_bytes(tensor), slots), [tensor, slots]
        messages = self.size - 1 if num_bytes else 0
        traffic = (messages, messages * num_bytes, received)
        return self._submit(operation, used, start, gathered, traffic, [tensor])

    def _gather_variable(self, tensor: Tensor, sizes: list[int] | None, limit: int) -> Handle:
        """Sizes, then tensors: two messages to each worker, started as one operation to keep the order."""
        check.flat(self, "all_gather", tensor)
        if sizes is not None:
            raise ValueError(f"rank {self.rank}: all_gather got sizes and variable=True. Leave one of them out.")
        result: list[Tensor] = []
        start = partial(self._start_gather_variable, tensor.detach(), result, limit)
        others, num_bytes = self.size - 1, tensor.nbytes
        messages = others * (2 if num_bytes else 1)
        traffic = (messages, others * (8 + num_bytes), 8 * others)
        handle = self._submit("all_gather", [tensor], start, result, traffic, [tensor])
        return Handle(partial(self._count_received, handle))

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor], limit: int) -> Wait:
        """Fill the empty `result` with one tensor per worker, once their sizes are known."""
        length = torch.tensor([tensor.numel()], device=tensor.device)
        lengths = [length if rank == self.rank else debug.empty_like(length) for rank in range(self.size)]
        self._start_all_gather([as_bytes(part) for part in lengths])()
        sizes = check.announced_sizes(torch.cat(lengths).tolist(), limit)
        result += [tensor if rank == self.rank else flat_like(tensor, n) for rank, n in enumerate(sizes)]
        return self._start_all_gather([as_bytes(part) for part in result])

    def _count_received(self, handle: Handle) -> list[Tensor]:
        result: list[Tensor] = handle.wait()
        others = self._others(result).values()
        with self._lock:
            self.ledger.add_received("all_gather", sum(part.nbytes for part in others))
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
        tensors, traffic = [*sends.values(), *receives.values()], (len(wire_sends), sent, received)
        return self._submit(operation, tensors, start, result, traffic, list(sends.values()))

    def _submit(
        self,
        operation: str,
        tensors: list[Tensor],
        start: Start,
        result: Any,
        traffic: tuple[int, int, int],
        sent: Sequence[Tensor] = (),
    ) -> Handle:
        """Issue and count one operation; `sent` are the tensors whose checksums debug mode compares."""
        check.own_process(self)
        self.round_thread.drain()
        messages = [as_bytes(tensor) for tensor in sent] if debug.enabled else []
        before = debug.checksums(messages)
        with self._lock:
            if self._aborted:
                raise CommunicationError(f"rank {self.rank}: {operation} failed: {self._aborted}")
            if self._closed:
                raise ValueError(f"rank {self.rank}: {operation} on a communicator that was closed. Close it last.")
            wait = self._issue(tensors, start)
            self.ledger.record(operation, *traffic)
        unchanged = partial(self._check_unchanged, operation, messages, before)
        return Handle(partial(self._finish, operation, wait, result, unchanged))

    def _finish(self, operation: str, wait: Wait, result: Any, check_unchanged: Callable[[], None]) -> Any:
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
