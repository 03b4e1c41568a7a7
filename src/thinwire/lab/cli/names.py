"""usage: thinwire list [KIND]

Show the names that strategies and averagers are written with, and what each is: all, or one KIND of
strategies, averagers, exchanges, codecs, memories, topologies, others.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, get_type_hints

from ...suggestion import named
from .options import show_help

KINDS = ("strategies", "averagers", "exchanges", "codecs", "memories", "topologies", "others")


def list_command(options: list[str]) -> None:
    """Print the names of all kinds or of one, with a line each."""
    if {"-h", "--help"} & set(options):
        show_help(__doc__)
        return
    if len(options) > 1:
        raise ValueError(f"thinwire list takes one kind, got {' '.join(options)!r}; see thinwire list --help")
    for kind in options:
        named(dict.fromkeys(KINDS), kind, "kind", "thinwire list --help")
    from ...average.mean.exchange import find_exchange, known_words
    from ...entry_points import usable
    from ...notation import vocabulary

    of_kind: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for name, build in vocabulary().items():
        of_kind[_kind(build)][name] = build
    of_kind["exchanges"] = usable(known_words(), find_exchange)  # named as in exchange="star"
    width = max(len(name) for names in of_kind.values() for name in names)
    for kind in options or KINDS:
        print(f"{kind}:")
        for name in sorted(of_kind[kind], key=str.lower):
            print(f"  {name:<{width}}  {_about(of_kind[kind][name])}".rstrip())


def _about(build: object) -> str:
    """The beginning of its docstring, on one line."""
    paragraph = (inspect.getdoc(build) or "").partition("\n\n")[0]
    sentence = re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]
    if sentence.endswith(":"):  # before an equation
        sentence = f"{sentence[:-1]}."
    return textwrap.shorten(sentence, 120, placeholder=" ...")


def _kind(build: Callable[..., Any]) -> str:
    """The kind of what a class or a function of the notation makes."""
    from ...average import Averager
    from ...codec import Codec
    from ...memory import Memory
    from ...strategy import Strategy
    from ...topology import Topology

    made = build if inspect.isclass(build) else get_type_hints(build)["return"]
    bases = {"strategies": Strategy, "averagers": Averager, "codecs": Codec, "memories": Memory, "topologies": Topology}
    return next((kind for kind, base in bases.items() if issubclass(made, base)), "others")
