"""The payload of sparse codecs: they select, send the values through a codec, and code the support.

`SparseCodec` is the base of sparsifiers and of chains that begin with one. `SparseParts` is what a sparse all-reduce needs
of a codec: who selects, and how coordinates and values travel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import debug, kernels
from ...algorithm import require
from ...kernels import Flag
from ..base import Codec
from ..types import Keys, Selection, Sizes, segment_numels

# `base` imports this module.
if TYPE_CHECKING:
    from .base import Sparsifier


class SparseCodec(Codec):
    """A codec that keeps few coordinates: a sparsifier, or a chain that begins with one. Payload: `[values][support]`."""

    @abstractmethod
    def selector_and_values(self) -> tuple[Sparsifier, Codec]:
        """Who selects coordinates and codes their positions, and who carries their values."""

    def support(self, payload: Tensor, size: Sizes, key: Keys | None = None) -> Selection:
        """The positions that a payload carries; values are empty.

        Raises:
            ValueError: the payload is corrupt.

        Example:
            >>> import torch, thinwire as tw
            >>> codec = tw.TopK(ratio=0.5)
            >>> codec.support(codec.encode(torch.tensor([1.0, -3.0, 0.5, 2.0])), 4).indices
            tensor([1, 3], dtype=torch.int32)
        """
        sparsifier, _ = self.selector_and_values()
        numels = segment_numels(size)
        keys = sparsifier._decoding_keys(key, len(numels))
        try:
            indices, counts, _ = sparsifier.read_support(payload, numels, keys)
        except ValueError as error:
            raise self._undecodable([payload], sum(numels), error) from error
        return Selection.of_positions(indices, counts)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        return encode_sparse(*self.selector_and_values(), segments, keys, residuals)

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        (kept,) = self._read([payload], outs, keys)
        kernels.scatter.add(outs, kept.indices, kept.values, kept.counts, weight)

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        """Only elements in a payload are checked to be finite, because all others are zero."""
        indices, values, counts = zip(*self._read(payloads, outs, keys), strict=True)
        return kernels.scatter.total(outs, indices, values, counts, weight)

    def _read(self, payloads: Sequence[Tensor], outs: list[Tensor], keys: list[int]) -> list[Selection]:
        """The values that each payload carries for segments of the sizes of `outs`, with their positions."""
        sparsifier, values_codec = self.selector_and_values()
        supports = sparsifier.read_supports(payloads, [o.numel() for o in outs], decoding_keys(sparsifier, keys))
        selections = []
        for payload, (indices, counts, nbytes) in zip(payloads, supports, strict=True):
            values = decode_values(sparsifier, values_codec, payload[: payload.numel() - nbytes], counts, keys)
            selections.append(Selection(indices, values, counts))
        return selections

    def segments_nbytes(self, numels: list[int]) -> int:
        sparsifier, values_codec = self.selector_and_values()
        counts = [sparsifier.count(n) for n in numels]
        return values_codec.segments_nbytes(counts) + sparsifier.support_nbytes(counts, numels)

    def section_nbytes(self, size: int) -> tuple[int, ...] | None:
        sparsifier, values_codec = self.selector_and_values()
        count = sparsifier.count(size)
        sections = values_codec.section_nbytes(count) if sparsifier.traits.fixed_size else None
        return None if sections is None else (*sections, sparsifier.support_nbytes([count], [size]))


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
        sent, lost = encode_values(self.values, values, counts, keys)
        return torch.cat([sent, self.coding.pack_indices(indices, counts, numels)]), lost

    def decode(self, message: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, Tensor]:
        """The indices and values of a message of these counts.

        Raises:
            ValueError: the message is corrupt.
        """
        indices, nbytes = self.coding.unpack_indices(message, counts, numels)
        # No keys: a codec whose values need a shared key has no `SparseParts`.
        return indices, decode_values(self.coding, self.values, message[: message.numel() - nbytes], counts, [])

    def nbytes(self, counts: list[int], numels: list[int]) -> int:
        """Bytes of a message of these counts: exact, or a bound where not `fixed_size`."""
        return self.values.segments_nbytes(counts) + self.coding.indices_nbytes(counts, numels)

    def section_nbytes(self, count: int, numel: int) -> tuple[int, ...] | None:
        """`Codec.section_nbytes` of a segment with so many coordinates."""
        sections = self.values.section_nbytes(count) if self.coding.codes_plainly else None
        return None if sections is None else (*sections, self.coding.indices_nbytes([count], [numel]))


def with_length(codes: Tensor) -> Tensor:
    """Append the length of the codes, so that the receiver finds their start from the end of the payload."""
    length = torch.tensor([codes.numel()], dtype=torch.int32, device=codes.device)
    return torch.cat([codes, length.view(torch.uint8)])


def without_length(codec: Codec, payload: Tensor) -> tuple[Tensor, int]:
    """Undo `with_length` at the end of a payload: the codes, and the number of bytes of codes and length."""
    nbytes = int(kernels.payload_as(payload[-4:], torch.int32)) if payload.numel() >= 4 else -1
    at = payload.numel() - 4 - nbytes
    # A damaged length may be negative, or beyond the payload.
    require(nbytes >= 0 and at >= 0, f"{codec}: the payload is corrupt, its indices take {nbytes} of its bytes")
    return payload[at:-4], nbytes + 4


def encode_sparse(
    sparsifier: Sparsifier,
    values_codec: Codec,
    segments: list[Tensor],
    keys: list[int],
    residuals: list[Tensor] | None,
    selection: Selection | None = None,
) -> Tensor:
    """Select, unless `selection` is given, send the values through `values_codec`, and code the support.

    A segment is sent whole if that takes fewer bytes than its values and its support.
    """
    numels = [s.numel() for s in segments]
    selection = sparsifier.select(segments, keys) if selection is None else selection
    if sparsifier.counts_travel:
        selection = _all_where_smaller(sparsifier, values_codec, selection, segments)
    indices, values, counts = selection
    sent, lost = encode_values(values_codec, values, counts, keys, sparsifier.gains(numels))
    if residuals is not None:
        # A residual that is the segment itself needs no copy.
        apart = [(r, x) for x, r in zip(segments, residuals, strict=True) if r.data_ptr() != x.data_ptr()]
        if apart:
            torch._foreach_copy_([r for r, _ in apart], [x for _, x in apart])
        if lost is None:
            kernels.scatter.clear(residuals, indices, counts)
        else:
            kernels.scatter.write(residuals, indices, lost, counts)
    return torch.cat([sent, sparsifier.write_support(indices, counts, numels, keys)])


def decode_values(
    sparsifier: Sparsifier, values_codec: Codec, sent: Tensor, counts: list[int], keys: list[int]
) -> Tensor:
    """The kept values of all segments, from the bytes that `encode_values` made of them."""
    expected = values_codec.segments_nbytes(counts)
    require(
        sent.numel() == expected or (sent.numel() < expected and not values_codec.traits.fixed_size),
        f"{sparsifier}: the payload has {sent.numel()} bytes of values, and {sum(counts)} of them take {expected}; "
        "is it corrupt, or were sender and receiver configured differently?",
    )
    if values_codec.traits.sends_floats:
        return kernels.payload_as(sent, torch.float32)
    values = torch.zeros(sum(counts), dtype=torch.float32, device=sent.device)
    values_codec.decode_add_segments(sent, list(values.split(counts)), 1.0, decoding_keys(values_codec, keys))
    return values


def encode_values(
    values_codec: Codec, values: Tensor, counts: list[int], keys: list[int], gains: list[float] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Encode the values, times `gains` if given; also return the values' residual, or None if it is zero."""
    if values_codec.traits.sends_floats and gains is None:
        return values.view(torch.uint8), None
    kept, lost = list(values.split(counts)), debug.empty_like(values)
    if gains is None:
        sent = values_codec.encode_segments(kept, keys, list(lost.split(counts)))
        return sent, lost
    # The residual is that of the plain values, so the codec's own, of scaled ones, does not serve.
    sent = values_codec.encode_segments([v * gain for v, gain in zip(kept, gains, strict=True)], keys, None)
    at = list(lost.zero_().split(counts))
    values_codec.decode_add_segments(sent, at, 1.0, decoding_keys(values_codec, keys))
    return sent, values - lost


