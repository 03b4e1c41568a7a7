"""The code of the guide's pages is run as it stands there, and what it builds is held to the conformance suites."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.command import python
from helpers.pages import Block, Following, blocks
from helpers.program import programs
from helpers.spawn import spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"


def python_of(page: str) -> list[Block]:
    return [block for block in blocks(GUIDE / page) if block.language == "python"]


def run_page(page: str, folder: Path) -> dict:
    """Run the Python of a page; returns the names that are defined then."""
    following = Following(GUIDE / page, folder)
    for block in python_of(page):
        following.run(block)
    return following.names


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Runs a page once and remembers its names; files that it saves can be imported, in other processes too."""
    folder, known = tmp_path_factory.mktemp("guide"), {}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield lambda page: known[page] if page in known else known.setdefault(page, run_page(page, folder))
    sys.path.remove(str(folder))


@pytest.mark.parametrize("page", sorted(path.name for path in GUIDE.glob("add-*.md")))
def test_the_code_of_the_page_runs(pages, page):
    proof = {
        "add-a-codec.md": "check_codec(",
        "add-a-memory.md": "check_memory(",
        "add-a-recipe.md": "check_recipe(",
        "add-an-averager.md": "check_averager(",
        "add-an-exchange.md": "check_exchange(",
        "add-a-strategy.md": "check_strategy(",
    }
    saved, *others = python_of(page)
    assert saved.file and any(proof[page] in block.code for block in others), "a page runs what it shows, and proves it"
    pages(page)


@pytest.mark.parametrize("page", ["add-a-codec.md", "add-an-exchange.md", "add-a-strategy.md"])
def test_the_page_is_short(page):
    assert len((GUIDE / page).read_text(encoding="utf-8").splitlines()) < 40


def run_as_torchrun_does(script, averager, rank, store):
    """Torchrun's environment variables name a port; a file needs none that is free."""
    sys.argv = [script, averager]
    dist.init_process_group = partial(dist.init_process_group, init_method=f"file://{store}", rank=rank, world_size=2)
    runpy.run_path(script, run_name="__main__")


def test_the_script_of_the_guide_saves_a_hundredfold(tmp_path):
    (script,) = python_of("first-saving.md")
    Following(GUIDE / "first-saving.md", tmp_path).run(script)
    averager = "Mean(chain(TopK(0.005), QSGD(bits=4)), ErrorFeedback())"
    assert averager in (GUIDE / "first-saving.md").read_text(encoding="utf-8")
    arguments = [(str(tmp_path / script.file), averager, rank, str(tmp_path / "store")) for rank in range(2)]
    with programs(run_as_torchrun_does, arguments, tmp_path) as workers:
        codes = [worker.wait(300) for worker in workers]
        assert codes == [0, 0], workers[0].stderr + workers[1].stderr
        accuracy, factor = re.search(r"accuracy ([\d.]+)%, .* MB sent, (\d+) times", workers[0].stdout).groups()
    assert float(accuracy) > 95
    assert int(factor) >= 100


README = GUIDE.parents[1] / "README.md"


