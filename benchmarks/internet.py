"""Methods for training across the internet, one beside the other: held-out loss against bytes, with a spread over seeds.

    python benchmarks/internet.py FOLDER                        train what is missing; stop it whenever you like
    python benchmarks/internet.py FOLDER --table                print the table of the runs in the folder
    python benchmarks/internet.py FOLDER --table --docs docs    and write it, with the figure, to docs/internet.md

The text is on every machine: the Python sources that came with Python and PyTorch, of which one file in twenty is held out.
A token is a byte. The workers are threads of this process, on the CPU or as replicas on one GPU. Every method trains the
same GPT from the same weights on the same windows. Each learning rate of a method's grid is tried with seed 0 in a run of a
fifth of the steps; the best one trains to the end with every seed.

A run is one file of JSON lines: a header, and a row every `--part` steps, with the loss every `--test-every` steps. Beside it
lies the state that the run goes on from, saved every `--save-minutes`. On the CPU, a run that was stopped ends with the same
bits as one that was not. A process owns a run while it holds the lock on its file, so any number of processes can share a
folder. Machines without a common folder take different `--only` or `--seeds`; then copy their files into one folder. All but
`--docs` needs PyTorch and thinwire alone.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import mean
from typing import IO, Any

import torch
from script import existing_folder, run_script
from tables import publish, spread, table_head, table_row
from torch import Tensor, nn
from torch.nn import functional as F

import thinwire as tw
from thinwire.comm import Communicator, LocalWorld

SEARCH_SHARE = 5  # a run that tries a learning rate has 1/5 of the steps
TIMEOUT_SECONDS = 3600.0  # at idle priority a worker may stand still for long


@dataclass(frozen=True)
class Method:
    """A method and its inner optimizer.

    Args:
        strategy: what `tw.attach` takes.
        rates: learning rates of the grid, ascending; the middle one is tried first.
        optimizer: "AdamW", "Muon" with AdamW for embeddings, or "SGD" without momentum.
        rate_in_loss: whether the loss is multiplied by the learning rate; see `tw.strategy.demo`.
    """

    strategy: str
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    optimizer: str = "AdamW"
    rate_in_loss: bool = False

    def built(self, model: GPT, rate: float) -> torch.optim.Optimizer:
        """The inner optimizer of one worker."""
        if self.optimizer == "Muon":
            embeddings = [model.token.weight, model.position.weight]
            return tw.strategy.MuonAdamW(model.parameters(), lr=rate, adamw=embeddings)
        if self.optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), rate)
        on_gpu = model.token.weight.is_cuda
        return torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.1, fused=on_gpu)


METHODS = {
    "DDP": Method("Gradients(Mean())"),
    "4 bits": Method("Gradients(Mean(QSGD(bits=4), ErrorFeedback()))"),
    "4 bits every 4": Method("Local(Mean(QSGD(bits=4), exchange='scatter_reduce'), every=4)"),
    "Streaming DiLoCo": Method("streaming_diloco(every=20, fragments=2, delay=2)"),
    "SparseLoCo": Method("sparse_loco(every=20)"),
    "MuLoCo": Method("mulo_co(20)", (3e-3, 0.01, 0.02), "Muon"),
    "DeMo": Method("demo()", (1e-3, 3e-3, 1e-2), "SGD", rate_in_loss=True),
}


@dataclass(frozen=True)
class Run:
    """One run: a method's name, its learning rate, the number of steps and the seed."""

    method: str
    rate: float
    steps: int
    seed: int

    def learning_rate(self, step: int) -> float:
        """Of a step, 0..steps-1: a tenth of them warm up, and then it falls to zero in a straight line."""
        warm, left = (step + 1) / (0.1 * self.steps), 1.1 * (1 - step / self.steps)
        return self.rate * min(1.0, warm, left)


# ---- text and model ----


