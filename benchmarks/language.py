"""Translation and language modelling: small recipes one after another, and the tables of docs/language.md.

    python benchmarks/language.py DATA [--output FOLDER] [--only TEXT]

DATA holds multi30k/ and wikitext-2/. Runs that are finished in the output folder are not repeated, so that the command can
be run in pieces; `--only` trains but those recipes whose name contains a text.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from script import run_script
from studies import finished
from tables import table_head, table_row

from thinwire.lab.recipes import recipes
from thinwire.lab.report import Run

TABLES = {
    "multi30k": ("BLEU", "test_bleu", ("multi30k-transformer-dense-small", "multi30k-transformer-sgp-small")),
    "wikitext-2": ("perplexity", "test_perplexity", ("wikitext2-lstm-dense-small", "wikitext2-lstm-powergossip-small")),
}
"""Folder of the data -> name of the metric, its key, recipes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path, default=Path("runs/language"))
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    for folder, (metric, key, names) in TABLES.items():
        runs = []
        for name in names:
            config = replace(recipes()[name].config, output=options.output)
            config = replace(config, data=replace(config.data, folder=options.data / folder))
            runs.append(finished(config, name, may_train=options.only in name))
        print("\n".join(table(metric, key, [run for run in runs if run is not None])), end="\n\n")


def table(metric: str, key: str, runs: list[Run]) -> list[str]:
    """Markdown; gigabytes sent by a worker in the whole run."""
    lines = table_head(["recipe", metric, "of the mean model", "loss", "GB sent by a worker", "seconds"])
    for run in runs:
        final, gigabytes = run.summary["final"], run.summary["bytes_sent_per_worker"] / 1e9
        mean = final.get(f"mean_model_{key}", final[key])
        cells = (f"{final[key]:.1f}", f"{mean:.1f}", f"{final['test_loss']:.2f}", f"{gigabytes:.2f}")
        lines.append(table_row([f"`{run.label}`", *cells, f"{run.summary['seconds']:.0f}"]))
    return lines


if __name__ == "__main__":
    run_script(main)
