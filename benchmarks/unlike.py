"""How far workers drift apart that average the same, on processors with and without AVX.

    python benchmarks/unlike.py [--steps N] [--alike] [--only TEXT]

Three processes train a network for the digits over connections of their own; the last one computes without AVX, as an
old processor does. Prints, per method and type of the parameters, the distance |x_0 - x_2| / |x_0| of the parameters of
the first and the last worker after 100 steps, 1,000, and so on, and the test accuracy of each: a table for docs/anywhere.md.
Parameters are those after the last round: between the rounds of local updates each worker has its own. With --alike all
processes compute in the same way, and all distances must be zero.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from script import run_script
from studies import digit_accuracy, digit_batches, loss_of
from tables import table_head, table_row
from torch import nn

import thinwire as tw
from thinwire.lab.train.models import DigitsNet

# For PyTorch, its libraries, NumPy and the C library.
WITHOUT_AVX = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-AVX512F",
}
WORKERS = 3  # with two, the weight of 1/2 would be exact
BATCH_SIZE, SEED = 16, 0
METHODS = (
    ("Gradients(Mean())", "SGD", "float32"),
    ("Gradients(Mean(TopK(0.01), ErrorFeedback()))", "SGD", "float32"),
    ("Gradients(PowerSGD(rank=8))", "SGD", "float32"),
    ("Gradients(Mean())", "AdamW", "float32"),
    ("Gradients(Mean(QSGD(bits=4)))", "AdamW", "float32"),
    ("Local(Mean(QSGD(bits=4)), every=10, outer=OuterSGD(0.7))", "AdamW", "float32"),
    ("Local(PowerSGD(rank=8), every=10, outer=OuterSGD(0.7))", "AdamW", "float32"),
    ("Gradients(Mean())", "SGD", "bfloat16"),
    ("Gradients(Mean())", "AdamW", "bfloat16"),
    ("Gradients(Mean(QSGD(bits=4)))", "AdamW", "bfloat16"),
    ("Local(Mean(QSGD(bits=4)), every=10, outer=OuterSGD(0.7))", "AdamW", "bfloat16"),
)


def measured_at(steps: int) -> list[int]:
    """100, 1,000 and so on, and the last step."""
    return [*(10**i for i in range(2, 10) if 10**i < steps), steps]


def work(rank: str, folder: str, steps: str, strategy: str, optimizer: str, dtype: str) -> None:
    """One worker; the first one writes the distances and accuracies into the folder."""
    torch.set_num_threads(1)
    meeting, limit = f"file://{folder}/group", timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=meeting, timeout=limit, rank=int(rank), world_size=WORKERS)
    torch.manual_seed(SEED)
    model = DigitsNet(width=16).build().to(getattr(torch, dtype))
    settings = {"SGD": {"lr": 0.02, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}[optimizer]
    made = getattr(torch.optim, optimizer)(model.parameters(), **settings)
    tw.attach(model, made, strategy, seed=SEED)
    distances = list[float]()
    batches = digit_batches(int(rank), WORKERS, SEED, epochs=int(steps), batch_size=BATCH_SIZE)
    for step, ((images,), labels) in enumerate(islice(batches, int(steps)), 1):
        made.zero_grad()
        loss_of(model, (images.to(getattr(torch, dtype)),), labels).backward()
        made.step()
        if step in measured_at(int(steps)):
            first, last = gathered(nn.utils.parameters_to_vector(model.parameters()).detach().double())
            distances.append(((first - last).norm() / first.norm()).item())
    accuracies = [x.item() for x in gathered(torch.tensor(digit_accuracy(model.float())))]
    if rank == "0":
        Path(folder, "result.json").write_text(json.dumps([distances, accuracies]))


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """Those of the first and the last worker."""
    all_of_them = [torch.empty_like(x) for _ in range(WORKERS)]
    dist.all_gather(all_of_them, x)
    return [all_of_them[0], all_of_them[-1]]


def measure(steps: int, alike: bool, method: tuple[str, str, str]) -> tuple[list[float], list[float]]:
    """The distances, and the accuracies of the first and the last worker in per cent."""
    with TemporaryDirectory() as folder:
        processes = []
        for rank in range(WORKERS):
            variables = WITHOUT_AVX if rank == WORKERS - 1 and not alike else {}
            command = [sys.executable, __file__, "work", str(rank), folder, str(steps), *method]
            processes.append(subprocess.Popen(command, env=os.environ | variables))
        if any([process.wait() for process in processes]):
            sys.exit(1)  # it has said why
        return tuple(json.loads(Path(folder, "result.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--alike", action="store_true", help="all processes compute in the same way")
    parser.add_argument("--only", default="", metavar="TEXT", help="methods that contain it")
    options = parser.parse_args()
    chosen = [method for method in METHODS if options.only in method[0]]
    if not chosen:
        raise ValueError(f"no method contains {options.only!r}")
    if options.steps < 1:
        raise ValueError("--steps must be 1 or more")
    names = [f"{step:,} steps" for step in measured_at(options.steps)]
    print("\n".join(table_head(["method", "optimizer", "parameters", *names, "test accuracy"])), flush=True)
    for method in chosen:
        distances, accuracies = measure(options.steps, options.alike, method)
        strategy, *others = method
        ends = [*(f"{x:.1g}" for x in distances), ", ".join(f"{x:.2f} %" for x in accuracies)]
        print(table_row([f"`{strategy}`", *others, *ends]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(*sys.argv[2:])
    else:
        run_script(main)
