"""Checks of options: what passes, and the whole line of what does not."""

import math

import pytest

from thinwire.options import require_choice, require_integer, require_kind, require_number
from thinwire.schedule import GeometricWarmup, Values


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (0, (1,), "an integer, 1 or more, got 0"),
        (9, (1, 8), "an integer from 1 to 8, got 9"),
        (1.0, (1,), "an integer, 1 or more, got 1.0"),
        (True, (1,), "an integer, 1 or more, got True"),
        (None, (1,), "an integer, 1 or more, got None"),
        (2**63, (1,), "an integer from 1 to 9223372036854775807, got 9223372036854775808"),
    ],
)
def test_integers(value, bounds, expected):
    require_integer("A: n", bounds[0], *bounds)
    with pytest.raises(ValueError) as raised:
        require_integer("A: n", value, *bounds)
    assert str(raised.value) == f"A: n must be {expected}"


@pytest.mark.parametrize(
    ("inside", "outside", "bounds", "expected"),
    [
        (0.5, [0, 1.5, math.nan, "x", True], {"above": 0, "most": 1}, "above 0 and at most 1"),
        (0, [-1, 1, math.nan, None], {"least": 0, "below": 1}, "at least 0 and below 1"),
        (1e300, [0, math.inf, math.nan, 10**400], {"above": 0}, "above 0 and finite"),
        (10**300, [-(10**400), -math.inf], {"least": -1}, "at least -1 and finite"),
        (math.inf, [0, math.nan], {"above": 0, "most": math.inf}, "above 0"),
    ],
)
def test_numbers(inside, outside, bounds, expected):
    require_number("A: x", inside, **bounds)
    for value in outside:
        with pytest.raises(ValueError) as raised:
            require_number("A: x", value, **bounds, hint="; try 1")
        assert str(raised.value) == f"A: x must be {expected}, got {value!r}; try 1"


def test_none_and_schedules_pass_where_a_check_lets_them():
    require_integer("A: n", None, 1, or_none=True)
    require_number("A: x", GeometricWarmup(0.001), above=0, or_schedule=True)
    require_integer("A: n", Values((3, 8)), 1, 8, or_schedule=True)
    require_kind("A: part", None, dict, "a dict", or_none=True)
    with pytest.raises(ValueError, match=r"^A: n in Values\(values=\(3, 9\)\) must be an integer from 1 to 8, got 9$"):
        require_integer("A: n", Values((3, 9)), 1, 8, or_schedule=True)
    with pytest.raises(ValueError, match=r"^A: x in GeometricWarmup\(final=2\) must be above 0 and at most 1, got"):
        require_number("A: x", GeometricWarmup(2), above=0, most=1, or_schedule=True)
    with pytest.raises(ValueError, match="^A: n must be an integer, 1 or more, or None, got 0$"):
        require_integer("A: n", 0, 1, or_none=True)
    with pytest.raises(ValueError, match=r"^A: n must be an integer, 1 or more, got GeometricWarmup\(final=0.001\)$"):
        require_integer("A: n", GeometricWarmup(0.001), 1)


def test_choices_and_kinds():
    require_choice("A: word", "b", ("a", "b"))
    require_kind("A: part", (1,), (list, tuple), "a list")
    with pytest.raises(ValueError, match="^A: word must be one of a, b, got 'c'$"):
        require_choice("A: word", "c", ("a", "b"))
    with pytest.raises(ValueError, match=r"^A: part must be a list such as \[1\], got 3; write it so$"):
        require_kind("A: part", 3, (list, tuple), "a list such as [1]", hint="; write it so")
