"""How a launcher watches its workers: who is named when one stops, leaves or fails, and where the store listens."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.ports import free_port
from helpers.program import wait_until

from thinwire.lab.train import RunConfig, WorkerError
from thinwire.lab.train.start import spawn, watch, worker
from thinwire.lab.train.start.connect import loopback_store, meeting_store
from thinwire.lab.train.start.environment import Environment
from thinwire.lab.train.start.worker import report_failure
from thinwire.lab.train.step.training import prepare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's table of processes is Linux's")


def sleeping():
    time.sleep(600)


def forked(target, *arguments):
    """A process that was started, and collects no garbage: a store of an earlier test would end it, without its threads."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    gc.disable()
    process.start()
    gc.enable()
    return process


@pytest.fixture
def workers():
    """Three workers that do nothing, and ignore SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # they inherit it
    started = [forked(sleeping) for _ in range(3)]
    signal.signal(signal.SIGTERM, before)
    workers = [*started]  # a test may put others in their places
    yield workers
    for process in {*started, *workers}:
        process.kill()
        process.join()


def watched(workers, folder, requests=None, store=None, limit_seconds=60.0, first_worker=0) -> str:
    requests, store = requests or watch.Requests(workers), store or dist.HashStore()
    with pytest.raises(WorkerError) as raised:
        watch.Watch(workers, folder, requests, store, limit_seconds, first_worker=first_worker).until_the_end()
    return str(raised.value)


def stop(worker):
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(lambda: watch._state(worker.pid) == "T", "a stopped worker")


def go_on(worker):
    os.kill(worker.pid, signal.SIGCONT)
    wait_until(lambda: watch._state(worker.pid) != "T", "a worker that goes on")


@pytest.fixture
def clock(monkeypatch):
    """The time that the launcher sees, in a list."""
    now = [100.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_stopped_worker_is_named_within_the_limit(workers, tmp_path):
    stop(workers[1])
    began = time.monotonic()
    said = watched(workers, tmp_path, limit_seconds=1.0)
    assert said.startswith(f"worker 1 (process {workers[1].pid}) was stopped by SIGSTOP"), said
    assert time.monotonic() - began < 30  # far below the limit of a run, also on a loaded machine


def test_a_worker_that_goes_on_in_time_ends_nothing(workers, tmp_path, monkeypatch, clock):
    calls = []

    def waiting(sentinels, timeout):
        clock[0] += 0.3
        calls.append(go_on(workers[1]) if len(calls) % 2 else stop(workers[1]))
        if len(calls) == 8:
            raise TimeoutError("watched for long enough")

    monkeypatch.setattr(watch, "wait", waiting)
    with pytest.raises(TimeoutError):
        watch.Watch(workers, tmp_path, watch.Requests(workers), dist.HashStore(), 0.5).until_the_end()


def test_a_stopped_worker_is_told_of_long_before_the_limit(workers, tmp_path, monkeypatch, capfd, clock):
    """Nothing was said for the whole time limit."""

    def waiting(sentinels, timeout):
        clock[0] += 0.2

    monkeypatch.setattr(watch, "NOTICE_SECONDS", 0.5)
    monkeypatch.setattr(watch, "wait", waiting)
    stop(workers[2])
    watched(workers, tmp_path, limit_seconds=1.5)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"thinwire: worker 2 (process {workers[2].pid}) is stopped (SIGSTOP)")
    assert "after 1.5 seconds (--timeout) the run ends" in lines[0]


def ended(worker, code):
    worker = forked(os._exit, code)
    worker.join()
    return worker


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, "worker 1 left the run before its end, with exit code 0"),
        (3, "worker 1 ended with exit code 3 and gave no reason"),
    ],
)
def test_a_worker_that_leaves_is_blamed_and_not_who_lost_its_connection(code, expected, workers, tmp_path):
    """Rank 0 had failed too when the launcher looked, and its words came first."""
    store = dist.HashStore()
    report_failure(store, tmp_path, 0, RuntimeError("all_reduce failed: Connection closed by peer [127.0.0.1]:4711"))
    workers[0], workers[1] = ended(workers[0], 1), ended(workers[1], code)
    assert watched(workers, tmp_path, store=store).startswith(expected)


@pytest.mark.parametrize(
    ("code", "is_told", "expected"),
    [
        (1, True, "worker 5 failed: RuntimeError: a bug (traceback in "),
        (3, False, "worker 5 ended with exit code 3 and gave no reason"),
        (-9, False, "worker 5 was ended by SIGKILL"),
        (0, False, "worker 5 left the run before its end"),
    ],
)
def test_errors_on_another_machine_of_an_elastic_run_have_the_worker_s_number(
    code, is_told, expected, workers, tmp_path
):
    """It began to count at `--first-worker 4`."""
    store = dist.HashStore()
    if is_told:
        report_failure(store, tmp_path, 5, RuntimeError("a bug"))
    workers[1].kill()
    workers[1].join()
    if code != -signal.SIGKILL:
        workers[1] = ended(workers[1], code)
    said = watched(workers, tmp_path, store=store, first_worker=4)
    assert said.startswith(expected), said
    assert [path.name for path in tmp_path.iterdir()] == ["worker-5-error.txt"] * is_told


def test_a_worker_whose_fork_server_dies_after_the_end_of_an_elastic_run_changes_nothing(
    workers, tmp_path, monkeypatch
):
    """Its exit code was taken for signal 127."""
    monkeypatch.setattr(watch, "LAST_SECONDS", 0.1)
    store = dist.HashStore()
    for place, code in enumerate((0, 0, watch.NO_FORK_SERVER)):
        workers[place].kill()
        workers[place] = ended(workers[place], code)
        store.set(f"finished/{place}", "")
    (tmp_path / "summary.json").write_text("{}")
    requests = watch.Requests(workers)
    watch.Watch(
        workers, tmp_path, requests, store, 60.0, lambda place: pytest.fail("it was started again")
    ).until_the_end()


def test_a_folder_that_was_removed_is_named(workers, tmp_path):
    store, folder = dist.HashStore(), tmp_path / "gone"
    error = FileNotFoundError(2, "No such file or directory", b"gone/tensorboard/events.out")
    report_failure(store, folder, 0, error)
    workers[0] = ended(workers[0], 1)
    assert watched(workers, folder, store=store) == (
        "worker 0 failed: ENOENT: No such file or directory: 'gone/tensorboard/events.out'; "
        f"the run's folder {folder} was removed"
    )


def test_a_request_to_stop_blames_the_worker_that_is_stopped(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "STOP_SECONDS", 1)
    stop(workers[1])
    requests = watch.Requests(workers)
    requests.receive(signal.SIGTERM, None)
    said = watched(workers, tmp_path, requests)
    assert said.startswith(
        "worker 1 did not stop within 1 seconds of SIGTERM and was killed; it was stopped by SIGSTOP"
    ), said


def test_a_worker_that_fails_waiting_for_a_stopped_one_is_not_blamed(workers, tmp_path):
    stop(workers[2])
    workers[0] = forked(os._exit, 1)
    assert watched(workers, tmp_path).startswith("worker 2 (process ")


def test_a_worker_that_leaves_early_with_code_0_is_named(workers, tmp_path):
    store = dist.HashStore()
    store.set("finished/0", "")
    for rank in (0, 1):
        workers[rank].kill()
        workers[rank] = forked(os._exit, 0)
    assert watched(workers, tmp_path, store=store).startswith("worker 1 left the run before its end, with exit code 0")


def test_the_first_report_counts_and_needs_no_file(workers, tmp_path, monkeypatch):
    store, times, jumping = dist.HashStore(), iter((1, 2)), iter((2, 1))  # somebody sets the clock between the two
    clock = SimpleNamespace(monotonic_ns=lambda: next(times), time_ns=lambda: next(jumping))
    monkeypatch.setattr("thinwire.lab.train.start.worker.time", clock)
    full = OSError(28, "No space left on device", "runs/a/metrics.jsonl")
    report_failure(store, tmp_path / "gone", 2, full)
    report_failure(store, tmp_path, 0, RuntimeError("connection closed by peer"))
    workers[0] = forked(os._exit, 1)
    assert watched(workers, tmp_path, store=store) == (
        "worker 2 failed: ENOSPC: No space left on device: 'runs/a/metrics.jsonl'; free some space, and go on with --resume"
    )


def failing_worker(folder, told):
    store, known = dist.HashStore(), []

    @contextmanager
    def connected(*_):
        try:
            yield
        finally:
            known.append(store.check(["failed/0"]))
            time.sleep(0.01)
            report_failure(store, folder, 1, RuntimeError("connection closed by peer"))

    with (
        patch.multiple(worker, connected=connected, connected_store=lambda *_: store),
        patch.object(worker.loop, "run", side_effect=OSError(28, "No space left on device", "shared.pt")),
        patch.object(os, "_exit", side_effect=SystemExit),
        pytest.raises(SystemExit),
    ):
        worker.work(0, RunConfig("digits"), folder, 0, (), None, False)
    told.send((known, *(int(store.get(f"failed/{number}").split()[0]) for number in (0, 1))))


def test_a_worker_says_why_it_fails_before_others_lose_their_connection_to_it(tmp_path):
    received, told = multiprocessing.Pipe(duplex=False)
    process = forked(failing_worker, tmp_path, told)
    process.join(60)
    assert process.exitcode == 0 and received.poll()
    known, own, others = received.recv()
    assert known == [True] and own < others


def listening(port):
    """The addresses of this machine where a port listens, as Linux writes them."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]


