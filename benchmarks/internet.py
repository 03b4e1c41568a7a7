"""Methods for training across the internet, one beside the other: loss, bytes and hours on a slow network.

    python benchmarks/internet.py DATA [--folder runs/internet] [--minutes 30] [--only diloco sparseloco]

DATA holds valid.txt, the text to learn from, and test.txt, the text to test on, such as those of WikiText-2. A token is a
byte. Every method trains the same GPT from the same weights on equally many tokens: its recipe `text-gpt-METHOD-small`, with
the model, the batch and the steps of the command line. Each learning rate of a method's grid is tried with the first seed, and
the best one is repeated with the other seeds. The loss is that of the mean model.

The workers are threads of this process. The network is modelled: `SimulatedWorld` says how long the messages would have
taken, beside `--compute` seconds of computation a step. Each result is a file in a folder whose name holds all sizes. A result
that is there is not computed again, so that the comparison can be run in pieces. `--table` prints what is there, and writes it
to docs/internet.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from studies import replace_part

from thinwire import Local, parse
from thinwire.lab.recipes import recipes
from thinwire.lab.train import RunConfig
from thinwire.lab.train.data import Dataset
from thinwire.lab.train.data.text import Text
from thinwire.lab.train.models import GPT
from thinwire.lab.train.optimize import set_learning_rate
from thinwire.lab.train.step.steps import steps
from thinwire.lab.train.step.training import Training
from thinwire.plan import Link, Network, SimulatedWorld, TracedCommunicator

LIKE_ADAM = (3e-4, 1e-3, 3e-3, 1e-2)
GRIDS = {
    "ddp": LIKE_ADAM,
    "diloco": LIKE_ADAM,
    "streaming-diloco": LIKE_ADAM,
    "sparseloco": LIKE_ADAM,
    "muloco": (0.0112, 0.0224, 0.0447),
    "noloco": LIKE_ADAM,
    "demo": LIKE_ADAM,
    "dion": (0.01, 0.03, 0.1),
}
"""Method -> the learning rates that are tried."""

FORWARD_SHARE = 1 / 3  # of the computation of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of valid.txt and test.txt")
    parser.add_argument("--folder", type=Path, default=Path("runs/internet"), help="of the results")
    parser.add_argument("--only", nargs="+", choices=GRIDS, default=list(GRIDS), metavar="METHOD")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=320, help="of the model; the default has 7.5 million parameters")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model reads at once")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of a worker in a step")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=30, help="steps of a round, of all methods with local updates")
    parser.add_argument("--outer", help="an outer optimizer for all methods that have one, instead of their own")
    parser.add_argument("--rates", type=int, default=3, help="how many of each grid's learning rates, the middle first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--test-bytes", type=int, default=200_000, help="of the text to test on")
    parser.add_argument("--network", default="100mbit,20ms", help="RATE,LATENCY between any two workers")
    parser.add_argument("--compute", type=float, default=0.25, help="seconds of computation in a step")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many")
    parser.add_argument("--table", action="store_true", help="train nothing; write the table of docs/internet.md")
    parser.add_argument("--docs", type=Path, default=Path(__file__).parent.parent / "docs")
    options = parser.parse_args()
    if not options.table:
        train_all(options)
    lines = table(options)
    print("\n".join(lines))
    if options.table:
        replace_part(options.docs / "internet.md", "comparison", lines)


# ---- which runs ----


def rates_of(method: str, options: argparse.Namespace) -> list[float]:
    """The first learning rates of the grid, from its middle outwards."""
    grid = GRIDS[method]
    return sorted(grid, key=lambda rate: abs(grid.index(rate) - len(grid) // 2))[: options.rates]


def train_all(options: argparse.Namespace) -> None:
    """The grid with seed 0, then the best learning rates with the other seeds, as far as the minutes reach."""
    data, end = read(options), time.monotonic() + 60 * options.minutes
    wanted = [(method, rate, 0) for rank in range(options.rates) for method in options.only
              for rate in rates_of(method, options)[rank : rank + 1]]  # fmt: skip
    for method, rate, seed in wanted:
        run(method, rate, seed, data, options, end)
    for seed in range(1, options.seeds):
        for method in options.only:
            if (best := best_rate(method, options)) is not None:
                run(method, best, seed, data, options, end)


def best_rate(method: str, options: argparse.Namespace) -> float | None:
    """The learning rate of the lowest loss with seed 0; None where nothing has run."""
    done = [r for rate in rates_of(method, options) if (r := result(method, rate, 0, options)) is not None]
    best: float | None = min(done, key=lambda r: r["loss"])["rate"] if done else None
    return best


def path_of(method: str, rate: float, seed: int, options: argparse.Namespace) -> Path:
    sizes = (
        "workers",
        "layers",
        "width",
        "context",
        "batch_size",
        "steps",
        "every",
        "test_bytes",
        "network",
        "compute",
    )
    folder = "-".join(f"{name}{getattr(options, name)}" for name in sizes).replace(",", "-")
    folder += "" if options.outer is None else "-" + re.sub(r"[^\w.]+", "-", options.outer).strip("-")
    path: Path = options.folder / folder / f"{method}-rate{rate:g}-seed{seed}.json"
    return path


def result(method: str, rate: float, seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """What a run left; None if it has not run."""
    path = path_of(method, rate, seed, options)
    return json.loads(path.read_text()) if path.exists() else None


# ---- one run ----


def read(options: argparse.Namespace) -> Dataset:
    """Both texts as bytes."""
    train, test = (
        torch.frombuffer(bytearray((options.data / name).read_bytes()), dtype=torch.uint8)
        for name in ("valid.txt", "test.txt")
    )
    return Text(train, test[: options.test_bytes], 256, options.context, in_order=False)


def run(method: str, rate: float, seed: int, data: Dataset, options: argparse.Namespace, end: float) -> None:
    """Train and write the result, unless it is there or the time is over."""
    path = path_of(method, rate, seed, options)
    if path.exists() or time.monotonic() > end:
        return
    config = configured(method, rate, seed, options)
    torch.manual_seed(seed)
    model = config.model.build(data.num_classes)
    link = Link.of(*options.network.split(","))
    world = SimulatedWorld(Network(options.workers, outer=link), measures=False, timeout_seconds=600.0)
    began = time.monotonic()
    found = world.run(train_one, config, model, data, options)[0]
    found |= {"method": method, "rate": rate, "seed": seed, "seconds": time.monotonic() - began}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n")
    print(f"{method}, rate {rate:g}, seed {seed}: loss {found['loss']:.4f}, {found['seconds']:.0f} s", flush=True)


def configured(method: str, rate: float, seed: int, options: argparse.Namespace) -> RunConfig:
    """The small recipe of the method with the sizes of the command line."""
    config = recipes()[f"text-gpt-{method}-small"].config
    strategy = config.parsed_strategy()
    if isinstance(strategy, Local):
        outer = parse(options.outer) if options.outer else strategy.outer
        strategy = replace(strategy, every=options.every, outer=outer)
    heads = max(1, options.width // 64)
    return replace(
        config,
        model=GPT(options.layers, options.width, heads, options.context, dropout=0.0),
        optimizer=replace(config.optimizer, learning_rate=rate),
        workers=options.workers,
        batch_size=options.batch_size,
        strategy=repr(strategy),
        epochs=1_000_000,
        max_steps=options.steps,
        precision="fp32",
        seed=seed,
    )


def train_one(
    comm: TracedCommunicator, config: RunConfig, initial: torch.nn.Module, data: Dataset, options: argparse.Namespace
) -> dict[str, Any]:
    """The run of one worker; the same result on all workers, but for their own bytes."""
    model = copy.deepcopy(initial)
    computes(model, comm, (1 - FORWARD_SHARE) * options.compute)
    optimizer = config.optimizer.build(model)
    strategy = config.parsed_strategy().attach(model, optimizer, comm=comm, seed=config.seed)
    training = Training(config, model, model, optimizer, torch.amp.GradScaler("cpu", enabled=False), strategy)
    begun = comm.ledger.snapshot()
    peak = 0
    for step in steps(config, data, comm):
        rate = config.optimizer.learning_rate_at(step.number - 1, options.steps, comm.size)
        set_learning_rate(optimizer, rate)
        comm.compute(FORWARD_SHARE * options.compute)
        before = comm.ledger.bytes_sent
        training.step(step.batches)
        peak = max(peak, comm.ledger.bytes_sent - before)
    seconds = comm.virtual_seconds()
    bytes_sent = comm.ledger.since(begun).bytes_sent  # without those of the test
    loss = tested(training, data, comm)
    strategy.detach()
    num_parameters = sum(p.numel() for p in model.parameters())
    return {
        "loss": loss,
        "parameters": num_parameters,
        "strategy": config.strategy,
        "bytes_per_parameter_and_step": bytes_sent / num_parameters / options.steps,
        "peak_bytes_per_parameter": max(peak, comm.ledger.peak_bytes_sent) / num_parameters,
        "virtual_hours": seconds / 3600,
    }


def computes(model: torch.nn.Module, comm: TracedCommunicator, seconds: float) -> None:
    """Let backward passes of the model take so many virtual seconds, each parameter by its share."""
    parameters = list(model.parameters())
    numel = sum(p.numel() for p in parameters)
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda p: comm.compute(seconds * p.numel() / numel))


def tested(training: Training, data: Dataset, comm: TracedCommunicator) -> float:
    """Nats per byte of the test text, of the mean model."""
    with training.strategy.average_model():
        sums = data.evaluate(training.model, comm.rank, comm.size, 32)
    return data.metrics(comm.all_reduce(sums).wait())["loss"]


# ---- the page ----


def table(options: argparse.Namespace) -> list[str]:
    """A row for each method that has run."""
    lines = [
        "| method | learning rate | loss by learning rate, seed 0 | loss | over DDP | over DiLoCo "
        "| bytes per parameter and step | fewer than DiLoCo | peak bytes per parameter | virtual hours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    found = {method: runs for method in options.only if (runs := best_runs(method, options))}
    losses = {method: mean(r["loss"] for r in runs) for method, runs in found.items()}
    for method, runs in found.items():
        first, loss = runs[0], losses[method]
        grid = [r for rate in sorted(GRIDS[method]) if (r := result(method, rate, 0, options)) is not None]
        deviation = f" ± {stdev(r['loss'] for r in runs):.3f}" if len(runs) > 1 else ""
        over = [f"{loss / losses[other] - 1:+.1%}" if other in losses else "" for other in ("ddp", "diloco")]
        sent = first["bytes_per_parameter_and_step"]
        fewer = found["diloco"][0]["bytes_per_parameter_and_step"] / sent if "diloco" in found else float("nan")
        cells = [
            method,
            f"{first['rate']:g}",
            ", ".join(f"{r['rate']:g}: {r['loss']:.3f}" for r in grid),
            f"{loss:.3f}{deviation} ({len(runs)})",
            *over,
            f"{sent:.4g}",
            f"{fewer:.3g}",
            f"{first['peak_bytes_per_parameter']:.3g}",
            f"{mean(r['virtual_hours'] for r in runs):.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def best_runs(method: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of all seeds with the best learning rate."""
    rate = best_rate(method, options)
    seeds = range(options.seeds if rate is not None else 0)
    return [r for seed in seeds if (r := result(method, rate or 0.0, seed, options)) is not None]


if __name__ == "__main__":
    main()
