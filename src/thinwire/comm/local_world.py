"""Workers as threads of one process: for tests, examples and simulation.

The contract is that of `base.py`, and the ledger counts what a network would carry. A message is copied into the
receiver's mailbox at the call, so that nothing is under way between calls and no issuing thread is needed.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..messages import error_text
from ..streams import hand_over, take_over
from . import check
from .base import Communicator, Start
from .buffers import as_bytes
from .channel import HEADER_BYTES, Channel, Message
from .handle import CommunicationError, Wait
from .numbered import Numbers

Box = tuple[Any, ...]  # the name of a channel's mailbox
Conversation = tuple[int, ...]  # of a communicator: those that were made from which one, by number
Position = tuple[Conversation, int]  # and the number of a message in it


@dataclass(frozen=True)
class LocalWorld:
    """W workers in threads.

    With small tensors, one core is faster than several, because PyTorch gives Python's lock up in each operation, and threads
    on several cores then wake each other. `taskset -c 0 python ...` keeps a Linux process on one core (docs/benchmarks.md).

    Args:
        size: number of workers, W.
        timeout_seconds: how long a worker waits for a message before it gives up.

    Raises:
        ValueError: no workers.

    Example:
        >>> import torch
        >>> def mean(comm):
        ...     return comm.all_reduce(torch.tensor([float(comm.rank)])).wait() / comm.size
        >>> LocalWorld(4).run(mean)
        [tensor([1.5000]), tensor([1.5000]), tensor([1.5000]), tensor([1.5000])]
    """

    size: int
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"LocalWorld needs at least one worker, got size={self.size}.")

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `fn(comm, *args)` in every worker and returns the results in rank order.

        Raises:
            Exception: the first error that a worker raised, its rank put before its message; the others are released
                at once. What ended a connection counts before an error that this led to on another worker.
        """
        mail, results = Mail(self.timeout_seconds), [None] * self.size

        def work(rank: int) -> None:
            try:
                # A GPU has one thread for the backward passes of all workers, and one that waits there would hold up others.
                with torch.autograd.set_multithreading_enabled(False), LocalCommunicator(rank, self.size, mail) as comm:
                    results[rank] = fn(comm, *args)
            except BaseException as error:
                mail.fail(rank, error)
            finally:
                mail.leave(rank)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            mail.fail(None, CommunicationError("the world has ended"))  # releases workers when we are interrupted
        if mail.failed_rank is not None and mail.error is not None:
            raise name_rank(mail.error, mail.failed_rank)
        return results


def name_rank(error: BaseException, rank: int) -> BaseException:
    """The same error, with the worker that raised it put before its message, and its class where that says more.

    Example:
        >>> name_rank(KeyError("x"), 1)
        KeyError("rank 1: KeyError: 'x'")
    """
    if error.args and str(error.args[0]).startswith(f"rank {rank}: "):
        return error
    if isinstance(error, OSError) and error.strerror is not None:  # its text is made of these, and has the number
        error.strerror = f"rank {rank}: {error.strerror}"
        error.args = (error.args[0], error.strerror, *error.args[2:])
    elif len(error.args) > 1:
        error.args = (f"rank {rank}: {error.args[0]}", *error.args[1:])
    else:
        error.args = (f"rank {rank}: {error_text(error)}",)
    return error


def _of_connection(error: BaseException | None) -> bool:
    """Whether it is an error of a connection, or was raised while one was handled."""
    return error is not None and (isinstance(error, CommunicationError) or _of_connection(error.__context__))


