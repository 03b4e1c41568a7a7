"""A codec of its own for each segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import require
from ...kernels import Flag
from ..base import Codec
from ..quantize.even_levels import EvenLevelsOfEach
from ..traits import Traits
from ..types import Keys, Selection, Sizes, as_list, segment_numels
from .groups import CodecGroup, split_groups


@dataclass(frozen=True, repr=False)
class PerLayer(Codec):
    """Segment i is encoded by `codecs[i]`. One call encodes the segments of equal codecs, and one those of all quantizers to
    evenly spaced levels.

    Payload: that of each group of segments that one call encodes, in the order of their first segments.

    Args:
        codecs: one for each segment, of fixed size, which may need its shape, and without other demands.
        shaped: whether it counts as a codec that needs shapes even if none of them does, so that exchanges cut tensors in one
            way whatever the choice.
    """

    codecs: tuple[Codec, ...]
    shaped: bool = False

    @cached_property
    def traits(self) -> Traits:
        each = [group.codec.traits for group in self._groups]
        needs_shape = self.shaped or any(traits.needs_shape for traits in each)
        return Traits(unbiased=all(traits.unbiased for traits in each), needs_shape=needs_shape, by_layer=True)

    def __repr__(self) -> str:
        return f"PerLayer({len(self.codecs)} codecs)"

    def pick(self, positions: Sequence[int]) -> PerLayer:
        return _picked(self, tuple(positions))

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        self._check_number(segments)
        # `seen`, because each codec has its own `needs_shape`: some take vectors beside others that take shapes.
        payloads = [
            group.codec.encode_segments(
                group.codec.seen(group.of(segments)),
                group.of(keys),
                None if residuals is None else group.codec.seen(group.of(residuals)),
            )
            for group in self._groups
        ]
        return torch.cat(payloads) if len(payloads) > 1 else payloads[0]

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        for group, (part,) in self._split([payload], outs):
            group.codec.decode_add_segments(part, group.codec.seen(group.of(outs)), weight, [])

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        return kernels.flags.all_of(
            [
                group.codec.decode_sum_segments(parts, group.codec.seen(group.of(outs)), weight, [])
                for group, parts in self._split(payloads, outs)
            ]
        )

    def segments_nbytes(self, sizes: list[Any]) -> int:
        self._check_number(sizes)
        return sum(group.nbytes(sizes) for group in self._groups)

    def support(self, payload: Tensor, size: Sizes, key: Keys | None = None) -> Selection | None:
        """The positions that a payload carries, all of a segment where its codec sends all; None if every codec does."""
        sizes = as_list(size)
        self._check_number(sizes)
        numels = segment_numels(size)
        found: list[Tensor | None] = [None] * len(numels)
        ends = 0
        for group in self._groups:
            start, ends = ends, ends + group.nbytes(sizes)
            kept = group.codec.support(payload[start:ends], group.of(numels), None)
            # Not strict: a codec that sends all has no selection.
            for i, indices in zip(group.positions, kept.indices.split(kept.counts) if kept else (), strict=False):
                found[i] = indices
        if all(indices is None for indices in found):
            return None
        whole = [
            torch.arange(n, dtype=torch.int32, device=payload.device) if indices is None else indices
            for n, indices in zip(numels, found, strict=True)
        ]
        return Selection.of_positions(torch.cat(whole), [len(indices) for indices in whole])

    @cached_property
    def _groups(self) -> list[CodecGroup]:
        positions: dict[Codec | None, list[int]] = {}
        quantizers = [codec.traits.quantizer for codec in self.codecs]
        for i, codec in enumerate(self.codecs):
            # All quantizers share the key None: one call of the kernels takes different bits.
            positions.setdefault(codec if quantizers[i] is None else None, []).append(i)
        each = EvenLevelsOfEach(tuple(q for q in quantizers if q is not None))
        return [CodecGroup(codec or each, at) for codec, at in positions.items()]

    def _split(self, payloads: Sequence[Tensor], outs: list[Tensor]) -> list[tuple[CodecGroup, list[Tensor]]]:
        self._check_number(outs)
        return split_groups(payloads, self._groups, [out.shape for out in outs])

    def _check_number(self, items: Sequence[object]) -> None:
        require(
            len(items) == len(self.codecs), f"{self}: expected {len(self.codecs)} segments, got {len(items)} of them"
        )


# One instance for each pick, so that its groups are found once.
@lru_cache(maxsize=256)
def _picked(codec: PerLayer, positions: tuple[int, ...]) -> PerLayer:
    return PerLayer(tuple(codec.codecs[i] for i in positions), codec.shaped)
