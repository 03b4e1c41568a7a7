"""The package's messages go to Python's `logging`: to stderr as lines, until the program configures it."""

from __future__ import annotations

import logging

import pytest
from helpers.program import programs


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
        assert program.wait(120) == 0
    lines = program.stderr.splitlines()
    assert lines[:2] == ["thinwire: the round has begun", "thinwire: 50% of the workers are gone"]
    assert lines[2:] == ["WARNING thinwire 50% of the workers are gone"] * configure
