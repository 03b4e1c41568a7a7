"""Adam and language models: a small GPT under AdamW and under SGD, by every way of sending less.

    python benchmarks/adam.py run DATA     train what is missing, and append a line of JSON for each run
    python benchmarks/adam.py table        print the tables of docs/adam.md, and write them there

DATA is the folder of WikiText-2. The model learns the bytes of `valid.txt` and is tested on 32 KiB of `test.txt`, taken
from 64 places. It is the recipe `text-gpt-dense-small` with two layers, in float32, for 160 steps of four sequences on
each of four workers, which are threads of one process. Bytes are the ledger's. A run that is in the results is not
repeated, so that the command can be stopped and started again; with `--optimizers`, `--seeds` and `--only` several
processes can share the work.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from script import run_script
from studies import loss_of, once, some, trained
from tables import DOCS, publish, spread, table_head, table_row
from torch import nn

import thinwire as tw
from thinwire.lab.recipes.language import GPT_SMALL
from thinwire.lab.train.data import PlainText
from thinwire.lab.train.data.text import Text
from thinwire.lab.train.optimize import DGCSGD, SGD, LearningRateSchedule, Optimizer

WORKERS, STEPS, BATCH_SIZE = 4, 160, 4
TEST_BATCHES = 8
SEEDS, OPTIMIZERS = (0, 1, 2), ("adamw", "sgd")
MODEL = replace(GPT_SMALL.model, layers=2)
SGD_LEARNING_RATE = 0.1
EF, SHARDS = "ErrorFeedback()", "exchange='scatter_reduce'"


METHODS = {
    "dense": "Gradients(Mean())",
    "4 bits": "Gradients(Mean(QSGD(bits=4)))",
    "3 bits, scatter-reduce": f"Gradients(Mean(QSGD(bits=3), {EF}, {SHARDS}))",
    "2 bits, scatter-reduce": f"Gradients(Mean(QSGD(bits=2, bucket_size=128), {EF}, {SHARDS}))",
    "top-k 1 %, 4 bits": f"Gradients(Mean(chain(TopK(0.01), QSGD(bits=4)), {EF}))",
    "top-k 10 %, 4 bits": f"Gradients(Mean(chain(TopK(0.1), QSGD(bits=4)), {EF}))",
    "PowerSGD, rank 4": "Gradients(PowerSGD(rank=4))",
    "4 bits every 4 steps": f"Local(Mean(QSGD(bits=4), {SHARDS}), every=4)",
    "top-k 10 %, 4 bits, every 4 steps": f"Local(Mean(chain(TopK(0.1), QSGD(bits=4)), {EF}), every=4)",
    "DiLoCo, H = 20": "diloco(every=20)",
    "DGC 1 %": "Gradients(dgc(ratio=GeometricWarmup(final=0.01, num=16, unit='step')))",
}
SGD_ALONE = ("DGC 1 %",)  # its momentum takes the place of the optimizer's


def run(options: argparse.Namespace) -> None:
    """Train every combination that the results lack: all methods of the first seed first."""
    torch.set_num_threads(1)
    data = load(options.data)
    for seed in options.seeds:
        for label, strategy in METHODS.items():
            for optimizer in options.optimizers:
                suits = optimizer == "sgd" or label not in SGD_ALONE
                key = {"method": label, "strategy": strategy, "optimizer": optimizer, "seed": seed}
                if suits and any(text in label for text in options.only):
                    once(options.results, key, partial(measure, strategy, optimizer, seed, data))


def measure(strategy: str, optimizer: str, seed: int, data: Text) -> dict[str, float]:
    """One run: the perplexity and the bytes that a worker sent, with the sizes of dense training beside them."""
    world = tw.LocalWorld(WORKERS, timeout_seconds=3600)
    torch.manual_seed(seed)
    initial = MODEL.build(data.num_classes)
    loss, ledger = world.run(train, strategy, settings_of(optimizer, strategy), seed, data, initial)[0]
    return {"perplexity": math.exp(min(loss, 100.0)), "bytes_sent": ledger.bytes_sent}


def settings_of(optimizer: str, strategy: str) -> Optimizer:
    """The recipe's AdamW; SGD with momentum; or SGD without, where the averager applies the momentum."""
    if optimizer == "adamw":
        return GPT_SMALL.optimizer
    schedule = LearningRateSchedule(warmup_fraction=0.1)
    kind = DGCSGD if tw.parse(strategy).averager.traits.has_momentum else SGD
    return kind(SGD_LEARNING_RATE, weight_decay=0.0, momentum=0.9, nesterov=False, schedule=schedule)


