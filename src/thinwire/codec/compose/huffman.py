"""Entropy coding: frequent symbols take fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import Algorithm, require
from ..traits import Traits
from ..types import Symbols
from .wrapper import Wrapper


@dataclass(frozen=True, repr=False)
class Huffman(Algorithm):
    """The last link of a `chain`: a Huffman code for the symbol frequencies of one payload.

    No other prefix code of symbols is shorter. A symbol takes between H and H + 1 bits, where H is the entropy of the
    frequencies; typically H + 0.03 for symbols of 4 bits. The code is canonical, so its lengths define it: the payload has
    4 bits for each possible symbol. Codes have 12 bits at most. If the code saves nothing, the payload is one byte and the
    symbols as they are.

    Source: Huffman 1952, A method for the construction of minimum-redundancy codes.

    Example:
        >>> import torch, thinwire as tw
        >>> x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
        >>> plain, coded = tw.QSGD(bits=4), tw.chain(tw.QSGD(bits=4), tw.codec.Huffman())
        >>> payload = coded.encode(x)
        >>> round(8 * plain.encode(x).numel() / 100_000, 2), round(8 * payload.numel() / 100_000, 2)
        (4.06, 3.29)
        >>> torch.equal(coded.decode(payload, 100_000), plain.decode(plain.encode(x), 100_000))
        True
    """


@dataclass(frozen=True, repr=False)
class HuffmanCoded(Wrapper):
    """The result of `chain(codec, Huffman())`: the payload is [the codec's scales][its symbols, coded]."""

    def __post_init__(self) -> None:
        # With a schedule it is known at each moment, when `resolve` makes the codec of a round.
        require(
            not self.codec.is_constant or self.codec.symbols([1]) is not None,
            f"chain: {self.codec} has no symbols of up to 8 bits to code; use one that quantizes, such as QSGD(bits=4)",
        )
        super().__post_init__()

    @cached_property
    def traits(self) -> Traits:
        inner, carries = self.codec.traits, ("shared_key", "votes", "adaptive")
        return inner.through(self.codec, repr(Huffman()), carries, unbiased=inner.unbiased, fixed_size=False)

    def _links(self) -> tuple[Algorithm, ...]:
        return (*self.codec._links(), Huffman())

    def _symbols(self, numels: list[int]) -> Symbols:
        symbols = self.codec.symbols(numels)
        assert symbols is not None, "the constructor has checked that the codec has symbols"
        return symbols

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        symbols = self._symbols([s.numel() for s in segments])
        payload = self.codec.encode_segments(segments, keys, residuals)
        split = payload.numel() - symbols.nbytes
        return torch.cat([payload[:split], kernels.entropy.encode(payload[split:], symbols)])

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        numels = [o.numel() for o in outs]
        symbols = self._symbols(numels)
        split = self.codec.segments_nbytes(numels) - symbols.nbytes
        require(
            payload.numel() > split,
            f"{self}: a payload for {sum(numels)} elements has more than {split} bytes, got {payload.numel()}",
        )
        packed = kernels.entropy.decode(payload[split:], symbols)
        self.codec.decode_add_segments(torch.cat([payload[:split], packed]), outs, weight, keys)

    def segments_nbytes(self, numels: list[int]) -> int:
        return self.codec.segments_nbytes(numels) + 1  # at worst a byte, then the symbols as they are
