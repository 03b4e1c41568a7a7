"""ResNet-20 on CIFAR-10 with seven ways to agree: accuracy against bytes, for docs/cifar10.md.

    python benchmarks/cifar.py FOLDER [--output FOLDER] [--epochs N] [--only TEXT] [--docs FOLDER]

FOLDER is one that CIFAR10 can load. Every run is the recipe cifar10-resnet20-dense-small with another strategy, and nothing
tuned for it. Runs that are finished in the output folder are not repeated, so that an interrupted command goes on where it
was; `--only` trains but the methods whose names contain a text. With --docs, table and figure are written there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from script import existing_folder, run_script
from studies import finished
from tables import publish, table_head, table_row, times

from thinwire.lab.recipes import recipes
from thinwire.lab.recipes.base import momentum_applied_once
from thinwire.lab.report import Run
from thinwire.lab.report.groups import Group
from thinwire.lab.report.line_figures import ALONG_BYTES, lines
from thinwire.lab.report.metrics import metric
from thinwire.lab.report.style import save, styled
from thinwire.lab.train import RunConfig

METHODS = {
    "dense": "Gradients(Mean())",
    "top-k 1 %": "Gradients(Mean(TopK(0.01), ErrorFeedback()))",
    "DGC 0.1 %": "Gradients(dgc(0.001, warmup_epochs=1))",
    "4 bits": "Gradients(Mean(QSGD(bits=4)))",
    "SGP": "Gossip(PushSum(Exponential()), order='adapt_then_combine')",
    "PowerGossip": "Gossip(PowerGossip(Ring()))",
    "ALQ, 3 bits": "Gradients(Mean(ALQ(bits=3, update_steps=(2, 10, 50, 200))))",
}
"""Label -> strategy."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--epochs", type=int, help="instead of the recipe's three")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--docs", type=existing_folder)
    options = parser.parse_args()
    base = recipes()["cifar10-resnet20-dense-small"].config
    base = replace(base, data=replace(base.data, folder=options.folder), output=options.output)
    base = replace(base, epochs=options.epochs or base.epochs)
    configs = {label: configured(base, METHODS[label]) for label in METHODS}
    runs = [finished(c, f"{c.strategy}-epochs{c.epochs}", label, options.only in label) for label, c in configs.items()]
    runs = [run for run in runs if run is not None]
    if options.docs:
        write(options.docs, runs)
    else:
        print("\n".join(table(runs)))


def configured(base: RunConfig, strategy: str) -> RunConfig:
    """The recipe with another strategy; where its averager applies momentum, the optimizer has none, and momentum is plain."""
    optimizer = replace(base.optimizer, nesterov=False)
    config = replace(base, strategy=strategy, optimizer=optimizer)
    return replace(config, optimizer=momentum_applied_once(config))


def table(runs: Sequence[Run]) -> list[str]:
    """Markdown, the most bytes first; of gossip, accuracy is the mean over the workers' own models."""
    lines = table_head(["method", "strategy", "test accuracy", "mean model", "MB sent by a worker", "fewer than fp32"])
    for run in sorted(runs, key=lambda run: -run.summary["bytes_sent_per_worker"]):
        final, sent = run.summary["final"], run.summary["bytes_sent_per_worker"]
        mean = final.get("mean_model_test_accuracy")
        accuracies = [f"{final['test_accuracy']:.2%}", "" if mean is None else f"{mean:.2%}"]
        cost = [f"{sent / 1e6:,.2f}", times(run.summary["dense_fp32_bytes"], sent)]
        lines.append(table_row([run.label, f"`{METHODS[run.label]}`", *accuracies, *cost]))
    return lines


def write(docs: Path, runs: Sequence[Run]) -> None:
    """Put the table between the page's markers, and the figure beside the page."""
    publish(docs / "cifar10.md", "table", table(runs))
    with styled():
        figure = lines([Group({}, [run], run.label) for run in runs], ALONG_BYTES, metric("test_accuracy"))
        save(figure, docs / "cifar10.png")


if __name__ == "__main__":
    run_script(main)
