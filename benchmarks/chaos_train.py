"""Kills in runs of `thinwire train digits --workers 4 --elastic`; `chaos.py --train` calls this.

Each configuration trains once undisturbed and once while workers are killed: worker 0, another one, and any one, at steps that
the seed draws. After a kill, the next one waits until the killed worker has joined again. The run is the command's own, with
one more column: how many different models the workers hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tables import table_head, table_row
from torch import nn

from thinwire.comm import Communicator, ElasticCommunicator

WORKERS = 4
KILLS = "CHAOS_KILLS"  # environment variable of runs with kills
STEP_SECONDS = 0.03  # added to a step, so that a killed worker comes back long before the end
COMMIT_SECONDS, JOIN_SECONDS, START_SECONDS = 10.0, 60.0, 240.0
EVERY = 4
CONFIGURATIONS = {
    "error feedback": ("Gradients(Mean(chain(TopK(0.01), QSGD(bits=4)), ErrorFeedback()))",),
    "PowerSGD": ("Gradients(PowerSGD(rank=4))",),
    "momentum": ("Gradients(dgc(0.01))", "--optimizer.momentum", "0"),
    "gossip": ("Gossip(Mix(Exponential()))",),
    "local updates": (f"Local(Mean(), every={EVERY})",),
    "gossip with overlap": ("Gossip(Mix(Exponential()), overlap=True)",),
    "Streaming DiLoCo, always in flight": ("Local(Mean(), every=4, fragments=2, delay=3, alpha=0.5)",),
}
OWN_MODELS = ("gossip", "gossip with overlap", "Streaming DiLoCo, always in flight")
"""Whose workers hold models of their own, also after a round."""


class Killed(NamedTuple):
    """A kill: of which worker after which step, and seconds until the others had committed, and until it had joined again."""

    worker: int
    step: int
    committed: float | None = None
    joined: float | None = None


class Trained(NamedTuple):
    """A run: its kills, its last rows, and why it was not as it should be."""

    kills: list[Killed]
    rows: list[dict[str, Any]]
    failure: str = ""


def models(model: nn.Module, row: Mapping[str, Any], comm: Communicator) -> dict[str, float]:
    """A callback: tell this worker's process, take some time, and count the different models."""
    if isinstance(comm, ElasticCommunicator) and os.environ.get(KILLS):
        Path(f"worker-{comm.number}").write_text(str(os.getpid()))
        time.sleep(STEP_SECONDS)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"models": len(set(comm.gather_objects(digest)))}


def command(folder: str, *options: str) -> None:
    """`thinwire train` in this folder, with the column."""
    import thinwire.lab.train
    from thinwire.lab.cli.train import train_command

    os.chdir(folder)
    # The command takes no callbacks, so it gets a `train` that has one.
    thinwire.lab.train.train = partial(thinwire.lab.train.train, callbacks=[models])
    train_command(list(options))


