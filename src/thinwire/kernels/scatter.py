"""Selected elements out of dense segments, and back into them.

`indices` is int32 and flat: `counts[i]` of segment i, counted from the segment's start. They may come off the network,
so each segment's indices are checked before it is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import bits as bit
from .backend import kernel
from .checks import check_counts, check_length, counted, counted_indices, device_of, numels_of, segments
from .flags import Fault, Flag, demand
from .reduce import all_finite
from .scales import float32


def gather(xs: Sequence[Tensor], indices: Tensor, counts: Sequence[int]) -> Tensor:
    """The selected elements, flat: `xs[i][indices]`.

    Raises:
        ValueError: if an index lies outside its segment.

    Example:
        >>> gather([torch.tensor([1.0, -5.0, 3.0])], torch.tensor([1, 2], dtype=torch.int32), [2])
        tensor([-5.,  3.])
    """
    device, checked = _segments("xs", xs, indices, counts)
    return _gather.on[device.type](checked, counted_indices(indices, counts, device), list(counts))


def gather_marked(xs: Sequence[Tensor], indices: Tensor, counts: Sequence[int]) -> Tensor:
    """The selected elements, flat; the first of a segment is NaN if the segment holds an infinite or NaN element.

    Raises:
        ValueError: if an index lies outside its segment.

    Example:
        >>> gather_marked([torch.tensor([1.0, float("inf"), 3.0])], torch.tensor([0, 2], dtype=torch.int32), [2])
        tensor([nan, 3.])
    """
    device, checked = _segments("xs", xs, indices, counts)
    return _gather_marked.on[device.type](checked, counted_indices(indices, counts, device), list(counts))


def write(outs: Sequence[Tensor], indices: Tensor, values: Tensor, counts: Sequence[int]) -> None:
    """Write selected elements: `outs[i][indices] = values`. Within a segment no index may appear twice.

    Raises:
        ValueError: if an index lies outside its segment; nothing has then been written to that segment.

    Example:
        >>> out = torch.zeros(3)
        >>> write([out], torch.tensor([1], dtype=torch.int32), torch.tensor([2.0]), [1])
        >>> out
        tensor([0., 2., 0.])
    """
    device, checked = _segments("outs", outs, values, counts)
    _write.on[device.type](checked, *_pairs(indices, values, counts, device), list(counts))


def clear(outs: Sequence[Tensor], indices: Tensor, counts: Sequence[int]) -> None:
    """Set selected elements to zero: `outs[i][indices] = 0`.

    Raises:
        ValueError: if an index lies outside its segment; nothing has then been written to that segment.

    Example:
        >>> out = torch.ones(3)
        >>> clear([out], torch.tensor([1], dtype=torch.int32), [1])
        >>> out
        tensor([1., 0., 1.])
    """
    device, checked = _segments("outs", outs, indices, counts)
    _clear.on[device.type](checked, counted_indices(indices, counts, device), list(counts))


def add(outs: Sequence[Tensor], indices: Tensor, values: Tensor, counts: Sequence[int], weight: float) -> None:
    """Add selected elements: `outs[i][indices] += weight * values`. Within a segment no index may appear twice.

    Raises:
        ValueError: if an index lies outside its segment; nothing has then been written to that segment.

    Example:
        >>> out = torch.ones(3)
        >>> add([out], torch.tensor([1], dtype=torch.int32), torch.tensor([2.0]), [1], weight=0.5)
        >>> out
        tensor([1., 2., 1.])
    """
    device, checked = _segments("outs", outs, values, counts)
    _add.on[device.type](checked, *_pairs(indices, values, counts, device), list(counts), weight)


def total(
    outs: Sequence[Tensor],
    indices: Sequence[Tensor],
    values: Sequence[Tensor],
    counts: Sequence[Sequence[int]],
    weight: float,
) -> Flag:
    """Overwrite `outs` with the sum of selected elements: `add` of each payload's into zeros; on GPUs in one pass.

    Args:
        outs: float32 segments, overwritten.
        indices: of each payload, as in `add`; strictly ascending in each segment, as decoders give them.
        values: of each payload.
        counts: of each payload.
        weight: factor of all values.

    Returns:
        Whether the whole result is finite: a `bool` in main memory, elsewhere a flag on the device.

    Raises:
        ValueError: if an index lies outside its segment.

    Example:
        >>> out, index = torch.ones(3), torch.tensor([1], dtype=torch.int32)
        >>> total([out], [index, index], [torch.tensor([2.0]), torch.tensor([3.0])], [[1], [1]], weight=0.5)
        True
        >>> out
        tensor([0.0000, 2.5000, 0.0000])
    """
    if not indices:
        raise ValueError("indices: expected at least one payload")
    check_length("values", values, len(indices))
    check_length("counts", counts, len(indices))
    device = device_of(outs, indices[0])
    checked = segments("outs", outs, device)
    pairs = []
    for index, value, count in zip(indices, values, counts, strict=True):
        check_counts(count, numels_of(outs))
        pairs.append(_pairs(index, value, count, device))
    return _total.on[device.type](
        checked, [i for i, _ in pairs], [v for _, v in pairs], [list(c) for c in counts], weight
    )


def _segments(
    name: str, tensors: Sequence[Tensor], selected: Tensor, counts: Sequence[int]
) -> tuple[torch.device, list[Tensor]]:
    """Check segments, and how many elements of each are selected; their device, and the segments detached."""
    device = device_of(tensors, selected)
    checked = segments(name, tensors, device)
    check_counts(counts, numels_of(tensors))
    return device, checked


def _pairs(indices: Tensor, values: Tensor, counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Check indices and their values; return them detached."""
    return counted_indices(indices, counts, device), counted("values", values, counts, torch.float32, device)


