"""The package's messages go to Python's `logging`: to stderr as lines, until the program configures it."""

from __future__ import annotations

import importlib.util
import logging

import pytest
from helpers.program import programs

from thinwire.comm import CommunicationError
from thinwire.messages import error_place, error_text


def raised(call, *arguments):
    with pytest.raises(Exception) as error:
        call(*arguments)
    return error.value


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (IndexError("list index out of range"), "IndexError: list index out of range"),
        (AssertionError(), "AssertionError"),
        (ValueError("size must be 1 or more, got 0"), "size must be 1 or more, got 0"),
        (ValueError(), "ValueError"),
        (CommunicationError("rank 0: barrier failed"), "rank 0: barrier failed"),
        (pytest.UsageError("of another package"), "UsageError: of another package"),
    ],
)
def test_the_class_of_an_error_is_said_where_its_text_needs_it(error, text):
    assert error_text(error) == text


def test_the_place_of_an_error_is_the_last_line_of_the_user(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(
        "import json, torch, thinwire\n"
        "def looks_up(): return {}[3]\n"
        "def multiplies(): return torch.nn.Linear(2, 2)(torch.ones(3))\n"
        "def parses(): return json.loads('{')\n"
        "def refuses(): return thinwire.TopK(2.0)\n"
    )
    spec = importlib.util.spec_from_file_location("mine", path)
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    errors = [raised(call) for call in (mine.looks_up, mine.multiplies, mine.parses)]
    assert [error_place(error) for error in errors] == [f", in {path}:{line}" for line in (2, 3, 4)]
    assert error_place(raised(mine.refuses)) == "", "it says what to do"
    assert error_place(KeyError("never raised")) == ""
    monkeypatch.chdir(tmp_path)
    assert error_place(errors[0]) == ", in mine.py:2"
    installed = tmp_path / "site-packages" / "theirs.py"
    theirs = compile("def fails(): return {}[3]", str(installed), "exec")
    names = {}
    exec(theirs, names)
    assert error_place(raised(lambda: names["fails"]())).startswith(f", in {__file__}:")


def say() -> None:
    logging.getLogger("thinwire").info("the round has begun")
    logging.getLogger("thinwire").warning("50% of the workers are gone")
    logging.getLogger("thinwire").debug("not shown")


def say_twice(configure: bool) -> None:
    """In a process without pytest's handlers."""
    import thinwire  # noqa: F401 - gives the logger its handler

    say()
    if configure:
        logging.basicConfig(format="%(levelname)s %(name)s %(message)s", level=logging.WARNING)
        logging.getLogger("thinwire").setLevel(logging.WARNING)
        say()


@pytest.mark.parametrize("configure", [False, True])
def test_messages_go_to_stderr_until_logging_is_configured_and_then_there_alone(configure, tmp_path):
    with programs(say_twice, [(configure,)], tmp_path) as (program,):
        assert program.wait(400) == 0
    lines = program.stderr.splitlines()
    assert lines[:2] == ["thinwire: the round has begun", "thinwire: 50% of the workers are gone"]
    assert lines[2:] == ["WARNING thinwire 50% of the workers are gone"] * configure
