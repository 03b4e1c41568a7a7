"""Kernels in C++ for tensors in main memory, handed over as NumPy views. `thinwire.kernels` has checked them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .layout import CAST_WIDTHS

try:
    from . import _native
except ImportError as error:
    raise ImportError(
        f"thinwire's C++ kernels cannot be loaded ({error}); build them with `pip install .` in the source folder"
    ) from error


def _views(tensors) -> list[np.ndarray]:
    return [t.numpy() for t in tensors]


def _optional_views(tensors) -> list[np.ndarray]:
    return [] if tensors is None else _views(tensors)


def uniform(key: int, numel: int, device: torch.device) -> Tensor:
    out = torch.empty(numel)
    _native.uniform(key, out.numpy())
    return out


def quantize(xs, out, keys, bits, num_steps, bucket_size, norm, residuals) -> None:
    _native.quantize(
        _views(xs), out.numpy(), keys, bits, num_steps, bucket_size, norm == "l2", _optional_views(residuals)
    )


def dequantize_add(payload, outs, weight, bits, num_steps, bucket_size) -> None:
    _native.dequantize_add(payload.numpy(), _views(outs), weight, bits, num_steps, bucket_size)


def dequantize_sum(payloads, outs, weight, bits, num_steps, bucket_size) -> bool:
    return _native.dequantize_sum(_views(payloads), _views(outs), weight, bits, num_steps, bucket_size)


def quantize_levels(xs, out, keys, levels, bits, bucket_size, norm, residuals) -> None:
    _native.quantize_levels(
        _views(xs), out.numpy(), keys, levels, bits, bucket_size, norm == "l2", _optional_views(residuals)
    )


def dequantize_levels_add(payload, outs, weight, levels, bits, bucket_size) -> None:
    _native.dequantize_levels_add(payload.numpy(), _views(outs), weight, levels, bits, bucket_size)


def sign_pack(xs, out, residuals, fixed_scale) -> None:
    _native.sign_pack(_views(xs), out.numpy(), _optional_views(residuals), fixed_scale)


def sign_decode_add(payload, outs, weight) -> None:
    _native.sign_decode_add(payload.numpy(), _views(outs), weight)


def _float_type(dtype: str) -> int:
    return list(CAST_WIDTHS).index(dtype)


def cast_pack(xs, out, dtype, residuals) -> None:
    _native.cast_pack(_views(xs), out.numpy(), _float_type(dtype), _optional_views(residuals))


def cast_decode_add(payload, outs, weight, dtype) -> None:
    _native.cast_decode_add(payload.numpy(), _views(outs), weight, _float_type(dtype))


def onebit_pack(xs, out, bucket_size, residuals) -> None:
    _native.onebit_pack(_views(xs), out.numpy(), bucket_size, _optional_views(residuals))


def onebit_decode_add(payload, outs, weight, bucket_size) -> None:
    _native.onebit_decode_add(payload.numpy(), _views(outs), weight, bucket_size)


def ternary_scales(xs, clip, bucket_size, num_scales) -> Tensor:
    scales = torch.empty(num_scales)
    _native.ternary_scales(_views(xs), clip, bucket_size, scales.numpy())
    return scales


def ternary_pack(xs, scales, out, keys, base, bucket_size, residuals) -> None:
    _native.ternary_pack(_views(xs), scales.numpy(), out.numpy(), keys, base, bucket_size, _optional_views(residuals))


def ternary_decode_add(payload, scales, outs, weight, base, bucket_size) -> None:
    _native.ternary_decode_add(payload.numpy(), scales.numpy(), _views(outs), weight, base, bucket_size)


def huffman_encode(packed, counts, bits) -> Tensor:
    out = torch.empty(packed.numel() + 9, dtype=torch.uint8)
    return out[: _native.huffman_encode(packed.numpy(), counts, bits, out.numpy())]


def huffman_decode(payload, counts, bits, nbytes) -> Tensor:
    out = torch.empty(nbytes, dtype=torch.uint8)
    _native.huffman_decode(payload.numpy(), counts, bits, out.numpy())
    return out


def topk(xs, counts) -> tuple[Tensor, Tensor]:
    indices = torch.empty(sum(counts), dtype=torch.int32)
    values = torch.empty(sum(counts))
    _native.topk(_views(xs), counts, indices.numpy(), values.numpy())
    return indices, values


def select(xs, thresholds) -> tuple[Tensor, Tensor, list[int]]:
    indices, values, counts = _native.select(_views(xs), thresholds)
    return torch.from_numpy(indices), torch.from_numpy(values), counts


def topk_in_chunks(xs, chunk, count, last_counts, total) -> tuple[Tensor, Tensor]:
    indices = torch.empty(total, dtype=torch.int32)
    values = torch.empty(total)
    _native.topk_in_chunks(_views(xs), chunk, count, last_counts, indices.numpy(), values.numpy())
    return indices, values


def largest(xs) -> list[float]:
    return _native.largest(_views(xs))


def random_indices(keys, counts, numels, device) -> Tensor:
    indices = torch.empty(sum(counts), dtype=torch.int32)
    _native.random_indices(keys, counts, numels, indices.numpy())
    return indices.to(device)


def gather(xs, indices, counts) -> Tensor:
    values = torch.empty(indices.numel())
    _native.gather(_views(xs), indices.numpy(), values.numpy(), counts)
    return values


def scatter(outs, indices, values, counts) -> None:
    _native.scatter(_views(outs), indices.numpy(), values.numpy(), counts)


def clear(outs, indices, counts) -> None:
    _native.clear(_views(outs), indices.numpy(), counts)


def scatter_add(outs, indices, values, counts, weight) -> None:
    _native.scatter_add(_views(outs), indices.numpy(), values.numpy(), counts, weight)


def pack_indices(indices, counts, numels, out) -> None:
    _native.pack_indices(indices.numpy(), counts, numels, out.numpy())


def unpack_indices(payload, counts, numels) -> Tensor:
    indices = torch.empty(sum(counts), dtype=torch.int32)
    _native.unpack_indices(payload.numpy(), counts, numels, indices.numpy())
    return indices


def pack_smallest(indices, counts, numels) -> Tensor:
    return torch.from_numpy(_native.pack_smallest(indices.numpy(), counts, numels))


def unpack_smallest(payload, counts, numels) -> Tensor:
    indices = torch.empty(sum(counts), dtype=torch.int32)
    _native.unpack_smallest(payload.numpy(), counts, numels, indices.numpy())
    return indices


def pack_rice(indices, counts, numels) -> Tensor:
    return torch.from_numpy(_native.pack_rice(indices.numpy(), counts, numels))


def unpack_rice(payload, counts, numels) -> Tensor:
    indices = torch.empty(sum(counts), dtype=torch.int32)
    _native.unpack_rice(payload.numpy(), counts, numels, indices.numpy())
    return indices


def pack_words(words, bits, out) -> None:
    _native.pack_words(words.numpy(), bits, out.numpy())


def unpack_words(payload, count, bits) -> Tensor:
    words = torch.empty(count, dtype=torch.int32)
    _native.unpack_words(payload.numpy(), bits, words.numpy())
    return words


def momentum(gs, us, vs, new_us, new_vs, momentum, factor, nesterov) -> None:
    buffers = map(_views, (gs, us, vs, new_us, new_vs))
    _native.momentum(*buffers, momentum, factor, nesterov)


def momentum_topk(gs, us, vs, new_us, new_vs, momentum, factor, nesterov, counts) -> tuple[Tensor, Tensor]:
    indices = torch.empty(sum(counts), dtype=torch.int32)
    values = torch.empty(sum(counts))
    buffers = map(_views, (gs, us, vs, new_us, new_vs))
    _native.momentum_topk(*buffers, momentum, factor, nesterov, counts, indices.numpy(), values.numpy())
    return indices, values


def add_topk(gs, es, outs, factor, counts) -> tuple[Tensor, Tensor]:
    indices = torch.empty(sum(counts), dtype=torch.int32)
    values = torch.empty(sum(counts))
    _native.add_topk(_views(gs), _views(es), _views(outs), factor, counts, indices.numpy(), values.numpy())
    return indices, values


def chunk_norms(xs, chunk, out) -> None:
    _native.chunk_norms(_views(xs), chunk, out.numpy())


def all_finite(tensors) -> bool:
    return _native.all_finite(_views(tensors))