def run(configuration: str, kills: Sequence[Killed], seed: int, folder: Path) -> Trained:
    """Train once, with these kills."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    strategy, *others = CONFIGURATIONS[configuration]
    options = ["digits", *others, "--strategy", strategy, "--workers", str(WORKERS), "--elastic", "--seed", str(seed)]
    options += ["--log-every", "1" if kills else "10", "--name", "run"]
    script = f"from chaos_train import command; command(*{[str(folder.absolute()), *options]!r})"
    with (folder / "said").open("w") as said:
        environment = os.environ | {KILLS: "yes" if kills else ""}
        arguments = [sys.executable, "-c", script]
        process = subprocess.Popen(arguments, stdout=said, stderr=said, cwd=Path(__file__).parent, env=environment)
    watch = _Watch(folder, process)
    try:
        done = [watch.kill(planned) for planned in kills]
        failure = watch.finish(START_SECONDS)
    finally:
        process.kill()
        process.wait()
    for kill in done:
        if kill.committed is None or kill.committed > COMMIT_SECONDS:
            failure = failure or f"worker {kill.worker}: no commit of the others within {COMMIT_SECONDS:g} s"
        elif kill.joined is None:
            failure = failure or f"worker {kill.worker} did not join again"
    return Trained(done, watch.rows, failure or (unequal(configuration, watch.rows) if kills else ""))


def unequal(configuration: str, rows: list[dict[str, Any]]) -> str:
    """Why replicas are not as they should be at the end, or ""."""
    if configuration in OWN_MODELS:
        return ""
    last = rows[-EVERY:] if configuration == "local updates" else rows[-1:]  # these are equal after a round
    return "" if min(row["models"] for row in last) == 1 else f"{last[-1]['models']:g} different models at the end"


class _Watch:
    """Reads the rows of a run while it goes on, and kills its workers."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]):
        self.folder, self.process = folder, process
        self.rows: list[dict[str, Any]] = []
        self._read = 0

    def kill(self, planned: Killed) -> Killed:
        """Kill the worker once its step has come, and wait until it has joined again."""
        worker, step = planned.worker, planned.step
        if not self._until(lambda row: row["step"] >= step and row["workers"] == WORKERS, START_SECONDS):
            return planned
        os.kill(int((self.folder / f"worker-{worker}").read_text()), signal.SIGKILL)
        at, last = time.monotonic(), self.rows[-1]
        killed = Killed(worker, last["step"])

        def has_joined(row: dict[str, Any]) -> bool:
            return bool(row["workers"] == WORKERS and row["healings"] > last["healings"])

        # It may be back before the others have noticed for sure, and join their next round.
        if self._until(lambda row: row["workers"] < WORKERS or has_joined(row), JOIN_SECONDS):
            killed = killed._replace(committed=time.monotonic() - at)
            if has_joined(self.rows[-1]) or self._until(has_joined, JOIN_SECONDS):
                killed = killed._replace(joined=time.monotonic() - at)
        return killed

    def finish(self, seconds: float) -> str:
        """Wait for the end; returns why the run failed, or ""."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"no end within {seconds:g} s"
        self._rows()
        return f"exit code {code}: {(self.folder / 'said').read_text()[-500:]}" if code or not self.rows else ""

    def _until(self, condition: Any, seconds: float) -> bool:
        """Wait for a new row of this kind."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(condition(row) for row in self._rows()):
                return True
            time.sleep(0.01)
        return False

    def _rows(self) -> list[dict[str, Any]]:
        """The rows since the last call."""
        file = self.folder / "runs/run/metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        if len(lines) < self._read:  # a new writer cuts off rows after its own step
            self._read = len(lines) - 1
        new = [json.loads(line) for line in lines[self._read :]]
        self._read = len(lines)
        self.rows += new
        return new


def accuracy(rows: list[dict[str, Any]]) -> float:
    """The test accuracy in percent: of the mean model, if workers have models of their own; NaN if there is none."""
    last = rows[-1] if rows else {}
    return float(100 * last.get("mean_model_test_accuracy", last.get("test_accuracy", float("nan"))))


def drawn(seed: int) -> list[Killed]:
    """The kills of a seed: worker 0, another worker, and any worker."""
    draws = random.Random(seed)
    workers = [0, draws.randrange(1, WORKERS), draws.randrange(WORKERS)]
    draws.shuffle(workers)
    return [Killed(worker, step) for worker, step in zip(workers, sorted(draws.sample(range(10, 200), 3)), strict=True)]


def train(seeds: Sequence[int], only: Sequence[str] | None, out: Path | None) -> int:
    """Train each configuration with and without kills, print the table, and return the number of failures."""
    names = "configuration, seed, killed: worker (step), next commit after (s), joined after (s), models at the end"
    lines = table_head([*names.split(", "), "test accuracy", "undisturbed"])
    failures = []
    for name in only or CONFIGURATIONS:
        for seed in seeds:
            plain, hit = (
                run(name, kills, seed, Path(f"/tmp/chaos-train-{os.getpid()}")) for kills in ([], drawn(seed))
            )
            accuracies = [accuracy(result.rows) for result in (hit, plain)]
            failure = plain.failure or hit.failure
            if not failure and not accuracies[0] >= accuracies[1] - 1.0:
                failure = f"test accuracy {accuracies[0]:.1f} %, undisturbed {accuracies[1]:.1f} %"
            failures += [f"{name}, seed {seed}: {failure}"] if failure else []
            cells = [name, seed, ", ".join(f"{k.worker} ({k.step})" for k in hit.kills)]
            cells += [
                ", ".join("-" if t is None else f"{t:.1f}" for t in times)
                for times in zip(*((k.committed, k.joined) for k in hit.kills), strict=True)
            ]
            cells += [f"{hit.rows[-1]['models'] if hit.rows else 0:g}"]
            cells += [f"{accuracy:.1f} %" for accuracy in accuracies]
            lines.append(table_row(cells))
            print(lines[-1], *failures[-1:], flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(
                        json.dumps([name, seed, hit.kills, accuracies, failure, hit.rows[-1:], plain.rows[-1:]]) + "\n"
                    )
    print("\n".join([*lines, "", *failures]))
    return len(failures)
