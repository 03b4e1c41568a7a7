"""What all sparsifiers share: few coordinates are kept, and the payload is [their values][their support].

The *support* tells the receiver which coordinates these are. It stands last and is read from its end:

    [coded indices][number of kept coordinates of each segment, uint32, where it is not a function of the sizes]

A sparsifier selects; `encode_sparse` sends the values through a codec, `Identity` or the second link of a chain, and
writes the support. Where sending all of a segment is smaller than its values and support, all of it is sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import debug, kernels
from ...algorithm import require
from ...schedule import Schedule
from ..base import Codec, as_list
from ..dense.cast import Identity
from ..types import Key, Selection, Size


class Sparsifier(Codec):
    """A codec that keeps some coordinates; see the module's text.

    `chain(sparsifier, codec)` sends the values through another codec.
    """

    @property
    def counts_travel(self) -> bool:
        """Whether the number of kept coordinates depends on the data."""
        return False

    @property
    def fixed_size(self) -> bool:
        return not self.counts_travel

    @abstractmethod
    def count(self, numel: int) -> int:
        """How many of `numel` coordinates are kept; at most, where `counts_travel`."""

    @abstractmethod
    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        """Choose coordinates."""

    def gain(self, numel: int) -> float:
        """What kept values are multiplied by."""
        return 1.0

    @property
    def codes_plainly(self) -> bool:
        """Whether indices are coded by `pack_indices` of this base class, so that `Rice` may code them instead."""
        return False

    def with_selection(self, selection: Selection) -> Codec:
        return Preselected(self, selection)

    def support(
        self, payload: Tensor, size: Size | Sequence[Size], key: Key | Sequence[Key] | None = None
    ) -> Selection:
        """The positions that a payload of this codec, or of a chain that begins with it, carries; values are empty.

        Raises:
            ValueError: the payload is corrupt.

        Example:
            >>> import torch, thinwire as tw
            >>> codec = tw.TopK(ratio=0.5)
            >>> codec.support(codec.encode(torch.tensor([1.0, -3.0, 0.5, 2.0])), 4).indices
            tensor([1, 3], dtype=torch.int32)
        """
        sizes = [s if isinstance(s, int) else s.numel() for s in as_list(size)]
        indices, counts, _ = self.read_support(payload, sizes, self._decoding_keys(key, len(sizes)))
        return Selection(indices, torch.empty(0, device=payload.device), counts)

    # ---- how the support is coded; others than these override all of it ----

    def write_support(self, indices: Tensor, counts: list[int], numels: list[int], keys: list[int]) -> Tensor:
        """Code the support: the bytes at the end of a payload."""
        codes = self.pack_indices(indices, counts, numels)
        return torch.cat([codes, _count_bytes(counts, codes.device)]) if self.counts_travel else codes

    def read_support(self, payload: Tensor, numels: list[int], keys: list[int]) -> tuple[Tensor, list[int], int]:
        """Indices, counts, and how many bytes at the end of the payload they took."""
        if not self.counts_travel:
            counts = [self.count(n) for n in numels]
            indices, nbytes = self.unpack_indices(payload, counts, numels)
            return indices, counts, nbytes
        payload, counts = _split_counts(payload, numels)
        indices, nbytes = self.unpack_indices(payload, counts, numels)
        return indices, counts, nbytes + 4 * len(counts)

    def support_nbytes(self, counts: list[int], numels: list[int]) -> int:
        """Bytes of the support, or an upper bound."""
        return self.indices_nbytes(counts, numels) + 4 * len(counts) * self.counts_travel

    def pack_indices(self, indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
        """Code the indices; the default is the fixed-size code of `kernels.indices.encode`."""
        codes = debug.empty(self.indices_nbytes(counts, numels), dtype=torch.uint8, device=indices.device)
        kernels.indices.encode(indices, counts, numels, codes)
        return codes

    def unpack_indices(self, payload: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, int]:
        """Indices, and how many bytes at the end of the payload they took."""
        nbytes = self.indices_nbytes(counts, numels)
        return kernels.indices.decode(tail(payload, nbytes), counts, numels), nbytes

    def indices_nbytes(self, counts: list[int], numels: list[int]) -> int:
        """Bytes of the coded indices, or an upper bound."""
        return sum(kernels.indices.nbytes(k, n) for k, n in zip(counts, numels, strict=True))

    # ---- the codec: values as they are ----

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        return encode_sparse(self, Identity(), segments, keys, residuals)

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        decode_sparse(self, Identity(), payload, outs, weight, keys)

    def decode_sum_segments(
        self, payloads: Sequence[Tensor], outs: list[Tensor], weight: float, keys: list[int]
    ) -> bool:
        return sum_sparse(self, Identity(), payloads, outs, weight, keys)

    def segments_nbytes(self, numels: list[int]) -> int:
        return sparse_nbytes(self, Identity(), numels)


class Preselected(Sparsifier):
    """Encodes as `sparsifier` does, for one call whose selection is known; the bytes are the same."""

    def __init__(self, sparsifier: Sparsifier, selection: Selection):
        self.sparsifier, self.selection = sparsifier, selection

    def __repr__(self) -> str:
        return repr(self.sparsifier)

    def count(self, numel: int) -> int:
        return self.sparsifier.count(numel)

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        return self.selection

    def write_support(self, indices: Tensor, counts: list[int], numels: list[int], keys: list[int]) -> Tensor:
        return self.sparsifier.write_support(indices, counts, numels, keys)


def with_length(codes: Tensor) -> Tensor:
    """Codes of indices whose size depends on the data, and their length, by which they are found from the end."""
    length = torch.tensor([codes.numel()], dtype=torch.int32, device=codes.device)
    return torch.cat([codes, length.view(torch.uint8)])


def without_length(codec: Codec, payload: Tensor) -> tuple[Tensor, int]:
    """Undo `with_length` at the end of a payload: the codes, and how many bytes they and their length take."""
    nbytes = int(kernels.payload_as(payload[-4:], torch.int32)) if payload.numel() >= 4 else -1
    at = payload.numel() - 4 - nbytes
    require(nbytes >= 0 and at >= 0, f"{codec}: the payload is corrupt, its indices take {nbytes} bytes of it")
    return payload[at:-4], nbytes + 4


def encode_sparse(
    sparsifier: Sparsifier, values_codec: Codec, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None
) -> Tensor:
    """Select, send the values through `values_codec`, and code the support."""
    numels = [s.numel() for s in segments]
    selection = sparsifier.select(segments, keys)
    if sparsifier.counts_travel:
        selection = _all_where_smaller(sparsifier, values_codec, selection, segments)
    indices, values, counts = selection
    sent, lost = _encode_values(values_codec, values, counts, keys, gains=[sparsifier.gain(n) for n in numels])
    if residuals is not None:
        for x, r in zip(segments, residuals, strict=True):
            if r.data_ptr() != x.data_ptr():
                r.copy_(x)
        if lost is None:
            kernels.scatter.clear(residuals, indices, counts)
        else:
            kernels.scatter.write(residuals, indices, lost, counts)
    return torch.cat([sent, sparsifier.write_support(indices, counts, numels, keys)])


def decode_sparse(
    sparsifier: Sparsifier,
    values_codec: Codec,
    payload: Tensor,
    outs: list[Tensor],
    weight: float,
    keys: list[int],
) -> Selection:
    """Undo `encode_sparse`, accumulating into `outs`; returns what was kept."""
    numels = [o.numel() for o in outs]
    indices, counts, nbytes = sparsifier.read_support(payload, numels, keys)
    sent = payload[: payload.numel() - nbytes]
    expected = values_codec.segments_nbytes(counts)
    require(
        sent.numel() == expected or (sent.numel() < expected and not values_codec.fixed_size),
        f"{sparsifier}: the payload has {sent.numel()} bytes of values, and {sum(counts)} of them take {expected}; "
        "is it corrupt, or were sender and receiver configured differently?",
    )
    if values_codec.sends_floats:
        values = kernels.payload_as(sent, torch.float32)
    else:
        values = torch.zeros(sum(counts), dtype=torch.float32, device=payload.device)
        values_codec.decode_add_segments(sent, list(values.split(counts)), 1.0, [])
    kernels.scatter.add(outs, indices, values, counts, weight)
    return Selection(indices, values, counts)


def sum_sparse(
    sparsifier: Sparsifier,
    values_codec: Codec,
    payloads: Sequence[Tensor],
    outs: list[Tensor],
    weight: float,
    keys: list[int],
) -> bool:
    """`Codec.decode_sum`: what no payload touches is zero, and need not be looked at again."""
    for out in outs:
        out.zero_()
    kept = [decode_sparse(sparsifier, values_codec, payload, outs, weight, keys) for payload in payloads]
    return kernels.all_finite([kernels.scatter.gather(outs, indices, counts) for indices, _, counts in kept])


def sparse_nbytes(sparsifier: Sparsifier, values_codec: Codec, numels: list[int]) -> int:
    """Size of what `encode_sparse` returns: exact if both are of fixed size, else a bound."""
    counts = [sparsifier.count(n) for n in numels]
    return values_codec.segments_nbytes(counts) + sparsifier.support_nbytes(counts, numels)


def check_ratio(codec: Codec, ratio: float | Schedule) -> None:
    """Raise ValueError unless `ratio` is a fraction, or a schedule of fractions."""
    name = type(codec).__name__
    require(
        isinstance(ratio, Schedule) or (isinstance(ratio, (int, float)) and 0 < ratio <= 1),
        f"{name}: ratio must be above 0 and at most 1, got {ratio!r}; 0.01 keeps one coordinate in a hundred",
    )


def _encode_values(
    values_codec: Codec, values: Tensor, counts: list[int], keys: list[int], gains: list[float]
) -> tuple[Tensor, Tensor | None]:
    """The payload of the values times `gains`, and what it lacks of the values: None for nothing."""
    if values_codec.sends_floats and all(gain == 1.0 for gain in gains):
        return values.view(torch.uint8), None
    kept, lost = list(values.split(counts)), debug.empty_like(values)
    if all(gain == 1.0 for gain in gains):
        sent = values_codec.encode_segments(kept, keys, list(lost.split(counts)))
        return sent, lost
    sent = values_codec.encode_segments([v * gain for v, gain in zip(kept, gains, strict=True)], keys, None)
    values_codec.decode_add_segments(sent, list(lost.zero_().split(counts)), 1.0, [])
    return sent, values - lost


def _all_where_smaller(
    sparsifier: Sparsifier, values_codec: Codec, selection: Selection, segments: list[Tensor]
) -> Selection:
    """The selection, and all of a segment where that makes the payload smaller."""

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


def _count_bytes(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=device).view(torch.uint8)


def _split_counts(payload: Tensor, numels: list[int]) -> tuple[Tensor, list[int]]:
    """What stands before the counts, and the counts."""
    nbytes = 4 * len(numels)
    counts = kernels.payload_as(tail(payload, nbytes), torch.int32).tolist()
    require(
        all(0 <= k <= n for k, n in zip(counts, numels, strict=True)),
        f"the payload is corrupt: it says that {counts} of {numels} elements were kept",
    )
    return payload[: payload.numel() - nbytes], counts


def tail(payload: Tensor, nbytes: int) -> Tensor:
    """The last `nbytes` bytes of a payload; ValueError if it is shorter."""
    have = payload.numel()
    require(have >= nbytes, f"the payload is cut short: its indices take {nbytes} bytes, and it has {have}")
    return payload[payload.numel() - nbytes :]
