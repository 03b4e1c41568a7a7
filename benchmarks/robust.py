"""Two of eight workers attack: the test accuracy that each rule reaches, on handwritten digits or with a small GPT.

    python benchmarks/robust.py [CODEC ...]     such as "QSGD(bits=4)" "TopK(0.1)"
    python benchmarks/robust.py --task gpt "Identity()" --attacks "SignFlip(scale=10.0)" "ALIE()" --rules mean Multi-Krum

Digits: each worker has an eighth of the examples, and all take 150 steps of gradient descent. GPT: a Transformer of one layer
on the bytes of Python sources, which takes 80 steps of Adam; accuracy is that of the next byte, and of a model that always says
"space" it is 29.3 %. Momentum is kept on each worker, as centered clipping wants.
One table for each codec, in which the best rule of each attack is bold; biased codecs have error feedback.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from internet import GPT, Text, windows
from script import run_script
from sklearn.datasets import load_digits
from tables import table_head, table_row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.average import Bucketing, CenteredClipping, GeometricMedian, Krum, Median, MedianNorm, TrimmedMean
from thinwire.codec import Codec
from thinwire.lab.bench.rows import as_parsed
from thinwire.testing.attacks import ATTACKS, Attack, Attacker

SIZE, FAULTY, MOMENTUM = 8, (1, 6), 0.9
RULES = {
    "mean": None,
    "median norm": MedianNorm(),
    "centered clipping": CenteredClipping(tau=1.0),
    "median": Median(),
    "trimmed mean": TrimmedMean(faulty=2),
    "geometric median": GeometricMedian(),
    "Multi-Krum": Krum(faulty=2, selected=4),
    "median of pairs": Bucketing(Median()),
}

Examples = tuple[Tensor, Tensor]
"""Inputs (N, ...), and labels for the model's scores."""


@dataclass(frozen=True)
class Task:
    """What workers train.

    Attributes:
        model: makes it.
        batch: the examples of a worker in a step, by step, rank and number of workers.
        test: the test examples.
        optimizer: makes it.
        rate: the learning rate, by the share of the steps that are done.
        num_classes: of the labels.
        steps: that all take.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Examples]
    test: Callable[[], Examples]
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: Callable[[float], float]
    num_classes: int
    steps: int


@cache
def digits() -> Examples:
    """The digits, shuffled: features (N, 64) and labels (N)."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]


@cache
def text() -> Text:
    return Text.read(200, torch.device("cpu"))


def digits_of(step: int, rank: int, size: int) -> Examples:
    images, labels = digits()
    return images[400 + rank :: size], labels[400 + rank :: size]


def bytes_of(step: int, rank: int, size: int) -> Examples:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = windows(text().learn, torch.randint(len(text().learn) - CONTEXT, (8,), generator=generator), CONTEXT)
    return rows[:, :-1], rows[:, 1:]


def tested_bytes() -> Examples:
    rows = windows(text().test, torch.linspace(0, len(text().test) - CONTEXT - 1, 256).long(), CONTEXT)
    return rows[:, :-1], rows[:, 1:]


def gpt() -> GPT:
    """With larger embeddings than usual, so that it learns within few steps."""
    model = GPT(layers=1, width=32, context=CONTEXT)
    with torch.no_grad():
        model.token.weight.mul_(5)
        model.position.weight.mul_(5)
    return model


CONTEXT = 16
TASKS = {
    "digits": Task(
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        digits_of,
        lambda: (digits()[0][:400], digits()[1][:400]),
        torch.optim.SGD,
        rate=lambda done: 0.1,
        num_classes=10,
        steps=150,
    ),
    "gpt": Task(
        gpt,
        bytes_of,
        tested_bytes,
        partial(torch.optim.Adam, betas=(0.0, 0.99)),
        rate=lambda done: 0.006 * (1 - done),
        num_classes=256,
        steps=80,
    ),
}


def accuracy(task: Task, averager: tw.Mean, attack: Attack | None) -> float:
    """The test accuracy in percent; chance where the model is not finite."""
    size = SIZE if attack is not None else SIZE - len(FAULTY)
    torch.manual_seed(0)
    initial = task.model()
    test = task.test()  # reads the data, once for all threads

    def worker(comm: tw.comm.Communicator) -> float:
        attacker = None if attack is None else Attacker(attack, FAULTY)
        model = copy.deepcopy(initial)
        parameters = list(model.named_parameters())
        momenta = [(name, torch.zeros_like(p)) for name, p in parameters]
        sent = [(name, torch.zeros_like(p)) for name, p in parameters]
        for (_, p), (_, s) in zip(parameters, sent, strict=True):
            p.grad = s
        optimizer = task.optimizer(model.parameters())
        state = averager.init(sent, comm)
        for step in range(task.steps):
            x, y = task.batch(step, comm.rank, size)
            if attack is not None and comm.rank in FAULTY:
                y = attack.labels(y, task.num_classes)
            loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
            gradients = torch.autograd.grad(loss, [p for _, p in parameters])
            for (_, m), (_, s), g in zip(momenta, sent, gradients, strict=True):
                s.copy_(m.mul_(MOMENTUM).add_(g))
            if attacker is not None:
                attacker.corrupt(sent, comm)
            averager.step(state, sent, comm).wait()
            optimizer.param_groups[0]["lr"] = task.rate(step / task.steps)
            # Nothing is committed where values are not finite.
            if averager.commit(state):
                optimizer.step()
        x, y = test
        with torch.no_grad():
            return 100 * (model(x).argmax(-1) == y).float().mean().item()

    return tw.LocalWorld(size, timeout_seconds=600.0).run(worker)[0]  # a busy machine may stop threads for long


def table(task: Task, codec: str, attacks: list[str], rules: list[str]) -> None:
    """Print attacks by rules for one codec."""
    parsed = tw.parse(codec)
    memory = None if parsed.traits.unbiased or parsed.traits.lossless else tw.ErrorFeedback()
    averagers = {}
    for name in rules:
        try:
            averagers[name] = tw.Mean(parsed, memory, rule=RULES[name])
        except ValueError:  # the rule does not suit this codec
            continue
    clean = accuracy(task, tw.Mean(parsed, memory), None)
    print(f"\n{codec}: {clean:.1f} % without attackers, by the mean\n")
    print(*table_head(["attack", *averagers]), sep="\n", flush=True)
    for attack in ATTACKS:
        if repr(attack) not in attacks:
            continue
        row = [f"{accuracy(task, averager, attack):.1f}" for averager in averagers.values()]
        best = max(row, key=float)
        print(table_row([f"`{attack}`", *(f"**{x}**" if x == best else x for x in row)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="*", default=["Identity()"], metavar="CODEC")
    parser.add_argument("--task", choices=TASKS, default="digits")
    attacks = list(map(repr, ATTACKS))
    parser.add_argument("--attacks", nargs="+", default=attacks, choices=attacks, metavar="ATTACK", help="these alone")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES, metavar="RULE", help="these alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for codec in options.codecs:  # a wrong one is found before the first table
        as_parsed(codec, Codec)
    for codec in options.codecs:
        table(TASKS[options.task], codec, options.attacks, options.rules)


if __name__ == "__main__":
    run_script(main)
