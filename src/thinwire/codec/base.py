"""The contract of a codec: what crosses the wire.

A codec turns a float tensor into bytes and back. It is pure: no state, no global random numbers, no communication.

Segments. `encode` takes one tensor or a list of tensors ("segments", one per layer). It encodes a list in one call to
the kernels, so a whole DDP bucket costs one call. Every segment has its own scales, indices and random numbers. Any
shape and any float type is accepted; arithmetic is in float32.

Shapes. Most codecs treat a segment as a vector, so `decode`, `decode_add` and `nbytes` need its number of elements
only. Codecs with `needs_shape`, such as `SVD`, use the shape of a segment, and the receiver must know that shape. Every
argument that takes a number of elements also takes a `torch.Size`; the number n means the shape (n,).

Payload. A contiguous one-dimensional uint8 tensor on the device of the input, in memory of its own: results may be written
into the input while the payload is still read. Sub-byte values are bit-packed, indices are coded,
and scales are part of the payload. Nothing else is sent; `docs/wire.md` says what every byte means. The receiver knows
the codec and the number of elements, so the payload repeats neither.

Sections. A payload is one or more sections, such as all scales and then all codes, and each section holds the bytes of all
segments in their order. Where `section_nbytes` tells their sizes, one call of `encode` serves several receivers:
`split_payload` makes of its payload what a call with the segments of one receiver alone gives.

Bits. A payload adds the same bits everywhere, so decoders round after each operation, as `out.add_(values * weight)` does;
`out.add_(values, alpha=weight)` rounds once on some processors. Products of matrices alone depend on the machine.

Residual. Where `residual` is given, `x - decode(encode(x))` is written into it in the same pass. It is a contiguous
float32 tensor with as many elements as `x`. It may be `x` itself, which then holds the residual afterwards.

Randomness. A pure function of `Key(seed, stream, step)` and of the element's position in its segment. The same key
gives the same bytes from every kernel backend.

Not finite. An infinite or NaN element makes at least one decoded element infinite or NaN; it is never lost.

Damage. A payload may hold any bytes. A decoder refuses them with a ValueError that names the codec, or decodes them to
some numbers, which may be infinite or NaN. It reads and writes nothing else, and allocates no more than a payload of
`nbytes` takes. `thinwire.testing.fuzz_codec` checks this.

Votes. With `votes`, workers do not average. The result is `combine` of the sum of all decodings, such as the sign of
a sum of signs. It does not grow with the input, so it is not divided by a loss scale. A sum of zero gives zero.

Keys. With `shared_key`, all workers encode and decode with the same key, from which the receiver computes what would
otherwise be sent. A decoder without `shared_key` gets no keys: `keys` is empty there.

Traits. `traits` is the one record of what a codec is: `traits.py` lists them. Callers ask nothing else about its kind.

Composition. A combinator such as `chain` is built from other codecs: `parts()` lists them and `map(fn)` replaces them.
It derives its traits from theirs, and refuses a part whose demands it does not carry when it is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .. import debug, kernels
from ..algorithm import Algorithm, require
from ..kernels import Flag
from ..kernels.checks import described
from .traits import Traits
from .types import Key, Keys, Selection, Size, Sizes, Symbols, Tensors, as_list

_PLAIN = Traits()


class Codec(Algorithm, ABC):
    """Turns tensors into bytes and back; the module's docstring is the contract.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.TopK(ratio=0.5)
        >>> payload = codec.encode(torch.tensor([1.0, -3.0, 0.5, 2.0]))
        >>> codec.decode(payload, 4)
        tensor([ 0., -3.,  0.,  2.])
    """

    @property
    def traits(self) -> Traits:
        """What the codec promises and demands. A class attribute serves where no field matters."""
        return _PLAIN

    def encode(self, x: Tensors, key: Keys = Key(), residual: Tensors | None = None) -> Tensor:
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
        if len(keys) != len(xs):
            raise ValueError(f"{len(xs)} segments need as many keys, got {len(keys)}")
        segments = self.seen([_float32(s) for s in xs])
        if residuals is not None:
            _check_residuals(segments, residuals)
            # Views, because codecs write into the caller's memory.
            residuals = segments if residual is x else [r.view_as(s) for r, s in zip(residuals, segments, strict=True)]
        payload = self.encode_segments(segments, [k.mixed() for k in keys], residuals)
        # In every round, so the message is built only when it is raised.
        if not isinstance(payload, Tensor) or payload.dtype != torch.uint8 or payload.dim() != 1:
            raise self._no_payload(payload)
        if debug.enabled:
            hint = "nbytes says the one, and encode made the other"
            self._check_size(payload, self.nbytes([s.shape for s in segments]), segments, hint)
        return payload

    def decode(self, payload: Tensor, size: Sizes, key: Keys | None = None) -> Tensor | list[Tensor]:
        """Decode a payload into a new float32 tensor, or several; a size is a number of elements or a `torch.Size`."""
        outs = [torch.zeros(s, dtype=torch.float32, device=payload.device) for s in as_list(size)]
        self.decode_add(payload, outs, key=key)
        return outs[0] if isinstance(size, Size) else outs

    def decode_add(self, payload: Tensor, out: Tensors, weight: float = 1.0, key: Keys | None = None) -> None:
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
        try:
            self.decode_add_segments(payload, self.seen(outs), weight, keys)
        except ValueError as error:
            raise self._undecodable([payload], _numel_of(outs), error) from error

    def decode_sum(
        self, payloads: Sequence[Tensor], out: Tensors, weight: float = 1.0, key: Keys | None = None
    ) -> Flag:
        """`out = weight * sum_i decode(payloads[i])`, added in this order; returns whether all of it is finite.

        On a GPU this flag stays on the device, so that no host waits; `kernels.flags.read` turns it into a `bool`, and
        raises what kernels found wrong in payloads.

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
        try:
            return self.decode_sum_segments(list(payloads), self.seen(outs), weight, keys)
        except ValueError as error:
            raise self._undecodable(payloads, _numel_of(outs), error) from error

    def decode_mean(
        self, payloads: Sequence[Tensor], out: Tensors, weight: float = 1.0, key: Keys | None = None
    ) -> Flag:
        """`decode_sum`, each element divided by the number of payloads that carry it: under a transform, of coordinates."""
        finite, outs = self.decode_sum(payloads, out, weight, key), as_list(out)
        if any(o.is_meta for o in outs):  # a plan: there are no values
            return finite
        senders = [torch.zeros(o.numel(), dtype=torch.float32, device=o.device) for o in outs]
        for payload in payloads:
            sent = self.support(payload, [o.shape for o in outs], key)
            if sent is None:
                torch._foreach_add_(senders, 1.0)
            else:
                ones = torch.ones(sent.indices.numel(), dtype=torch.float32, device=payload.device)
                kernels.scatter.add(senders, sent.indices, ones, sent.counts, 1.0)
        for o, num in zip(outs, senders, strict=True):
            o.div_(num.clamp(min=1.0).view(o.shape))  # an element that no payload carries stays zero
        return finite

    def nbytes(self, size: Sizes) -> int:
        """Size of the payload in bytes for segments of `size`: exact, or a bound where not `fixed_size`.

        A size is a number of elements or a `torch.Size`; any other sequence is a list with one for each segment.
        """
        sizes = [torch.Size([s]) if isinstance(s, int) else s for s in as_list(size)]
        return self.segments_nbytes(sizes if self.traits.needs_shape else [s.numel() for s in sizes])

    # ---- what a new codec implements: segments are contiguous float32, flat unless `needs_shape` ----

    @abstractmethod
    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        """Encode segments into one payload; changes nothing but `residuals`.

        Args:
            segments: what to encode.
            keys: a 64-bit key of random numbers for each segment.
            residuals: where given, receive the part that the payload lacks; may be the segments themselves, in the same list.
        """

    @abstractmethod
    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        """Add `weight` times the decoded payload to `outs`; `keys` is empty without `shared_key`."""

    @abstractmethod
    def segments_nbytes(self, sizes: list[Any]) -> int:
        """Bytes of a payload: `sizes` are numbers of elements, or shapes (`torch.Size`) if `needs_shape`."""

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        """Overwrite `outs` with the weighted sum of all payloads, added in order; returns whether it is finite."""
        return kernels.reduce.sum_payloads(self.decode_add_segments, payloads, outs, weight, keys)

    def symbols(self, numels: list[int]) -> Symbols | None:
        """The codes of 1 to 8 bits at the end of a payload, for an entropy coder to shorten; None if there are none."""
        return None

    def combine(self, totals: list[Tensor]) -> None:
        """With `votes`: turn the sums of all workers' decodings into the result, in place; NaN and infinity stay such."""
        raise NotImplementedError(f"{self} takes no vote: its decodings are averaged")

    def section_nbytes(self, size: Any) -> tuple[int, ...] | None:
        """Bytes of a segment in each section of a payload; None if they depend on the data or on other segments.

        Args:
            size: a number of elements, or a shape (`torch.Size`) if `needs_shape`.
        """
        return None

    # ---- composition: a combinator is built from other codecs ----

    def parts(self) -> tuple[Codec, ...]:
        """The codecs that this one is built from; empty for a codec that stands alone.

        Example:
            >>> import thinwire as tw
            >>> tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)).parts()
            (TopK(ratio=0.1), QSGD(bits=4))
        """
        values = self._named_parts().values()
        return tuple(part for value in values for part in (value if isinstance(value, tuple) else (value,)))

    def map(self, fn: Callable[[Codec], Codec]) -> Codec:
        """The same codec with `fn(part)` in place of each part."""
        parts = {
            name: tuple(map(fn, value)) if isinstance(value, tuple) else fn(value)
            for name, value in self._named_parts().items()
        }
        # Without parts the same instance, which keeps its cached properties.
        return replace(self, **parts) if parts else self

    def _named_parts(self) -> dict[str, Codec | tuple[Codec, ...]]:
        """The fields that hold a codec, or a tuple of codecs alone."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if _is_codecs(value)}

    def pick(self, positions: Sequence[int]) -> Codec:
        """The codec of the layers at `positions` alone; itself unless it gives each layer a codec of its own."""
        return self

    def in_blocks(self, size: int) -> Codec:
        """The same codec for segments whose blocks have `size` elements: parts that keep k of each block still do."""
        return self.map(lambda part: part.in_blocks(size))

    def under_scale(self, factor: float) -> Codec:
        """The codec that treats tensors multiplied by `factor` as this one treats the tensors."""
        return self.map(lambda part: part.under_scale(factor))

    def _links(self) -> tuple[Algorithm, ...]:
        """The arguments of `chain` that make this codec; the codec itself if it is no chain."""
        return (self,)

    def __repr__(self) -> str:
        links = self._links()
        return super().__repr__() if len(links) == 1 else f"chain({', '.join(map(repr, links))})"

    # ---- what averagers ask ----

    def support(self, payload: Tensor, size: Sizes, key: Keys | None = None) -> Selection | None:
        """The positions that a payload carries, with empty values; None if it carries all of them."""
        return None

    def reaching(self, segments: Sequence[Tensor], keys: Sequence[Key]) -> Sequence[Tensor]:
        """The values that arrive at the adaptive part when `segments` are encoded."""
        return segments

    # ---- helpers ----

    def seen(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors as this codec sees segments: as they are if it needs shapes, else views as vectors."""
        return list(tensors) if self.traits.needs_shape else [t.flatten() for t in tensors]

    def _head_and_rest(self, head: int, size: int) -> tuple[int, int]:
        """The sections of a segment that begins with `head` bytes of numbers, such as scales."""
        return head, self.segments_nbytes([size]) - head

    def _empty_payload(self, segments: list[Tensor]) -> Tensor:
        """Memory for the payload of these segments, for codecs that treat them as vectors."""
        size = self.segments_nbytes([s.numel() for s in segments])
        return debug.empty(size, dtype=torch.uint8, device=segments[0].device)

    def _check_decoding(self, payloads: Sequence[Tensor], outs: list[Tensor]) -> None:
        for o in outs:
            if o.dtype != torch.float32 or not o.is_contiguous():
                raise ValueError(
                    f"{self}: decoding needs contiguous float32 tensors, got {o.dtype} with strides {o.stride()}"
                )
        expected = self.nbytes([o.shape for o in outs])
        for payload in payloads:
            if payload.dtype != torch.uint8 or payload.dim() != 1:
                raise self._no_payload(payload)
            self._check_size(payload, expected, outs)

    def _check_size(
        self,
        payload: Tensor,
        expected: int,
        segments: Sequence[Tensor],
        hint: str = "were sender and receiver configured alike?",
    ) -> None:
        if payload.numel() > expected or (self.traits.fixed_size and payload.numel() != expected):
            raise ValueError(
                f"{self}: a payload for {_numel_of(segments)} elements has "
                f"{'' if self.traits.fixed_size else 'at most '}{expected} bytes, got {payload.numel()}; {hint}"
            )

    def _no_payload(self, payload: object) -> ValueError:
        return ValueError(f"{self}: a payload is a vector of uint8, got {described(payload)}")

    def _undecodable(self, payloads: Sequence[Tensor], numel: int, error: ValueError) -> ValueError:
        """The error of payloads that a kernel refuses: it names the codec and the sizes."""
        # Eight sizes at most, so that many workers do not make a long message.
        sizes = ", ".join(str(p.numel()) for p in payloads[:8]) + (", ..." if len(payloads) > 8 else "")
        return ValueError(
            f"{self}: cannot decode {sizes} bytes into {numel} elements: {str(error).removeprefix(f'{self}: ')}"
        )

    def _decoding_keys(self, key: Keys | None, num_segments: int) -> list[int]:
        """Mixed keys, one for each segment; none where they are not needed."""
        if not self.traits.shared_key:
            return []
        require(key is not None, f"{self}: payloads are decoded with the key of `encode`; pass it as `key`")
        keys = [k.mixed() for k in as_list(key)]
        require(len(keys) == num_segments, f"{num_segments} segments need as many keys, got {len(keys)}")
        return keys


