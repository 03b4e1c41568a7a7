"""The extra packages that the command line needs, and the message for a missing one."""

from __future__ import annotations

import sys
from importlib.util import find_spec

TRAIN = (
    *("tyro", "rich", "sklearn", "matplotlib", "jinja2", "tensorboard", "PIL", "tokenizers", "sacrebleu"),
    *(("tomli",) if sys.version_info < (3, 11) else ()),
)
EXTRAS = dict.fromkeys((*TRAIN, "prometheus_client", "psutil"), "train") | {"cryptography": "secure"}
TRAINING = ("train", "demo", "sweep")  # commands that check the packages before they start workers


def missing_packages(command: str) -> list[str]:
    """The missing packages of a command that trains. Other commands find out when they import."""
    return [name for name in TRAIN if not _is_installed(name)] if command in TRAINING else []


def advice(command: str, packages: list[str]) -> str:
    """One line that says how to install the packages.

    Example:
        >>> advice("train", ["tyro"]).partition("; ")[2]
        "install it with this, in the folder of thinwire's sources: pip install '.[train]'"
    """
    names = ", ".join(packages)
    are, them = ("is", "it") if len(packages) == 1 else ("are", "them")
    extra = EXTRAS[packages[0]]
    return (
        f"thinwire {command} needs {names}, which {are} not installed; install {them} with this, in the folder of thinwire's "
        f"sources: pip install '.[{extra}]'"
    )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # import hooks may raise it, as those of the tests do
        return False
