"""Sparse all-reduce: every coordinate has an owner, which adds what workers select of it. Bytes do not grow with W.

`regions.py` gives each of W workers a region of the coordinates. With x_i what worker i would like to send, k the
coordinates that its codec keeps, and S_i those that it selects:

    1. each worker tells every owner how many coordinates it sends to each piece of its region      all-to-all
    2. it sends these, encoded: C(x_i) at S_i                                                       all-to-all
    3. owner r adds in rank order, s = sum_i C(x_i), and keeps the k/W largest of its region, G_r.
       It encodes them again, and sends C(s) at G_r to all                                          all-gather

The result is `1/W C(s)` at G, the union of all G_r, and 0 elsewhere. Regions hold equal shares of every large tensor, so
G is close to the k largest of s; exactly k coordinates, whatever the gradients are. With everything selected and values
that lose nothing it is the mean. Both encodings carry values as the codec says, such as 4 bits behind `TopK`.

Memory. Nothing is lost, and no second memory is needed:

    e_i = x_i - C(x_i)   at G and S_i: what worker i delivered is gone, but for what its encoding lost
    e_i = x_i            elsewhere: what it did not select, or what the owner did not keep
    e_r += s - C(s)      at G_r, on the owner r: what the second encoding lost

so `W sum of all results + sum_i e_i = sum of all gradients`. All workers learn G. A memory that masks learns the
coordinates that this worker delivered, those of G and S_i.

Sends worker r, with S_o pieces in the region of owner o, c its coordinates there, d_o bytes of dense vectors, and M_o the
message of k/W coordinates and d_o:

    sum over o != r of  4 (1 + S_o)           step 1
    + sum over o != r of  nbytes(c) + d_o     step 2: about (W-1)/W (p + d)
    + (W-1) M_r                               step 3: (W-1)/W (p + d)

about 2(W-1)/W (p + d) and 4 (W + number of tensors). Where sizes are not fixed, they travel before step 3, 8 (W-1) bytes.

Source: Li and Hoefler 2022, Ok-Topk, arXiv 2201.07598; Shi et al. 2019, gTop-k, arXiv 1901.04359.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import kernels
from ....algorithm import require, required
from ....codec import Codec, Selection, SparseParts
from ....codec.base import add_sections, join_payloads, split_payload
from ....comm import Handle
from ....kernels import Flag
from ....streams import uploaded
from .base import (
    SUMMED,
    Job,
    Stages,
    Team,
    add_dense,
    flat_segments,
    gather_messages,
    overwrite,
    pack,
    pack_each,
    piece_key,
    split_numel,
    store_segments,
    unpack,
)
from .contract import Exchange, Load
from .regions import Piece, Regions, regions


class SparseReduce(Exchange):
    """The result is the largest coordinates of `1/W sum_i C(x_i)`, for codecs that keep the largest."""

    word = "sparse_reduce"
    is_uniform = True
    selects_again = True
    takes_selection = True

    def steps(self, size: int, workers_per_node: int) -> int:
        return 3 * (size > 1)

    def num_bytes(self, size: int, workers_per_node: int, message: float) -> float:
        return 2 * workers_per_node * (size - workers_per_node) * message / size

    def message_nbytes(self, load: Load) -> int:
        return regions_nbytes(load, load.size)

    def suits(self, load: Load) -> bool:
        return load.memory is not None and load.codec.traits.sparse is not None

    def check(self, codec: Codec) -> None:
        parts_of(codec)

    def begin(self, job: Job) -> Stages:
        segments = flat_segments(job.tensors, job.merged)
        reduction = SparseReduction(job, job.comm, segments, job.dense)
        handle = yield from reduction.deliver()

        def finish(totals: list[Tensor], dense_total: Tensor) -> Flag:
            with job.clock("wait"):
                messages = handle.wait()
            with job.clock("decode"):
                summed = reduction.collect(messages)
                if job.keep_residual:
                    reduction.settle(summed)
                    store_segments(segments, job.tensors, job.merged)
                if job.masked:
                    job.clear(job.masked, *reduction.layout.of_kept(summed.positions), reduction.delivered(summed))
                return leave(summed, reduction.layout, totals, dense_total, job)

        return finish


class Selected(NamedTuple):
    """What one worker sends: ascending int64 positions, how many of each segment, what encoding lost (None: nothing)."""

    positions: Tensor
    counts: list[int]
    lost: Tensor | None


class Summed(NamedTuple):
    """What all workers learn: ascending positions, `C(s)` there, and the mean of the dense vectors."""

    positions: Tensor
    values: Tensor
    dense: Tensor


@dataclass
class SparseReduction:
    """One sparse all-reduce of this worker.

    Args:
        job: codec, keys and clock.
        team: the workers that take part.
        segments: flat float32 vectors to select from; `settle` leaves in them what was not delivered.
        dense: float32 vector that is averaged over all workers of the job.
    """

    job: Job
    team: Team
    segments: list[Tensor]
    dense: Tensor

    def __post_init__(self) -> None:
        self.parts = parts_of(self.job.codec)
        self.layout = layout_of(self.parts, [s.numel() for s in self.segments], self.team.size)
        # Merged tensors are one segment, which takes the first key.
        self.keys = self.job.keys[: len(self.segments)]

    def deliver(self) -> Generator[Handle, Any, Handle]:
        """Send to the owners, add, and send on; returns the handle of the last collective."""
        team, layout = self.team, self.layout
        with self.job.clock("encode"):
            self.selected, headers, messages = self._encode()
        numel = self.dense.tensor_split(team.size)[team.rank].numel()
        table = yield team.all_to_all(headers, [1 + len(layout.pieces[team.rank])] * team.size)
        # All headers in one read, because each read waits for the GPU.
        rows: list[list[int]] = torch.stack(table).tolist()
        # Before memory for the messages is taken.
        self._check_headers(rows)
        received = yield team.all_to_all(messages, [4 * numel + row[0] for row in rows])
        with self.job.clock("decode"):
            dense, sums = self._add(received, [row[1:] for row in rows], numel)
        with self.job.clock("encode"):
            message = self._encode_sum(dense, sums)
        sizes = message_sizes(self.parts, layout, self.dense.numel())
        return (yield from gather_messages(team, message, sizes, fixed=self.parts.fixed_size))

    def _check_headers(self, rows: list[list[int]]) -> None:
        """No worker sends more coordinates than a piece has, or more bytes than so many coordinates take."""
        region = self.layout.pieces[self.team.rank]
        numels = [p.numel for p in region]
        for sender, (num_bytes, *counts) in enumerate(rows):
            fits = all(0 <= k <= n for k, n in zip(counts, numels, strict=True))
            most = self.parts.nbytes(counts, numels) if region and fits else 0
            require(
                fits and 0 <= num_bytes <= most,
                f"worker {sender} of {self.team.size} announced {num_bytes} bytes for {counts} coordinates of pieces of "
                f"{numels}, expected at most {most} bytes; do all workers run the same version and configuration?",
            )

    def _encode(self) -> tuple[Selected, list[Tensor], list[Tensor]]:
        """What is selected, and for each owner the header of its message and the message."""
        job, layout, device = self.job, self.layout, self.dense.device
        mixed = [key.mixed() for key in self.keys]
        if job.observe is not None:
            job.observe(job.codec, self.segments, self.keys)
        indices, values, counts = job.selection or self._select(mixed)
        # Ascending, as `count` and `_contains` need them.
        positions, order = layout.positions(indices, counts).sort()
        values = values[order]
        piece_counts = layout.count(positions)
        within = (positions - _repeat(layout.starts[:-1], piece_counts, device)).int()
        left = iter(piece_counts)
        region_counts = [[next(left) for _ in region] for region in layout.pieces]
        payloads, lost = self._encode_regions(within, values, region_counts)
        dense = self.dense.tensor_split(self.team.size)
        messages = pack_each([[part.view(torch.uint8), *parts] for part, parts in zip(dense, payloads, strict=True)])
        header: list[int] = []
        for parts, of_pieces in zip(payloads, region_counts, strict=True):
            header += [sum(part.numel() for part in parts), *of_pieces]
        # Receivers read headers on the host: in main memory, if messages can be sent from there.
        headers = uploaded(self.team.device, header, torch.int32).split([1 + len(c) for c in region_counts])
        return Selected(positions, counts, lost), list(headers), messages

    def _select(self, keys: list[int]) -> Selection:
        if not self.segments:  # a call of dense tensors alone
            nothing = self.dense.new_empty(0)
            return Selection(nothing.int(), nothing, [])
        return self.parts.sparsifier.select(self.segments, keys)

    def _encode_regions(
        self, indices: Tensor, values: Tensor, counts: list[list[int]]
    ) -> tuple[list[list[Tensor]], Tensor | None]:
        """The payload to each owner, in parts, and what they lack of the values: one call if payloads can be cut."""
        sections = self._sections(counts, self.layout.pieces)
        if sections is not None:
            pieces, flat = list(chain(*self.layout.pieces)), list(chain(*counts))
            keys = [
                piece_key(self.keys[p.segment], owner + 1).mixed()
                for owner, region in enumerate(self.layout.pieces)
                for p in region
            ]
            payload, lost = self.parts.encode(indices, values, flat, [p.numel for p in pieces], keys)
            return split_payload(payload, sections), lost
        totals = [sum(of_pieces) for of_pieces in counts]
        payloads, lacking = [], []
        for owner, (i, v) in enumerate(zip(indices.split(totals), values.split(totals), strict=True)):
            payload, lacks = self._encode_pieces(i, v, counts[owner], owner, owner + 1)
            payloads.append([payload])
            lacking.append(lacks)
        if all(lacks is None for lacks in lacking):
            return payloads, None
        zeros = torch.zeros_like(values).split(totals)
        return payloads, torch.cat(
            [zero if lacks is None else lacks for lacks, zero in zip(lacking, zeros, strict=True)]
        )

    def _sections(self, counts: list[list[int]], regions: list[list[Piece]]) -> list[tuple[int, ...]] | None:
        """The sections of the payload of each region, with so many coordinates of its pieces; None if it cannot be cut."""
        each = [
            add_sections(self.parts.section_nbytes(k, p.numel) for k, p in zip(of_pieces, region, strict=True))
            for of_pieces, region in zip(counts, regions, strict=True)
        ]
        sections = [of_region for of_region in each if of_region is not None]
        return sections if any(sections) and len(sections) == len(each) else None

    def _encode_pieces(
        self, indices: Tensor, values: Tensor, counts: list[int], owner: int, part: int
    ) -> tuple[Tensor, Tensor | None]:
        """The payload of indices into the pieces of an owner and their values, and what it lacks."""
        region = self.layout.pieces[owner]
        if not region:
            # A selection of nothing may lie anywhere.
            return torch.empty(0, dtype=torch.uint8, device=self.dense.device), None
        keys = [piece_key(self.keys[p.segment], part).mixed() for p in region]
        return self.parts.encode(indices, values, counts, [p.numel for p in region], keys)

    def _decode(
        self, payloads: list[Tensor], counts: list[list[int]], regions: list[list[Piece]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Of each payload the indices into the pieces of its region, and the values: one call if payloads can be joined."""
        numels = [[p.numel for p in region] for region in regions]
        sections = self._sections(counts, regions)
        if sections is None:
            empty = payloads[0].new_empty(0, dtype=torch.int32), payloads[0].new_empty(0, dtype=torch.float32)
            each = zip(payloads, counts, numels, strict=True)
            return [self.parts.decode(payload, k, n) if n else empty for payload, k, n in each]
        totals = [sum(of_pieces) for of_pieces in counts]
        indices, values = self.parts.decode(
            join_payloads(payloads, sections), list(chain(*counts)), list(chain(*numels))
        )
        return list(zip(indices.split(totals), values.split(totals), strict=True))

    def _add(self, received: list[Tensor], counts: list[list[int]], dense_numel: int) -> tuple[Tensor, list[Tensor]]:
        """The mean of the dense pieces, and the sum of what came for each piece of this region, in rank order."""
        region, device = self.layout.pieces[self.team.rank], self.dense.device
        sums = [torch.zeros(p.numel, dtype=torch.float32, device=device) for p in region]
        dense_mean = torch.zeros(dense_numel, dtype=torch.float32, device=device)
        payloads = add_dense(received, dense_mean, 1.0 / self.job.comm.size)
        decoded = self._decode(payloads, counts, [region] * len(payloads))
        for (indices, values), of_pieces in zip(decoded, counts, strict=True):
            kernels.scatter.add(sums, indices, values, of_pieces, 1.0)
        return dense_mean, sums

    def _encode_sum(self, dense: Tensor, sums: list[Tensor]) -> Tensor:
        """The message to all workers; remembers what it lacks of the sum."""
        region = self.layout.pieces[self.team.rank]
        counts = [p.kept for p in region]
        indices, values = kernels.select.topk(sums, counts)
        positions = indices + _repeat([p.start for p in region], counts, indices.device)
        payload, lost = self._encode_pieces(indices, values, counts, self.team.rank, SUMMED)
        self.owned = Selected(positions, self.layout.counts_of([region]), lost)
        return pack(dense, payload)

    def collect(self, messages: list[Tensor]) -> Summed:
        """What the owners kept, from their messages."""
        numels = [piece.numel() for piece in self.dense.tensor_split(self.team.size)]
        dense, payloads = zip(*map(unpack, messages, numels), strict=True)
        counts = [[p.kept for p in region] for region in self.layout.pieces]
        within, values = zip(*self._decode(list(payloads), counts, self.layout.pieces), strict=True)
        positions = torch.cat(within) + _repeat(self.layout.starts[:-1], list(chain(*counts)), self.dense.device)
        return Summed(positions, torch.cat(values), torch.cat(dense))

    def delivered(self, summed: Summed) -> Tensor:
        """Which of `summed` this worker had a part in, (number of them,) bool."""
        return _contains(self.selected.positions, summed.positions)

    def settle(self, summed: Summed) -> None:
        """Leave in the segments what was not delivered."""
        positions, counts, lost = self.selected
        kept, indices = _contains(summed.positions, positions), self.layout.indices(positions, counts)
        overwrite(self.segments, indices, counts, kept, 0.0 if lost is None else lost)
        # After `overwrite`, which may write to the same coordinates.
        if self.owned.lost is not None:
            indices = self.layout.indices(self.owned.positions, self.owned.counts)
            kernels.scatter.add(self.segments, indices, self.owned.lost, self.owned.counts, 1.0)


