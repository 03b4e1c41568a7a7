"""What all algorithms refuse, whatever they check themselves."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

import thinwire as tw
from thinwire.algorithm import Algorithm


def algorithms():
    named = [getattr(tw, name) for name in tw.__all__]
    return [
        kind
        for kind in named
        if inspect.isclass(kind) and issubclass(kind, Algorithm) and dataclasses.is_dataclass(kind)
        if not inspect.isabstract(kind)
    ]


# Enough to build those with fields that have no default.
GIVEN = {
    "bits": 4,
    "ratio": 0.1,
    "rank": 1,
    "levels": (-1.0, 1.0),
    "values": (1, 2),
    "initial": 0.5,
    "final": 0.1,
    "epochs": 4,
    "every": 4,
}


@pytest.mark.parametrize("kind", algorithms(), ids=lambda kind: kind.__name__)
def test_true_is_no_number(kind):
    """`isinstance(True, int)` holds, so every field that takes a number took True for 1."""
    fields = dataclasses.fields(kind)
    for field in fields:
        if not {"int", "float"} & set(str(field.type).replace(",", " ").split()) or "bool" in str(field.type):
            continue
        for wrong in (True, False):
            given = {f.name: GIVEN[f.name] for f in fields if f.default is dataclasses.MISSING and f.name in GIVEN}
            if "averager" in {f.name for f in fields} - given.keys() and kind is not tw.Asynchronous:
                given["averager"] = tw.Mean()
            with pytest.raises(ValueError, match=rf"^{kind.__name__}: {field.name} must be of type .*, got {wrong}$"):
                kind(**given | {field.name: wrong})


def test_true_in_a_tuple_is_no_number():
    with pytest.raises(ValueError, match="Values: values must be of type"):
        tw.schedule.Values((True, 2))


def test_algorithms_without_checks_of_their_own_refuse_it_too():
    @dataclasses.dataclass(frozen=True, repr=False)
    class Unchecked(Algorithm):
        share: float = 0.5
        exact: bool = False

    with pytest.raises(ValueError, match="Unchecked: share must be of type float, got True"):
        Unchecked(True)
    assert Unchecked(exact=True).exact


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: tw.Gossip(tw.Mix(), overlap="x"), "Gossip: overlap"),
        (lambda: tw.QSGD(zero=0), "QSGD: zero"),
        (lambda: tw.PowerGossip(warm_start=None), "PowerGossip: warm_start"),
        (lambda: tw.RandomK(0.1, shared=1), "RandomK: shared"),
    ],
)
def test_what_is_true_or_false_is_nothing_else(build, name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got"):
        build()


@pytest.mark.parametrize("decorate", [lambda cls: cls, dataclasses.dataclass], ids=["no dataclass", "not frozen"])
def test_a_class_that_is_no_frozen_dataclass_is_refused_when_it_is_made(decorate):
    """Without it an error of `dataclasses` came from `repr`, and of `hash` from a cache."""

    class Loose(Algorithm):
        share: float = 0.5

    with pytest.raises(ValueError, match=r"^Loose: write @dataclass\(frozen=True, repr=False\) above the class"):
        decorate(Loose)()


@pytest.mark.parametrize(
    "build",
    [
        lambda: tw.TopK(np.float64(0.25)),
        lambda: tw.schedule.Values(np.array([0.25, 0.5])),
        lambda: tw.Mean(tw.TopK(tw.schedule.GeometricWarmup(np.logspace(-3, -1, 3)[1]))),
    ],
)
def test_float64_of_numpy_is_a_float(build):
    """Its `repr` is `np.float64(0.25)`, which `parse` does not read."""
    assert tw.parse(repr(build())) == build()


@dataclasses.dataclass(frozen=True, repr=False)
class Own(tw.Cast):
    """Fields of all sorts, as in someone's own codec."""

    part: tw.codec.Codec = dataclasses.field(default=tw.Cast(), kw_only=True)
    width: int = 3
    sizes: tuple[int, ...] = ()
    twice: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "twice", 2 * self.width)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (Own(part=tw.TopK(0.25)), "Own(part=TopK(ratio=0.25))"),
        (Own(width=np.int64(4), sizes=(np.int32(1), 2)), "Own(width=4, sizes=(1, 2))"),
    ],
    ids=["a keyword alone", "integers of NumPy and a field that is computed"],
)
def test_the_repr_of_an_own_algorithm_is_its_constructor(algorithm, text, monkeypatch):
    monkeypatch.setitem(tw.notation._registered, "Own", Own)
    assert repr(algorithm) == text
    assert tw.parse(text) == algorithm
