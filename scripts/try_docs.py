"""Follows the README and the guide in a clean clone: runs their blocks, and compares what they print with the page.

    python scripts/try_docs.py                               the README, the guide, and the pages for users in docs/
    python scripts/try_docs.py docs/guide/choose.md          these pages
    python scripts/try_docs.py --folder DIR [PAGE ...]       in the clone of an earlier call, whose environment is ready

The README's `make demo` makes the virtual environment. Commands run in the clone, in order; those that follow a command of
the same page find its files. Lines of `text` after commands must be among the printed ones, in order; numbers may differ by
a quarter. Each block is reported: it ran, differs, failed, or why it was not run here. The exit code is 1 if one differs or
failed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
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

DOCS = (
    "training recipes sweeps reports watching clusters plan doctor lines security elastic asynchronous robust sharded"
)
PAGES = ["README.md", *sorted(f"docs/guide/{path.name}" for path in (ROOT / "docs/guide").glob("*.md"))]
PAGES += [f"docs/{name}.md" for name in DOCS.split()]
ELSEWHERE = [  # what a command matches, and why it does not run here
    (r"\bmake (test|lint|docs|wheel)", ".ci/run runs it"),
    (r"^pip install", "make demo has installed the package"),
    (r"\bsrun\b|\bsbatch\b|#SBATCH|--slurm", "needs a cluster: scripts/try_cluster.sh"),
    (r"\bsudo\b|netlab", "needs root, and a machine that does nothing else"),
    (r"^python benchmarks/|^thinwire sweep examples/sweeps/digits.toml$", "takes an hour or more"),
    (r"\bnode1\b|\bhost:\d|example\.org|\bADDRESS\b|0\.0\.0\.0|--no-listen", "needs other hosts"),
    (r"--credentials keys|^thinwire keys", "needs another host: tests/lab/cli/test_keys_command.py"),
    (r"--elastic|torchft_lighthouse", "needs the extra elastic: benchmarks/chaos.py"),
    (r"train (cifar10|imagenet|wmt16|wikitext)(?!.*--help)", "needs a data set"),
    (r"mine:build|\.\.\. ", "names something of the reader's"),
]
SERVES = r"--serve|^thinwire relay"  # commands that run until they are stopped
BEFORE = {  # what a page expects to be there
    "docs/watching.md": 'thinwire train digits --workers 2 --strategy "Gradients(sparse())"',
    "docs/reports.md": "thinwire train digits --workers 2 --epochs 3",
}
WORDS_ALONE = {"docs/doctor.md", "docs/watching.md"}  # their numbers are of the machine
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
SECONDS = 1800


class Page:
    """Follows one page.

    Args:
        page: its path in the clone.
        clone: the folder of the clone, in which commands run.
    """

    def __init__(self, page: str, clone: Path):
        self.page, self.clone = page, clone
        bin = clone / ".venv" / "bin"
        self.environment = os.environ | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self.environment |= {"VIRTUAL_ENV": str(bin.parent), "COLUMNS": "120", "GLOO_SOCKET_IFNAME": "lo"}
        self.environment.pop("PYTHONPATH", None)
        self.printed, self.all_printed, self.python = "", "", list[Block]()
        self.failures = 0

    def follow(self) -> int:
        """Run all blocks; returns how many failed or differ."""
        if self.page in BEFORE:
            self.shell(BEFORE[self.page], 0)
        for block in blocks(self.clone / self.page):
            if block.language in ("sh", "bash"):
                self.printed = ""
                for line in block.code.replace("\\\n", " ").splitlines():
                    self.command(line, block.line)
            elif block.language == "python":
                self.python_block(block)
            elif block.language == "text" and self.printed:
                self.compare(block)
                self.printed = ""
        if self.page == "README.md":
            for row in rows_not_printed((self.clone / self.page).read_text(encoding="utf-8"), self.all_printed):
                self.report(0, "DIFFERS", row, "is not what `make demo` printed")
        return self.failures

    def report(self, line: int, result: str, what: str, why: str = "") -> None:
        self.failures += result in ("FAILED", "DIFFERS")
        print(f"{self.page}:{line}: {result:8} {what[:90]}{': ' + why if why else ''}", flush=True)

    def command(self, text: str, line: int) -> None:
        text = re.sub(r"\s+# .*", "", text.strip())
        if text.startswith("make demo") and self.page != "README.md":
            return self.report(line, "not run", text, "the README's")
        for pattern, why in ELSEWHERE:
            if re.search(pattern, text):
                return self.report(line, "not run", text, why)
        if text and not text.startswith("#"):
            self.shell(text, line)

    def shell(self, text: str, line: int) -> None:
        runs = sorted(self.clone.glob("runs/**/config.json"), key=lambda file: file.stat().st_mtime)
        command = text.replace("runs/NAME", str(runs[-1].parent.relative_to(self.clone)) if runs else "runs/NAME")
        began, serves = time.monotonic(), re.search(SERVES, text)
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self.clone, env=self.environment, text=True, start_new_session=True,
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
            return self.report(line, "FAILED", text, f"exit code {process.returncode}: {(err or out)[-600:]}")
        self.report(line, "ran", text, f"{time.monotonic() - began:.0f} s")

    def python_block(self, block: Block) -> None:
        what = block.file or block.code.strip().splitlines()[0]
        missing = unknown([*self.python, block])
        if missing and not block.file:
            return self.report(block.line, "not run", what, f"a part of a script; it has no {', '.join(missing)}")
        self.python.append(block)
        # A process of its own, as the environment is: it follows the page's Python from the beginning.
        lines = ",".join(str(known.line) for known in self.python)
        command = [".venv/bin/python", str(Path(__file__)), "--python", self.page, lines]
        run = subprocess.run(command, cwd=self.clone, env=self.environment, capture_output=True, text=True)
        self.printed = run.stdout
        self.report(
            block.line, "FAILED" if run.returncode else "ran", what, run.stderr[-600:] if run.returncode else ""
        )

    def compare(self, block: Block) -> None:
        lines = [line for line in block.code.splitlines() if line.strip()]
        printed = iter(self.printed.splitlines())
        for number, line in enumerate(lines):
            before, printed = itertools.tee(printed)
            if not any(alike(line, other, self.page in WORDS_ALONE) for other in printed):
                close = [other for other in before if other.split()[:1] == line.split()[:1]]
                found = f"; printed {close[0].strip()!r}" if close else ""
                self.report(block.line + number, "DIFFERS", repr(line.strip()), f"is not printed{found}")
                printed = iter(self.printed.splitlines())
        self.report(block.line, "compared", f"{len(lines)} lines")


def rows_not_printed(page: str, printed: str) -> list[str]:
    """The rows of the demo's table on a page whose numbers do not begin the printed row of that name."""
    rows = {
        name: [line for line in printed.splitlines() if re.match(rf" *{re.escape(name)} {{2,}}\d", line)]
        for name in ("dense", "4-bit", "sparse", "sparse + 4-bit")
    }
    missing = []
    for name, lines in rows.items():
        for row in re.findall(rf"^\| {re.escape(name)} \|.*\|$", page, re.MULTILINE):
            shown = NUMBER.findall(row.partition(name)[2])
            if not any(NUMBER.findall(line.partition(name)[2])[: len(shown)] == shown for line in lines):
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
    lines = code.splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    text = "\n".join(line[indent:] for line in lines)
    try:
        ast.parse(text)
    except SyntaxError:
        return "a_part_of_a_call"
    return text


def run_python(page: str, lines: set[int]) -> None:
    """Run these blocks of Python of a page in this process; its files are saved in the current folder, the clone."""
    sys.path.insert(0, os.getcwd())
    following = Following(Path(page), Path.cwd())
    for block in blocks(Path(page)):
        if block.line in lines:
            following.run(block)


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