def test_the_store_listens_on_the_loopback_alone():
    store = loopback_store(0)
    assert listening(store.port) == ["0100007F"]
    dist.TCPStore("127.0.0.1", store.port, is_master=False).set("met", "yes")
    assert store.get("met") == b"yes"


def test_under_a_launcher_the_store_listens_at_its_address_alone(monkeypatch, capfd):
    """It listened on all interfaces."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = free_port()
    place = Environment("srun", 0, 2, 0, 2, "localhost", port)
    store = meeting_store(place)
    assert listening(port) == ["0100007F"]
    with pytest.raises(ValueError, match=f"port {port} of localhost is taken"):
        meeting_store(place)
    del store
    port = free_port()
    here = meeting_store(replace(place, local_size=1, master_address="127.0.0.1", master_port=port))
    assert listening(port) == ["0100007F"]  # who was told this address is on this machine
    del here
    # On several nodes the others could not reach the loopback by a name.
    for name, value in replace(place, local_size=1, local_rank=0).variables().items():
        monkeypatch.setenv(name, value)
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    other = threading.Thread(target=dist.TCPStore, args=("127.0.0.1", port, 2, False), daemon=True)
    other.start()  # PyTorch waits for it
    joined = meeting_store(replace(place, local_size=1, master_port=port))
    assert set(listening(port)) <= {"0" * 8, "0" * 32}
    assert "the store listens on all interfaces, because localhost is 127.0.0.1 here" in capfd.readouterr().err
    other.join()
    del joined


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used: .*choose another, or leave --port out"):
            loopback_store(port)


def test_the_time_limit_reaches_the_strategy_and_is_no_part_of_the_result():
    config = RunConfig("digits", timeout=7.0)
    data = config.data.load()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        training = prepare(config, data, torch.device("cpu"))
        assert training.strategy.comm is training.own_comm and training.own_comm._timeout_seconds == 7.0
        training.detach()
        assert training.own_comm._closed
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="timeout must be above 0 and finite, got 0 seconds"):
        RunConfig("digits", timeout=0)


class BesideADyingServer:
    """A process whose fork server fails it so often, as one does that was killed just now."""

    def __init__(self, *errors):
        self.errors, self.is_started = list(errors), False

    def start(self):
        if self.errors:
            raise self.errors.pop(0)
        self.is_started = True


def test_a_worker_starts_once_the_end_of_a_killed_fork_server_is_seen():
    process = BesideADyingServer(ConnectionRefusedError(), EOFError("unexpected EOF"), BrokenPipeError())
    spawn._start(process)
    assert process.is_started
    with pytest.raises(EOFError):  # it is no server that is about to be replaced
        spawn._start(BesideADyingServer(*[EOFError()] * 9), seconds=0.1)