class Net(nn.Module):
    """A model as the README's lines expect it: one parameter's name has "embed" in it, and four layers are four fragments."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        return self.out(self.blocks(self.embed(x).relu()))


def attach_by(comm, lines):
    """Run each line on a model of its own, as the README says which: in DDP, sharded or plain; then train two steps."""
    from torch.distributed.fsdp import fully_shard  # takes seconds, which the other tests need not wait for

    torch.set_num_threads(1)
    for line in lines:
        torch.manual_seed(0)
        model = Net()
        if "Shards" in line:
            fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
        trained = ddp = DistributedDataParallel(model) if "(ddp" in line or "compress_gradients(" in line else model
        kind = tw.strategy.MuonAdamW if "mulo_co" in line else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.01)
        try:
            names = {"tw": tw, "ddp": ddp, "model": trained, "optimizer": optimizer}
            with eval(line, names) as handle:
                for _ in range(2):
                    optimizer.zero_grad()
                    trained(torch.randn(4, 8)).square().mean().backward()
                    optimizer.step()
            assert handle.ledger.bytes_sent > 0
        except Exception as error:
            raise AssertionError(f"{line}: {type(error).__name__}: {error}") from error


def test_every_line_of_the_readme_trains_the_model_that_it_names():
    (block,) = [block for block in blocks(README) if block.language == "python"]
    lines = re.findall(r"^(tw\.attach\(.+?\))(?: *#.*)?$", block.code, re.MULTILINE)
    table = re.findall(r"^\|.*\| `(tw\..+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == block.code.count("tw.attach(") and len(table) == 4
    spawn(2, attach_by, lines + table)


def run_mine(script, rank, store):
    """As `run_as_torchrun_does`, in the folder of the script."""
    os.chdir(Path(script).parent)
    torch.set_num_threads(1)
    run_as_torchrun_does(script, "", rank, store)


def test_a_script_under_torchrun_goes_on_from_the_epoch_that_all_have_saved(tmp_path):
    page = GUIDE.parent / "clusters.md"
    (script,) = [block for block in blocks(page) if block.file == "mine.py"]
    Following(page, tmp_path).run(script)

    def run(store):
        arguments = [(str(tmp_path / "mine.py"), rank, str(tmp_path / store)) for rank in range(2)]
        with programs(run_mine, arguments, tmp_path) as workers:
            assert [worker.wait(300) for worker in workers] == [0, 0], workers[0].stderr + workers[1].stderr
            return workers[0].stdout

    assert run("first").startswith("0 epochs were done")
    saved = [torch.load(tmp_path / "mine" / f"{rank}.4", weights_only=True) for rank in range(2)]
    assert str(saved[0]["thinwire"]) != str(saved[1]["thinwire"])  # each has its own memory
    for name in ("0.4", "0.3", "1.4"):  # rank 1 had saved the third epoch, rank 0 not yet
        (tmp_path / "mine" / name).unlink()
    assert run("second").startswith("2 epochs were done")
    for rank, before in enumerate(saved):
        after = torch.load(tmp_path / "mine" / f"{rank}.4", weights_only=True)
        torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)


def test_torchrun_starts_the_workers_of_a_script_again(tmp_path):
    """With the command of the page, on one machine."""
    page = GUIDE.parent / "clusters.md"
    (script,) = [block for block in blocks(page) if block.file == "mine.py"]
    (command,) = re.findall(r"^\S* ?torchrun .* --max-restarts 3 mine.py", page.read_text(), re.MULTILINE)
    here = {"--nnodes 2 --nproc-per-node 8": "--nnodes 1 --nproc-per-node 2", "node1:29400": "localhost:0"}
    for there, value in here.items():
        assert there in command
        command = command.replace(there, value)
    begins = "    sampler.set_epoch(epoch)\n"
    dies = begins + "    if (done, epoch, rank) == (0, 2, 1):\n        os.kill(os.getpid(), 9)\n"
    (tmp_path / "mine.py").write_text(script.code.replace(begins, dies))
    variables, arguments = command.split("torchrun ")
    done = python(
        *("-m", "torch.distributed.run", *arguments.split()),
        cwd=tmp_path,
        timeout=400,
        GLOO_SOCKET_IFNAME="lo",
        **dict(variable.split("=") for variable in variables.split()),
    )
    assert done.returncode == 0, done.stderr
    assert re.match("[12] epochs were done", done.stdout), done.stdout


def site_hooks():
    """The module docs/pages.py, which MkDocs loads by its path."""
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    spec = importlib.util.spec_from_file_location("pages", GUIDE.parent / "pages.py")
    spec.loader.exec_module(pages := importlib.util.module_from_spec(spec))
    return pages


def test_the_reference_has_every_public_name():
    pages = site_hooks()
    texts = [pages._reference(title, importlib.import_module(name)) for title, name in pages.PACKAGES.items()]
    shown = {line.rpartition(".")[2] for text in texts for line in text.splitlines() if line.startswith("::: ")}
    packages = {name for name in tw.__all__ if inspect.ismodule(getattr(tw, name))}
    assert set(tw.__all__) - packages <= shown


def test_links_of_the_notebook_are_resolved_and_dead_ones_are_warnings(caplog):
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import get_files
    from mkdocs.structure.pages import Page

    hooks, config = site_hooks(), MkDocsConfig()
    config.load_dict(
        {"use_directory_urls": False, "site_name": "thinwire", "docs_dir": str(GUIDE.parent), "site_dir": "site"}
    )
    assert config.validate() == ([], [])
    files = get_files(config)
    page = Page(None, files.get_file_from_path("guide/tutorial.ipynb"), config)
    text = "".join(sum((cell["source"] for cell in json.loads((GUIDE / "tutorial.ipynb").read_text())["cells"]), []))
    links = re.findall(r"\]\(([^)]+)\)", text)
    html = hooks.on_page_content("".join(f'<a href="{link}">' for link in links), page, config, files)
    assert re.findall('href="([^"]+)"', html) == ["choose.html", "../sharded.html", "trainers.html"]
    assert not caplog.records  # each warning fails `mkdocs build --strict`
    assert hooks.on_page_content('<a href="no-page.md#a">', page, config, files) == '<a href="no-page.md#a">'
    assert "'no-page.md', but 'guide/no-page.md' is not found" in caplog.text


def test_the_site_links_the_repository_without_credentials():
    web_address = site_hooks().web_address
    for remote in ["https://user:secret@git.example.org/a/thinwire.git", "ssh://git@git.example.org:22/a/thinwire"]:
        assert web_address(remote) == "https://git.example.org/a/thinwire"
    assert web_address("git@git.example.org:a/thinwire.git") == "https://git.example.org/a/thinwire"
    assert (
        web_address("/home/me/thinwire") is None and web_address("../thinwire.git") is None and web_address("") is None
    )


NAMED = re.compile(r"(?<![\w/.-])(?:benchmarks|docs|examples|native|scripts|src|tests)/[\w/@-]+(?:\.\w+)+")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_files_of_the_repository_that_a_page_names_are_there(page):
    names = NAMED.findall(page.read_text(encoding="utf-8"))
    if page.name == "new-method.md":  # names files of the package that it makes
        names = [name for name in names if not name.startswith(("src/nearest_levels/", "tests/test_codec.py"))]
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_script_that_follows_pages_goes_into_folders(tmp_path):
    (tmp_path / "page.md").write_text("```sh\nmkdir inner\ncd inner\ntouch here\n```\n\n```sh\ntouch still-here\n```\n")
    follows = runpy.run_path(str(ROOT / "scripts" / "try_docs.py"))["Page"]
    assert follows("page.md", tmp_path).follow() == 0
    assert sorted(file.name for file in (tmp_path / "inner").iterdir()) == ["here", "still-here"]


def test_the_script_that_follows_pages_compares_the_demo_with_the_page():
    """The printed rows are those of a report: number of runs, accuracy, bytes, savings, seconds."""
    printed = (
        "  sparse + 4-bit   1   99.07   1.50   232   116   30.2\n  dense   1   99.07   349   1.000   0.500   35.3\n"
    )
    right = "| dense | 99.07 % | 349 | | |\n| sparse + 4-bit | 99.07 % | 1.50 | 232 times | 116 times |\n"
    not_printed = runpy.run_path(str(ROOT / "scripts" / "try_docs.py"))["rows_not_printed"]
    assert not_printed(right, printed) == []
    assert not_printed(right.replace("349", "350"), printed) == ["| dense | 99.07 % | 350 | | |"]