class GPT(nn.Module):
    """A causal Transformer on bytes."""

    def __init__(self, layers: int, width: int, context: int):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)  # the first also scores what follows
        heads = max(1, width // 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (N, T, 256) of what follows each of the tokens (N, T)."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.linear(self.norm(x), self.token.weight)


@dataclass(frozen=True)
class Text:
    """Bytes to learn from, and bytes of other files to test on."""

    learn: Tensor
    test: Tensor

    @classmethod
    def read(cls, max_files: int | None, device: torch.device) -> Text:
        """The Python sources of Python and PyTorch, or about so many files of them."""
        paths = {}
        for folder in (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent):
            for path in folder.rglob("*.py"):
                name = path.relative_to(folder)  # paths before it differ between machines
                # Installed packages differ between machines.
                if "site-packages" not in name.parts:
                    paths[folder.name, str(name)] = path
        chosen = sorted(paths)[:: max(1, len(paths) // max_files) if max_files else 1]
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for key in chosen:
            # By a checksum of the file's name, every machine holds out the same files.
            parts[zlib.crc32(paths[key].name.encode()) % 20 == 0].append(paths[key].read_bytes())
        learn, test = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
        return cls(learn.to(device), test.to(device))

    def header(self) -> dict[str, int]:
        """What tells this text from another machine's."""
        sums = [zlib.crc32(part.cpu().numpy().tobytes()) for part in (self.learn, self.test)]
        return {"text_bytes": len(self.learn), "test_bytes": len(self.test), "text_checksum": sums[0] ^ sums[1]}


def windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Rows of bytes (N, context + 1), of which each but the first is to be told from those before it."""
    at = starts.to(text.device)[:, None] + torch.arange(context + 1, device=text.device)
    return text[at].long()


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Nats per byte."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        scores = model(rows[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())


# ---- one run ----


def train(run: Run, text: Text, options: argparse.Namespace, end: float) -> bool:
    """Train a run, or go on with it; False if it is finished, or another process has it.

    Args:
        run, text, options: of the study.
        end: where `time.monotonic()` ends this call; the run can go on later.

    Raises:
        ValueError: the run was begun with other settings.
    """
    with claimed(path_of(run, options)) as file:
        if file is None or lines_of(run, options):
            return False
        torch.manual_seed(run.seed)
        initial = GPT(options.layers, options.width, options.context).to(options.device)
        header = asdict(run) | settings(run, initial, text, options)
        state_path = Path(file.name).with_suffix(".state")
        rows, workers = saved_state(state_path, header)
        # Rows behind the last saved state are computed again.
        rewrite(file, [header, *rows])
        saved_at = time.monotonic()
        while (step := rows[-1]["step"] if rows else 0) < run.steps and time.monotonic() < end:
            steps = range(step, min(run.steps, step + options.part))
            row, workers = one_part(run, steps, initial, text, workers, rows, options)
            rows.append(row)
            if time.monotonic() - saved_at > 60 * options.save_minutes or time.monotonic() >= end:
                save_state(state_path, {"header": header, "rows": rows, "workers": workers})
                saved_at = time.monotonic()
            print(json.dumps(row), file=file, flush=True)
        if step == run.steps:
            state_path.unlink(missing_ok=True)
            print(f"{path_of(run, options).stem}: loss {rows[-1]['loss']:.4f}", flush=True)
    return True


def one_part(
    run: Run,
    steps: range,
    initial: GPT,
    text: Text,
    workers: list[Any],
    rows: list[dict[str, Any]],
    options: argparse.Namespace,
) -> tuple[dict[str, Any], list[Any]]:
    """These steps of all workers; the row at their end, and the states that the next steps go on from."""
    began, processor = time.monotonic(), time.process_time()
    world = LocalWorld(options.workers, TIMEOUT_SECONDS)
    found = world.run(train_worker, run, steps, initial, text, workers, options)
    before = rows[-1] if rows else {"bytes_sent": 0, "seconds": 0.0, "core_seconds": 0.0}
    row = found[0]["tested"] | {
        "step": steps.stop,
        "bytes_sent": before["bytes_sent"] + found[0]["bytes_sent"],
        "seconds": before["seconds"] + time.monotonic() - began,
        "core_seconds": before["core_seconds"] + time.process_time() - processor,
    }
    return row, [one["state"] for one in found]


def train_worker(
    comm: Communicator,
    run: Run,
    steps: range,
    initial: GPT,
    text: Text,
    workers: list[Any],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """These steps of one worker: its state after them, the bytes that it sent, and the loss of the mean model if it is due."""
    method = METHODS[run.method]
    model = copy.deepcopy(initial)
    optimizer = method.built(model, run.rate)
    generator = torch.Generator()
    with tw.attach(model, optimizer, method.strategy, comm=comm, seed=run.seed) as handle:
        if workers:
            state = workers[comm.rank]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            handle.load_state_dict(state["strategy"])
        before = comm.ledger.bytes_sent
        for step in steps:
            rate = run.learning_rate(step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            # Batches depend on seed, step and rank alone, so a continued run reads the same ones.
            generator.manual_seed((run.seed * 10**7 + step) * 1000 + comm.rank)
            starts = torch.randint(len(text.learn) - options.context, (options.batch,), generator=generator)
            optimizer.zero_grad()
            loss = loss_of(model, windows(text.learn, starts, options.context))
            (rate * loss if method.rate_in_loss else loss).backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "strategy": handle.state_dict()}
        state = copy.deepcopy(state)  # detaching merges what is in flight
        sent = comm.ledger.bytes_sent - before
        loss = {}
        if steps.stop % options.test_every == 0 or steps.stop == run.steps:
            with handle.average_model():
                loss = {"loss": tested(model, text.test, comm, options)}
        return {"state": state, "bytes_sent": sent, "tested": loss}


@torch.no_grad()
def tested(model: nn.Module, text: Tensor, comm: Communicator, options: argparse.Namespace) -> float:
    """The loss on all held-out windows; each worker tests a part of them."""
    starts = torch.linspace(0, len(text) - options.context - 1, options.test_windows, dtype=torch.float64).long()
    own = starts[comm.rank :: comm.size].split(64)
    losses = [loss_of(model, windows(text, part, options.context)).double() * len(part) for part in own]
    return float(comm.all_reduce(torch.stack(losses).sum().cpu()).wait()) / options.test_windows


# ---- files ----


def path_of(run: Run, options: argparse.Namespace) -> Path:
    """Runs of one size share a folder."""
    sizes = f"{options.layers}x{options.width}x{options.context}-{options.workers}x{options.batch}x{options.steps}"
    name = f"{run.method.replace(' ', '-')}-rate{run.rate:g}-steps{run.steps}-seed{run.seed}.jsonl"
    path: Path = options.folder / f"{sizes}-{options.device.type}" / name
    return path


def other_sizes(options: argparse.Namespace) -> list[str]:
    """The options of runs of other sizes in the folder."""
    own = path_of(Run("DDP", 0.0, options.steps, 0), options).parent
    names = ("layers", "width", "context", "workers", "batch", "steps")
    found = []
    for path in sorted({file.parent for file in options.folder.glob("*/*.jsonl")} - {own}):
        if size := re.fullmatch(r"(\d+)x(\d+)x(\d+)-(\d+)x(\d+)x(\d+)-(\w+)", path.name):
            *numbers, device = size.groups()
            text = [f"--{name} {number}" for name, number in zip(names, numbers, strict=True)]
            found.append(" ".join([*text, f"--device {device}"]))
    return found


def settings(run: Run, model: nn.Module, text: Text, options: argparse.Namespace) -> dict[str, Any]:
    """What else determines a run's numbers."""
    sizes = ("layers", "width", "context", "workers", "batch", "test_windows")
    num_parameters = sum(p.numel() for p in model.parameters())
    strategy = repr(tw.parse(METHODS[run.method].strategy))
    return (
        {"strategy": strategy, "parameters": num_parameters, "device": options.device.type}
        | {name: getattr(options, name) for name in sizes}
        | text.header()
    )


@contextmanager
def claimed(path: Path) -> Iterator[IO[str] | None]:
    """Context in which this process alone trains the run of this file; None if another one does.

    The lock ends with the process, however that ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file


def lines_of(run: Run, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Header and rows of a finished run; empty if it is not finished."""
    path = path_of(run, options)
    text = path.read_text() if path.exists() else ""
    lines = text.splitlines()
    if len(lines) < 2 or not text.endswith("\n") or json.loads(lines[-1])["step"] < run.steps:
        return []
    return [json.loads(line) for line in lines]


def rows_of(run: Run, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a finished run; empty if it is not finished."""
    return lines_of(run, options)[1:]


def rewrite(file: IO[str], rows: Sequence[dict[str, Any]]) -> None:
    """Put these rows in the place of what an interrupted process wrote after its last saved state."""
    file.seek(0)
    file.truncate()
    file.writelines(json.dumps(row) + "\n" for row in rows)
    file.flush()


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def saved_state(path: Path, header: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Rows so far, and the states of the workers; both are empty at the beginning.

    Raises:
        ValueError: the run was begun with other settings.
    """
    if not path.exists():
        return [], []
    state = torch.load(path, map_location="cpu", weights_only=True)
    if differ := [name for name, value in header.items() if state["header"].get(name) != value]:
        was = ", ".join(f"{name}={state['header'].get(name)!r}, now {header[name]!r}" for name in differ)
        raise ValueError(f"{path} was begun with {was}; remove it to begin the run anew")
    return state["rows"], state["workers"]


# ---- which runs ----


def searches(method: str, options: argparse.Namespace) -> list[Run]:
    """The short runs that choose a method's learning rate, from the middle of its grid; none where one rate is tried."""
    grid = METHODS[method].rates
    rates = sorted(grid, key=lambda rate: abs(grid.index(rate) - len(grid) // 2))[: options.rates]
    steps = max(1, options.steps // SEARCH_SHARE)
    return [Run(method, rate, steps, 0) for rate in rates] if len(rates) > 1 else []


def chosen_rate(method: str, options: argparse.Namespace) -> float | None:
    """The learning rate with the lowest loss, or the middle of the grid without a search; None before that is finished."""
    runs = searches(method, options)
    if not runs:
        grid = METHODS[method].rates
        return grid[len(grid) // 2]
    losses = {run.rate: rows[-1]["loss"] for run in runs if (rows := rows_of(run, options))}
    if len(losses) < len(runs):
        return None
    return min(losses, key=lambda rate: losses[rate] if isfinite(losses[rate]) else inf)


def wanted(options: argparse.Namespace) -> list[Run]:
    """All runs that can start by now: the searches, and then seed by seed."""
    by_method = [searches(method, options) for method in options.only]
    short = [runs[i] for i in range(options.rates) for runs in by_method if i < len(runs)]
    rates = {method: chosen_rate(method, options) for method in options.only}
    whole = [
        Run(method, rate, options.steps, seed)
        for seed in options.seeds
        for method, rate in rates.items()
        if rate is not None
    ]
    return short + whole


def train_all(options: argparse.Namespace) -> None:
    """Train one run after the other until no more can be claimed or the minutes are over."""
    end = time.monotonic() + 60 * options.minutes
    text = Text.read(options.files, options.device)
    write_rows(options)
    while time.monotonic() < end and any(train(run, text, options, end) for run in wanted(options)):
        write_rows(options)


# ---- the table and the figure ----


def finished(options: argparse.Namespace) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Method -> seed -> rows of its run with the chosen learning rate.

    Raises:
        ValueError: runs differ in their text or sizes.
    """
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    headers = []
    for method in options.only:
        rate = chosen_rate(method, options)
        for seed in options.seeds if rate is not None else ():
            if lines := lines_of(Run(method, rate, options.steps, seed), options):
                found.setdefault(method, {})[seed] = lines[1:]
                headers.append(lines[0])
    own = {"method", "rate", "seed", "strategy"}
    for header in headers[1:]:
        if differ := [name for name in header.keys() - own if header[name] != headers[0].get(name)]:
            values = ", ".join(f"{name}={header[name]} and {headers[0].get(name)}" for name in sorted(differ))
            raise ValueError(f"runs of {header['method']} and {headers[0]['method']} cannot be compared: {values}")
    return found


def table(options: argparse.Namespace) -> list[str]:
    """A row for each method, and what all runs took."""
    found = finished(options)
    names = f"method|learning rate|loss by learning rate, {options.steps // SEARCH_SHARE} steps, seed 0"
    names += "|loss, nats per byte|over DDP|bytes per parameter and step|fewer than DDP|core-minutes a run"
    lines = table_head(names.split("|"))
    for method in options.only:
        tried = {run.rate: rows[-1]["loss"] for run in searches(method, options) if (rows := rows_of(run, options))}
        grid = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(tried.items()))
        rate = chosen_rate(method, options)
        cells = [method, "" if rate is None else f"{rate:g}", grid, *measured(found, method, options)]
        lines.append(table_row(cells))
    return [*lines, "", taken(options)]


def measured(found: dict[str, dict[int, list[dict[str, Any]]]], method: str, options: argparse.Namespace) -> list[str]:
    """The cells of a method behind its learning rates."""
    if method not in found:
        return ["not run yet", "", "", "", ""]
    last = {seed: rows[-1] for seed, rows in found[method].items()}
    dense = {seed: rows[-1] for seed, rows in found.get("DDP", {}).items()}
    both = last.keys() & dense.keys()
    over = mean(last[seed]["loss"] for seed in both) / mean(dense[seed]["loss"] for seed in both) - 1 if both else None
    sent = mean(row["bytes_sent"] for row in last.values())
    fewer = mean(row["bytes_sent"] for row in dense.values()) / sent if dense and sent else None
    return [
        f"{spread((row['loss'] for row in last.values()), '.3f')} ({len(last)})",
        "" if over is None else f"{over:+.1%}",
        f"{sent / num_parameters(options) / options.steps:.4g}",
        "" if fewer is None else f"{fewer:,.0f}" if fewer >= 100 else f"{fewer:.3g}",
        f"{mean(row['core_seconds'] for row in last.values()) / 60:.1f}",
    ]


def num_parameters(options: argparse.Namespace) -> int:
    """Of the model."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(options.layers, options.width, options.context).parameters())


def taken(options: argparse.Namespace) -> str:
    """What the runs that are finished took, and which are missing."""
    runs = [[run for run in wanted(options) if (run.steps == options.steps) == whole] for whole in (True, False)]
    done = [[rows for run in some if (rows := rows_of(run, options))] for some in runs]
    hours = sum(rows[-1]["core_seconds"] for some in done for rows in some) / 3600
    tokens = options.steps * options.workers * options.batch * options.context
    number = len(options.only) * len(options.seeds)
    return (
        f"{num_parameters(options):,} parameters, {options.workers} workers, {options.steps:,} steps, {tokens / 1e6:.2f} "
        f"million bytes of text a run. {len(done[0])} of {number} runs are finished, and {len(done[1])} of {len(runs[1])} "
        f"short ones. They took {hours:.2f} core-hours."
    )


def write_rows(options: argparse.Namespace) -> None:
    """Keep the table beside the runs, for a program that has started this one."""
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "study.rows.json").write_text(json.dumps(table(options)))


def draw(options: argparse.Namespace, path: Path) -> None:
    """Left, the loss along the steps; right, the last loss against the bytes of a worker. Bands and bars are one deviation."""
    from thinwire.lab.report.style import line_style, logarithmic, new_figure, plain_axes, save, styled

    with styled():
        figure = new_figure(9.6, 3.6, layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for number, (method, seeds) in enumerate(finished(options).items()):
            style = line_style(number)
            curves = [{row["step"]: row["loss"] for row in rows if "loss" in row} for rows in seeds.values()]
            steps = list(curves[0])
            losses_RS = torch.tensor([list(curve.values()) for curve in curves], dtype=torch.float64)
            middle, spread = losses_RS.mean(0), losses_RS.std(0) if len(losses_RS) > 1 else torch.zeros(len(steps))
            left.plot(steps, middle, label=method, **style)
            left.fill_between(steps, middle - spread, middle + spread, color=style["color"], alpha=0.18, linewidth=0)
            sent = mean(rows[-1]["bytes_sent"] for rows in seeds.values()) / 1e6
            right.errorbar(sent, middle[-1], spread[-1], fmt="o", color=style["color"], label=method)
        left.set_xlabel("steps")
        left.set_ylabel("held-out loss, nats per byte")
        logarithmic(right, "x")
        right.set_xlabel("sent by each worker (MB, log scale)")
        for axes in (left, right):
            plain_axes(axes)
        left.set_ylim(right.dataLim.y0 - 0.05, right.dataLim.y1 + 0.5)  # the first steps are similar
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False)
        save(figure, path)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", type=int, default=3, help="how many of each grid's learning rates; 1 tries none")
    parser.add_argument("--device", type=device, default=torch.device("cpu"))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="bytes that the model reads at once")
    parser.add_argument("--batch", type=int, default=8, help="windows of a worker in a step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--test-windows", type=int, default=512)
    parser.add_argument("--files", type=int, help="read about so many files instead of all")
    parser.add_argument("--minutes", type=float, default=inf, help="stop after about so many")
    parser.add_argument("--test-every", type=int, default=100, help="steps between two tests")
    parser.add_argument("--part", type=int, default=20, help="steps between two rows, after which a run can be saved")
    parser.add_argument("--save-minutes", type=float, default=1.0, help="between two saved states; one part at least")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument(
        "--docs", type=existing_folder, help="folder of internet.md, which gets the table and the figure"
    )
    return parser.parse_args(arguments)


def device(text: str) -> torch.device:
    """The type of `--device`."""
    try:
        return torch.device(text)
    except RuntimeError:
        raise ValueError(text) from None  # `argparse` says the rest


def study(options: argparse.Namespace) -> None:
    """Train, and show the table.

    Raises:
        ValueError: no run of this size is finished, which would take a page's table away.
    """
    if options.folder.exists():
        existing_folder(str(options.folder))
    if not options.table:
        train_all(options)
    sizes = other_sizes(options)
    others = f"; {options.folder} has runs of other sizes: {', or '.join(sizes)}" if sizes else ""
    if options.docs is None:
        print("\n".join(table(options)))
        if others:
            print(f"the table has runs of this size alone{others}", file=sys.stderr)
        return
    page = options.docs / "internet.md"
    if not finished(options):
        raise ValueError(f"no run of this size is finished, so {page} stays as it is{others}")
    lines = table(options)
    draw(options, options.docs / "internet.svg")
    lines += ["", "![Held-out loss along the steps, and against the bytes that a worker sent](internet.svg)"]
    publish(page, "comparison", lines)


if __name__ == "__main__":
    run_script(lambda: study(options_of(sys.argv[1:])))
