"""A matrix of low rank near each matrix, with its factors in a few bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from ... import kernels
from ...kernels import mix_key
from ...options import require_integer, require_kind
from ...schedule import Schedule
from ..base import Codec, add_sections
from ..quantize.qsgd import QSGD
from ..traits import Traits
from ..types import number
from .svd import matrix_shape, product_of


@dataclass(frozen=True, repr=False)
class LowRank(Codec):
    """Sends `C(M) = P Q'`, a matrix of rank r near M, by subspace iteration, and its factors through another codec:

        Q <- random;   P <- orth(M Q),  Q <- orth(M' P),  `iterations` times;   P <- orth(M Q),  Q <- M' P

    The worker's own matrix is approximated, and nothing is kept between rounds. `PowerSGD` approximates the mean of all
    workers, from the Q of the round before; its factors are summed, so they travel in float32.

    A tensor of two or more dimensions is the matrix M (n x m): n is its first dimension, m the product of the others. A
    vector is reshaped to a nearly square matrix, padded with zeros. The factors go through `values` as r + 1 segments
    for each matrix, all columns of P together and those of Q one by one: P's have one norm, Q's differ by far.

    Biased: use it with a memory such as `ErrorFeedback`. But for what `values` loses, `|M - C(M)|^2` is at least the sum of
    the squares of all singular values but the r largest, which more iterations approach. Encoding takes
    `(4 + 4 iterations) r` operations an element, and the residual and each decoding 2 r.

    Args:
        rank: r; lower => smaller messages. A matrix with fewer rows or columns has as many. May be a schedule.
        values: the codec of the factors.
        iterations: higher => closer to the best approximation, more time.

    Raises:
        ValueError: a field out of range, or a codec that does more than to encode vectors.

    Source: Halko, Martinsson and Tropp 2011, arXiv 0909.4061; Vogels et al. 2019, PowerSGD, arXiv 1905.13727.

    Example:
        >>> import torch, thinwire as tw
        >>> codec, x = tw.codec.LowRank(rank=1), torch.outer(torch.arange(1.0, 65.0), torch.ones(64))
        >>> payload = codec.encode(x)
        >>> payload.numel(), bool((codec.decode(payload, x.shape) - x).norm() < 0.02 * x.norm())
        (136, True)
    """

    rank: int | Schedule
    values: Codec = field(default_factory=lambda: QSGD(bits=8))
    iterations: int = 1

    def __post_init__(self) -> None:
        require_integer("LowRank: rank", self.rank, 1, or_schedule=True)
        require_integer("LowRank: iterations", self.iterations, 0)
        require_kind("LowRank: values", self.values, Codec, "a codec such as QSGD(bits=8)")
        _ = self.traits  # refuses what it does not carry

    @cached_property
    def traits(self) -> Traits:
        return self.values.traits.through(self.values, "LowRank, values", needs_shape=True)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        vectors, numbered = list[Tensor](), list[int]()
        for key, (p, q) in zip(keys, self._factors(segments, keys), strict=True):
            if len(q):  # a matrix of rank 0 sends nothing
                vectors += [p.reshape(-1), *q]
                # From 1 on: 0 is the key of the random start.
                numbered += [mix_key(key, 1 + i, 0) for i in range(1 + len(q))]
        if not vectors:
            return torch.empty(0, dtype=torch.uint8, device=segments[0].device)
        payload = self.values.encode_segments(vectors, numbered, None)
        if residuals is not None:
            # From the payload, not from the factors: the rounding of `values` is lost too.
            for x, product, r in zip(segments, self._products(payload, segments), residuals, strict=True):
                torch.sub(x, product, out=r)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        for out, product in zip(outs, self._products(payload, outs), strict=True):
            kernels.mix.add([out.flatten()], product.flatten(), own_weight=weight)

    def _products(self, payload: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
        """What a payload holds, one matrix after the other."""
        vectors = [
            torch.zeros(n, dtype=torch.float32, device=payload.device) for n in self._numels([x.shape for x in like])
        ]
        if vectors:
            self.values.decode_add_segments(payload, vectors, 1.0, [])
        left = iter(vectors)
        for x in like:
            rank, (n, _) = self._rank(x.shape), matrix_shape(x.shape)
            if not rank:
                yield torch.zeros_like(x)
                continue
            p, q = next(left).view(rank, n), torch.stack(list(islice(left, rank)))
            yield product_of(p, q, x.shape)

    def segments_nbytes(self, shapes: list[torch.Size]) -> int:
        return self.values.segments_nbytes(self._numels(shapes))

    def section_nbytes(self, size: torch.Size) -> tuple[int, ...] | None:
        return add_sections(self.values.section_nbytes(n) for n in self._numels([size]) or [0])

    def _rank(self, shape: torch.Size) -> int:
        return min(number(self.rank), *matrix_shape(shape))

    def _numels(self, shapes: Sequence[torch.Size]) -> list[int]:
        """Elements of the vectors that are sent for matrices of these shapes."""
        found: list[int] = []
        for shape in shapes:
            (n, m), rank = matrix_shape(shape), self._rank(shape)
            found += [rank * n, *[m] * rank] if rank else []
        return found

    def _factors(self, segments: list[Tensor], keys: list[int]) -> list[tuple[Tensor, Tensor]]:
        """P' (r, n) and Q' (r, m) of each matrix; those of one shape are found together."""
        alike: dict[torch.Size, list[int]] = {}
        for i, x in enumerate(segments):
            alike.setdefault(x.shape, []).append(i)
        found = dict[int, tuple[Tensor, Tensor]]()
        for shape, members in alike.items():
            (n, m), rank, first = matrix_shape(shape), self._rank(shape), segments[members[0]]
            ms, ps = first.new_zeros(len(members), n * m), first.new_empty(len(members), rank, n)
            for matrix, i in zip(ms, members, strict=True):
                matrix[: shape.numel()] = segments[i].reshape(-1)
            starts = [kernels.uniform(mix_key(keys[i], 0, 0), rank * m, first.device) for i in members]
            ms, qs = ms.view(len(members), n, m), (2.0 * torch.stack(starts) - 1.0).view(len(members), rank, m)
            # The last Q is not made orthonormal: it carries the singular values.
            for turn in range(self.iterations + 1 if rank else 0):
                qs = qs if turn == 0 else kernels.low_rank.orthonormal(qs)
                ps = kernels.low_rank.orthonormal(qs @ ms.mT)
                qs = ps @ ms
            found |= zip(members, zip(ps, qs, strict=True), strict=True)
        return [found[i] for i in range(len(segments))]
