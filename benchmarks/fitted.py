"""What `Fitted` is worth: errors at equal bytes, the quality of training at equal bytes, and following a line.

    python benchmarks/fitted.py errors DATA     the table of squared errors at equal bytes, by task, codec and phase of training
    python benchmarks/fitted.py train DATA      train what the results lack, and append a line of JSON for each run
    python benchmarks/fitted.py table           the table of these runs
    python benchmarks/fitted.py cost DATA       encoding beside one codec for all layers; the share of measuring and choosing
    python benchmarks/fitted.py line            a line that gets ten times slower, and fast again (needs root, see netlab.py)

DATA is the folder of WikiText-2. Language models learn the bytes of `valid.txt` and are tested on 32 windows of `test.txt`;
networks for images learn the digits of scikit-learn. Four workers are threads of one process. Bytes are the ledger's. A run
that is in the results is not repeated. Tables go into docs/fitted.md, the figure beside it.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
from netlab import Lab
from script import run_script
from studies import append, loss_of, once, read, some
from tables import DOCS, publish, spread, table_head, table_row
from torch import Tensor, nn

import thinwire as tw
from thinwire.codec.adaptive.base import LineMeasurement
from thinwire.codec.compose.per_layer import PerLayer
from thinwire.lab.train.data import Digits, PlainText
from thinwire.lab.train.models import GPT, CIFARResNet, DigitsNet, LSTMLanguageModel

WORKERS, SEEDS = 4, (0, 1, 2)
PHASES = (5, 60, 150)
PAGE = DOCS / "fitted.md"
RESULTS = Path("runs/fitted/results.jsonl")


@dataclass(frozen=True)
class Task:
    """A model, its data, and its optimizer.

    Args:
        build: makes the network, for so many classes.
        optimizer: of parameters and the step's share of the learning rate.
        text: whether it learns bytes, else digits.
        steps: of a run.
        batch_size: of a worker.
    """

    build: Callable[[int], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    text: bool
    steps: int = 200
    batch_size: int = 4


def adamw(rate: float) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    """AdamW as for language models."""
    return lambda parameters: torch.optim.AdamW(parameters, rate, betas=(0.9, 0.95), weight_decay=0.1)


def sgd(rate: float) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    """SGD with momentum."""
    return lambda parameters: torch.optim.SGD(parameters, rate, momentum=0.9)


def perceptron(num_classes: int) -> nn.Module:
    """Three linear layers."""
    sizes = [(64, 256), (256, 256), (256, num_classes)]
    layers = [layer for pair in sizes for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def residual(num_classes: int) -> nn.Module:
    """The residual network for CIFAR-10 with eight layers, on grey images."""
    network = CIFARResNet(depth=8).build(num_classes)
    return nn.Sequential(nn.Conv2d(1, 3, 1, bias=False), network)


CONTEXT = 64
TASKS = {
    "GPT, AdamW": Task(GPT(layers=2, width=128, heads=4, context=CONTEXT, dropout=0.0).build, adamw(1e-3), text=True),
    "GPT, SGD": Task(GPT(layers=2, width=128, heads=4, context=CONTEXT, dropout=0.0).build, sgd(0.1), text=True),
    "LSTM, SGD": Task(LSTMLanguageModel(width=128, layers=1, dropout=0.0).build, sgd(1.0), text=True),
    "CNN, SGD": Task(DigitsNet(width=32).build, sgd(0.05), text=False, steps=160, batch_size=16),
    "residual network, SGD": Task(residual, sgd(0.1), text=False, steps=160, batch_size=16),
    "perceptron, AdamW": Task(perceptron, adamw(1e-3), text=False, steps=160, batch_size=16),
}

SPARSE = {f"{100 * ratio:g} % sparse": f"chain(TopK({ratio}), QSGD(bits=4))" for ratio in (0.01, 0.03, 0.072, 0.1)}
QUANTIZED = {f"{bits} bits": f"QSGD(bits={bits})" for bits in (2, 3, 4)}
SINGLE = {"1 bit": "SignNorm()", **QUANTIZED, **SPARSE}
"""One codec for all layers, whose bytes are the budget. 7.2 % sparse is a fifteenth of dense's bytes on the GPT."""

