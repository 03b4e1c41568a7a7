"""The best low-rank approximation of each matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import debug, kernels
from ...options import require_integer
from ...schedule import Schedule
from ...streams import load_solvers
from ..base import Codec
from ..traits import Traits
from ..types import number


@dataclass(frozen=True, repr=False)
class SVD(Codec):
    """Sends the best approximation of rank r: `C(M) = U_r diag(s_r) V_r'`, as the factors `U_r diag(s_r)` and `V_r`.

    A tensor of two or more dimensions is the matrix M (n x m): n is its first dimension, m the product of the others.
    A vector, such as all tensors of a bucket together, is reshaped to a nearly square matrix, padded with zeros. The
    payload has `4 r (n + m)` bytes. A matrix with `r (n + m) >= n m` is sent as it is.

    Biased: use it with a memory such as `ErrorFeedback`. Check: `|M - C(M)|_F^2` is the sum of the squares of all
    singular values but the r largest, and no matrix of rank r is closer to M (Eckart and Young 1936).

    The time to encode grows as `n m min(n, m)`: on one core 20 ms for 256 x 2304, 120 ms for 512 x 4608, and minutes
    for all parameters of a large model in one vector. `PowerSGD` comes close to the same approximation in a fraction of
    that time, and its factors are summable. A finite tensor decodes to infinities if the norm of a row exceeds float32's
    range.

    Args:
        rank: r, number of singular vectors that are sent, 1 or more; lower => smaller messages. May be a schedule.

    Raises:
        ValueError: rank out of range.

    Source: Wang et al. 2018, ATOMO, arXiv 1806.04090, whose spectral form samples singular vectors; Vogels et al. 2019,
    PowerSGD, arXiv 1905.13727, which compares with the best approximation.

    Example:
        >>> import torch, thinwire as tw
        >>> codec, x = tw.codec.SVD(rank=1), torch.outer(torch.arange(1.0, 4.0), torch.ones(4))
        >>> payload = codec.encode(x)
        >>> payload.numel(), bool((codec.decode(payload, x.shape) - x).abs().max() < 1e-5)
        (28, True)
    """

    rank: int | Schedule

    traits = Traits(needs_shape=True)

    def __post_init__(self) -> None:
        require_integer("SVD: rank", self.rank, 1, or_schedule=True)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        values = torch.cat([self._encode_one(x) for x in segments])
        parts = values.split([self._count(x.shape) for x in segments])
        # Not strict: without residuals there is nothing to do.
        for x, part, r in zip(segments, parts, residuals or [], strict=False):
            torch.sub(x, self._decode_one(part, x.shape), out=r)
        return values.view(torch.uint8)

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        parts = kernels.payload_as(payload, torch.float32).split([self._count(o.shape) for o in outs])
        for part, out in zip(parts, outs, strict=True):
            kernels.mix.add([out.flatten()], self._decode_one(part, out.shape).flatten(), own_weight=weight)

    def segments_nbytes(self, shapes: list[torch.Size]) -> int:
        return 4 * sum(map(self._count, shapes))

    def section_nbytes(self, size: torch.Size) -> tuple[int, ...]:
        return (4 * self._count(size),)

    def _count(self, shape: torch.Size) -> int:
        """How many floats are sent for a tensor of this shape."""
        return min(number(self.rank) * sum(matrix_shape(shape)), shape.numel())

    def _encode_one(self, x: Tensor) -> Tensor:
        if self._count(x.shape) == x.numel():
            return x.reshape(-1)
        if not kernels.all_finite([x]):
            nan: Tensor = x.new_full((self._count(x.shape),), math.nan)  # x has no singular vectors
            return nan
        left, right = best_factors(_as_matrix(x), number(self.rank))
        return torch.cat([left.reshape(-1), right.reshape(-1)])

    def _decode_one(self, part: Tensor, shape: torch.Size) -> Tensor:
        if self._count(shape) == shape.numel():
            return part.view(shape)
        (n, m), rank = matrix_shape(shape), number(self.rank)
        left, right = (f.view(-1, rank).t().contiguous() for f in part.split([n * rank, m * rank]))
        return product_of(left, right, shape)


def product_of(p: Tensor, q: Tensor, shape: torch.Size) -> Tensor:
    """The product of factors P' (r, n) and Q' (r, m), without what fills a matrix up, as a tensor of this shape."""
    product = debug.empty(p.shape[1] * q.shape[1], dtype=torch.float32, device=p.device)
    kernels.low_rank.store([product], [p.shape[1]], [p], [q])
    return product[: shape.numel()].view(shape)


def best_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors `U_r diag(s_r)` (n, r) and `V_r` (m, r) of the best approximation of rank r, where r < n, m.

    The singular vectors of the shorter side are eigenvectors of `M M'` or `M' M`. In float64, where squares of float32
    are exact, this finds singular values down to 1e-8 of the largest, below float32's precision, in a quarter of the
    time of an SVD.
    """
    if matrix.shape[0] > matrix.shape[1]:
        right, left = _leading(matrix.double().t(), rank)
    else:
        left, right = _leading(matrix.double(), rank)
        # So far (U, V diag(s)); the scale belongs to the left factor.
        scale = torch.linalg.vector_norm(right, dim=0)
        # A matrix of lower rank may have columns of zeros.
        left, right = left * scale, torch.where(scale > 0, right / scale, 0.0)
    return left.float(), right.float()


def _leading(wide: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` leading left singular vectors U of a wide matrix A, the largest first, and `A' U`."""
    load_solvers(wide.device)
    # `eigh` has the largest eigenvalues last.
    vectors = torch.linalg.eigh(wide @ wide.t()).eigenvectors[:, -rank:].flip(1)
    return vectors, wide.t() @ vectors


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor of this shape becomes."""
    numel = shape.numel()
    columns = numel // max(1, shape[0]) if len(shape) > 1 else math.isqrt(max(0, numel - 1)) + 1
    return (shape[0] if len(shape) > 1 else -(-numel // columns)), columns


def _as_matrix(x: Tensor) -> Tensor:
    n, m = matrix_shape(x.shape)
    return torch.nn.functional.pad(x.reshape(-1), (0, n * m - x.numel())).view(n, m)
