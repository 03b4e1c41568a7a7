"""`repr` and `parse` round-trip every algorithm, and mistakes point at their column."""

from __future__ import annotations

import gc
import inspect
import math
import sys
import threading
import time

import pytest

import thinwire as tw
from thinwire import entry_points, notation
from thinwire.notation import vocabulary

ALGORITHMS = [
    tw.Mean(),
    tw.Mean(tw.TopK(0.01), tw.ErrorFeedback()),
    tw.Mean(memory=tw.ErrorFeedback(), granularity="bucket"),
    tw.Mean(tw.chain(tw.TopK(0.01), tw.QSGD(bits=4, norm="l2")), tw.ErrorFeedback(), min_ndim=0),
    tw.Mean(tw.Cast("float16"), exchange="all_gather", granularity="model"),
    tw.codec.SignNorm(),
    tw.ByName({"*embed*": tw.Mean(), "layers.[01].*": tw.PowerSGD(rank=2), "*": tw.Mean(tw.QSGD(bits=4))}),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_round_trip(algorithm):
    assert tw.parse(repr(algorithm)) == algorithm
    assert repr(tw.parse(repr(algorithm))) == repr(algorithm)


def test_threads_read_at_the_same_time():
    mistakes = []

    def read():
        for _ in range(300):
            try:
                tw.parse("Mean(TopK(0.1), granularity='layer', min_ndim=0)")
            except SystemError as error:
                mistakes.append(error)

    def switch_threads(phase, info):
        time.sleep(0)

    thresholds = gc.get_threshold()
    gc.callbacks.append(switch_threads)
    gc.set_threshold(20)
    try:
        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(switch_threads)
    assert not mistakes


def test_the_repr_is_short():
    text = "Mean(chain(TopK(ratio=0.01), QSGD(bits=4)), ErrorFeedback(), min_ndim=1)"
    assert repr(tw.Mean(tw.chain(tw.TopK(0.01), tw.QSGD(4)), tw.ErrorFeedback(), "layer", "auto", 1)) == text


@pytest.fixture
def default_recursion_limit():
    """Python's own: how deep it parses depends on it, and some packages that other tests import raise it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    "text, message",
    [
        ("Mean(TopKK(0.01))", r"unknown name 'TopKK'; did you mean 'TopK'\? \(at column 6 of"),
        ("mean()", "did you mean 'Mean'"),
        ("Mean(TopK(ration=0.01))", r"TopK has no option 'ration'; did you mean 'ratio'\? \(at column 11"),
        ("Mean(TopK)", r"TopK needs parentheses: TopK\(\) \(at column 6"),
        ("Mean(TopK(2))", r"ratio must be above 0 and at most 1, got 2.*\(at column 6"),
        ("Mean(TopK())", "missing 1 required positional argument: 'ratio'"),
        ("Mean(TopK(0.01)", "cannot read 'Mean"),
        ("", "cannot read ''"),
        ("__import__('os').system('true')", "only names of algorithms"),
        ("Mean(**{})", "write the options out"),
        ("(lambda: 0)()", "only names of algorithms"),
        ("open('x')", "unknown name 'open'"),
        ("Mean(memory=1+1)", "only names of algorithms"),
        ("Mean(codec=3)", "codec must be a codec"),
        ("chain(QSGD(bits=4), Huffman(), Huffman())", r"Huffman\(\) is no codec \(at column 1 of"),
        ("chain(3, Huffman())", r"first link must be a codec.*got 3 \(at column 1 of"),
        ("chain(Huffman(), QSGD(bits=4))", r"first link must be a codec.*\(at column 1 of"),
        ("-" * 5000 + "1", "(cannot read '-----|only names of algorithms).*column 1"),  # Python 3.13 can
        ("Mean(TopK(" + "-" * 200 + "1))", "only names of algorithms.*column 11"),
        ("[" * 150 + "]" * 150, "nested more than 50 deep.*column 52"),
        ("(" * 5000 + ")" * 5000, "cannot read.*column"),
        ("Mean(TopK(ratio=0.1, ratio=0.2))", r"TopK is given the option 'ratio' twice \(at column 22 of"),
        ("Mean(TopK(0.1, ratio=0.2))", r"multiple values for argument 'ratio' \(at column 6"),
        ("Mean(\0)", "cannot read.*column"),
        ("ByName({'*': Mean(TopKK(0.01))})", r"did you mean 'TopK'\? \(at column 19 of"),
        ("ByName({'a*': Mean(), 'a*': PowerSGD()})", r"the key 'a\*' is there twice \(at column 23 of"),
        ("ByName({1: Mean()})", r"a key must be a text in quotes \(at column 9 of"),
        ("ByName({**{}})", r"write the entries out \(at column 11 of"),
        ("ByName(" + "{'a': " * 60 + "1" + "}" * 60 + ")", "nested more than 50 deep"),
        ("Phases(((0, 0),))", r"each phase must be a topology such as Ring\(\), got 0"),
        ("Local(Mean(), 4, fragments=())", "each of fragments must be a pattern"),
        ("Local(Mean(), 4, fragments=[['a', 1]])", "each of fragments must be a pattern"),
        ("Fitted(3.0, measure_steps=None)", "not iterable"),
        ("ByName({})", r"give at least one pattern, such as '\*' \(at column 1 of"),
    ],
)
def test_mistakes_point_at_their_column(text, message, default_recursion_limit):
    with pytest.raises(ValueError, match=message) as caught:
        tw.parse(text)
    assert "\n" not in str(caught.value)


def test_only_text_is_read():
    with pytest.raises(ValueError, match=r"parse reads text, got Mean\(\)"):
        tw.parse(tw.Mean())


def test_infinity_is_read_back():
    rule = tw.average.CenteredClipping(tau=float("inf"))
    assert tw.parse(repr(rule)) == rule
    assert tw.parse("[-inf, inf]") == [-math.inf, math.inf]


NEEDED = {  # arguments of names that need some
    "BlockwiseTopK": {"ratio": "0.1"},
    "ByName": {"averagers": "{'*': Mean()}"},
    "ClipByNorm": {"max_norm": "1.0"},
    "ClipByValue": {"max_value": "1.0"},
    "CoarseGrainedTopK": {"ratio": "0.1"},
    "DenseLast": {"codec": "QSGD(bits=4)"},
    "DirectedGraph": {"edges": "((0, 1), (1, 0))"},
    "Fitted": {"budget": "3.0"},
    "GeometricWarmup": {"final": "0.1"},
    "Gossip": {"averager": "Mix()"},
    "Gradients": {"averager": "Mean()"},
    "Graph": {"edges": "((0, 1),)"},
    "Hierarchical": {"inner": "Ring()", "workers_per_node": "2"},
    "Local": {"averager": "Mean()", "every": "4"},
    "LowRank": {"rank": "2"},
    "MixingMatrix": {"rows": "[[0.5, 0.5], [0.5, 0.5]]"},
    "Phases": {"phases": "((0, Ring()), (3, Complete()))"},
    "QSGD": {"bits": "4"},
    "Quantize": {"levels": "(0.0, 0.5, 1.0)"},
    "RandomK": {"ratio": "0.1"},
    "SVD": {"rank": "2"},
    "TopK": {"ratio": "0.1"},
    "Values": {"values": "(1, 2)"},
}
ODD = f"""None 0 -1 0.5 1e308 inf '' 'x' [] [[1]] [1,[2]] {{}} {{'a':[1]}} True {10**400} {-(10**30)} () (None,) ([1],)
    ((),) ((0,0),) Ring() QSGD(bits=4) ErrorFeedback() Mean() Mix() Values((1,2)) Gradients(Mean()) Krum() Rice() DCT()
    OuterSGD()""".split()


# Without those of other tests in this process. The first options of the last two have no keyword.
OWN = {name for name, build in vocabulary().items() if build.__module__.startswith("thinwire.")} - {
    "Bucketing",
    "chain",
}


@pytest.mark.parametrize("name", sorted(OWN))
def test_an_odd_argument_is_refused_in_one_line_or_can_be_used(name):
    needed = NEEDED.get(name, {})
    given = ", ".join(f"{key}={value}" for key, value in needed.items())
    assert hash(tw.parse(f"{name}({given})")) is not None
    for option in inspect.signature(vocabulary()[name]).parameters:
        for odd in ODD:
            text = f"{name}({', '.join(f'{key}={value}' for key, value in (needed | {option: odd}).items())})"
            try:
                made = tw.parse(text)
            except ValueError as error:
                assert "\n" not in str(error), text
            else:
                assert tw.parse(repr(made)) == made and hash(tw.parse(repr(made))) == hash(made), text


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Declares entry points as installed packages do, each in a package of its own."""
    monkeypatch.syspath_prepend(tmp_path)

    def declared(*entries):
        for number, entry in enumerate(entries):
            info = tmp_path / f"package{number}-1.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package{number}\nVersion: 1\n")
            (info / "entry_points.txt").write_text(f"[{notation.ENTRY_POINT_GROUP}]\n{entry}\n")
        for cached in caches:
            cached.cache_clear()

    caches = (entry_points.declared, notation._built_in)
    yield declared
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (("Mine = thinwire:Cast",), "its name must be that of the class, Cast"),
        (("Mine = thinwire:chain",), "<function chain .* must be a frozen dataclass derived from Codec, .*Strategy"),
        (
            ("Mine = thinwire:Cast", "Mine = thinwire:TopK"),
            "packages declare it as thinwire:Cast and as thinwire:TopK; uninstall all but one",
        ),
    ],
)
def test_an_entry_point_of_another_name_or_of_two_packages_is_refused(declare, entries, why):
    declare(*entries)
    with pytest.raises(ValueError, match=f"the entry point Mine = .* cannot be used: {why}"):
        tw.parse("Mean(Mine())")


def test_an_entry_point_whose_name_is_taken_is_said_to_be_unused(declare, caplog):
    declare("TopK = my_package:TopK")
    assert tw.parse("TopK(0.1)") == tw.TopK(0.1)
    assert "my_package:TopK of an installed package is not used, because TopK is a name of thinwire" in caplog.text
