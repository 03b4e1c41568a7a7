"""Transforms: the first link of a chain, which changes a tensor's coordinates before a codec sees them.

    chain(Tiles(64), BlockwiseTopK(0.02))      the largest 2 % of each tile of 64 x 64 elements
    chain(DCT(64), BlockwiseTopK(32 / 4096))   the 32 largest of the 4096 frequencies of each tile

A tensor of two or more dimensions is the matrix of its first dimension and all others. It is cut into tiles of `size x size`;
tiles at the right and lower edges may be smaller. Elements are reordered tile by tile: first all whole tiles, then those of
the right edge, the lower edge and the corner. Vectors are cut into runs.

With `divisors` all tiles of a tensor are equal: height and width are the largest divisors, `size` at most, of the matrix's
rows and columns. The codec behind then takes each tile as a block: `BlockwiseTopK` keeps as many of each tile as of each of
its own blocks, or the whole tile if that is smaller.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import torch
from torch import Tensor

from ... import debug, kernels
from ...algorithm import Algorithm, require
from ...kernels import Flag
from ...kernels.flags import in_main_memory
from ...options import require_integer
from ...streams import in_use
from ..traits import Traits
from ..types import Keys, Tensors, as_list
from .groups import CodecGroup, split_groups
from .wrapper import Wrapper

CACHED = 1 << 16
"""Elements whose products, in float64, stay in the second-level cache."""
_EXPONENT = 0x7FF << 52
"""The bits of a float64's power of two."""


