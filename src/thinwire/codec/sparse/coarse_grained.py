"""Coarse-grained top-k: workers agree on the chunks of largest norm and average these chunks densely."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ... import debug, kernels
from ...options import require_integer
from ...schedule import Schedule
from ..agreed_codec import AgreedCodec
from ..base import Codec
from ..dense.cast import Identity
from ..traits import Traits
from ..types import Keys, Selection, Sizes, segment_numels
from .base import Sparsifier, check_ratio
from .payload import SparseParts
from .top_k import TopK, num_kept


@dataclass(frozen=True, repr=False)
class CoarseGrainedTopK(AgreedCodec):
    """Keeps whole chunks of a segment: of `m = ceil(n / chunk)` chunks the `max(1, ceil(ratio * m))` of largest L1 norm.

    Workers all-reduce the norms of all chunks, choose the largest sums, and all-reduce these chunks as float32. They send
    no index. A worker sends `2 (W-1)/W 4 (m + k chunk)` bytes for k chunks, which is less than twice what two workers
    send, however many there are. Outside of an averager a worker chooses by its own norms and sends the
    numbers of its chunks.

    Biased: use it with a memory such as `ErrorFeedback`. A segment of at most one chunk is sent whole, so
    `granularity="bucket"` or "model" suits models of many small tensors. A shorter last chunk is padded with zeros.

    Args:
        ratio: fraction of the chunks that is kept, in (0, 1]; lower => smaller messages.
        chunk: elements of a chunk; larger => fewer norms to agree on, and a coarser choice.

    Raises:
        ValueError: a field out of range.

    Source: Sun et al. 2019, GradientFlow, arXiv 1902.06855 (coarse-grained sparse communication).

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.tensor([[1.0, 1.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0]][comm.rank])
        ...     averager = tw.Mean(tw.codec.CoarseGrainedTopK(ratio=0.5, chunk=2), min_ndim=0)
        ...     state = averager.init([("x", x)], comm)
        ...     averager.step(state, [("x", x)], comm).wait()
        ...     return x
        >>> tw.LocalWorld(2).run(worker)[0]
        tensor([3.0000, 0.5000, 0.0000, 0.0000])
    """

    ratio: float | Schedule
    chunk: int = 4096

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)
        require_integer("CoarseGrainedTopK: chunk", self.chunk, 1)

    combined_by = "sum"

    @cached_property
    def traits(self) -> Traits:
        return Traits(agreement=self, sparse=SparseParts(ChunkElements(self), TopK(self.ratio), Identity()))

    def propose(self, segments: list[Tensor]) -> Tensor:
        return kernels.reduce.chunk_norms(segments, self.chunk)

    def agreed(self, total: Tensor, num_workers: int) -> Codec:
        return AgreedChunks(self, total)

    def num_chunks(self, numel: int) -> int:
        """The number of chunks of a segment of `numel` elements; the last may be shorter."""
        return -(-numel // self.chunk)

    def count(self, numel: int) -> int:
        """How many chunks are kept."""
        return num_kept(self.ratio, self.num_chunks(numel))

    def choose(self, norms: Tensor, numels: list[int]) -> tuple[Tensor, ...]:
        """The chunks to keep of each segment, in ascending order; ties go to the first chunk."""
        parts = list(norms.split([self.num_chunks(n) for n in numels]))
        counts = [self.count(n) for n in numels]
        chunks: tuple[Tensor, ...] = kernels.select.topk(parts, counts)[0].split(counts)
        return chunks

    def support(self, payload: Tensor, size: Sizes, key: Keys | None = None) -> Selection:
        """All coordinates of the chosen chunks; its values are empty."""
        numels = segment_numels(size)
        return _support(self, payload, self.values_nbytes(numels), numels)

    def values_nbytes(self, numels: list[int]) -> int:
        """Bytes of the chosen chunks of segments of these sizes."""
        return 4 * sum(self.count(n) * min(self.chunk, n) for n in numels)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        numels = [s.numel() for s in segments]
        chosen = self.choose(self.propose(segments), numels)
        values = encode_chunks(self.chunk, chosen, segments, residuals)
        counts, num_chunks = [c.numel() for c in chosen], [self.num_chunks(n) for n in numels]
        codes = debug.empty(self.indices_nbytes(numels), dtype=torch.uint8, device=values.device)
        kernels.indices.encode(torch.cat(chosen), counts, num_chunks, codes)
        return torch.cat([values, codes])

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        numels = [o.numel() for o in outs]
        nbytes, counts = self.values_nbytes(numels), [self.count(n) for n in numels]
        indices = kernels.indices.decode(payload[nbytes:], counts, [self.num_chunks(n) for n in numels])
        decode_chunks(self.chunk, indices.split(counts), payload[:nbytes], outs, weight)

    def segments_nbytes(self, numels: list[int]) -> int:
        return self.values_nbytes(numels) + self.indices_nbytes(numels)

    def indices_nbytes(self, numels: list[int]) -> int:
        """Bytes of the coded numbers of the chosen chunks."""
        return sum(kernels.indices.nbytes(self.count(n), self.num_chunks(n)) for n in numels)


# eq=False: `==` of tensors is no single truth value.
@dataclass(frozen=True, repr=False, eq=False)
class AgreedChunks(Codec):
    """`CoarseGrainedTopK` in one step, after workers have agreed: payloads are the chosen chunks, and add on the wire."""

    rule: CoarseGrainedTopK
    norms: Tensor

    traits = Traits(sum_dtype=torch.float32)

    def support(self, payload: Tensor, size: Sizes, key: Keys | None = None) -> Selection:
        """All coordinates of the chosen chunks; its values are empty."""
        return _support(self, payload, payload.numel(), segment_numels(size))

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        chosen = self.rule.choose(self.norms, [s.numel() for s in segments])
        return encode_chunks(self.rule.chunk, chosen, segments, residuals)

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        chosen = self.rule.choose(self.norms, [o.numel() for o in outs])
        decode_chunks(self.rule.chunk, chosen, payload, outs, weight)

    def segments_nbytes(self, numels: list[int]) -> int:
        return self.rule.values_nbytes(numels)


@dataclass(frozen=True, repr=False)
class ChunkElements(Sparsifier):
    """Selects all elements of the chunks that a worker would choose alone."""

    rule: CoarseGrainedTopK

    def __repr__(self) -> str:
        return repr(self.rule)

    def count(self, numel: int) -> int:
        return min(numel, self.rule.count(numel) * self.rule.chunk)

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        payload = self.rule.encode_segments(segments, keys, None)
        indices, _, counts = self.rule.support(payload, [s.numel() for s in segments])
        return Selection(indices, kernels.scatter.gather(segments, indices, counts), counts)


def _support(codec: Codec, payload: Tensor, values_nbytes: int, numels: list[int]) -> Selection:
    """The positions of a payload: decode it with ones in place of its values."""
    ones = torch.ones(values_nbytes // 4, dtype=torch.float32, device=payload.device).view(torch.uint8)
    marks = codec.decode(torch.cat([ones, payload[values_nbytes:]]), numels)
    indices = [mark.nonzero().flatten().int() for mark in marks]
    return Selection.of_positions(torch.cat(indices), [i.numel() for i in indices])


def encode_chunks(
    chunk: int, chosen: tuple[Tensor, ...], segments: list[Tensor], residuals: list[Tensor] | None
) -> Tensor:
    """The values of the chosen chunks as bytes; they are zero in the residuals."""
    # First, because residuals, which are cleared next, may be the segments.
    values = [_take(x, chunk, chunks) for x, chunks in zip(segments, chosen, strict=True)]
    if residuals is not None:
        for x, r, chunks in zip(segments, residuals, chosen, strict=True):
            if r.data_ptr() != x.data_ptr():
                r.copy_(x)
            _rows(r, chunk).index_fill_(0, _whole(r, chunk, chunks), 0.0)
            r.index_fill_(0, _last_elements(r, chunk, chunks)[0], 0.0)
    return torch.cat(values).view(torch.uint8)


def decode_chunks(chunk: int, chosen: tuple[Tensor, ...], payload: Tensor, outs: list[Tensor], weight: float) -> None:
    """Add the chosen chunks to `outs`."""
    values = (kernels.payload_as(payload, torch.float32) * weight).split(
        [chunks.numel() * min(chunk, o.numel()) for chunks, o in zip(chosen, outs, strict=True)]
    )
    for out, chunks, value in zip(outs, chosen, values, strict=True):
        # Not `index_add_`: on GPUs its atomic additions make zeros of numbers below the normal range.
        at, rows, whole = max(0, chunks.numel() - 1) * chunk, _rows(out, chunk), _whole(out, chunk, chunks)
        rows.index_copy_(0, whole, rows[whole] + value[:at].view(-1, chunk))
        last, size = value[at:], value.numel() - at
        if size:
            begin = chunks[-1:].long() * chunk
            first = begin.clamp(max=out.numel() - size)  # so many elements from there on are inside
            elements = first + torch.arange(size, device=out.device)
            place = elements - begin
            # Adding -0.0 changes nothing, not even a zero's sign.
            added = torch.where(place >= 0, last[place.clamp(min=0)], torch.full_like(last, -0.0))
            out.index_copy_(0, elements, out[elements] + added)


def _rows(x: Tensor, chunk: int) -> Tensor:
    """Whole chunks as the rows of a view."""
    return x[: x.numel() // chunk * chunk].view(-1, chunk)


def _whole(x: Tensor, chunk: int, chunks: Tensor) -> Tensor:
    """Rows of all chosen chunks but the last: they ascend, so that these are whole. A corrupt one stays inside too."""
    return chunks[:-1].long().clamp(max=x.numel() // chunk - 1)


def _last_elements(x: Tensor, chunk: int, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Where the elements of the last chosen chunk are, and which of them lie inside `x`; the others repeat its end."""
    elements = chunks[-1:].long() * chunk + torch.arange(min(chunk, x.numel()), device=x.device)
    return elements.clamp(max=x.numel() - 1), elements < x.numel()


def _take(x: Tensor, chunk: int, chunks: Tensor) -> Tensor:
    """Values of the chosen chunks, all of one size; zeros fill up the last one."""
    elements, is_inside = _last_elements(x, chunk, chunks)
    last = torch.where(is_inside, x[elements], torch.zeros_like(x[:1]))
    return torch.cat([_rows(x, chunk).index_select(0, _whole(x, chunk, chunks)).view(-1), last])
