"""An integral against the normal kernel over an interval, to nearly full relative precision near the mean.

Differences of `erf` lose every digit in three places that level sets visit: in a far tail, on an interval much
narrower than the standard deviation, and when the standard deviation is tiny. So tails are scaled by the kernel (`erfcx`),
and narrow intervals are summed by Gauss's quadrature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SQRT_2PI = math.sqrt(2 * math.pi)
NARROW = 0.5  # half-width * max(1, |middle|) below which an interval is summed by quadrature: to 1e-14
NODES = (0.0, 0.36311746382617816, 0.67718627951073775, 0.89975799541146016)  # of Gauss for the weight 1-x^2, and -x
WEIGHTS = (0.37151927437641725, 0.30075042474454919, 0.14864040458341016, 0.03151620015049868)
LEAST_EXPONENT = -700.0  # numbers that underflow take ten times as long


def tail(s: Tensor) -> Tensor:
    """`integral_s^inf exp(-z^2/2) dz` for `s >= 0`."""
    return _kernel(s) * _mills_ratio(s)


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


def _kernel(z: Tensor) -> Tensor:
    return torch.exp((-0.5 * z * z).clamp(min=LEAST_EXPONENT))


def spread(a: Tensor, b: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The integral over `[a, b]` of `(b-r)(r-a) exp(-(r-mean)^2/(2 std^2))`; all arguments broadcast.

    Args:
        a, b: ends of the intervals, `a <= b`, of one shape.
        mean, std: of the normal kernel; `std > 0`.

    Returns:
        The integrals, of the broadcast shape. Relative error about 1e-11 within ten deviations of the mean; beyond, where the
        kernel is below 1e-21, they have fewer digits.
    """
    half_width, middle = (b - a) / (2 * std), ((a + b) / 2 - mean) / std
    integral = _narrow(half_width, middle)
    wide = half_width * middle.abs().clamp(min=1) > NARROW
    za, zb = (a - mean) / std, (b - mean) / std
    integral[wide] = _wide(za[wide], zb[wide], 2 * half_width[wide])
    return std**3 * integral


def _narrow(h: Tensor, c: Tensor) -> Tensor:
    """The integral of `(h^2-t^2) exp(-(c+t)^2/2)` over |t| <= h."""
    total = WEIGHTS[0] * _kernel(c)
    for node, weight in zip(NODES[1:], WEIGHTS[1:], strict=True):
        t = node * h
        total += weight * (_kernel(c + t) + _kernel(c - t))
    return h**3 * total


def _wide(za: Tensor, zb: Tensor, length: Tensor) -> Tensor:
    """By tail integrals `T_n(z)` from z to infinity: `L (T_1(a)+T_1(b)) - 2 (T_2(a)-T_2(b))`.

    An interval left of the mean is reflected; in one around the mean, what `T_n(a)` has beyond the tail on its own
    side is taken out by hand, because it cancels.
    """
    left = zb <= 0
    near, far = torch.where(left, -zb, za), torch.where(left, -za, zb)
    s = near.abs()
    at_near, at_far = _kernel(near), _kernel(far)
    p1, p2 = (at_near * r for r in _tail_integrals(s))
    q1, q2 = (at_far * r for r in _tail_integrals(far))
    beyond = torch.where(near < 0, SQRT_2PI * (s * far - 1) + 2 * p2, -2 * p2)
    return length * (p1 + q1) + beyond + 2 * q2