@dataclass(frozen=True, repr=False)
class Transform(Algorithm, ABC):
    """An orthonormal change of coordinates, tile by tile; see the module's text."""

    size: int = 64
    divisors: bool = False

    def __post_init__(self) -> None:
        require_integer(f"{type(self).__name__}: size", self.size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The float32 vector of the new coordinates of a float32 tensor of any shape."""
        y = debug.empty(x.numel(), dtype=torch.float32, device=x.device)
        for tiles, coordinates in self._pairs(x, y):
            coordinates.copy_(self._tile(tiles))
        return y

    def inverse(self, y: Tensor, shape: torch.Size) -> Tensor:
        """The float32 tensor of this shape whose new coordinates are `y`."""
        out = debug.empty(shape, dtype=torch.float32, device=y.device)
        for tiles, coordinates in self._pairs(out, y):
            tiles.copy_(self._untile(coordinates))
        return out

    def tile_numel(self, shape: torch.Size) -> int:
        """With `divisors`: elements of each tile of a tensor of this shape; 1 if it has none."""
        n, m = _matrix_shape(shape) if shape.numel() else (1, 1)
        return _largest_divisor(n, self.size) * _largest_divisor(m, self.size)

    @abstractmethod
    def _tile(self, tiles: Tensor) -> Tensor:
        """New coordinates of tiles (rows of tiles, columns of tiles, h, w)."""

    @abstractmethod
    def _untile(self, tiles: Tensor) -> Tensor:
        """The inverse of `_tile`."""

    def _pairs(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of tiles of `x` and of their coordinates in `y`, in main memory so few that products stay in the cache."""
        begin = 0
        for tiles in self._tiles_of(x):
            coordinates = y[begin : begin + tiles.numel()].view(tiles.shape)
            begin += tiles.numel()
            rows = max(1, CACHED // tiles[0].numel()) if in_main_memory(x.device) else len(tiles)
            yield from zip(tiles.split(rows), coordinates.split(rows), strict=True)

    def _tiles_of(self, x: Tensor) -> Iterator[Tensor]:
        """Views of `x`, one for each region with tiles of equal size: (rows of tiles, columns of tiles, h, w)."""
        if not x.numel():
            return
        matrix = x.view(_matrix_shape(x.shape))
        for (top, bottom, h), (left, right, w) in product(*map(self._cuts, matrix.shape)):
            yield matrix[top:bottom, left:right].unflatten(0, (-1, h)).unflatten(2, (-1, w)).transpose(1, 2)

    def _cuts(self, length: int) -> list[tuple[int, int, int]]:
        """Begin, end and size of the tiles along a side of the matrix: of whole tiles, and of a smaller one at the end."""
        if self.divisors:
            return [(0, length, _largest_divisor(length, self.size))]
        whole = length // self.size * self.size
        return [cut for cut in ((0, whole, self.size), (whole, length, length - whole)) if cut[0] < cut[1]]


@dataclass(frozen=True, repr=False)
class Tiles(Transform):
    """The link `Tiles(size)` of a chain: the order of elements tile by tile, so that blocks of `size^2` are tiles.

    A permutation, so nothing is rounded.

    Args:
        size: rows and columns of a tile; higher => fewer, larger tiles.
        divisors: whether all tiles of a tensor are equal, as in SparseLoCo's released code; see the module's text.

    Raises:
        ValueError: size is not a positive integer.

    Source: Sarfi et al. 2025, SparseLoCo, arXiv 2508.15706.

    Example:
        >>> import torch, thinwire as tw
        >>> tw.codec.Tiles(2).forward(torch.arange(8.0).view(2, 4))
        tensor([0., 1., 4., 5., 2., 3., 6., 7.])
    """

    def _tile(self, tiles: Tensor) -> Tensor:
        return tiles

    def _untile(self, tiles: Tensor) -> Tensor:
        return tiles


@dataclass(frozen=True, repr=False)
class DCT(Transform):
    """The link `DCT(size)` of a chain: the orthonormal discrete cosine transform (type II) of each tile.

        Y = B_h X B_w',   B_n[k, i] = sqrt(2/n) cos(pi (i + 1/2) k / n),  row 0 divided by sqrt(2)

    Results have the same bits on every device: sums are exact in float64. So each factor has b bits, 25 for tiles of 64:
    B_n is rounded to multiples of 2^-b, and X and then B_h X of a tile to multiples of 2^(1-b) times the largest power of
    two up to their peak. A finite tensor may overflow to infinities near the end of float32's range.

    Args:
        size: rows and columns of a tile; higher => more of the energy in few frequencies, more arithmetic.
        divisors: whether all tiles of a tensor are equal, as in DeMo's released code; see the module's text.

    Raises:
        ValueError: size is not a positive integer.

    Source: Peng et al. 2024, DeMo, arXiv 2411.19870.

    Example:
        >>> import torch, thinwire as tw
        >>> y = tw.codec.DCT(2).forward(torch.ones(2, 2))
        >>> [round(value, 5) for value in y.tolist()]
        [2.0, 0.0, 0.0, 0.0]
    """

    def _tile(self, tiles: Tensor) -> Tensor:
        left, right = (in_use(_basis(n, tiles.device)) for n in tiles.shape[2:])
        return _product(left, tiles, right.t())

    def _untile(self, tiles: Tensor) -> Tensor:
        left, right = (in_use(_basis(n, tiles.device)) for n in tiles.shape[2:])
        return _product(left.t(), tiles, right)


@dataclass(frozen=True, repr=False)
class Transformed(Wrapper):
    """The result of `chain(transform, codec)`: the payload is that of `codec` for the new coordinates.

    With `divisors`, blocks have the size of the tiles, which differs between segments. Segments whose tiles are equally large
    form a group, and the payload is that of each group, in the order of their first segments.
    """

    transform: Transform

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transform.divisors:
            require(
                self.codec.traits.fixed_size,
                f"{self}: the payloads of {self.codec} vary in size, and divisors=True joins several; use another codec",
            )
            if self.codec.is_constant:
                self.codec.in_blocks(self.transform.size**2)  # refuses tiles that are too large

    @cached_property
    def traits(self) -> Traits:
        inner, name = self.codec.traits, repr(self.transform)
        return inner.through(self.codec, name, ("shared_key",), unbiased=inner.unbiased, needs_shape=True)

    def _links(self) -> tuple[Algorithm, ...]:
        return (self.transform, *self.codec._links())

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        shapes, ys = [x.shape for x in segments], [self.transform.forward(x) for x in segments]
        # No residuals from the inner codec: they would be in the new coordinates.
        payloads = [group.codec.encode_segments(group.of(ys), group.of(keys), None) for group in self._groups(shapes)]
        payload = torch.cat(payloads)
        if residuals is not None:
            decoded = self._decode(payload, shapes, keys if self.traits.shared_key else [])
            for x, sent, residual in zip(segments, decoded, residuals, strict=True):
                torch.sub(x, sent, out=residual)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        for out, part in zip(outs, self._decode(payload, [o.shape for o in outs], keys), strict=True):
            kernels.mix.add([out.flatten()], part.flatten(), own_weight=weight)

    def decode_mean(
        self, payloads: Sequence[Tensor], out: Tensors, weight: float = 1.0, key: Keys | None = None
    ) -> Flag:
        outs = as_list(out)
        self._check_decoding(payloads, outs)
        shapes, keys = [o.shape for o in outs], [] if key is None else as_list(key)
        ys = [debug.empty(o.numel(), dtype=torch.float32, device=o.device) for o in outs]
        for group, parts in split_groups(payloads, self._groups(shapes), [o.numel() for o in outs]):
            group.codec.decode_mean(parts, group.of(ys), weight, group.of(keys) or None)
        for o, y in zip(outs, ys, strict=True):
            o.copy_(self.transform.inverse(y, o.shape))
        # The results again, not the flags of the groups: the inverse may overflow.
        return kernels.all_finite([o.view(-1) for o in outs])

    def segments_nbytes(self, shapes: list[torch.Size]) -> int:
        numels = [shape.numel() for shape in shapes]
        return sum(group.nbytes(numels) for group in self._groups(shapes))

    def section_nbytes(self, size: torch.Size) -> tuple[int, ...] | None:
        # With `divisors` whole groups follow each other, not sections of all segments.
        return None if self.transform.divisors else self.codec.section_nbytes(size.numel())

    def _decode(self, payload: Tensor, shapes: list[torch.Size], keys: list[int]) -> list[Tensor]:
        ys = [torch.zeros(shape.numel(), dtype=torch.float32, device=payload.device) for shape in shapes]
        for group, (part,) in split_groups([payload], self._groups(shapes), [y.numel() for y in ys]):
            group.codec.decode_add_segments(part, group.of(ys), 1.0, group.of(keys))
        return [self.transform.inverse(y, shape) for y, shape in zip(ys, shapes, strict=True)]

    def _groups(self, shapes: list[torch.Size]) -> list[CodecGroup]:
        """The segments of each size of tiles; one group of all without `divisors`."""
        if not self.transform.divisors:
            return [CodecGroup(self.codec, range(len(shapes)))]
        positions: dict[int, list[int]] = {}
        for i, shape in enumerate(shapes):
            positions.setdefault(self.transform.tile_numel(shape), []).append(i)
        return [CodecGroup(self.codec.in_blocks(tile), at) for tile, at in positions.items()]


@lru_cache(maxsize=1024)
def _largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of `n` that is at most `limit`."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


@lru_cache(maxsize=32)
def _basis(n: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II matrix (n, n), one frequency a row, rounded for exact sums. All streams of a GPU share it."""
    k, i = torch.arange(n, device="cpu")[:, None], torch.arange(n, device="cpu")
    basis = torch.cos(((2 * i + 1) * k % (4 * n)).double() * math.pi / (2 * n)) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return torch.round(basis * 2 ** _bits(n)).div(2 ** _bits(n)).to(device)


def _bits(n: int) -> int:
    """Of factors, such that sums of n products with a vector of length 1 are exact: `2 bits + log2(n) / 2 <= 53`."""
    return int((53 - math.log2(n) / 2) / 2)


def _product(left: Tensor, tiles: Tensor, right: Tensor) -> Tensor:
    across = left @ _round(tiles.to(torch.float64, copy=True), len(left))
    product: Tensor = (_round(across, len(right)) @ right).float()
    return product


def _round(x: Tensor, n: int) -> Tensor:
    """Round tiles, in place, to as many bits as the basis of n has, of the largest power of two up to a tile's peak."""
    peaks = x.abs().amax((-2, -1), keepdim=True)
    powers = (peaks.view(torch.int64) & _EXPONENT).view(torch.float64)  # infinite if the peak is not finite
    large = powers * (1.5 * 2 ** (53 - _bits(n)))  # the last bit of such a number is the one to round to
    return x.add_(large).sub_(large)


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // rows
