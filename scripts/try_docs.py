"""Follows the README and the guide in a clean clone: runs their blocks, and compares what they print with the page.

    python scripts/try_docs.py                               the README, and all pages in docs/
    python scripts/try_docs.py docs/guide/choose.md          these pages
    python scripts/try_docs.py --folder DIR [PAGE ...]       in the clone of an earlier call, whose environment is ready

The README's `make demo` makes the virtual environment. Commands run in the clone, in order; those that follow a command of
the same page find its files, and a `cd` holds for them. `HERE` makes commands for several hosts fit this machine, and
`SHELLS` runs together what a page starts in several shells. Python that takes a model for known gets one. Lines of `text`
after commands must be among the printed ones, in order; numbers may differ by a quarter. Each block is reported: it ran,
differs, failed, or why it was not run here. The exit code is 1 if one differs or failed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import doctest
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.pages import Block, Following, blocks  # noqa: E402

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
ELSEWHERE = [  # what a command or Python matches, and why it does not run here
    (r"\bmake (test|lint|docs|wheel)", ".ci/run runs it"),
    (r"\bsrun\b|\bsbatch\b|#SBATCH|--slurm(?!.*--dry-run)", "needs a cluster: scripts/try_cluster.sh"),
    (r"\bsudo\b|netlab", "needs root, and a machine that does nothing else"),
    (r"^python benchmarks/", "a study of an hour or more; the page says where it ran"),
    (r"example\.org|\bADDRESS\b|http://host", "needs other hosts"),
    (r"train (cifar10|imagenet|wmt16|wikitext|multi30k)(?!.*--help)", "needs a data set"),
    (r'mesh\("cuda"|gpu\.py (?!--dry-run|#|$)', "needs a GPU"),
    (r"^until ", "starts a worker again until its training has ended"),
    (r"\.\.\. ", "names something of the reader's"),
]
HERE = [  # what a command matches, and how it runs on this one machine, in an environment that has the package
    (r"^pip install '?\.(\[[\w,]+\])?'?$", r"pip install -q -c constraints.txt 'thinwire\1'"),
    (r"examples/sweeps/digits\.toml", "short/digits.toml"),
    (
        r".*gpu\.py --dry-run.*",
        r"pip install -q -c constraints.txt 'thinwire[gpu]' pytest pytest-xdist hypothesis && \g<0>",
    ),
    (r"--nnodes 2 --nproc-per-node [48]", "--nnodes 1 --nproc-per-node 2"),
    (r"--nnodes [23] --nproc-per-node 1", "--nnodes 1 --nproc-per-node 2"),
    (r"node1:29400", "localhost:0"),
    (r"--interface eth0", "--interface lo"),
    (r"(thinwire train text-gpt\S*)", r"\1 --max-steps 4"),
    (r"--workers 16 --network", "--workers 16 --max-steps 4 --network"),
]
SHORT = r"""
mkdir -p short
sed -e 's/epochs = 10/epochs = 1/' -e 's/seed = .*/seed = [1]/' examples/sweeps/digits.toml > short/digits.toml
python3 - <<'END'
import sysconfig
from pathlib import Path

for name, size in (("my.txt", 60_000), ("other.txt", 6_000)):
    Path(name).write_bytes(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()[:size])
Path("mine.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(1000, 1000)\n")
END
"""  # what commands name and the reader has: a sweep of minutes, two texts, a function that returns a model
PORT = """python3 -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])\""""
SHELLS = {  # what commands for several shells or hosts match, and how they run together on this machine
    r"^thinwire keys|--credentials keys": rf"""
# The run between two homes, in two folders.
set -e
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
rm -rf keys home-b token.txt
thinwire keys new keys
thinwire keys token keys 127.0.0.1:$({PORT}) > token.txt &
until grep -q "keys join" token.txt; do kill -0 $!; sleep 0.2; done
mkdir home-b && cd home-b
$(grep -o "thinwire keys join.*" ../token.txt) --name home-b
wait
cd ..
thinwire train digits --elastic --workers 1 --credentials keys --epochs 2 --name home-a --overwrite &
(cd home-b; thinwire train digits --elastic --workers 1 --first-worker 1 --credentials keys --epochs 2 --name home-b)
wait $!
""",
    r"--lighthouse http://host:29510 --first-worker": r"""