def train(
    comm: tw.comm.Communicator, strategy: str, settings: Optimizer, seed: int, data: Text, initial: nn.Module
) -> tuple[float, tw.comm.Ledger]:
    """One worker of one run from the `initial` weights: the test loss in nats a byte, and the ledger."""
    share = torch.randperm(data.num_examples, generator=torch.Generator().manual_seed(seed))[comm.rank :: comm.size]
    places = (torch.arange(STEPS * BATCH_SIZE) % len(share)).split(BATCH_SIZE)
    found = [data.batch(share[chosen], torch.Generator(), epoch=0) for chosen in places]
    batches = [(batch.inputs, batch.labels) for batch in found]
    model, ledger = trained(comm, initial, settings, strategy, seed, batches, GPT_SMALL.clip_norm)
    return test_loss(model, data), ledger


@torch.no_grad()
def test_loss(model: nn.Module, data: Text) -> float:
    """Mean loss on windows from 64 places of the test text."""
    model.eval()
    batches = islice(data.test_batches(0, 1, 64), TEST_BATCHES)
    return mean(loss_of(model, batch.inputs, batch.labels).item() for batch in batches)


def load(folder: Path) -> Text:
    """WikiText-2's valid and test parts, in bytes."""
    files = folder / "valid.txt", folder / "test.txt"
    return PlainText(*files, unit="byte", context=MODEL.context, in_order=False).load()


# ---- tables ----


def table(options: argparse.Namespace) -> None:
    """The two tables, into the page."""
    rows = some(options.results)
    for optimizer in OPTIMIZERS:
        publish(options.page, optimizer, lines_of(optimizer, rows))


def lines_of(optimizer: str, rows: list[dict[str, Any]]) -> list[str]:
    """Markdown, the best perplexity first; `+-` is the standard deviation over seeds."""
    ours = {label: [r for r in rows if r["method"] == label and r["optimizer"] == optimizer] for label in METHODS}
    if not any(ours.values()):
        return ["No run yet."]
    dense = {r["seed"]: r for r in ours["dense"]}
    names = "method, strategy, perplexity, above dense, MB sent by a worker, fewer than fp32, fewer than bf16, seeds"
    by_perplexity = sorted(ours.items(), key=lambda item: mean([r["perplexity"] for r in item[1]] or [math.inf]))
    return [*table_head(names.split(", ")), *(line(label, runs, dense) for label, runs in by_perplexity if runs)]


def line(label: str, runs: list[dict[str, Any]], dense: dict[int, dict[str, Any]]) -> str:
    """One method over its seeds; "above dense" compares runs of the same seed."""
    above = mean(r["perplexity"] / dense[r["seed"]]["perplexity"] - 1 for r in runs)
    sent = mean(r["bytes_sent"] for r in runs)
    full = mean(dense[r["seed"]]["bytes_sent"] for r in runs)
    cells = [label, f"`{METHODS[label]}`", spread(r["perplexity"] for r in runs), f"{above:+.1%}"]
    return table_row([*cells, f"{sent / 1e6:.1f}", f"{full / sent:.1f}", f"{full / sent / 2:.1f}", len(runs)])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("data", type=Path, nargs="?", default=Path("data/wikitext-2"))
    parser.add_argument("--results", type=Path, default=Path("runs/adam/results.jsonl"))
    parser.add_argument("--page", type=Path, default=DOCS / "adam.md")
    parser.add_argument("--optimizers", nargs="*", default=OPTIMIZERS, choices=OPTIMIZERS)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument(
        "--only", nargs="*", default=[""], metavar="TEXT", help="methods whose names contain one of these"
    )
    options = parser.parse_args()
    {"run": run, "table": table}[options.what](options)


if __name__ == "__main__":
    run_script(main)
