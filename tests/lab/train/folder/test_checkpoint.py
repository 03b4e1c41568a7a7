"""A run that was interrupted goes on as if it had not been: the same bits in every metric but times, and in every weight."""

from __future__ import annotations

import itertools
import json
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import tiny
from helpers.interruptions import Requests
from helpers.spawn import spawn

from thinwire import parse
from thinwire.lab.train import RunConfig
from thinwire.lab.train.data import CIFAR10, Digits, PlainText
from thinwire.lab.train.models import CIFARResNet, DigitsNet, LSTMLanguageModel
from thinwire.lab.train.optimize import Adam, Muon
from thinwire.lab.train.run import loop
from thinwire.lab.train.run.interrupt import Interrupted

STEPS = 5  # the second epoch begins after the third
CONFIG = RunConfig(
    "digits", workers=2, batch_size=200, epochs=2, max_steps=STEPS, log_every=2, keep=STEPS, model=DigitsNet(width=4)
)

# One for each way to keep state; `check_averager` saves and loads the state of every averager.
STRATEGIES = [
    "Gradients(Mean())",
    "Gradients(Mean(TopK(0.1), ErrorFeedback()))",
    "Gradients(Mean(TopK(GeometricWarmup(final=0.05, num=2)), MomentumCorrection(0.9, nesterov=True), clip=ClipByNorm(1.0)))",
    "Gradients(Mean(QSGD(bits=4), ErrorFeedback(), exchange='scatter_reduce'))",
    "Gradients(Mean(ALQ(bits=3, update_steps=(1, 2, 4))))",
    "Gradients(Mean(SignNorm(), ErrorFeedback(), granularity='model'))",
    "Gradients(PowerSGD(rank=2))",
    "Gradients(ByName({'0.*': Mean(TopK(0.1), ErrorFeedback()), '*': PowerSGD(rank=2)}))",
    "Gossip(Mix(Ring()))",
    "Gossip(PushSum(Exponential()))",
    "Gossip(Choco(Ring(), TopK(0.1), step_size=0.2))",
]


def configs(folder: Path) -> dict[str, RunConfig]:
    """All runs that are interrupted, by what is special to them; their data lies in `folder`."""
    found = {strategy: replace(CONFIG, strategy=strategy) for strategy in STRATEGIES}
    for name, config in found.items():
        if "MomentumCorrection" in name:
            found[name] = replace(config, optimizer=replace(config.optimizer, momentum=0.0, learning_rate=0.01))
    compressed = found["Gradients(Mean(TopK(0.1), ErrorFeedback()))"]
    text = PlainText(folder / "train.txt", folder / "test.txt", context=5)
    recurrent = {"data": text, "model": LSTMLanguageModel(width=8, layers=2, dropout=0.5)}
    residual = {"data": CIFAR10(folder / "images"), "model": CIFARResNet(depth=8), "batch_size": 13}
    return found | {
        "accumulate, fp16, by-class": replace(
            compressed, batch_size=100, accumulate=2, precision="fp16", split="by-class", shuffled=0.1
        ),
        "fp16, parameters": replace(CONFIG, strategy="Gossip(Mix(Ring()))", precision="fp16"),
        "local updates in flight": replace(
            CONFIG,
            strategy="Local(Mean(TopK(0.1), ErrorFeedback()), 3, OuterSGD(lr=0.5), fragments=2, delay=2, alpha=0.5)",
        ),
        "pulled pairs, Muon": replace(
            CONFIG, strategy="Local(Mix(RandomPairs()), 2, OuterSGD(), pull=0.5, delay=1)", optimizer=Muon()
        ),
        "adam, clipped, dropout, carried state": replace(
            compressed, optimizer=Adam(learning_rate=1e-2), clip_norm=0.5, batch_size=60, **recurrent
        ),
        "dropout, carried state, parameters": replace(
            CONFIG, strategy="Gossip(Mix(Ring()))", batch_size=60, **recurrent
        ),
        "running statistics, augmentation": replace(compressed, **residual),
        "running statistics, parameters": replace(CONFIG, strategy="Gossip(PushSum(Exponential()))", **residual),
    }


# Two workers agree exactly after each exchange. Those that wait for nobody go on, but no two of their runs are the same.
FOUR = replace(CONFIG, workers=4, batch_size=100)
IN_FLIGHT = {"in flight": replace(FOUR, strategy="Gossip(PushSum(Exponential()), overlap=True, staleness=1)")}
LOOSE = {"asynchronous": replace(FOUR, strategy="Asynchronous()")}
STRICT = [*configs(Path()), *IN_FLIGHT]
TIMED = ("second", "other_bytes_sent")  # stops send bytes too
TRAFFIC = ("bytes_sent", "bytes_received", "messages", "dense_fp32_bytes")


