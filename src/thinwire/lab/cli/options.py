"""Parses options into dataclasses, and prints errors as one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from ...suggestion import see, suggestion
from ..variables import variables_set
from .originals import written_here

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_WORDS = {
    r"^Error parsing (--\S+): invalid literal for int\(\) with base 10: ": r"\1 must be a whole number, got ",
    r"^Error parsing (--\S+): could not convert string to float: ": r"\1 must be a number, got ",
    r"^Error parsing \w[\w.]*: ": "",  # the message is that of the dataclass
    r"^Missing value for argument '(.*?)'\. Expected 1 values": r"\1 needs a value",
    r"^invalid choice (.*) for argument '(.*)'\. Expected one of \((.*?),?\)": r"\2 must be one of \3, got \1",
}
"""Patterns of tyro's messages, and what is said instead."""


def show(table: Any) -> None:
    """Print a table."""
    from ..console import table_console

    table_console().print(table)


def show_help(text: str | None) -> None:
    """Print the docstring of a command's module, which `python -OO` leaves out."""
    print(text or "no help: Python runs without docstrings (-OO, or PYTHONOPTIMIZE=2)\n", end="")


def fail(message: object, code: int) -> int:
    """Print an error as one line on stderr; returns the exit code.

    Under a launcher all workers of a machine find the same user error, and the first one prints it. Rank 0 prints for all what
    they raise together.
    """
    rank, text = os.environ.get("RANK", "0"), " ".join(str(message).split())
    if code == 2 and rank != "0":
        from ..train.shared_errors import SharedError

        if os.environ.get("LOCAL_RANK") != "0" or isinstance(message, SharedError):
            return code
        text = f"worker {rank}: {text}"
    with contextlib.suppress(OSError):  # its terminal was closed, and the code tells
        print(f"thinwire: {text}", file=sys.stderr, flush=True)
    return code


def shown_as(name: str) -> Any:
    """What an annotation adds to the type of a word that comes without an option's name, such as `Annotated[Path, ...]`."""
    import tyro

    return tyro.conf.arg(metavar=name)


def parsed(
    kind: type,
    options: list[str],
    program: str,
    default: Any = None,
    description: str | None = None,
    originals: dict[str, str] | None = None,
    others: tuple[str, ...] = (),
) -> Any:
    """Read options into a dataclass with tyro.

    Args:
        kind: the dataclass. Fields without a default are given as words without a name, in this order.
        options: words of the command line.
        program: the command, for messages.
        default: an instance with the default values.
        description: for `--help`.
        originals: names of options in other programs, see `originals.py`.
        others: options of the command that have been read before, to be suggested too.

    Raises:
        ValueError: wrong options; one line instead of tyro's box.
    """
    import tyro

    def parse(options: list[str]) -> tuple[Any, list[str]]:
        keywords = {} if default is None else {"default": default}
        with _registry(), _whole_paragraphs():
            return tyro.cli(
                kind,
                args=options,
                prog=program,
                description=description,
                return_unknown_args=True,
                # The recipe decides the kinds of data, model and optimizer.
                config=(tyro.conf.AvoidSubcommands, tyro.conf.PositionalRequiredArgs),
                **keywords,
            )

    where = f"{program.partition(' [')[0]} --help"

    if {"-h", "--help"} & set(options):
        try:
            parse(["--help"])
        finally:
            sys.stdout.flush()  # here, where a reader who is gone is met
    options, parts = _parts(kind, options)
    complaint = io.StringIO()
    try:
        # Tyro breaks no line in its box on so wide a terminal.
        with contextlib.redirect_stderr(complaint), variables_set({"COLUMNS": "10000"}):
            parsed, unknown = parse(options)
    except SystemExit:
        raise ValueError(f"{_message(complaint.getvalue())}; see {where}") from None
    if unknown:
        told = written_here(unknown[0], originals or {})
        if not told and not unknown[0].startswith("-"):
            raise ValueError(
                see(f"{unknown[0]!r} belongs to no option; a word without an option comes before them", where)
            )
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            parse(["--help"])
        known = sorted({*re.findall(r"--[\w.-]+", text.getvalue()), *others})
        near = told or suggestion(unknown[0], known)
        raise ValueError(see(f"unknown option {unknown[0]!r}{near}", where))
    if parts:
        from ..overrides import overridden

        parsed = overridden(parsed, parts)
    return parsed


