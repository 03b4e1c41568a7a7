"""Runs that a launcher starts: torchrun over two hosts, restarts after a death, and what cannot be chosen here."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import netlab
import psutil
import pytest
import torch
import torch.distributed as dist
from helpers.command import started, thinwire
from helpers.held_run import held_at
from helpers.lab import needs_lab
from helpers.program import Program, wait_until, workers_of

from thinwire.comm import CommunicationError, notice
from thinwire.lab.train import RunConfig, WorkerError, train
from thinwire.lab.train.run.interrupt import Interrupted
from thinwire.lab.train.shared_errors import SharedError
from thinwire.lab.train.start import connect, elastic_tasks, launch, presence, spawn
from thinwire.lab.train.start.environment import Environment
from thinwire.lab.train.start.presence import Presence
from thinwire.lab.train.start.worker import failure
from thinwire.lab.train.step import training

THINWIRE = ("--no-python", sys.executable, "-m", "thinwire")
TRAIN = (
    "train",
    "digits",
    "--max-steps",
    "30",
    "--log-every",
    "3",
    "--strategy",
    "Gradients(Mean(TopK(0.01), ErrorFeedback()))",
)


def ended(processes: list[Program]) -> list[str]:
    """What they say; all must end well."""
    said = ["\n".join(process.communicate(400)) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


# torchrun in the network namespace that its first argument is, as `ip netns exec` would start it.
TORCHRUN_THERE = """
import ctypes, os, runpy, sys
CLONE_NEWNET = 0x40000000
assert ctypes.CDLL(None).setns(os.open(sys.argv[1], os.O_RDONLY), CLONE_NEWNET) == 0
sys.argv = sys.argv[1:]
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""


def final(folder: Path) -> dict[str, float]:
    return json.loads((folder / "summary.json").read_text())["final"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result on two workers, by a run of this machine's own."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = thinwire(*TRAIN, "--workers", "2", "--name", "alone", cwd=folder)
    assert done.returncode == 0, done.stderr
    return final(folder / "runs" / "alone")


def test_an_absurd_number_of_workers_starts_none(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "spawn", Mock())
    with pytest.raises(
        ValueError, match="starts at most 1024 workers, got 1000000000; start more by torchrun, srun or"
    ):
        train(RunConfig("digits", workers=10**9, output=tmp_path))
    assert not list(tmp_path.iterdir())


@needs_lab("two nodes are")
def test_two_hosts_train_as_one_under_torchrun(undisturbed, tmp_path):
    with ExitStack() as stack:
        lab = stack.enter_context(netlab.Lab(hosts=2, line="1gbit"))
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.address(0)}:29400", "--rdzv-id", "two")
        agents = []
        for host, namespace in enumerate(lab.namespaces):
            # The name of this machine, which both hosts have, leads to neither.
            own = ("--local-addr", lab.address(host), "--rdzv-conf", f"is_host={int(host == 0)}")
            torchrun = ["-c", TORCHRUN_THERE, f"/run/netns/{namespace}", "--nnodes", "2", "--nproc-per-node", "1"]
            command = [*THINWIRE, *TRAIN, "--name", "two", "--interface", netlab.INTERFACE]
            agents.append(stack.enter_context(started([*torchrun, *rendezvous, *own, *command], tmp_path)))
        said = ended(agents)
    assert ["runs/two" in words for words in said].count(True) == 1  # rank 0 alone reports
    assert final(tmp_path / "runs" / "two") == undisturbed


# Prints after how many seconds the workers of a launcher have given up Gloo, once both are there.
CONNECTS = """
import os, sys, time
from thinwire.comm.store import gathering
from thinwire.lab.bench.workers import joined, meeting
store = meeting(timeout_seconds=120.0)
gathering(store, int(os.environ["RANK"]), 2, 120.0)(None)
began = time.monotonic()
try:
    with joined(store, transport="gloo", timeout_seconds=float(sys.argv[1])):
        raise AssertionError("it has connected")
except RuntimeError as error:
    print(f"gave up after {time.monotonic() - began:.1f} s: {str(error).splitlines()[0]}")
"""


