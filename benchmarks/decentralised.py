"""Every decentralised method on the same task: digits, 8 workers on a ring, classes split between them.

    python benchmarks/decentralised.py [--output FOLDER] [--workers N] [--epochs N] [--shuffled F] [--seed N] [--only TEXT]

Trains one run after another and prints a table for docs/decentralised.md. Runs that are finished in the output folder are
not repeated, so that an interrupted command goes on where it was; `--only` trains but those whose averager contains a text.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from script import run_script
from studies import finished
from tables import table_head, table_row

from thinwire.lab.recipes.digits import digits
from thinwire.lab.report import Run

STRATEGIES = (
    # What the constructor gives, but for the ring.
    "Gossip(Mix(Ring()))",
    "Gossip(PushSum(Ring()))",
    "Gossip(Choco(Ring()))",
    "Gossip(DeepSqueeze(Ring()))",
    "Gossip(PowerGossip(Ring()))",
    "Gossip(Moniqua(Ring()))",
    # What pays on this task.
    "Gossip(Choco(Ring(), step_size=0.5))",
    "Gossip(Choco(Ring(), TopK(0.01)))",
    "Gossip(DeepSqueeze(Ring(), step_size=0.05))",
    "Gossip(PowerGossip(Ring(), iterations=4))",
    "Gossip(Moniqua(Ring(), theta=0.25, bits=4, step_size=0.5))",
    # To compare with.
    "Gradients(Mean())",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/decentralised"))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--shuffled", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    shared = replace(
        digits(), workers=options.workers, epochs=options.epochs, seed=options.seed, split="by-class",
        shuffled=options.shuffled, output=options.output,
    )  # fmt: skip
    if not any(options.only in strategy for strategy in STRATEGIES):
        raise ValueError(f"no strategy contains {options.only!r}; they are {', '.join(STRATEGIES)}")
    runs = []
    for strategy in STRATEGIES:
        config = replace(shared, strategy=strategy)
        words = f"{strategy} workers{config.workers} epochs{config.epochs} shuffled{config.shuffled} seed{config.seed}"
        run = finished(config, words, strategy, options.only in strategy)
        runs += [] if run is None else [run]
    print("\n".join(table(runs)))


def table(runs: list[Run]) -> list[str]:
    """Markdown; accuracies in per cent, distance of the last row, megabytes sent by a worker in the whole run."""
    lines = table_head(["strategy", "local models", "mean model", "consensus distance", "MB sent by a worker"])
    for run in runs:
        final, megabytes = run.summary["final"], run.summary["bytes_sent_per_worker"] / 1e6
        local, mean = final["test_accuracy"], final.get("mean_model_test_accuracy", final["test_accuracy"])
        distance = final.get("consensus_distance", 0.0)
        percents = [f"{100 * accuracy:.1f} %" for accuracy in (local, mean)]
        lines.append(table_row([f"`{run.label}`", *percents, f"{distance:.2g}", f"{megabytes:.1f}"]))
    return lines


if __name__ == "__main__":
    run_script(main)