# ---- the reference ----


@kernel
def _gather(xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    values = [x[index] for x, index in _checked_pieces(xs, indices, counts)]
    return torch.cat([torch.empty(0, dtype=torch.float32, device=indices.device), *values])


@kernel
def _gather_marked(xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    values = gather(xs, indices, counts)
    for x, kept in zip(xs, bit.split(values, counts), strict=True):
        kept[:1].masked_fill_(~x.isfinite().all(), torch.nan)
    return values


@kernel
def _write(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int]) -> None:
    for (out, index), value in zip(_checked_pieces(outs, indices, counts), bit.split(values, counts), strict=True):
        out.scatter_(0, index, value)


@kernel
def _clear(outs: list[Tensor], indices: Tensor, counts: list[int]) -> None:
    for out, index in _checked_pieces(outs, indices, counts):
        out.index_fill_(0, index, 0.0)


@kernel
def _add(outs: list[Tensor], indices: Tensor, values: Tensor, counts: list[int], weight: float) -> None:
    factor = float32(weight, values.device)
    for (out, index), value in zip(_checked_pieces(outs, indices, counts), bit.split(values, counts), strict=True):
        # Not `index_add_`: on GPUs its atomic additions make zeros of numbers below the normal range.
        out.scatter_(0, index, out[index] + value * factor)


@kernel
def _total(
    outs: list[Tensor], indices: list[Tensor], values: list[Tensor], counts: list[list[int]], weight: float
) -> Flag:
    add = _add.on[indices[0].device.type]
    for out in outs:
        out.zero_()
    for index, value, count in zip(indices, values, counts, strict=True):
        add(outs, index, value, count, weight)
    # Elements that no payload names are zero, and so finite.
    return all_finite([gather(outs, index, count) for index, count in zip(indices, counts, strict=True)])


def _checked_pieces(outs: list[Tensor], indices: Tensor, counts: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Check the indices; yield each segment with its own."""
    # int64, because `index_fill_` takes no other indices.
    for i, (out, index) in enumerate(zip(outs, bit.split(indices.long(), counts), strict=True)):
        if index.numel():
            is_inside = (index.amin() >= 0) & (index.amax() < out.numel())
            message = f"segment {i}: indices must be 0 to {out.numel() - 1}, one is outside; corrupt payload?"
            demand(is_inside, Fault.OUTSIDE, message)
        # On a GPU the fault is only counted, so that the index must be made harmless.
        yield out, index.clamp(0, max(0, out.numel() - 1))