RIVALS = {"2 bits": "chain(TopK(0.25), QSGD(bits=4))", "3 bits": "chain(TopK(0.4), QSGD(bits=4))"}
"""Other codecs for all layers that fit the same budgets."""

RANKS = {"1 bit": 8, "2 bits": 16, "3 bits": 32, "1 % sparse": 1, "3 % sparse": 4, "7.2 % sparse": 8, "10 % sparse": 8}
"""Of `LowRank` with factors of 6 bits, which fits the same budgets on the GPT."""


UNIFORM = ("uniform", "uniform, sparse", "uniform, low rank")


def methods() -> dict[tuple[str, str], str]:
    """The notation of every codec, by budget and kind."""
    found = {("dense", "dense"): "Identity()"}
    for budget, codec in SINGLE.items():
        found[budget, "uniform"] = codec
        if budget in RIVALS:
            found[budget, "uniform, sparse"] = RIVALS[budget]
        if budget in RANKS:
            found[budget, "uniform, low rank"] = f"LowRank({RANKS[budget]}, QSGD(bits=6))"
        found[budget, "fitted"] = f"Fitted({codec})"
    return found


# ---- training ----


def loaded(task: Task, folder: Path) -> Any:
    """The data of a task."""
    if task.text:
        return PlainText(folder / "valid.txt", folder / "test.txt", unit="byte", context=CONTEXT, in_order=False).load()
    return Digits().load()


def batches_of(task: Task, data: Any, seed: int) -> Callable[[int, int], tuple[tuple[Tensor, ...], Tensor]]:
    """Inputs and labels of a worker and a step: a permutation of the examples, dealt out in turn, from the start at its end."""
    # All workers make the same permutation, and take turns in it.
    order = torch.randperm(data.num_examples, generator=torch.Generator().manual_seed(seed))

    def batch(rank: int, step: int) -> tuple[tuple[Tensor, ...], Tensor]:
        first = (step * WORKERS + rank) * task.batch_size
        places = order[torch.arange(first, first + task.batch_size) % len(order)]
        made = data.batch(places, torch.Generator(), epoch=0)
        return made.inputs, made.labels

    return batch


@torch.no_grad()
def tested(task: Task, model: nn.Module, data: Any) -> float:
    """Perplexity of a byte, or the share of images that are recognised."""
    model.eval()
    if task.text:
        found = [loss_of(model, b.inputs, b.labels).item() for b in islice(data.test_batches(0, 1, 32), 8)]
        return math.exp(min(100.0, mean(found)))
    right = total = 0
    for batch in data.test_batches(0, 1, 256):
        right += int((model(*batch.inputs).argmax(1) == batch.labels).sum())
        total += len(batch.labels)
    return 100 * right / total


