"""Arithmetic on floats and bits: quantize, select, pack and their decoders, the same bytes from every backend.

A *segment* is a contiguous 1-D float32 tensor; each function takes a list of them on one device, so one call serves a
whole bucket of gradients. Tensors in main memory go to the C++ backend ``cpu``, all others to ``reference`` (plain
PyTorch, which defines what is right). Nothing is kept between calls and nothing random is drawn but from the given
keys. The caller owns every buffer; a residual may be its segment itself, and no other arguments may overlap.
Byte layouts are documented in ``docs/wire.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from . import cpu, reference
from .layout import (
    CAST_WIDTHS,
    MAX_SEGMENT_NUMEL,
    cast_nbytes,
    check_counts,
    check_length,
    check_numels,
    check_quantizer,
    indices_nbytes,
    levels_bits,
    num_buckets,
    onebit_nbytes,
    quantize_nbytes,
    rice_max_nbytes,
    sign_nbytes,
    ternary_digits,
    ternary_nbytes,
    words_nbytes,
)
from .random import mix_key

__all__ = [
    "CAST_WIDTHS",
    "add_topk",
    "all_finite",
    "cast_decode_add",
    "cast_nbytes",
    "cast_pack",
    "check_levels",
    "chunk_norms",
    "clear",
    "dequantize_add",
    "dequantize_levels_add",
    "dequantize_sum",
    "gather",
    "huffman_decode",
    "huffman_encode",
    "indices_nbytes",
    "largest",
    "levels_bits",
    "mix_key",
    "momentum",
    "momentum_topk",
    "num_buckets",
    "onebit_decode_add",
    "onebit_nbytes",
    "onebit_pack",
    "pack_indices",
    "pack_rice",
    "pack_smallest",
    "pack_words",
    "quantize",
    "quantize_levels",
    "quantize_nbytes",
    "random_indices",
    "rice_max_nbytes",
    "scatter",
    "scatter_add",
    "select",
    "sign_decode_add",
    "sign_nbytes",
    "sign_pack",
    "ternary_decode_add",
    "ternary_digits",
    "ternary_nbytes",
    "ternary_pack",
    "ternary_scales",
    "topk",
    "topk_in_chunks",
    "uniform",
    "unpack_indices",
    "unpack_rice",
    "unpack_smallest",
    "unpack_words",
    "use_backend",
    "words_nbytes",
]

_BACKENDS: dict[str, ModuleType] = {"cpu": cpu, "reference": reference}
_forced: ModuleType | None = None


@contextmanager
def use_backend(name: Literal["cpu", "reference"]) -> Iterator[None]:
    """Use one backend inside a ``with`` block, in all threads; for tests and benchmarks.

    Raises:
        ValueError: if there is no such backend.

    >>> with use_backend("reference"):
    ...     uniform(key=1, numel=1)
    tensor([0.4083])
    """
    global _forced
    if name not in _BACKENDS:
        raise ValueError(f"backend: expected one of {sorted(_BACKENDS)}, got {name!r}")
    before, _forced = _forced, _BACKENDS[name]
    try:
        yield
    finally:
        _forced = before


def _backend(device: torch.device) -> ModuleType:
    return _forced or (cpu if device.type == "cpu" else reference)


def _tensor(name: str, t: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`t` without its autograd history, once it is seen to be what kernels take."""
    if t.dtype != dtype or t.dim() != 1 or not t.is_contiguous() or t.device != device:
        raise ValueError(
            f"{name}: expected a contiguous 1-D {dtype} tensor on {device}, got {t.dtype} of shape {tuple(t.shape)}, "
            f"strides {t.stride()} on {t.device}; use t.to({dtype}).contiguous().view(-1)"
        )
    return t.detach()


