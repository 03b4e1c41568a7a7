"""Waiting for operations of Gloo, and closing its connections."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from .exit import until_exit
from .handle import CommunicationError, reason_of

HANG_UP_TAG = 1  # all messages have tag 0


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


def wait_for_all(
    works: list[tuple[str, Any]], copies: Sequence[tuple[Tensor, Tensor]] = (), limit: timedelta = timedelta(0)
) -> None:
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