# Workers that join an elastic run from another shell.
set -e
rm -f first.txt
thinwire train digits --workers 2 --elastic --epochs 30 --name first --overwrite > first.txt 2>&1 & first=$!
trap 'kill $first 2> /dev/null || true' EXIT
until grep -q "http://" first.txt; do kill -0 $first; sleep 0.2; done
joins="--elastic --epochs 30 --lighthouse $(grep -o "http://[^ ]*" first.txt | head -1) --first-worker 4"
thinwire train digits --workers 2 $joins --name second --overwrite
wait $first
""",
    r"^thinwire relay|--relay|--no-listen": rf"""
# Two workers that can only dial out, and the relay between them.
set -e
relay=$({PORT})
thinwire relay --bind 127.0.0.1:$relay & serves=$!
trap 'kill $serves' EXIT
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$({PORT})
options="--no-listen --relay 127.0.0.1:$relay --epochs 1 --name relayed --overwrite"
RANK=1 thinwire train digits $options & other=$!
RANK=0 thinwire train digits $options
wait $other
""",
}
SERVES = r"--serve|--otlp"  # commands that run until they are stopped
BEFORE = {  # what a page expects to be there
    "docs/watching.md": ['thinwire train digits --workers 2 --epochs 6 --strategy "Gradients(sparse())"'],
    "docs/reports.md": [
        f'thinwire train digits --workers 2 --epochs 3 --strategy "Gradients({averager})"'
        for averager in ("Mean()", "Mean(TopK(0.01), ErrorFeedback())")
    ],
    "docs/training.md": ["thinwire train digits --workers 2 --epochs 1"],
}
WORDS_ALONE = {"docs/doctor.md", "docs/watching.md"}  # their numbers are of the machine
READERS = (  # what Python in the docs takes for known
    "tw thinwire torch nn dist DistributedDataParallel model ddp optimizer loss batches budget set_learning_rate schedule step"
)
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
SECONDS = 1800  # for a command


class Page:
    """Follows one page.

    Args:
        page: its path in the clone.
        clone: the folder of the clone, in which commands run.
    """

    def __init__(self, page: str, clone: Path):
        self.page, self.clone, self.home = page, clone, clone
        if 'title="pyproject.toml"' in (clone / page).read_text(encoding="utf-8"):  # a package of the reader's own
            self.home = clone / Path(page).stem
            self.home.mkdir(exist_ok=True)
        self.folder = self.home
        bin = clone / ".venv" / "bin"
        self.environment = os.environ | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.environment |= {"VIRTUAL_ENV": str(bin.parent), "COLUMNS": "120", "GLOO_SOCKET_IFNAME": "lo"}
        self.environment.pop("PYTHONPATH", None)
        self.printed, self.all_printed, self.python = "", "", list[Block]()
        self.failures, self.together = 0, set[str]()

    def follow(self) -> int:
        """Run all blocks; returns how many failed or differ."""
        shown = [
            block
            for block in blocks(self.clone / self.page)
            if block.file or block.language in ("sh", "bash", "python", "text")
        ]
        before = [SHORT] if self.home == self.clone else []
        for command in [*before, *BEFORE.get(self.page, [])] if shown else []:
            self.shell(command, 0)
        page = (self.clone / self.page).read_text(encoding="utf-8").splitlines()
        last = 0
        for block in shown:
            if any(line.startswith("## ") for line in page[last : block.line]):
                self.printed = ""  # what is shown in another part of the page is not of these commands
            last = block.line + block.code.count("\n")
            if "#SBATCH" in block.code:
                self.report(block.line, "not run", "a batch file", elsewhere("#SBATCH") or "")
            elif block.language in ("sh", "bash"):
                self.printed = ""
                for line in block.code.replace("\\\n", " ").splitlines():
                    self.command(line, block.line)
            elif block.language == "python":
                self.python_block(block)
            elif block.file:
                (self.home / block.file).write_text(block.code, encoding="utf-8")
                self.report(block.line, "saved", block.file)
            elif self.printed:
                self.compare(block)
                self.printed = ""
            else:
                self.report(
                    block.line, "not compared", block.code.splitlines()[0], "no command above it printed anything"
                )
        if self.page == "README.md":
            for row in rows_not_printed((self.clone / self.page).read_text(encoding="utf-8"), self.all_printed):
                self.report(0, "DIFFERS", row, "is not what `make demo` printed")
        return self.failures

    def report(self, line: int, result: str, what: str, why: str = "") -> None:
        self.failures += result in ("FAILED", "DIFFERS")
        print(f"{self.page}:{line}: {result:12} {what[:90]}{': ' + why if why else ''}", flush=True)

    def command(self, text: str, line: int) -> None:
        text = re.sub(r"\s+# .*", "", text.strip())
        if text.startswith("make demo") and self.page != "README.md":
            return self.report(line, "not run", text, "the README's")
        for pattern, script in SHELLS.items():
            if re.search(pattern, text):
                if pattern in self.together:
                    return self.report(line, "not run", text, "ran above, with the others of its run")
                self.together.add(pattern)
                return self.shell(script, line)
        if inside := re.fullmatch(r"cd ([\w-]+)", text):
            self.folder = self.folder / inside[1]  # also for the commands that follow
            return self.report(line, "ran" if self.folder.is_dir() else "FAILED", text)
        here = text
        for pattern, instead in HERE:
            here = re.sub(pattern, instead, here)
        if why := elsewhere(here):
            return self.report(line, "not run", text, why)
        if text and not text.startswith("#"):
            self.shell(here, line)

    def shell(self, text: str, line: int) -> None:
        command = with_newest_run(text, self.clone)
        began, serves = time.monotonic(), re.search(SERVES, text)
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=20 if serves else SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            if serves:
                return self.report(line, "serves", text)
            return self.report(line, "FAILED", text, f"still at work after {SECONDS} s")
        self.printed += out
        self.all_printed += out
        if process.returncode:
            return self.report(line, "FAILED", text.strip(), f"exit code {process.returncode}: {(err or out)[-600:]}")
        self.report(line, "ran", text.strip().replace("\n", "; "), f"{time.monotonic() - began:.0f} s")

    def python_block(self, block: Block) -> None:
        what = block.file or block.code.strip().splitlines()[0]
        several = block.code.count("tw.attach(") > 1
        why = "lines to choose from: tests/test_docs.py trains with each" if several else elsewhere(block.code)
        if why := why or example_with(block.code):
            return self.report(block.line, "not run", what, why)
        missing = [name for name in unknown([*self.python, block]) if name not in READERS.split()]
        if missing and not block.file:
            return self.report(block.line, "not run", what, f"a part of a script; it has no {', '.join(missing)}")
        self.python.append(block)
        # A process of its own, as the environment is: it follows the page's Python from the beginning.
        lines = ",".join(str(known.line) for known in self.python)
        command = [self.clone / ".venv" / "bin" / "python", Path(__file__), "--python", self.clone / self.page, lines]
        run = subprocess.run(command, cwd=self.home, env=self.environment, capture_output=True, text=True)
        self.printed = run.stdout
        if run.returncode:
            self.python.pop()
            return self.report(block.line, "FAILED", what, run.stderr[-600:])
        self.report(block.line, "ran", what)

    def compare(self, block: Block) -> None:
        frame = "╭╰" if self.page in WORDS_ALONE else ()  # with the name of a run and its state
        lines = [line for line in block.code.splitlines() if line.strip() and line[0] not in frame]
        printed = iter(self.printed.splitlines())
        for number, line in enumerate(lines):
            before, printed = itertools.tee(printed)
            if not any(alike(line, other, self.page in WORDS_ALONE) for other in printed):
                close = [other for other in before if other.split()[:1] == line.split()[:1]]
                found = f"; printed {close[0].strip()!r}" if close else ""
                self.report(block.line + number, "DIFFERS", repr(line.strip()), f"is not printed{found}")
                printed = iter(self.printed.splitlines())
        self.report(block.line, "compared", f"{len(lines)} lines")


def with_newest_run(text: str, clone: Path) -> str:
    """The text with the newest run in place of `runs/NAME`."""
    runs = sorted(clone.glob("runs/*/config.json"), key=lambda file: file.stat().st_mtime)
    return text.replace("runs/NAME", str(runs[-1].parent.relative_to(clone)) if runs else "runs/NAME")


def elsewhere(code: str) -> str | None:
    """Why a command or a block of Python does not run here."""
    return next((why for pattern, why in ELSEWHERE if re.search(pattern, code, re.MULTILINE)), None)


def example_with(code: str) -> str | None:
    """Which example has these very lines: its page says how to run it."""
    for path in sorted((ROOT / "examples").rglob("*.py")):
        if code in path.read_text(encoding="utf-8"):
            return f"a part of {path.relative_to(ROOT)}"
    return None


def rows_not_printed(page: str, printed: str) -> list[str]:
    """The rows of the demo's table on a page whose numbers do not follow the number of runs in the printed row of that name."""
    rows = {
        name: [line for line in printed.splitlines() if re.match(rf" *{re.escape(name)} {{2,}}\d", line)]
        for name in ("dense", "4-bit", "sparse", "sparse + 4-bit")
    }
    missing = []
    for name, lines in rows.items():
        for row in re.findall(rf"^\| {re.escape(name)} \|.*\|$", page, re.MULTILINE):
            shown = NUMBER.findall(row.partition(name)[2])
            if not any(NUMBER.findall(line.partition(name)[2])[1 : len(shown) + 1] == shown for line in lines):
                missing.append(row)
    return missing


