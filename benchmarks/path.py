"""The walk of one gradient step: which files of the library it enters before the wire, with how many calls.

    python benchmarks/path.py ["Mean(chain(TopK(0.01), QSGD(bits=4)), ErrorFeedback())"]

One call of `step` on three tensors of a worker of two, from its first line until the communicator is asked to send. What
PyTorch does does not count. This script prints the numbers in docs/path.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from script import run_script

import thinwire as tw
from thinwire.average import Averager
from thinwire.comm import Communicator
from thinwire.lab.bench.rows import as_parsed

ROOT = Path(tw.codec.__file__).parents[1]
AVERAGER = "Mean(chain(TopK(0.01), QSGD(bits=4)), ErrorFeedback())"
SENDING = {"all_reduce", "all_gather", "all_to_all", "exchange"}
SHAPES = ((300, 100), (100,), (100, 10))


def walk(comm: Communicator, text: str) -> tuple[list[str], int, int]:
    """The files in order of entry, the number of calls, and how often a call or return changed the file."""
    averager = tw.parse(text)
    tensors = [(str(i), torch.randn(shape)) for i, shape in enumerate(SHAPES)]
    state = averager.init(tensors, comm)
    averager.step(state, tensors, comm).wait()  # caches are filled
    averager.commit(state)
    files: list[str] = []
    calls, changes, at_wire = 0, 0, False

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, changes, at_wire
        path = Path(frame.f_code.co_filename)
        if at_wire or ROOT not in path.parents:
            return
        name = path.relative_to(ROOT).as_posix()
        if name == "comm/base.py" and frame.f_code.co_name in SENDING:
            at_wire = True
        elif event == "call":
            calls += 1
            caller = frame.f_back.f_code.co_filename if frame.f_back else ""
            changes += caller != frame.f_code.co_filename
            if name not in files:
                files.append(name)

    sys.setprofile(look)
    try:
        handle = averager.step(state, tensors, comm)
    finally:
        sys.setprofile(None)
    handle.wait()
    return files, calls, changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("averager", nargs="?", default=AVERAGER, help="in notation")
    text = parser.parse_args().averager
    files, calls, changes = tw.LocalWorld(2).run(walk, repr(as_parsed(text, Averager)))[0]
    print(f"{text}: {len(files)} files, {calls} calls, {changes} of them into another file")
    print("\n".join(files))


if __name__ == "__main__":
    run_script(main)
