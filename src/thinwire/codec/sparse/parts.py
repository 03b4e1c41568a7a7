"""What a sparse all-reduce needs of a codec: who selects, and how coordinates and values travel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..base import Codec
from ..types import Selection
from .base import Sparsifier
from .payload import decode_values, encode_sparse, encode_values


class SparseParts(NamedTuple):
    """A sparsifying codec, taken apart. Its messages hold any number of coordinates: `[values][coded indices]`.

    Attributes:
        sparsifier: selects what a worker sends.
        coding: codes indices, with `pack_indices`.
        values: carries the values.
        is_topk: whether the sparsifier keeps exactly the largest elements of each segment.

    Example:
        >>> import torch, thinwire as tw
        >>> parts = tw.TopK(0.1).traits.sparse
        >>> indices, values = torch.tensor([3, 7], dtype=torch.int32), torch.tensor([1.0, 2.0])
        >>> message, lost = parts.encode(indices, values, counts=[2], numels=[100], keys=[0])
        >>> message.numel() == parts.nbytes([2], [100]), parts.decode(message, [2], [100])[1]
        (True, tensor([1., 2.]))
    """

    sparsifier: Sparsifier
    coding: Sparsifier
    values: Codec
    is_topk: bool = False

    @property
    def fixed_size(self) -> bool:
        """Whether the size of a message follows from the counts."""
        return self.values.traits.fixed_size and self.coding.codes_plainly

    def topk_counts(self, numels: list[int]) -> list[int] | None:
        """How many elements are kept of segments of these sizes, if these are exactly the largest; else None.

        A memory can then select in the same pass that makes the segments, and hand its choice to `encode_topk`.
        """
        return [self.sparsifier.count(n) for n in numels] if self.is_topk else None

    def encode_topk(
        self, selection: Selection, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None
    ) -> Tensor:
        """The payload of the whole codec, as its `encode_segments` makes it, for a selection that is known already."""
        return encode_sparse(self.coding, self.values, segments, keys, residuals, selection)

    def encode(
        self, indices: Tensor, values: Tensor, counts: list[int], numels: list[int], keys: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """A message of some coordinates of each segment.

        Args:
            indices: (sum of counts,) int32, ascending within each segment.
            values: (sum of counts,) float32.
            counts: coordinates of each segment.
            numels: elements of each segment.
            keys: a mixed key for each segment.

        Returns:
            The message, and what it lacks of the values; None if it lacks nothing.
        """
        sent, lost = encode_values(self.values, values, counts, keys, gains=[1.0] * len(counts))
        return torch.cat([sent, self.coding.pack_indices(indices, counts, numels)]), lost

    def decode(self, message: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, Tensor]:
        """The indices and values of a message of these counts.

        Raises:
            ValueError: the message is corrupt.
        """
        indices, nbytes = self.coding.unpack_indices(message, counts, numels)
        return indices, decode_values(self.coding, self.values, message[: message.numel() - nbytes], counts, [])

    def nbytes(self, counts: list[int], numels: list[int]) -> int:
        """Bytes of a message of these counts: exact, or a bound where not `fixed_size`."""
        return self.values.segments_nbytes(counts) + self.coding.indices_nbytes(counts, numels)
