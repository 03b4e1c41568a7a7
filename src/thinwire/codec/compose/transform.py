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
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import Algorithm, require
from ...kernels import Flag
from ...options import require_integer
from ..base import Codec
from ..traits import Traits
from ..types import Key, as_list
from .wrapper import Wrapper

ItemT = TypeVar("ItemT")


class Transform(Algorithm, ABC):
    """An orthonormal change of coordinates, tile by tile; see the module's text."""

    size: int
    divisors: bool

    def forward(self, x: Tensor) -> Tensor:
        """The float32 vector of the new coordinates of a float32 tensor of any shape."""
        if x.numel() == 0:
            return x.reshape(-1)
        matrix = _as_matrix(x)
        parts = [
            self._tile(_tiles(matrix[rows, cols], h, w)).reshape(-1) for rows, cols, h, w in self._regions(x.shape)
        ]
        return torch.cat(parts)

    def inverse(self, y: Tensor, shape: torch.Size) -> Tensor:
        """The float32 tensor of this shape whose new coordinates are `y`."""
        out = torch.empty(shape, dtype=torch.float32, device=y.device)
        if y.numel() == 0:
            return out
        matrix, begin = _as_matrix(out), 0
        for rows, cols, h, w in self._regions(shape):
            region = matrix[rows, cols]
            tiles = y[begin : begin + region.numel()].view(region.shape[0] // h, region.shape[1] // w, h, w)
            region.copy_(self._untile(tiles).permute(0, 2, 1, 3).reshape(region.shape))
            begin += region.numel()
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

    def _regions(self, shape: torch.Size) -> Iterator[tuple[slice, slice, int, int]]:
        """Rows, columns and the size of the tiles, of each region with tiles of equal size that is not empty."""
        n, m = _matrix_shape(shape)
        if self.divisors:
            yield slice(0, n), slice(0, m), _largest_divisor(n, self.size), _largest_divisor(m, self.size)
            return
        whole_n, whole_m = n // self.size * self.size, m // self.size * self.size
        for rows, height in ((slice(0, whole_n), self.size), (slice(whole_n, n), n - whole_n)):
            for cols, width in ((slice(0, whole_m), self.size), (slice(whole_m, m), m - whole_m)):
                if rows.stop > rows.start and cols.stop > cols.start:
                    yield rows, cols, height, width


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

    size: int = 64
    divisors: bool = False

    def __post_init__(self) -> None:
        _check_size(self)

    def _tile(self, tiles: Tensor) -> Tensor:
        return tiles

    def _untile(self, tiles: Tensor) -> Tensor:
        return tiles


@dataclass(frozen=True, repr=False)
class DCT(Transform):
    """The link `DCT(size)` of a chain: the orthonormal discrete cosine transform (type II) of each tile.

        Y = B_h X B_w',   B_n[k, i] = sqrt(2/n) cos(pi (i + 1/2) k / n),  row 0 divided by sqrt(2)

    Products are taken in float64 and rounded to float32. Equal bytes on all workers need the same processor type and build
    of PyTorch, as for all matrix products. A finite tensor may overflow to infinities near the end of float32's range.

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

    size: int = 64
    divisors: bool = False

    def __post_init__(self) -> None:
        _check_size(self)

    def _tile(self, tiles: Tensor) -> Tensor:
        left, right = (_basis(n).to(tiles.device) for n in tiles.shape[2:])
        product: Tensor = (left @ tiles.double() @ right.t()).float()
        return product

    def _untile(self, tiles: Tensor) -> Tensor:
        left, right = (_basis(n).to(tiles.device) for n in tiles.shape[2:])
        product: Tensor = (left.t() @ tiles.double() @ right).float()
        return product


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
            self.codec.in_blocks(self.transform.size**2)  # refuses tiles that are too large

    @cached_property
    def traits(self) -> Traits:
        inner, name = self.codec.traits, repr(self.transform)
        return inner.through(self.codec, name, ("shared_key",), unbiased=inner.unbiased, needs_shape=True)

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self._links()))})"

    def _links(self) -> tuple[Algorithm, ...]:
        return (self.transform, *self.codec._links())

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        shapes, ys = [x.shape for x in segments], [self.transform.forward(x) for x in segments]
        payloads = [group.codec.encode_segments(group.of(ys), group.of(keys), None) for group in self._groups(shapes)]
        payload = torch.cat(payloads)
        if residuals is not None:
            decoded = self._decode(payload, shapes, keys if self.traits.shared_key else [])
            for x, sent, residual in zip(segments, decoded, residuals, strict=True):
                torch.sub(x, sent, out=residual)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        for out, part in zip(outs, self._decode(payload, [o.shape for o in outs], keys), strict=True):
            out.add_(part, alpha=weight)

    def decode_mean(
        self,
        payloads: Sequence[Tensor],
        out: Tensor | Sequence[Tensor],
        weight: float = 1.0,
        key: Key | Sequence[Key] | None = None,
    ) -> Flag:
        outs = as_list(out)
        self._check_decoding(payloads, outs)
        shapes, keys = [o.shape for o in outs], [] if key is None else as_list(key)
        ys, groups = [torch.empty(o.numel(), device=o.device) for o in outs], self._groups(shapes)
        for group, parts in zip(groups, zip(*(_split(p, groups) for p in payloads), strict=True), strict=True):
            group.codec.decode_mean(parts, group.of(ys), weight, group.of(keys) or None)
        for o, y in zip(outs, ys, strict=True):
            o.copy_(self.transform.inverse(y, o.shape))
        return kernels.all_finite([o.view(-1) for o in outs])

    def segments_nbytes(self, shapes: list[torch.Size]) -> int:
        return sum(group.nbytes for group in self._groups(shapes))

    def section_nbytes(self, size: torch.Size) -> tuple[int, ...] | None:
        return None if self.transform.divisors else self.codec.section_nbytes(size.numel())

    def _decode(self, payload: Tensor, shapes: list[torch.Size], keys: list[int]) -> list[Tensor]:
        ys = [torch.zeros(shape.numel(), dtype=torch.float32, device=payload.device) for shape in shapes]
        groups = self._groups(shapes)
        for group, part in zip(groups, _split(payload, groups), strict=True):
            group.codec.decode_add_segments(part, group.of(ys), 1.0, group.of(keys))
        return [self.transform.inverse(y, shape) for y, shape in zip(ys, shapes, strict=True)]

    def _groups(self, shapes: list[torch.Size]) -> list[_Group]:
        """The segments of each size of tiles; one group of all without `divisors`."""
        numels = [shape.numel() for shape in shapes]
        if not self.transform.divisors:
            return [_Group(self.codec, range(len(shapes)), self.codec.segments_nbytes(numels))]
        places: dict[int, list[int]] = {}
        for i, shape in enumerate(shapes):
            places.setdefault(self.transform.tile_numel(shape), []).append(i)
        codecs = [self.codec.in_blocks(tile) for tile in places]
        return [
            _Group(codec, at, codec.segments_nbytes([numels[i] for i in at]))
            for codec, at in zip(codecs, places.values(), strict=True)
        ]


class _Group(NamedTuple):
    """Segments that one codec encodes.

    Attributes:
        codec: with blocks of the size of their tiles.
        at: their numbers.
        nbytes: of their payload, or an upper bound.
    """

    codec: Codec
    at: Sequence[int]
    nbytes: int

    def of(self, items: list[ItemT]) -> list[ItemT]:
        """Their items, of those of all segments; none of none."""
        return [items[i] for i in self.at] if items else []


def _split(payload: Tensor, groups: list[_Group]) -> Sequence[Tensor]:
    """The payload of each group. One group alone may have a payload of another size than the bound."""
    return (payload,) if len(groups) == 1 else payload.split([group.nbytes for group in groups])


@lru_cache(maxsize=1024)
def _largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of `n` that is at most `limit`."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


@lru_cache(maxsize=32)
def _basis(n: int) -> Tensor:
    """The orthonormal DCT-II matrix (n, n) in float64, one frequency a row."""
    k = torch.arange(n, dtype=torch.float64, device="cpu")[:, None]
    i = torch.arange(n, dtype=torch.float64, device="cpu")[None]
    basis = torch.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis


def _tiles(region: Tensor, height: int, width: int) -> Tensor:
    """(rows of tiles, columns of tiles, height, width)."""
    n, m = region.shape
    return region.reshape(n // height, height, m // width, width).permute(0, 2, 1, 3)


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // rows


def _as_matrix(x: Tensor) -> Tensor:
    return x.view(_matrix_shape(x.shape))


def _check_size(transform: Transform) -> None:
    size = transform.size
    name = type(transform).__name__
    require_integer(f"{name}: size", size, 1)
