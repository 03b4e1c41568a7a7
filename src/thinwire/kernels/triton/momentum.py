"""Momentum correction and error feedback in Triton: alone, or in the first of the launches that select."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import momentum as family
from ..checks import numels_of
from ..momentum import Buffers, Momentum
from . import histograms, select
from .device import find_segment, load_pointer, load_size
from .histograms import source
from .launch import Launch, kept, launch_each, plan_launches, pointers, starts, table, tiles_of
from .select import MAX_ROW

TILE = 1024


@family._correct.runs_on("triton")
def correct(buffers: Buffers, rule: Momentum) -> None:
    _make(buffers.new_vs, _sources(buffers), rule.momentum, rule.factor, _kind(rule))


@family._correct_topk.runs_on("triton")
def correct_topk(buffers: Buffers, rule: Momentum, counts: list[int]) -> tuple[Tensor, Tensor]:
    arguments = (_sources(buffers), rule.momentum, rule.factor, _kind(rule))
    return _make_and_select(list(buffers.new_vs), *arguments, counts)


@family._add_topk.runs_on("triton")
def add_topk(
    gs: list[Tensor], es: list[Tensor], outs: list[Tensor], factor: float, counts: list[int]
) -> tuple[Tensor, Tensor]:
    return _make_and_select(outs, [pointers(gs), pointers(es)], 0.0, factor, "feedback", counts)


def _sources(b: Buffers) -> list[tuple[int, ...]]:
    return [pointers(tensors) for tensors in (b.gs, b.us, b.vs, b.new_us)]


def _kind(rule: Momentum) -> str:
    return "nesterov" if rule.nesterov else "momentum"


def _make_and_select(
    outs: list[Tensor], sources: list[tuple[int, ...]], m: float, factor: float, kind: str, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """Make the segments and select: in one pass where all segments are large, else one launch more."""
    # `histograms.select` serves only segments above `MAX_ROW` of which at least one element is kept.
    if not outs or any(x.numel() <= MAX_ROW or not k for x, k in zip(outs, counts, strict=True)):
        _make(outs, sources, m, factor, kind)
        return select.topk(outs, counts)
    indices, values = select.empty_selection(sum(counts), outs)
    histograms.select(outs, counts, starts(counts)[:-1], indices, values, sources, m, factor, kind)
    return indices, values


def _make(outs: Sequence[Tensor], sources: list[tuple[int, ...]], m: float, factor: float, kind: str) -> None:
    if not outs:
        return
    device, numels = outs[0].device, tuple(numels_of(outs))
    launches = _plan(device, numels, pointers(outs), *sources)
    launch_each(_make_segments, launches, device, table(device, *sources), len(outs), m, factor, SOURCE=kind, TILE=TILE)


@kept
def _plan(
    device: torch.device, numels: tuple[int, ...], addresses: tuple[int, ...], *sources: tuple[int, ...]
) -> list[Launch]:
    return plan_launches(device, [addresses, numels], tiles_of(numels, TILE), numels, addresses, *sources)


@triton.jit(do_not_specialize=["num_segments"])
def _make_segments(
    rows, others, num_segments, m, factor, SOURCE: tl.constexpr, VECTOR: tl.constexpr, TILE: tl.constexpr
):
    segment, tile = find_segment(rows, num_segments)
    start, offset = tile * TILE, tl.arange(0, TILE)
    inside = offset < load_size(rows + 2 * num_segments + segment, VECTOR) - start
    out = load_pointer(rows + num_segments + segment, VECTOR)
    source(others, segment, num_segments, start, offset, inside, m, factor, out, SOURCE, VECTOR, True)