@needs_lab("filters are")
def test_behind_a_filter_that_drops_packets_gloo_takes_one_time_limit(capfd):
    """It waits five limits of a group for a connection. The store is reached by another interface."""
    limit = 6.0
    with netlab.Lab(hosts=2, line="1gbit") as lab:
        for host, namespace in enumerate(lab.namespaces):
            for command in (
                "link add hole type veth peer name nowhere",
                "link set nowhere up",
                "link set hole up",
                f"address add 198.19.0.{host + 1}/24 dev hole",
                f"neighbour add 198.19.0.{2 - host} lladdr 02:00:00:00:00:01 nud permanent dev hole",
            ):
                subprocess.run(["ip", "-n", namespace, *command.split()], check=True)
        env = {"GLOO_SOCKET_IFNAME": "hole", "LOCAL_RANK": "0"}
        assert lab.run([sys.executable, "-c", CONNECTS, str(limit)], env=env) == 0
    said = capfd.readouterr().out
    gave_up = [float(seconds) for seconds in re.findall(r"gave up after ([\d.]+) s: .*Connect timeout", said)]
    assert len(gave_up) == 2 and all(limit - 1 < seconds < 3 * limit for seconds in gave_up), said


def test_a_worker_that_is_killed_at_any_step_changes_nothing(undisturbed, tmp_path):
    chosen = random.Random(2024)
    resume = ("--name", "elastic", "--resume", "--checkpoint-every", "4")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    pipe = held_at(tmp_path / "runs" / "elastic", step=28)
    with started([*launcher, *THINWIRE, *TRAIN, *resume], tmp_path) as torchrun:
        kill_a_worker(torchrun.pid, tmp_path / "runs" / "elastic" / "metrics.jsonl", chosen.randrange(1, 7), chosen)
        pipe.unlink()
        (said,) = ended([torchrun])
    assert "SIGKILL" in said or "exitcode: -9" in said.lower() or "Signal 9" in said, said
    assert final(tmp_path / "runs" / "elastic") == undisturbed


def kill_a_worker(pid: int, metrics: Path, rows: int, chosen: random.Random) -> None:
    """SIGKILL to a worker once the run has left so many rows, which is at a step that nobody knows."""
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= rows, f"{rows} rows", poll=0.001)
    os.kill(chosen.choice(workers_of(pid)), signal.SIGKILL)


