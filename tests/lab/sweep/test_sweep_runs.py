"""Sweeps that really run: real processes, real signals, real files; and what is told of runs by their files alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.command import started, thinwire
from helpers.program import wait_until
from rich.console import Console, ConsoleDimensions

from thinwire.lab.cli import main
from thinwire.lab.sweep import Status, execute, read_sweep, run_locally, status_of
from thinwire.lab.sweep.execute import read_run, start, write_down
from thinwire.lab.sweep.show import counted, status_table, statuses_of
from thinwire.lab.sweep.status import locked
from thinwire.lab.sweep.tasks import Train

SWEEP = ["-m", "thinwire", "sweep", "grid.toml"]
SHORT = """
recipe = "digits"
output = "runs"
[fixed]
workers = 1
max_steps = {steps}
log_every = 1
[grid]
strategy = ["Gradients(Mean())", "Gradients(Mean(TopK(0.01), ErrorFeedback()))"]
seed = {seeds}
"""


def write(folder: Path, steps: int = 2, seeds: str = "[1]") -> Path:
    file = folder / "grid.toml"
    file.write_text(SHORT.format(steps=steps, seeds=seeds))
    return file


def run(folder: Path, *arguments):
    return thinwire("sweep", "grid.toml", *arguments, cwd=folder)


def shown(capsys, option: str) -> str:
    """What the command prints of the sweep in the current folder."""
    assert main(["sweep", "grid.toml", option]) == 0
    return capsys.readouterr().out


def sweep_in(folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    return read_sweep(Path("grid.toml"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished sweep of two runs, and what it printed."""
    folder = tmp_path_factory.mktemp("sweep")
    write(folder)
    done = run(folder, "--local", 2)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return folder, done.stdout


def summaries(folder: Path) -> dict[str, int]:
    """When the results were written, by run."""
    return {file.parent.name: file.stat().st_mtime_ns for file in (folder / "runs").glob("*/summary.json")}


def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch):
    write(tmp_path)
    sweep = sweep_in(tmp_path, monkeypatch)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(
        ValueError, match=r"^cannot lock a file in runs/\.sweep/\S+: No locks available; choose an output on"
    ):
        start(sweep.runs[0])


def test_every_run_leaves_its_records_and_its_log(finished, monkeypatch):
    folder, printed = finished
    sweep = sweep_in(folder, monkeypatch)
    assert len(sweep.runs) == 2 and "runs: 2 runs: 2 finished" in printed
    for planned in sweep.runs:
        assert status_of(planned).state == "finished" and planned.folder.name in printed
        summary = json.loads((planned.folder / "summary.json").read_text())
        assert summary["seed"] == 1 and summary["final"]["steps"] == 2
        assert "step 2/2" in (planned.records / "log.txt").read_text()


def test_finished_runs_are_skipped_and_others_run(finished, monkeypatch, capsys):
    folder, _ = finished
    monkeypatch.chdir(folder)
    before = summaries(folder)
    assert "2 finished" in run(folder).stdout and summaries(folder) == before
    # Another seed is another run; the same configuration in other words is not.
    text = (
        (folder / "grid.toml")
        .read_text()
        .replace("seed = [1]", "seed = [1, 2]")
        .replace("TopK(0.01)", "TopK(ratio=0.01)")
    )
    (folder / "grid.toml").write_text(text)
    assert "4 runs: 2 finished, 2 waiting" in shown(capsys, "--dry-run") and summaries(folder) == before
    assert run(folder, "--local", 2).returncode == 0
    after = summaries(folder)
    assert len(after) == 4 and before.items() <= after.items()
    assert "4 runs: 4 finished" in shown(capsys, "--status")
    write(folder)


def test_a_run_that_was_changed_by_hand_is_run_again(finished, monkeypatch):
    folder, _ = finished
    planned = sweep_in(folder, monkeypatch).runs[0]
    config = json.loads((planned.folder / "config.json").read_text())
    (planned.folder / "config.json").write_text(json.dumps(config | {"batch_size": 31}))
    assert status_of(planned).state == "waiting"
    (planned.folder / "config.json").write_text(json.dumps(config | {"threads": 31}))
    assert status_of(planned).state == "finished"