def steps_of(
    task: Task, model: nn.Module, batch: Callable[[int, int], Any], rank: int, before_update: Callable[[int], None]
) -> None:
    """Train; `before_update` is called with the number of each step, after backward."""
    optimizer = task.optimizer(model.parameters())
    rates = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for step in range(task.steps):
        share = min(1.0, (step + 1) / 20, (task.steps - step) / (0.3 * task.steps))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        optimizer.zero_grad()
        loss_of(model, *batch(rank, step)).backward()
        before_update(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def trained(comm: Any, task: Task, strategy: str, seed: int, data: Any, initial: nn.Module) -> dict[str, float]:
    """One worker of one run."""
    model = copy.deepcopy(initial)
    handle = tw.attach(model, None, strategy, comm=comm, seed=seed)
    steps_of(task, model, batches_of(task, data, seed), comm.rank, lambda step: None)
    found: dict[str, float] = {"bytes_sent": handle.ledger.bytes_sent}
    if comm.rank == 0:  # replicas are equal, and testing takes as long as many steps
        found["quality"] = tested(task, model, data)
    # Other codecs than `Fitted` have no such diagnostics.
    found |= {name: value for name, value in handle.diagnostics().items() if name in ("bits", "error")}
    handle.detach()
    return found


def train(options: argparse.Namespace) -> None:
    """Train every combination that the results lack."""
    torch.set_num_threads(1)
    for label in options.tasks:
        task = TASKS[label]
        data = loaded(task, options.data)
        for seed in options.seeds:
            for (budget, kind), codec in methods().items():
                if budget not in (*options.budgets, "dense"):
                    continue
                key = {"task": label, "budget": budget, "kind": kind, "codec": codec, "seed": seed}
                memory = "" if kind == "dense" else ", ErrorFeedback(), exchange='all_gather'"
                strategy = f"Gradients(Mean({codec}{memory}))"
                once(options.results, key, partial(run, task, strategy, seed, data))


def run(task: Task, strategy: str, seed: int, data: Any) -> dict[str, float]:
    """What rank 0 found in one run."""
    torch.manual_seed(seed)
    initial = task.build(data.num_classes)
    return tw.LocalWorld(WORKERS, timeout_seconds=3600).run(trained, task, strategy, seed, data, initial)[0]


def table(options: argparse.Namespace) -> None:
    """The table of quality at equal bytes."""
    rows = some(options.results)
    names = "task: dense, budget, named, best single, fitted, gap closed, MB"
    lines = table_head(names.split(", "))
    for label in TASKS:
        of_task = [row for row in rows if row["task"] == label]
        dense = {row["seed"]: row["quality"] for row in of_task if row["kind"] == "dense"}
        heading = f"{label}: {spread(dense.values())}" if dense else ""
        for budget in SINGLE:
            ours = [row for row in of_task if row["budget"] == budget and row["seed"] in dense]
            fitted = [row for row in ours if row["kind"] == "fitted"]
            others = [[r for r in ours if r["kind"] == kind] for kind in UNIFORM]
            others = [runs for runs in others if runs]
            if not fitted or not others:
                continue
            best = min if TASKS[label].text else max
            single = best(others, key=lambda runs: mean(r["quality"] for r in runs))
            shown = "/".join(gap_closed(fitted, runs, dense) for runs in (others[0], single))
            each = (others[0], single, fitted)
            qualities = [spread(r["quality"] for r in runs) for runs in each]
            qualities[1] += f": `{single[0]['codec']}`"
            qualities[2] += "" if len(fitted) == len(SEEDS) else f" ({len(fitted)} of {len(SEEDS)} seeds)"
            megabytes = "/".join(f"{mean(r['bytes_sent'] for r in runs) / 1e6:.1f}" for runs in each)
            lines.append(table_row([heading, budget, *qualities, shown, megabytes]))
            heading = ""
    publish(PAGE, "quality", lines)


def gap_closed(fitted: list[dict[str, Any]], single: list[dict[str, Any]], dense: dict[int, float]) -> str:
    """How much of the distance to dense is gone, where it is more than 2 %."""
    gap, left = (mean(r["quality"] - dense[r["seed"]] for r in runs) for runs in (single, fitted))
    return f"{1 - left / gap:.0%}" if abs(gap) > 0.02 * mean(dense.values()) else "-"


# ---- errors at equal bytes ----


def recorded(comm: Any, task: Task, data: Any, initial: nn.Module) -> dict[int, dict[str, Tensor]]:
    """This worker's own gradients of the phases and of the steps after them, in dense training."""
    model = copy.deepcopy(initial)
    found: dict[int, dict[str, Tensor]] = {}

    def average(step: int) -> None:
        if step in PHASES or step - 1 in PHASES:
            found[step] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.ndim > 1}
        for p in model.parameters():
            if p.grad is not None:
                p.grad.copy_(comm.all_reduce(p.grad).wait() / comm.size)

    steps_of(task, model, batches_of(task, data, 0), comm.rank, average)
    return found


def lost(codec: Any, workers: list[dict[str, Tensor]], weighting: str) -> float:
    """The error of one encoding of all workers' gradients, its layers weighed as `Fitted` weighs them."""
    errors, norms = (torch.zeros(len(workers[0]), dtype=torch.float64) for _ in range(2))
    for gradients in workers:
        residuals = [torch.empty(g.numel()) for g in gradients.values()]
        codec.encode(list(gradients.values()), [tw.codec.Key(7, i) for i in range(len(residuals))], residuals)
        errors += torch.stack([r.double().square().sum() for r in residuals])
        norms += torch.stack([g.double().square().sum() for g in gradients.values()])
    numels = torch.tensor([g.numel() for g in workers[0].values()])
    return float((errors if weighting == "squared" else errors * numels / norms).sum())


