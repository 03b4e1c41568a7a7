"""Check the arguments of kernels: segments, residuals, payloads, counts.

Each check raises ValueError that names the argument, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_SEGMENT_NUMEL = 2**31 - 1  # indices are int32


def described(value: object) -> str:
    """A tensor's type and shape, or what stands in its place, for messages.

    Example:
        >>> import torch
        >>> described(torch.zeros(2, 3)), described(None)
        ('torch.float32 of shape (2, 3)', 'NoneType')
    """
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def device_of(tensors: Sequence[Tensor], other: Tensor | None = None) -> torch.device:
    """Device of the first tensor; without any, that of `other`, else the CPU."""
    if tensors:
        return tensors[0].device
    return torch.device("cpu") if other is None else other.device


def numels_of(tensors: Sequence[Tensor]) -> list[int]:
    """Elements of each tensor."""
    return list(map(Tensor.numel, tensors))


def vector(name: str, t: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check that `t` is a contiguous 1-D tensor of `dtype` on `device`; return it detached."""
    if t.dtype != dtype or t.dim() != 1 or not t.is_contiguous() or t.device != device:
        raise ValueError(
            f"{name}: expected a contiguous 1-D {dtype} tensor on {device}, got {t.dtype} of shape {tuple(t.shape)}, "
            f"strides {t.stride()} on {t.device}; use t.to({dtype}).contiguous().view(-1)"
        )
    # `Tensor.numpy`, by which C++ gets its data, refuses tensors that require a gradient.
    return t.detach()


