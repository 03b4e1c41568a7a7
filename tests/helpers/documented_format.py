"""A decoder that follows `docs/wire.md` and nothing else, in Python and NumPy: the second reading of that page.

It imports nothing of thinwire. Of a codec it reads the name of the class and the public fields; each function names the
section that it follows. It decodes what an encoder sends and refuses nothing but bytes that are left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shapes = Sequence[tuple[int, ...]]
THRESHOLDS = ("Threshold", "AdaptiveThreshold")


class Reader:
    """Conventions: fields follow one another, little endian; words of b bits, each segment a stream of whole bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, dtype: str, count: int) -> Array:
        field = np.frombuffer(self.data, dtype, count, self.at)
        self.at += field.nbytes
        return field

    def floats(self, count: int) -> Array:
        return self.take("<f4", count)

    def bits(self, count: int) -> Array:
        return np.unpackbits(self.take("u1", -(-count // 8)), bitorder="little")[:count].astype(np.int64)

    def words(self, count: int, bits: int) -> Array:
        return words_of(self.bits(count * bits), count, bits)


def words_of(stream: Array, count: int, bits: int) -> Array:
    """Conventions: a word's lowest bit comes first."""
    return stream.reshape(count, bits) @ (1 << np.arange(bits))


def decode(codec: Any, payload: bytes, shapes: Shapes, weight: float, keys: Sequence[int]) -> list[Array]:
    """What a payload adds to each segment, flat. `keys`: what `mix_key` makes of the key of each segment."""
    data = Reader(payload)
    with np.errstate(all="ignore"):
        added = part(codec, data, shapes, np.float32(weight), keys)
    assert data.at == len(payload), f"{len(payload) - data.at} bytes are left over"
    return added


def part(
    codec: Any, data: Reader, shapes: Shapes, weight: np.float32, keys: Sequence[int] = (), block: int = 0
) -> list[Array]:
    """The table of codecs: which section says what comes next. `block`: that of a group of `divisors=True`."""
    name, sizes = type(codec).__name__, [math.prod(shape) for shape in shapes]
    if name in ("Identity", "Cast"):
        return floats(getattr(codec, "dtype", "float32"), data, sizes, weight)
    if name == "SVD":
        return svd(codec.rank, data, shapes, weight)
    if name == "LowRank":
        return low_rank(codec, data, shapes, weight)
    if name == "Transformed":
        return transformed(codec, data, shapes, weight, keys)
    if name == "Chain":
        return sparse(codec.sparsifier, codec.values, data, sizes, weight, keys, block)
    if hasattr(codec, "ratio") or name in (*THRESHOLDS, "GapCoded"):
        return sparse(codec, None, data, sizes, weight, keys, block)
    if name == "PerLayer":
        return layers(codec.codecs, data, shapes, weight)
    if name == "DenseLast":
        rest = [n % codec.codec.bucket_size for n in sizes]
        whole = part(codec.codec, data, [(n - r,) for n, r in zip(sizes, rest, strict=True)], weight)
        return [np.concatenate([w, data.floats(r) * weight]) for w, r in zip(whole, rest, strict=True)]
    return few_bits(codec, data, sizes, weight)


def layers(codecs: Sequence[Any], data: Reader, shapes: Shapes, weight: np.float32) -> list[Array]:
    """The table of codecs, `Fitted`: the payload of each distinct codec, all `QSGD` where the first of them stands."""
    groups: dict[Any, dict[Any, list[int]]] = {}
    for i, codec in enumerate(codecs):
        group = "QSGD" if type(codec).__name__ == "QSGD" else codec
        groups.setdefault(group, {}).setdefault(codec, []).append(i)
    added: dict[int, Array] = {}
    for group in groups.values():
        for codec, at in group.items():
            added |= zip(at, part(codec, data, [shapes[i] for i in at], weight), strict=True)
    return [added[i] for i in range(len(codecs))]


def mix_key(seed: int, stream: int, step: int) -> int:
    """Random numbers."""

    def splitmix64(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return splitmix64(splitmix64(splitmix64(seed) ^ stream) ^ step)


def hashed(key: int, i: Array) -> Array:
    """Random numbers: the last `h`; `u` is `(h >> 8) * 2^-24`."""
    k0, k1 = key % 2**32, key >> 32
    h = (i.astype(np.uint64) * 0x9E3779B9 + k0) % 2**32
    h = (h ^ (h >> 16)) * 0x7FEB352D % 2**32
    h = (h ^ (h >> 15) ^ k1) * 0x846CA68B % 2**32
    return (h ^ (h >> 16)).astype(np.int64)


def floats(dtype: str, data: Reader, sizes: list[int], weight: np.float32) -> list[Array]:
    """Floats."""
    scales = data.floats(len(sizes)) if "float8" in dtype else np.ones(len(sizes), np.float32)
    read: Callable[[int], Array] = {
        "float32": lambda n: data.floats(n),
        "float16": lambda n: data.take("<f2", n).astype(np.float32),
        "bfloat16": lambda n: (data.take("<u2", n).astype(np.uint32) << 16).view(np.float32),
        "float8_e5m2": lambda n: (data.take("u1", n).astype(np.uint16) << 8).view(np.float16).astype(np.float32),
        "float8_e4m3fn": lambda n: e4m3fn(data.take("u1", n).astype(np.int64)),
    }[dtype]
    return [read(n) * (scale * weight) for n, scale in zip(sizes, scales, strict=True)]


def e4m3fn(byte: Array) -> Array:
    """Floats: a sign, four bits of exponent with bias 7, three of fraction; no infinity, one NaN of each sign."""
    exponent, fraction = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    return np.where(byte & 127 == 127, np.nan, np.where(byte > 127, -value, value)).astype(np.float32)


def few_bits(codec: Any, data: Reader, sizes: list[int], weight: np.float32) -> list[Array]:
    """Few bits an element: scales or means of all segments, then the codes of all."""
    huffman = type(codec).__name__ == "HuffmanCoded"
    codec = codec.codec if huffman else codec
    ternary, bucket = type(codec).__name__ == "TernGrad", getattr(codec, "bucket_size", None)
    per_bucket, bits, value = code_of(codec)
    per_segment = type(codec).__name__ in ("SignNorm", "SignSGD")
    buckets = [1 if per_segment else -(-n // (bucket or n)) if n else 0 for n in sizes]
    tables = [data.floats(count * per_bucket).reshape(count, per_bucket) for count in buckets]
    counts = [-(-n // 5) for n in sizes] if ternary else sizes
    codes = huffman_words(data, counts, bits) if huffman else [data.words(n, bits) for n in counts]
    added = []
    for code, n, table in zip(codes, sizes, tables, strict=True):
        code = ternary_digits(code)[:n] if ternary else code
        added.append(value(code, table[np.arange(n) // (bucket or max(n, 1))].T, weight))
    return added


def code_of(codec: Any) -> tuple[int, int, Callable[[Array, Array, np.float32], Array]]:
    """Few bits an element, the first table: floats a bucket, bits a code, what a code `c` adds with the floats `t`."""
    name = type(codec).__name__
    if name == "QSGD":
        m = 2 * codec.levels if codec.levels else 2**codec.bits - (2 if codec.zero else 1)
        return 1, m.bit_length(), lambda c, t, weight: np.float32(2 * c - m) * (t[0] / np.float32(m) * weight)
    if name == "TernGrad":
        return 1, 8, lambda c, t, weight: np.float32(c - 1) * (t[0] * weight)
    if name in ("SignNorm", "SignSGD"):
        return 1, 1, lambda c, t, weight: np.float32(1 - 2 * c) * (t[0] * weight)
    if name == "OneBit":
        return 2, 1, lambda c, t, weight: np.where(c, t[0], t[1]) * weight
    if name == "BinMeans":
        return 2**codec.bits, codec.bits, lambda c, t, weight: t[c, np.arange(len(c))] * weight
    if name == "NaturalCompression":
        return 0, 9, lambda c, t, weight: (c.astype(np.uint32) << 23).view(np.float32) * weight
    levels = levels_of(codec)
    bits = (len(levels) - 1).bit_length()
    return 1, bits, lambda c, t, weight: levels[np.minimum(c, len(levels) - 1)] * (t[0] * weight)


@lru_cache
def levels_of(codec: Any) -> Array:
    """To levels, the second table."""
    name = type(codec).__name__
    if name == "Quantize":
        return np.float32(codec.levels)
    if name == "Float4":
        e2m1 = [m / 6 for m in (0.5, 1, 1.5, 2, 3, 4, 6)]
        return both_signs([0, *(e2m1 if codec.format == "e2m1" else [2.0**-j for j in range(7)])])
    if name == "Dynamic8":
        parts = [(i, 2 ** (6 - e), 10.0**-e) for e in range(7) for i in range(2 ** (6 - e))]
        magnitudes = sorted((0.1 + 0.9 * (i + 0.5) / equal) * power for i, equal, power in parts)
        return both_signs([0, *magnitudes[:-1], 1])
    zero = name != "AMQ" and codec.zero

    def powers(p: float) -> Array:
        return both_signs([0] * zero + [p**j for j in range(2 ** (codec.bits - 1) - zero)])

    p = getattr(codec, "multiplier", None)
    if p is None:
        sd = codec.bucket_size**-0.5
        if codec.norm == "max":
            sd = 1 / NormalDist().inv_cdf(1 - 1 / (2 * (codec.bucket_size + 1)))
        p = min((i / 100 for i in range(1, 100)), key=lambda p: psi(powers(p).tolist(), sd))
    return powers(p)


def both_signs(magnitudes: list[float]) -> Array:
    """To levels: in ascending order, zero once."""
    return np.float32(sorted({sign * m for m in magnitudes for sign in (-1, 1)}))


def psi(levels: list[float], sd: float) -> float:
    """To levels: Psi of a normal distribution cut off to [-1, 1], but for a constant factor."""
    normal, total = NormalDist(0, sd), 0.0
    for a, b in zip(levels[:-1], levels[1:], strict=True):
        mass, at_a, at_b = normal.cdf(b) - normal.cdf(a), normal.pdf(a), normal.pdf(b)
        total += (a + b) * sd**2 * (at_a - at_b) - sd**2 * (mass + a * at_a - b * at_b) - a * b * mass
    return total


def ternary_digits(words: Array, base: int = 3, digits: int = 5) -> Array:
    """Ternary: blocks of 64 words, in each the first digits of all words, then the second ones, and so on."""
    blocks = [words[start : start + 64] for start in range(0, len(words), 64)]
    return np.concatenate(
        [np.zeros(0, np.int64), *(block // base**k % base for block in blocks for k in range(digits))]
    )


def huffman_words(data: Reader, counts: list[int], bits: int) -> list[Array]:
    """Huffman-coded symbols."""
    if data.take("u1", 1)[0] == 0:
        return [data.words(n, bits) for n in counts]
    symbols, code, before = {}, 0, 0
    for length, symbol in sorted((length, s) for s, length in enumerate(data.words(2**bits, 4).tolist()) if length):
        code, before = code << (length - before), length
        symbols[format(code, f"0{length}b")] = symbol
        code += 1
    stream, found, first, end = "".join(map(str, rest_of(data).tolist())), [], 0, 1
    while len(found) < sum(counts):
        if stream[first:end] in symbols:
            found.append(symbols[stream[first:end]])
            first = end
        end += 1
    data.at += -(-first // 8)
    return np.split(np.array(found, np.int64), np.cumsum(counts)[:-1])


def rest_of(data: Reader) -> Array:
    """The bits that are left, where only reading them tells where they end."""
    return np.unpackbits(np.frombuffer(data.data, "u1", -1, data.at), bitorder="little").astype(np.int64)


def sparse(
    codec: Any, values: Any, data: Reader, sizes: list[int], weight: np.float32, keys: Sequence[int], block: int
) -> list[Array]:
    """Sparse payloads: values, indices, their bytes, counts."""
    rice = type(codec).__name__ == "GapCoded"
    codec = codec.sparsifier if rice else codec
    name = type(codec).__name__
    units, length = sizes, [1] * len(sizes)
    if name == "CoarseGrainedTopK":
        units, length = [-(-n // codec.chunk) for n in sizes], [min(codec.chunk, n) for n in sizes]
    counted = name in THRESHOLDS or getattr(codec, "sample", None) is not None
    if counted:
        kept = np.frombuffer(data.data[-4 * len(sizes) :], "<u4").tolist()
    elif name == "BlockwiseTopK":
        block = block or codec.block
        each = min(block, kept_of(codec.ratio, codec.block))
        kept = [n // block * each + kept_of(codec.ratio, n % block) for n in units]
    else:
        kept = [kept_of(codec.ratio, n) for n in units]
    flat = [(k * one,) for k, one in zip(kept, length, strict=True)]
    found = part(values, data, flat, np.float32(1)) if values else [data.floats(k) for (k,) in flat]
    if name == "RandomK":
        keys = keys if codec.shared else data.take("<u8", len(sizes)).tolist()
        indices = [random_subset(*of) for of in zip(keys, kept, units, strict=True)]
    elif name == "BlockwiseTopK":
        indices = [block_indices(data, k, n, each, block) for k, n in zip(kept, units, strict=True)]
    else:
        indices = read_indices(codec, rice, data, kept, units)
    data.take("<u4", len(sizes) * counted)
    added = []
    for n, m, one, index, value in zip(sizes, units, length, indices, found, strict=True):
        rows = np.zeros((m, one), np.float32)
        rows[index] = value.reshape(len(index), one) * weight
        added.append(rows.reshape(-1)[:n])
    return added


def read_indices(codec: Any, rice: bool, data: Reader, kept: list[int], sizes: list[int]) -> list[Array]:
    """Sparse payloads: the indices of all segments, and their bytes where these are told."""
    auto, start = getattr(codec, "indices", "") == "auto", data.at
    read = rice_indices if rice else auto_indices if auto else plain_indices
    indices = [read(data, k, n) for k, n in zip(kept, sizes, strict=True)]
    if auto or rice:
        assert data.at - start == data.take("<u4", 1)[0], "the bytes of the indices are not those that are told"
    return indices


def kept_of(ratio: float, n: int) -> int:
    """Sparse payloads: `k`."""
    return min(n, max(1, math.ceil(ratio * n * (1 - 1e-12))))


def elias_fano(k: int, n: int) -> tuple[int, int]:
    """Indices: the least `size(l)`, in bits, and the smallest `l` that has it."""
    return min((k * (low + 1) + ((n - 1) >> low), low) for low in range(n.bit_length()))


def plain_indices(data: Reader, k: int, n: int) -> Array:
    """Indices: Elias-Fano's code or a bitmap."""
    if k in (0, n):
        return np.arange(k)
    size, low = elias_fano(k, n)
    if size >= n:
        return np.flatnonzero(data.bits(n))
    stream, marks = data.bits(size), k + ((n - 1) >> low)
    return ((np.flatnonzero(stream[:marks]) - np.arange(k)) << low) + words_of(stream[marks:], k, low)


def auto_indices(data: Reader, k: int, n: int) -> Array:
    """Indices, `TopK(indices="auto")`: a byte, then the code above or packed gaps."""
    if data.take("u1", 1)[0] == 0:
        return plain_indices(data, k, n)
    blocks = [data.words(min(128, k - first), int(data.take("u1", 1)[0])) for first in range(0, k, 128)]
    return np.cumsum(np.concatenate(blocks) + 1) - 1


def rice_indices(data: Reader, k: int, n: int) -> Array:
    """Indices, Rice."""
    if k in (0, n):
        return np.arange(k)
    low = min(range(31), key=lambda low: k * (low + 1) + ((n - k) >> low))
    stream = rest_of(data)
    marks = np.flatnonzero(stream)[:k]
    end = marks[-1] + 1
    data.at += -(-int(end + k * low) // 8)
    gaps = ((np.diff(marks, prepend=-1) - 1) << low) + words_of(stream[end : end + k * low], k, low)
    return np.cumsum(gaps + 1) - 1


def block_indices(data: Reader, k: int, n: int, each: int, block: int) -> Array:
    """Indices, `BlockwiseTopK`: positions in blocks, where these are fewer bytes than the code above."""
    bits = (block - 1).bit_length()
    if k in (0, n) or -(-k * bits // 8) >= -(-min(elias_fano(k, n)[0], n) // 8):
        return plain_indices(data, k, n)
    return data.words(k, bits) + np.arange(k) // each * block


@lru_cache
def random_subset(key: int, k: int, n: int) -> Array:
    """Random subsets."""
    b = max(8, (n - 1).bit_length())
    b_low, b_high = b // 2, b - b // 2
    j = np.arange(k if 2 * k <= n else n - k)
    again = np.ones(len(j), bool)
    while again.any():
        high, low = j[again] >> b_low, j[again] % 2**b_low
        for r in (0, 2, 4):
            high = high ^ hashed(key, r * 65536 + low) >> (32 - b_high)
            low = low ^ hashed(key, (r + 1) * 65536 + high) >> (32 - b_low)
        j[again] = (high << b_low) + low
        again = j >= n
    return np.sort(j) if 2 * k <= n else np.setdiff1d(np.arange(n), j)


def transformed(codec: Any, data: Reader, shapes: Shapes, weight: np.float32, keys: Sequence[int]) -> list[Array]:
    """Transforms."""
    size, dct = codec.transform.size, type(codec.transform).__name__ == "DCT"
    sides = [(shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (1, math.prod(shape)) for shape in shapes]
    areas, tiles = [], []
    for rows, columns in sides:
        h, w = (size, size)
        if codec.transform.divisors:
            h, w = (largest_divisor(rows, size), largest_divisor(columns, size)) if rows * columns else (1, 1)
        areas.append(h * w if codec.transform.divisors else 0)
        tiles.append(tiles_of(np.arange(rows * columns).reshape(rows, columns), h, w))
    added = [np.zeros(rows * columns, np.float32) for rows, columns in sides]
    for area in dict.fromkeys(areas):
        group = [i for i, other in enumerate(areas) if other == area]
        lengths, group_keys = [(added[i].size,) for i in group], [keys[i] for i in group if keys]
        for i, y in zip(group, part(codec.codec, data, lengths, np.float32(1), group_keys, area), strict=True):
            first = 0
            for tile in tiles[i]:
                x = y[first : first + tile.size].reshape(tile.shape)
                first += tile.size
                if dct:
                    across = basis(tile.shape[0]).T @ short(x, tile.shape[0])
                    x = np.float32(short(across, tile.shape[1]) @ basis(tile.shape[1]))
                added[i][tile] = x * weight
    return added


def tiles_of(grid: Array, h: int, w: int) -> Iterator[Array]:
    """Transforms: whole tiles, the right edge, the lower edge, the corner, each tile by tile and row by row."""
    r, c = grid.shape[0] // h * h, grid.shape[1] // w * w
    for region in (grid[:r, :c], grid[:r, c:], grid[r:, :c], grid[r:, c:]):
        for i in range(0, region.shape[0] if region.size else 0, h):
            yield from (region[i : i + h, j : j + w] for j in range(0, region.shape[1], w))


def largest_divisor(n: int, limit: int) -> int:
    """Transforms: how high or wide tiles are with `divisors=True`."""
    return max(d for d in range(1, limit + 1) if n % d == 0)


def basis(n: int) -> Array:
    """Transforms: `B_n`, in multiples of `2^-b`."""
    k, i = np.arange(n)[:, None], np.arange(n)
    b = np.sqrt(2 / n) * np.cos(np.pi * (i + 0.5) * k / n)
    b[0] /= np.sqrt(2)
    return np.rint(b * 2.0 ** num_bits(n)) * 2.0 ** -num_bits(n)


def num_bits(n: int) -> int:
    """Transforms: `b`."""
    return math.floor((53 - math.log2(n) / 2) / 2)


def short(x: Array, n: int) -> Array:
    """Transforms: in multiples of `2^(1 - b) p`."""
    x, peak = np.float64(x), np.abs(x).max()
    if peak == 0 or not np.isfinite(peak):
        return x * np.where(np.isfinite(peak), 1.0, np.nan)
    unit = 2.0 ** (math.frexp(peak)[1] - num_bits(n))
    return np.rint(x / unit) * unit


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Low-rank factors: rows and columns of a segment."""
    if len(shape) >= 2:
        return shape[0], math.prod(shape[1:])
    columns = math.ceil(math.sqrt(math.prod(shape)))
    return -(-math.prod(shape) // max(columns, 1)), columns


def product(left: Array, right: Array) -> Array:
    """Low-rank factors, vector by vector: outer products are added up in order, and each operation is rounded."""
    total = np.outer(left[0], right[0])
    for a, b in zip(left[1:], right[1:], strict=True):
        total += np.outer(a, b)
    return total


def svd(r: int, data: Reader, shapes: Shapes, weight: np.float32) -> list[Array]:
    """Low-rank factors, `SVD`."""
    added = []
    for shape in shapes:
        (n, m), size = matrix(shape), math.prod(shape)
        if r * (n + m) < size:
            left, right = data.floats(n * r).reshape(n, r), data.floats(m * r).reshape(m, r)
            added.append(weight * product(left.T, right.T).ravel()[:size])
        else:
            added.append(weight * data.floats(size))
    return added


def low_rank(codec: Any, data: Reader, shapes: Shapes, weight: np.float32) -> list[Array]:
    """Low-rank factors, `LowRank`."""
    sides = [(*matrix(shape), min(codec.rank, *matrix(shape))) for shape in shapes]
    factors = iter(
        part(codec.values, data, [s for n, m, r in sides if r for s in [(n * r,), *[(m,)] * r]], np.float32(1))
    )
    added = []
    for shape, (n, _, r) in zip(shapes, sides, strict=True):
        p = next(factors).reshape(r, n) if r else np.zeros((1, 0), np.float32)
        q = np.stack([next(factors) for _ in range(r)]) if r else p
        added.append(weight * product(p, q).ravel()[: math.prod(shape)])
    return added


def added_on_the_wire(
    codec: Any, total: Array, agreed: Array, sizes: list[int], workers: int, weight: float
) -> list[Array]:
    """Ternary and Chosen chunks: what a sum of payloads adds, with the scales, or sums of norms, agreed on."""
    added: list[Array] = []
    first = start = 0
    if type(codec).__name__ == "CoarseGrainedTopK":
        for n in sizes:
            m, one = -(-n // codec.chunk), min(codec.chunk, n)
            k = kept_of(codec.ratio, m)
            chosen = np.sort(np.argsort(-agreed[start : start + m], kind="stable")[:k])
            rows = np.zeros((m, one), np.float32)
            rows[chosen] = total[first : first + k * one].reshape(k, one) * np.float32(weight)
            added.append(rows.reshape(-1)[:n])
            start, first = start + m, first + k * one
        return added
    base = 2 * workers + 1 if workers > 1 else 3
    digits = next(d for d in range(31, 0, -1) if base**d <= 2**31) if workers > 1 else 5
    for n in sizes:
        bucket = codec.bucket_size or n
        scale, words = agreed[start : start + -(-n // bucket)], total[first : first + -(-n // digits)].astype(np.int64)
        value = ternary_digits(words, base, digits)[:n] - (workers if workers > 1 else 1)
        added.append(np.float32(value) * (scale[np.arange(n) // bucket] * np.float32(weight)))
        start, first = start + len(scale), first + len(words)
    return added


def regions_of(numels: list[int], kept: list[int], workers: int) -> list[list[tuple[int, int, int, int]]]:
    """Messages of a sparse all-reduce: of each owner the pieces (tensor, first position, positions, kept)."""
    regions, total = [], sum(kept)
    for owner in range(workers):
        pieces, before = [], 0
        for s, (n, k) in enumerate(zip(numels, kept, strict=True)):
            first, last = (min(max(r * total // workers - before, 0), k) for r in (owner, owner + 1))
            if first < last:
                pieces.append((s, first * n // k, last * n // k - first * n // k, last - first))
            before += k
        regions.append(pieces)
    return regions


def region_message(
    codec: Any,
    payload: bytes,
    numels: list[int],
    region: list[tuple[int, int, int, int]],
    counts: list[int],
    dense: int,
) -> tuple[Array, list[tuple[int, Array, Array]]]:
    """Messages of a sparse all-reduce, steps 2 and 3: the dense part, and of each piece tensor, coordinates, values."""
    data, values, rice = Reader(payload), None, False
    if type(codec).__name__ == "Chain":
        codec, values = codec.sparsifier, codec.values
    if type(codec).__name__ == "GapCoded":
        codec, rice = codec.sparsifier, True
    vector = data.floats(dense)
    shapes = [(k,) for k in counts]
    found = part(values, data, shapes, np.float32(1)) if values else [data.floats(k) for k in counts]
    indices = read_indices(codec, rice, data, counts, [numel for _, _, numel, _ in region])
    assert data.at == len(payload)
    pieces = []
    for (s, start, _, _), index, value in zip(region, indices, found, strict=True):
        pieces.append((s, unshuffled(index + start, numels[s]), value))
    return vector, pieces


def unshuffled(positions: Array, n: int) -> Array:
    """Messages of a sparse all-reduce: the elements that have these positions."""
    a = round(n * 0.6180339887498949)
    while math.gcd(a, n) != 1:
        a += 1
    return positions * pow(a, -1, n) % n
