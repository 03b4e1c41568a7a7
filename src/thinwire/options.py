"""Checks of options: each raises the user's mistake as a `ValueError` that says what is expected and what came.

    require_integer("QSGD: bits", bits, 1, 8)             QSGD: bits must be an integer from 1 to 8, got 9
    require_number("LoCo: beta", beta, above=0, most=1)   LoCo: beta must be above 0 and at most 1, got 2
    require_choice("Mean: divide_by", word, WORDS)        Mean: divide_by must be one of workers, senders, got 'all'
    require_kind("Mean: codec", codec, Codec, "a codec such as TopK(0.01)")

True and False are no numbers. A check may let None or a schedule pass too, whose values are checked as far as they are known.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from operator import ge, gt, le, lt
from typing import Any

from .algorithm import require
from .schedule import Schedule, extremes

MAX_INTEGER, MAX_NUMBER = 2**63 - 1, sys.float_info.max  # of the types that options are computed with


def require_integer(
    what: str,
    value: object,
    least: int,
    most: int | None = None,
    *,
    or_none: bool = False,
    or_schedule: bool = False,
    hint: str = "",
) -> None:
    """Require an integer from `least` to `most`, of 64 bits at most.

    Args:
        what: the option, as in "QSGD: bits".
        value: of the option.
        least, most: bounds; None => no upper one.
        or_none, or_schedule: whether None or a schedule passes too.
        hint: the end of the message, such as a remedy.

    Raises:
        ValueError: anything else.

    Example:
        >>> require_integer("SVD: rank", 0, 1)
        Traceback (most recent call last):
        ValueError: SVD: rank must be an integer, 1 or more, got 0
    """
    for one in extremes(value) if or_schedule else ():
        require_integer(f"{what} in {value}", one, least, most, hint=hint)
    integer = isinstance(value, int) and not isinstance(value, bool)
    if most is None and integer and value > MAX_INTEGER:  # type: ignore[operator]  # an integer
        most = MAX_INTEGER
    fits = integer and least <= value and (most is None or value <= most)  # type: ignore[operator]  # an integer
    expected = f"an integer, {least} or more" if most is None else f"an integer from {least} to {most}"
    _require(fits, what, value, expected, or_none, or_schedule, hint)


def require_number(
    what: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    or_none: bool = False,
    or_schedule: bool = False,
    hint: str = "",
) -> None:
    """Require a number within bounds: `above` and `below` are outside, `least` and `most` inside. NaN is never within.

    Without an upper bound it must be finite; `most=math.inf` takes all.

    See `require_integer` for the other arguments.

    Raises:
        ValueError: anything else.

    Example:
        >>> require_number("Dion: mu", 1.0, least=0, below=1)
        Traceback (most recent call last):
        ValueError: Dion: mu must be at least 0 and below 1, got 1.0
    """
    for one in extremes(value) if or_schedule else ():
        require_number(f"{what} in {value}", one, above=above, least=least, below=below, most=most, hint=hint)
    # What is no number, or an integer that is too large for a float, becomes NaN, which no bound holds for.
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    number = math.nan if isinstance(number, int) and abs(number) > MAX_NUMBER else number
    limits = [("above", above, gt), ("at least", least, ge), ("below", below, lt), ("at most", most, le)]
    fits = all(bound is None or compare(number, bound) for _, bound, compare in limits)
    words = [f"{word} {bound}" for word, bound, _ in limits if bound not in (None, math.inf)]
    if below is most is None:
        fits, words = fits and -math.inf < number < math.inf, [*words, "finite"]
    _require(fits, what, value, " and ".join(words), or_none, or_schedule, hint)


def require_choice(what: str, value: object, choices: Iterable[Any]) -> None:
    """Require one of `choices`.

    Raises:
        ValueError: anything else.
    """
    known = list(choices)
    require(value in known, f"{what} must be one of {', '.join(map(str, known))}, got {value!r}")


def require_kind(
    what: str, value: object, kind: type | tuple[type, ...], expected: str, *, or_none: bool = False, hint: str = ""
) -> None:
    """Require an object of a class, or of one of several; `expected` describes it, as in "a codec such as TopK(0.01)".

    Raises:
        ValueError: anything else.
    """
    _require(isinstance(value, kind), what, value, expected, or_none, False, hint)


def _require(fits: bool, what: str, value: object, expected: str, or_none: bool, or_schedule: bool, hint: str) -> None:
    passes = (or_none and value is None) or (or_schedule and isinstance(value, Schedule))
    require(fits or passes, f"{what} must be {expected}{', or None' * or_none}, got {value!r}{hint}")
