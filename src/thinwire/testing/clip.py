"""The conformance suite of clips."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..average import Clip
from ..kernels.checks import described
from .algorithm import check_algorithm
from .random import normal, untouched_random_state

SHAPES = [(), (0,), (7,), (13, 5), (3, 4, 5)]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_clip(clip: Clip, named: bool = True) -> None:
    """Check that a clip fulfils the contract of `thinwire.average.mean.clip`.

    The result is a new float32 tensor of the gradient's shape, and the gradient, of any float type and strides, stays as it
    is. The result points where the gradient does, and its norm is no larger, in float64. It is bounded: two huge gradients of
    one direction have the same norm, whatever theirs were. Zeros stay zeros, and elements that are not finite never become
    finite. The same gradient gives the same bits. No global random state is changed.

    Args:
        clip: the clip to check.
        named: whether `parse(repr(clip))` must equal it.

    Raises:
        AssertionError: the clip breaks the contract.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_clip
        >>> check_clip(tw.average.ClipByNorm(1.0))
    """
    check_algorithm(clip, Clip, named)
    with untouched_random_state(clip):
        for num_workers in (1, 4):
            for i, shape in enumerate(SHAPES):
                for dtype in DTYPES:
                    gradient = normal(shape, i).to(dtype)
                    _check_finite(clip, gradient.mT if gradient.ndim > 1 else gradient, num_workers)
        _check_bound(clip)
        _check_not_finite(clip)


def _check_finite(clip: Clip, gradient: Tensor, num_workers: int) -> None:
    for scale in (0.0, 1e-3, 1.0, 1e3):
        scaled = gradient * scale
        clipped, again = (_apply(clip, scaled, num_workers) for _ in range(2))
        where = f"{clip}, {num_workers} workers, {scaled.dtype} of shape {tuple(scaled.shape)}"
        assert clipped.isfinite().all(), f"{where}: a finite gradient has a result that is not finite"
        assert torch.equal(again, clipped), f"{where}: the same gradient has other bits the second time"
        before, after = _norm(scaled), _norm(clipped)
        # The rounding of float32.
        assert after <= before * (1 + 2.0**-22), f"{where}: the norm grew from {before} to {after}"
        inner = (clipped.double() * scaled.double()).sum().item()
        assert inner > 0 or before == 0, f"{where}: the result does not point where the gradient does"


def _check_bound(clip: Clip) -> None:
    # Squares of such numbers overflow in float32.
    huge, larger = (_norm(_apply(clip, normal((13, 5), 3) * scale, 4)) for scale in (1e20, 1e30))
    assert 0 < huge, f"{clip}: a huge gradient became zero"
    # The rounding of float32.
    is_bounded = math.isclose(huge, larger, rel_tol=1e-6)
    assert is_bounded, f"{clip}: gradients of 1e20 and of 1e30 must have the same norm, got {huge} and {larger}"


def _check_not_finite(clip: Clip) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        gradient = normal((13, 5), 4)
        gradient[2, 3] = bad
        # The norm over all workers is not finite then, either; another worker's gradient may be the reason alone.
        for norm in (2.0, math.inf, math.nan):
            clipped = _apply(clip, gradient, 4, norm)
            assert not clipped[2, 3].isfinite(), f"{clip}: the element {bad} became {clipped[2, 3].item()}"


def _apply(clip: Clip, gradient: Tensor, num_workers: int, norm: float = 2.0) -> Tensor:
    """The clipped gradient, checked."""
    before = gradient.clone()
    clipped = clip.apply(gradient, num_workers, norm if clip.needs_norms else None)
    where = f"{clip}, {num_workers} workers, {gradient.dtype} of shape {tuple(gradient.shape)}"
    assert torch.equal(gradient.nan_to_num(), before.nan_to_num()), f"{where}: apply changed the gradient"
    expected, got = f"torch.float32 of shape {tuple(gradient.shape)}", described(clipped)
    assert expected == got, f"{where}: the result must be {expected}, got {got}"
    is_new = not gradient.numel() or clipped.data_ptr() != gradient.data_ptr()
    assert is_new, f"{where}: the result must be a new tensor, got the memory of the gradient"
    return clipped


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
