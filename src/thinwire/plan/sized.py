"""Stand-ins for codecs: they have the sizes of a codec, and note its work instead of doing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..algorithm import require
from ..average import Averager, Rule
from ..average.mean.clip import Clip
from ..codec import Codec, Selection, SparseParts, Traits
from ..codec.compose.transform import Transformed
from ..codec.sparse.base import Sparsifier
from ..codec.types import Size, Tensors, as_list
from ..kernels import Flag
from ..memory import Memory
from ..schedule import Progress, resolve
from .averagers import on_nodes, parts_of

_LATE = Progress(step=10**9, epoch=10**9)  # after every warm-up


@dataclass(frozen=True)
class Work:
    """Work on `numel` float32 elements.

    Args:
        part: "encode" or "decode".
        numel: how many.
        name: who does it: `MEMORY`, or the `repr` of a codec or of an averager of low rank.
        rank: columns of the factors of low rank; 0 for others.
    """

    part: str
    numel: int
    name: str
    rank: int = 0


MEMORY = "memory"


def after_warm_ups(averager: Averager) -> Averager:
    """The averager with the last value of each schedule."""
    late: Averager = resolve(averager, _LATE)
    return late


def sized(averager: Averager, actions: list[Any], workers_per_node: int) -> Averager:
    """The averager after all warm-ups, with stand-ins for its codecs, that note their work in `actions`."""
    late = after_warm_ups(on_nodes(averager, workers_per_node))
    parts = parts_of(late)
    # A pass over momentum is part of the speed that was measured for its codec; see `speeds.py`.
    adds = any(isinstance(part, Memory) and not part.has_momentum for part in parts.values())
    changes: dict[str, Any] = {}
    for name, part in parts.items():
        if isinstance(part, Codec):
            changes[name] = SizedCodec(part, actions, adds)
        elif isinstance(part, Clip) and not part.needs_norms:
            changes[name] = None  # takes hardly any time, and sends nothing
        elif isinstance(part, Rule):  # it reads values; its own arithmetic is not part of the plan
            changes |= {name: None, "exchange": "all_gather"}
    return replace(late, **changes)


@dataclass(frozen=True, repr=False)
class SizedCodec(Codec):
    """Has the sizes of another codec, and notes encoding and decoding in `actions` instead of doing them.

    Args:
        codec: the other codec.
        actions: receives the work.
        adds_memory: whether encoding adds a memory to the gradients first, in a pass of its own.
    """

    codec: Codec
    actions: list[Any] = field(compare=False)
    adds_memory: bool = False

    def __post_init__(self) -> None:
        traits = self.codec.traits
        require(
            traits.agreement is None and traits.adaptive is None,
            f"a plan cannot predict {self.codec}: what it sends depends on values",
        )

    def __repr__(self) -> str:
        return repr(self.codec)

    @cached_property
    def traits(self) -> Traits:
        own, parts = self.codec.traits, self.codec.traits.sparse
        sparse = None if parts is None else _SizedParts(_Evenly(parts.sparsifier, self), parts.coding, parts.values)
        return Traits(
            unbiased=own.unbiased,
            lossless=own.lossless,
            sum_dtype=own.sum_dtype,
            sends_floats=own.sends_floats,
            sparse=sparse,
            needs_shape=own.needs_shape,
        )

    # The public methods skip the checks of tensors and keys, and the rules of `Shapes`, which nothing in here needs: with a
    # thousand workers these take longer than the plan.

    def encode(self, x: Tensors, *_: Any, **__: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return self.encode_segments(as_list(x), [], None)

    def decode_add(self, payload: Tensor, out: Tensors, *_: Any, **__: Any) -> None:
        with torch._C.DisableTorchFunction():
            self.decode_add_segments(payload, as_list(out), weight=1.0, keys=[])

    def decode_sum(self, payloads: Sequence[Tensor], out: Tensors, *_: Any, **__: Any) -> Flag:
        with torch._C.DisableTorchFunction():
            self.note("decode", len(payloads) * sum(t.numel() for t in as_list(out)))
        return True

    def decode_mean(self, payloads: Sequence[Tensor], out: Tensors, *_: Any, **__: Any) -> Flag:
        # Sums of coordinates go through a transform once.
        return self.decode_sum(payloads[:1] if isinstance(self.codec, Transformed) else payloads, out)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        sizes = [s.shape if self.codec.traits.needs_shape else s.numel() for s in segments]
        self.note("encode", sum(s.numel() for s in segments))
        return torch.empty(self.segments_nbytes(sizes), dtype=torch.uint8, device=segments[0].device)

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        self.note("decode", sum(out.numel() for out in outs))

    def segments_nbytes(self, sizes: list[Any]) -> int:
        return self._nbytes(tuple(sizes))

    @cached_property
    def _nbytes(self) -> Callable[[tuple[Size, ...]], int]:
        """Bytes of a payload: computed once for the pieces of a thousand workers."""
        return lru_cache(lambda sizes: self.codec.nbytes(list(sizes)))

    @cached_property
    def _name(self) -> str:
        return repr(self.codec)

    def note(self, part: str, numel: int) -> None:
        """Note the work on `numel` elements."""
        if self.codec.traits.sends_floats:  # others copy no more than the network library does
            return
        if part == "encode" and self.adds_memory:
            self.actions.append(Work(part, numel, MEMORY))
        self.actions.append(Work(part, numel, self._name))


@dataclass(frozen=True, repr=False)
class _Evenly(Sparsifier):
    """Selects as many coordinates as a sparsifier, evenly spaced."""

    sparsifier: Sparsifier
    sized: SizedCodec

    def count(self, numel: int) -> int:
        return self.sparsifier.count(numel)

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        self.sized.note("encode", sum(s.numel() for s in segments))
        counts = [self.count(s.numel()) for s in segments]
        return Selection(
            _evenly(counts, [s.numel() for s in segments]),
            torch.zeros(sum(counts), dtype=torch.float32, device="cpu"),
            counts,
        )


class _SizedParts(SparseParts):
    """Messages of the right size, that hold nothing. Decoded, they are evenly spaced zeros."""

    def encode(
        self, indices: Tensor, values: Tensor, counts: list[int], numels: list[int], keys: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        return torch.zeros(self.nbytes(counts, numels), dtype=torch.uint8, device="cpu"), None

    def decode(self, message: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, Tensor]:
        assert isinstance(self.sparsifier, _Evenly)
        self.sparsifier.sized.note("decode", sum(numels))
        return _evenly(counts, numels), torch.zeros(sum(counts), dtype=torch.float32, device="cpu")


def _evenly(counts: list[int], numels: list[int]) -> Tensor:
    """For each segment, as many of its indices, evenly spaced; int32. Only to be read."""
    return _evenly_spaced(tuple(counts), tuple(numels))


@lru_cache(maxsize=1024)
def _evenly_spaced(counts: tuple[int, ...], numels: tuple[int, ...]) -> Tensor:
    parts = [
        torch.arange(k, dtype=torch.int64, device="cpu") * n // k for k, n in zip(counts, numels, strict=True) if k
    ]
    return torch.cat(parts).int() if parts else torch.empty(0, dtype=torch.int32, device="cpu")
