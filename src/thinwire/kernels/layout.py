"""Sizes of the payloads, in bytes. They depend on counts alone, so both ends know them without a header."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

MAX_SEGMENT_NUMEL = 2**31 - 1  # indices are int32
MAX_LEVELS = 256
CAST_WIDTHS = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}  # bytes; in the order of C++


def quantize_nbytes(numels: Sequence[int], bits: int, bucket_size: int) -> int:
    """Bytes of a quantized payload: a float32 scale per bucket, then ``ceil(numel * bits / 8)`` bytes per segment.

    Args:
        numels: elements of each segment.
        bits: bits per element, 1 to 16. Lower => smaller payload.
        bucket_size: elements that share one scale. Higher => smaller payload, larger error.

    Raises:
        ValueError: if `bits`, `bucket_size` or a segment's size is out of range.

    >>> quantize_nbytes([1000], bits=4, bucket_size=512)
    508
    """
    check_quantizer(bits, 1, bucket_size)
    check_numels(numels)
    return sum(4 * -(-n // bucket_size) + (n * bits + 7) // 8 for n in numels)


def sign_nbytes(numels: Sequence[int]) -> int:
    """Bytes of a sign payload: a float32 scale per segment, then one bit per element, byte aligned per segment.

    Raises:
        ValueError: if a segment's size is out of range.

    >>> sign_nbytes([1000, 3])
    134
    """
    check_numels(numels)
    return sum(4 + (n + 7) // 8 for n in numels)


def cast_nbytes(numels: Sequence[int], dtype: str) -> int:
    """Bytes of a payload of shorter floats: 2 an element, or 1 and a float32 scale per segment.

    Raises:
        ValueError: if `dtype` is none of "bfloat16", "float16", "float8_e4m3fn" and "float8_e5m2", or a segment's size
            is out of range.

    >>> cast_nbytes([1000, 3], "bfloat16"), cast_nbytes([1000, 3], "float8_e4m3fn")
    (2006, 1011)
    """
    check_numels(numels)
    if dtype not in CAST_WIDTHS:
        raise ValueError(f"dtype: expected one of {list(CAST_WIDTHS)}, got {dtype!r}")
    width = CAST_WIDTHS[dtype]
    return width * sum(numels) + (4 * len(numels) if width == 1 else 0)


def onebit_nbytes(numels: Sequence[int], bucket_size: int | None = None) -> int:
    """Bytes of a one-bit payload: two float32 per bucket (per segment for None), then one bit per element.

    Raises:
        ValueError: if `bucket_size` or a segment's size is out of range.

    >>> onebit_nbytes([1000], bucket_size=512)
    141
    """
    return 8 * num_buckets(numels, bucket_size) + sum((n + 7) // 8 for n in numels)


def ternary_digits(base: int) -> int:
    """Digits that one word holds: 5 of base 3 in a byte, else as many as keep an int32 below 2^31.

    Raises:
        ValueError: if `base` is even or below 3.

    >>> ternary_digits(3), ternary_digits(9), ternary_digits(17)
    (5, 9, 7)
    """
    if not 3 <= base < 2**30 or base % 2 == 0:
        raise ValueError(f"base: expected an odd number from 3 on (3, or 2 W + 1 for W workers), got {base}")
    if base == 3:
        return 5
    digits = 1
    while base ** (digits + 1) <= 2**31:
        digits += 1
    return digits


def ternary_nbytes(numels: Sequence[int], base: int = 3) -> int:
    """Bytes of packed ternary values, without their scales: bytes for base 3, else int32 words.

    Raises:
        ValueError: if `base` or a segment's size is out of range.

    >>> ternary_nbytes([1000]), ternary_nbytes([1000], base=9)
    (200, 448)
    """
    check_numels(numels)
    digits = ternary_digits(base)
    return (1 if base == 3 else 4) * sum(-(-n // digits) for n in numels)


def num_buckets(numels: Sequence[int], bucket_size: int | None) -> int:
    """Buckets of all segments; None stands for one bucket a segment (an empty one has none).

    Raises:
        ValueError: if `bucket_size` or a segment's size is out of range.
    """
    check_numels(numels)
    if bucket_size is None:
        bucket_size = MAX_SEGMENT_NUMEL
    if not 1 <= bucket_size <= MAX_SEGMENT_NUMEL:
        raise ValueError(f"bucket_size: expected 1 to {MAX_SEGMENT_NUMEL}, got {bucket_size}")
    return sum(-(-n // bucket_size) for n in numels)


def levels_bits(num_levels: int) -> int:
    """Bits of a code that names one of 2 to 256 levels: ``ceil(log2(num_levels))``.

    Raises:
        ValueError: if the number of levels is out of range.

    >>> levels_bits(7)
    3
    """
    if not 2 <= num_levels <= MAX_LEVELS:
        raise ValueError(f"levels: expected 2 to {MAX_LEVELS}, got {num_levels}")
    return (num_levels - 1).bit_length()


@lru_cache(maxsize=4096)
def elias_fano_low_bits(count: int, numel: int) -> int | None:
    """Width of the low part that makes `count` > 0 of `numel` indices smallest; None where a bitmap is no larger.

    ``bits(l) = count * (l + 1) + floor((numel - 1) / 2^l)``; the smallest `l` among equals wins.
    """
    best = min(range(numel.bit_length()), key=lambda low: elias_fano_bits(count, numel, low))
    return best if elias_fano_bits(count, numel, best) < numel else None


def elias_fano_bits(count: int, numel: int, low_bits: int) -> int:
    """Bits of the Elias-Fano code of `count` of `numel` indices: the high part in unary, then the low parts."""
    return count * (low_bits + 1) + ((numel - 1) >> low_bits)


@lru_cache(maxsize=4096)
def indices_nbytes(count: int, numel: int) -> int:
    """Bytes of `count` ascending indices into `numel` elements: the smaller of Elias-Fano and a bitmap.

    About ``log2(numel / count) + 2`` bits an index where few are kept, never more than a bit an element, and nothing
    where none or all are.

    Raises:
        ValueError: unless ``0 <= count <= numel < 2^31``.

    Source: Elias, "Efficient storage and retrieval by content and address of static files", 1974; Fano, 1971.

    >>> indices_nbytes(1000, 1_000_000) * 8 / 1000
    11.96
    """
    check_counts([count], [numel])
    if count in (0, numel):
        return 0
    low = elias_fano_low_bits(count, numel)
    return ((numel if low is None else elias_fano_bits(count, numel, low)) + 7) // 8


@lru_cache(maxsize=4096)
def rice_low_bits(count: int, numel: int) -> int:
    """Width l of the low parts in the Rice code of the gaps between `count` of `numel` indices: the least that minimises
    the bound ``count * (l + 1) + floor((numel - count) / 2^l)``, about ``log2(numel / count)``."""
    return min(range(31), key=lambda low: rice_max_bits(count, numel, low))


def rice_max_bits(count: int, numel: int, low_bits: int) -> int:
    """Bits that no `count` indices exceed, because their gaps less one add up to ``numel - count`` at most."""
    return count * (low_bits + 1) + ((numel - count) >> low_bits)


def rice_max_nbytes(count: int, numel: int) -> int:
    """Bytes that the Rice code of `count` indices into `numel` elements takes at most: never more than `indices_nbytes`.

    >>> rice_max_nbytes(1000, 1_000_000), indices_nbytes(1000, 1_000_000)
    (1494, 1495)
    """
    if count in (0, numel):
        return 0
    return (rice_max_bits(count, numel, rice_low_bits(count, numel)) + 7) // 8


def words_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` words of `bits` bits each."""
    return (count * bits + 7) // 8


