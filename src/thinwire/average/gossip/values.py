"""Tensors as flat parts, which rounds read and move in place.

A part is a view of a tensor that is contiguous and of the round's float type; of any other tensor it is a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import kernels
from ..base import NamedTensors, copy_changed

Parts = list[Tensor]  # one-dimensional and contiguous, one for each tensor

Apply = Callable[[Parts], kernels.Flag]
"""Adds a round's change to the values as they are now; returns whether this worker's part of the round was finite."""


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
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")


def move(tensors: NamedTensors, dtype: torch.dtype, apply: Apply) -> kernels.Flag:
    """Let `apply` add a change to flat parts, and so to the tensors; returns whether it and what was written are finite.

    Tensors of another type move after `apply`: in float32, or in float64 where one of the two is float64.

    Example:
        >>> x = torch.ones(2, dtype=torch.bfloat16)
        >>> move([("x", x)], torch.float32, lambda parts: bool(parts[0].add_(1.0).isfinite().all()))
        True
        >>> x
        tensor([2., 2.], dtype=torch.bfloat16)
    """
    targets = [t.detach() for _, t in tensors]
    parts = [_view(t) if _is_plain(t, dtype) else torch.zeros(t.numel(), dtype=dtype, device=t.device) for t in targets]
    finite = apply(parts)
    moved = [t if _is_plain(t, dtype) else t + part.view_as(t) for t, part in zip(targets, parts, strict=True)]
    return kernels.flags.both(finite, copy_changed(moved, targets))


def _is_plain(t: Tensor, dtype: torch.dtype) -> bool:
    return t.dtype == dtype and t.is_contiguous()


def _view(t: Tensor) -> Tensor:
    return t.detach().view(-1)
