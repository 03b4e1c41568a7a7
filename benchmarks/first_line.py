"""Does the first line disappoint? The default and the lines of the README beside dense training, on six small tasks.

    python benchmarks/first_line.py run     train what is missing, and append a line of JSON for each run
    python benchmarks/first_line.py table   print the tables of docs/first-lines.md, and write them there

Four workers, threads of one process, train an MLP, a network of convolutions and a residual network on handwritten digits,
and a GPT, an LSTM and the LoRA factors of a frozen GPT on the bytes of Python's own library, by SGD with momentum, AdamW and
Muon, for 100 and for 500 steps. Digits are measured by test accuracy, text by test loss. Bytes are the ledger's.
A run that is in the results is not repeated, so that the command can be stopped and started again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from script import run_script
from studies import Batch, digit_accuracy, digits, loss_of, once, some, trained
from tables import DOCS, publish, spread, table_head, table_row
from torch import Tensor, nn

import thinwire as tw
from thinwire.lab.train.models import GPT, DigitsNet, LSTMLanguageModel
from thinwire.lab.train.optimize import SGD, Adam, LearningRateSchedule, Muon, Optimizer
from thinwire.strategy.gradients.gradients import default_averager

WORKERS, CONTEXT = 4, 64
LENGTHS, SEEDS = (100, 500), (0, 1, 2)
SCHEDULE = LearningRateSchedule(warmup_fraction=0.1)
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": SGD(0.05, weight_decay=0.0, nesterov=False, schedule=SCHEDULE),
    "AdamW": Adam(2e-3, beta2=0.99, eps=1e-8, schedule=SCHEDULE),
    "Muon": Muon(5e-3, scale="rms", schedule=SCHEDULE),
}
DEFAULT = "default"
LINES = {
    "dense": "Gradients(Mean())",
    DEFAULT: "what the library chooses for the optimizer",
    "sparse": "Gradients(sparse())",
    "sparse, no warm-up": "Gradients(sparse(warmup_steps=0))",
    "4 bits every 4 steps": "Local(Mean(QSGD(bits=4), exchange='scatter_reduce'), every=4)",
}
MUON_LINES = {
    "dense": LINES["dense"],
    "8 bits": "Gradients(Mean(QSGD(bits=8), exchange='scatter_reduce'))",
    "6 bits": "Gradients(Mean(QSGD(bits=6), exchange='scatter_reduce'))",
    "4 bits, memory": "Gradients(Mean(QSGD(bits=4), ErrorFeedback()))",
    "4 bits": "Gradients(Mean(QSGD(bits=4)))",
}
"""What was tried for Muon; not part of a plain `run`."""


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        build: the model with its first weights, from PyTorch's global generator.
        batches: an endless stream of one worker's batches, by seed and rank.
        measure: a number of the trained model; higher is better for an accuracy, lower for a loss.
        rates: learning rates of optimizers where they differ from `OPTIMIZERS`, chosen on dense runs.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]
    measure: Callable[[nn.Module], float]
    rates: dict[str, float]

    @property
    def is_loss(self) -> bool:
        return self.measure is text_loss


# ---- digits ----


def digit_batches(seed: int, rank: int) -> Iterator[Batch]:
    """Batches of 16 from this worker's share, in a new order each epoch."""
    images, labels = digits()[0]
    share = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[rank::WORKERS]
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        for chosen in share[torch.randperm(len(share), generator=generator)].split(16)[:-1]:
            yield (images[chosen],), labels[chosen]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


