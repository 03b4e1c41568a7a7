"""Several tensors in one message, because each message costs round trips: one for each tensor took seconds on a long line."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...comm import Communicator, Handle
from .shards import local

JOINED_BYTES = 16 * 2**20
"""Of a message; larger => fewer messages, and more memory in use at once. A tensor of more bytes travels alone."""


@torch.no_grad()
def exchange_joined(
    tensors: Iterable[Tensor],
    start: Callable[[Tensor], Handle],
    write: Callable[[Tensor, Tensor], object],
    dtype: torch.dtype | None = None,
) -> None:
    """Start a collective on the values of all tensors, in few messages, and write each tensor's part of the results.

    Args:
        tensors: of any layout in memory.
        start: the collective; it may write its result into what it gets. All start before the first one is waited for.
        write: called with each tensor and its part of the result, of the same shape.
        dtype: of the messages; None for that of the tensors.
    """
    started = []
    for group in _groups(tensors, dtype):
        parts = [t.to(dtype or t.dtype).reshape(-1).contiguous() for t in group]
        started.append((group, start(torch.cat(parts) if len(parts) > 1 else parts[0])))
    for group, handle in started:
        for t, part in zip(group, handle.wait().split([t.numel() for t in group]), strict=True):
            write(t, part.view_as(t))


def average_exactly(tensors: Iterable[Tensor], comm: Communicator) -> None:
    """Replace tensors by their mean over all workers, in place, whatever their layout in memory."""
    exchange_joined([local(t) for t in tensors], comm.all_reduce, lambda t, total: t.copy_(total.div_(comm.size)))


def _groups(tensors: Iterable[Tensor], dtype: torch.dtype | None) -> list[list[Tensor]]:
    """The tensors that travel together: of one dtype and device, in order."""
    groups: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}  # and the room left, in elements
    for t in filter(Tensor.numel, tensors):
        kind = dtype or t.dtype, t.device
        group, room = filling.get(kind, ([], -1))
        if t.numel() > room:
            group, room = [], JOINED_BYTES // kind[0].itemsize
            groups.append(group)
        group.append(t)
        filling[kind] = group, room - t.numel()
    return groups
