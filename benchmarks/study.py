"""Studies on the digits task: every method side by side, and layer-wise against entire-model compression.

    python benchmarks/study.py methods         every method: accuracy, bytes, seconds  -> docs/study/methods.md
    python benchmarks/study.py granularity     each codec on layers, buckets and the whole model
                                               -> docs/study/granularity.md, docs/study/granularity.png

Each run is the ordinary `thinwire train digits` on four workers of this machine. Runs that are already there are not
repeated, so a study that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from thinwire.recipes.digits import digits
from thinwire.report import Run, read_run
from thinwire.report.tables import times
from thinwire.train import train

DOCS = Path(__file__).parent.parent / "docs" / "study"
EF = "ErrorFeedback()"

METHODS = {
    "dense": "Mean()",
    "bfloat16": "Mean(Cast())",
    "float8": f"Mean(Cast('float8_e4m3fn'), {EF})",
    "QSGD, 4 bits": "Mean(QSGD(bits=4))",
    "QSGD, 2 bits": "Mean(QSGD(bits=2))",
    "QSGD, s = 255": "Mean(QSGD(levels=255))",
    "NUQSGD, 3 bits": "Mean(NUQSGD(bits=3))",
    "TernGrad": "Mean(TernGrad())",
    "TernGrad, shared scale": "Mean(TernGrad(shared=True))",
    "SignNorm": f"Mean(SignNorm(), {EF})",
    "SignSGD, majority vote": "Mean(SignSGD(scale=0.002))",
    "OneBit": f"Mean(OneBit(), {EF})",
    "ALQ, 3 bits": "Mean(ALQ(bits=3))",
    "AMQ, 3 bits": "Mean(AMQ(bits=3))",
    "TopK 1 %": f"Mean(TopK(0.01), {EF})",
    "TopK 1 %, sampled": f"Mean(TopK(0.01, sample=0.01), {EF})",
    "TopK 1 % + 4 bits": f"Mean(chain(TopK(0.01), QSGD(bits=4)), {EF})",
    "RandomK 1 %": f"Mean(RandomK(0.01), {EF})",
    "RandomK 1 %, shared": f"Mean(RandomK(0.01, shared=True), {EF})",
    "Threshold": f"Mean(Threshold(0.01), {EF})",
    "AdaptiveThreshold": f"Mean(AdaptiveThreshold(), {EF})",
    "ChunkTopK 1 %": f"Mean(ChunkTopK(0.01), {EF})",
    "SVD, rank 1": f"Mean(SVD(rank=1), {EF})",
    "PowerSGD, rank 2": "PowerSGD(rank=2)",
    "DGC, 1 %": "dgc(ratio=0.01, warmup_epochs=2)",
}

STUDIED = {
    "TopK 1 %": "TopK(0.01)",
    "TopK 1 % + 4 bits": "chain(TopK(0.01), QSGD(bits=4))",
    "RandomK 5 %": "RandomK(0.05)",
    "SignNorm": "SignNorm()",
    "OneBit": "OneBit()",
    "QSGD, 2 bits": "QSGD(bits=2)",
    "QSGD, 2 bits, L2": "QSGD(bits=2, norm='l2')",
    "TernGrad": "TernGrad()",
    "AdaptiveThreshold": "AdaptiveThreshold()",
}
GRANULARITIES = ("layer", "bucket", "model")
SEEDS = (0, 1, 2)


def run(averager: str, seed: int, epochs: int, folder: Path) -> Run:
    """Train, unless a finished run of this very configuration is there."""
    name = re.sub(r"[^\w.]+", "-", f"{averager}-seed{seed}-epochs{epochs}").strip("-").lower()
    if not (folder / name / "summary.json").exists():
        momentum = replace(digits().optimizer, momentum=0.0) if averager.startswith("dgc") else digits().optimizer
        config = replace(digits(), averager=averager, seed=seed, epochs=epochs, optimizer=momentum)
        train(replace(config, output=folder, name=name, overwrite=True))
    return read_run(folder / name)


def study_methods(folder: Path) -> None:
    """A row for each method, in the order of bytes."""
    runs = {label: run(averager, 0, 30, folder) for label, averager in METHODS.items()}
    rows = ["| method | averager | test accuracy | MB per worker | fewer than fp32 | seconds |", "|---|---|---|---|---|---|"]
    for label, done in sorted(runs.items(), key=lambda item: -item[1].summary["bytes_sent_per_worker"]):
        s = done.summary
        fewer = times(s["dense_fp32_bytes"], s["bytes_sent_per_worker"])
        cells = [f"{s['final']['test_accuracy']:.2%}", f"{s['bytes_sent_per_worker'] / 1e6:.2f}", fewer, f"{s['seconds']:.0f}"]
        rows.append(f"| {label} | `{METHODS[label]}` | " + " | ".join(cells) + " |")
    write("methods.md", rows)


def study_granularity(folder: Path) -> None:
    """Mean and standard deviation of the test accuracy over seeds, and a figure."""
    averagers = {
        (label, g): f"Mean({codec}, {EF}, granularity='{g}')" for label, codec in STUDIED.items() for g in GRANULARITIES
    }
    accuracy = {
        key: [100 * run(averager, seed, 10, folder).summary["final"]["test_accuracy"] for seed in SEEDS]
        for key, averager in averagers.items()
    }
    rows = ["| method | " + " | ".join(GRANULARITIES) + " |", "|---|" + "---|" * len(GRANULARITIES)]
    for label in STUDIED:
        cells = [f"{mean(accuracy[label, g]):.1f} ± {stdev(accuracy[label, g]):.1f}" for g in GRANULARITIES]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    write("granularity.md", rows)
    draw_granularity(accuracy, DOCS / "granularity.png")


def draw_granularity(accuracy: dict[tuple[str, str], list[float]], path: Path) -> None:
    """A row of dots for each method; each dot is the mean over seeds, each bar reaches from the worst to the best."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = list(STUDIED)[::-1]
    for g, colour, shift in zip(GRANULARITIES, ("#0072B2", "#E69F00", "#009E73"), (0.22, 0, -0.22), strict=True):
        for y, label in enumerate(labels):
            values = accuracy[label, g]
            axes.plot([min(values), max(values)], [y + shift] * 2, color=colour, linewidth=2, alpha=0.5)
            axes.plot(mean(values), y + shift, "o", color=colour, markersize=6, label=g if y == 0 else None)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("test accuracy after 10 epochs, in per cent (dot: mean of three seeds, bar: worst to best)")
    axes.grid(axis="x", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(title="encoded as one", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)


def write(name: str, rows: Sequence[str]) -> None:
    """Into docs, and on the terminal."""
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / name).write_text("\n".join(rows) + "\n")
    print("\n".join(rows))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["methods", "granularity"])
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="where the runs are (default: runs/study)")
    options = parser.parse_args()
    {"methods": study_methods, "granularity": study_granularity}[options.study](options.folder)


if __name__ == "__main__":
    main()