def fit(fitted: Any, workers: list[dict[str, Tensor]]) -> Any:
    """The codec that is chosen from the gradients of all workers."""
    state = fitted.init_state({name: g.shape for name, g in workers[0].items()})
    statistics = []
    for rank, gradients in enumerate(workers):
        keys = [tw.codec.Key.of(1, name, rank, 0) for name in gradients]
        fitted.observe(state, list(gradients.values()), keys)
        statistics.append(fitted.statistics(state, step=1))
        state.measured.clear()
    fitted.update(state, fitted.learn(state, statistics), 1)
    return fitted.at(state)


def errors(options: argparse.Namespace) -> None:
    """The table: the error of a choice on the gradients of the *next* step, over that of the single codec there."""
    torch.set_num_threads(1)
    columns = {budget: codec for budget, codec in SINGLE.items() if budget != "1 bit"}
    lines = table_head(["task", "step", *columns])
    for label in options.tasks:
        task = TASKS[label]
        data = loaded(task, options.data)
        torch.manual_seed(0)
        initial = task.build(data.num_classes)
        found = tw.LocalWorld(WORKERS, timeout_seconds=3600).run(recorded, task, data, initial)
        for step in PHASES:
            now, after = ([worker[at] for worker in found] for at in (step, step + 1))
            cells = []
            for single in map(tw.parse, columns.values()):
                shares = []
                for weighting in ("relative", "squared"):
                    chosen = fit(tw.Fitted(single, weighting=weighting), now)
                    shares.append(lost(chosen, after, weighting) / lost(single, after, weighting))
                cells.append("/".join(f"{share:.2g}" for share in shares))
            lines.append(table_row([label, step, *cells]))
            print(lines[-1], flush=True)
    publish(PAGE, "errors", lines)


# ---- cost ----


def encoding(layers: int, width: int, rounds: int) -> None:
    """Encode and decode layers of 2 to 8 bits in turn, and all with one number of bits; processor time as ratios of medians."""
    shapes = [(256, width), *[(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers]
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(math.prod(shape), generator=generator) for shape in shapes]
    keys, lost, outs = (
        [tw.codec.Key(1, i) for i in range(len(xs))],
        [torch.empty_like(x) for x in xs],
        [torch.empty_like(x) for x in xs],
    )
    singles = [tw.QSGD(bits=bits) for bits in range(2, 9)]
    codecs = [PerLayer(tuple(singles[i % len(singles)] for i in range(len(xs)))), *singles]
    payloads = [codec.encode(xs, keys) for codec in codecs]
    for what in ("encode", "decode"):
        seconds: list[list[float]] = [[] for _ in codecs]
        for _ in range(rounds):
            for codec, payload, found in zip(codecs, payloads, seconds, strict=True):
                began = time.thread_time()
                if what == "encode":
                    codec.encode(xs, keys, lost)
                else:
                    codec.decode_sum([payload, payload], outs)
                found.append(time.thread_time() - began)
        by_layer, *each = map(median, seconds)
        numel = sum(x.numel() for x in xs)
        print(
            f"{what} {numel / 1e6:.1f} million elements in {len(xs)} layers, 2 to 8 bits in turn: {by_layer / mean(each):.2f} "
            f"times the mean of these bits for all layers, {by_layer / each[2]:.2f} times 4 bits"
        )


def step_seconds(
    comm: Any, task: Task, strategy: str, data: Any, initial: nn.Module
) -> tuple[float, dict[str, Tensor]]:
    """Processor time of a step that measures nothing, and the last gradients."""
    model = copy.deepcopy(initial)
    handle = tw.attach(model, None, strategy, comm=comm)
    seen: list[float] = []
    steps_of(task, model, batches_of(task, data, 0), comm.rank, lambda step: seen.append(time.process_time()))
    handle.detach()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.ndim > 1}
    return (seen[-1] - seen[20]) / (len(seen) - 21), gradients


