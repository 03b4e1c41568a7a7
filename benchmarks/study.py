"""Studies on the digits task: every method side by side, and what is best encoded as one.

    python benchmarks/study.py methods         every method: accuracy, bytes, seconds
    python benchmarks/study.py granularity     each method on layers, buckets and the entire model, with a figure
    python benchmarks/study.py parity          the methods of the papers beside dense training, three seeds each

`methods` and `parity` are one `thinwire train digits` a method and seed, with the workers on this machine. Finished runs
that lie in `--folder` are not repeated, so that a study that was stopped goes on where it was. `granularity` trains the same
network on the same data in four processes of its own, in buckets so small that they differ from the entire model. Each
writes its part of docs/methods.md, between two markers; the figure is docs/granularity.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from script import existing_folder, run_script
from studies import digit_accuracy, digit_batches, finished, trained
from tables import DOCS, publish, spread, table_head, table_row, times

import thinwire as tw
from thinwire.lab.recipes.digits import digits
from thinwire.lab.report import Run
from thinwire.lab.report.style import new_figure, plain_axes, save
from thinwire.lab.train.models import DigitsNet

EF, ADAPT = "ErrorFeedback()", "update_steps=(20, 100)"
RANDOM, SHARED = (f"Gradients(Mean(RandomK(0.01{shared}), {EF}))" for shared in ("", ", shared=True"))
WORKERS, BATCH_SIZE = 4, 32

METHODS = {
    "dense": "Gradients(Mean())",
    "bfloat16": "Gradients(Mean(Cast()))",
    "float8": f"Gradients(Mean(Cast('float8_e4m3fn'), {EF}))",
    "QSGD, 8 bits": "Gradients(Mean(QSGD(bits=8)))",
    "QSGD, 4 bits": "Gradients(Mean(QSGD(bits=4)))",
    "QSGD, 4 bits, Huffman": "Gradients(Mean(chain(QSGD(bits=4), Huffman())))",
    "QSGD, 2 bits": "Gradients(Mean(QSGD(bits=2)))",
    "QSGD, s = 255, L2": "Gradients(Mean(QSGD(levels=255, norm='l2')))",
    "NUQSGD, 3 bits": "Gradients(Mean(NUQSGD(bits=3)))",
    "ALQ, 3 bits": f"Gradients(Mean(ALQ({ADAPT})))",
    "ALQ-N, 3 bits": f"Gradients(Mean(ALQ({ADAPT}, distribution='pooled')))",
    "ALQ-GD, 3 bits": f"Gradients(Mean(ALQ({ADAPT}, search='gradient')))",
    "AMQ, 3 bits": f"Gradients(Mean(AMQ({ADAPT})))",
    "AMQ-N, 3 bits": f"Gradients(Mean(AMQ({ADAPT}, distribution='pooled')))",
    "TernGrad": "Gradients(Mean(TernGrad()))",
    "TernGrad, shared scale": "Gradients(Mean(TernGrad(shared=True)))",
    "SignNorm": f"Gradients(Mean(SignNorm(), {EF}))",
    "SignSGD, majority vote": "Gradients(Mean(SignSGD(scale=0.002)))",
    "OneBit": f"Gradients(Mean(OneBit(), {EF}))",
    "TopK 1 %": f"Gradients(Mean(TopK(0.01), {EF}))",
    "TopK 1 %, sampled": f"Gradients(Mean(TopK(0.01, sample=0.01), {EF}))",
    "TopK 1 %, 4 bits": f"Gradients(Mean(chain(TopK(0.01), QSGD(bits=4)), {EF}))",
    "BlockwiseTopK, 1/64": f"Gradients(Mean(BlockwiseTopK(0.015625), {EF}))",
    "RandomK 1 %": RANDOM,
    "RandomK 1 %, shared": SHARED,
    "Threshold 0.01": f"Gradients(Mean(Threshold(0.01), {EF}))",
    "AdaptiveThreshold": f"Gradients(Mean(AdaptiveThreshold(), {EF}))",
    "CoarseGrainedTopK 1 %": f"Gradients(Mean(CoarseGrainedTopK(0.01, chunk=64), {EF}))",
    "SVD, rank 1": f"Gradients(Mean(SVD(rank=1), {EF}))",
    "PowerSGD, rank 1": "Gradients(PowerSGD(rank=1))",
    "PowerSGD, rank 4": "Gradients(PowerSGD(rank=4))",
    "DGC 1 %": "Gradients(dgc(ratio=0.01, warmup_epochs=2))",
    "DGC 1 %, 4 bits": "Gradients(dgc(ratio=0.01, warmup_epochs=2, bits=4))",
}
"""What averages gradients, with the memory that it is usually given."""

LEARNING_RATES = {RANDOM: 0.01, SHARED: 0.01}
"""Of those that do not train at the recipe's."""

