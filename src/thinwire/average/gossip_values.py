"""Tensors as flat parts, which rounds read and move in place.

A part is a view of a tensor that is contiguous and of the round's float type; of any other tensor it is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .base import NamedTensors

Parts = list[Tensor]  # one-dimensional and contiguous, one for each tensor


def parts_of(tensors: NamedTensors, dtype: torch.dtype) -> Parts:
    """The values, to be read.

    Example:
        >>> x = torch.zeros(2, 2)
        >>> [part] = parts_of([("x", x)], torch.float32)
        >>> part.data_ptr() == x.data_ptr()
        True
    """
    return [_view(t) if _is_plain(t, dtype) else t.detach().to(dtype).reshape(-1).contiguous() for _, t in tensors]


def flat(parts: Parts) -> Tensor:
    """A new vector of all parts.

    Example:
        >>> flat([torch.ones(2), torch.zeros(1)])
        tensor([1., 1., 0.])
    """
    return torch.cat(parts) if parts else torch.empty(0)


@contextmanager
def moving(tensors: NamedTensors, dtype: torch.dtype) -> Iterator[Parts]:
    """Context in which a change is added to the parts that it yields, which adds it to the tensors.

    Tensors of another type move at the end of the context: in float32, or in float64 where one of the two is float64.

    Example:
        >>> x = torch.ones(2, dtype=torch.bfloat16)
        >>> with moving([("x", x)], torch.float32) as [part]:
        ...     _ = part.add_(1.0)
        >>> x
        tensor([2., 2.], dtype=torch.bfloat16)
    """
    others: list[tuple[Tensor, Tensor]] = []
    parts: Parts = []
    for _, t in tensors:
        if _is_plain(t, dtype):
            parts.append(_view(t))
            continue
        parts.append(torch.zeros(t.numel(), dtype=dtype, device=t.device))
        others.append((t.detach(), parts[-1]))
    yield parts
    # Kernels write through addresses, of which autograd knows nothing.
    torch.autograd.graph.increment_version([t for _, t in tensors if _is_plain(t, dtype)])
    for t, change in others:
        t.copy_(t + change.view(t.shape))


def _is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    return t.dtype == dtype and t.is_contiguous()


def _view(t: Tensor) -> Tensor:
    return t.detach().view(-1)