def fit_seconds(fitted: Any, gradients: dict[str, Tensor], rounds: int = 10) -> list[float]:
    """Processor time of one measurement with its choice, of an agreement on a line that changes, and of one on another."""
    state = fitted.init_state({name: g.shape for name, g in gradients.items()})
    keys = [tw.codec.Key.of(1, name, 0, 0) for name in gradients]
    spent: list[list[float]] = [[], [], []]
    for i in range(rounds):
        # The line carries half or one and a half times as much, and then just as much as before.
        for what, factor in enumerate((1.0, 0.5 + i % 2, 1.0)):
            step = fitted.measure_every + what
            state.rate, state.budget = 0.0, float(fitted.nbytes_at(state))
            began = time.thread_time()
            if what == 0:
                fitted.observe(state, list(gradients.values()), keys)
            copy.deepcopy(state)  # as a round keeps it
            line = LineMeasurement(1e8, factor / 1e8, waited=1.0)
            fitted.update(state, fitted.learn(state, [fitted.statistics(state, step, line)]), step)
            spent[what].append(time.thread_time() - began)
    return [median(seconds) for seconds in spent]


def cost(options: argparse.Namespace) -> None:
    """Print what fitting costs, in processor time."""
    torch.set_num_threads(1)
    encoding(layers=2, width=128, rounds=200)
    encoding(layers=4, width=128, rounds=200)
    encoding(layers=6, width=512, rounds=20)
    task = replace(TASKS["GPT, AdamW"], steps=60)
    data = loaded(task, options.data)
    torch.manual_seed(0)
    initial = task.build(data.num_classes)
    strategy = "Gradients(Mean(Fitted(3.0), ErrorFeedback(), exchange='all_gather'))"
    step, gradients = tw.LocalWorld(1, timeout_seconds=3600).run(step_seconds, task, strategy, data, initial)[0]
    print(f"a step of a GPT takes {1e3 * step:.1f} ms")
    for fitted in (tw.Fitted(3.0), tw.Fitted("line")):
        measuring, *following = fit_seconds(fitted, gradients)
        share = measuring / fitted.measure_every / step
        print(f"{fitted}: a measurement takes {1e3 * measuring:.1f} ms: {share:.2%} of the steps")
    for seconds, what in zip(following, ("another choice", "the same choice"), strict=True):
        total = share + seconds / fitted.follow_every / step
        print(
            f"an agreement on the line, {what}, takes {1e3 * seconds:.2f} ms: {total:.2%} of the steps with measuring"
        )


# ---- following a line ----

LAYERS, LAYER = 32, (256, 512)
COMPUTE_SECONDS = 0.2
TIMETABLE = ((0, "1gbit"), (90, "100mbit"), (150, "1gbit"))  # from which step on
LINE_STEPS = 240
FIGURE = PAGE.with_name("fitted-line.svg")


class Sleeping(torch.autograd.Function):
    """A layer whose backward pass takes some time and gives a known gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(COMPUTE_SECONDS / LAYERS)
        return ctx.gradient, grads[0], None


class SleepingModel(nn.Module):
    """Layers one after the other; every second one has heavy tails."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ParameterList(torch.zeros(LAYER) for _ in range(LAYERS))
        self.gradients = [torch.randn(LAYER, generator=generator) ** (1 + 2 * (i % 2)) for i in range(LAYERS)]

    def forward(self) -> Tensor:
        loss = torch.zeros(())
        for layer, gradient in zip(self.layers, self.gradients, strict=True):
            loss = Sleeping.apply(layer, loss, gradient)
        return loss


