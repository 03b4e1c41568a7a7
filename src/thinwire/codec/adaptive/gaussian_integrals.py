"""An integral against the normal kernel over an interval, to nearly full relative precision near the mean.

Differences of `erf` lose every digit in three places that level sets visit: in a far tail, on an interval much
narrower than the standard deviation, and when the standard deviation is tiny. So tails are scaled by the kernel (`erfcx`),
and narrow intervals are summed as a Taylor series about their middle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SQRT_2PI = math.sqrt(2 * math.pi)
SERIES_TERMS = 20
NARROW = 0.5  # half-width * max(1, |middle|) below which an interval is summed as a series


def tail(s: Tensor) -> Tensor:
    """`integral_s^inf exp(-z^2/2) dz` for `s >= 0`."""
    return torch.exp(-0.5 * s**2) * _mills_ratio(s)


def _mills_ratio(s: Tensor) -> Tensor:
    ratio: Tensor = math.sqrt(math.pi / 2) * torch.special.erfcx(s / math.sqrt(2))
    return ratio


def _tail_integrals(s: Tensor) -> tuple[Tensor, Tensor]:
    """`R_n(s) = exp(s^2/2) * integral_s^inf (z-s)^n/n! exp(-z^2/2) dz` for n = 1, 2 and `s >= 0`.

    `R_0` is Mills' ratio, `sqrt(pi/2) erfcx(s/sqrt 2)`; then `R_1 = 1 - s R_0`, `R_2 = (R_0 - s R_1)/2`. These lose
    `s^4` in precision, but the kernel, which multiplies them, is below 1e-21 from s = 10 on.
    """
    r0 = _mills_ratio(s)
    r1 = 1 - s * r0
    return r1, (r0 - s * r1) / 2


def _kernel(r: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return torch.exp(-0.5 * ((r - mean) / std) ** 2)


def spread(a: Tensor, b: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The integral over `[a, b]` of `(b-r)(r-a) exp(-(r-mean)^2/(2 std^2))`; all arguments broadcast.

    Args:
        a, b: ends of the intervals, `a <= b`.
        mean, std: of the normal kernel; `std > 0`.

    Returns:
        The integrals, of the broadcast shape. Relative error about 1e-11 within ten deviations of the mean; beyond, where the
        kernel is below 1e-21, they have fewer digits.
    """
    a, b, mean, std = torch.broadcast_tensors(a, b, mean, std)
    half_width, middle = (b - a) / (2 * std), ((a + b) / 2 - mean) / std
    narrow = half_width * middle.abs().clamp(min=1) <= NARROW
    wide = _wide(a, b, mean, std)
    if not narrow.any():
        return wide
    scale = _kernel((a + b) / 2, mean, std)
    series = _narrow(torch.where(narrow, half_width, 0), torch.where(narrow, middle, 0), std, scale)
    return torch.where(narrow, series, wide)


def _narrow(h: Tensor, c: Tensor, std: Tensor, scale: Tensor) -> Tensor:
    """`exp(-(c+t)^2/2) = exp(-c^2/2) sum_n (-t)^n He_n(c)/n!` (Hermite), integrated over |t| <= h term by term."""
    previous, term = torch.zeros_like(h), torch.ones_like(h)  # (-h)^n He_n(c)/n!
    total = torch.zeros_like(h)
    for n in range(SERIES_TERMS):
        if n % 2 == 0:  # odd terms cancel on an interval about its middle
            total = total + term * (4 / ((n + 1) * (n + 3)))
        previous, term = term, -(h / (n + 1)) * (c * term + h * previous)
    return scale * (h * std) ** 3 * total


def _wide(a: Tensor, b: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """By tail integrals `T_n(z)` from z to infinity: `L (T_1(a)+T_1(b)) - 2 (T_2(a)-T_2(b))`.

    An interval left of the mean is reflected; in one around the mean, what `T_n(a)` has beyond the tail on its own
    side is taken out by hand, because it cancels.
    """
    left = b <= mean
    length = (b - a) / std
    za, zb = (a - mean) / std, (b - mean) / std
    near, far = torch.where(left, -zb, za), torch.where(left, -za, zb)
    at_a, at_b = _kernel(a, mean, std), _kernel(b, mean, std)
    at_near, at_far = torch.where(left, at_b, at_a), torch.where(left, at_a, at_b)
    around = near < 0
    s = near.abs()
    p1, p2 = (at_near * r for r in _tail_integrals(s))
    q1, q2 = (at_far * r for r in _tail_integrals(far.clamp(min=0)))
    beyond = torch.where(around, SQRT_2PI * (s * far - 1) + 2 * p2, -2 * p2)
    return std**3 * (length * (p1 + q1) + beyond + 2 * q2)