# ---- what is left where ----


def leave(summed: Summed, layout: Regions, totals: list[Tensor], dense_total: Tensor, job: Job) -> Flag:
    """Put the mean into `totals` and `dense_total`; returns whether `totals` is finite."""
    segments = flat_segments(totals, job.merged)
    if segments:
        torch._foreach_zero_(segments)
    indices, counts = layout.of_kept(summed.positions)
    kernels.scatter.add(segments, indices, summed.values, counts, job.scale / job.comm.size)
    store_segments(segments, totals, job.merged)
    dense_total.copy_(summed.dense)
    # All other elements are zero.
    return kernels.all_finite([kernels.scatter.gather(segments, indices, counts)])


# ---- what follows from codec and sizes ----


def parts_of(codec: Codec) -> SparseParts:
    """The parts of a codec that keeps the largest coordinates.

    Raises:
        ValueError: it does not.
    """
    return required(
        codec.traits.sparse,
        f"a sparse all-reduce adds coordinates and keeps the largest, and {codec} does not choose by magnitude how many "
        "it keeps; use TopK, BlockwiseTopK, CoarseGrainedTopK or a chain of them, or exchange='all_gather'",
    )


def layout_of(parts: SparseParts, numels: Sequence[int], size: int, merged: bool = False) -> Regions:
    """The regions of `size` workers for segments of `numels` elements, or for one of all of them if `merged`."""
    numels = [sum(numels)] if merged and numels else numels
    return regions(tuple(numels), tuple(parts.sparsifier.count(n) for n in numels), size)


