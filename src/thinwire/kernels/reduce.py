"""Reductions over segments: whether all is finite, and norms of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import debug
from .backend import kernel
from .checks import device_of, numels_of, segments
from .flags import Flag, all_of, flag_of
from .scales import tree_sum

T = TypeVar("T")
P = ParamSpec("P")


def all_finite(tensors: Sequence[Tensor]) -> Flag:
    """Whether no element of any tensor is NaN or infinite. Contiguous float32 on one device is fast; any tensor will do.

    In main memory this is a `bool`, elsewhere a flag on the device; see `flags.read`.

    Example:
        >>> all_finite([torch.ones(3), torch.tensor([float("inf")])])
        False
    """
    device = device_of(tensors)
    if any([t.dtype != torch.float32 or not t.is_contiguous() or t.device != device for t in tensors]):
        return finite(tensors)
    return _all_finite.on[device.type]([(t.detach() if t.requires_grad else t).flatten() for t in tensors])


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
    norms = debug.empty(sum(-(-n // chunk) for n in numels_of(xs)), dtype=torch.float32, device=device)
    _chunk_norms.on[device.type](checked, chunk, norms)
    return norms


def sum_payloads(
    decode_add: Callable[Concatenate[T, list[Tensor], float, P], None],
    payloads: Sequence[T],
    outs: list[Tensor],
    weight: float,
    *args: P.args,
    **kwargs: P.kwargs,
) -> Flag:
    """Decode and add each payload into zeros; a family's `decode_sum` where no kernel does it in one pass.

    Returns:
        Whether the whole result is finite.
    """
    if outs:
        torch._foreach_zero_(outs)
    for payload in payloads:
        decode_add(payload, outs, weight, *args, **kwargs)
    return all_finite(outs)


# ---- the reference ----


@kernel
def _all_finite(tensors: list[Tensor]) -> Flag:
    return finite(tensors)


@kernel
def _chunk_norms(xs: list[Tensor], chunk: int, out: Tensor) -> None:
    norms = [torch.empty(0, dtype=torch.float64, device=out.device)]
    for x in xs:
        whole = x.numel() // chunk * chunk
        parts = (x[:whole].view(-1, chunk), x[None, whole:])
        norms += [tree_sum(part.abs()) for part in parts if part.numel()]
    out.copy_(torch.cat(norms))


def finite(tensors: Sequence[Tensor]) -> Flag:
    """`all_finite` in plain PyTorch, for the references."""
    return all_of(flag_of(t.isfinite().all()) for t in tensors)