def alike(shown: str, printed: str, words_alone: bool) -> bool:
    """Whether two lines have the same words, and numbers that differ by a quarter at most."""
    first, second = (NUMBER.sub(" 0 ", line) for line in (shown, printed))
    if re.findall(r"[a-zA-Z_%]+", first) != re.findall(r"[a-zA-Z_%]+", second):
        return False
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(line)] for line in (shown, printed)]
    close = (abs(a - b) <= 0.25 * max(abs(a), abs(b)) for a, b in zip(*numbers, strict=False))
    return words_alone or len(numbers[0]) == len(numbers[1]) and all(close)


def unknown(parts: list[Block]) -> list[str]:
    """The names that Python uses and nothing before defines."""
    nodes = [node for part in parts if not part.file for node in ast.walk(ast.parse(dedented(part.code)))]
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    used = {node.id: None for node in nodes if isinstance(node, ast.Name)}
    return [name for name in used if name not in defined and not hasattr(builtins, name)]


def dedented(code: str) -> str:
    """Lines of a longer script, so that they can be parsed; what is no statement by itself is left out."""
    if code.startswith(">>>"):
        code = doctest.script_from_examples(code)
    lines = code.splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    text = "\n".join(line[indent:] for line in lines)
    try:
        ast.parse(text)
    except SyntaxError:
        return "a_part_of_a_call"
    return text