def processes_of(folder: Path) -> list[int]:
    """All processes whose working directory it is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found += [int(process.name)] if Path(os.readlink(process / "cwd")) == folder else []
        except OSError:
            continue
    return found


@pytest.fixture
def no_leftovers(tmp_path):
    """Ends what a test that fails leaves running."""
    yield
    for process in processes_of(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.usefixtures("no_leftovers")
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="reads Linux's table of processes")
def test_a_sweep_is_stopped_in_good_order_and_continued(tmp_path, monkeypatch):
    write(tmp_path, steps=100_000)
    (tmp_path / "grid.toml").write_text(
        (tmp_path / "grid.toml").read_text().replace("workers = 1", "workers = 1\nepochs = 5000")
    )
    first, second = sweep_in(tmp_path, monkeypatch).runs
    metrics = first.folder / "metrics.jsonl"
    with started([*SWEEP, "--local", "1"], tmp_path) as process:
        process.wait_until(lambda: metrics.exists() and metrics.stat().st_size, "the first row of the first run")

        shown = run(tmp_path, "--status").stdout  # from another process, while the sweep runs
        assert re.search(rf"{first.folder.name}\s+running\s+\d+%, step \d+", shown) and "1 running, 1 waiting" in shown

        # A second sweep of the same file leaves the running one alone.
        with started(SWEEP, tmp_path) as other:
            other.wait_until(lambda: status_of(second).state == "running", "the start of the second run")
            other.send_signal(signal.SIGINT)
            assert other.wait(400) == 130 and status_of(first).state == "running"
        assert status_of(second).state == "stopped"

        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=400)
        assert process.returncode == 130
        assert complaint.count("\n") == 1 and "the same command goes on" in complaint
        assert status_of(first).state == "stopped" and "step" in status_of(first).detail
        wait_until(lambda: processes_of(tmp_path) in ([], [os.getpid()]), "the end of all processes")

    # It goes on where it was: rows are kept with the seconds that they took, and more are added.
    before = rows_of(first)
    with started(SWEEP, tmp_path) as process:
        process.wait_until(lambda: len(rows_of(first)) > len(before), "another row")
        process.send_signal(signal.SIGTERM)
        assert process.wait(400) == 130
    after = rows_of(first)
    assert after[: len(before)] == before and [row["step"] for row in after] == list(range(1, len(after) + 1))


def test_a_run_starts_while_another_process_looks_at_it(tmp_path):
    path = tmp_path / "lock"
    with open(path, "w") as lock, open(path) as looking, open(path, "w") as late:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.2, looking.close).start()
        assert locked(lock)
        assert not locked(late)


SLEEPS = "import time; print('begun', flush=True); time.sleep(600)"
# As where the signal comes while a module is imported, whose C++ makes another error of it.
ENDS_OTHERWISE = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); {SLEEPS}"


@pytest.mark.parametrize(
    ("is_interrupted", "program", "code"),
    [(True, SLEEPS, -signal.SIGTERM), (False, SLEEPS, -signal.SIGTERM), (True, ENDS_OTHERWISE, 1)],
)
@pytest.mark.usefixtures("no_leftovers")
def test_runs_that_have_begun_are_stopped_if_ctrl_c_comes_or_another_cannot_start(
    is_interrupted, program, code, tmp_path, monkeypatch
):
    write(tmp_path)
    begun = []

    def begin(planned):
        if begun:
            (planned.records / "log.txt").mkdir(parents=True)
            return start(planned)
        write_down(planned)
        (planned.records / "ended.json").write_text('{"code": null}')
        begun.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE))
        assert begun[0].stdout.readline() == b"begun\n"
        if is_interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        return begun[-1]

    module = sys.modules[run_locally.__module__]
    monkeypatch.setattr(module, "start", begin)
    planned = sweep_in(tmp_path, monkeypatch).runs
    expected = (
        (KeyboardInterrupt, "runs under way: 1")
        if is_interrupted
        else (ValueError, "cannot start the run .*: Is a directory; the same")
    )
    with pytest.raises(expected[0], match=expected[1]):
        run_locally(planned, 2)
    assert len(begun) == 1 and begun[0].poll() == code
    assert [status_of(each).state for each in planned] == ["stopped", "waiting"]


@pytest.mark.usefixtures("no_leftovers")
def test_a_second_ctrl_c_does_not_make_a_stopped_run_a_failed_one(tmp_path, monkeypatch):
    write(tmp_path)
    planned = sweep_in(tmp_path, monkeypatch).runs

    class Slow(subprocess.Popen):
        def wait(self, timeout=None):
            os.kill(os.getpid(), signal.SIGINT)  # while the sweep waits for this run's end
            return super().wait(timeout)

    def begin(planned):
        write_down(planned)
        (planned.records / "ended.json").write_text('{"code": null}')
        os.kill(os.getpid(), signal.SIGINT)
        return Slow([sys.executable, "-c", SLEEPS], stdout=subprocess.DEVNULL)

    monkeypatch.setattr(sys.modules[run_locally.__module__], "start", begin)
    with pytest.raises(KeyboardInterrupt):
        run_locally(planned, 2)
    assert [status_of(each).state for each in planned] == ["stopped", "waiting"]


def rows_of(planned) -> list[dict]:
    return [
        json.loads(line) for line in (planned.folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")
    ]


def test_a_failed_run_stops_no_other_and_is_listed_with_the_end_of_its_log(tmp_path, monkeypatch, capsys):
    # That the data are not there is found out by the workers. The path's brackets must not be read as a colour's markup.
    grid = """
        recipe = "digits"
        output = "runs[a]"
        [fixed]
        workers = 1
        max_steps = 2
        [[list]]
        data = { kind = "CIFAR10", folder = "nowhere" }
        [[list]]
        strategy = "Gradients(Mean())"
    """
    (tmp_path / "grid.toml").write_text(grid)
    done = run(tmp_path)
    assert done.returncode == 1, done
    broken, good = sweep_in(tmp_path, monkeypatch).runs
    assert status_of(good).state == "finished"
    status = status_of(broken)
    assert status.state == "failed" and status.detail.startswith("nowhere/cifar-10-python.tar.gz is missing")
    assert f"failed: {broken.folder.name}" in done.stdout and str(broken.records / "log.txt") in done.stdout
    assert status.detail in " ".join(done.stdout.split())
    again = shown(capsys, "--status")
    assert "1 finished, 1 failed" in again and "is missing" in again


def test_consensus_runs_and_their_rows_together(tmp_path, monkeypatch, capsys):
    grid = """
        command = "consensus"
        output = "runs"
        [fixed]
        workers = 3
        rounds = 4
        shape = [4, 2]
        [grid]
        averager = ["Choco(Ring(), QSGD(bits=4))", "PowerGossip()"]
        step_sizes = [0.1, 0.5]
    """
    (tmp_path / "grid.toml").write_text(grid)
    done = run(tmp_path, "--local", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "runs" / "consensus.json").read_text())
    found = sorted({(row["averager"].split("(")[0], row["step_size"]) for row in rows})
    assert found == [(name, size) for name in ("Choco", "PowerGossip") for size in (0.1, 0.5)]
    assert len(rows) == 4 * 5  # rounds 0..4
    assert all("of the error left" in status_of(planned).detail for planned in sweep_in(tmp_path, monkeypatch).runs)
    assert "4 finished" in shown(capsys, "--dry-run")

    damaged = sweep_in(tmp_path, monkeypatch).runs[1].folder / "consensus.json"
    for text in (
        "[{",
        '{"a": 1}',
        "7",
        "[]",
        '[{"averager": "Mix()", "round": 0, "bits_sent": 0, "squared_error": "x"}]',
    ):
        damaged.write_text(text)
        assert main(["sweep", "grid.toml"]) == 0
        assert capsys.readouterr().err == (
            f"thinwire: {damaged} is damaged, so runs/consensus.json lacks its run; remove its folder, "
            "and the same command runs it\n"
        )
        assert len(json.loads((tmp_path / "runs" / "consensus.json").read_text())) == 3 * 5


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("  File ...\nImportError: no libgomp.so.1\n\nlater:\nOSError: gone", "ImportError: no libgomp.so.1"),
        ("python: No module named thinwire", "python: No module named thinwire"),
        ("", "ended without a word: killed, or out of memory?"),
    ],
)  # fmt: skip
def test_a_run_whose_process_dies_before_it_begins_has_failed_and_says_why(tmp_path, monkeypatch, said, reason):
    write(tmp_path, steps=8)
    planned = sweep_in(tmp_path, monkeypatch).runs[0]
    (tmp_path / "said").write_text(said)
    (tmp_path / "python").write_text(f"#!/bin/sh\ncat {tmp_path}/said\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    write_down(planned)
    (planned.records / "log.txt").write_text("--- an earlier start\nValueError: that was mended\n")
    monkeypatch.setattr(execute, "sys", SimpleNamespace(executable=str(tmp_path / "python")))
    start(planned).wait()
    assert status_of(planned) == Status("failed", reason)


# ---- what files tell ----


def test_the_states_of_a_made_up_folder(tmp_path, monkeypatch):
    write(tmp_path, steps=8, seeds="[1, 2, 3]")
    sweep = sweep_in(tmp_path, monkeypatch)
    done, running, stopped, failed, killed, waiting = sweep.runs
    for planned in (done, running, stopped, failed, killed):
        write_down(planned)
        planned.folder.mkdir()
        (planned.folder / "config.json").write_text(json.dumps(planned.config.as_dict(), default=str))
    final = {"test_accuracy": 0.5, "steps": 8}
    summary = {"final": final, "bytes_sent_per_worker": 2_000_000, "seconds": 3.2}
    (done.folder / "summary.json").write_text(json.dumps(summary))
    rows = [json.dumps({"step": step, "epoch": 0.01 * step, "loss": 1.0}) for step in (1, 2)]
    for planned in (running, stopped):
        (planned.folder / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 3, "ep')  # half a row
    (stopped.records / "ended.json").write_text('{"code": 143}')
    (failed.records / "ended.json").write_text('{"code": 1}')
    (failed.records / "log.txt").write_text("much\nbefore\nthinwire: worker 1 failed: [no] reason\n\n")
    (killed.records / "ended.json").write_text('{"code": null}')
    (killed.records / "log.txt").write_text("--- now\nthinwire: warms up\nstep 1\n")
    with open(running.records / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        states = statuses_of(sweep.runs)
    assert list(states.values()) == [
        Status("finished", "test accuracy 50.00%, 2.00 MB sent, 3 s"),
        Status("running", "25%, step 2"),
        Status("stopped", "25%, step 2"),
        Status("failed", "worker 1 failed: [no] reason"),
        Status("failed", "ended without a word: killed, or out of memory?"),
        Status("waiting"),
    ]
    shown = drawn(status_table(sweep, states))
    assert "6 runs: 1 finished, 1 running, 1 stopped, 2 failed, 1 waiting" in shown
    for planned, status in zip(sweep.runs, states.values(), strict=True):
        assert re.search(rf"{re.escape(planned.folder.name)}\s+{status.state}\s+{re.escape(status.detail)}", shown)
    assert drawn(status_table(replace(sweep, output=Path("[red]")), states)).startswith("[red]: 6 runs")
    # On a small screen those that need a look come first, and the others are counted.
    small = drawn(status_table(sweep, states, ConsoleDimensions(70, 10)), 70)
    assert small.count("failed  ") == 2 and "running  " in small and "finished  " not in small and "and 3 more" in small
    assert small.splitlines()[0].rstrip() == "runs: 6 runs: 1 finished, 1 running, 1 stopped, 2 failed, 1 waiting"
    assert "and 3 more" in small.splitlines()[-1] and len(small.splitlines()) <= 10
    narrow = drawn(status_table(sweep, states, ConsoleDimensions(80, 50)), 80)
    assert "test accuracy 50.00%, 2.00 MB sent, 3 s" in narrow and "…" in narrow
    assert all(planned.folder.name[-6:] in narrow for planned in sweep.runs)


@pytest.mark.parametrize("text", ["[]", "7", '"x"', "null", '{"final": 3}', '{"final": {}, "metric": 5}', "[" * 9999])
def test_files_that_hold_something_else_count_as_missing(text, tmp_path, monkeypatch):
    write(tmp_path, steps=8)
    planned = sweep_in(tmp_path, monkeypatch).runs[0]
    write_down(planned)
    planned.folder.mkdir()
    (planned.folder / "summary.json").write_text(text)
    (planned.folder / "metrics.jsonl").write_text(
        f'{{"step": 2, "epoch": 0.02}}\n{{"step": 3, "epoch": null}}\n{text}\n'
    )
    for path in (planned.records / "ended.json", planned.records / "job.json", planned.folder / "config.json"):
        path.write_text(text)
    assert status_of(planned) == Status("waiting")
    (planned.folder / "config.json").write_text(json.dumps(planned.config.as_dict(), default=str))
    (planned.records / "ended.json").write_text('{"code": 143}')
    assert status_of(planned) == Status("stopped", "25%, step 2")


def test_a_lone_worker_and_a_lone_run_are_told_in_the_singular():
    summary = {"final": {"test_loss": 1.5}, "metric": "test_loss", "bytes_sent_per_worker": 0.0, "seconds": 3.0}
    assert Train().result(summary) == "test loss 1.5, 3 s"
    assert counted({"a": Status("finished")}) == "1 run: 1 finished"


def drawn(table, width: int = 160) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_what_is_executed_is_what_was_planned(tmp_path, monkeypatch):
    write(tmp_path)
    for planned in sweep_in(tmp_path, monkeypatch).runs:
        write_down(planned)
        assert read_run(planned.records / "run.json") == planned


def test_choose_one_of_the_ways(tmp_path, monkeypatch, capsys):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments, expected in (
        (["--local", "0"], "--local must be an integer, 1 or more"),
        (["--local", "1", "--dry-run"], "choose one"),
    ):
        assert main(["sweep", "grid.toml", *arguments]) == 2
        said = capsys.readouterr().err
        assert expected in said and said.count("\n") == 1
