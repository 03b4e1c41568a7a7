"""Operations of Gloo: waiting for them, numbered messages, and closing the connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from .exit import until_exit
from .handle import CommunicationError, Wait, nothing, reason_of
from .numbered import TaggedMessage

Works = list[tuple[str, Any]]
"""What each operation is called in an error, and the operation."""

HANG_UP_TAG, FIRST_TAG, NUM_TAGS = 1, 2, 1 << 30  # of numbered messages from the first one on; all others have tag 0


class GlooPeers:
    """The messages of a group to and from its other workers.

    Args:
        group: a `ProcessGroupGloo`, some of whose operations PyTorch's types lack.
    """

    def __init__(self, group: Any):
        self.group = group

    def post(self, sends: list[TaggedMessage], receives: list[TaggedMessage]) -> Wait:
        """Start messages, each with a tag of its own."""
        works = [(f"from rank {m.peer}", _begin(self.group.recv, m)) for m in receives]
        works += [(f"to rank {m.peer}", _begin(self.group.send, m)) for m in sends]
        return partial(self.wait, works) if works else nothing

    def wait(self, works: Works) -> None:
        """Wait for operations; see `wait_for_all`."""
        with until_exit(self.hang_up):
            wait_for_all(works)

    def hang_up(self) -> None:
        """Close the connections, so that workers that wait for this one fail at once, and so on along a ring.

        A receive that runs into its time limit closes them all; `ProcessGroup.abort()` closes none. Its tag is its own: a
        message that the peer has sent already would not fit, and Gloo ends the process over that.
        """
        for peer in set(range(self.group.size())) - {self.group.rank()}:
            with contextlib.suppress(RuntimeError, ValueError), until_exit():
                self.group.recv([torch.empty(1, dtype=torch.float32, device="cpu")], peer, HANG_UP_TAG).wait(
                    timedelta(milliseconds=1)
                )


def _begin(operation: Callable[..., Any], message: TaggedMessage) -> Any:
    try:
        return operation([message.memory], message.peer, FIRST_TAG + message.number % NUM_TAGS)
    except RuntimeError as error:
        raise CommunicationError(f"rank {message.peer}: {reason_of(error)}") from error


def wait_for_all(works: Works) -> None:
    """Wait for operations.

    Raises:
        CommunicationError: one failed.
    """
    for what, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            reason = reason_of(error)
            raise CommunicationError(f"{what}: {reason}" if what else reason) from error