def add_sections(each: Iterable[Sequence[int] | None]) -> tuple[int, ...] | None:
    """`section_nbytes` of several segments together; None if it is None for one of them."""
    rows: list[Sequence[int]] = []
    for sections in each:
        if sections is None:
            return None
        rows.append(sections)
    return tuple(map(sum, zip(*rows, strict=True)))


def split_payload(payload: Tensor, sections: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """The payload of each group of consecutive segments, in parts that only need to be joined.

    Args:
        payload: of all segments.
        sections: of each group, from `add_sections`.

    Example:
        >>> import torch, thinwire as tw
        >>> codec, xs = tw.QSGD(bits=4), [torch.randn(n) for n in (100, 30, 7)]
        >>> keys = [tw.codec.Key(stream=i) for i in range(3)]
        >>> sections = [add_sections(map(codec.section_nbytes, sizes)) for sizes in ([100], [30, 7])]
        >>> first, last = split_payload(codec.encode(xs, keys), sections)
        >>> torch.equal(torch.cat(last), codec.encode(xs[1:], keys[1:]))
        True
    """
    parts = payload.split([size for section in _by_section(sections) for size in section])
    # Parts lie section by section, and inside a section group by group.
    return [list(parts[group :: len(sections)]) for group in range(len(sections))]


def join_payloads(payloads: Sequence[Tensor], sections: Sequence[Sequence[int]]) -> Tensor:
    """Undo `split_payload`: the payload of all segments, from that of each group."""
    by_section = _by_section(sections)
    parts = [payload.split(list(sizes)) for payload, sizes in zip(payloads, zip(*by_section, strict=True), strict=True)]
    return torch.cat([part for section in zip(*parts, strict=True) for part in section])


def _by_section(sections: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The bytes of all groups in each section; a group without segments has none."""
    return list(zip_longest(*sections, fillvalue=0))


def _is_codecs(value: object) -> TypeGuard[Codec | tuple[Codec, ...]]:
    many = isinstance(value, tuple) and len(value) > 0 and all(isinstance(item, Codec) for item in value)
    return many or isinstance(value, Codec)


def _numel_of(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _float32(x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and x.is_contiguous():  # the usual case, in fewer calls
        return x.detach() if x.requires_grad else x
    if not x.is_floating_point():
        raise ValueError(f"only float tensors can be encoded, got {x.dtype}; convert it first")
    return x.detach().to(torch.float32).contiguous()


def _check_residuals(segments: list[Tensor], residuals: list[Tensor]) -> None:
    if len(residuals) != len(segments):
        raise ValueError(f"{len(segments)} segments need as many residuals, got {len(residuals)}")
    for x, r in zip(segments, residuals, strict=True):
        if r.dtype != torch.float32 or not r.is_contiguous() or r.numel() != x.numel():
            raise ValueError(
                f"a residual must be contiguous float32 of {x.numel()} elements, got {r.dtype} of {r.numel()}"
            )
