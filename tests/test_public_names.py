"""The public names load when they are first used; type checkers, `import *` and pickle see all of them."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from helpers.program import programs

import thinwire as tw

PROGRAM = """
import sys
import thinwire as tw
assert tw.__version__ and "torch" not in sys.modules
assert tw.testing.check_codec and tw.kernels.all_finite
assert {"Mean", "topology", "__version__"} <= set(dir(tw))
from thinwire import *
assert parse("Mean()") == Mean() == tw.Mean() and topology.Ring() == Ring()
"""


# A module of the library may come first, though it imports modules that import it.
A_MODULE_FIRST = """
import thinwire.codec
from thinwire import kernels
from thinwire.topology import Ring
import thinwire as tw
from thinwire import Mean
assert tw.Ring is Ring and tw.Mean is Mean
"""


def a_module_first():
    ours = [name for name in sys.modules if name.partition(".")[0] == "thinwire"]
    for name in ours:
        if not name.endswith(("._native", "._engine")):  # an extension is loaded once in a process
            del sys.modules[name]
    exec(A_MODULE_FIRST, {})


def test_names_load_on_first_use():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_module_may_be_imported_first(tmp_path):
    with programs(a_module_first, [()], tmp_path) as (program,):
        assert program.wait() == 0, program.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'thinwire' has no attribute 'TopKK'"):
        tw.TopKK  # noqa: B018
    assert not hasattr(tw, "__wrapped__") and not hasattr(tw, "_private")
    with pytest.raises(ImportError, match="cannot import name 'TopKK'"):
        from thinwire import TopKK  # noqa: F401


def test_every_name_is_there_once_and_public_classes_pickle():
    assert len(set(tw.__all__)) == len(tw.__all__)
    assert all(getattr(tw, name) is not None for name in tw.__all__)
    for algorithm in (tw.Mean(tw.TopK(0.01), tw.ErrorFeedback()), tw.Choco(tw.Ring(), tw.TopK(0.01))):
        assert pickle.loads(pickle.dumps(algorithm)) == algorithm


def test_the_notation_knows_the_names_that_are_not_at_the_top():
    for text in ("Phases(((0, Ring()),))", "Hierarchical(Ring(), workers_per_node=2)", "BipartiteExponential()"):
        topology = tw.parse(text)
        assert type(topology) is getattr(tw.topology, type(topology).__name__)
        assert type(topology).__name__ not in tw.__all__
