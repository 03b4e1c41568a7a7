"""What a codec is, for callers and for combinators: one frozen record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.quantize import Quantizer

# These modules import this one.
if TYPE_CHECKING:
    from .adaptive.base import AdaptiveCodec
    from .agreed_codec import AgreedCodec
    from .base import Codec
    from .sparse.payload import SparseParts

DEMANDS = {
    "shared_key": "is encoded and decoded with one key on all workers",
    "needs_shape": "needs the shapes of tensors",
    "votes": "takes a vote in place of a mean",
    "agreement": "lets workers agree on numbers before they encode",
    "adaptive": "learns from gradients",
    "by_layer": "gives each layer a codec of its own",
}


@dataclass(frozen=True)
class Traits:
    """What callers may rely on, and what they must do, for one codec. The defaults suit a codec of few promises.

    A *claim* is a promise that nobody has to use. A *demand* is something that every caller must do, or the result is
    wrong. A combinator derives its traits with `through`: it drops the claims that it does not give itself, and refuses
    the demands that it does not carry.

    Args:
        unbiased: claim; the mean of decode(encode(x)) over keys is x.
        lossless: claim; decode(encode(x)) is x, for every float32 x.
        fixed_size: claim; `nbytes` is the exact size of a payload, not an upper bound.
        sum_dtype: claim; payloads, viewed as this type, may be added on the wire, so that an all-reduce serves.
        sends_floats: claim; the payload is the float32 elements themselves, in order.
        bucket_size: claim; so many consecutive elements of a segment share a scale, and buckets are independent.
        quantizer: claim; a payload is what `kernels.quantize.encode` writes for these evenly spaced levels.
        sparse: claim; how a sparse all-reduce takes apart a codec that keeps the largest coordinates.
        shared_key: demand; all workers encode with the same key, and decode with it.
        needs_shape: demand; payloads depend on the shapes of the segments, not on their numbers of elements alone.
        votes: demand; `Codec.combine` turns the sum of all decodings into the result, which is no mean.
        agreement: demand; the codec whose workers agree on numbers before they encode, in an all-reduce.
        adaptive: demand; the part that learns from gradients.
        by_layer: demand; `Codec.pick` gives the codec of some layers, and each segment must be one layer or a piece of it.

    Example:
        >>> import thinwire as tw
        >>> tw.QSGD(bits=4).traits.unbiased, tw.TopK(0.01).traits.unbiased
        (True, False)
        >>> tw.chain(tw.RandomK(0.1, shared=True), tw.Cast()).traits.sum_dtype
        torch.bfloat16
    """

    unbiased: bool = False
    lossless: bool = False
    fixed_size: bool = True
    sum_dtype: torch.dtype | None = None
    sends_floats: bool = False
    bucket_size: int | None = None
    quantizer: Quantizer | None = None
    sparse: SparseParts | None = None
    shared_key: bool = False
    needs_shape: bool = False
    votes: bool = False
    agreement: AgreedCodec | None = None
    adaptive: AdaptiveCodec | None = None
    by_layer: bool = False

    @property
    def summable(self) -> bool:
        """Whether payloads may be added on the wire."""
        return self.sum_dtype is not None

    def check(self, codec: Codec, caller: str, carries: Collection[str] = ()) -> None:
        """Refuse demands that the caller does not carry.

        Args:
            codec: whose traits these are.
            caller: for the error.
            carries: the names of demands that the caller meets.

        Raises:
            ValueError: the codec has another demand.
        """
        for name, demand in DEMANDS.items():
            if getattr(self, name) and name not in carries:
                raise ValueError(f"{caller}: {codec} {demand}, which is not possible here; use another codec")

    def through(self, codec: Codec, combinator: str, carries: Collection[str] = (), **given: Any) -> Traits:
        """The traits of a combinator around `codec`, whose traits these are.

        Args:
            codec: for the error.
            combinator: for the error.
            carries: demands that the combinator passes on; it refuses all others.
            given: traits that it sets itself. Other claims are dropped, but for `fixed_size`.

        Raises:
            ValueError: a demand that the combinator does not carry.
        """
        self.check(codec, combinator, carries)
        # `fixed_size` needs no naming: around a part of variable size, everything is of variable size.
        carried = {name: getattr(self, name) for name in ("fixed_size", *carries)}
        return replace(Traits(), **carried | given)