def check_numels(numels: Sequence[int]) -> None:
    """Raise ValueError unless every segment's size fits an int32 index."""
    for i, n in enumerate(numels):
        if not 0 <= n <= MAX_SEGMENT_NUMEL:
            raise ValueError(f"segment {i}: expected 0 to {MAX_SEGMENT_NUMEL} elements, got {n}; split the tensor")


def check_counts(counts: Sequence[int], numels: Sequence[int]) -> None:
    """Raise ValueError unless there is one count per segment and none exceeds its segment."""
    check_numels(numels)
    check_length("counts", counts, len(numels))
    for i, (k, n) in enumerate(zip(counts, numels, strict=True)):
        if not 0 <= k <= n:
            raise ValueError(f"counts[{i}]: expected 0 to {n} (the segment's elements), got {k}")


def check_quantizer(bits: int, num_steps: int, bucket_size: int) -> None:
    """Raise ValueError unless the quantizer's parameters are in range."""
    if not 1 <= bits <= 16:
        raise ValueError(f"bits: expected 1 to 16, got {bits}")
    if not 1 <= num_steps <= 2**bits - 1:
        raise ValueError(f"num_steps: expected 1 to {2**bits - 1} (2**bits - 1 for {bits} bits), got {num_steps}")
    if not 1 <= bucket_size <= MAX_SEGMENT_NUMEL:
        raise ValueError(f"bucket_size: expected 1 to {MAX_SEGMENT_NUMEL}, got {bucket_size}")


def check_length(name: str, items: Sequence, expected: int) -> None:
    """Raise ValueError unless `items` has one entry per segment."""
    if len(items) != expected:
        raise ValueError(f"{name}: expected one per segment ({expected}), got {len(items)}")
