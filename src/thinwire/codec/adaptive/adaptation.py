"""The seam between an averager and a codec that adapts, alone or as a link of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base import AdaptiveCodec, Codec, Key
from ..compose.chain import Chain
from ..compose.huffman import EntropyCoded


def adaptive_part(codec: Codec) -> AdaptiveCodec | None:
    """The link that adapts, if there is one."""
    if isinstance(codec, Chain):
        return adaptive_part(codec.values)
    if isinstance(codec, EntropyCoded):
        return adaptive_part(codec.codec)
    return codec if isinstance(codec, AdaptiveCodec) else None


def adapted(codec: Codec, state: Any) -> Codec:
    """The pure codec of a round: the link that adapts is replaced by what it is at this state.

    Example:
        >>> import thinwire as tw
        >>> codec = tw.chain(tw.TopK(0.1), tw.AMQ(bits=2, multiplier=0.5))
        >>> adapted(codec, adaptive_part(codec).init_state())
        chain(TopK(ratio=0.1), Quantize(levels=(-1.0, -0.5, 0.5, 1.0), bucket_size=8192, norm='l2'))
    """
    if isinstance(codec, Chain):
        return replace(codec, values=adapted(codec.values, state))
    if isinstance(codec, EntropyCoded):
        return replace(codec, codec=adapted(codec.codec, state))
    return codec.at(state) if isinstance(codec, AdaptiveCodec) else codec


def reaching(codec: Codec, segments: Sequence[Tensor], keys: Sequence[Key]) -> Sequence[Tensor]:
    """What of the segments comes to the link that adapts: in a chain, the values that its sparsifier keeps."""
    if not isinstance(codec, Chain):
        return segments
    flat = [s.detach().to(torch.float32).reshape(-1) for s in segments]
    kept = codec.sparsifier.select(flat, [key.mixed() for key in keys])
    return kept.values.split(kept.counts)
