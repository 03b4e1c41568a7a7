"""Values at field paths, whatever the dataclasses are; and parts of algorithms in their notation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import pytest

import thinwire as tw
from thinwire.algorithm import Algorithm
from thinwire.lab.overrides import overridden
from thinwire.lab.train import RunConfig
from thinwire.lab.train.data import Data
from thinwire.notation import parse, register


@dataclass(frozen=True)
class Round:
    radius: float = 1.0


@dataclass(frozen=True)
class Square:
    side: int = 2
    colours: tuple[str, ...] = ()
    kind_of_edge: Literal["sharp", "soft"] = "sharp"


@dataclass(frozen=True)
class Thing:
    form: Round | Square = field(default_factory=lambda: Round(3.0))
    limit: int | None = None
    where: Path = Path(".")
    flag: bool = False
    pair: tuple[int, float] = (1, 2.0)

    def __post_init__(self):
        if self.limit == 13:
            raise ValueError("limit must not be 13")


@pytest.mark.parametrize(
    "values, wanted",
    [
        ({"form.radius": 2}, Thing(form=Round(2.0))),
        ({"form.kind": "Round"}, Thing(form=Round(3.0))),
        ({"form.kind": "Square", "form.side": 5}, Thing(form=Square(5))),
        ({"form.side": 5, "form.kind": "Square"}, Thing(form=Square(5))),
        ({"form.kind": "Square", "form.colours": ["red", "blue"]}, Thing(form=Square(colours=("red", "blue")))),
        ({"form.kind": "Square", "form.colours": "red"}, Thing(form=Square(colours=("red",)))),
        (
            {"limit": 3, "where": "a/b", "flag": True, "pair": [4, 5]},
            Thing(limit=3, where=Path("a/b"), flag=True, pair=(4, 5.0)),
        ),
        ({"limit": "none"}, Thing()),
    ],
)
def test_values_become_what_the_fields_are(values, wanted):
    assert overridden(replace(Thing(), limit=None), values) == wanted


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"from.radius": 2}, "unknown field 'from'; did you mean 'form'?"),
        ({"form.kind": "Square", "form.size": 2}, "unknown field 'form.size'; did you mean 'form.side'"),
        ({"form.kind": "Squaer"}, "unknown form.kind 'Squaer'; did you mean 'Square'?"),
        ({"form.kind": ["Square"]}, "unknown form.kind ['Square']"),
        ({"form": "Square"}, "form must be a table; choose with .kind one of Round, Square, got 'Square'"),
        (
            {"form.kind": "Square", "form.kind_of_edge": "soff"},
            "one of 'sharp', 'soft', got 'soff'; did you mean 'soft'?",
        ),
        ({"limit": "many"}, "limit must be a whole number or 'none', got 'many'"),
        ({"limit": 1.5}, "limit must be a whole number or 'none', got 1.5"),
        ({"limit": True}, "limit must be a whole number or 'none', got True"),
        ({"limit": 13}, "limit must not be 13"),
        ({"flag": 1}, "flag must be true or false, got 1"),
        ({"pair": [1]}, "pair must be a list of 2 values, got [1]"),
        ({"pair": ["a", 1]}, "pair[0] must be a whole number, got 'a'"),
        ({"flag.deep": 1}, "flag has no fields; it is False"),
    ],
)
def test_wrong_values_get_one_line(values, complaint):
    with pytest.raises(ValueError) as caught:
        overridden(Thing(), values)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


# ---- parts of algorithms ----


@register
@dataclass(frozen=True, repr=False)
class Outer(Algorithm):
    """Stands for any algorithm that holds an averager, such as a strategy."""

    averager: tw.average.Averager
    every: int = 1


@dataclass(frozen=True)
class Config:
    averager: str = "Mean()"
    several: tuple[str, ...] = ("Mix(Ring())", "Choco(Ring(), TopK(0.1))")
    outer: str | None = None


@pytest.mark.parametrize(
    "text, values, wanted",
    [
        ("Mean(TopK(0.01))", {"codec.ratio": 0.001}, tw.Mean(tw.TopK(0.001))),
        (
            "Mean(TopK(0.01))",
            {"codec.ratio": "GeometricWarmup(0.01)"},
            tw.Mean(tw.TopK(tw.schedule.GeometricWarmup(0.01))),
        ),
        (
            "Mean(TopK(GeometricWarmup(0.01)))",
            {"codec.ratio.final": 0.1},
            tw.Mean(tw.TopK(tw.schedule.GeometricWarmup(0.1))),
        ),
        ("Mean(TopK(0.01))", {"codec": "QSGD(bits=4)", "codec.bits": 2}, tw.Mean(tw.QSGD(bits=2))),
        ("Mean(TopK(0.01))", {"codec.bits": 2, "codec": "QSGD(bits=4)"}, tw.Mean(tw.QSGD(bits=2))),
        (
            "Mean(TopK(0.01), ErrorFeedback())",
            {"memory": "none", "exchange": "all_gather"},
            tw.Mean(tw.TopK(0.01), exchange="all_gather"),
        ),
        (
            "Mean(chain(TopK(0.1), QSGD(bits=4)))",
            {"codec.sparsifier.ratio": 0.01, "codec.values.bits": 2},
            tw.Mean(tw.chain(tw.TopK(0.01), tw.QSGD(bits=2))),
        ),
        ("Mix()", {"topology": "Exponential()"}, tw.Mix(tw.Exponential())),
        ("Choco(codec=TopK(0.1))", {"topology": "Torus()"}, tw.Choco(tw.topology.Torus(), tw.TopK(0.1))),
        ("dgc(0.01)", {"values": "float16", "masking": False}, tw.dgc(0.01, values="float16", masking=False)),
        ("dgc(0.01)", {"memory.momentum": 0.5}, replace(tw.dgc(0.01), memory=tw.MomentumCorrection(0.5))),
        (
            "dgc(0.01)",
            {"values": "float16", "codec.values.dtype": "bfloat16"},
            tw.dgc(0.01, values="bfloat16"),
        ),
        ("Outer(dgc(0.01), every=2)", {"averager.bits": 4}, Outer(tw.dgc(0.01, bits=4), every=2)),
        ("Outer(Mean())", {"averager": "dgc(0.1)", "averager.masking": False}, Outer(tw.dgc(0.1, masking=False))),
        (
            "ByName({'*': Mean()})",
            {"averagers": "{'*': Mean(QSGD(bits=4))}"},
            tw.ByName({"*": tw.Mean(tw.QSGD(bits=4))}),
        ),
        ("ALQ()", {"update_steps": [1, 2]}, tw.ALQ(update_steps=(1, 2))),
    ],
)
def test_parts_are_set_by_path(text, values, wanted):
    changed = overridden(Config(text), {f"averager.{path}": value for path, value in values.items()})
    assert parse(changed.averager) == wanted


def test_the_whole_and_then_its_parts():
    values = {"averager.codec.ratio": 0.1, "averager": "Mean(TopK(0.5))"}
    assert parse(overridden(Config(), values).averager) == tw.Mean(tw.TopK(0.1))


def test_files_with_parts_compose():
    """Each changes what it names; a later one wins."""
    files = [{"warmup_epochs": 3, "masking": True}, {"values": "float16"}, {"masking": False}]
    steps = [{f"averager.{name}": value for name, value in file.items()} for file in files]
    changed = reduce(overridden, steps, Config("dgc(0.01)"))
    assert parse(changed.averager) == tw.dgc(0.01, warmup_epochs=3, values="float16", masking=False)


def test_a_part_of_each_of_several_algorithms():
    changed = overridden(Config(), {"several.topology": "Torus()"}).several
    assert list(map(parse, changed)) == [tw.Mix(tw.topology.Torus()), tw.Choco(tw.topology.Torus(), tw.TopK(0.1))]


@pytest.mark.parametrize(
    "text, values, complaint",
    [
        ("Mean(TopK(0.01))", {"averager.codec.ratoi": 1}, "'averager.codec.ratoi'; TopK has ratio, sample, indices"),
        ("Mix()", {"averager.topology.peers": 1}, "'averager.topology.peers'; Ring has no fields"),
        ("dgc(0.01)", {"averager.ration": 1}, "'averager.ration'; dgc has ratio, momentum, "),
        ("dgc(0.01)", {"averager.codec.ration": 1}, "'averager.codec.ration'; TopK has ratio, "),
        ("Mean()", {"averager.memory.decay": 1}, "averager.memory has no fields; it is None"),
        ("Mean()", {"outer.lr": 1}, "outer has no fields; it is None"),
        ("Mean(", {"averager.codec": "TopK(0.1)"}, "averager has no fields; it is Mean("),
        ("Mean()", {"averager.min_ndim": "two"}, "averager.min_ndim must be a whole number, got 'two'"),
        ("Mean()", {"averager.codec": 3}, "averager.codec must be a codec in Python's notation, got 3"),
        ("Mean()", {"averager.codec": "Ring()"}, "averager.codec must be a codec in Python's notation, got 'Ring()'"),
        ("Mean()", {"averager.codec": "TopKK(0.1)"}, "averager.codec: unknown name 'TopKK'; did you mean 'TopK'?"),
        ("Mean(TopK(0.1))", {"averager.codec.ratio": 3}, "averager.codec: TopK: ratio must be above 0 and at most 1"),
    ],
)
def test_wrong_parts_get_one_line(text, values, complaint):
    with pytest.raises(ValueError) as caught:
        overridden(Config(text), values)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


@dataclass(frozen=True)
class Elsewhere(Data):
    folder: str

    def load(self):
        raise AssertionError("a configuration is not loaded")


def test_a_kind_that_has_no_default_is_named():
    with pytest.raises(
        ValueError, match=r"data.kind 'Elsewhere' has no default for folder; take a recipe that has one"
    ):
        overridden(RunConfig("digits"), {"data.kind": "Elsewhere"})
    config = overridden(RunConfig("own", data=Elsewhere("a")), {"data.kind": "Elsewhere", "data.folder": "b"})
    assert config.data == Elsewhere("b")


def test_a_name_of_several_kinds_is_refused_unless_it_is_that_of_the_recipe():
    def same_name(value: str) -> type:
        @dataclass(frozen=True)
        class Twin(Data):
            folder: str = value

            def load(self):
                raise AssertionError("a configuration is not loaded")

        return Twin

    first, second = same_name("first"), same_name("second")
    with pytest.raises(ValueError, match=r"several kinds are called 'Twin': .*Twin, .*Twin; take a recipe that has"):
        overridden(RunConfig("digits"), {"data.kind": "Twin"})
    for kind in (first, second):
        assert overridden(RunConfig("own", data=kind()), {"data.kind": "Twin"}).data == kind()