def test_under_torchrun_the_error_names_the_worker_that_is_stopped(tmp_path):
    """The others said "Timed out waiting 2000ms for recv operation to complete", and not for whom."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    options = ("train", "digits", "--epochs", "500", "--log-every", "1", "--timeout", "5", "--name", "stopped")
    with started([*torchrun, *THINWIRE, *options], tmp_path) as process:
        metrics = tmp_path / "runs" / "stopped" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, "three rows")
        stopped = workers_of(process.pid)[-1]  # they are started in the order of ranks
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_until(lambda: "no sign of life" in process.stderr, "the error")
            said = process.stderr
        finally:
            os.kill(stopped, signal.SIGKILL)  # torchrun would do so after half a minute
    assert "no sign of life for 4 seconds from worker 2: killed, stopped or cut off" in said, said


class Living:
    """Workers that count in a store. Who waits for some beats waits until each of these has counted, however long that takes.

    Attributes:
        slept: how long who waited wanted to.
    """

    def __init__(self, monkeypatch):
        self._store, self._ranks, self.slept = dist.HashStore(), set(), []
        monkeypatch.setattr(presence, "time", SimpleNamespace(sleep=self._sleep))
        monkeypatch.setattr(presence, "ANSWER_BEATS", 10_000)

    @contextmanager
    def __call__(self, rank, size):
        with Presence(self._store, rank, size, beat_seconds=0.05) as own:
            self._ranks.add(rank)
            yield own
            self._ranks.remove(rank)
        own._thread.join()  # it may have been about to count

    def _sleep(self, seconds):
        self.slept.append(seconds)
        before = self._counts()
        wait_until(lambda: all(self._counts()[rank] != count for rank, count in before.items()), "counts of the living")

    def _counts(self):
        keys = {rank: f"present/{rank}" for rank in self._ranks}
        return {rank: self._store.get(key) if self._store.check([key]) else b"" for rank, key in keys.items()}


@pytest.fixture
def living(monkeypatch):
    return Living(monkeypatch)


def test_who_failed_first_is_blamed_and_else_who_is_silent(living):
    lost = CommunicationError("all_reduce failed")
    with living(0, 3) as own:
        with living(1, 3):
            assert own.silent() == [2]
            assert str(own.explained(lost)).endswith("from worker 2: killed, stopped or cut off")
            with living(2, 3) as third:
                assert own.explained(lost) is lost
                third.report("MemoryError: no room")
        assert str(own.explained(lost)) == "all_reduce failed; worker 2 failed first: MemoryError: no room"


def test_a_worker_that_ended_because_another_was_cut_off_is_not_blamed(living):
    """Rank 1 looks after rank 2 has ended; it blamed both."""
    lost = CommunicationError("all_reduce failed")
    cut_off = "no sign of life for 0.2 seconds from worker 0: killed, stopped or cut off"
    with living(1, 3) as own:
        with living(2, 3) as other:
            assert str(other.explained(lost)) == f"all_reduce failed; {cut_off}"
        assert str(own.explained(lost)) == f"all_reduce failed; {cut_off}"
        with living(0, 3):  # it is back, and 2 is not
            assert str(own.explained(lost)) == f"all_reduce failed; worker 2 ended first: {cut_off}"


def test_rank_0_keeps_the_store_until_others_have_looked(living):
    lost = CommunicationError("all_reduce failed")
    with living(0, 2) as own, living(1, 2):
        assert own.explained(lost) is lost
    assert living.slept == [4 * 0.05, 4 * 0.05]


def test_a_store_that_does_not_answer_means_that_this_worker_is_cut_off(monkeypatch):
    """It waited for the store for many minutes."""
    own, mended = Presence(dist.HashStore(), 0, 2, beat_seconds=0.01), threading.Event()

    def read():
        mended.wait()
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(own, "_read", read)
    said = str(own.explained(CommunicationError("all_reduce failed")))
    mended.set()
    assert said.startswith(
        "all_reduce failed; the store has not answered for 0.15 seconds: this worker is cut off from "
    )


@pytest.mark.parametrize("size", [2, 40])
def test_who_is_gone_is_found_in_as_many_questions_however_many_workers(size, monkeypatch):
    """Each worker's keys were asked for one by one: on a long line rank 0 had ended before, with the store."""
    store, asked = dist.HashStore(), []
    for rank in range(size):
        store.set(f"present/{rank}", '[1, "", ""]')
    names = ("check", "get", "multi_get", "compare_set", "add", "wait")
    questions = {name: lambda *args, name=name: asked.append(name) or getattr(store, name)(*args) for name in names}
    monkeypatch.setattr(presence, "time", SimpleNamespace(sleep=lambda seconds: None))
    own = Presence(SimpleNamespace(set=store.set, **questions), 1, size)
    assert own.silent() == [rank for rank in range(size) if rank != 1]
    assert asked == ["check", "multi_get"] * 2


def test_errors_reach_the_other_workers_through_the_store():
    store = dist.HashStore()
    with pytest.raises(MemoryError), connect.blaming(Presence(store, 1, 2)):
        raise MemoryError("no room")
    with pytest.raises(CommunicationError, match="lost; worker 1 failed first: MemoryError: no room"):
        with connect.blaming(Presence(store, 0, 2, beat_seconds=0.2)):
            raise CommunicationError("lost")