def message_sizes(parts: SparseParts, layout: Regions, dense_numel: int) -> list[int]:
    """Bytes of each owner's message to all: a bound where the size is not fixed."""
    dense = [split_numel(dense_numel, layout.size, rank) for rank in range(layout.size)]
    kept = [parts.nbytes([p.kept for p in r], [p.numel for p in r]) if r else 0 for r in layout.pieces]
    return [4 * d + num_bytes for d, num_bytes in zip(dense, kept, strict=True)]


def regions_nbytes(load: Load, size: int) -> int:
    """`size` times the largest message of a region, and half a header, among `size` workers.

    A region's message has the coordinates that its owner keeps, and its part of the dense vectors. So the cost is exact
    where workers select as many coordinates in each region as are kept there, and a little more otherwise.
    """
    numels, parts = [shape.numel() for shape in load.shapes], parts_of(load.codec)
    layout = layout_of(parts, numels, size, load.merged)
    return size * (max(message_sizes(parts, layout, load.dense_numel)) + max(header_nbytes(layout)) // 2)


def header_nbytes(layout: Regions) -> list[int]:
    """Bytes of the header that each owner gets from every other worker."""
    return [4 * (1 + len(region)) for region in layout.pieces]


# ---- helpers ----


def _repeat(starts: list[int], counts: list[int], device: torch.device) -> Tensor:
    """`counts[i]` times `starts[i]`, int64."""
    return uploaded(device, starts).repeat_interleave(uploaded(device, counts), output_size=sum(counts))


def _contains(some: Tensor, others: Tensor) -> Tensor:
    """Whether each of `others` is among `some`, which ascend."""
    if not some.numel():
        return torch.zeros_like(others, dtype=torch.bool)
    # A search beyond the last position gives an index that does not exist.
    return some[torch.searchsorted(some, others).clamp_(max=some.numel() - 1)] == others
