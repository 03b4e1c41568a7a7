"""Reductions over segments: whether all is finite, and norms of chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import debug
from .backend import kernel
from .checks import device_of, numels_of, segments
from .scales import tree_sum


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element of any tensor is NaN or infinite. Contiguous float32 is fast; any tensor will do.

    Example:
        >>> all_finite([torch.ones(3), torch.tensor([float("inf")])])
        False
    """
    tensors = [t.detach() for t in tensors]
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in tensors):
        return finite(tensors)
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return _all_finite.on(device)([t.view(-1) for t in tensors])


def chunk_norms(xs: Sequence[Tensor], chunk: int) -> Tensor:
    """The L1 norm of each chunk of each segment, summed in float64; a segment's last chunk may be shorter.

    Args:
        xs: segments of float32.
        chunk: elements of a chunk.

    Returns:
        float32 tensor, one norm for each chunk of each segment, in order.

    Raises:
        ValueError: if `chunk` is not positive.

    Example:
        >>> chunk_norms([torch.tensor([1.0, -5.0, 3.0])], chunk=2)
        tensor([6., 3.])
    """
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
    device = device_of(xs)
    checked = segments("xs", xs, device)
    norms = debug.empty(sum(-(-n // chunk) for n in numels_of(xs)), device=device)
    _chunk_norms.on(device)(checked, chunk, norms)
    return norms


# ---- the reference ----


@kernel
def _all_finite(tensors: list[Tensor]) -> bool:
    return finite(tensors)


@kernel
def _chunk_norms(xs: list[Tensor], chunk: int, out: Tensor) -> None:
    norms = [torch.empty(0, dtype=torch.float64, device=out.device)]
    for x in xs:
        whole = x.numel() // chunk * chunk
        parts = (x[:whole].view(-1, chunk), x[None, whole:])
        norms += [tree_sum(part.abs()) for part in parts if part.numel()]
    out.copy_(torch.cat(norms))


def finite(tensors: Sequence[Tensor]) -> bool:
    """`all_finite` in plain PyTorch, for the references."""
    return all(bool(t.isfinite().all()) for t in tensors)
