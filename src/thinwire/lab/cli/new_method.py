"""`thinwire new-method`."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...algorithm import able_to, require
from .options import parsed, shown_as

TEMPLATE = Path(__file__).parents[1] / "template"
TEXT_BYTES = {"train.txt": 300_000, "test.txt": 64_000}


@dataclass(frozen=True)
class NewMethodOptions:
    """Make a package with a codec of your own, its test, two tasks, and a comparison with five baselines, as in:
    thinwire new-method nearest-levels

    The folder of this name must not exist.
    """

    name: Annotated[Path, shown_as("NAME")]
    """Small letters, digits and hyphens, such as nearest-levels."""


def new_method_command(options: list[str]) -> None:
    """Write the package, and say what comes next."""
    folder = parsed(NewMethodOptions, options, "thinwire new-method").name
    write_package(folder)
    print(
        f"  {folder}: change src/{folder.name.replace('-', '_')}/codec.py. README.md has the way to a first comparison:"
    )
    print(
        f"  cd {shlex.quote(str(folder))} && pip install -e '.[test]' && pytest && thinwire sweep compare.toml --local 2"
    )


def write_package(folder: Path) -> None:
    """Write a package, named as its folder, from the files of `lab/template`.

    Raises:
        ValueError: the name is no package's name, or is taken; or the folder exists.
    """
    from ...notation import known_names

    name = folder.name
    require(
        re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) is not None and not keyword.iskeyword(name),
        f"a method's name has small letters, digits and hyphens, such as nearest-levels, got {name!r}",
    )
    module, codec = name.replace("-", "_"), "".join(part.capitalize() for part in name.split("-"))
    require(
        not keyword.iskeyword(codec), f"{codec} is a word of Python, so no class has this name; choose another name"
    )
    found = importlib.util.find_spec(module)
    # A folder without __init__.py is found too, and has no origin.
    require(found is None or found.origin is None, f"there is a module {module} already; choose another name")
    require(codec not in known_names(), f"an algorithm is called {codec} already; choose another name")
    require(not folder.exists(), f"{folder} exists; choose another name, or remove it")
    with able_to(f"write {folder}", "make it elsewhere: thinwire new-method PLACE/NAME"):
        for template in sorted(TEMPLATE.rglob("*.in")):
            place = str(template.relative_to(TEMPLATE)).removesuffix(".in").replace("new_method", module)
            text = template.read_text()
            for old, new in (("new_method", module), ("new-method", name), ("NewMethod", codec)):
                text = text.replace(old, new)
            _write(folder / place, text)
        _write_text(folder / "data")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _write_text(folder: Path) -> None:
    """A text for the second task: half of the files of Python's own library to learn from, and the others for the test."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for first, (name, size) in enumerate(TEXT_BYTES.items()):
        text = b"".join(file.read_bytes() for file in files[first::2])[:size]
        _write(folder / name, text.decode(errors="ignore"))  # the cut may lie within a character
