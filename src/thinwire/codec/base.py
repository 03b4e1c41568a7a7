"""The contract of a codec: what crosses the wire.

A codec turns a float tensor into bytes and back. It is pure: no state, no global random numbers, no communication.

Segments. `encode` takes one tensor or a list of them ("segments", one per layer). A list is encoded in one call to the
kernels, so that a whole DDP bucket costs one call; every segment keeps its own scales and indices, and its own random
numbers. Any shape and any float type is accepted; arithmetic is in float32.

Shapes. Most codecs see a segment as a vector, and `decode`, `decode_add` and `nbytes` need the number of its elements
only. Those with `needs_shape`, such as `SVD`, see it in its shape, and the receiver must know that shape. So wherever
a number of elements is asked for, a `torch.Size` may be given; the number n stands for the shape (n,).

Payload. A one-dimensional uint8 tensor on the device of the input. Sub-byte values are bit-packed, indices coded,
scales counted: the payload is all that is sent, and `docs/wire.md` says what every byte means. The receiver knows the
codec and the number of elements, so neither is repeated in the payload.

Residual. Where `residual` is given, `x - decode(encode(x))` is written into it in the same pass. It is a contiguous
float32 tensor of as many elements as `x`, and it may be `x` itself, which then holds the residual afterwards.

Randomness. A pure function of `Key(seed, stream, step)` and of the element's position in its segment. The same key
gives the same bytes from every kernel backend.

Not finite. An infinite or NaN element makes at least one decoded element infinite or NaN; it is never lost.

Votes. Where `votes`, workers do not average: what they agree on is `combine` of the sum of all decodings, such as the
sign of a sum of signs. It does not grow with the input, so a loss scale is no factor of it.

Facts. `unbiased`: the mean of decode(encode(x)) over keys is x. `sum_dtype`: the payload, viewed as this type, may be
added on the wire, so an all-reduce serves ("summable"). `fixed_size`: `nbytes` is the exact size, not an upper bound.
`needs_shape`: the payload depends on the shapes of the segments. `shared_key`: payloads are decoded with the key that
they were encoded with, so that all workers use the same one (it says what else would have to be sent).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..algorithm import Algorithm, require

Size = int | torch.Size


class Key(NamedTuple):
    """Names one independent sequence of random numbers: pure data, the same on every machine and backend.

    Args:
        seed: the seed of the run.
        stream: tells tensors and workers apart.
        step: tells training steps apart.
    """

    seed: int = 0
    stream: int = 0
    step: int = 0

    def mixed(self) -> int:
        """The 64-bit key of the counter-based generator."""
        return kernels.mix_key(*self)


class Symbols(NamedTuple):
    """What stands at the end of a payload: `counts[i]` codes of `bits` bits for segment i, each byte aligned."""

    bits: int
    counts: list[int]

    @property
    def nbytes(self) -> int:
        """Size of all codes."""
        return sum((n * self.bits + 7) // 8 for n in self.counts)


class Codec(Algorithm, ABC):
    """Turns tensors into bytes and back; see the module's text for the contract.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.TopK(ratio=0.5)
        >>> payload = codec.encode(torch.tensor([1.0, -3.0, 0.5, 2.0]))
        >>> codec.decode(payload, 4)
        tensor([ 0., -3.,  0.,  2.])
    """

    unbiased: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = True
    needs_shape: ClassVar[bool] = False
    votes: ClassVar[bool] = False

    @property
    def shared_key(self) -> bool:
        """Whether all workers encode with the same key, and decode with it."""
        return False

    @property
    def lossless(self) -> bool:
        """Whether decode(encode(x)) is x, for every float32 x."""
        return False

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The type in which payloads may be added on the wire, or None."""
        return None

    @property
    def summable(self) -> bool:
        """Whether payloads may be added on the wire, so that an all-reduce serves."""
        return self.sum_dtype is not None

    def encode(
        self,
        x: Tensor | Sequence[Tensor],
        key: Key | Sequence[Key] = Key(),
        residual: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Encode one tensor, or a list of segments in one call.

        Args:
            x: float tensor of any shape, or a list of them.
            key: the random key, or a list with one for each segment.
            residual: where given, receives `x - decode(encode(x))`; may be `x` itself.

        Returns:
            The payload: one-dimensional uint8 tensor of `nbytes(x.shape)` bytes.

        Raises:
            ValueError: not a float tensor, or the lists do not match.
        """
        xs, keys, residuals = as_list(x), as_list(key), None if residual is None else as_list(residual)
        require(len(keys) == len(xs), f"{len(xs)} segments need as many keys, got {len(keys)}")
        segments = self._as_seen([_float32(s) for s in xs], xs)
        if residuals is not None:
            _check_residuals(segments, residuals)
            residuals = self._as_seen(residuals, xs)
        return self._encode(segments, [k.mixed() for k in keys], residuals)

    def decode(
        self, payload: Tensor, size: Size | Sequence[Size], key: Key | Sequence[Key] | None = None
    ) -> Tensor | list[Tensor]:
        """Decode a payload into a new float32 tensor, or several; a size is a number of elements or a `torch.Size`."""
        outs = [torch.zeros(s, dtype=torch.float32, device=payload.device) for s in as_list(size)]
        self.decode_add(payload, outs, key=key)
        return outs[0] if isinstance(size, Size) else outs

    def decode_add(
        self,
        payload: Tensor,
        out: Tensor | Sequence[Tensor],
        weight: float = 1.0,
        key: Key | Sequence[Key] | None = None,
    ) -> None:
        """`out += weight * decode(payload)`, in place.

        Args:
            payload: what `encode` returned for tensors of the same sizes.
            out: contiguous float32 tensor, or a list with one for each segment; in the encoded shape for `needs_shape`.
            weight: factor, such as one over the number of workers.
            key: the key, or keys, of `encode`; asked for by codecs with `shared_key`, and ignored by all others.

        Raises:
            ValueError: the payload does not fit the sizes of `out`, or its key is missing.
        """
        outs = as_list(out)
        self._check_decoding([payload], outs)
        keys = self._decoding_keys(key, len(outs))
        self._decode_add_keyed(payload, self._as_seen(outs, outs), weight, keys)

    def decode_sum(
        self,
        payloads: Sequence[Tensor],
        out: Tensor | Sequence[Tensor],
        weight: float = 1.0,
        key: Key | Sequence[Key] | None = None,
    ) -> bool:
        """`out = weight * sum_i decode(payloads[i])`, added in this order; returns whether all of it is finite.

        The same as `decode_add` of each into zeros, in as few passes over memory as the codec can.

        Args:
            payloads: one or more, of tensors of the same sizes.
            out, weight, key: as in `decode_add`; what `out` held is overwritten.

        Raises:
            ValueError: a payload does not fit the sizes of `out`, or the key is missing.
        """
        outs = as_list(out)
        self._check_decoding(payloads, outs)
        keys = self._decoding_keys(key, len(outs))
        return self._decode_sum(payloads, self._as_seen(outs, outs), weight, keys)

    def nbytes(self, size: Size | Sequence[Size]) -> int:
        """Size of the payload in bytes for segments of `size`: exact, or a bound where not `fixed_size`.

        A size is a number of elements or a `torch.Size`; any other sequence is a list with one for each segment.
        """
        sizes = [torch.Size([s]) if isinstance(s, int) else s for s in as_list(size)]
        return self._nbytes(sizes if self.needs_shape else [s.numel() for s in sizes])

    def symbols(self, numels: list[int]) -> Symbols | None:
        """The codes, of 1 to 8 bits, that stand last in a payload for such segments; None if there are none."""
        return None

    def combine(self, totals: list[Tensor]) -> None:
        """Where `votes`: turn sums of all workers' decodings, in place, into what they agree on."""
        raise NotImplementedError(f"{self} takes no vote: its decodings are averaged")

    def _as_seen(self, tensors: list[Tensor], segments: list[Tensor]) -> list[Tensor]:
        """Views of contiguous tensors as this codec sees segments: in their shape if it needs it, else as vectors."""
        return [t.view(s.shape if self.needs_shape else -1) for t, s in zip(tensors, segments, strict=True)]

    @abstractmethod
    def _encode(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        """Encode contiguous float32 segments, flat unless `needs_shape`; may change nothing but `residuals`."""

    def _check_decoding(self, payloads: Sequence[Tensor], outs: list[Tensor]) -> None:
        for o in outs:
            if o.dtype != torch.float32 or not o.is_contiguous():
                raise ValueError(
                    f"{self}: decoding needs contiguous float32 tensors, got {o.dtype} with strides {o.stride()}"
                )
        expected = self.nbytes([o.shape for o in outs]) if self.fixed_size else None
        for payload in payloads:
            if expected is not None and payload.numel() != expected:
                raise ValueError(
                    f"{self}: a payload for {sum(o.numel() for o in outs)} elements has {expected} bytes, "
                    f"got {payload.numel()}; were sender and receiver configured alike?"
                )

    def _decoding_keys(self, key: Key | Sequence[Key] | None, num_segments: int) -> list[int]:
        """Mixed keys, one for each segment; none where they are not needed."""
        if not self.shared_key:
            return []
        require(key is not None, f"{self}: payloads are decoded with the key of `encode`; pass it as `key`")
        keys = [k.mixed() for k in as_list(key)]
        require(len(keys) == num_segments, f"{num_segments} segments need as many keys, got {len(keys)}")
        return keys

    def _decode_add_keyed(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        """`_decode_add`, with the keys of the segments where the codec has a `shared_key`."""
        self._decode_add(payload, outs, weight)

    def _decode_sum(self, payloads: Sequence[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> bool:
        for out in outs:
            out.zero_()
        for payload in payloads:
            self._decode_add_keyed(payload, outs, weight, keys)
        return kernels.all_finite(outs)

    @abstractmethod
    def _decode_add(self, payload: Tensor, outs: list[Tensor], weight: float) -> None:
        """Accumulate into contiguous float32 tensors, flat unless `needs_shape`."""

    @abstractmethod
    def _nbytes(self, numels: list[int]) -> int:
        """For segments of these numbers of elements; of these shapes, each a `torch.Size`, if `needs_shape`."""


class AgreedCodec(Codec):
    """A codec whose workers first agree on some numbers, such as a common scale, that make their payloads summable.

    In each step every worker sends its proposal, a short float32 vector, to all others; the proposals are added up, or
    their maximum is taken, in rank order; and with the codec that `agreed` makes of the result, payloads are encoded and
    added on the wire. Used alone, outside of an averager, it encodes without any agreement.
    """

    @property
    @abstractmethod
    def agreement(self) -> str | None:
        """How proposals are put together: "sum" or "max"; None if this configuration needs no agreement."""

    @abstractmethod
    def propose(self, segments: list[Tensor]) -> Tensor:
        """This worker's proposal for flat contiguous float32 segments: a float32 vector, as long on all workers."""

    @abstractmethod
    def agreed(self, total: Tensor, num_workers: int) -> Codec:
        """The summable codec of this step, from the sum or the maximum of all proposals."""


class AdaptiveCodec(Codec):
    """A codec that learns from the gradients that pass by; between two updates it is the pure codec `at(state)`.

    The averager keeps the state, with `state_dict` and `load_state_dict`. In rounds for which `observes` says so, all
    that is encoded is shown to `observe`. When a round for which the codec `is_due` begins, workers exchange their
    `statistics`, `learn` from those of all, and `adopt` what rank 0 learned, so that they agree to the last bit
    whatever their processors make of `exp`. Used alone, outside of an averager, it is the codec before any update.
    """

    @abstractmethod
    def init_state(self) -> Any:
        """The state before anything was seen."""

    @abstractmethod
    def at(self, state: Any) -> Codec:
        """The codec of a round; the size of its payload is the same in all rounds."""

    @abstractmethod
    def observes(self, step: int) -> bool:
        """Whether `observe` is to see the segments of round `step`."""

    @abstractmethod
    def observe(self, state: Any, segments: Sequence[Tensor], keys: Sequence[Key]) -> None:
        """Sample segments that are about to be encoded, any shape and float type; changes nothing but the state."""

    @abstractmethod
    def is_due(self, state: Any, step: int) -> bool:
        """Whether round `step` has to begin with an update that has not been made yet."""

    @abstractmethod
    def statistics(self, state: Any) -> Tensor:
        """What this worker observed: a float64 vector, as long on all workers."""

    @abstractmethod
    def learn(self, state: Any, statistics: Sequence[Tensor]) -> Tensor:
        """What follows from the statistics of all workers, in rank order: a float64 vector of fixed length."""

    @abstractmethod
    def adopt(self, state: Any, learned: Tensor, step: int) -> None:
        """Make `learned` what the codec works with from round `step` on, and forget what was observed."""

    def _encode(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        return self.at(self.init_state())._encode(segments, keys, residuals)

    def _decode_add(self, payload: Tensor, outs: list[Tensor], weight: float) -> None:
        self.at(self.init_state())._decode_add(payload, outs, weight)

    def _nbytes(self, numels: list[int]) -> int:
        return self.at(self.init_state())._nbytes(numels)

    def symbols(self, numels: list[int]) -> Symbols | None:
        return self.at(self.init_state()).symbols(numels)


def as_list(value) -> list:
    return [value] if isinstance(value, (Tensor, Key, Size)) else list(value)


def _float32(x: Tensor) -> Tensor:
    require(x.is_floating_point(), f"only float tensors can be encoded, got {x.dtype}; convert it first")
    return x.detach().to(torch.float32).contiguous()


def _check_residuals(segments: list[Tensor], residuals: list[Tensor]) -> None:
    require(len(residuals) == len(segments), f"{len(segments)} segments need as many residuals, got {len(residuals)}")
    for x, r in zip(segments, residuals, strict=True):
        require(
            r.dtype == torch.float32 and r.is_contiguous() and r.numel() == x.numel(),
            f"a residual must be contiguous float32 of {x.numel()} elements, got {r.dtype} of {r.numel()}",
        )
