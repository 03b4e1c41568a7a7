"""The pages of the docs site that are not written by hand: the home page, which is the README, and the API reference.

MkDocs calls the `on_` functions (`hooks` in mkdocs.yml). The reference has a page for each room of the library, with its
contract, which stands in the room's `base`, and all of its public names.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import thinwire

ROOT = Path(__file__).parents[1]
ROOMS = {
    "Attaching": "thinwire.attaching",
    "Strategies": "thinwire.strategy",
    "Averagers": "thinwire.average",
    "Memories": "thinwire.memory",
    "Codecs": "thinwire.codec",
    "Sampler": "thinwire.sampler",
    "Schedules": "thinwire.schedule",
    "Topologies": "thinwire.topology",
    "Communicators": "thinwire.comm",
    "Notation": "thinwire.notation",
    "Training": "thinwire.lab.train",
    "Data sets": "thinwire.lab.train.data",
    "Models": "thinwire.lab.train.models",
    "Optimizers": "thinwire.lab.train.optimize",
    "Recipes": "thinwire.lab.recipes",
    "Sweeps": "thinwire.lab.sweep",
    "Reports": "thinwire.lab.report",
}


def on_config(config: MkDocsConfig) -> None:
    """Fill the `Reference` of `nav`."""
    for section in config.nav:
        if section.get("Reference") is not None:
            section["Reference"] = [{title: _path(title)} for title in ROOMS]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages."""
    files.append(File.generated(config, "index.md", content=_home()))
    for title, name in ROOMS.items():
        files.append(File.generated(config, _path(title), content=_room(title, import_module(name))))


def _path(title: str) -> str:
    return f"reference/{title.lower().replace(' ', '-')}.md"


def _home() -> str:
    """The README, its links into docs/ made relative to docs/; what lies outside of docs/ is named without a link."""
    text = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text(encoding="utf-8"))
    return text.replace("[CONTRIBUTING.md](CONTRIBUTING.md)", "`CONTRIBUTING.md`")


def _room(title: str, room: ModuleType) -> str:
    """A page: the text of the room, its contracts, its public names."""
    parts = [f"# {title}", _text(room.__name__)]
    for path in sorted(Path(room.__file__).parent.glob("*base.py")) if hasattr(room, "__path__") else []:
        parts += [f"## The contract (`{path.name}`)", _text(f"{room.__name__}.{path.stem}")]
    addresses = [_address(getattr(room, name), name, room) for name in _names(room)]
    return "\n\n".join([*parts, *(f"::: {address}" for address in addresses)]) + "\n"


def _text(module: str) -> str:
    """The docstring of a module, without its members."""
    return f"::: {module}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}"


def _names(room: ModuleType) -> list[str]:
    """Public names in the order of the library's `__all__`, then those of the room alone."""
    own = getattr(room, "__all__", None) or [
        name
        for name, value in vars(room).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == room.__name__ and callable(value)
    ]
    known = {name: i for i, name in enumerate(thinwire.__all__)}
    return sorted(own, key=lambda name: known.get(name, len(known)))


def _address(value: object, name: str, room: ModuleType) -> str:
    """Where a public name is defined; in its room, `chain` would mean the file. Aliases of types have PyTorch's or Python's."""
    defined_in = str(getattr(value, "__module__", ""))
    return f"{defined_in if defined_in.startswith('thinwire.') else room.__name__}.{name}"


class Examples(griffe.Extension):
    """Has doctests shown as code: those of our section `Example`, `Examples` to Google's style, and those without one."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Rewrite the docstring of an object, as far as pages show it."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^>>> (.+\n?)+", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)