def run_python(page: str, lines: set[int]) -> None:
    """Run these blocks of Python of a page in this process; its files are saved in the current folder."""
    sys.path.insert(0, os.getcwd())
    following = Following(Path(page), Path.cwd())
    chosen = [
        block._replace(code=with_newest_run(block.code, Path.cwd()))
        for block in blocks(Path(page))
        if block.line in lines
    ]
    following.names |= readers_names(set(unknown(chosen)))
    for block in chosen:
        if block.code.startswith(">>>"):
            check_session(block, following.names)
        else:
            following.run(block)


def check_session(block: Block, names: dict[str, object]) -> None:
    """Run an interactive session, and compare what it prints."""
    test = doctest.DocTestParser().get_doctest(block.code, names, "page", "page", block.line)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    if runner.run(test).failed:
        sys.exit(f"line {block.line}: the session prints something else")


def readers_names(needed: set[str]) -> dict[str, object]:
    """The names of `READERS` that are needed: a model in a process group of this process alone, and what trains it."""
    needed = needed & set(READERS.split())
    if not needed:
        return {}
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import thinwire
    import thinwire.lab.train

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    loss = nn.functional.cross_entropy

    def step() -> None:
        loss(model(batch[0]), batch[1]).backward()

    if "model" in needed:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    known: dict[str, object] = locals() | {"tw": thinwire, "budget": 500, "batches": itertools.cycle([batch])}
    known |= {"schedule": lambda done: 0.01, "set_learning_rate": lambda optimizer, rate: None}
    if "ddp" in needed:
        known["ddp"] = DistributedDataParallel(model)
    return {name: known[name] for name in needed}


def clone_into(folder: Path) -> None:
    """The committed and changed files of this repository, without what was built or ignored."""
    names = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    subprocess.run(
        ["cp", "--parents", "--preserve=timestamps", "-t", folder, *names.stdout.decode().strip("\0").split("\0")],
        cwd=ROOT,
        check=True,
    )


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help="pages, as paths in the repository")
    parser.add_argument("--folder", type=Path, help="where the clone is made, and stays")
    parser.add_argument("--python", nargs=2, metavar=("PAGE", "LINES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.python:
        run_python(options.python[0], set(map(int, options.python[1].split(","))))
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="thinwire-docs-"))
    folder.mkdir(parents=True, exist_ok=True)
    clone_into(folder)
    pages = [Page(page, folder) for page in options.pages]
    if not (folder / ".venv" / "bin" / "thinwire").exists() and "README.md" not in options.pages:
        Page("README.md", folder).shell("make demo", 0)
    failures = sum(page.follow() for page in pages)
    print(f"{len(pages)} pages in {folder}: {failures} blocks failed or differ")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
