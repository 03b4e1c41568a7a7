"""A run that is asked to stop: all workers agree on the step, the checkpoint is whole, and nothing hangs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.command import started
from helpers.elastic_training import command
from helpers.program import Program, below, wait_until, workers_of
from helpers.spawn import spawn as run_in_processes

from thinwire.comm import LocalWorld, notice
from thinwire.lab.sweep import local
from thinwire.lab.train import Interrupted, RunConfig, WorkerError, train
from thinwire.lab.train.run import interrupt
from thinwire.lab.train.run.interrupt import Interruption, requeue
from thinwire.lab.train.signals import SIGNALS
from thinwire.lab.train.start import watch

LONG = ("train", "digits", "--workers", "2", "--epochs", "1000", "--log-every", "1", "--name", "long")


@pytest.mark.parametrize("number", SIGNALS)
def test_all_workers_stop_after_the_same_step_one_late(number):
    """Ranks 1 and 2 of four hear of it after their fifth step, at their own time."""

    def steps(comm):
        interruption = Interruption()  # not entered: threads cannot listen to signals
        for step in range(1, 10):
            if step == 5 and comm.rank in (1, 2):
                interruption.received = number
            if stop := interruption.requested(comm):
                return step, stop
        return None

    assert LocalWorld(4).run(steps) == [(6, number)] * 4


def test_workers_without_rounds_ask_for_now():
    def rows(comm):
        interruption = Interruption()
        answers = [interruption.requested(comm, at_once=True)]
        interruption.received = signal.SIGTERM if comm.rank == 1 else 0
        answers.append(interruption.requested(comm, at_once=True))
        interruption.settle()
        return answers

    assert LocalWorld(3).run(rows) == [[0, signal.SIGTERM]] * 3


def test_ctrl_c_counts_first_and_without_signals_nothing_stops():
    def mixed(comm):
        interruption = Interruption()
        interruption.received = SIGNALS[comm.rank]
        return [interruption.requested(comm) for _ in range(2)]

    def none(comm):
        interruption = Interruption()
        answers = [interruption.requested(comm) for _ in range(3)]
        interruption.settle()
        return answers

    assert LocalWorld(3).run(mixed) == [[0, signal.SIGINT]] * 3
    assert LocalWorld(3).run(none) == [[0, 0, 0]] * 3


def ignore_what_nohup_ignores(comm) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as interruption:
        with watch.requests_passed_on([]) as requests, local._Interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert (interruption.received, requests.signal) == (0, 0)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_run_and_a_sweep_under_nohup_outlive_their_terminal():
    """A sweep stopped all of its runs."""
    run_in_processes(1, ignore_what_nohup_ignores)


def hear_a_blocked_signal(comm) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # the process has other threads, which would take it
    with Interruption() as interruption:
        assert interruption.received == signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.received == signal.SIGUSR1, "the first one counts"
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_that_was_blocked_is_heard_and_handlers_are_given_back():
    run_in_processes(1, hear_a_blocked_signal)


# On Linux an address of this test alone: a port that it frees is not taken by another one.
HERE = "127.0.6.1" if sys.platform == "linux" else "127.0.0.1"
A_ROUND = "worker 0 waits for a round of at least 2 workers, at the Lighthouse http:"


def says_soon(folder: str, *arguments: str) -> None:
    """`command`, which says within half a second whom it waits for."""
    notice.NOTICE_SECONDS = 0.5
    command(folder, *arguments)


@pytest.mark.parametrize(
    ("options", "rank", "awaited", "number"),
    [
        ("--elastic --workers 1", None, A_ROUND, signal.SIGINT),
        ("--elastic --resume", 0, A_ROUND, signal.SIGTERM),
        ("--elastic --resume", 1, f"worker 1 waits for worker 0 at {HERE}:", signal.SIGINT),
        ("--transport tcp", 0, f"worker 0 waits for worker 1 at {HERE}:", signal.SIGUSR1),
        ("--transport tcp", 1, f"worker 1 waits for worker 0 at {HERE}:", signal.SIGINT),
    ],
)
def test_a_worker_says_whom_it_waits_for_and_a_signal_ends_it_at_once(options, rank, awaited, number, tmp_path):
    """It was silent for minutes, and had to be killed."""
    place, bound = {}, socket.socket()
    bound.bind((HERE, 0))
    if rank is not None:
        port = str(bound.getsockname()[1])
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": HERE, "MASTER_PORT": port}
    if rank != 1:  # which dials it, and may find nobody else there
        bound.close()
    words = ("train", "digits", "--name", "alone", *options.split())
    process = Program(says_soon, str(tmp_path), *words, folder=tmp_path, LOCAL_RANK="0", **place)
    try:
        process.wait_until(lambda: awaited in process.stderr, awaited)
        began = time.monotonic()
        process.send_signal(number)
        code, said = process.wait(60), process.stderr
    finally:
        process.kill()
        bound.close()
    assert code == Interrupted(number, None).exit_code
    assert time.monotonic() - began < watch.STOP_SECONDS / 2
    assert said.endswith(f"thinwire: stopped by {signal.Signals(number).name}, without a checkpoint\n"), said


@pytest.fixture
def running(tmp_path) -> Iterator[Program]:
    """A run in the middle of training; its fork server is forked from it."""
    with started(["-m", "thinwire", *LONG], tmp_path) as process:
        process.wait_until(lambda: is_logging(tmp_path), "the first row of the run")
        yield process


@pytest.fixture
def real_command(tmp_path) -> Iterator[subprocess.Popen]:
    """The same as a shell starts it, with a fork server between launcher and workers."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "thinwire", *LONG]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **pipes)
    try:
        wait_until(lambda: is_logging(tmp_path), "the first row of the run")
        yield process
    finally:
        process.kill()
        process.wait()


