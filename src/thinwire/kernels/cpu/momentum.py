"""Momentum correction and error feedback in C++."""

from __future__ import annotations

from torch import Tensor

from .. import _native
from ..momentum import Buffers, Momentum
from .views import Floats, empty_selection, views

__all__ = ["correct", "correct_topk", "add_topk"]


Segments = list[Floats]


def _views(b: Buffers) -> tuple[Segments, Segments, Segments, Segments, Segments]:
    return views(b.gs), views(b.us), views(b.vs), views(b.new_us), views(b.new_vs)


def _native_rule(rule: Momentum) -> _native.Momentum:
    return _native.Momentum(rule.momentum, rule.factor, rule.nesterov)


def correct(buffers: Buffers, rule: Momentum) -> None:
    _native.momentum_correct(*_views(buffers), _native_rule(rule))


def correct_topk(buffers: Buffers, rule: Momentum, counts: list[int]) -> tuple[Tensor, Tensor]:
    indices, values = empty_selection(sum(counts))
    _native.momentum_correct_topk(*_views(buffers), _native_rule(rule), counts, indices.numpy(), values.numpy())
    return indices, values


def add_topk(
    gs: list[Tensor], es: list[Tensor], outs: list[Tensor], factor: float, counts: list[int]
) -> tuple[Tensor, Tensor]:
    indices, values = empty_selection(sum(counts))
    _native.add_topk(views(gs), views(es), views(outs), factor, counts, indices.numpy(), values.numpy())
    return indices, values
