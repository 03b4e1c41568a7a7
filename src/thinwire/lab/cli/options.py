"""Parses options into dataclasses, and prints errors as one line."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def show(table: Any) -> None:
    """Print a table as wide as the terminal, or 120 columns wide if there is no terminal."""
    from rich.console import Console

    console = Console()
    Console(width=None if console.is_terminal else 120).print(table)


def fail(message: object, code: int) -> int:
    """Print an error as one line on stderr; returns the exit code."""
    # Under torchrun every worker finds the same user error; only rank 0 prints it.
    if code != 2 or os.environ.get("RANK", "0") == "0":
        print(f"thinwire: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return code


def named(known: Mapping[str, Any], name: str, kind: str, where: str) -> Any:
    """Look up a name; the error for an unknown name suggests a similar one."""
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
        ValueError: wrong options; one line instead of tyro's box.
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
            config=(tyro.conf.AvoidSubcommands,),  # the recipe decides the kinds of data, model and optimizer
            **keywords,
        )

    if {"-h", "--help"} & set(options):
        try:
            parse(["--help"])
        finally:
            sys.stdout.flush()  # here, where a reader who is gone is met
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
    """Context that keeps tyro from breaking lines in its box."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def _first_sentence(box: str) -> str:
    """The message in tyro's box without title, frame and advice. ASCII terminals show no frame."""
    lines = [line.strip("│╭╮╰╯─ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()]
    _, message, *_ = [*filter(lambda line: line.strip("-"), lines), box, box]
    return re.sub(r"^Error parsing [A-Z]\w*: ", "", message).rstrip(".")