def is_pending(number: signal.Signals, pid: int) -> bool:
    """Whether a process that is stopped has been sent this signal."""
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)


def is_logging(folder: Path) -> bool:
    metrics = folder / "runs" / "long" / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the kernel's table of processes is Linux's")


@linux
@pytest.mark.parametrize(
    "number, whom, code",
    [
        (signal.SIGHUP, "group", 75),
        (signal.SIGINT, "group", 130),
        (signal.SIGUSR1, "worker", 75),
        (signal.SIGTERM, "parent", 75),
    ],
)
def test_a_run_stops_with_a_checkpoint_and_says_how_to_go_on(number, whom, code, running, tmp_path):
    """The group is what a terminal or SLURM signals: parent, fork server and workers at once."""
    workers = workers_of(running.pid)
    assert len(workers) == 2
    if whom == "group":
        os.killpg(running.pid, number)
    else:
        os.kill(running.pid if whom == "parent" else workers[1], number)
    _, said = running.communicate(timeout=400)
    assert running.returncode == code, said
    assert said.count("\n") == 1
    (checkpoint,) = (tmp_path / "runs" / "long" / "checkpoints").glob("step-*")
    name = signal.Signals(number).name
    command = shlex.join(["thinwire", *LONG, "--resume"])
    saved = checkpoint.relative_to(tmp_path)
    assert said == f"thinwire: stopped by {name}, saved in {saved}; go on with: {command}\n"
    step = int(checkpoint.name.removeprefix("step-"))
    assert json.loads((checkpoint / "checkpoint.json").read_text())["step"] == step
    assert all((checkpoint / f"worker-{rank}.pt").exists() for rank in range(2))
    wait_until(lambda: not any(map(alive, workers)), "the end of all workers")


@linux
def test_a_signal_ends_a_worker_that_waits_long_for_others_after_some_steps(monkeypatch, caplog):
    monkeypatch.setattr(interrupt, "NOTICE_SECONDS", 0.1)
    ended = threading.Event()
    with Interruption(lambda number: ended.set()) as interruption:
        with interruption.waiting():  # for the first round
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ended.wait(0.5)  # it trains, and stops after its step
        with interruption.waiting():
            assert not ended.is_set()
            assert ended.wait(60)
    assert "what was trained after the last checkpoint is lost" in caplog.text


@linux
def test_a_second_ctrl_c_stops_at_once(running):
    workers = workers_of(running.pid)
    os.kill(workers[0], signal.SIGSTOP)  # so that no step can be finished
    os.kill(running.pid, signal.SIGINT)
    wait_until(lambda: is_pending(signal.SIGINT, workers[0]), "the first Ctrl-C, which is passed on")
    assert running.returncode is None
    os.kill(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=400)
    assert running.returncode == 130
    assert said == "thinwire: stopped; what was written so far is in runs/long\n"
    wait_until(lambda: not any(map(alive, workers)), "the end of all workers")


@linux
def test_a_worker_that_does_not_stop_in_time_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STOP_SECONDS", 1)
    others = workers_of(os.getpid())  # earlier tests left them idle

    def started():
        return [pid for pid in workers_of(os.getpid()) if pid not in others]

    def stop_one_and_ask(wait=watch.wait, asked=[]):  # noqa: B006
        def waiting(sentinels, timeout):
            if not asked and any(tmp_path.glob("*/metrics.jsonl")):
                asked.append(os.kill(started()[-1], signal.SIGSTOP))
                os.kill(os.getpid(), signal.SIGTERM)
            return wait(sentinels, 0.1)

        return waiting

    monkeypatch.setattr(watch, "wait", stop_one_and_ask())
    with pytest.raises(WorkerError, match="did not stop within 1 seconds of SIGTERM and was killed"):
        train(RunConfig("digits", workers=2, epochs=1000, output=tmp_path))
    assert not started()


def test_requeue_needs_a_job_and_says_what_slurm_says(monkeypatch, tmp_path):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert requeue() == "not requeued: this is no SLURM job"
    script = tmp_path / "scontrol"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho "Invalid job id" >&2\nexit $(cat {tmp_path}/code)\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    (tmp_path / "code").write_text("0")
    assert requeue() == "SLURM will start job 12 again"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    (tmp_path / "code").write_text("1")
    assert requeue() == "not requeued: Invalid job id"
    assert (tmp_path / "asked").read_text() == "requeue 12\nrequeue 11_3\n"


def test_requeue_without_resume_is_refused():
    with pytest.raises(ValueError, match="needs --resume and a --name"):
        RunConfig("digits", requeue=True, name="x")
    assert RunConfig("digits", requeue=True, resume=True, name="x").requeue


def test_how_a_run_was_stopped_is_its_exit_code():
    assert [Interrupted(number, Path("x")).exit_code for number in SIGNALS] == [130, 75, 75, 75]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@linux
def test_a_launcher_that_is_killed_leaves_no_process_even_if_a_worker_is_stopped(real_command):
    processes = below(real_command.pid)
    os.kill(workers_of(real_command.pid)[1], signal.SIGSTOP)
    os.kill(real_command.pid, signal.SIGKILL)
    real_command.wait(400)
    wait_until(lambda: not any(map(alive, processes)), "the end of all processes")


@linux
def test_a_folder_that_is_removed_ends_the_run_with_one_line(running, tmp_path):
    folder = tmp_path / "runs" / "long"
    os.rename(folder, tmp_path / "gone")  # at once, unlike the removal of a tree
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    _, said = running.communicate(timeout=400)
    assert running.returncode == 1, said
    assert said.count("\n") == 1 and said.startswith("thinwire: worker ") and "ENOENT" in said and "runs/long" in said
    assert not folder.exists()