def test_an_interface_that_is_not_there_is_one_line_that_lists_those_that_are(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(ValueError, match=r"has no network interface 'ib7'; choose --interface among .*\blo"):
        train(RunConfig("digits", interface="ib7", output=tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_job_of_an_elastic_run_is_requeued_by_its_first_task(tmp_path, monkeypatch):
    """It was not: only runs of a fixed number of workers were."""
    requeued, stop = [], Interrupted(signal.SIGUSR1, tmp_path / "checkpoint")

    def stopped(*_, **__):
        raise stop

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(launch, "requeue", lambda: requeued.append("job") or "")
    monkeypatch.setattr(elastic_tasks, "_lighthouse", lambda *_: nullcontext("http://here"))
    monkeypatch.setattr(elastic_tasks, "communicator", lambda *_: nullcontext())
    monkeypatch.setattr(elastic_tasks.loop, "run", stopped)
    for rank in range(2):
        place = Environment("srun", rank, 2, rank, 2, "127.0.0.1", 0)
        monkeypatch.setattr(launch, "set_variables", lambda place=place: place)
        with pytest.raises(Interrupted):
            train(RunConfig("digits", elastic=True, requeue=True, resume=True, name="run", output=tmp_path))
    assert requeued == ["job"]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("no such label"), (WorkerError, "worker 1 failed: no such label")),  # of this task alone
        (SharedError("other data"), (SharedError, "other data")),  # of all tasks: the first one tells it
    ],
)
def test_a_task_of_an_elastic_run_tells_what_it_alone_has_found(raised, expected, tmp_path, monkeypatch):
    """A ValueError of a task was taken for one of all, so that only the first task of its machine would have told it."""
    waited: list[float] = []

    def failing(*_, **__):
        raise raised

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(elastic_tasks, "_lighthouse", lambda *_: nullcontext("http://here"))
    monkeypatch.setattr(elastic_tasks, "communicator", lambda *_: nullcontext())
    monkeypatch.setattr(elastic_tasks.loop, "run", failing)
    monkeypatch.setattr(elastic_tasks.time, "sleep", waited.append)
    monkeypatch.setattr(launch, "set_variables", lambda: Environment("srun", 1, 2, 1, 2, "127.0.0.1", 0))
    with pytest.raises(expected[0], match=expected[1]):
        train(RunConfig("digits", elastic=True, resume=True, name="run", output=tmp_path))
    assert waited == [elastic_tasks.TELLING_SECONDS] * isinstance(raised, SharedError)


@pytest.mark.parametrize(("agents_store", "alone"), [("True", False), ("False", True)])
def test_a_task_that_is_started_again_finds_the_lighthouse_that_is_there(agents_store, alone, monkeypatch):
    """torchrun starts all tasks again, and its store had the address of the Lighthouse before; else the store is task 0's."""
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents_store)
    monkeypatch.setattr(elastic_tasks, "meeting_store", lambda *_: store)
    monkeypatch.setattr(elastic_tasks, "lighthouse_of", lambda *_: nullcontext("http://new"))

    def address(rank: int) -> str:
        with elastic_tasks._lighthouse(
            RunConfig("digits", elastic=True), Environment("", rank, 2, rank, 2, "here", 1)
        ) as found:
            return found

    store.set(elastic_tasks.KEY, "http://new" if alone else "http://old")
    with ThreadPoolExecutor(2) as pool:
        again = [pool.submit(address, rank) for rank in ((1,) if alone else (1, 0))]
        assert [one.result(400) for one in again] == ["http://new"] * len(again)


