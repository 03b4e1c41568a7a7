"""How options become dataclasses, and mistakes one line."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any


def show(table: Any) -> None:
    """Print a table: as wide as the terminal, or 120 columns where there is none."""
    from rich.console import Console

    console = Console()
    Console(width=None if console.is_terminal else 120).print(table)


def fail(message: object, code: int) -> int:
    """Say what went wrong, in one line on stderr; returns the exit code."""
    # Under torchrun every worker finds the same mistake; one of them says so.
    if code != 2 or os.environ.get("RANK", "0") == "0":
        print(f"thinwire: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return code


def named(known: dict[str, Any], name: str, kind: str, where: str) -> Any:
    """What is known by that name; a misspelt name is an error that says what was meant."""
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}{_suggestion(name, known)}; see {where}")
    return known[name]


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    names = [name for name in known if name[0] != "-"]  # options are too many to list
    return f", did you mean {close[0]!r}?" if close else f", known are {', '.join(names)}" * bool(names)


def parsed(kind: type, options: list[str], program: str, default: Any = None, description: str | None = None) -> Any:
    """Read options into a dataclass with tyro.

    Raises:
        ValueError: one line, instead of tyro's box.
    """
    import tyro

    def parse(options: list[str]) -> tuple[Any, list[str]]:
        keywords = {} if default is None else {"default": default}
        return tyro.cli(
            kind,
            args=options,
            prog=program,
            description=description,
            return_unknown_args=True,
            config=(tyro.conf.AvoidSubcommands,),  # which kind of data, model and optimizer: as the recipe has it
            **keywords,
        )

    if {"-h", "--help"} & set(options):
        parse(["--help"])
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), _wide_terminal():
            parsed, unknown = parse(options)
    except SystemExit:
        raise ValueError(f"{_first_sentence(complaint.getvalue())}; see {program} --help") from None
    if unknown:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            parse(["--help"])
        known = sorted(set(re.findall(r"--[\w.-]+", text.getvalue())))
        raise ValueError(f"unknown option {unknown[0]!r}{_suggestion(unknown[0], known)}; see {program} --help")
    return parsed


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    """So that tyro breaks no lines in its box."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def _first_sentence(box: str) -> str:
    """The message in tyro's box, without its title, the frame and the advice below it; ASCII terminals have no frame."""
    lines = [line.strip("│╭╮╰╯─ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()]
    _, message, *_ = [*filter(lambda line: line.strip("-"), lines), box, box]
    return re.sub(r"^Error parsing [A-Z]\w*: ", "", message).rstrip(".")
