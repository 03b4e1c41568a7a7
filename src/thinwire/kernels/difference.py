"""CHOCO's and DeepSqueeze's rounds in few passes: encode a difference or a sum, and apply decoded payloads.

A decoding `c` is compared with what was encoded, `v`, by the sums `<c, c>`, `<v, c>` and `<v, v>`. They are float64, but
parts of them are added in float32, in any order: backends agree to about seven digits. Sums of float32 squares that
would overflow or vanish are taken in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from .. import debug
from . import quantize
from .backend import kernel
from .checks import (
    check_length,
    checked_payloads,
    device_of,
    num_buckets,
    numels_of,
    payload_as,
    payload_bytes,
    segments,
    segments_alike,
    vector,
)
from .flags import Flag
from .quantize import Quantizer
from .reduce import all_finite


def encode(
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    add: bool,
    out: Tensor,
    keys: Sequence[int],
    quantizer: Quantizer,
    measured: bool,
) -> Tensor | None:
    """Quantize `v = x - y`, or with `add` `v = x + y`, which is then also written to y; the bytes of `quantize.encode`.

    Args:
        xs: segments of float32.
        ys: segments of the same sizes; overwritten by `v` with `add`.
        add: whether v is the sum.
        out: uint8 of `quantizer.nbytes(...)` bytes, written.
        keys: one 64-bit key per segment.
        quantizer: the levels and the buckets.
        measured: whether to compare the decoding with v.

    Returns:
        float64 tensor `[<c, c>, <v, c>, <v, v>]`, up to rounding, or None unless `measured`.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Example:
        >>> x, y, q = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0]), Quantizer(4, 14, 512)
        >>> encode([x], [y], False, torch.empty(q.nbytes([2]), dtype=torch.uint8), [7], q, measured=True).round(decimals=4)
        tensor([4., 4., 4.], dtype=torch.float64)
    """
    device = device_of(xs, out)
    checked = segments("xs", xs, device)
    others = segments_alike("ys", ys, xs, device)
    check_length("keys", keys, len(xs))
    out = payload_bytes("out", out, quantizer.nbytes(numels_of(xs)), device)
    return _encode.on[device.type](checked, others, add, out, list(keys), quantizer, measured)


def sums(vs: Sequence[Tensor], cs: Sequence[Tensor]) -> Tensor:
    """`[<c, c>, <v, c>, <v, v>]` over all segments, float64.

    Example:
        >>> sums([torch.tensor([3.0, 4.0])], [torch.tensor([1.0, 0.0])]).tolist()
        [1.0, 3.0, 25.0]
    """
    device = device_of(vs)
    return _sums.on[device.type](segments("vs", vs, device), segments_alike("cs", cs, vs, device))


def is_finite(payload: Tensor, numels: Sequence[int], quantizer: Quantizer, factor: float = 1.0) -> Flag:
    """Whether all decoded elements of a payload of `quantize.encode` are finite, times a factor; its scales tell.

    Args:
        payload: uint8, as it was received; it may start at any address.
        numels: elements of each segment.
        quantizer: as given to the encoder.
        factor: of the payload.
    """
    scales = payload_as(payload[: 4 * num_buckets(numels, quantizer.bucket_size)], torch.float32)
    return all_finite([scales * factor])


def choco_add(
    xs: Sequence[Tensor],
    copies: Sequence[Tensor],
    gaps: Sequence[Tensor],
    payloads: Sequence[Tensor],
    factors: Sequence[float],
    weights: Sequence[float],
    step: float,
    quantizer: Quantizer,
) -> None:
    """Apply a round of CHOCO. `v_k` is the decoded payload k times its factor; `v_0` is the worker's own:

        copy += v_0;   gap += (weights[0] - 1) v_0 + sum_{k > 0} weights[k] v_k;   x += step gap

    Args:
        xs, copies: segments of float32, changed.
        gaps: segments of float64, changed.
        payloads: of `encode`, the own first; all of their elements must be finite.
        factors, weights: one for each payload.
        step: of the round.
        quantizer: as given to `encode`.

    Raises:
        ValueError: if sizes do not fit.
    """
    checked, outs = _messages(payloads, xs, factors, weights, quantizer)
    device = device_of(outs, checked[0])
    copies = segments_alike("copies", copies, xs, device)
    gaps = segments_alike("gaps", gaps, xs, device, dtype=torch.float64)
    function = _choco_add.on[device.type]
    function(outs, copies, gaps, checked, list(factors), list(weights), step, quantizer)


def choco_add_dense(
    xs: Sequence[Tensor],
    copies: Sequence[Tensor],
    gaps: Sequence[Tensor],
    vectors: Sequence[Tensor],
    weights: Sequence[float],
    step: float,
) -> None:
    """`choco_add` of decoded messages: each of `vectors` holds all segments."""
    device = device_of(xs)
    outs = segments("xs", xs, device)
    copies = segments_alike("copies", copies, xs, device)
    gaps = segments_alike("gaps", gaps, xs, device, dtype=torch.float64)
    check_length("weights", weights, len(vectors))
    checked = [vector(f"vectors[{k}]", v, torch.float32, device) for k, v in enumerate(vectors)]
    _choco_add_dense.on[device.type](outs, copies, gaps, checked, list(weights), step)


def squeeze_add(
    xs: Sequence[Tensor],
    lost: Sequence[Tensor] | None,
    payloads: Sequence[Tensor],
    factors: Sequence[float],
    weights: Sequence[float],
    step: float,
    quantizer: Quantizer,
) -> None:
    """Apply a round of DeepSqueeze. `v_k` is the decoded payload k times its factor; `v_0` is the worker's own:

        lost -= v_0;   x += step (sum_{k > 0} weights[k] v_k - weights[0] v_0)

    Args:
        xs: segments of float32, changed.
        lost: segments of the same sizes, changed; None leaves them out.
        payloads: of `encode`, the own first.
        factors, weights: one for each payload.
        step: of the round.
        quantizer: as given to `encode`.

    Raises:
        ValueError: if sizes do not fit.
    """
    checked, outs = _messages(payloads, xs, factors, weights, quantizer)
    device = device_of(outs, checked[0])
    rests = None if lost is None else segments_alike("lost", lost, xs, device)
    _squeeze_add.on[device.type](outs, rests, checked, list(factors), list(weights), step, quantizer)


def _messages(
    payloads: Sequence[Tensor],
    xs: Sequence[Tensor],
    factors: Sequence[float],
    weights: Sequence[float],
    quantizer: Quantizer,
) -> tuple[list[Tensor], list[Tensor]]:
    """The payloads and the segments, checked."""
    checked = checked_payloads(payloads, xs, quantizer.nbytes(numels_of(xs)))
    check_length("factors", factors, len(payloads))
    check_length("weights", weights, len(payloads))
    return checked


# ---- the reference ----


@kernel
def _encode(
    xs: list[Tensor],
    ys: list[Tensor],
    add: bool,
    out: Tensor,
    keys: list[int],
    quantizer: Quantizer,
    measured: bool,
) -> Tensor | None:
    vs = [x + y if add else x - y for x, y in zip(xs, ys, strict=True)]
    if add:
        for y, v in zip(ys, vs, strict=True):
            y.copy_(v)
    lost = [debug.empty_like(v) for v in vs] if measured else None
    quantize.encode(vs, out, keys, quantizer, lost)
    if lost is None:
        return None
    # The residual is v - c, so c is known without decoding.
    return sums(vs, [v - rest for v, rest in zip(vs, lost, strict=True)])


@kernel
def _sums(vs: list[Tensor], cs: list[Tensor]) -> Tensor:
    total = torch.zeros(3, dtype=torch.float64, device=device_of(vs))
    for v, c in zip((t.double() for t in vs), (t.double() for t in cs), strict=True):
        total += torch.stack([(c * c).sum(), (v * c).sum(), (v * v).sum()])
    return total


@kernel
def _choco_add(
    xs: list[Tensor],
    copies: list[Tensor],
    gaps: list[Tensor],
    payloads: list[Tensor],
    factors: list[float],
    weights: list[float],
    step: float,
    quantizer: Quantizer,
) -> None:
    choco_add_dense(xs, copies, gaps, _decoded(payloads, factors, xs, quantizer), weights, step)


@kernel
def _choco_add_dense(
    xs: list[Tensor],
    copies: list[Tensor],
    gaps: list[Tensor],
    vectors: list[Tensor],
    weights: list[float],
    step: float,
) -> None:
    parts = zip(*(v.split(numels_of(xs)) for v in vectors), strict=True)
    for x, copy, gap, (own, *theirs) in zip(xs, copies, gaps, parts, strict=True):
        copy.add_(own)
        # float64, because rounding errors in the gaps would move the mean in every round.
        own, theirs = own.double(), [v.double() for v in theirs]
        gap.add_(own * (weights[0] - 1.0)).add_(_weighted(own, theirs, weights))
        x.add_((gap * step).float())


@kernel
def _squeeze_add(
    xs: list[Tensor],
    lost: list[Tensor] | None,
    payloads: list[Tensor],
    factors: list[float],
    weights: list[float],
    step: float,
    quantizer: Quantizer,
) -> None:
    vectors = _decoded(payloads, factors, xs, quantizer)
    parts = zip(*(v.split(numels_of(xs)) for v in vectors), strict=True)
    for i, (x, (own, *theirs)) in enumerate(zip(xs, parts, strict=True)):
        if lost is not None:
            lost[i].sub_(own)
        x.add_((_weighted(own, theirs, weights) - own * weights[0]) * step)


def _decoded(payloads: list[Tensor], factors: list[float], xs: list[Tensor], quantizer: Quantizer) -> list[Tensor]:
    """Each payload times its factor, as a vector of all segments."""
    numels, vectors = numels_of(xs), []
    for payload, factor in zip(payloads, factors, strict=True):
        vectors.append(debug.empty(sum(numels), dtype=torch.float32, device=payload.device))
        quantize.decode_sum([payload], list(vectors[-1].split(numels)), factor, quantizer)
    return vectors


def _weighted(own: Tensor, theirs: Sequence[Tensor], weights: list[float]) -> Tensor:
    terms = [v * weight for v, weight in zip(theirs, weights[1:], strict=True)]
    return reduce(torch.add, terms) if terms else torch.zeros_like(own)
