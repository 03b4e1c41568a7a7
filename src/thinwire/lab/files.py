"""JSON files: written whole or not at all, read with errors that name the file."""

from __future__ import annotations

import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..algorithm import require
from ..options import MAX_NUMBER, require_integer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NUMBERS = ("bytes_sent_per_worker", "dense_fp32_bytes", "dense_bf16_bytes", "seconds")  # of a summary


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context that adds the path to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write(unfinished)` write a file beside `path`, then rename it; after an error, no file is left."""
    unfinished = path.with_name(
        f".{path.name}.{uuid.uuid4().hex}.tmp"
    )  # workers of several machines may write the same file
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: a reader sees the old file or the new one, never a part."""
    with naming(path):
        write_whole(path, lambda unfinished: unfinished.write_text(json.dumps(plain(value), indent=2) + "\n"))


def load_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object. It may begin with a byte-order mark, as editors of Windows write it.

    Raises:
        ValueError: the file is missing, is not JSON or holds something else; the message names the file.
    """
    text = _text_in(path)
    try:
        value = json.loads(text)
        require(isinstance(value, dict), f"expected a JSON object, got {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore the file, or remove its run") from None
    read: dict[str, Any] = value
    return read


def read_json(path: Path, kind: type = dict) -> Any:
    """The contents of a JSON file, or None if it is missing, is not JSON or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. It may begin with a byte-order mark.

    Raises:
        ValueError: the file cannot be read, or is no TOML; the message names it.
    """
    text = _text_in(path)
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}{_in_quotes(str(error))}") from None


def _text_in(path: Path) -> str:
    """The text of a file, without a byte-order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8; restore the file, or name another") from None


def _in_quotes(text: str) -> str:
    """The remedy where a key and a dotted key under it are in one table, which TOML forbids; "" for other errors."""
    forbidden = text.startswith(("Cannot mutate", "Cannot overwrite"))
    hint = '; if it is a field of what another key of the table sets, write it in quotes, such as "strategy.every" = 4'
    return hint if forbidden else ""


def plain(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None.

    Example:
        >>> plain({"loss": float("nan"), "step": 3})
        {'loss': None, 'step': 3}
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_row(row: Any) -> None:
    """Check that a row of metrics holds numbers. Callbacks add columns of their own.

    Raises:
        ValueError: it does not.

    Example:
        >>> check_row({"step": 10, "loss": 0.5, "accuracy": None})
    """
    require(isinstance(row, dict), f"expected a row of metrics, got {type(row).__name__}")
    step = row.get("step", 0)
    require(isinstance(step, int) and step >= 0, f"step is {step!r}, expected a number from 0 on")
    _check_numbers(row)


def check_config(config: dict[str, Any]) -> None:
    """Check what reports compute with of a configuration. That of an older run may lack it.

    Raises:
        ValueError: it is empty, or wrong.
    """
    require(bool(config), "it is empty")
    require_integer("workers", config.get("workers", 1), 1)


def check_summary(summary: dict[str, Any]) -> None:
    """Check that the values of a summary are numbers, or null for a run that diverged.

    Raises:
        ValueError: it is empty, or they are not.
    """
    require(bool(summary), "it is empty")
    final = summary.get("final", {})
    require(isinstance(final, dict), f"final must be an object, got {final!r}")
    _check_numbers({key: summary.get(key) for key in (*NUMBERS, "virtual_seconds")} | final)


def _check_numbers(values: dict[str, Any]) -> None:
    """Levels are several; the others, and each of them, are a number or null."""
    several = [
        (name, value if name == "levels" and isinstance(value, list) else [value]) for name, value in values.items()
    ]
    wrong = [name for name, values in several if not all(map(is_number, values))]
    require(not wrong, f"{', '.join(wrong[:3])} should be a number or null")


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold, or null as where a run diverged."""
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (is_plain and abs(value) <= MAX_NUMBER)
