"""What an error about an unknown name adds: the name that was probably meant. Every unknown name asks here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Value = TypeVar("Value")
CUTOFF = 0.7
"""The least similarity of a suggestion, 0 to 1; lower => unrelated names are suggested."""
FEW = 15
"""How many names a message lists; of more it names three that contain or resemble the unknown one."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the closest known name, else the known names or some of them; empty for a known name.

    Case, dashes and underscores do not count. Options, which begin with a dash, are too many to list.

    Example:
        >>> suggestion("PowerSgd", ["PowerSGD", "QSGD"])
        "; did you mean 'PowerSGD'?"
        >>> suggestion("--method", ["--timeout"])
        ''
        >>> suggestion("resnet", ["digits"] + [f"cifar10-resnet{depth}" for depth in range(20, 40)])
        '; some of 21 known ones: cifar10-resnet20, cifar10-resnet21, cifar10-resnet22'
    """
    known = list(known)
    if name in known:  # no mistake; the search takes longer than the reading of a sweep
        return ""
    if near := nearest(name, known):
        return near
    words = sorted(k for k in known if not k.startswith("-"))
    if len(words) <= FEW:
        return f"; known are {', '.join(words)}" if words else ""
    plain = {_plain(word): word for word in words}
    similar = [word for key, word in plain.items() if _plain(name) in key]
    similar += [plain[key] for key in difflib.get_close_matches(_plain(name), plain, cutoff=0.4)]
    some = list(dict.fromkeys(similar))[:3]
    return f"; some of {len(words)} known ones: {', '.join(some)}" if some else f"; none of {len(words)} is like it"


def nearest(name: str, known: Iterable[str]) -> str:
    """The same, but empty where no known name is close.

    Example:
        >>> nearest("--worker", ["--workers", "---"]), nearest("", ["--workers", "---"])
        ("; did you mean '--workers'?", '')
    """
    plain = {_plain(k): k for k in reversed(list(known)) if _plain(k)}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=CUTOFF)
    return f"; did you mean {plain[close[0]]!r}?" if close else ""


def see(message: str, where: str) -> str:
    """A message with where to look: a sentence of its own after a question.

    Example:
        >>> see("unknown recipe 'digts'; did you mean 'digits'?", "thinwire train --list")
        "unknown recipe 'digts'; did you mean 'digits'? See thinwire train --list"
    """
    return f"{message} See {where}" if message.endswith("?") else f"{message}; see {where}"


def named(known: Mapping[str, Value], name: str, kind: str, where: str) -> Value:
    """Look up a name.

    Args:
        known: what there is, by name.
        name: of one of them.
        kind: what they are, such as "recipe".
        where: to look, see `see`.

    Raises:
        ValueError: the name is unknown.

    Example:
        >>> named({"digits": 1}, "digts", "recipe", "thinwire train --list")
        Traceback (most recent call last):
        ValueError: unknown recipe 'digts'; did you mean 'digits'? See thinwire train --list
    """
    if name not in known:
        raise ValueError(see(f"unknown {kind} {name!r}{suggestion(name, known)}", where))
    return known[name]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
