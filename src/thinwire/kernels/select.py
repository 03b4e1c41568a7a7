"""Selection of the largest magnitudes of each segment: top-k, above a threshold, and in chunks.

Selected elements of all segments come one segment after the other, as (indices, values): `indices` is int32, counts
from its segment's start and ascends within it; `values` is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import kernel
from .checks import check_counts, check_length, check_numels, device_of, numels_of, segments
from .scales import magnitude


def topk(xs: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each segment: exactly `counts[i]`, ties by lowest index, NaN above infinity.

    Args:
        xs: segments of float32.
        counts: how many of each.

    Returns:
        (indices, values), of `sum(counts)` elements.

    Raises:
        ValueError: if a count is negative or exceeds its segment.

    Example:
        >>> topk([torch.tensor([1.0, -5.0, 3.0, 5.0])], [2])
        (tensor([1, 3], dtype=torch.int32), tensor([-5.,  5.]))
    """
    device = device_of(xs)
    checked = segments("xs", xs, device)
    check_counts(counts, numels_of(xs))
    return _topk.on[device.type](checked, list(counts))


def above(xs: Sequence[Tensor], thresholds: Sequence[float]) -> tuple[Tensor, Tensor, list[int]]:
    """The elements with `|x| >= threshold` (rounded to float32), NaN and infinity included.

    Args:
        xs: segments of float32.
        thresholds: one per segment, not negative. Higher => fewer elements.

    Returns:
        (indices, values, counts per segment).

    Raises:
        ValueError: if a threshold is negative or NaN.

    Example:
        >>> above([torch.tensor([1.0, -5.0, 3.0])], [2.0])
        (tensor([1, 2], dtype=torch.int32), tensor([-5.,  3.]), [2])
    """
    device = device_of(xs)
    checked = segments("xs", xs, device)
    check_length("thresholds", thresholds, len(xs))
    for i, threshold in enumerate(thresholds):
        if not threshold >= 0:
            raise ValueError(f"thresholds[{i}]: expected a number >= 0, got {threshold}")
    # The absolute value, because -0.0 is no magnitude.
    return _above.on[device.type](checked, [abs(float(t)) for t in thresholds])


def topk_in_chunks(xs: Sequence[Tensor], chunk: int, count: int, last_counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each chunk of each segment; ties as in `topk`.

    Args:
        xs: segments of float32.
        chunk: elements of a chunk; the last one of a segment may be shorter.
        count: how many of each chunk.
        last_counts: how many of the shorter last chunk of each segment, 0 where there is none.

    Returns:
        (indices, values).

    Raises:
        ValueError: if more are asked for than a chunk has.

    Example:
        >>> topk_in_chunks([torch.tensor([1.0, -5.0, 3.0, 5.0, 2.0])], chunk=2, count=1, last_counts=[1])
        (tensor([1, 3, 4], dtype=torch.int32), tensor([-5.,  5.,  2.]))
    """
    device = device_of(xs)
    checked, numels = segments("xs", xs, device), numels_of(xs)
    check_numels(numels)
    check_length("last_counts", last_counts, len(xs))
    if chunk < 1 or not 0 <= count <= chunk:
        raise ValueError(f"count: expected 0 to {chunk} (a chunk's elements), got {count}")
    check_counts(last_counts, [n % chunk for n in numels])
    total = sum(n // chunk * count for n in numels) + sum(last_counts)
    return _topk_in_chunks.on[device.type](checked, chunk, count, list(last_counts), total)


def largest(xs: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each segment; 0 for an empty one, NaN above infinity.

    Example:
        >>> largest([torch.tensor([1.0, -5.0]), torch.tensor([])])
        [5.0, 0.0]
    """
    device = device_of(xs)
    return _largest.on[device.type](segments("xs", xs, device))


# ---- the reference ----


@kernel
def _topk(xs: list[Tensor], counts: list[int]) -> tuple[Tensor, Tensor]:
    return topk_of(xs, counts)


@kernel
def _above(xs: list[Tensor], thresholds: list[float]) -> tuple[Tensor, Tensor, list[int]]:
    kept = []
    for x, threshold in zip(xs, thresholds, strict=True):
        # Compared as bits, so that NaN is above every threshold.
        bits = torch.tensor([threshold], dtype=torch.float32, device=x.device).view(torch.int32)
        kept.append((magnitude(x) >= bits).nonzero().flatten())
    indices, values = _gather(xs, kept)
    return indices, values, [i.numel() for i in kept]


@kernel
def _topk_in_chunks(
    xs: list[Tensor], chunk: int, count: int, last_counts: list[int], total: int
) -> tuple[Tensor, Tensor]:
    kept = []
    for x, last_count in zip(xs, last_counts, strict=True):
        whole = x.numel() // chunk * chunk
        starts = torch.arange(0, whole, chunk, device=x.device)
        in_chunks = _keep_largest_of_rows(x[:whole].view(-1, chunk), count) + starts[:, None]
        kept.append(torch.cat([in_chunks.flatten(), _keep_largest(x[whole:], last_count) + whole]))
    return _gather(xs, kept)


@kernel
def _largest(xs: list[Tensor]) -> list[float]:
    bits = [magnitude(x).amax() if x.numel() else torch.zeros((), dtype=torch.int32, device=x.device) for x in xs]
    return torch.stack(bits).view(torch.float32).tolist() if bits else []


def topk_of(xs: list[Tensor], counts: list[int]) -> tuple[Tensor, Tensor]:
    """`topk` in plain PyTorch, for the references."""
    return _gather(xs, [_keep_largest(x, count) for x, count in zip(xs, counts, strict=True)])


def _keep_largest(x: Tensor, count: int) -> Tensor:
    """Ascending indices of the `count` largest magnitudes, the lowest index first among equals."""
    return _keep_largest_of_rows(x[None], count)[0]


def _keep_largest_of_rows(rows: Tensor, count: int) -> Tensor:
    """Ascending indices of the `count` largest magnitudes of each row."""
    positions = torch.arange(rows.shape[1], device=rows.device)
    order = (magnitude(rows).long() << 32) - positions  # among equals the lowest index is the largest
    return order.topk(count, dim=1).indices.sort(dim=1).values


def _gather(xs: list[Tensor], kept: list[Tensor]) -> tuple[Tensor, Tensor]:
    device = device_of(xs)
    indices = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *kept]).int()
    values = torch.cat(
        [torch.empty(0, dtype=torch.float32, device=device), *(x[i] for x, i in zip(xs, kept, strict=True))]
    )
    return indices, values