def test_an_interface_is_for_gloo_and_nccl(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    connect.choose_interface("lo", one_node=False)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("name", ["init_process_group", "new_group"])
def test_gloo_that_takes_the_wrong_address_is_one_line_with_the_remedy(name, monkeypatch, tmp_path):
    """The host's own name may stand for the loopback, and Gloo takes that."""

    def fail(*arguments, **options):
        raise RuntimeError(
            "Gloo connectFullMesh failed with [/gloo/transport/tcp/pair.cc:152] timed out: [127.0.1.1]:7600"
        )

    monkeypatch.setattr(connect.dist, name, fail)
    place = Environment("srun", 0, 1, 0, 1, "127.0.0.1", 29500)
    remedy = r"\(.* timed out: \[127\.0\.1\.1\]:7600\); .* with --interface$"
    try:
        with pytest.raises(CommunicationError, match=remedy):
            with connect.connected(RunConfig("digits", transport="gloo", output=tmp_path), place, dist.HashStore()):
                pass
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_gloo_takes_the_interface_that_reaches_the_place_of_meeting(monkeypatch):
    """By itself it takes the address of the machine's own name, which is often the loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    addresses = {"lo": ["127.0.0.1"], "eth3": ["10.7.1.2", "10.7.1.9", "fe80::1"], "eth4": ["2001:db8::7"]}
    addresses["eth5"] = ["10.8.1.2", "2001:db8::8"]
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {n: [Mock(address=a) for a in of] for n, of in addresses.items()}
    )
    for own, chosen in (
        ({None: "10.7.1.2"}, "eth3"),
        ({None: "2001:db8::7"}, "eth4"),
        ({None: "2001:db8::8"}, "eth5"),  # where workers meet at a name with IPv6 addresses, all took the loopback
        ({None: "10.7.1.9"}, None),  # another address of an interface, whose name stands for the first one
        ({None: "127.0.1.1", connect.ELSEWHERE: "10.7.1.2"}, "eth3"),  # worker 0, whose own name is the loopback
        ({None: "127.0.1.1", connect.ELSEWHERE: "127.0.0.1"}, None),
    ):
        monkeypatch.setattr(connect, "own_address", lambda meeting, own=own: (socket.AF_INET, own[meeting]))
        connect.choose_interface(None, one_node=False)
        assert os.environ.pop("GLOO_SOCKET_IFNAME", None) == chosen


def test_a_worker_that_cannot_connect_after_it_has_met_the_others_says_so(monkeypatch, tmp_path, caplog):
    """Behind a firewall that drops packets it was silent for two minutes, or ten."""
    caplog.set_level("INFO")
    monkeypatch.setattr(notice, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(connect, "Presence", partial(Presence, beat_seconds=0.2))
    monkeypatch.setattr(connect, "meeting_store", lambda *_: dist.HashStore())

    def fail(*arguments, **options):
        wait_until(lambda: "for at most 120 seconds; a firewall may stand between them" in caplog.text, "the notice")
        raise RuntimeError("timed out")

    monkeypatch.setattr(connect.dist, "init_process_group", fail)
    place = Environment("srun", 0, 1, 0, 1, "127.0.0.1", 29500)
    with pytest.raises(CommunicationError, match="the workers did not connect"):
        with connect.connected(RunConfig("digits", transport="gloo", output=tmp_path), place):
            pass


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("can't start new thread", "limit (ulimit -u)"),  # Python's words
        ("Resource temporarily unavailable", "limit (ulimit -u)"),  # those of C++
        ("Connection closed by peer", "with --interface"),
    ],
)
def test_where_no_more_threads_start_the_remedy_is_no_interface(reason, remedy, monkeypatch, tmp_path):
    monkeypatch.setattr(connect.dist, "init_process_group", Mock(side_effect=RuntimeError(reason)))
    place = Environment("thinwire", 0, 1, 0, 1, "127.0.0.1", 29500)
    with pytest.raises(CommunicationError) as refusal:
        with connect.connected(RunConfig("digits", transport="gloo", output=tmp_path), place, dist.HashStore()):
            pass
    for said in (str(refusal.value), failure(0, refusal.value)):
        assert f"the workers did not connect ({reason}); see whether" in said and said.count(remedy) == 1
        assert ("ulimit" in said) != ("--interface" in said)


def test_a_thread_or_worker_that_the_system_does_not_start_is_said_with_the_remedy(monkeypatch, tmp_path):
    said = failure(1, RuntimeError("can't start new thread"))
    assert (
        said.startswith("worker 1 failed: RuntimeError: can't start new thread; see whether") and "(ulimit -u)" in said
    )
    for error in (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), EOFError("unexpected EOF")):
        monkeypatch.setattr(spawn, "_start", Mock(side_effect=error))
        with pytest.raises(WorkerError, match=r"worker 0 does not start \(.*\(ulimit -u\), or start fewer workers"):
            spawn.spawn(RunConfig("digits", workers=1, output=tmp_path), tmp_path)


@pytest.mark.parametrize(("size", "whom"), [(1, "its own store"), (2, "worker 1"), (3, "the other 2 workers")])
def test_worker_0_waits_for_nobody_that_there_is_not(size, whom):
    """Alone, it waited for worker 1."""
    said = connect.awaited(Environment("srun", 0, size, 0, 1, "node9", 29500), None)
    assert said == f"worker 0 waits for {whom} at node9:29500, for at most 120 seconds"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_place_whose_name_does_not_resolve_is_said_at_once(rank, monkeypatch, caplog):
    """Worker 0 printed the stack of C++ for minutes, and the others waited for it without a word of the name."""
    unknown = Mock(side_effect=socket.gaierror(-3, "Temporary failure in name resolution"))
    monkeypatch.setattr(connect.socket, "getaddrinfo", unknown)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = Environment("srun", rank, 2, 0, 1, "node9", 29500)
    wrong = (
        r"node9, where workers meet, did not resolve on this machine .* \(Temporary failure in name resolution\); check"
    )
    with pytest.raises(CommunicationError, match=wrong):
        connect.meeting_store(place, seconds=0.3)
    assert "node9, where workers meet, does not resolve on this machine; it is tried again" in caplog.text
    assert unknown.call_count > 1


def test_a_meeting_place_that_does_not_lead_to_worker_0_is_named(monkeypatch):
    """Worker 0 had the address of another machine, and said after two minutes: "Ping failed, invalid value"."""

    def fail(*_, **__):
        raise dist.DistNetworkError("Ping failed, invalid value returned from server")
        yield

    monkeypatch.setattr(dist, "rendezvous", fail)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    wrong = r"worker 0 does not reach the store at 192.0.2.1:29500 \(Ping failed, .*\); MASTER_ADDR and MASTER_PORT must lead"
    with pytest.raises(CommunicationError, match=wrong):
        connect.meeting_store(Environment("srun", 0, 2, 0, 1, "192.0.2.1", 29500))


@pytest.mark.parametrize(("interface", "place"), [(None, "127.0.0.1"), ("eth3", "10.7.1.2")])
def test_other_machines_reach_the_lighthouse_if_the_interface_to_them_is_named(interface, place, monkeypatch, tmp_path):
    begun = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(spawn, "own_address", lambda interface: (socket.AF_INET, "10.7.1.2"))
    monkeypatch.setattr(spawn, "lighthouse_of", begun)
    config = RunConfig("digits", elastic=True, interface=interface)
    with pytest.raises(InterruptedError):
        spawn.spawn(config, tmp_path)
    begun.assert_called_once_with(config, place, 0)


@pytest.mark.parametrize("one_node", [True, False])
def test_only_workers_of_one_node_take_the_loopback_by_themselves(one_node, monkeypatch):
    monkeypatch.setattr(connect, "_reaching_interface", lambda: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    connect.choose_interface(None, one_node)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    connect.choose_interface(None, one_node)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("lo" if one_node else None)


@pytest.mark.skipif(dist.is_mpi_available(), reason="this PyTorch has MPI")
def test_mpi_needs_a_pytorch_that_has_it(tmp_path):
    with pytest.raises(ValueError, match="built with MPI, and this one was not; choose --transport gloo"):
        train(RunConfig("digits", transport="mpi", output=tmp_path))


def test_a_worker_that_comes_to_the_store_of_another_run_is_told_so():
    """It was told of a key that it had waited for."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(
        CommunicationError, match=r"worker 0 did not greet worker 1 \(.*\); .* are those of another run$"
    ):
        connect.fresh(store, 1, 2)