def work(options: argparse.Namespace) -> None:
    """One host: a backward pass that computes nothing, so that hosts that share cores do not disturb each other."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = nn.parallel.DistributedDataParallel(SleepingModel(rank), bucket_cap_mb=1)
    strategy = "Gradients(Mean(Fitted('line'), ErrorFeedback(), exchange='all_gather'))"
    handle = tw.attach(model, None, strategy)
    for step in range(LINE_STEPS):
        before, waited = handle.ledger.bytes_sent if step else 0, communicating(handle)
        torch.distributed.barrier()
        began = time.perf_counter()
        model.zero_grad()
        model().backward()
        seconds = time.perf_counter() - began
        row = {"step": step, "rank": rank, "seconds": seconds, "computing": seconds - communicating(handle) + waited}
        chosen, shown = handle.diagnostics(), ("bits", "budget_bits", "error", "line_rate")
        row |= {"bytes": handle.ledger.bytes_sent - before} | {name: chosen[name] for name in shown if name in chosen}
        append(options.rows, row)
    handle.detach()
    torch.distributed.destroy_process_group()


def communicating(handle: Any) -> float:
    """Seconds so far that steps took beyond computing, encoding and decoding: waiting and agreements."""
    return sum(handle.seconds.get(phase, 0.0) for phase in ("wait", "adapt"))


def line(options: argparse.Namespace) -> None:
    """Run it on two hosts, change their line on the way, and draw what happened."""
    options.rows.unlink(missing_ok=True)
    with Lab(hosts=2, line=TIMETABLE[0][1]) as lab:

        def change() -> None:
            for step, rate in TIMETABLE[1:]:
                while len(read(options.rows)) < 2 * step:
                    time.sleep(0.05)
                for host in range(2):
                    lab.set_line(host, rate)

        changing = threading.Thread(target=change, daemon=True)
        changing.start()
        code = lab.run([sys.executable, str(Path(__file__).absolute()), "work", "--rows", str(options.rows.absolute())])
    if code:
        raise SystemExit(code)
    draw(read(options.rows))


def draw(rows: list[dict[str, Any]]) -> None:
    """Step over computation, that of the slower worker, bits an element and error, by step."""
    import matplotlib.pyplot as plt

    pairs = [[row for row in rows if row["step"] == step] for step in range(LINE_STEPS)]
    ratios = [max(r["seconds"] for r in pair) / max(r["computing"] for r in pair) for pair in pairs]
    rows, shortest = [pair[0] for pair in pairs], min(row["seconds"] for row in rows)
    figure, axes = plt.subplots(3, sharex=True, figsize=(8, 6.5), constrained_layout=True)
    steps = range(LINE_STEPS)
    axes[0].plot(steps, ratios, color="tab:blue", linewidth=1)
    axes[0].set(ylabel="step / computation", ylim=(0.9, 3))
    axes[0].axhline(1.1, color="grey", linestyle=":", linewidth=1)
    axes[1].plot(
        steps, [8 * row["bytes"] / (LAYERS * math.prod(LAYER)) for row in rows], color="tab:orange", linewidth=1
    )
    axes[1].set(ylabel="bits an element, sent", yscale="log")
    axes[2].plot(steps, [max(row.get("error", math.nan), 1e-7) for row in rows], color="tab:red", linewidth=1)
    axes[2].set(ylabel="relative squared error", yscale="log", xlabel="step")
    for axis in axes:
        for step, rate in TIMETABLE:
            axis.axvline(step, color="black", linewidth=0.8, alpha=0.4)
            axis.annotate(rate, (step, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    figure.savefig(FIGURE, metadata={"Date": None})
    for (first, rate), (end, _) in zip(TIMETABLE, [*TIMETABLE[1:], (LINE_STEPS, "")], strict=True):
        late = slice(first + 10, end)
        print(
            f"{rate}: after ten steps a step takes {median(ratios[late]):.2f} of its computation (quartiles "
            f"{', '.join(f'{q:.2f}' for q in quantiles(ratios[late])[::2])}), and "
            f"{median(r['seconds'] for r in rows[late]) / shortest:.2f} of the shortest step; bits an element "
            f"{median(r.get('bits', 0) for r in rows[late]):.1f}"
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["errors", "train", "table", "cost", "line", "work"])
    parser.add_argument("data", type=Path, nargs="?", default=Path("data/wikitext-2"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rows", type=Path, default=RESULTS.with_name("line.jsonl"), help="of the line")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--budgets", nargs="*", default=list(SINGLE), choices=SINGLE)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    options = parser.parse_args()
    {"errors": errors, "train": train, "table": table, "cost": cost, "line": line, "work": work}[options.what](options)


if __name__ == "__main__":
    run_script(main)