def decoding_keys(codec: Codec, keys: list[int]) -> list[int]:
    """The keys that a part of a combinator decodes with: all or none."""
    return keys if codec.traits.shared_key else []


def _all_where_smaller(
    sparsifier: Sparsifier, values_codec: Codec, selection: Selection, segments: list[Tensor]
) -> Selection:
    """The selection, with all elements of a segment where that makes the payload smaller."""

    def nbytes(count: int, numel: int) -> int:
        return values_codec.segments_nbytes([count]) + sparsifier.indices_nbytes([count], [numel])

    def grows(count: int, numel: int) -> bool:
        return nbytes(count, numel) > nbytes(numel, numel)

    counts = [x.numel() if grows(k, x.numel()) else k for k, x in zip(selection.counts, segments, strict=True)]
    if counts == selection.counts:
        return selection
    parts = [part.split(selection.counts) for part in (selection.indices, selection.values)]
    indices, values = [], []
    for i, x in enumerate(segments):
        everything = counts[i] == x.numel()
        indices.append(torch.arange(x.numel(), dtype=torch.int32, device=x.device) if everything else parts[0][i])
        values.append(x if everything else parts[1][i])
    return Selection(torch.cat(indices), torch.cat(values), counts)


def split_counts(payload: Tensor, numels: list[int]) -> tuple[Tensor, list[int]]:
    """Split a payload into the bytes before the counts, and the counts."""
    nbytes = 4 * len(numels)
    counts = kernels.payload_as(tail(payload, nbytes), torch.int32).tolist()
    require(
        all(0 <= k <= n for k, n in zip(counts, numels, strict=True)),
        f"the payload is corrupt: its counts are {counts}, for segments of {numels} elements",
    )
    return payload[: payload.numel() - nbytes], counts


def tail(payload: Tensor, nbytes: int) -> Tensor:
    """The last `nbytes` bytes of a payload; ValueError if it is shorter."""
    have = payload.numel()
    require(have >= nbytes, f"the payload is cut short: its indices take {nbytes} bytes, and it has only {have}")
    return payload[payload.numel() - nbytes :]
