"""The backend in C++ for tensors in main memory; arguments have been checked by the families' public functions.

Importing this module fails where the extension `_native` is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import debug
from . import (
    _native,
    bin_means,
    cast,
    difference,
    entropy,
    indices,
    levels,
    low_rank,
    mix,
    modular,
    momentum,
    onebit,
    permutation,
    quantize,
    random,
    reduce,
    rice,
    scatter,
    select,
    sign,
    smallest,
    ternary,
    words,
)
from .backend import Kernel

Array = NDArray[Any]
_int32 = partial(debug.empty, dtype=torch.int32, device="cpu")
_float32 = partial(debug.empty, dtype=torch.float32, device="cpu")
_double = partial(torch.tensor, dtype=torch.float64, device="cpu")
_int64 = partial(torch.tensor, dtype=torch.int64, device="cpu")


def _arrays(items: Sequence[Any] | None) -> list[Any]:
    """Arrays of tensors; other items as they are, and none for None."""
    if not items:
        return []
    return list(map(Tensor.numpy, items)) if isinstance(items[0], Tensor) else list(items)


def _quantizer(q: quantize.Quantizer) -> _native.Quantizer:
    return _native.Quantizer(_native.Buckets(q.bits, q.bucket_size, q.norm == "l2"), q.num_steps)


@lru_cache(maxsize=1024)
def _quantizers(q: quantize.Quantizers) -> _native.Quantizers:
    return _native.Quantizers(list(map(_quantizer, q.distinct)), list(q.which))


def _levels(x: levels.Levels) -> _native.Levels:
    return _native.Levels(_native.Buckets(x.bits, x.bucket_size, x.norm == "l2"), x.values)


# What the extension takes in place of an argument, by the argument's type; all others as they are.
# Exact types are enough: checks have detached all tensors, so that none is a `Parameter`.
_CONVERSIONS: dict[type, Callable[[Any], Any]] = {
    Tensor: Tensor.numpy,
    list: _arrays,
    type(None): _arrays,
    str: list(cast.WIDTHS).index,  # a float type
    quantize.Quantizer: _quantizer,
    quantize.Quantizers: _quantizers,
    levels.Levels: _levels,
    ternary.Ternary: lambda t: _native.Ternary(t.base, t.size),
    momentum.Momentum: lambda rule: _native.Momentum(rule.momentum, rule.factor, rule.nesterov),
}
_conversion = _CONVERSIONS.get


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a C++ function with converted arguments; residuals that are the segments are converted once."""
    made: dict[int, Any] = {}
    for a in arguments:
        if id(a) not in made:
            made[id(a)] = convert(a) if (convert := _conversion(type(a))) else a
    return function(*[made[id(a)] for a in arguments])


# These C++ functions take the reference's arguments, in its order.
SAME_ARGUMENTS: dict[Kernel[..., Any], Callable[..., Any]] = {
    bin_means._encode: _native.bin_means_encode,
    bin_means._decode_add: _native.bin_means_decode_add,
    cast._encode: _native.cast_encode,
    cast._decode_add: _native.cast_decode_add,
    difference._choco_add: _native.choco_decode_add,
    difference._choco_add_dense: _native.choco_dense_add,
    difference._squeeze_add: _native.squeeze_decode_add,
    indices._encode: _native.indices_encode,
    levels._encode: _native.levels_encode,
    levels._decode_add: _native.levels_decode_add,
    low_rank._add: _native.low_rank_add,
    low_rank._add_products: _native.low_rank_add_products,
    low_rank._products: _native.low_rank_products,
    low_rank._store: _native.low_rank_store,
    mix._add: _native.mix_add,
    modular._add: _native.modular_add,
    modular._recover_add: _native.modular_recover_add,
    onebit._encode: _native.onebit_encode,
    onebit._decode_add: _native.onebit_decode_add,
    quantize._encode: _native.quantize_encode,
    quantize._decode_add: _native.quantize_decode_add,
    quantize._decode_sum: _native.quantize_decode_sum,
    reduce._all_finite: _native.all_finite,
    reduce._chunk_norms: _native.chunk_norms,
    scatter._add: _native.scatter_add,
    scatter._clear: _native.scatter_clear,
    scatter._total: _native.scatter_total,
    scatter._write: _native.scatter_write,
    select._largest: _native.largest,
    sign._decode_add: _native.sign_decode_add,
    ternary._encode: _native.ternary_encode,
    ternary._decode_add: _native.ternary_decode_add,
}
BLAS_RANK = 16
"""From so many vectors on, the references of low-rank products are faster: they call BLAS."""
_FACTORS = {
    low_rank._add: (2, BLAS_RANK),
    low_rank._add_products: (4, BLAS_RANK),
    low_rank._products: (2, BLAS_RANK),
    low_rank._store: (2, low_rank.PORTABLE_RANK + 1),
}
"""Of low-rank products, the place of the argument with the vectors, and from how many on the reference serves."""


