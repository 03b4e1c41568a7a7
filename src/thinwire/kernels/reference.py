"""Kernels in plain PyTorch, for tensors on any device. They define what is right; others give the same bytes.

Arguments have been checked by `thinwire.kernels`. Every operation is rounded as written: divisions are between tensors
(PyTorch multiplies by a reciprocal for scalars), sums have a fixed order, and nothing is fused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .huffman import MAX_CODE_LENGTH, canonical_codes, check_huffman, code_lengths
from .layout import (
    CAST_WIDTHS,
    elias_fano_bits,
    elias_fano_low_bits,
    indices_nbytes,
    rice_low_bits,
    rice_max_nbytes,
    ternary_digits,
    ternary_nbytes,
)

MIN_SCALE = 2.0**-118  # below this, 255 / scale could overflow
MIN_SCALE_WIDE = 2.0**-110  # and 65535 / scale
MAX_SCALE = float.fromhex("0x1.fffp127")  # so that (scale / num_steps) * num_steps stays finite
SUM_BLOCK, SUM_LANES = 1024, 32
TERNARY_WORDS = 64  # words of one block
_MASK32 = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF


def uniform(key: int, numel: int, device: torch.device) -> Tensor:
    return (_hash(key, torch.arange(numel, device=device)) >> 8).float() * 2.0**-24


def _hash(key: int, positions: Tensor) -> Tensor:
    """32 random bits for each position (int64)."""
    k0, k1 = key & _MASK32, key >> 32
    h = (positions * 0x9E3779B9 + k0) & _MASK32
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK32
    h = h ^ (h >> 15) ^ k1
    h = (h * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)


def _split(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return x.split(sizes) if sizes else ()  # Tensor.split refuses an empty list


def _pad(x: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple))


def _halve(t: Tensor) -> Tensor:
    """Sum the last dimension, a power of two long, by adding its second half to its first until one is left."""
    while t.shape[-1] > 1:
        half = t.shape[-1] // 2
        t = t[..., :half] + t[..., half:]
    return t[..., 0]


def tree_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension (not empty) in float64, in a fixed order.

    In each block of 1024, element i is added to lane ``i mod 32`` in order of i; the lanes are then summed by halving,
    and so are the blocks' sums, padded with zeros to a power of two.
    """
    rows = _pad(x.double(), SUM_BLOCK).unflatten(-1, (-1, SUM_BLOCK // SUM_LANES, SUM_LANES))
    lanes = rows[..., 0, :]
    for i in range(1, rows.shape[-2]):
        lanes = lanes + rows[..., i, :]
    sums = _halve(lanes)
    return _halve(_pad(sums, 1 << (sums.shape[-1] - 1).bit_length()))


def _pack(bits: Tensor) -> Tensor:
    """Bits (0 or 1, uint8) to bytes, the first bit lowest."""
    weights = 1 << torch.arange(8, device=bits.device)
    return (_pad(bits, 8).view(-1, 8) * weights).sum(-1).to(torch.uint8)


def _unpack(payload: Tensor) -> Tensor:
    """Bytes to bits (0 or 1, uint8), the lowest bit first."""
    return ((payload[:, None] >> torch.arange(8, device=payload.device, dtype=torch.uint8)) & 1).flatten()


def _to_bits(codes: Tensor, width: int) -> Tensor:
    return ((codes[:, None] >> torch.arange(width, device=codes.device)) & 1).to(torch.uint8).flatten()


def _from_bits(bits: Tensor, width: int) -> Tensor:
    return (bits.view(-1, width).long() << torch.arange(width, device=bits.device)).sum(-1)


def _bytes(scales: Sequence[Tensor], device: torch.device) -> Tensor:
    """Float32 scales as bytes, with one NaN for all NaNs."""
    flat = torch.cat([torch.empty(0, device=device), *scales])
    return torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat).view(torch.uint8)


def _root(sums: Tensor) -> Tensor:
    """The smallest float32 whose square is at least the sum. Squares are exact, so square roots need not be."""
    roots = sums.sqrt().float()
    roots = torch.where(roots.double() ** 2 < sums, _neighbour(roots, 1), roots)
    below = _neighbour(roots, -1)
    return torch.where(below.double() ** 2 >= sums, below, roots)


def _neighbour(x: Tensor, ulps: int) -> Tensor:
    return (x.view(torch.int32) + ulps).view(torch.float32)


def _scales(rows: Tensor, norm: str, least: float = MIN_SCALE) -> Tensor:
    """One scale per row of (num_buckets, bucket_size), as it is stored."""
    if norm == "max":
        # As integers, so that NaN > inf > finite on every device.
        scales = (rows.view(torch.int32) & _MAGNITUDE).amax(-1).view(torch.float32)
        scales = torch.where(scales.isfinite(), scales.clamp(max=MAX_SCALE), scales)
    else:
        sums = tree_sum(rows.double() * rows.double())
        scales = torch.where(sums.isfinite(), _root(sums).clamp(max=MAX_SCALE), sums.float())
    return torch.where(scales < least, torch.zeros_like(scales), scales)


def _quantize_segment(x: Tensor, key: int, num_steps: int, bucket_size: int, norm: str):
    """Codes, scales and decoded values of one segment."""
    least = MIN_SCALE_WIDE if num_steps > 255 else MIN_SCALE
    scales = _scales(_pad(x, bucket_size).view(-1, bucket_size), norm, least) if x.numel() else x
    scale = _spread(scales, bucket_size, x)
    steps = torch.full_like(scale, num_steps)
    t = (x * (steps / scale) + num_steps) * 0.5
    codes = (t + uniform(key, x.numel(), x.device)).floor().clamp(0, num_steps)
    codes = torch.where(scale.isfinite() & (scale > 0), codes, torch.zeros_like(codes))
    return codes.int(), scales, (2 * codes - num_steps) * (scale / steps)


def quantize(xs, out, keys, bits, num_steps, bucket_size, norm, residuals) -> None:
    coded = [_quantize_segment(x, key, num_steps, bucket_size, norm) for x, key in zip(xs, keys, strict=True)]
    _store_quantized(coded, xs, out, bits, residuals)


def _store_quantized(coded, xs, out, bits, residuals) -> None:
    """Write the payload of `coded`, a (codes, scales, values) for each segment, and the residuals."""
    codes = [_pack(_to_bits(code, bits)) for code, _, _ in coded]
    out.copy_(torch.cat([_bytes([scales for _, scales, _ in coded], out.device), *codes]))
    for x, residual, (_, _, value) in zip(xs, residuals or [], coded, strict=False):
        residual.copy_(x - value)


def _split_scales(payload: Tensor, num_scales: int) -> tuple[Tensor, Tensor]:
    # A copy, because a payload may start at any address.
    return payload[: 4 * num_scales].clone().view(torch.float32), payload[4 * num_scales :]


def dequantize_add(payload, outs, weight, bits, num_steps, bucket_size) -> None:
    _dequantize(Tensor.add_, payload, outs, weight, bits, num_steps, bucket_size)


def dequantize_sum(payloads, outs, weight, bits, num_steps, bucket_size) -> bool:
    for i, payload in enumerate(payloads):
        _dequantize(Tensor.add_ if i else Tensor.copy_, payload, outs, weight, bits, num_steps, bucket_size)
    return all_finite(outs)


def _dequantize(put, payload, outs, weight, bits, num_steps, bucket_size) -> None:
    def act(out: Tensor, codes: Tensor, scales: Tensor) -> None:
        step = scales / torch.full_like(scales, num_steps) * _float32(weight, out.device)
        put(out, (2 * codes - num_steps).float() * _spread(step, bucket_size, out))

    _decode_quantized(act, payload, outs, bits, bucket_size)


def _decode_quantized(act, payload, outs, bits, bucket_size) -> None:
    """Call `act(out, codes, scales)` for each segment."""
    num_buckets = [-(-x.numel() // bucket_size) for x in outs]
    scales, codes = _split_scales(payload, sum(num_buckets))
    for out, scale in zip(outs, _split(scales, num_buckets), strict=True):
        n = out.numel()
        segment, codes = codes.tensor_split([(n * bits + 7) // 8])
        act(out, _from_bits(_unpack(segment)[: n * bits], bits), scale)


def _float32(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def _spread(scales: Tensor, bucket_size: int, x: Tensor) -> Tensor:
    """The scale of every element of `x`."""
    return scales.repeat_interleave(min(bucket_size, x.numel()))[: x.numel()]


def _quantize_to_levels(x: Tensor, key: int, levels: Tensor, bucket_size: int, norm: str):
    """Codes, scales and decoded values of one segment."""
    scales = _scales(_pad(x, bucket_size).view(-1, bucket_size), norm) if x.numel() else x
    scale = _spread(scales, bucket_size, x)
    r = x * (torch.ones_like(scale) / scale)
    code = torch.searchsorted(levels[1:-1].contiguous(), r, right=True)  # NaN comes last
    low, high = levels[code], levels[code + 1]
    code = code + (r - low > uniform(key, x.numel(), x.device) * (high - low)).int()
    code = torch.where(scale.isfinite() & (scale > 0), code, torch.zeros_like(code))
    return code, scales, levels[code] * scale


def quantize_levels(xs, out, keys, levels, bits, bucket_size, norm, residuals) -> None:
    levels = _float32(levels, out.device)
    coded = [_quantize_to_levels(x, key, levels, bucket_size, norm) for x, key in zip(xs, keys, strict=True)]
    _store_quantized(coded, xs, out, bits, residuals)


def dequantize_levels_add(payload, outs, weight, levels, bits, bucket_size) -> None:
    levels = _float32(levels + levels[-1:] * (2**bits - len(levels)), payload.device)

    def add(out: Tensor, codes: Tensor, scales: Tensor) -> None:
        out += levels[codes] * _spread(scales * _float32(weight, out.device), bucket_size, out)

    _decode_quantized(add, payload, outs, bits, bucket_size)


def _mean_magnitude(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.zeros(1, device=x.device)
    return (tree_sum(x.abs()) / torch.tensor([x.numel()], dtype=torch.float64, device=x.device)).float()


def sign_pack(xs, out, residuals, fixed_scale) -> None:
    scales, signs = [], []
    for i, x in enumerate(xs):
        scale = _mean_magnitude(x)
        if fixed_scale is not None and bool(scale.isfinite()):
            scale = torch.full_like(scale, fixed_scale)
        signs.append(_pack((x < 0).to(torch.uint8)))
        scales.append(scale)
        if residuals is not None:
            residuals[i].copy_(x - torch.where(x < 0, -scale, scale))
    out.copy_(torch.cat([_bytes(scales, out.device), *signs]))


def sign_decode_add(payload, outs, weight) -> None:
    scales, signs = _split_scales(payload, len(outs))
    values = scales * torch.tensor(weight, dtype=torch.float32, device=payload.device)
    for out, value in zip(outs, values, strict=True):
        segment, signs = signs.tensor_split([(out.numel() + 7) // 8])
        out += torch.where(_unpack(segment)[: out.numel()].bool(), -value, value)


# The one NaN that is sent of each shorter type.
_CAST_NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}


def _power_of_two(x: Tensor, dtype: str) -> Tensor:
    """The least power of two by which `x` divided stays in range; 1 for zero, and not finite if x is not."""
    most = _magnitude(x).amax().view(torch.float32) if x.numel() else x.new_zeros(())
    mantissa, exponent = torch.frexp(most / torch.full_like(most, torch.finfo(getattr(torch, dtype)).max))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(most), exponent)
    return torch.where(most.isfinite(), torch.where(most > 0, scale, torch.ones_like(scale)), most)


def _narrowed(x: Tensor, dtype: str) -> Tensor:
    codes = x.to(getattr(torch, dtype)).view(torch.int16 if CAST_WIDTHS[dtype] == 2 else torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, _CAST_NAN[dtype]), codes)


def _widened(codes: Tensor, dtype: str) -> Tensor:
    return codes.view(getattr(torch, dtype)).float()


def cast_pack(xs, out, dtype, residuals) -> None:
    scales, parts = [], []
    for i, x in enumerate(xs):
        scale = _power_of_two(x, dtype) if CAST_WIDTHS[dtype] == 1 else torch.ones((), device=x.device)
        codes = _narrowed(x * (torch.ones_like(scale) / scale), dtype)
        scales.append(scale.view(1))
        parts.append(codes.view(torch.uint8))
        if residuals is not None:
            residuals[i].copy_(x - _widened(codes, dtype) * scale)
    out.copy_(torch.cat([_bytes(scales if CAST_WIDTHS[dtype] == 1 else [], out.device), *parts]))


def cast_decode_add(payload, outs, weight, dtype) -> None:
    width = CAST_WIDTHS[dtype]
    scales, codes = _split_scales(payload, len(outs) if width == 1 else 0)
    scales = scales if width == 1 else torch.ones(len(outs), device=payload.device)
    for out, step in zip(outs, scales * _float32(weight, payload.device), strict=True):
        part, codes = codes.tensor_split([out.numel() * width])
        out += _widened(part.clone(), dtype) * step  # a copy, because it may start at any address


def _rows(x: Tensor, bucket_size: int) -> Tensor:
    """Buckets as rows, padded with zeros; `bucket_size` may exceed the segment."""
    size = min(bucket_size, max(1, x.numel()))
    return _pad(x, size).view(-1, size)


def _means(x: Tensor, bucket_size: int) -> Tensor:
    """(num_buckets, 2): the means of each bucket's negative elements and of its others, 0 where there are none."""
    if x.numel() == 0:
        return torch.empty(0, 2, device=x.device)
    rows, zero = _rows(x.double(), bucket_size), torch.zeros((), dtype=torch.float64, device=x.device)
    negative = rows < 0
    counts = _rows(torch.ones_like(x, dtype=torch.float64), bucket_size).sum(-1)
    num_negative = negative.double().sum(-1)
    sums = tree_sum(torch.where(negative, rows, zero)), tree_sum(torch.where(negative, zero, rows)) + 0.0
    means = [
        torch.where(count == 0, zero, total / count).float()
        for total, count in zip(sums, (num_negative, counts - num_negative), strict=True)
    ]
    return torch.stack(means, -1)


def onebit_pack(xs, out, bucket_size, residuals) -> None:
    means, signs = [], []
    for i, x in enumerate(xs):
        low, high = _means(x, bucket_size).unbind(-1)
        means.append(torch.stack([low, high], -1).flatten())
        signs.append(_pack((x < 0).to(torch.uint8)))
        if residuals is not None:
            residuals[i].copy_(x - torch.where(x < 0, _spread(low, bucket_size, x), _spread(high, bucket_size, x)))
    out.copy_(torch.cat([_bytes(means, out.device), *signs]))


def onebit_decode_add(payload, outs, weight, bucket_size) -> None:
    num_buckets = [-(-x.numel() // bucket_size) for x in outs]
    means, signs = _split_scales(payload, 2 * sum(num_buckets))
    means = means.view(-1, 2) * _float32(weight, payload.device)
    for out, mean in zip(outs, _split(means, num_buckets), strict=True):
        segment, signs = signs.tensor_split([(out.numel() + 7) // 8])
        low, high = (_spread(m, bucket_size, out) for m in mean.unbind(-1))
        out += torch.where(_unpack(segment)[: out.numel()].bool(), low, high)


def _clip_limit(x: Tensor, clip: float) -> Tensor:
    """`clip` standard deviations of a segment; infinity where that is zero or not finite."""
    shifted = x.double() - x[0].double()
    count = torch.tensor(x.numel(), dtype=torch.float64, device=x.device)
    total = tree_sum(shifted)
    variance = (tree_sum(shifted * shifted) - total * total / count) / count
    infinity = _float32(float("inf"), x.device)
    return _float32(clip, x.device) * _root(variance) if bool(variance.isfinite() & (variance > 0)) else infinity


def ternary_scales(xs, clip, bucket_size, num_scales) -> Tensor:
    scales = [torch.empty(0, device=xs[0].device if xs else "cpu")]
    for x in xs:
        if x.numel():
            largest = (_rows(x, bucket_size).view(torch.int32) & _MAGNITUDE).amax(-1).view(torch.float32)
            clipped = torch.minimum(largest, _clip_limit(x, clip)).clamp(max=MAX_SCALE)
            clipped = torch.where(clipped < MIN_SCALE, torch.zeros_like(clipped), clipped)
            scales.append(torch.where(largest.isfinite(), clipped, largest))
    return _bytes(scales, scales[0].device).view(torch.float32)


def _ternary_values(x: Tensor, scale: Tensor, key: int) -> Tensor:
    """-1, 0 or 1 for each element."""
    u, r = uniform(key, x.numel(), x.device), x * (torch.ones_like(scale) / scale)
    values = (u < r).int() - (u < -r).int()
    return torch.where(scale.isfinite() & (scale > 0), values, torch.zeros_like(values))


def _planes(numel: int, base: int) -> list[tuple[int, int]]:
    """(elements, words) of each block of a segment; see docs/wire.md."""
    digits = ternary_digits(base)
    whole, rest = divmod(numel, TERNARY_WORDS * digits)
    return [(TERNARY_WORDS * digits, TERNARY_WORDS)] * whole + [(rest, -(-rest // digits))] * (rest > 0)


def _pack_radix(digits: Tensor, base: int) -> Tensor:
    num_digits, words = ternary_digits(base), [torch.empty(0, dtype=torch.int64, device=digits.device)]
    powers = torch.tensor([base**k for k in range(num_digits)], device=digits.device)
    for block, (numel, width) in _blocks(digits, base):
        padded = torch.nn.functional.pad(block.long(), (0, width * num_digits - numel)).view(num_digits, width)
        words.append((padded * powers[:, None]).sum(0))
    return torch.cat(words).to(torch.uint8 if base == 3 else torch.int32).view(torch.uint8)


def _blocks(digits: Tensor, base: int):
    planes = _planes(digits.numel(), base)
    return zip(_split(digits, [numel for numel, _ in planes]), planes, strict=True)


def _unpack_radix(payload: Tensor, numel: int, base: int) -> Tensor:
    words = payload.long() if base == 3 else payload.clone().view(torch.int32).long() & _MASK32
    digits, planes = [], _planes(numel, base)
    for word, (count, _) in zip(_split(words, [width for _, width in planes]), planes, strict=True):
        block = []
        for _ in range(ternary_digits(base)):
            quotient = ((word.double() + 0.5) * (1.0 / base)).floor().long()
            block.append(word - quotient * base)
            word = quotient
        digits.append(torch.cat(block)[:count])
    return torch.cat([torch.empty(0, dtype=torch.int64, device=payload.device), *digits])


def ternary_pack(xs, scales, out, keys, base, bucket_size, residuals) -> None:
    words = [torch.empty(0, dtype=torch.uint8, device=out.device)]
    for i, (x, scale) in enumerate(_with_scales(xs, scales, bucket_size)):
        values = _ternary_values(x, scale, keys[i])
        words.append(_pack_radix(values + 1, base))
        if residuals is not None:
            residuals[i].copy_(x - values.float() * scale)
    out.copy_(torch.cat(words))


def ternary_decode_add(payload, scales, outs, weight, base, bucket_size) -> None:
    weight = _float32(weight, payload.device)
    for out, scale in _with_scales(outs, scales, bucket_size):
        words, payload = payload.tensor_split([ternary_nbytes([out.numel()], base)])
        digits = _unpack_radix(words, out.numel(), base)
        out += (digits - base // 2).float() * (scale * weight)


def _with_scales(xs, scales: Tensor, bucket_size: int):
    """Each segment with the scale of each of its elements."""
    parts = _split(scales, [-(-x.numel() // bucket_size) for x in xs])
    return [(x, _spread(part, bucket_size, x)) for x, part in zip(xs, parts, strict=True)]


def _magnitude(x: Tensor) -> Tensor:
    return x.view(torch.int32) & _MAGNITUDE


def _keep_largest(x: Tensor, count: int) -> Tensor:
    """Ascending indices of the `count` largest magnitudes, the lowest index first among equals."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    magnitude = _magnitude(x)
    threshold = magnitude.topk(count, sorted=False).values.min()
    keep = magnitude > threshold
    ties = (magnitude == threshold).nonzero().flatten()[: count - int(keep.sum())]
    keep[ties] = True
    return keep.nonzero().flatten()


def _gather(xs: Sequence[Tensor], kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device = xs[0].device if xs else torch.device("cpu")
    indices = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *kept]).int()
    values = torch.cat([torch.empty(0, device=device), *(x[i] for x, i in zip(xs, kept, strict=True))])
    return indices, values


def topk(xs, counts) -> tuple[Tensor, Tensor]:
    return _gather(xs, [_keep_largest(x, count) for x, count in zip(xs, counts, strict=True)])


def select(xs, thresholds) -> tuple[Tensor, Tensor, list[int]]:
    kept = []
    for x, threshold in zip(xs, thresholds, strict=True):
        bits = torch.tensor([threshold], dtype=torch.float32, device=x.device).view(torch.int32)
        kept.append((_magnitude(x) >= bits).nonzero().flatten())
    indices, values = _gather(xs, kept)
    return indices, values, [i.numel() for i in kept]


def _keep_largest_of_rows(rows: Tensor, count: int) -> Tensor:
    """Ascending indices of the `count` largest magnitudes of each row, flat."""
    positions = torch.arange(rows.shape[1], device=rows.device)
    order = (_magnitude(rows).long() << 32) - positions  # among equals the lowest index is the largest
    return order.topk(count, dim=1).indices.sort(dim=1).values


def topk_in_chunks(xs, chunk, count, last_counts, total) -> tuple[Tensor, Tensor]:
    kept = []
    for x, last_count in zip(xs, last_counts, strict=True):
        whole = x.numel() // chunk * chunk
        starts = torch.arange(0, whole, chunk, device=x.device)
        in_chunks = _keep_largest_of_rows(x[:whole].view(-1, chunk), count) + starts[:, None]
        kept.append(torch.cat([in_chunks.flatten(), _keep_largest(x[whole:], last_count) + whole]))
    return _gather(xs, kept)


def largest(xs) -> list[float]:
    bits = [_magnitude(x).amax() if x.numel() else torch.zeros((), dtype=torch.int32, device=x.device) for x in xs]
    return torch.stack(bits).view(torch.float32).tolist() if bits else []


_ROUNDS, _MIN_BITS = 6, 8


def _permute(key: int, numbers: Tensor, bits: int) -> Tensor:
    """A Feistel network over numbers of `bits` bits."""
    low_bits = bits // 2
    high, low = numbers >> low_bits, numbers & ((1 << low_bits) - 1)
    for r in range(0, _ROUNDS, 2):
        high = high ^ (_hash(key, (r << 16) | low) >> (32 - (bits - low_bits)))
        low = low ^ (_hash(key, ((r + 1) << 16) | high) >> (32 - low_bits))
    return (high << low_bits) | low


def _random_subset(key: int, count: int, numel: int, device: torch.device) -> Tensor:
    bits = max(_MIN_BITS, (numel - 1).bit_length())
    numbers = _permute(key, torch.arange(count, device=device), bits)
    while bool((outside := numbers >= numel).any()):
        numbers = torch.where(outside, _permute(key, numbers, bits), numbers)
    return numbers


def random_indices(keys, counts, numels, device) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64, device=device)]
    for key, count, numel in zip(keys, counts, numels, strict=True):
        excludes = 2 * count > numel  # what is left out is less
        kept = torch.full((numel,), excludes, dtype=torch.bool, device=device)
        kept[_random_subset(key, numel - count if excludes else count, numel, device)] = not excludes
        pieces.append(kept.nonzero().flatten())
    return torch.cat(pieces).int()


def gather(xs, indices, counts) -> Tensor:
    values = [x[index] for x, index, _ in _checked_pieces(xs, indices, indices, counts)]
    return torch.cat([torch.empty(0, device=indices.device), *values])


def scatter(outs, indices, values, counts) -> None:
    for out, index, value in _checked_pieces(outs, indices, values, counts):
        out[index] = value


def clear(outs, indices, counts) -> None:
    for out, index, _ in _checked_pieces(outs, indices, indices, counts):
        out[index] = 0


def scatter_add(outs, indices, values, counts, weight) -> None:
    weight = torch.tensor(weight, dtype=torch.float32, device=values.device)
    for out, index, value in _checked_pieces(outs, indices, values, counts):
        out.index_add_(0, index, value * weight)


def _checked_pieces(outs, indices, values, counts):
    pieces = list(zip(outs, _split(indices.long(), counts), _split(values, counts), strict=True))
    for i, (out, index, _) in enumerate(pieces):
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < out.numel():
            raise ValueError(f"segment {i}: indices must be 0 to {out.numel() - 1}, one is outside; corrupt payload?")
    return pieces


def _index_bits(index: Tensor, numel: int) -> Tensor:
    """The bits of one segment's code, not yet padded to bytes."""
    count = index.numel()
    low = elias_fano_low_bits(count, numel)
    if low is None:
        bits = torch.zeros(numel, dtype=torch.uint8, device=index.device)
        bits[index] = 1
        return bits
    high = torch.zeros(elias_fano_bits(count, numel, low) - count * low, dtype=torch.uint8, device=index.device)
    high[(index >> low) + torch.arange(count, device=index.device)] = 1
    return torch.cat([high, _to_bits(index & ((1 << low) - 1), low)])


def _check_ascending(i: int, index: Tensor, numel: int) -> None:
    if index.numel() == 0:
        return
    if int(index[0]) < 0 or int(index[-1]) >= numel or bool((index[1:] <= index[:-1]).any()):
        raise ValueError(f"segment {i}: expected strictly ascending indices from 0 to {numel - 1}; sort them first")


def pack_indices(indices, counts, numels, out) -> None:
    codes = []
    for i, (index, numel) in enumerate(zip(_split(indices.long(), counts), numels, strict=True)):
        _check_ascending(i, index, numel)
        if 0 < index.numel() < numel:
            codes.append(_pack(_index_bits(index, numel)))
    out.copy_(torch.cat([torch.empty(0, dtype=torch.uint8, device=out.device), *codes]))


def _read_indices(bits: Tensor, count: int, numel: int) -> Tensor | None:
    """The indices that `bits` hold, or None if no encoder writes these bits."""
    low = elias_fano_low_bits(count, numel)
    size = numel if low is None else elias_fano_bits(count, numel, low)
    marks = bits[: size if low is None else size - count * low].nonzero().flatten()
    if marks.numel() != count or bool(bits[size:].any()):
        return None
    if low is None:
        return marks
    index = ((marks - torch.arange(count, device=bits.device)) << low) + (
        _from_bits(bits[size - count * low : size], low) if low else 0
    )
    return index if int(index[-1]) < numel and bool((index[1:] > index[:-1]).all()) else None


def _unpack_segment(i: int, code: Tensor, count: int, numel: int) -> Tensor:
    if count in (0, numel):
        return torch.arange(count, device=code.device)
    index = _read_indices(_unpack(code), count, numel)
    if index is None:
        raise ValueError(f"segment {i}: expected {count} ascending indices below {numel}; the payload is corrupt")
    return index


def unpack_indices(payload, counts, numels) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64, device=payload.device)]
    for i, (count, numel) in enumerate(zip(counts, numels, strict=True)):
        code, payload = payload.tensor_split([indices_nbytes(count, numel)])
        pieces.append(_unpack_segment(i, code, count, numel))
    return torch.cat(pieces).int()


GAPS = 128  # of a block
_BY_SIZE, _BY_GAPS = 0, 1


def _gap_bytes(index: Tensor) -> Tensor:
    """Gaps less one in blocks: a byte with the bits of the largest, then that many bits for each."""
    blocks = []
    for block in _gaps(index).split(GAPS):
        width = int(block.max()).bit_length()
        blocks += [torch.tensor([width], dtype=torch.uint8, device=index.device), _pack(_to_bits(block, width))]
    return torch.cat(blocks)


def pack_smallest(indices, counts, numels) -> Tensor:
    codes = [torch.empty(0, dtype=torch.uint8, device=indices.device)]
    for index, count, numel in zip(_split(indices, counts), counts, numels, strict=True):
        code = torch.empty(indices_nbytes(count, numel), dtype=torch.uint8, device=indices.device)
        pack_indices(index, [count], [numel], code)
        gaps = _gap_bytes(index.long()) if code.numel() else code
        name, code = (_BY_GAPS, gaps) if gaps.numel() < code.numel() else (_BY_SIZE, code)
        codes += [torch.tensor([name], dtype=torch.uint8, device=indices.device), code]
    return torch.cat(codes)


def _read_gaps(payload: Tensor, count: int, numel: int) -> tuple[Tensor, Tensor]:
    """Indices, and what is left of the payload."""
    blocks = []
    for at in range(0, count, GAPS):
        size = min(GAPS, count - at)
        width = int(payload[0]) if payload.numel() else 32
        nbytes = (size * width + 7) // 8
        if width > 31 or payload.numel() <= nbytes:
            raise ValueError("payload: its indices are corrupt")
        bits = _unpack(payload[1 : 1 + nbytes])
        if bool(bits[size * width :].any()):
            raise ValueError("payload: its indices are corrupt")
        blocks.append(_from_bits(bits[: size * width], width) if width else torch.zeros(size, dtype=torch.int64))
        payload = payload[1 + nbytes :]
    index = torch.cat([b.to(payload.device) for b in blocks]).add(1).cumsum(0) - 1
    if int(index[-1]) >= numel:
        raise ValueError("payload: its indices are corrupt")
    return index, payload


def unpack_smallest(payload, counts, numels) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64, device=payload.device)]
    for i, (count, numel) in enumerate(zip(counts, numels, strict=True)):
        name, payload = (int(payload[0]), payload[1:]) if payload.numel() else (-1, payload)
        if name not in (_BY_SIZE, _BY_GAPS) or (name == _BY_GAPS and not count):
            raise ValueError("payload: expected the byte that names how indices are coded")
        nbytes = indices_nbytes(count, numel)
        if name == _BY_GAPS:
            index, payload = _read_gaps(payload, count, numel)
        elif payload.numel() < nbytes:
            raise ValueError("payload: its indices are cut short")
        else:
            index, payload = _unpack_segment(i, payload[:nbytes], count, numel), payload[nbytes:]
        pieces.append(index)
    if payload.numel():
        raise ValueError("payload: bytes are left after the indices")
    return torch.cat(pieces).int()


def _gaps(index: Tensor) -> Tensor:
    """Gaps between indices, less one."""
    return torch.diff(index, prepend=torch.full((1,), -1, device=index.device)) - 1


def pack_rice(indices, counts, numels) -> Tensor:
    codes = [torch.empty(0, dtype=torch.uint8, device=indices.device)]
    for i, (index, count, numel) in enumerate(zip(_split(indices.long(), counts), counts, numels, strict=True)):
        _check_ascending(i, index, numel)
        if count in (0, numel):
            continue
        gaps, low = _gaps(index), rice_low_bits(count, numel)
        at = (gaps >> low).cumsum(0) + torch.arange(count, device=index.device)
        marks = torch.zeros(int(at[-1]) + 1, dtype=torch.uint8, device=index.device)
        marks[at] = 1
        codes.append(_pack(torch.cat([marks, _to_bits(gaps & ((1 << low) - 1), low)])))
    return torch.cat(codes)


def _read_rice(payload: Tensor, count: int, numel: int) -> tuple[Tensor, Tensor]:
    """Indices, and what is left of the payload."""
    low = rice_low_bits(count, numel)
    bits = _unpack(payload[: rice_max_nbytes(count, numel)])
    at = bits.nonzero().flatten()[:count]
    num_marks = int(at[-1]) + 1 if at.numel() == count else bits.numel()
    num_bits = num_marks + count * low
    nbytes = (num_bits + 7) // 8
    if at.numel() < count or num_bits > bits.numel() or bool(bits[num_bits : 8 * nbytes].any()):
        raise ValueError("payload: its indices are corrupt")
    lows = _from_bits(bits[num_marks:num_bits], low) if low else torch.zeros_like(at)
    index = (((_gaps(at) << low) | lows) + 1).cumsum(0) - 1
    if int(index[-1]) >= numel:
        raise ValueError("payload: its indices are corrupt")
    return index, payload[nbytes:]


def unpack_rice(payload, counts, numels) -> Tensor:
    pieces = [torch.empty(0, dtype=torch.int64, device=payload.device)]
    for count, numel in zip(counts, numels, strict=True):
        if count in (0, numel):
            index = torch.arange(count, device=payload.device)
        else:
            index, payload = _read_rice(payload, count, numel)
        pieces.append(index)
    if payload.numel():
        raise ValueError("payload: bytes are left after the indices")
    return torch.cat(pieces).int()


def pack_words(words, bits, out) -> None:
    out.copy_(_pack(_to_bits(words.long(), bits)))


def unpack_words(payload, count, bits) -> Tensor:
    if bits == 0:
        return torch.zeros(count, dtype=torch.int32, device=payload.device)
    return _from_bits(_unpack(payload)[: count * bits], bits).int()


def momentum(gs, us, vs, new_us, new_vs, momentum, factor, nesterov) -> None:
    for g, u, v, new_u, new_v in zip(gs, us, vs, new_us, new_vs, strict=True):
        m, g = _float32(momentum, g.device), g * _float32(factor, g.device)
        new_u.copy_((u + g) * m if nesterov else u * m + g)
        new_v.copy_(v + (new_u + g if nesterov else new_u))


def momentum_topk(gs, us, vs, new_us, new_vs, momentum_, factor, nesterov, counts) -> tuple[Tensor, Tensor]:
    momentum(gs, us, vs, new_us, new_vs, momentum_, factor, nesterov)
    return topk(new_vs, counts)


def add_topk(gs, es, outs, factor, counts) -> tuple[Tensor, Tensor]:
    for g, e, out in zip(gs, es, outs, strict=True):
        out.copy_(e + g * _float32(factor, g.device))
    return topk(outs, counts)


def chunk_norms(xs, chunk, out) -> None:
    norms = [torch.empty(0, dtype=torch.float64, device=out.device)]
    for x in xs:
        whole = x.numel() // chunk * chunk
        parts = (x[:whole].view(-1, chunk), x[None, whole:])
        norms += [tree_sum(part.abs()) for part in parts if part.numel()]
    out.copy_(torch.cat(norms))


def all_finite(tensors) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def _packed_nbytes(counts, bits: int) -> list[int]:
    return [(n * bits + 7) // 8 for n in counts]


def huffman_encode(packed, counts, bits) -> Tensor:
    parts = packed.split(_packed_nbytes(counts, bits)) if counts else []
    symbols = torch.cat(
        [packed[:0].long(), *(_from_bits(_unpack(p)[: n * bits], bits) for p, n in zip(parts, counts, strict=True))]
    )
    lengths = code_lengths(torch.bincount(symbols, minlength=2**bits).tolist())
    codes = canonical_codes(lengths)
    length = torch.tensor(lengths, device=packed.device)[symbols]
    table = torch.tensor([a | b << 4 for a, b in zip(lengths[::2], lengths[1::2], strict=True)], device=packed.device)
    if 1 + table.numel() + (int(length.sum()) + 7) // 8 > packed.numel():
        return torch.cat([packed.new_zeros(1), packed])
    code = torch.tensor([codes.get(s, 0) for s in range(2**bits)], device=packed.device)[symbols]
    places = torch.arange(MAX_CODE_LENGTH, device=packed.device)
    stream = (code[:, None] >> places)[places < length[:, None]] & 1
    return torch.cat([packed.new_ones(1), table.to(torch.uint8), _pack(stream.to(torch.uint8))])


def huffman_decode(payload, counts, bits, nbytes) -> Tensor:
    check_huffman(payload.numel() >= 1 and payload[0] <= 1, "its first byte is neither 0 nor 1")
    if payload[0] == 0:
        check_huffman(payload.numel() == nbytes + 1, "its size does not fit the counts")
        return payload[1:].clone()
    table, stream = payload[1 : 1 + 2**bits // 2], payload[1 + 2**bits // 2 :]
    check_huffman(table.numel() == 2**bits // 2, "it ends before its code lengths")
    lengths = [length for byte in table.tolist() for length in (byte & 15, byte >> 4)]
    check_huffman(max(lengths) <= MAX_CODE_LENGTH, "a code is too long")
    check_huffman(sum(2.0**-n for n in lengths if n) <= 1, "its code lengths are no code")
    symbols = torch.tensor(_read_symbols(_unpack(stream).tolist(), lengths, sum(counts)), device=payload.device)
    parts = symbols.long().split(list(counts)) if counts else []
    return torch.cat([payload[:0], *(_pack(_to_bits(part, bits)) for part in parts)])


def _read_symbols(stream: list[int], lengths: list[int], count: int) -> list[int]:
    meaning = {(lengths[symbol], code): symbol for symbol, code in canonical_codes(lengths).items()}
    symbols, at = [], 0
    for _ in range(count):
        code = length = 0
        while (length, code) not in meaning:
            check_huffman(at < len(stream) and length < MAX_CODE_LENGTH, "it holds bits that are no code, or too few")
            code |= stream[at] << length
            length, at = length + 1, at + 1
        symbols.append(meaning[length, code])
    check_huffman(len(stream) - at < 8 and not any(stream[at:]), "its size does not fit the counts")
    return symbols