def _parts(kind: type, options: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The options without parts of algorithms, and these: `--strategy.every 4`, where `strategy` is a text."""
    if not any(re.match(r"--[\w-]+\.", word) for word in options):
        return options, {}
    from ..overrides import value_of

    texts = {name for name, hint in get_type_hints(kind).items() if hint in (str, str | None, tuple[str, ...])}
    rest: list[str] = []
    parts: dict[str, Any] = {}
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        path = name[2:].replace("-", "_")
        if not name.startswith("--") or "." not in path or path.partition(".")[0] not in texts:
            rest.append(word)
            continue
        # The dashes stand for a missing value, and are refused as another option is.
        value = value if equals else next(words, "--")
        if value.startswith("--"):
            raise ValueError(f"{name} needs a value, such as {name} 0.01")
        parts[path] = value_of(value)
    return rest, parts


def _registry() -> ConstructorRegistry:
    """Rules of tyro that show an optional value as any other: `--json PATH`, not `--json {None}|PATH`."""
    from tyro.constructors import ConstructorRegistry

    registry = ConstructorRegistry()
    registry.primitive_rule(_optional)
    return registry


@contextlib.contextmanager
def _whole_paragraphs() -> Iterator[None]:
    """Let tyro show what stands below a field as paragraphs; it takes an indented line for a new one."""
    import docstring_parser

    def whole(obj: Any, *style: Any) -> docstring_parser.Docstring:
        found = read(obj, *style)
        for one in found.params:
            parts = re.split(r"\n\s*\n", one.description or "")
            one.description = "\n\n".join(" ".join(part.split()) for part in parts) or None
        return found

    read: Any = docstring_parser.parse_from_object
    setattr(docstring_parser, "parse_from_object", whole)  # noqa: B010 - types do not allow the assignment
    try:
        yield
    finally:
        docstring_parser.parse_from_object = read


def _optional(asked: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How tyro reads and shows `int | None` and its like, where the word None gives None."""
    from tyro.constructors import PrimitiveConstructorSpec

    kinds = set(get_args(asked.type))
    if NoneType not in kinds or len(kinds) != 2:
        return None
    (kind,) = kinds - {NoneType}
    if kind not in (int, float, str, Path):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=lambda words: None if words == ["None"] else kind(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def _message(box: str) -> str:
    """The message in tyro's box, on one line, without title, frame and advice. ASCII terminals show no frame."""
    lines = (line.strip("│╭╮╰╯─ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines())
    title = next(lines, box)
    behind = dropwhile(lambda line: not line.strip("-"), lines)
    return _reworded(" ".join(takewhile(lambda line: line.strip("-"), behind)) or title)


def _reworded(message: str) -> str:
    """A message of tyro in the words of other errors.

    Example:
        >>> _reworded("Missing from thinwire sweep: FILE The TOML file, such as a.toml. (required)")
        'thinwire sweep needs FILE (the TOML file, such as a.toml)'
        >>> _reworded("Error parsing --workers: invalid literal for int() with base 10: 'x'")
        "--workers must be a whole number, got 'x'"
    """
    if missing := re.match(r"Missing from (.*?): ", message):
        absent = re.findall(r"(\S+) (\w)(.*?)\.? \(required\)", message[missing.end() :])
        return f"{missing[1]} needs {' and '.join(f'{name} ({begin.lower()}{rest})' for name, begin, rest in absent)}"
    for pattern, words in _WORDS.items():
        message = re.sub(pattern, words, message)
    return message.rstrip(".")