STUDIED = {
    "TopK 1 %": f"TopK(0.01), {EF}",
    "TopK 1 %, 4 bits": f"chain(TopK(0.01), QSGD(bits=4)), {EF}",
    "RandomK 5 %": f"RandomK(0.05), {EF}",
    "AdaptiveThreshold": f"AdaptiveThreshold(), {EF}",
    "DGC 1 %": "TopK(0.01), MomentumCorrection()",
    "SignNorm": f"SignNorm(), {EF}",
    "OneBit": f"OneBit(), {EF}",
    "TernGrad": "TernGrad()",
    "QSGD, 4 bits": "QSGD(bits=4)",
    "QSGD, s = 15, L2": "QSGD(levels=15, norm='l2', bucket_size=1048576)",
    "NUQSGD, 3 bits": "NUQSGD(bits=3)",
    "ALQ, 3 bits": "ALQ(update_steps=(20,))",
    "SVD, rank 1": f"SVD(rank=1), {EF}",
}
PARITY = (
    ("dense", 4, "Gradients(Mean())"),
    ("DGC, 0.1 %, ratio warmed up over 5 epochs", 4, "Gradients(dgc(0.001))"),
    ("ALQ, 3 bits", 4, f"Gradients(Mean(ALQ({ADAPT})))"),
    ("QSGD, 3 bits", 4, "Gradients(Mean(QSGD(bits=3)))"),
    ("dense", 8, "Gradients(Mean())"),
    ("SGP, one peer of an exponential graph", 8, "Gossip(PushSum(Exponential()))"),
    ("D-PSGD on a ring", 8, "Gossip(Mix(Ring()))"),
    ("PowerGossip on a ring, rank 1", 8, "Gossip(PowerGossip(Ring()))"),
)
"""Methods of the papers, with their workers."""

GRANULARITIES = ("layer", "bucket", "model")
BUCKET_BYTES = 700 * 2**10  # makes two buckets of the network's 0.86 MB; DDP's usual 25 MiB would hold all of it
SEEDS = (0, 1, 2)


def optimizer_for(strategy: str):
    """The recipe's; with a learning rate of its own where one is named, without momentum where the averager has its own."""
    ours = digits().optimizer
    momentum = 0.0 if tw.parse(strategy).averager.traits.has_momentum else ours.momentum
    return replace(ours, learning_rate=LEARNING_RATES.get(strategy, ours.learning_rate), momentum=momentum)


# ---- every method ----


def study_methods(options: argparse.Namespace) -> None:
    """A row for each method, the most bytes first."""
    runs = {label: run(strategy, options) for label, strategy in METHODS.items()}
    rows = table_head(["method", "strategy", "test accuracy", "MB per worker", "fewer than fp32", "seconds"])
    for label, done in sorted(runs.items(), key=lambda item: -item[1].summary["bytes_sent_per_worker"]):
        rate = LEARNING_RATES.get(METHODS[label])
        s = done.summary
        fewer = times(s["dense_fp32_bytes"], s["bytes_sent_per_worker"])
        sent = f"{s['bytes_sent_per_worker'] / 1e6:.2f}"
        cells = [f"{s['final']['test_accuracy']:.2%}", sent, fewer, f"{s['seconds']:.1f}"]
        named = f"{label}, learning rate {rate:g}" if rate else label
        rows.append(table_row([named, f"`{METHODS[label]}`", *cells]))
    publish(options.docs / "methods.md", "methods", rows)


def study_parity(options: argparse.Namespace) -> None:
    """A row for each method: mean and standard deviation of the test accuracy, and bytes."""
    rows = table_head(["method", "workers", "strategy", "test accuracy", "MB per worker", "fewer than fp32"])
    for label, workers, strategy in PARITY:
        summaries = [run(strategy, options, workers, seed).summary for seed in SEEDS]
        accuracy = spread(100 * s["final"]["test_accuracy"] for s in summaries)
        sent = summaries[0]["bytes_sent_per_worker"]
        fewer = times(summaries[0]["dense_fp32_bytes"], sent)
        rows.append(table_row([label, workers, f"`{strategy}`", f"{accuracy} %", f"{sent / 1e6:.2f}", fewer]))
    publish(options.docs / "methods.md", "parity", rows)


