"""What an error about an unknown name adds: the name that was probably meant. Every unknown name asks here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.7
"""The least similarity of a suggestion, 0 to 1; lower => unrelated names are suggested."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name closest to a misspelt one, or all known names; empty for a known name.

    Case, dashes and underscores do not count. Options, which begin with a dash, are too many to list.

    Example:
        >>> suggestion("PowerSgd", ["PowerSGD", "QSGD"])
        "; did you mean 'PowerSGD'?"
        >>> suggestion("--method", ["--timeout"])
        ''
    """
    known = list(known)
    if name in known:  # no mistake; the search takes longer than the reading of a sweep
        return ""
    if near := nearest(name, known):
        return near
    words = sorted(k for k in known if not k.startswith("-"))
    return f"; known are {', '.join(words)}" if words else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The same, but empty where no known name is close."""
    plain = {_plain(k): k for k in reversed(list(known))}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=CUTOFF)
    return f"; did you mean {plain[close[0]]!r}?" if close else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