def _segments(name: str, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [_tensor(f"{name}[{i}]", t, torch.float32, device) for i, t in enumerate(tensors)]


def _bytes(name: str, t: Tensor, nbytes: int, device: torch.device) -> Tensor:
    if t.numel() != nbytes:
        raise ValueError(f"{name}: expected {nbytes} bytes for these segments, got {t.numel()}; was it cut short?")
    return _tensor(name, t, torch.uint8, device)


def _device(tensors: Sequence[Tensor], other: Tensor | None = None) -> torch.device:
    if tensors:
        return tensors[0].device
    return torch.device("cpu") if other is None else other.device


def _numels(tensors: Sequence[Tensor]) -> list[int]:
    return [t.numel() for t in tensors]


def _residuals(residuals: Sequence[Tensor] | None, xs: list[Tensor], device: torch.device) -> list[Tensor] | None:
    if residuals is None:
        return None
    checked = _segments("residuals", residuals, device)
    if _numels(checked) != _numels(xs):
        raise ValueError(f"residuals: expected the segments' sizes {_numels(xs)}, got {_numels(checked)}")
    return checked


def _check_norm(norm: str) -> None:
    if norm not in ("max", "l2"):
        raise ValueError(f"norm: expected 'max' or 'l2', got {norm!r}")


def check_levels(levels: Sequence[float] | Tensor) -> list[float]:
    """The levels as float32 numbers, once they are seen to be 2 to 256, ascending and within [-1, 1].

    Raises:
        ValueError: if they are not.
    """
    rounded = torch.as_tensor(levels, dtype=torch.float32).tolist()
    levels_bits(len(rounded))
    if not all(a < b for a, b in pairwise(rounded)) or not -1 <= rounded[0] <= rounded[-1] <= 1:
        raise ValueError(f"levels: expected strictly ascending numbers in [-1, 1], as float32, got {rounded}")
    return rounded


def _pairs(indices: Tensor, values: Tensor, counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    for name, t in (("indices", indices), ("values", values)):
        if t.numel() != sum(counts):
            raise ValueError(f"{name}: expected {sum(counts)} elements (the sum of counts), got {t.numel()}")
    return _tensor("indices", indices, torch.int32, device), _tensor("values", values, torch.float32, device)


def uniform(key: int, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-24; number i depends on `key` and i alone.

    Args:
        key: a 64-bit integer, best from `mix_key`.
        numel: how many numbers.
        device: where.

    Returns:
        A float32 tensor of shape (numel,).

    A counter-based generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
    with a two-round multiply-xorshift mixer.

    >>> torch.equal(uniform(7, 100)[:10], uniform(7, 10))
    True
    """
    device = torch.device(device)
    return _backend(device).uniform(key, numel, device)


def quantize(
    xs: Sequence[Tensor],
    out: Tensor,
    keys: Sequence[int],
    bits: int,
    num_steps: int,
    bucket_size: int,
    norm: Literal["max", "l2"] = "max",
    residuals: Sequence[Tensor] | None = None,
) -> None:
    """Quantize each segment stochastically to ``num_steps + 1`` evenly spaced levels; unbiased.

    With ``m = num_steps`` and a bucket's ``scale`` (its largest magnitude, or its L2 norm):
    ``code = clamp(floor((x * m / scale + m) / 2 + u), 0, m)``, ``value = (2 code - m) * scale / m``, ``u ~ U[0, 1)``.

    Args:
        xs: segments of float32.
        out: uint8 of ``quantize_nbytes(...)`` bytes, written: all scales, then all codes.
        keys: one 64-bit key per segment; the element's position in its segment is the counter.
        bits: bits per code, 1 to 16. Lower => smaller payload.
        num_steps: steps between the lowest and the highest level, at most ``2**bits - 1``. Even => zero is a level.
        bucket_size: elements per scale. Higher => smaller payload, larger error.
        norm: "max" or "l2".
        residuals: where given, ``x - value`` is written here; may be `xs` itself.

    A non-finite element makes its whole bucket decode to non-finite values. Scales below 2^-118 (2^-110 for more than
    255 steps) are sent as 0.

    Raises:
        ValueError: if a parameter is out of range or a buffer has the wrong kind or size.

    Source: QSGD, Alistarh et al., arXiv 1610.02132.

    >>> x = torch.tensor([0.0, -1.0, 2.0])
    >>> payload = torch.empty(quantize_nbytes([3], bits=4, bucket_size=512), dtype=torch.uint8)
    >>> quantize([x], payload, keys=[mix_key(0, 0, 0)], bits=4, num_steps=14, bucket_size=512)
    >>> out = torch.zeros(3)
    >>> dequantize_add(payload, [out], 1.0, bits=4, num_steps=14, bucket_size=512)
    >>> bool(((out - x).abs() < 4 / 14).all())
    True
    """
    check_quantizer(bits, num_steps, bucket_size)
    _check_norm(norm)
    device = _device(xs, out)
    xs = _segments("xs", xs, device)
    check_length("keys", keys, len(xs))
    out = _bytes("out", out, quantize_nbytes(_numels(xs), bits, bucket_size), device)
    residuals = _residuals(residuals, xs, device)
    _backend(device).quantize(xs, out, list(keys), bits, num_steps, bucket_size, norm, residuals)


def dequantize_add(
    payload: Tensor, outs: Sequence[Tensor], weight: float, bits: int, num_steps: int, bucket_size: int
) -> None:
    """Add ``weight`` times the values of a `quantize` payload: ``outs[i] += (2 code - m) * (scale / m * weight)``.

    Args:
        payload: uint8, as `quantize` wrote it.
        outs: float32 segments of the encoder's sizes, added to.
        weight: factor of all values.
        bits, num_steps, bucket_size: as given to `quantize`.

    Raises:
        ValueError: if a parameter is out of range or the payload's size does not fit the segments.
    """
    check_quantizer(bits, num_steps, bucket_size)
    device = _device(outs, payload)
    outs = _segments("outs", outs, device)
    payload = _bytes("payload", payload, quantize_nbytes(_numels(outs), bits, bucket_size), device)
    _backend(device).dequantize_add(payload, outs, weight, bits, num_steps, bucket_size)


def dequantize_sum(
    payloads: Sequence[Tensor], outs: Sequence[Tensor], weight: float, bits: int, num_steps: int, bucket_size: int
) -> bool:
    """Overwrite ``outs`` with ``weight`` times the sum of `quantize` payloads, added in their order; one pass.

    Args:
        payloads: one or more, each uint8, as `quantize` wrote it.
        outs: float32 segments of the encoder's sizes, overwritten.
        weight: factor of all values.
        bits, num_steps, bucket_size: as given to `quantize`.

    Returns:
        Whether the whole result is finite.

    Raises:
        ValueError: if a parameter is out of range, a payload's size does not fit the segments, or there is none.
    """
    check_quantizer(bits, num_steps, bucket_size)
    if not payloads:
        raise ValueError("payloads: expected at least one")
    device = _device(outs, payloads[0])
    outs = _segments("outs", outs, device)
    nbytes = quantize_nbytes(_numels(outs), bits, bucket_size)
    payloads = [_bytes(f"payloads[{i}]", payload, nbytes, device) for i, payload in enumerate(payloads)]
    return _backend(device).dequantize_sum(payloads, outs, weight, bits, num_steps, bucket_size)


def quantize_levels(
    xs: Sequence[Tensor],
    out: Tensor,
    keys: Sequence[int],
    levels: Sequence[float] | Tensor,
    bucket_size: int,
    norm: Literal["max", "l2"] = "max",
    residuals: Sequence[Tensor] | None = None,
) -> None:
    """Quantize each segment stochastically to a bucket's scale times one of `levels`; unbiased between the outer two.

    With ``r = x / scale`` between the neighbouring levels ``l <= r < h``: h is chosen if ``u (h - l) < r - l``, ``u ~
    U[0, 1)``. An element that lies at a level stays there; one beyond the outer levels goes to the nearest.

    Args:
        xs: segments of float32.
        out: uint8 of ``quantize_nbytes(numels, levels_bits(len(levels)), bucket_size)`` bytes, written: all scales,
            then all codes.
        keys: one 64-bit key per segment; the element's position in its segment is the counter.
        levels: 2 to 256 numbers in [-1, 1], ascending as float32. Up to 16 are fastest.
        bucket_size: elements per scale. Higher => smaller payload, larger error.
        norm: "max" (the largest magnitude) or "l2".
        residuals: where given, ``x - value`` is written here; may be `xs` itself.

    A non-finite element makes its whole bucket decode to non-finite values. Scales below 2^-118 are sent as 0.

    Raises:
        ValueError: if a parameter is out of range or a buffer has the wrong kind or size.

    >>> x, levels = torch.tensor([0.25, -1.0, 0.0, 0.5]), [-1.0, 0.0, 0.25, 1.0]
    >>> payload = torch.empty(quantize_nbytes([4], levels_bits(4), bucket_size=512), dtype=torch.uint8)
    >>> quantize_levels([x], payload, [mix_key(0, 0, 0)], levels, bucket_size=512)
    >>> out = torch.zeros(4)
    >>> dequantize_levels_add(payload, [out], 1.0, levels, bucket_size=512)
    >>> out[:3]  # the last becomes 0.25 or 1, with probabilities 2/3 and 1/3
    tensor([ 0.2500, -1.0000,  0.0000])
    """
    levels = check_levels(levels)
    bits = levels_bits(len(levels))
    check_quantizer(bits, 1, bucket_size)
    _check_norm(norm)
    device = _device(xs, out)
    xs = _segments("xs", xs, device)
    check_length("keys", keys, len(xs))
    out = _bytes("out", out, quantize_nbytes(_numels(xs), bits, bucket_size), device)
    residuals = _residuals(residuals, xs, device)
    _backend(device).quantize_levels(xs, out, list(keys), levels, bits, bucket_size, norm, residuals)


def dequantize_levels_add(
    payload: Tensor, outs: Sequence[Tensor], weight: float, levels: Sequence[float] | Tensor, bucket_size: int
) -> None:
    """Add ``weight`` times the values of a `quantize_levels` payload: ``outs[i] += levels[code] * (scale * weight)``.

    Args:
        payload: uint8, as `quantize_levels` wrote it.
        outs: float32 segments of the encoder's sizes, added to.
        weight: factor of all values.
        levels, bucket_size: as given to `quantize_levels`.

    Raises:
        ValueError: if a parameter is out of range or the payload's size does not fit the segments.
    """
    levels = check_levels(levels)
    bits = levels_bits(len(levels))
    check_quantizer(bits, 1, bucket_size)
    device = _device(outs, payload)
    outs = _segments("outs", outs, device)
    payload = _bytes("payload", payload, quantize_nbytes(_numels(outs), bits, bucket_size), device)
    _backend(device).dequantize_levels_add(payload, outs, weight, levels, bits, bucket_size)


def sign_pack(
    xs: Sequence[Tensor],
    out: Tensor,
    residuals: Sequence[Tensor] | None = None,
    fixed_scale: float | None = None,
) -> None:
    """Send each segment's signs and mean magnitude: ``value = -scale if x < 0 else scale``, ``scale = |x|_1 / n``.

    Args:
        xs: segments of float32.
        out: uint8 of ``sign_nbytes(...)`` bytes, written.
        residuals: where given, ``x - value`` is written here; may be `xs` itself.
        fixed_scale: where given, sent as the scale of every segment whose mean magnitude is finite.

    A non-finite element makes its whole segment decode to non-finite values.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Source: EF-SignSGD, Karimireddy et al., arXiv 1901.09847.

    >>> payload = torch.empty(sign_nbytes([3]), dtype=torch.uint8)
    >>> sign_pack([torch.tensor([1.0, -2.0, 3.0])], payload)
    >>> out = torch.zeros(3)
    >>> sign_decode_add(payload, [out], 1.0)
    >>> out
    tensor([ 2., -2.,  2.])
    """
    device = _device(xs, out)
    xs = _segments("xs", xs, device)
    out = _bytes("out", out, sign_nbytes(_numels(xs)), device)
    _backend(device).sign_pack(xs, out, _residuals(residuals, xs, device), fixed_scale)


def sign_decode_add(payload: Tensor, outs: Sequence[Tensor], weight: float) -> None:
    """Add ``weight`` times the values of a `sign_pack` payload to `outs`.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    device = _device(outs, payload)
    outs = _segments("outs", outs, device)
    payload = _bytes("payload", payload, sign_nbytes(_numels(outs)), device)
    _backend(device).sign_decode_add(payload, outs, weight)


def cast_pack(xs: Sequence[Tensor], out: Tensor, dtype: str, residuals: Sequence[Tensor] | None = None) -> None:
    """Round each element to a shorter float type, to nearest even; 8-bit types after division by a segment's scale.

    The scale is the least power of two by which the segment's largest magnitude divided is in range (448 for e4m3fn,
    57344 for e5m2), 1 for a segment of zeros: ``code = round(x / scale)``, ``value = code * scale``.

    Args:
        xs: segments of float32.
        out: uint8 of ``cast_nbytes(numels, dtype)`` bytes, written: for 8-bit types all scales, then all codes.
        dtype: "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2".
        residuals: where given, ``x - value`` is written here; may be `xs` itself.

    A finite element beyond float16's range becomes infinite. A non-finite element of an 8-bit type makes its whole
    segment decode to non-finite values. One NaN is sent for all.

    Raises:
        ValueError: if there is no such type, or a buffer has the wrong kind or size.

    Source: 8-bit types as in Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433.

    >>> payload = torch.empty(cast_nbytes([2], "float8_e4m3fn"), dtype=torch.uint8)
    >>> cast_pack([torch.tensor([896.0, 1.03])], payload, "float8_e4m3fn")
    >>> out = torch.zeros(2)
    >>> cast_decode_add(payload, [out], 1.0, "float8_e4m3fn")
    >>> out
    tensor([896.,   1.])
    """
    device = _device(xs, out)
    xs = _segments("xs", xs, device)
    out = _bytes("out", out, cast_nbytes(_numels(xs), dtype), device)
    _backend(device).cast_pack(xs, out, dtype, _residuals(residuals, xs, device))


def cast_decode_add(payload: Tensor, outs: Sequence[Tensor], weight: float, dtype: str) -> None:
    """Add ``weight`` times the values of a `cast_pack` payload: ``outs[i] += code * (scale * weight)``.

    Raises:
        ValueError: if there is no such type, or the payload's size does not fit the segments.
    """
    device = _device(outs, payload)
    outs = _segments("outs", outs, device)
    payload = _bytes("payload", payload, cast_nbytes(_numels(outs), dtype), device)
    _backend(device).cast_decode_add(payload, outs, weight, dtype)


def onebit_pack(
    xs: Sequence[Tensor], out: Tensor, bucket_size: int | None = None, residuals: Sequence[Tensor] | None = None
) -> None:
    """Send each element's sign, and the means of a bucket's negative elements and of its others.

    Args:
        xs: segments of float32.
        out: uint8 of ``onebit_nbytes(numels, bucket_size)`` bytes, written: both means of all buckets, then the signs.
        bucket_size: elements that share two means; None for the whole segment.
        residuals: where given, ``x - value`` is written here; may be `xs` itself.

    NaN counts as not negative. A non-finite element makes its half of the bucket decode to non-finite values.

    Raises:
        ValueError: if `bucket_size` is out of range or a buffer has the wrong kind or size.

    Source: 1-bit SGD, Seide et al. 2014.

    >>> payload = torch.empty(onebit_nbytes([4]), dtype=torch.uint8)
    >>> onebit_pack([torch.tensor([1.0, -2.0, 3.0, -6.0])], payload)
    >>> out = torch.zeros(4)
    >>> onebit_decode_add(payload, [out], 1.0)
    >>> out
    tensor([ 2., -4.,  2., -4.])
    """
    device = _device(xs, out)
    xs = _segments("xs", xs, device)
    out = _bytes("out", out, onebit_nbytes(_numels(xs), bucket_size), device)
    _backend(device).onebit_pack(xs, out, bucket_size or MAX_SEGMENT_NUMEL, _residuals(residuals, xs, device))


def onebit_decode_add(payload: Tensor, outs: Sequence[Tensor], weight: float, bucket_size: int | None = None) -> None:
    """Add ``weight`` times the values of a `onebit_pack` payload to `outs`.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    device = _device(outs, payload)
    outs = _segments("outs", outs, device)
    payload = _bytes("payload", payload, onebit_nbytes(_numels(outs), bucket_size), device)
    _backend(device).onebit_decode_add(payload, outs, weight, bucket_size or MAX_SEGMENT_NUMEL)


def ternary_scales(xs: Sequence[Tensor], clip: float = float("inf"), bucket_size: int | None = None) -> Tensor:
    """The largest magnitude of each bucket, at most `clip` standard deviations of its segment.

    Args:
        xs: segments of float32.
        clip: above 0; infinity clips nothing. A segment without variance is not clipped.
        bucket_size: elements that share a scale; None for the whole segment.

    Returns:
        float32 tensor, one for each bucket of all segments; infinite or NaN where the bucket is.

    Raises:
        ValueError: if `clip` or `bucket_size` is out of range or a segment has the wrong kind.

    >>> ternary_scales([torch.tensor([1.0, -4.0, 2.0, 1.0])], clip=1.0)
    tensor([2.3452])
    """
    if not clip > 0:
        raise ValueError(f"clip: expected a number above 0, got {clip}")
    device = _device(xs)
    xs = _segments("xs", xs, device)
    num_scales = num_buckets(_numels(xs), bucket_size)
    return _backend(device).ternary_scales(xs, clip, bucket_size or MAX_SEGMENT_NUMEL, num_scales)


def ternary_pack(
    xs: Sequence[Tensor],
    scales: Tensor,
    out: Tensor,
    keys: Sequence[int],
    base: int = 3,
    bucket_size: int | None = None,
    residuals: Sequence[Tensor] | None = None,
) -> None:
    """Round each element stochastically to -1, 0 or 1 times its bucket's scale: ``P(not 0) = |x| / scale``, at most 1.

    Args:
        xs: segments of float32.
        scales: float32, one for each bucket; from `ternary_scales`, or agreed upon by all workers.
        out: uint8 of ``ternary_nbytes(numels, base)`` bytes, written: the digits ``value + 1``, packed in base `base`.
        keys: one 64-bit key per segment.
        base: 3 (five digits a byte), or ``2 W + 1``: payloads of up to W workers may be added as int32 vectors.
        bucket_size: elements that share a scale; None for the whole segment.
        residuals: where given, ``x - value`` is written here; may be `xs` itself.

    Where the scale is zero or not finite all values are 0; times a scale that is not finite they decode to NaN.

    Raises:
        ValueError: if a parameter is out of range or a buffer has the wrong kind or size.

    Source: TernGrad, Wen et al., arXiv 1705.07878.

    >>> x = torch.tensor([2.0, 0.0, -2.0])
    >>> scales, payload = ternary_scales([x]), torch.empty(ternary_nbytes([3]), dtype=torch.uint8)
    >>> ternary_pack([x], scales, payload, [mix_key(0, 0, 0)])
    >>> out = torch.zeros(3)
    >>> ternary_decode_add(payload, scales, [out], 1.0)
    >>> out
    tensor([ 2.,  0., -2.])
    """
    device = _device(xs, out)
    xs = _segments("xs", xs, device)
    check_length("keys", keys, len(xs))
    out = _bytes("out", out, ternary_nbytes(_numels(xs), base), device)
    scales = _ternary_scales(scales, xs, bucket_size, device)
    residuals = _residuals(residuals, xs, device)
    _backend(device).ternary_pack(xs, scales, out, list(keys), base, bucket_size or MAX_SEGMENT_NUMEL, residuals)


def ternary_decode_add(
    payload: Tensor,
    scales: Tensor,
    outs: Sequence[Tensor],
    weight: float,
    base: int = 3,
    bucket_size: int | None = None,
) -> None:
    """Add ``weight`` times the values of a `ternary_pack` payload, or of a sum of such payloads, to `outs`.

    Args:
        payload: uint8, as `ternary_pack` wrote it, or the int32 sum of several, viewed as bytes.
        scales, base, bucket_size: as given to `ternary_pack`.
        outs: float32 segments of the encoder's sizes, added to.
        weight: factor of all values.

    Raises:
        ValueError: if the payload's size does not fit the segments.
    """
    device = _device(outs, payload)
    outs = _segments("outs", outs, device)
    payload = _bytes("payload", payload, ternary_nbytes(_numels(outs), base), device)
    scales = _ternary_scales(scales, outs, bucket_size, device)
    _backend(device).ternary_decode_add(payload, scales, outs, weight, base, bucket_size or MAX_SEGMENT_NUMEL)


def _ternary_scales(scales: Tensor, xs: list[Tensor], bucket_size: int | None, device: torch.device) -> Tensor:
    expected = num_buckets(_numels(xs), bucket_size)
    if scales.numel() != expected:
        raise ValueError(f"scales: expected one for each of {expected} buckets, got {scales.numel()}")
    return _tensor("scales", scales, torch.float32, device)


def huffman_encode(packed: Tensor, counts: Sequence[int], bits: int) -> Tensor:
    """Entropy coding of packed symbols: a canonical Huffman code of their own frequencies, whose lengths travel along.

    Args:
        packed: uint8; of each segment `counts[i]` symbols of `bits` bits, byte aligned, as `quantize` writes its codes.
        counts: symbols of each segment.
        bits: 1 to 8.

    Returns:
        uint8, of ``packed.numel() + 1`` bytes at most: where the code gains nothing, symbols travel as they are.

    Raises:
        ValueError: if `bits` is out of range or the size does not fit the counts.

    Source: Huffman, "A method for the construction of minimum-redundancy codes", 1952.

    >>> packed = torch.zeros(500, dtype=torch.uint8)
    >>> payload = huffman_encode(packed, [1000], bits=4)
    >>> payload.numel()  # a tag, 16 code lengths, and a bit for each symbol
    134
    >>> torch.equal(huffman_decode(payload, [1000], bits=4), packed)
    True
    """
    nbytes = _symbols_nbytes(counts, bits)
    packed = _bytes("packed", packed, nbytes, packed.device)
    return _backend(packed.device).huffman_encode(packed, list(counts), bits)


def huffman_decode(payload: Tensor, counts: Sequence[int], bits: int) -> Tensor:
    """The packed symbols that `huffman_encode` coded.

    Raises:
        ValueError: if the payload holds anything but so many symbols.
    """
    nbytes = _symbols_nbytes(counts, bits)
    payload = _tensor("payload", payload, torch.uint8, payload.device)
    return _backend(payload.device).huffman_decode(payload, list(counts), bits, nbytes)


def _symbols_nbytes(counts: Sequence[int], bits: int) -> int:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits: expected 1 to 8, got {bits}")
    return sum((n * bits + 7) // 8 for n in counts)


def topk(xs: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each segment: exactly ``counts[i]``, ties by lowest index, NaN above infinity.

    Args:
        xs: segments of float32.
        counts: how many of each.

    Returns:
        (indices int32, values float32), flat, of ``sum(counts)`` elements; indices count from their segment's start
        and ascend within it.

    Raises:
        ValueError: if a count is negative or exceeds its segment.

    >>> topk([torch.tensor([1.0, -5.0, 3.0, 5.0])], [2])
    (tensor([1, 3], dtype=torch.int32), tensor([-5.,  5.]))
    """
    device = _device(xs)
    xs = _segments("xs", xs, device)
    check_counts(counts, _numels(xs))
    return _backend(device).topk(xs, list(counts))


def select(xs: Sequence[Tensor], thresholds: Sequence[float]) -> tuple[Tensor, Tensor, list[int]]:
    """The elements with ``|x| >= threshold`` (rounded to float32), NaN and infinity included.

    Args:
        xs: segments of float32.
        thresholds: one per segment, not negative. Higher => fewer elements.

    Returns:
        (indices int32, values float32, counts per segment); indices as in `topk`.

    Raises:
        ValueError: if a threshold is negative or NaN.

    >>> select([torch.tensor([1.0, -5.0, 3.0])], [2.0])
    (tensor([1, 2], dtype=torch.int32), tensor([-5.,  3.]), [2])
    """
    device = _device(xs)
    xs = _segments("xs", xs, device)
    check_length("thresholds", thresholds, len(xs))
    for i, threshold in enumerate(thresholds):
        if not threshold >= 0:
            raise ValueError(f"thresholds[{i}]: expected a number >= 0, got {threshold}")
    # The absolute value, because -0.0 is no magnitude.
    return _backend(device).select(xs, [abs(float(t)) for t in thresholds])


def topk_in_chunks(xs: Sequence[Tensor], chunk: int, count: int, last_counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each chunk of each segment; the order of `topk`.

    Args:
        xs: segments of float32.
        chunk: elements of a chunk; the last one of a segment may be shorter.
        count: how many of each chunk.
        last_counts: how many of the shorter last chunk of each segment, 0 where there is none.

    Returns:
        (indices int32, values float32), flat; indices count from their segment's start and ascend within it.

    Raises:
        ValueError: if more are asked for than a chunk has.

    >>> topk_in_chunks([torch.tensor([1.0, -5.0, 3.0, 5.0, 2.0])], chunk=2, count=1, last_counts=[1])
    (tensor([1, 3, 4], dtype=torch.int32), tensor([-5.,  5.,  2.]))
    """
    device = _device(xs)
    xs = _segments("xs", xs, device)
    check_numels(_numels(xs))
    check_length("last_counts", last_counts, len(xs))
    if chunk < 1 or not 0 <= count <= chunk:
        raise ValueError(f"count: expected 0 to {chunk} (a chunk's elements), got {count}")
    check_counts(last_counts, [n % chunk for n in _numels(xs)])
    total = sum(n // chunk * count for n in _numels(xs)) + sum(last_counts)
    return _backend(device).topk_in_chunks(xs, chunk, count, list(last_counts), total)


def largest(xs: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each segment; 0 for an empty one, NaN above infinity.

    >>> largest([torch.tensor([1.0, -5.0]), torch.tensor([])])
    [5.0, 0.0]
    """
    device = _device(xs)
    return _backend(device).largest(_segments("xs", xs, device))


def random_indices(
    keys: Sequence[int], counts: Sequence[int], numels: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """`counts[i]` of `numels[i]` indices, every subset equally likely, a function of the key alone.

    Args:
        keys: one 64-bit key per segment.
        counts: how many of each.
        numels: elements per segment.
        device: where.

    Returns:
        int32 indices, flat, ascending within their segment.

    Raises:
        ValueError: if a count is negative or exceeds its segment.

    A keyed Feistel network permutes the power of two around `numel`; following 0, 1, ... through it until they fall
    below `numel` ("cycle walking") makes distinct numbers in time `count`. Source: Black and Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002.

    >>> random_indices([mix_key(0, 0, 0)], [3], [1000])
    tensor([212, 447, 651], dtype=torch.int32)
    """
    check_counts(counts, numels)
    check_length("keys", keys, len(counts))
    device = torch.device(device)
    return _backend(device).random_indices(list(keys), list(counts), list(numels), device)


def gather(xs: Sequence[Tensor], indices: Tensor, counts: Sequence[int]) -> Tensor:
    """The selected elements, flat: ``xs[i][indices]``.

    Raises:
        ValueError: if an index lies outside its segment.

    >>> gather([torch.tensor([1.0, -5.0, 3.0])], torch.tensor([1, 2], dtype=torch.int32), [2])
    tensor([-5.,  3.])
    """
    device = _device(xs, indices)
    xs = _segments("xs", xs, device)
    check_counts(counts, _numels(xs))
    if indices.numel() != sum(counts):
        raise ValueError(f"indices: expected {sum(counts)} elements (the sum of counts), got {indices.numel()}")
    return _backend(device).gather(xs, _tensor("indices", indices, torch.int32, device), list(counts))


def scatter(outs: Sequence[Tensor], indices: Tensor, values: Tensor, counts: Sequence[int]) -> None:
    """Write selected elements: ``outs[i][indices] = values``. Within a segment no index may appear twice.

    Raises:
        ValueError: if an index lies outside its segment; nothing has then been written to that segment.

    >>> out = torch.zeros(3)
    >>> scatter([out], torch.tensor([1], dtype=torch.int32), torch.tensor([2.0]), [1])
    >>> out
    tensor([0., 2., 0.])
    """
    device = _device(outs, values)
    outs = _segments("outs", outs, device)
    check_counts(counts, _numels(outs))
    _backend(device).scatter(outs, *_pairs(indices, values, counts, device), list(counts))


def clear(outs: Sequence[Tensor], indices: Tensor, counts: Sequence[int]) -> None:
    """Set selected elements to zero: ``outs[i][indices] = 0``.

    Raises:
        ValueError: if an index lies outside its segment; nothing has then been written to that segment.

    >>> out = torch.ones(3)
    >>> clear([out], torch.tensor([1], dtype=torch.int32), [1])
    >>> out
    tensor([1., 0., 1.])
    """
    device = _device(outs, indices)
    outs = _segments("outs", outs, device)
    check_counts(counts, _numels(outs))
    if indices.numel() != sum(counts):
        raise ValueError(f"indices: expected {sum(counts)} elements (the sum of counts), got {indices.numel()}")
    _backend(device).clear(outs, _tensor("indices", indices, torch.int32, device), list(counts))


def scatter_add(outs: Sequence[Tensor], indices: Tensor, values: Tensor, counts: Sequence[int], weight: float) -> None:
    """Add selected elements: ``outs[i][indices] += weight * values``. Within a segment no index may appear twice.

    Raises:
        ValueError: if an index lies outside its segment; nothing has then been written to that segment.

    >>> out = torch.ones(3)
    >>> scatter_add([out], torch.tensor([1], dtype=torch.int32), torch.tensor([2.0]), [1], weight=0.5)
    >>> out
    tensor([1., 2., 1.])
    """
    device = _device(outs, values)
    outs = _segments("outs", outs, device)
    check_counts(counts, _numels(outs))
    _backend(device).scatter_add(outs, *_pairs(indices, values, counts, device), list(counts), weight)


def pack_indices(indices: Tensor, counts: Sequence[int], numels: Sequence[int], out: Tensor) -> None:
    """Code ascending indices, each segment by the smaller of Elias-Fano and a bitmap, or by nothing if all are there.

    Args:
        indices: int32, flat, strictly ascending within each segment.
        counts: indices per segment.
        numels: elements per segment.
        out: uint8 of ``sum(indices_nbytes(k, n))`` bytes, written.

    Raises:
        ValueError: if indices do not ascend or lie outside their segment, or a buffer has the wrong size.

    >>> out = torch.empty(indices_nbytes(2, 100), dtype=torch.uint8)
    >>> pack_indices(torch.tensor([3, 70], dtype=torch.int32), [2], [100], out)
    >>> unpack_indices(out, [2], [100])
    tensor([ 3, 70], dtype=torch.int32)
    """
    device = indices.device
    out = _bytes("out", out, _indices_nbytes(counts, numels), device)
    if indices.numel() != sum(counts):
        raise ValueError(f"indices: expected {sum(counts)} elements (the sum of counts), got {indices.numel()}")
    indices = _tensor("indices", indices, torch.int32, device)
    _backend(device).pack_indices(indices, list(counts), list(numels), out)


def unpack_indices(payload: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """The indices that `pack_indices` coded, int32 and flat.

    Raises:
        ValueError: if the payload's size is wrong or its bytes hold anything but ``counts[i]`` ascending indices.
    """
    payload = _bytes("payload", payload, _indices_nbytes(counts, numels), payload.device)
    return _backend(payload.device).unpack_indices(payload, list(counts), list(numels))


def pack_smallest(indices: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Code ascending indices, each segment by the smallest of Elias-Fano, a bitmap and packed gaps.

    Unlike that of `pack_indices` the size depends on the indices: it is no larger but for a byte a segment, which names
    the code, and smaller where indices cluster. (A plain 32 bits an index is never smaller than Elias-Fano.)

    Args:
        indices: int32, flat, strictly ascending within each segment.
        counts: indices per segment.
        numels: elements per segment.

    Returns:
        A uint8 tensor, at most ``sum(1 + indices_nbytes(k, n))`` long.

    Raises:
        ValueError: if indices do not ascend or lie outside their segment.

    >>> run = torch.arange(500, 1500, dtype=torch.int32)
    >>> pack_smallest(run, [1000], [1_000_000]).numel(), indices_nbytes(1000, 1_000_000)
    (153, 1495)
    """
    indices = _counted(indices, counts, numels)
    return _backend(indices.device).pack_smallest(indices, list(counts), list(numels))


def unpack_smallest(payload: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """The indices that `pack_smallest` coded, int32 and flat.

    Raises:
        ValueError: if the bytes hold anything but ``counts[i]`` ascending indices.
    """
    check_counts(counts, numels)
    payload = _tensor("payload", payload, torch.uint8, payload.device)
    return _backend(payload.device).unpack_smallest(payload, list(counts), list(numels))


def pack_rice(indices: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Code ascending indices by the gaps between them, in a Rice code whose parameter l follows from counts and numels.

    With ``g_j = index_j - index_(j-1) - 1``, a segment is ``g_j >> l`` in unary for all j, then the low l bits of each.

    Args:
        indices: int32, flat, strictly ascending within each segment.
        counts: indices per segment.
        numels: elements per segment.

    Returns:
        A uint8 tensor, at most ``sum(rice_max_nbytes(k, n))`` long.

    Raises:
        ValueError: if indices do not ascend or lie outside their segment.

    Source: Rice and Plaunt 1971; Golomb 1966, Run-length encodings.

    >>> pack_rice(torch.tensor([3, 70], dtype=torch.int32), [2], [100])
    tensor([57,  4], dtype=torch.uint8)
    """
    indices = _counted(indices, counts, numels)
    return _backend(indices.device).pack_rice(indices, list(counts), list(numels))


def unpack_rice(payload: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """The indices that `pack_rice` coded, int32 and flat.

    Raises:
        ValueError: if the bytes hold anything but ``counts[i]`` ascending indices.
    """
    check_counts(counts, numels)
    payload = _tensor("payload", payload, torch.uint8, payload.device)
    return _backend(payload.device).unpack_rice(payload, list(counts), list(numels))


def _counted(indices: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    check_counts(counts, numels)
    if indices.numel() != sum(counts):
        raise ValueError(f"indices: expected {sum(counts)} elements (the sum of counts), got {indices.numel()}")
    return _tensor("indices", indices, torch.int32, indices.device)


def pack_words(words: Tensor, bits: int, out: Tensor) -> None:
    """Write the low `bits` bits of each word, one after the other, the lowest bit first.

    Args:
        words: int32.
        bits: 0 to 31.
        out: uint8 of ``words_nbytes(words.numel(), bits)`` bytes, written.

    Raises:
        ValueError: if `bits` is out of range or `out` has the wrong size.

    >>> out = torch.empty(2, dtype=torch.uint8)
    >>> pack_words(torch.tensor([1, 2, 3], dtype=torch.int32), 4, out)
    >>> out
    tensor([33,  3], dtype=torch.uint8)
    """
    device = words.device
    out = _bytes("out", out, words_nbytes(words.numel(), _word_bits(bits)), device)
    _backend(device).pack_words(_tensor("words", words, torch.int32, device), bits, out)


def unpack_words(payload: Tensor, count: int, bits: int) -> Tensor:
    """The `count` words that `pack_words` wrote, as int32.

    Raises:
        ValueError: if `bits` is out of range or the payload has the wrong size.
    """
    payload = _bytes("payload", payload, words_nbytes(count, _word_bits(bits)), payload.device)
    return _backend(payload.device).unpack_words(payload, count, bits)


def _word_bits(bits: int) -> int:
    if not 0 <= bits <= 31:
        raise ValueError(f"bits: expected 0 to 31, got {bits}")
    return bits


def _indices_nbytes(counts: Sequence[int], numels: Sequence[int]) -> int:
    check_counts(counts, numels)
    return sum(indices_nbytes(k, n) for k, n in zip(counts, numels, strict=True))


def momentum(
    gs: Sequence[Tensor],
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
    new_us: Sequence[Tensor],
    new_vs: Sequence[Tensor],
    momentum: float,
    factor: float = 1.0,
    nesterov: bool = False,
) -> None:
    """Momentum correction: ``u' = m u + g, v' = v + u'``; with Nesterov ``u' = m (u + g), v' = v + (u' + g)``.

    Args:
        gs: segments of gradients; g is `factor` times these.
        us, vs: momentum and velocity, of the same sizes.
        new_us, new_vs: written: u' and v'.
        momentum: m.
        factor: such as one over the loss scale.
        nesterov: which of the two.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Source: Deep Gradient Compression, Lin et al., arXiv 1712.01887.

    >>> g, u, v = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    >>> new_u, new_v = torch.empty(1), torch.empty(1)
    >>> momentum([g], [u], [v], [new_u], [new_v], momentum=0.5)
    >>> new_u, new_v
    (tensor([2.]), tensor([5.]))
    """
    buffers = _alike(gs=gs, us=us, vs=vs, new_us=new_us, new_vs=new_vs)
    _backend(_device(gs)).momentum(*buffers, momentum, factor, nesterov)


def momentum_topk(
    gs: Sequence[Tensor],
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
    new_us: Sequence[Tensor],
    new_vs: Sequence[Tensor],
    momentum: float,
    factor: float,
    nesterov: bool,
    counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """`momentum`, and ``topk(new_vs, counts)`` in the same pass.

    Args:
        gs, us, vs, new_us, new_vs, momentum, factor, nesterov: as in `momentum`.
        counts: how many of each segment.

    Returns:
        (indices int32, values float32), as from `topk`.

    Raises:
        ValueError: if a buffer has the wrong kind or size, or a count exceeds its segment.
    """
    buffers = _alike(gs=gs, us=us, vs=vs, new_us=new_us, new_vs=new_vs)
    check_counts(counts, _numels(buffers[0]))
    return _backend(_device(gs)).momentum_topk(*buffers, momentum, factor, nesterov, list(counts))


def add_topk(
    gs: Sequence[Tensor], es: Sequence[Tensor], outs: Sequence[Tensor], factor: float, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """``outs[i] = es[i] + factor * gs[i]``, and ``topk(outs, counts)`` in the same pass: error feedback.

    Args:
        gs: segments of gradients.
        es: what is added to them, of the same sizes.
        outs: written.
        factor: such as one over the loss scale.
        counts: how many of each segment.

    Returns:
        (indices int32, values float32), as from `topk`.

    Raises:
        ValueError: if a buffer has the wrong kind or size, or a count exceeds its segment.

    >>> out = torch.empty(2)
    >>> add_topk([torch.tensor([1.0, 2.0])], [torch.tensor([0.0, 3.0])], [out], 1.0, [1])
    (tensor([1], dtype=torch.int32), tensor([5.]))
    """
    buffers = _alike(gs=gs, es=es, outs=outs)
    check_counts(counts, _numels(buffers[0]))
    return _backend(_device(gs)).add_topk(*buffers, factor, list(counts))


def _alike(gs: Sequence[Tensor], **others: Sequence[Tensor]) -> list[list[Tensor]]:
    """All lists, once they are seen to hold segments of the gradients' sizes."""
    device = _device(gs)
    checked = [_segments("gs", gs, device)]
    for name, tensors in others.items():
        checked.append(_segments(name, tensors, device))
        if _numels(checked[-1]) != _numels(checked[0]):
            raise ValueError(f"{name}: expected the gradients' sizes {_numels(checked[0])}, got {_numels(tensors)}")
    return checked


def chunk_norms(xs: Sequence[Tensor], chunk: int) -> Tensor:
    """The L1 norm of each chunk of each segment, summed in float64; a segment's last chunk may be shorter.

    Args:
        xs: segments of float32.
        chunk: elements of a chunk.

    Returns:
        float32 tensor, one norm for each chunk of each segment, in order.

    Raises:
        ValueError: if `chunk` is not positive.

    >>> chunk_norms([torch.tensor([1.0, -5.0, 3.0])], chunk=2)
    tensor([6., 3.])
    """
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
    device = _device(xs)
    xs = _segments("xs", xs, device)
    norms = torch.empty(sum(-(-n // chunk) for n in _numels(xs)), device=device)
    _backend(device).chunk_norms(xs, chunk, norms)
    return norms


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element of any tensor is NaN or infinite. Contiguous float32 is fast; any tensor will do.

    >>> all_finite([torch.ones(3), torch.tensor([float("inf")])])
    False
    """
    tensors = [t.detach() for t in tensors]
    fast = all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return _backend(device).all_finite([t.view(-1) for t in tensors]) if fast else reference.all_finite(tensors)