def stop_after(steps: int | None) -> Requests:
    """Asks the loop to stop after some of its calls, as a signal would."""
    calls = itertools.count(1)
    return Requests(lambda comm: signal.SIGTERM if next(calls) == steps else 0)


def go_on(config: RunConfig, folder: Path, comm, steps: int | None = None) -> bool:
    """Start the run, or go on with it, for some steps or to its end; whether it is finished."""
    if comm.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    comm.barrier()
    try:
        loop.run(config, folder, comm, stop_after(steps))
    except Interrupted:
        return False
    finally:
        comm.barrier()
    return True


def steps_between_stops(name: str) -> int:
    """One for some runs. The others stop once, in the second epoch: their restarts take most of the time."""
    return 1 if name in (*IN_FLIGHT, *LOOSE) or STRICT.index(name) % 5 == 0 else 4


def stop_and_go_on(comm, configs: dict[str, RunConfig], folder: Path) -> None:
    """Of each configuration one run without a stop, and one that stops."""
    images_are_read_once = mock.patch.object(Digits, "load", cache(Digits.load))
    sizes_are_not_checked = mock.patch.object(loop, "check_image_sizes", lambda *arguments: [])
    with images_are_read_once, sizes_are_not_checked:
        for name, config in configs.items():
            try:
                assert go_on(config, folder_of(folder, name) / "whole", comm)
                while not go_on(config, folder_of(folder, name) / "chain", comm, steps_between_stops(name)):
                    pass
            except Exception as error:
                raise RuntimeError(f"{name}: {error}") from error


def rows_of(folder: Path) -> list[dict]:
    """All rows without what times and stops change: messages in flight may be sent or not, but at a checkpoint all are."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    strategy = parse(json.loads((folder / "config.json").read_text())["strategy"])
    delayed = strategy.rhythm.delay > 0 and strategy.rhythm.every > 1
    timed = [(*TRAFFIC, *TIMED) if delayed and "test_loss" not in row else TIMED for row in rows]
    return [
        {key: value for key, value in row.items() if not any(word in key for word in words)}
        for row, words in zip(rows, timed, strict=True)
    ]


def states_of(folder: Path) -> dict:
    """Everything in the last checkpoint but times, flat."""
    states = {}
    for file in sorted((folder / "checkpoints" / f"step-{STEPS:06d}").glob("*.pt")):
        states |= flat(torch.load(file, weights_only=True), file.name)
    return {
        name: value for name, value in states.items() if not any(word in name for word in ("seconds", "other_bytes"))
    }


def flat(value, name: str) -> dict:
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for place, part in items for key, leaf in flat(part, f"{name}/{place}").items()}
    return {name: value}


def assert_same(first: Path, second: Path) -> None:
    assert rows_of(first) == rows_of(second)
    states, others = states_of(first), states_of(second)
    assert states.keys() == others.keys()
    for name, value in states.items():
        same = torch.equal(value, others[name]) if isinstance(value, torch.Tensor) else value == others[name]
        assert same, name
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (first, second)]
    assert [{**summary, "seconds": 0} for summary in summaries[:1]] == [
        {**summary, "seconds": 0} for summary in summaries[1:]
    ]


def folder_of(folder: Path, name: str) -> Path:
    return folder / "".join(character if character.isalnum() else "-" for character in name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with the runs of each configuration."""
    folder = tmp_path_factory.mktemp("runs")
    tiny.text(folder)
    tiny.images(folder / "images")
    spawn(2, stop_and_go_on, configs(folder), folder, timeout_seconds=1500)
    spawn(4, stop_and_go_on, IN_FLIGHT | LOOSE, folder, timeout_seconds=1500)
    return folder


@pytest.mark.parametrize("name", STRICT)
def test_a_run_that_stops_goes_on_with_the_same_bits(name, runs):
    whole, chain = (folder_of(runs, name) / which for which in ("whole", "chain"))
    steps = [row["step"] for row in rows_of(whole)]
    assert {2, 3, 4, 5} == set(steps) and sum("test_loss" in row for row in rows_of(whole)) == 2
    saved = sorted(path.name for path in (chain / "checkpoints").glob("step-*"))
    every = steps_between_stops(name)
    stops = {*range(every, STEPS + 1, every), 3, STEPS}  # the first epoch ends after the third step
    assert saved == [f"step-{step:06d}" for step in sorted(stops)]
    assert_same(whole, chain)


@pytest.mark.parametrize("name", LOOSE)
def test_asynchronous_averaging_goes_on_too(name, runs):
    whole, chain = (rows_of(folder_of(runs, name) / which) for which in ("whole", "chain"))
    assert [row["step"] for row in whole] == [row["step"] for row in chain] == [2, 3, 4, 5]
    assert all(row["consensus_distance"] > 0 for row in chain)
    assert chain[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=0.2)
