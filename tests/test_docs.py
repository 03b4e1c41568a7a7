"""The code of the guide's pages is run as it stands there, and what it builds is held to the conformance suites."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from average import test_gossip_averagers
from codec import test_codecs

import thinwire as tw

GUIDE = Path(__file__).parents[1] / "docs" / "guide"
BLOCK = re.compile(r'^```python(?: title="(?P<file>[^"]+)")?\n(?P<code>.*?)^```', re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str | None, str]]:
    """The Python of a page, block by block: (the file it is to be saved as, the code, on the lines it has there)."""
    text = (GUIDE / page).read_text(encoding="utf-8")
    return [(m["file"], "\n" * text.count("\n", 0, m.start("code")) + m["code"]) for m in BLOCK.finditer(text)]


def run_page(page: str, folder: Path) -> dict:
    """Save the files of a page, run the rest of its code in order; returns the names that are defined then."""
    names: dict = {"__name__": page}
    for file, code in blocks(page):
        if file:
            (folder / file).write_text(code.lstrip("\n"), encoding="utf-8")
        else:
            exec(compile(code, GUIDE / page, "exec"), names)
    return names


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Runs a page once and remembers its names; files that it saves can be imported, in other processes too."""
    folder, known = tmp_path_factory.mktemp("guide"), {}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield lambda page: known[page] if page in known else known.setdefault(page, run_page(page, folder))
    sys.path.remove(str(folder))


def conformance(suite, argument: str) -> list:
    """The tests of a suite that run over its whole list of algorithms, one case for each set of their other arguments."""
    cases = []
    everything = getattr(suite, f"every_{argument}").mark
    for name, test in vars(suite).items():
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        if everything in marks:
            others = [[(mark.args[0], value) for value in mark.args[1]] for mark in marks if mark != everything]
            for chosen in itertools.product(*others):
                cases.append(pytest.param(test, dict(chosen), id=f"{name}-{'-'.join(str(v) for _, v in chosen)}"))
    assert len(cases) > 10, f"{suite.__name__}: where have its tests gone?"
    return cases


@pytest.mark.parametrize("page", sorted(path.name for path in GUIDE.glob("add-*.md")))
def test_the_code_of_the_page_runs(pages, page):
    suite = {
        "add-a-codec.md": "check_codec(",
        "add-a-memory.md": "check_memory(",
        "add-an-averager.md": "check_averager(",
    }
    code = [text for _, text in blocks(page)]
    assert len(code) >= 4 and any(suite[page] in text for text in code), "a page runs what `thinwire.testing` offers"
    pages(page)


@pytest.mark.parametrize("test, options", conformance(test_codecs, "codec"))
def test_the_codec_of_the_guide_keeps_the_contract(pages, test, options):
    test(codec=pages("add-a-codec.md")["Natural"](), **options)


# The formula of its bytes, which is a table in the suite, is asserted on the page.
@pytest.mark.parametrize(
    "test, options",
    [case for case in conformance(test_gossip_averagers, "averager") if "one_message_per_neighbour" not in case.id],
)
def test_the_averager_of_the_guide_keeps_the_contract(pages, test, options):
    test(averager=pages("add-an-averager.md")["QuantizedMix"](), **options)


def test_the_script_of_the_guide_saves_a_hundredfold(tmp_path):
    ((name, code),) = blocks("first-saving.md")
    (tmp_path / name).write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name]
    command.append("Mean(chain(TopK(0.005), QSGD(bits=4)), ErrorFeedback())")
    assert command[-1] in (GUIDE / "first-saving.md").read_text(encoding="utf-8")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    accuracy, factor = re.search(r"accuracy ([\d.]+)%, .* MB sent, (\d+) times", done.stdout).groups()
    assert float(accuracy) > 95
    assert int(factor) >= 100


def test_the_reference_has_every_public_name():
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    spec = importlib.util.spec_from_file_location("pages", GUIDE.parent / "pages.py")
    spec.loader.exec_module(pages := importlib.util.module_from_spec(spec))
    rooms = [pages._room(title, importlib.import_module(name)) for title, name in pages.ROOMS.items()]
    shown = {line.rpartition(".")[2] for room in rooms for line in room.splitlines() if line.startswith("::: ")}
    packages = {name for name in tw.__all__ if inspect.ismodule(getattr(tw, name))}
    assert set(tw.__all__) - packages <= shown
