"""The adapters for trainers, with the real packages: the examples run, and resume to the same bits as a run without a stop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.command import with_forked_programs

ROOT = Path(__file__).parents[2]
TRAINERS = ROOT / "examples" / "trainers"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: list[str], *options: object) -> str:
    """What the command prints; it must succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, *map(str, options)], capture_output=True, text=True, timeout=240, env=environment, cwd=TRAINERS
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def times_fewer(printed: str) -> float:
    found = re.search(r"([\d.]+) times fewer bytes", printed)
    assert found is not None, printed
    return float(found[1])


def weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    saved = torch.load(path, weights_only=False)
    return saved.get("state_dict", saved)


def assert_equal(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first), (a, b)


def lightning_resumes(folder: Path) -> None:
    example = [sys.executable, str(TRAINERS / "lightning_digits.py")]
    assert times_fewer(run(example, "--epochs", 2, "--output", folder / "whole")) > 15
    run(example, "--epochs", 1, "--output", folder / "first")
    (first,) = (folder / "first").rglob("*.ckpt")
    saved = torch.load(first, weights_only=False)["thinwire"]
    assert saved.keys() == {"rank0", "rank1"}
    run(example, "--epochs", 2, "--output", folder / "second", "--resume", first)
    (whole,), (second,) = (folder / "whole").rglob("*.ckpt"), (folder / "second").rglob("*.ckpt")
    assert_equal(whole, second)


def accelerate_resumes(folder: Path) -> None:
    example = [*TORCHRUN, str(TRAINERS / "accelerate_digits.py")]
    assert times_fewer(run(example, "--epochs", 1, "--output", folder / "first")) > 15
    saved = torch.load(folder / "first" / "custom_checkpoint_0.pkl", weights_only=False)
    assert saved.keys() == {"rank0", "rank1"}
    run(example, "--epochs", 1, "--output", folder / "second", "--resume", folder / "first")
    again = torch.load(folder / "second" / "custom_checkpoint_0.pkl", weights_only=False)
    # The second run went on from the first one's state, on the worker that wrote no file too.
    assert again["rank1"]["step"] == 2 * saved["rank1"]["step"] > 0


def transformers_resumes(folder: Path) -> None:
    example = [*TORCHRUN, str(TRAINERS / "transformers_gpt.py")]
    assert times_fewer(run(example, "--steps", 40, "--output", folder)) > 5
    whole = folder / "checkpoint-40"
    assert {f.name for f in whole.glob("thinwire-*")} == {"thinwire-rank0.pt", "thinwire-rank1.pt"}
    whole.rename(folder / "whole")
    run(example, "--steps", 40, "--output", folder, "--resume", folder / "checkpoint-20")
    assert_equal(folder / "whole" / "model.safetensors", folder / "checkpoint-40" / "model.safetensors")


# The programs of a trainer are forked from a process that has imported it, which takes longer than they do.


def test_lightning(tmp_path):
    with_forked_programs(["lightning.pytorch", "sklearn.datasets"], lightning_resumes, tmp_path)


def test_accelerate(tmp_path):
    with_forked_programs(["accelerate", "sklearn.datasets", "torch.distributed.run"], accelerate_resumes, tmp_path)


def test_transformers(tmp_path):
    modules = ["transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "torch.distributed.run"]
    with_forked_programs(modules, transformers_resumes, tmp_path)


@pytest.mark.parametrize(
    "fence", re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/trainers.md").read_text(), re.S)
)
def test_the_guide_shows_what_the_examples_run(fence: str):
    examples = [path.read_text() for path in TRAINERS.glob("*.py")]
    for part in fence.strip("\n").split("\n...\n"):
        assert any(part in example for example in examples), part