class Block(nn.Module):
    """Two convolutions with batch normalisation, beside the identity."""

    def __init__(self, width: int):
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.layers = nn.Sequential(*layers, nn.ReLU(), *copy.deepcopy(layers))
        nn.init.kaiming_normal_(self.layers[3].weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


def residual() -> nn.Module:
    stem = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(
        *stem, Block(32), nn.MaxPool2d(2), Block(32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


# ---- text ----


@cache
def text() -> tuple[Tensor, Tensor]:
    """Bytes of Python's own library: 600 KB to learn from, and 64 KB of other files for the test."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = []
    for chosen, size in ((files[::2], 600_000), (files[1::2], 64_000)):
        parts.append(torch.tensor(list(b"".join(f.read_bytes() for f in chosen)[:size]), dtype=torch.int64))
    return parts[0], parts[1]


def text_batches(seed: int, rank: int) -> Iterator[Batch]:
    """Four windows from random places of this worker's quarter of the text."""
    mine = text()[0].tensor_split(WORKERS)[rank]
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        places = torch.randint(len(mine) - CONTEXT - 1, (4,), generator=generator)
        windows = torch.stack([mine[i : i + CONTEXT + 1] for i in places.tolist()])
        yield (windows[:, :-1],), windows[:, 1:]


@torch.no_grad()
def text_loss(model: nn.Module) -> float:
    """Mean cross-entropy of the test text, in nats a byte."""
    windows = text()[1].unfold(0, CONTEXT + 1, CONTEXT)[::4]
    return loss_of(model, (windows[:, :-1],), windows[:, 1:]).item()  # nothing in these models drops out


GPT_SIZE = GPT(layers=2, width=64, heads=4, context=CONTEXT, dropout=0.0)


class LoRA(nn.Module):
    """A frozen linear layer and a trained change of rank 8, `W x + B A x`."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(8, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


@cache
def base() -> nn.Module:
    """A GPT that has learned the C++ headers of PyTorch for 300 steps, alone."""
    folder = Path(torch.__file__).parent / "include"
    header = torch.tensor(list(b"".join(f.read_bytes() for f in sorted(folder.rglob("*.h"))[:200])), dtype=torch.int64)
    torch.manual_seed(7)
    model = GPT_SIZE.build(256)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(300):
        windows = torch.stack(
            [header[i : i + CONTEXT + 1] for i in torch.randint(len(header) - CONTEXT - 1, (16,)).tolist()]
        )
        optimizer.zero_grad()
        loss_of(model, (windows[:, :-1],), windows[:, 1:]).backward()
        optimizer.step()
    return model


def lora() -> nn.Module:
    model = copy.deepcopy(base()).requires_grad_(False)
    for layer in model.layers.layers:
        layer.linear1, layer.linear2 = LoRA(layer.linear1), LoRA(layer.linear2)
    return model


TASKS = {
    "MLP": Task(mlp, digit_batches, digit_accuracy, {}),
    "CNN": Task(DigitsNet(24).build, digit_batches, digit_accuracy, {}),
    "residual network": Task(residual, digit_batches, digit_accuracy, {}),
    "GPT": Task(lambda: GPT_SIZE.build(256), text_batches, text_loss, {"SGD": 0.1}),
    "LSTM": Task(
        lambda: LSTMLanguageModel(128, 1, 0.0).build(256), text_batches, text_loss, {"SGD": 2.0, "AdamW": 5e-3}
    ),
    "LoRA": Task(lora, text_batches, text_loss, {"SGD": 0.2, "AdamW": 5e-3}),
}


# ---- runs ----


@cache
def strategy_of(label: str, optimizer: str) -> str:
    """The notation of a line; the default's depends on the optimizer."""
    if label == DEFAULT:
        return repr(tw.Gradients(default_averager(OPTIMIZERS[optimizer].build(nn.Linear(2, 2)))))
    return repr(tw.parse((LINES | MUON_LINES)[label]))


def run(options: argparse.Namespace) -> None:
    """Train every combination that the results lack."""
    torch.set_num_threads(1)
    for seed, steps, name, optimizer, label in itertools.product(
        options.seeds, options.steps, options.tasks, options.optimizers, options.lines
    ):
        strategy = strategy_of(label, optimizer)
        key = {"task": name, "optimizer": optimizer, "steps": steps, "seed": seed, "strategy": strategy}
        once(options.results, key, partial(measured, TASKS[name], optimizer, steps, strategy, seed))


def measured(task: Task, optimizer: str, steps: int, strategy: str, seed: int) -> dict[str, float]:
    """One run: its measure and the bytes that a worker sent."""
    torch.manual_seed(seed)
    initial = task.build()
    settings = OPTIMIZERS[optimizer]
    settings = replace(settings, learning_rate=task.rates.get(optimizer, settings.learning_rate))
    world = tw.LocalWorld(WORKERS, timeout_seconds=3600)
    value, ledger = world.run(train, task, settings, steps, strategy, seed, initial)[0]
    return {"value": round(value, 4), "bytes_sent": ledger.bytes_sent}


def train(
    comm: tw.comm.Communicator,
    task: Task,
    settings: Optimizer,
    steps: int,
    strategy: str,
    seed: int,
    initial: nn.Module,
) -> tuple[float, tw.comm.Ledger]:
    """One worker of one run from the `initial` weights."""
    batches = list(itertools.islice(task.batches(seed, comm.rank), steps))
    model, ledger = trained(comm, initial, settings, strategy, seed, batches, clip_norm=1.0)
    return task.measure(model), ledger


# ---- tables ----


def table(options: argparse.Namespace) -> None:
    """A table for each length, into the page."""
    rows = some(options.results)
    parts = {f"{steps} steps": (steps, list(OPTIMIZERS), list(LINES)) for steps in LENGTHS}
    parts["Muon"] = (LENGTHS[-1], ["Muon"], list(MUON_LINES))
    for part, (steps, optimizers, labels) in parts.items():
        lines = lines_of([row for row in rows if row["steps"] == steps], optimizers, labels)
        publish(options.page, part, lines)


def lines_of(rows: list[dict[str, Any]], optimizers: list[str], labels: list[str]) -> list[str]:
    """Markdown: how far each line is from dense, the first of them, and how many times fewer bytes it sent."""
    lines = table_head(["task", "optimizer", *labels])
    for name, task in TASKS.items():
        for optimizer in optimizers:
            ours = [r for r in rows if (r["task"], r["optimizer"]) == (name, optimizer)]
            dense, *others = (
                {r["seed"]: r for r in ours if r["strategy"] == strategy_of(label, optimizer)} for label in labels
            )
            if dense:
                cells = [dense_cell(task, list(dense.values())), *(cell(task, runs, dense) for runs in others)]
                lines.append(table_row([name, optimizer, *cells]))
    return lines


def dense_cell(task: Task, runs: list[dict[str, Any]]) -> str:
    """The measure of dense training, with its standard deviation over seeds."""
    values = [row["value"] for row in runs]
    return f"{spread(values, '.3f', '.2g')} nats" if task.is_loss else f"{spread(values, '.1f', '.2g')} %"


def cell(task: Task, runs: dict[int, dict[str, Any]], dense: dict[int, dict[str, Any]]) -> str:
    """How far a line is from dense training with the same seeds, and how many times fewer bytes it sent."""
    seeds = runs.keys() & dense.keys()
    if not seeds:
        return ""
    ours, theirs = ([rows[seed] for seed in seeds] for rows in (runs, dense))
    times = mean(row["bytes_sent"] for row in theirs) / mean(row["bytes_sent"] for row in ours)
    value, reference = (mean(row["value"] for row in rows) for rows in (ours, theirs))
    away = f"{value / reference - 1:+.1%}" if task.is_loss else f"{value - reference:+.1f} points"
    return f"{away}, {times:.1f} times fewer" + f" ({len(seeds)} seeds)" * (len(seeds) > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    train_command = commands.add_parser("run")
    train_command.set_defaults(command=run)
    for name, known in (
        ("tasks", TASKS),
        ("optimizers", OPTIMIZERS),
        ("lines", LINES),
        ("steps", LENGTHS),
        ("seeds", SEEDS),
    ):
        values, allowed = list(known), [*known, *(MUON_LINES if known is LINES else ())]
        train_command.add_argument(f"--{name}", nargs="+", type=type(values[0]), choices=allowed, default=values)
    write = commands.add_parser("table")
    write.set_defaults(command=table)
    write.add_argument("--page", type=Path, default=DOCS / "first-lines.md")
    for command in (train_command, write):
        command.add_argument("--results", type=Path, default=Path("runs/first-line.jsonl"))
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    run_script(main)
