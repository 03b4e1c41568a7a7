"""The pages of the docs site that do not stand in docs/: README, changelog, CONTRIBUTING and the API reference.

MkDocs calls the `on_` functions (`hooks` in mkdocs.yml). The reference has a page for each package of the library, with its
contract, which stands in the package's `base`, and all of its public names.
"""

from __future__ import annotations

import logging
import posixpath
import re
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import thinwire

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.pages")
TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}  # file -> its page
PACKAGES = {
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
    "Testing": "thinwire.testing",
    "Training": "thinwire.lab.train",
    "Data sets": "thinwire.lab.train.data",
    "Models": "thinwire.lab.train.models",
    "Optimizers": "thinwire.lab.train.optimize",
    "Recipes": "thinwire.lab.recipes",
    "Sweeps": "thinwire.lab.sweep",
    "Reports": "thinwire.lab.report",
}


def on_config(config: MkDocsConfig) -> None:
    """Fill the `Reference` of `nav`; name the version on each page, and link the repository that this clone came from."""
    for section in config.nav:
        if section.get("Reference") is not None:
            section["Reference"] = [{title: _path(title)} for title in PACKAGES]
    config.copyright = f"thinwire {thinwire.__version__} · {config.copyright}"
    origin = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True).stdout
    config.repo_url = config.repo_url or web_address(origin.strip())


def web_address(remote: str) -> str | None:
    """The https address of a git remote, without credentials; None for a folder.

    Example:
        >>> web_address("git@git.example.org:group/thinwire.git")
        'https://git.example.org/group/thinwire'
    """
    match = re.fullmatch(r"(?:(?:https?|ssh)://)?(?:[^@/]+@)?([\w.-]+\.\w+)(?::\d+/|[:/])(.+?)(?:\.git)?/?", remote)
    return f"https://{match[1]}/{match[2]}" if match else None


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the generated pages."""
    for name, page in TOP.items():
        files.append(File.generated(config, page, content=_top_page(name)))
    for title, name in PACKAGES.items():
        files.append(File.generated(config, _path(title), content=_reference(title, import_module(name))))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of notebooks, which MkDocs neither makes nor checks: from `choose.md` to the page's address."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def resolve(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link["path"]))
        target = files.get_file_from_path(path)
        if target is None:
            LOG.warning(f"Notebook '{page.file.src_uri}' contains a link '{link['path']}', but '{path}' is not found.")
            return link[0]
        return f'href="{target.url_relative_to(page.file)}'

    return re.sub(r'href="(?P<path>[^":#]+\.(?:md|ipynb))', resolve, html)


def _path(title: str) -> str:
    return f"reference/{title.lower().replace(' ', '-')}.md"


def _top_page(name: str) -> str:
    """A file of the repository's top folder, its links made relative to docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for file, page in TOP.items():
        text = text.replace(f"]({file}", f"]({page}")
    return text.replace("](docs/", "](")


def _reference(title: str, package: ModuleType) -> str:
    """A page: the text of the package, its contracts, its public names."""
    parts = [f"# {title}", _text(package.__name__)]
    for path in sorted(Path(package.__file__).parent.glob("*base.py")) if hasattr(package, "__path__") else []:
        parts += [f"## The contract (`{path.name}`)", _text(f"{package.__name__}.{path.stem}")]
    addresses = [_address(getattr(package, name), name, package) for name in _names(package)]
    return "\n\n".join([*parts, *(f"::: {address}" for address in addresses)]) + "\n"


def _text(module: str) -> str:
    """The docstring of a module, without its members."""
    return f"::: {module}\n    options: {{members: false, show_root_heading: false, show_root_toc_entry: false}}"


def _names(package: ModuleType) -> list[str]:
    """Public names in the order of the library's `__all__`, then those of the package alone."""
    own = getattr(package, "__all__", None) or [
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == package.__name__ and callable(value)
    ]
    known = {name: i for i, name in enumerate(thinwire.__all__)}
    return sorted(own, key=lambda name: known.get(name, len(known)))


def _address(value: object, name: str, package: ModuleType) -> str:
    """Where a public name is defined; in its package, `chain` would mean the file. Aliases of types are not of thinwire."""
    defined_in = str(getattr(value, "__module__", ""))
    return f"{defined_in if defined_in.startswith('thinwire.') else package.__name__}.{name}"


class Examples(griffe.Extension):
    """Has doctests shown as code: those of our section `Example`, `Examples` to Google's style, and those without one."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Rewrite the docstring of an object, as far as pages show it."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^>>> (.+\n?)+", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)