def test_a_store_that_holds_an_earlier_start_gives_every_start_a_part_of_its_own():
    """Whoever comes late, or died before it came, in the start before."""
    shared = dist.HashStore()
    shared.set("greeting/1", "of one who is gone")
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            late = [pool.submit(connect.fresh, shared, rank, 3) for rank in (0, 2)]
            time.sleep(0.1)
            stores = [late[0], pool.submit(connect.fresh, shared, 1, 3), late[1]]
            first, *others = [future.result(400) for future in stores]
        assert not first.check(["address"])
        first.set("address", "new")
        assert [store.get("address") for store in others] == [b"new", b"new"]


GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.mark.parametrize(
    "asked, device, others, expected",
    [
        ("auto", CPU, ["GPU-1", False], "gloo"),
        ("auto", GPU, ["GPU-1", False], "cpu:gloo,cuda:nccl"),
        ("auto", GPU, ["GPU-0", False], "gloo"),  # two workers share it
        ("auto", GPU, [None, True], "gloo"),  # the other worker has none
        ("auto", CPU, [None, True], "tcp"),
        ("auto", CPU, [None, False], "gloo"),  # the other worker has no extension, or is at its loopback
        ("gloo", CPU, [None, True], "gloo"),
        ("gloo", GPU, ["GPU-1", False], "gloo"),
        ("nccl", GPU, ["GPU-1", False], "cpu:gloo,cuda:nccl"),
        ("nccl", GPU, [None, True], "rank 1 has none"),
        ("nccl", CPU, ["GPU-1", False], "rank 0 has none"),
        ("tcp", CPU, [None, False], "tcp"),
        ("tcp", GPU, ["GPU-1", False], "transport 'tcp' sends from main memory, got device cuda:0"),
    ],
)
def test_nccl_is_for_workers_who_all_have_a_gpu_of_their_own(asked, device, others, expected, monkeypatch):
    """A launcher may show each worker its own GPU alone: it is cuda:0 to all of them, and they are several."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(connect, "has_own_connections", lambda: True)
    environment, store = Environment("srun", 0, 2, 0, 2, "127.0.0.1", 29500), dist.HashStore()
    store.set("thinwire/1/1", json.dumps(others))  # what the other worker has
    try:
        assert connect.choose_backend(RunConfig("digits", transport=asked), device, environment, store) == expected
    except ValueError as error:
        assert expected in str(error)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_over_our_own_connections_no_process_group_is_made(transport, monkeypatch, tmp_path):
    """Five were: each costs several round trips for every worker, which took ten seconds for four on a long line."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(connect, "has_own_connections", lambda: True)
    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, name, Mock(side_effect=AssertionError(name)))
    config, store = RunConfig("digits", workers=2, transport=transport, output=tmp_path), dist.HashStore()

    def worker(rank: int) -> float:
        place = Environment("srun", rank, 2, rank, 2, "127.0.0.1", 29500)
        with (
            connect.connected(config, place, store) as comm,
            training._communicator(config, CPU, comm, None) as own,
        ):
            return own.all_reduce(torch.ones(1)).wait().item()

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(worker, range(2))] == [2.0, 2.0]


def test_a_worker_that_does_not_connect_is_named(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(connect, "SECONDS", 0.1)
    with pytest.raises(CommunicationError, match=r"ranks \[1\] did not come to the store within 0.1 seconds"):
        place = Environment("thinwire", 0, 2, 0, 2, "127.0.0.1", 0)
        connect.choose_backend(RunConfig("digits", transport="gloo"), CPU, place, store)


def test_a_worker_without_its_gpu_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(
        ValueError, match="^transport 'nccl' needs a GPU of its own for every worker, and rank 0 has none"
    ):
        train(RunConfig("digits", workers=2, transport="nccl", output=tmp_path))
