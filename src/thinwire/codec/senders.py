"""Dividing a sum of payloads by the number of payloads that carry each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import kernels
from .types import Key

if TYPE_CHECKING:
    from .base import Codec


def divide_by_senders(
    codec: Codec, payloads: Sequence[Tensor], outs: list[Tensor], key: Key | Sequence[Key] | None
) -> None:
    """Divide each element of `outs` by the number of payloads that carry it; elements that none carries stay.

    Args:
        codec: of the payloads.
        payloads: of tensors of the sizes of `outs`.
        outs: contiguous float32.
        key: as in `Codec.decode`.
    """
    if any(o.is_meta for o in outs):  # a plan: there are no values
        return
    senders = [torch.zeros(o.numel(), device=o.device) for o in outs]
    for payload in payloads:
        sent = codec.support(payload, [o.shape for o in outs], key)
        if sent is None:
            torch._foreach_add_(senders, 1.0)
        else:
            ones = torch.ones(sent.indices.numel(), device=payload.device)
            kernels.scatter.add(senders, sent.indices, ones, sent.counts, 1.0)
    for o, num in zip(outs, senders, strict=True):
        o.div_(num.clamp(min=1.0).view(o.shape))