class Mail:
    """Messages between threads, matched by sender, receiver and position in their conversation. Ranks are the world's."""

    def __init__(self, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self.error: BaseException | None = None
        self.failed_rank: int | None = None
        self._messages: dict[tuple[int, int, Position], tuple[Tensor, torch.cuda.Event | None]] = {}
        self._boxes: defaultdict[Box, list[Message | None]] = defaultdict(list)
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def put(self, source: int, target: int, position: Position, message: Tensor) -> None:
        with self._changed:
            self._messages[source, target, position] = message, hand_over(message)
            self._changed.notify_all()

    def take(self, source: int, target: int, position: Position) -> Tensor:
        key = (source, target, position)
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._messages or self.error or source in self._left, self.timeout_seconds
            )
            if key in self._messages:
                message, made = self._messages.pop(key)
                take_over(message, made)
                return message
        if self.error:
            raise CommunicationError(f"released, because rank {self.failed_rank} raised {self.error!r}")
        if source in self._left:
            raise CommunicationError(f"rank {source} has finished and sends no more")
        raise CommunicationError(f"nothing came from rank {source} in {self.timeout_seconds} seconds")

    def post(self, box: Box, letter: Message | None) -> None:
        """Puts a message for a channel into its box; None wakes its readers."""
        with self._changed:
            # One wake that nobody has read yet is enough.
            if letter is not None or None not in self._boxes[box]:
                self._boxes[box].append(letter)
            self._changed.notify_all()

    def pick(self, box: Box, sources: set[int], workers: set[int], timeout_seconds: float | None) -> Message | None:
        """The oldest message of one of `sources`; None if woken, or after so many seconds. All `workers` must be there."""
        with self._changed:
            letters = self._boxes[box]
            wanted: list[int] = []

            def is_over() -> bool:
                wanted[:] = [i for i, letter in enumerate(letters) if letter is None or letter.source in sources][:1]
                return bool(wanted or self.error or self._left & workers)

            self._changed.wait_for(is_over, timeout_seconds)
            if wanted:
                return letters.pop(wanted[0])
            if self.error:
                raise CommunicationError(f"released, because rank {self.failed_rank} raised {self.error!r}")
            if gone := sorted(self._left & workers):
                raise CommunicationError(f"rank {gone[0]} has hung up: its function has returned")
            return None

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Releases all workers; the first error counts, but for one of a connection, if what ended it follows."""
        with self._changed:
            if self.error is None or _of_connection(self.error) and not _of_connection(error):
                self.error, self.failed_rank = error, rank
            self._changed.notify_all()

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()


class LocalCommunicator(Communicator):
    """One worker of a `LocalWorld`.

    Args:
        rank, size: as of a communicator.
        mail: delivers the messages.
        conversation: tells communicators of the same workers apart.
        order: the world's rank of each worker; None if it is the same.
    """

    def __init__(
        self, rank: int, size: int, mail: Mail, conversation: Conversation = (), order: Sequence[int] | None = None
    ):
        super().__init__(rank, size)
        self._conversation = conversation
        self._order = range(size) if order is None else order
        self._mail = mail
        self._num_made = 0  # communicators, from this one
        self._numbers = Numbers(size)
        self._num_channels = 0

    def reordered(self, order: Sequence[int]) -> LocalCommunicator:
        """Its messages do not mix with those of this one."""
        self._num_made += 1
        conversation = (*self._conversation, self._num_made)
        in_world = [self._order[rank] for rank in order]
        return LocalCommunicator(order.index(self.rank), self.size, self._mail, conversation, in_world)

    def _close(self) -> None:
        """Nothing to do."""

    def _issue(self, tensors: list[Tensor], start: Start) -> Wait:
        return start()

    def _start_all_reduce(self, tensor: Tensor) -> Wait:
        # Others may read it after this worker's sum has overwritten `tensor`.
        own = tensor.clone()
        others = self._others([own] * self.size)
        take = self._post(others, list(others))
        return lambda: self._sum(tensor, {**take(), self.rank: own})

    def _sum(self, tensor: Tensor, contributions: dict[int, Tensor]) -> None:
        """Adds in rank order, so that the result has the same bits on every worker."""
        for peer, contribution in contributions.items():
            self._require_same(tensor, contribution, peer)
        tensor.copy_(contributions[0])
        for rank in range(1, self.size):
            tensor += contributions[rank]

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor], limit: int) -> Wait:
        # A mailbox takes messages of any size, so that the call need not wait for sizes.
        others = self._others([tensor.clone()] * self.size)
        take = self._post(others, list(others))

        def finish() -> None:
            parts = [part for _, part in sorted({**take(), self.rank: tensor}.items())]
            check.announced_sizes([part.numel() for part in parts], limit)
            result.extend(parts)

        return finish

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        # One copy of each tensor, to however many peers it goes.
        copies = {id(tensor): tensor.clone() for tensor in sends.values()}
        take = self._post({peer: copies[id(tensor)] for peer, tensor in sends.items()}, list(receives))
        return lambda: self._store(receives, take())

    def _store(self, receives: dict[int, Tensor], messages: dict[int, Tensor]) -> None:
        for peer, tensor in receives.items():
            self._require_same(tensor, messages[peer], peer)
            tensor.copy_(messages[peer])

    def _start_broadcast(self, tensor: Tensor, root: int) -> Wait:
        if self.rank == root:
            return self._start_exchange(self._others([tensor] * self.size), {})
        return self._start_exchange({}, {root: tensor})

    def _open_channel(self, peers: list[int], max_bytes: int) -> Channel:
        self._num_channels += 1
        return LocalChannel(self, (self._conversation, self._num_channels), max_bytes)

    def _post(self, messages: dict[int, Tensor], sources: list[int]) -> Callable[[], dict[int, Tensor]]:
        """Sends `messages`, and returns a callable that takes the next message from each of `sources`."""
        own = self._order[self.rank]
        for peer, message in messages.items():
            self._mail.put(own, self._order[peer], (self._conversation, self._numbers.next_sent(peer)), message)
        positions = {source: (self._conversation, self._numbers.next_received(source)) for source in sources}
        return lambda: {
            source: self._mail.take(self._order[source], own, position) for source, position in positions.items()
        }

    def _require_same(self, expected: Tensor, message: Tensor, peer: int) -> None:
        if (expected.numel(), expected.dtype) != (message.numel(), message.dtype):
            raise ValueError(
                f"expected {expected.numel()} x {expected.dtype} from rank {peer}, got {message.numel()} x "
                f"{message.dtype}. Call the same operations on every worker, with tensors of the same size."
            )


class LocalChannel(Channel):
    """A channel between threads. A worker is alive until its function returns, or one of them raises."""

    def __init__(self, comm: LocalCommunicator, name: Box, max_bytes: int):
        self._comm, self._mail, self._name, self._max_bytes = comm, comm._mail, name, max_bytes

    def send(self, peer: int, kind: int, payload: Tensor | None = None) -> None:
        body = torch.empty(0, dtype=torch.uint8, device="cpu") if payload is None else as_bytes(payload).clone()
        check.message(self._comm.rank, peer, body.numel(), self._max_bytes)
        self._mail.post((*self._name, peer), Message(self._comm.rank, kind, body))
        self._comm._record_channel(1, HEADER_BYTES + body.numel(), 0)

    def receive(self, sources: Iterable[int], timeout_seconds: float | None = None) -> Message | None:
        sources = set(sources)
        workers = {self._comm._order[rank] for rank in (self._comm.rank, *sources)}
        message = self._mail.pick((*self._name, self._comm.rank), sources, workers, timeout_seconds)
        if message is not None:
            self._comm._record_channel(0, 0, HEADER_BYTES + message.payload.numel())
        return message

    def wake(self) -> None:
        self._mail.post((*self._name, self._comm.rank), None)

    def close(self) -> None:
        """Nothing to do: a worker hangs up when its function returns."""