def segments(
    name: str, tensors: Sequence[Tensor], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Check that all tensors are segments of this type on one device; return them detached."""
    checked = []
    for i, t in enumerate(tensors):
        if t.dtype != dtype or t.dim() != 1 or not t.is_contiguous() or t.device != device:
            vector(f"{name}[{i}]", t, dtype, device)  # raises; called here alone, it costs less
        checked.append(t.detach() if t.requires_grad else t)
    return checked


def segments_alike(
    name: str,
    tensors: Sequence[Tensor],
    like: Sequence[Tensor],
    device: torch.device,
    whose: str = "segments",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Check that `tensors` are segments of the sizes of `like`, which an error calls `whose`; return them detached."""
    checked = segments(name, tensors, device, dtype)
    sizes, expected = list(map(Tensor.numel, checked)), list(map(Tensor.numel, like))
    if sizes != expected:
        raise ValueError(f"{name}: expected the {whose}' sizes {expected}, got {sizes}")
    return checked


def payload_bytes(name: str, t: Tensor, nbytes: int, device: torch.device) -> Tensor:
    """Check that `t` is a uint8 vector of `nbytes` bytes; return it detached. It may start at any address."""
    t = vector(name, t, torch.uint8, device)
    if t.numel() != nbytes:
        raise ValueError(f"{name}: expected {nbytes} bytes for these segments, got {t.numel()}; was it cut short?")
    return t


def checked_encoder(
    xs: Sequence[Tensor], out: Tensor, nbytes: int, residuals: Sequence[Tensor] | None
) -> tuple[list[Tensor], Tensor, list[Tensor] | None]:
    """Check segments, the buffer for their payload of `nbytes` bytes, and residuals, if any; return them detached."""
    device = device_of(xs, out)
    checked, payload = segments("xs", xs, device), payload_bytes("out", out, nbytes, device)
    if residuals is None:
        return checked, payload, None
    return checked, payload, checked if residuals is xs else segments_alike("residuals", residuals, xs, device)


def checked_payload(payload: Tensor, outs: Sequence[Tensor], nbytes: int) -> tuple[Tensor, list[Tensor]]:
    """Check a payload of `nbytes` bytes, and the segments that it is added to; return them detached."""
    device = device_of(outs, payload)
    return payload_bytes("payload", payload, nbytes, device), segments("outs", outs, device)


def checked_payloads(
    payloads: Sequence[Tensor], outs: Sequence[Tensor], nbytes: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Check payloads of `nbytes` bytes each, and the segments that their sum overwrites; return them detached."""
    if not payloads:
        raise ValueError("payloads: expected at least one")
    device = device_of(outs, payloads[0])
    checked = [payload_bytes(f"payloads[{i}]", payload, nbytes, device) for i, payload in enumerate(payloads)]
    return checked, segments("outs", outs, device)


def payload_as(payload: Tensor, dtype: torch.dtype, name: str = "payload") -> Tensor:
    """The bytes of a payload, or of a part of it, as numbers: a view, or a copy where they are not aligned.

    Args:
        payload: uint8, one-dimensional; it may start at any address.
        dtype: type of the numbers.
        name: what an error calls the payload.

    Raises:
        ValueError: if `payload` is no uint8 vector, or its size is not a multiple of the type's.

    Example:
        >>> payload = torch.tensor([9, 0, 0, 128, 63], dtype=torch.uint8)
        >>> payload_as(payload[1:], torch.float32)
        tensor([1.])
    """
    payload = vector(name, payload, torch.uint8, payload.device)
    if payload.numel() % dtype.itemsize:
        raise ValueError(
            f"{name}: expected a multiple of {dtype.itemsize} bytes, which is one {dtype}, got {payload.numel()}; "
            "was it cut short?"
        )
    # PyTorch asks for an offset in storage that is a multiple, even of an empty tensor.
    is_aligned = payload.storage_offset() % dtype.itemsize == 0 and payload.data_ptr() % dtype.itemsize == 0
    return (payload if is_aligned else payload.clone()).view(dtype)


def check_numels(numels: Sequence[int]) -> None:
    """Raise ValueError unless every segment's size fits an int32 index."""
    for i, n in enumerate(numels):
        if not 0 <= n <= MAX_SEGMENT_NUMEL:
            raise ValueError(f"segment {i}: expected 0 to {MAX_SEGMENT_NUMEL} elements, got {n}; split the tensor")


def check_counts(counts: Sequence[int], numels: Sequence[int]) -> None:
    """Raise ValueError unless there is one count per segment and none exceeds its segment."""
    if len(counts) != len(numels):
        check_length("counts", counts, len(numels))
    for i, (k, n) in enumerate(zip(counts, numels, strict=True)):
        if not 0 <= k <= n <= MAX_SEGMENT_NUMEL:
            check_numels(numels)  # a segment that is too large is the error to name
            raise ValueError(f"counts[{i}]: expected 0 to {n} (the segment's elements), got {k}")


def check_length(name: str, items: Sequence[object], expected: int) -> None:
    """Raise ValueError unless `items` has one entry per segment."""
    if len(items) != expected:
        raise ValueError(f"{name}: expected one per segment ({expected}), got {len(items)}")


def counted(name: str, t: Tensor, counts: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check that `t` is a vector of `sum(counts)` elements; return it detached."""
    if t.numel() != sum(counts):
        raise ValueError(f"{name}: expected {sum(counts)} elements (the sum of counts), got {t.numel()}")
    return vector(name, t, dtype, device)


def counted_indices(indices: Tensor, counts: Sequence[int], device: torch.device) -> Tensor:
    """Check that `indices` holds `sum(counts)` int32 indices; return them detached."""
    return counted("indices", indices, counts, torch.int32, device)


def check_bucket_size(bucket_size: int) -> None:
    """Raise ValueError unless buckets have 1 to 2^31 - 1 elements."""
    if not 1 <= bucket_size <= MAX_SEGMENT_NUMEL:
        raise ValueError(f"bucket_size: expected 1 to {MAX_SEGMENT_NUMEL}, got {bucket_size}")


def num_buckets(numels: Sequence[int], bucket_size: int | None) -> int:
    """Buckets of all segments; None stands for one bucket per segment (an empty one has none).

    Raises:
        ValueError: if `bucket_size` or a segment's size is out of range.

    Example:
        >>> num_buckets([1000, 3], bucket_size=512)
        3
    """
    check_numels(numels)
    # No segment is larger, so each one that is not empty is a bucket.
    size = MAX_SEGMENT_NUMEL if bucket_size is None else bucket_size
    check_bucket_size(size)
    return sum(-(-n // size) for n in numels)
