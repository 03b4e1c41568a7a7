"""The base of all sparsifiers: they keep few coordinates, and the payload is [their values][their support].

The *support* tells the receiver which coordinates are kept. It is at the end of the payload and is read backwards:

    [coded indices][number of kept coordinates of each segment, uint32, unless the sizes determine it]

`payload.SparseCodec` selects coordinates, sends their values through a codec and writes the support. The codec is
`Identity`, or the second link of a chain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ... import debug, kernels
from ...options import require_number
from ...schedule import Schedule
from ..base import Codec
from ..dense.cast import Identity
from ..traits import Traits
from ..types import Selection
from .payload import SparseCodec, split_counts, tail


class Sparsifier(SparseCodec):
    """A codec that keeps some coordinates; see the module's docstring.

    `chain(sparsifier, codec)` sends the values through another codec.
    """

    @property
    def counts_travel(self) -> bool:
        """Whether the number of kept coordinates depends on the data."""
        return False

    @cached_property
    def traits(self) -> Traits:
        return Traits(fixed_size=not self.counts_travel)

    @abstractmethod
    def count(self, numel: int) -> int:
        """How many of `numel` coordinates are kept; an upper bound if `counts_travel`."""

    @abstractmethod
    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        """Choose coordinates of float32 vectors; `keys` has a 64-bit random key for each."""

    def gains(self, numels: list[int]) -> list[float] | None:
        """The factor of the kept values of each segment, by its number of elements; None if all are 1."""
        return None

    @property
    def codes_plainly(self) -> bool:
        """Whether indices are coded by `pack_indices` of this base class, so that `Rice` may code them instead."""
        return False

    def selector_and_values(self) -> tuple[Sparsifier, Codec]:
        return self, Identity()

    # ---- how the support is coded; a sparsifier with another layout overrides all of it ----

    def write_support(self, indices: Tensor, counts: list[int], numels: list[int], keys: list[int]) -> Tensor:
        """Code the support: the bytes at the end of a payload."""
        codes = self.pack_indices(indices, counts, numels)
        if not self.counts_travel:
            return codes
        return torch.cat([codes, torch.tensor(counts, dtype=torch.int32, device=codes.device).view(torch.uint8)])

    def read_support(self, payload: Tensor, numels: list[int], keys: list[int]) -> tuple[Tensor, list[int], int]:
        """Decode the support: indices, counts, and its number of bytes at the end of the payload."""
        counts = [self.count(n) for n in numels]
        if self.counts_travel:
            payload, counts = split_counts(payload, numels)
        indices, nbytes = self.unpack_indices(payload, counts, numels)
        return indices, counts, nbytes + 4 * len(counts) * self.counts_travel

    def read_supports(
        self, payloads: Sequence[Tensor], numels: list[int], keys: list[int]
    ) -> list[tuple[Tensor, list[int], int]]:
        """`read_support` of each payload: supports of one size are read together, as one of many segments."""
        if not self.traits.fixed_size:
            return [self.read_support(payload, numels, keys) for payload in payloads]
        num, counts = len(payloads), [self.count(n) for n in numels]
        nbytes = self.support_nbytes(counts, numels)
        together = torch.cat([tail(payload, nbytes) for payload in payloads])
        # One call of the decoder, whatever the number of workers.
        indices, _, _ = self.read_support(together, numels * num, keys * num)
        return [(part, counts, nbytes) for part in indices.view(num, sum(counts))]

    def support_nbytes(self, counts: list[int], numels: list[int]) -> int:
        """Bytes of the support, or an upper bound."""
        return self.indices_nbytes(counts, numels) + 4 * len(counts) * self.counts_travel

    def pack_indices(self, indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
        """Code the indices; the default is the fixed-size code of `kernels.indices.encode`."""
        codes = debug.empty(self.indices_nbytes(counts, numels), dtype=torch.uint8, device=indices.device)
        kernels.indices.encode(indices, counts, numels, codes)
        return codes

    def unpack_indices(self, payload: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, int]:
        """Decode the indices; also return their number of bytes at the end of the payload."""
        nbytes = self.indices_nbytes(counts, numels)
        return kernels.indices.decode(tail(payload, nbytes), counts, numels), nbytes

    def indices_nbytes(self, counts: list[int], numels: list[int]) -> int:
        """Bytes of the coded indices, or an upper bound."""
        return sum(kernels.indices.nbytes(k, n) for k, n in zip(counts, numels, strict=True))


def check_ratio(codec: Codec, ratio: float | Schedule) -> None:
    """Raise ValueError unless `ratio` is a fraction, or a schedule of fractions."""
    name = type(codec).__name__
    require_number(
        f"{name}: ratio", ratio, above=0, most=1, or_schedule=True, hint="; 0.01 keeps one coordinate in a hundred"
    )