def run(strategy: str, options: argparse.Namespace, workers: int = WORKERS, seed: int = 0) -> Run | None:
    """Train, unless a finished run of this very configuration is there."""
    epochs = options.epochs or 30
    optimizer = optimizer_for(strategy)
    label = f"{strategy}-rate{optimizer.learning_rate:g}-epochs{epochs}"
    label += f"-workers{workers}-seed{seed}" if (workers, seed) != (WORKERS, 0) else ""
    config = replace(digits(), workers=workers, seed=seed, strategy=strategy, optimizer=optimizer)
    return finished(replace(config, epochs=epochs, output=options.folder), label)


# ---- what is encoded as one ----


def study_granularity(options: argparse.Namespace) -> None:
    """Mean and standard deviation of the test accuracy over seeds, and a figure."""
    epochs = options.epochs or 10
    keys = [(label, g, seed) for label in STUDIED for g in GRANULARITIES for seed in SEEDS]
    runs = [
        (f"Gradients(Mean({STUDIED[label]}, granularity={g!r}), bucket_bytes={BUCKET_BYTES})", seed)
        for label, g, seed in keys
    ]
    percents = dict(zip(keys, tw.comm.ProcessWorld(WORKERS).run(test_percents, runs, epochs)[0], strict=True))
    accuracy = {(label, g): [percents[label, g, seed] for seed in SEEDS] for label, g, _ in keys}
    rows = table_head(["method", "averager", *GRANULARITIES])
    for label, parts in STUDIED.items():
        cells = [spread(accuracy[label, g], ".1f") for g in GRANULARITIES]
        rows.append(table_row([label, f"`Mean({parts}, granularity=...)`", *cells]))
    publish(options.docs / "methods.md", "granularity", rows)
    draw_granularity(accuracy, epochs, options.docs / "granularity.png")


def test_percents(comm: tw.comm.Communicator, runs: Sequence[tuple[str, int]], epochs: int) -> list[float]:
    """Test accuracy of each run, in per cent; all workers call it together."""
    percents = []
    for number, (strategy, seed) in enumerate(runs):
        percents.append(train_and_test(comm, strategy, seed, epochs))
        if comm.rank == 0:
            print(f"{number + 1}/{len(runs)}  {strategy}, seed {seed}: {percents[-1]:.2f} %", flush=True)
    return percents


def train_and_test(comm: tw.comm.Communicator, strategy: str, seed: int, epochs: int) -> float:
    """The digits recipe, in buckets of `BUCKET_BYTES`; the test accuracy after the last epoch, in per cent."""
    torch.manual_seed(seed)
    batches = list(digit_batches(comm.rank, comm.size, seed, epochs, BATCH_SIZE))
    model, _ = trained(comm, DigitsNet().build(), optimizer_for(strategy), strategy, seed, batches)
    return digit_accuracy(model)


def draw_granularity(accuracy: dict[tuple[str, str], list[float]], epochs: int, path: Path) -> None:
    """A row of dots for each method; each dot is the mean over seeds, each bar reaches from the worst to the best."""
    labels = list(STUDIED)[::-1]
    figure = new_figure(8, 1.2 + 0.38 * len(labels), layout="constrained")
    axes = figure.add_subplot()
    for g, colour, shift in zip(GRANULARITIES, ("#0072B2", "#E69F00", "#009E73"), (0.22, 0, -0.22), strict=True):
        for y, label in enumerate(labels):
            values = accuracy[label, g]
            axes.plot([min(values), max(values)], [y + shift] * 2, color=colour, linewidth=2, alpha=0.5)
            axes.plot(mean(values), y + shift, "o", color=colour, markersize=6, label=g if y == 0 else None)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel(
        f"test accuracy after {epochs} epochs, in per cent (dot: mean of {len(SEEDS)} seeds, bar: worst to best)"
    )
    plain_axes(axes, "x")
    axes.legend(title="encoded as one", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


# ---- the page ----


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["methods", "granularity", "parity"])
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/study"), help="where the runs are (default: runs/study)"
    )
    parser.add_argument("--epochs", type=int, help="of each run (default: 30, for granularity 10)")
    parser.add_argument("--docs", type=existing_folder, default=DOCS, help="folder of methods.md (default: docs)")
    options = parser.parse_args()
    {"methods": study_methods, "granularity": study_granularity, "parity": study_parity}[options.study](options)


if __name__ == "__main__":
    run_script(main)