def _call_below(kernel: Kernel[..., Any], function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a C++ function for few vectors, of which there are as many for each matrix; else the reference."""
    place, limit = _FACTORS[kernel]
    if arguments[place] and len(arguments[place][0]) >= limit:
        return kernel.reference(*arguments)
    return _call(function, *arguments)


for _kernel, _function in SAME_ARGUMENTS.items():
    _kernel.runs_on("cpu")(
        partial(_call_below, _kernel, _function) if _kernel in _FACTORS else partial(_call, _function)
    )


# ---- other arguments than the reference's ----


@sign._encode.runs_on("cpu")
def sign_encode(xs: list[Tensor], out: Tensor, residuals: list[Tensor] | None, fixed_scale: float | None) -> None:
    # Without the scale, which `_call` would turn into an empty list where it is missing.
    _call(partial(_native.sign_encode, fixed_scale=fixed_scale), xs, out, residuals)


@low_rank._orthonormal.runs_on("cpu")
def low_rank_orthonormal(x: Tensor, out: Tensor) -> None:
    rank, n = x.shape[-2:]
    if rank <= low_rank.PORTABLE_RANK:
        _native.low_rank_orthonormal(x.numpy(), rank, n, out.numpy())
    else:
        low_rank._orthonormal.reference(x, out)


def _buffers(b: momentum.Buffers) -> tuple[list[Array], list[Array], list[Array], list[Array], list[Array]]:
    return _arrays(b.gs), _arrays(b.us), _arrays(b.vs), _arrays(b.new_us), _arrays(b.new_vs)


@momentum._correct.runs_on("cpu")
def momentum_correct(buffers: momentum.Buffers, rule: momentum.Momentum) -> None:
    _call(_native.momentum_correct, *_buffers(buffers), rule)


# ---- numbers as new tensors ----


@difference._encode.runs_on("cpu")
def difference_encode(
    xs: list[Tensor],
    ys: list[Tensor],
    add: bool,
    out: Tensor,
    keys: list[int],
    quantizer: quantize.Quantizer,
    measured: bool,
) -> Tensor | None:
    arrays = _arrays(xs), _arrays(ys)
    sums = _native.difference_encode(*arrays, add, out.numpy(), keys, _quantizer(quantizer), measured)
    return _double(sums) if measured else None


@difference._sums.runs_on("cpu")
def difference_sums(vs: list[Tensor], cs: list[Tensor]) -> Tensor:
    return _double(_native.dense_sums(_arrays(vs), _arrays(cs)))


@modular._encode.runs_on("cpu")
def modular_encode(xs: list[Tensor], out: Tensor, key: int, bits: int, modulus: float) -> tuple[Tensor, Tensor]:
    check, largest = _native.modular_encode(_arrays(xs), out.numpy(), key, bits, modulus)
    # C++ gives 64 bits without a sign. PyTorch holds the same bits as int64.
    signed = check - (check >> 63 << 64)
    return _int64(signed), torch.tensor(largest, dtype=torch.float32, device="cpu")


@modular._sums.runs_on("cpu")
def modular_sums(own: Tensor, theirs: Tensor, numel: int, key: int, bits: int) -> Tensor:
    return _int64(_native.modular_sums(own.numpy(), theirs.numpy(), numel, key, bits))


# ---- new tensors that C++ fills ----


@random._uniform.runs_on("cpu")
def uniform(key: int, numel: int, device: torch.device) -> Tensor:
    out = _float32(numel)
    _native.uniform(key, out.numpy())
    return out


@permutation._random_indices.runs_on("cpu")
def random_indices(keys: list[int] | Tensor, counts: list[int], numels: list[int], device: torch.device) -> Tensor:
    if isinstance(keys, Tensor):
        # An int64 tensor holds keys with a sign, C++ takes them without.
        keys = [key % 2**64 for key in keys.tolist()]
    found = _int32(sum(counts))
    _native.random_indices(keys, counts, numels, found.numpy())
    return found.to(device)


@ternary._scales.runs_on("cpu")
def ternary_scales(xs: list[Tensor], clip: float, bucket_size: int, num_scales: int) -> Tensor:
    scales = _float32(num_scales)
    _native.ternary_scales(_arrays(xs), clip, bucket_size, scales.numpy())
    return scales


def _gather(function: Callable[..., None], xs: list[Tensor], indices: Tensor, counts: list[int]) -> Tensor:
    values = _float32(indices.numel())
    function(_arrays(xs), indices.numpy(), values.numpy(), counts)
    return values


scatter._gather.runs_on("cpu")(partial(_gather, _native.gather))
scatter._gather_marked.runs_on("cpu")(partial(_gather, _native.gather_marked))


def _select(function: Callable[..., None], count: int, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Indices and values of `count` elements, which a C++ function writes to its last arguments."""
    kept, values = _int32(count), _float32(count)
    _call(function, *arguments, kept, values)
    return kept, values


@select._topk.runs_on("cpu")
def topk(xs: list[Tensor], counts: list[int]) -> tuple[Tensor, Tensor]:
    return _select(_native.topk, sum(counts), xs, counts)


@select._topk_in_chunks.runs_on("cpu")
def topk_in_chunks(
    xs: list[Tensor], chunk: int, count: int, last_counts: list[int], total: int
) -> tuple[Tensor, Tensor]:
    return _select(_native.topk_in_chunks, total, xs, chunk, count, last_counts)


@select._above.runs_on("cpu")
def above(xs: list[Tensor], thresholds: list[float]) -> tuple[Tensor, Tensor, list[int]]:
    kept, values, counts = _native.above(_arrays(xs), thresholds)
    return torch.from_numpy(kept), torch.from_numpy(values), counts


@momentum._correct_topk.runs_on("cpu")
def correct_topk(buffers: momentum.Buffers, rule: momentum.Momentum, counts: list[int]) -> tuple[Tensor, Tensor]:
    return _select(_native.momentum_correct_topk, sum(counts), *_buffers(buffers), rule, counts)


@momentum._add_topk.runs_on("cpu")
def add_topk(
    gs: list[Tensor], es: list[Tensor], outs: list[Tensor], factor: float, counts: list[int]
) -> tuple[Tensor, Tensor]:
    return _select(_native.add_topk, sum(counts), gs, es, outs, factor, counts)


# ---- codes ----


@entropy._encode.runs_on("cpu")
def huffman_encode(packed: Tensor, symbols: entropy.Symbols) -> Tensor:
    # One byte for the tag, and eight more, because C++ stores eight bytes at once.
    out = debug.empty(packed.numel() + 9, dtype=torch.uint8, device="cpu")
    return out[: _native.huffman_encode(packed.numpy(), symbols.counts, symbols.bits, out.numpy())]


@entropy._decode.runs_on("cpu")
def huffman_decode(payload: Tensor, symbols: entropy.Symbols) -> Tensor:
    out = debug.empty(symbols.nbytes, dtype=torch.uint8, device="cpu")
    _native.huffman_decode(payload.numpy(), symbols.counts, symbols.bits, out.numpy())
    return out


@words._encode.runs_on("cpu")
def words_encode(words: Tensor, counts: list[int], bits: int, out: Tensor) -> None:
    for part, code in _word_segments(words, out, counts, bits):
        _native.words_encode(part.numpy(), bits, code.numpy())


@words._decode.runs_on("cpu")
def words_decode(payload: Tensor, counts: list[int], bits: int) -> Tensor:
    decoded = _int32(sum(counts))
    for part, code in _word_segments(decoded, payload, counts, bits):
        _native.words_decode(code.numpy(), bits, part.numpy())
    return decoded


def _word_segments(flat: Tensor, codes: Tensor, counts: list[int], bits: int) -> Iterable[tuple[Tensor, Tensor]]:
    """The words and the bytes of each segment."""
    sizes = [words.nbytes(count, bits) for count in counts]
    return zip(flat.split(counts), codes.split(sizes), strict=True) if counts else ()


def _encode_indices(function: Callable[..., Array], indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    return torch.from_numpy(function(indices.numpy(), counts, numels))


def _decode_indices(function: Callable[..., None], payload: Tensor, counts: list[int], numels: list[int]) -> Tensor:
    decoded = _int32(sum(counts))
    function(payload.numpy(), counts, numels, decoded.numpy())
    return decoded


rice._encode.runs_on("cpu")(partial(_encode_indices, _native.rice_encode))
smallest._encode.runs_on("cpu")(partial(_encode_indices, _native.smallest_encode))
indices._decode.runs_on("cpu")(partial(_decode_indices, _native.indices_decode))
rice._decode.runs_on("cpu")(partial(_decode_indices, _native.rice_decode))
smallest._decode.runs_on("cpu")(partial(_decode_indices, _native.smallest_decode))
