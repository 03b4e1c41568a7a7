"""Train recipes several times under load, and check that every run gives the same bits.

    python benchmarks/determinism.py RECIPE... [--repeats N] [--no-load] [--output FOLDER] [-- OPTIONS of thinwire train]

Each recipe is trained N times with the same options and seed. While it trains, processes keep every core busy and write to
large blocks of memory (unless --no-load); the first run of each recipe has no such load. All runs must have the same rows of
metrics, but for times, the same checkpoints with model, optimizer and averager, and no row without a finite loss. The exit
code is 1 where two runs differ. Example, on a folder of images with the parts train/ and test/:

    python benchmarks/determinism.py imagenet-resnet18-{alq-dense,alq,alq-n,amq,amq-n}-small -- \\
        --data.folder FOLDER --data.test test

`adpsgd` recipes (the averager `Pairwise`) differ from run to run by nature: which neighbour answers first decides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from script import run_script

TIMES = ("seconds", "_per_second")
"""Endings of the names of what depends on the clock."""
BLOCKS = (4_000, 60_000, 300_000, 1_000_000)
"""Floats in the blocks of memory that are written and freed."""
BURN = """
while True:
    block = bytearray(b"\\x7b" * 8_000_000)
    sum(block[:2_000_000])
"""
"""What a process of the background load runs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-load", action="store_true", help="run without background load")
    parser.add_argument("--output", type=Path, default=Path("runs/determinism"))
    own, passed_on = _split(sys.argv[1:])
    options = parser.parse_args(own)
    if options.repeats < 2:
        parser.error("give --repeats 2 or more: runs are compared with the first one")
    failed = []
    for recipe in options.recipes:
        folders = []
        for i in range(options.repeats):
            loaded = i > 0 and not options.no_load
            with background_load() if loaded else nullcontext():
                # The first run, without load, is what the others are compared with.
                folders.append(_train(recipe, options.output, f"{recipe}-{i}", passed_on))
        differs = [*unfinite(folders[0]), *(text for folder in folders[1:] for text in differences(folders[0], folder))]
        print(f"{recipe}: {_in_words(folders[0], options.repeats, differs)}", flush=True)
        failed += [recipe] if differs else []
    return 1 if failed else 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first `--`."""
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def _train(recipe: str, output: Path, name: str, options: list[str]) -> Path:
    run = "import sys; from thinwire.lab.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "train", recipe, "--output", str(output), "--name", name]
    command += ["--overwrite", "--log-every", "1", *options]
    began = time.monotonic()
    if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:  # it has said why
        sys.exit(code)
    print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
    return output / name


def _in_words(folder: Path, repeats: int, differs: list[str]) -> str:
    rows = read_rows(folder)
    if differs:
        return f"DIFFERS in {len(differs)} places: " + "; ".join(differs[:5])
    return f"{repeats} runs of {rows[-1]['step']} steps are equal, last loss {rows[-1]['loss']:.4f}"


# ---- load ----


@contextmanager
def background_load(num_processes: int | None = None) -> Iterator[None]:
    """Context in which processes, one a core by default, compute without a pause and write to blocks of memory."""
    count = num_processes or os.cpu_count() or 1
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def dirty_memory() -> Iterator[None]:
    """Context in which a thread of this process frees blocks full of 7e18, so that unwritten memory shows."""
    done = threading.Event()

    def spoil() -> None:
        while not done.wait(0.001):
            blocks = [torch.full((size,), 7e18) for size in BLOCKS]
            del blocks

    thread = threading.Thread(target=spoil, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# ---- comparison ----


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """A run's rows of metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def unfinite(folder: Path) -> list[str]:
    """The rows of a run whose loss is not finite, in words; such a loss is written as null."""
    return [f"no finite loss at step {row['step']}" for row in read_rows(folder) if row["loss"] is None]


def differences(first: Path, second: Path) -> list[str]:
    """Where two runs differ, in words: rows of metrics without times, then all files of all checkpoints, bit by bit."""
    found = _differences("metrics", read_rows(first), read_rows(second))
    files = [sorted(p.relative_to(run) for p in run.glob("checkpoints/step-*/*.pt")) for run in (first, second)]
    if files[0] != files[1] or not files[0]:
        return [*found, f"checkpoints: {files[0]} and {files[1]}"]
    for path in files[0]:
        states = (torch.load(run / path, weights_only=True, map_location="cpu") for run in (first, second))
        found += _differences(str(path), *states)
    return found


def _differences(place: str, a: Any, b: Any) -> list[str]:
    if type(a) is not type(b):
        return [f"{place}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{place}: keys {list(a)} and {list(b)}"]
        return [
            text for key in a if not str(key).endswith(TIMES) for text in _differences(f"{place}.{key}", a[key], b[key])
        ]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{place}: {len(a)} and {len(b)} items"]
        return [text for i, pair in enumerate(zip(a, b, strict=True)) for text in _differences(f"{place}.{i}", *pair)]
    same = _same_bits(a, b) if isinstance(a, torch.Tensor) else a == b or (a != a and b != b)
    return [] if same else [f"{place}: {_short(a)} and {_short(b)}"]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal as bytes, so that NaN equals NaN and 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))


def _short(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.dtype} with sum {value.double().nan_to_num().sum().item():.17g}"


if __name__ == "__main__":
    run_script(main)
