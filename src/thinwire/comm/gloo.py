"""Operations of Gloo: waiting for them, sums in few steps, and closing the connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import debug
from .background import Background
from .exit import until_exit
from .handle import CommunicationError, reason_of
from .reduction import reduce_into

Works = list[tuple[str, Any]]
"""What each operation is called in an error, and the operation."""
Wait = Callable[[], Any]

HANG_UP_TAG, SUM_TAG = 1, 2  # all other messages have tag 0
STRAIGHT_BYTES = 1 << 22  # up to which tensors of three workers or more do not go around a ring


class Line(NamedTuple):
    """How to start a message of (tensor, peer, tag), which returns its work, and to make what waits for works."""

    send: Callable[[Tensor, int, int], Any]
    receive: Callable[[Tensor, int, int], Any]
    waiting: Callable[[Works], Wait]


def hang_up(gloo: Any) -> None:
    """Close a group's connections, so that workers that wait for this one fail at once, and so on along a ring.

    A receive that runs into its time limit closes them all; `ProcessGroup.abort()` closes none. Its tag is its own: a message
    that the peer has sent already would not fit, and Gloo ends the process over that.

    Args:
        gloo: a `ProcessGroupGloo`, some of whose operations PyTorch's types lack.
    """

    for peer in set(range(gloo.size())) - {gloo.rank()}:
        with contextlib.suppress(RuntimeError, ValueError), until_exit():
            gloo.recv([torch.empty(1, device="cpu")], peer, HANG_UP_TAG).wait(timedelta(milliseconds=1))


def goes_straight(num_bytes: int, size: int) -> bool:
    """Whether `start_sum` adds up a tensor of so many workers, and not Gloo's ring."""
    return size == 2 or num_bytes <= STRAIGHT_BYTES


def start_sum(tensor: Tensor, rank: int, size: int, line: Line, adder: Background) -> Wait:
    """Add up a tensor of all workers, in place, in one step or two, where Gloo's ring has 2 (W-1).

    Two workers send each other the whole tensor. Of more, worker r gets part r of all others, adds in rank order, and sends
    the sum to all, which sends and receives as many bytes as a ring. On a line of 100 ms, four workers need 150 ms for a short
    tensor, and around the ring 600. But the line out of a node carries the parts of all its workers, where a ring uses it
    once, so large tensors of more than two workers go around the ring.

    Args:
        tensor: contiguous, in main memory, with elements.
        rank, size: of this worker.
        line: starts messages.
        adder: a thread that adds, so that sums go on while nobody waits for them.
    """
    flat = tensor.view(-1)
    return _start_whole(flat, rank, line) if size == 2 else _start_parts(flat, rank, size, line, adder)


def _start_whole(tensor: Tensor, rank: int, line: Line) -> Wait:
    peer, theirs = 1 - rank, debug.empty_like(tensor)
    wait = line.waiting([_receiving(line, theirs, peer), _sending(line, tensor, peer)])

    def finish() -> None:
        wait()
        # In rank order, so that both have the same bits, also of NaN.
        reduce_into(tensor, (tensor, theirs) if rank == 0 else (theirs, tensor))

    return finish


def _start_parts(tensor: Tensor, rank: int, size: int, line: Line, adder: Background) -> Wait:
    parts = tensor.tensor_split(size)
    own, others = parts[rank], [(rank + step) % size for step in range(1, size)]
    copies = {peer: debug.empty_like(own) for peer in others}
    come = line.waiting([_receiving(line, copies[peer], peer) for peer in others if own.numel()])
    # A sum may overwrite the part that was sent for it: it comes only after that part has arrived whole.
    rest = [_receiving(line, parts[peer], peer, SUM_TAG) for peer in others if parts[peer].numel()]
    rest += [_sending(line, parts[peer], peer) for peer in others if parts[peer].numel()]

    def add() -> Wait:
        come()
        if own.numel():
            reduce_into(own, [copies.get(of, own) for of in range(size)])
        return line.waiting(rest + [_sending(line, own, peer, SUM_TAG) for peer in others if own.numel()])

    handle = adder.submit(add)
    return lambda: handle.wait()()


def _receiving(line: Line, tensor: Tensor, peer: int, tag: int = 0) -> tuple[str, Any]:
    return f"from rank {peer}", line.receive(tensor, peer, tag)


def _sending(line: Line, tensor: Tensor, peer: int, tag: int = 0) -> tuple[str, Any]:
    return f"to rank {peer}", line.send(tensor, peer, tag)


def wait_for_all(works: Works, copies: Sequence[tuple[Tensor, Tensor]] = (), limit: timedelta = timedelta(0)) -> None:
    """Wait for operations, and copy what came to where it belongs.

    Args:
        works: what each is called in an error, and the operation.
        copies: pairs of a tensor of the caller's and the one in main memory that was written, which may be the same.
        limit: how long to wait for each; 0 => the group's own.

    Raises:
        CommunicationError: an operation failed.
    """
    for what, work in works:
        try:
            work.wait(limit)
        except RuntimeError as error:
            reason = reason_of(error)
            raise CommunicationError(f"{what}: {reason}" if what else reason) from error
    for tensor, staged in copies:
        if staged is not tensor:
            tensor.copy_(staged, non_blocking=True)


def wait_and_copy(wait: Wait, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Wait, and copy what came to where it belongs; see `wait_for_all`."""
    wait()
    wait_for_all([], copies)
