"""Real processes, over Gloo and over our own connections: failures, subgroups, the end, and the ledger against the system."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import traffic
from helpers.cases import case
from helpers.program import programs
from helpers.spawn import meet, run_tcp, spawn

import thinwire as tw
from thinwire.comm import CommunicationError, ProcessGroupCommunicator, ProcessWorld, exit
from thinwire.comm.background import Background
from thinwire.comm.elastic import groups
from thinwire.comm.elastic.lighthouse import Asker
from thinwire.comm.exit import until_exit
from thinwire.comm.tcp.endpoint import Endpoint
from thinwire.comm.transport import connect

TRANSPORTS = pytest.mark.parametrize("run", [spawn, run_tcp])
OPERATIONS = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "exchange": lambda comm, x: comm.exchange({}, {2: x}),
    "broadcast": lambda comm, x: comm.broadcast(x, root=2),
}


def with_a_failing_peer(comm, operation: str, how: str) -> tuple[str, float]:
    """Rank 2 is killed, or is silent, while the others wait for it."""
    comm.barrier()
    meet("connected", range(3))
    if comm.rank == 2 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    if comm.rank == 2:
        store.wait(["rank 0 has failed", "rank 1 has failed"], timedelta(seconds=50))
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        OPERATIONS[operation](comm, torch.ones(100_000)).wait()
    store.set(f"rank {comm.rank} has failed", "")
    return str(caught.value), time.monotonic() - began


@TRANSPORTS
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_worker_is_an_error_everywhere_at_once(run, operation):
    results = run(3, with_a_failing_peer, operation, "killed", comm_timeout_seconds=600.0, return_errors=True)
    assert isinstance(results[2], RuntimeError)
    assert "exit code -9" in str(results[2])
    for rank, (message, seconds) in enumerate(results[:2]):
        assert message.startswith(f"rank {rank}: {operation} failed:")
        assert ".cc:" not in message  # where Gloo's source found the error
        assert seconds < 300, results  # the time limit is 600
    if operation == "exchange":
        assert all("rank 2" in message for message, _ in results[:2])


@TRANSPORTS
@pytest.mark.parametrize("operation", ["all_reduce", "exchange"])
def test_a_silent_worker_is_an_error_at_the_timeout(run, operation):
    results = run(3, with_a_failing_peer, operation, "silent", comm_timeout_seconds=2.0)
    for rank, (message, _) in enumerate(results[:2]):  # rank 2 is silent until both have failed
        assert message.startswith(f"rank {rank}: {operation} failed:")


def in_a_chain(comm) -> tuple[str, float]:
    """Rank 2 dies; rank 1 waits for it, and rank 0 for rank 1, which lives."""
    comm.barrier()
    meet("connected", range(3))
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        comm.exchange({}, {comm.rank + 1: torch.ones(4)}).wait()
    return str(caught.value), time.monotonic() - began


@TRANSPORTS
def test_an_error_travels_to_those_who_wait_for_a_living_worker(run):
    results = run(3, in_a_chain, comm_timeout_seconds=600.0, return_errors=True)
    for rank, (message, seconds) in enumerate(results[:2]):
        assert message.startswith(f"rank {rank}: exchange failed:")
        assert f"rank {rank + 1}" in message
        assert seconds < 300, results  # the time limit is 600


# ---- spawn itself ----


def sums_without_gloos_ring(comm) -> list[torch.Tensor]:
    """Issued together; half of the workers wait for the last one first."""
    mine = torch.tensor([0.1, 1e8, float("nan"), -0.0, 1e-8]) * (1 + comm.rank)
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("these need no ring")):
        whole = torch.arange(900_000).view(3, -1) + comm.rank  # in pieces
        handles = [comm.all_reduce(x) for x in (mine.clone(), whole, mine[:1].clone(), mine.half())]
        order = range(4) if comm.rank % 2 else reversed(range(4))
        found = {i: handles[i].wait() for i in order}
    assert found[1] is whole
    return [mine, *(found[i] for i in range(4))]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_short_sums_take_two_steps(size):
    """On a long line Gloo's ring takes up to W-1 times as long. Workers add in rank order, and all have the same bits."""
    of_workers = spawn(size, sums_without_gloos_ring)
    terms = [mine for mine, *_ in of_workers]
    for _, mixed, whole, single, halves in of_workers:
        assert torch.equal(mixed.view(torch.int32), functools.reduce(torch.add, terms).view(torch.int32))
        assert torch.equal(whole, size * torch.arange(900_000).view(3, -1) + sum(range(size)))
        assert torch.equal(single, functools.reduce(torch.add, terms)[:1])
        assert torch.equal(
            halves.view(torch.int16), functools.reduce(torch.add, [x.half() for x in terms]).view(torch.int16)
        )


def sums_while_rank_zero_is_busy(comm) -> float:
    handle = comm.all_reduce(torch.full((5,), 1.0 + comm.rank))
    store = dist.distributed_c10d._get_default_store()
    if comm.rank:
        handle.wait()
        store.set(f"done{comm.rank}", "yes")
    else:
        store.wait(["done1", "done2"])  # it waits for no sum meanwhile
    return handle.wait().sum().item()


def test_a_sum_of_three_goes_on_while_one_does_not_wait_for_it():
    assert spawn(3, sums_while_rank_zero_is_busy) == [30.0] * 3


def fails_on_rank_one(comm):
    if comm.rank == 1:
        raise ValueError("ratio must be in (0, 1], got 2")
    comm.barrier()


@pytest.mark.parametrize("run", [spawn, run_tcp])
def test_the_first_error_is_raised_though_those_that_followed_are_there_too(run, monkeypatch):
    """The parent looks only after rank 1's end has broken the barrier of the others."""

    def wait_for_all(connections, seconds):
        for connection in connections:
            assert wait([connection], 60)
        return wait(connections, seconds)

    monkeypatch.setattr("helpers.spawn.wait", wait_for_all)
    with pytest.raises(ValueError, match=r"^rank 1: ratio must be in \(0, 1\], got 2$"):
        run(3, fails_on_rank_one)


def sleeps_on_rank_one(comm):
    time.sleep(600 * (comm.rank == 1))


def test_workers_that_do_not_finish_are_named(monkeypatch):
    def wait_for_rank_zero(connections, seconds):
        return wait(connections[:1], 60) if len(connections) == 2 else wait(connections, seconds)

    monkeypatch.setattr("helpers.spawn.wait", wait_for_rank_zero)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        spawn(2, sleeps_on_rank_one, timeout_seconds=0.1)


# ---- groups, and the end ----


def in_subgroups(comm) -> list:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[comm.rank % 2]
    with ProcessGroupCommunicator(group) as first, ProcessGroupCommunicator(group) as second:
        assert (first.size, first.rank) == (2, comm.rank // 2)
        x, y = first.all_gather(torch.tensor([comm.rank])), second.all_reduce(torch.tensor([comm.rank]))
        root = first.broadcast(torch.tensor([comm.rank]), root=1)
        with pytest.raises(ValueError, match=f"global rank {comm.rank} is not in the group"):
            ProcessGroupCommunicator(pairs[1 - comm.rank % 2])
        return [part.item() for part in x.wait()] + [y.wait().item(), root.wait().item()]


def test_subgroups_count_ranks_of_their_own():
    assert spawn(4, in_subgroups) == [[0, 2, 2, 2], [1, 3, 4, 3], [0, 2, 2, 2], [1, 3, 4, 3]]


def sends_from_where_no_backend_is(comm) -> None:
    peer, there = 1 - comm.rank, torch.ones(2, device="meta")
    for start, devices in (
        (lambda: comm.all_reduce(there), "meta"),
        (lambda: comm.exchange({peer: torch.ones(2)}, {peer: there}), "cpu, meta"),
    ):
        with pytest.raises(ValueError, match=f"tensors on {devices} cannot be sent together"):
            start()
    assert comm.all_reduce(torch.ones(1)).wait() == 2


def test_tensors_of_another_device_are_refused_at_the_call():
    spawn(2, sends_from_where_no_backend_is)


def in_unequal_numbers_of_groups(comm) -> list:
    """Rank 0 is in more groups than rank 2 with which it makes others, some after one was destroyed."""
    dist.new_group([0, 1])
    group, before = dist.new_group([0, 2]), len(dist.distributed_c10d._world.pg_map)
    if comm.rank == 1:
        return []
    found = []
    for _ in range(2):
        with ProcessGroupCommunicator(group) as first, first.reordered([1, 0]) as second:
            found += [torch.cat(one.all_gather(torch.tensor([comm.rank])).wait()).tolist() for one in (first, second)]
    assert len(dist.distributed_c10d._world.pg_map) == before
    return found


def test_members_of_a_subgroup_may_be_in_different_numbers_of_groups():
    in_both_orders = [[0, 2], [2, 0]] * 2
    assert spawn(3, in_unequal_numbers_of_groups) == [in_both_orders, [], in_both_orders]


def constructs_alone(comm) -> str:
    group, store = dist.new_group([0, 2]), dist.distributed_c10d._get_default_store()
    if comm.rank:
        store.wait(["rank 0 has failed"], timedelta(seconds=100))
        return ""
    with pytest.raises(CommunicationError) as raised:
        ProcessGroupCommunicator(group, 0.5)
    store.set("rank 0 has failed", "")
    return str(raised.value)


def test_an_error_says_which_ranks_have_to_construct_one():
    """It was: Wait timeout."""
    said = spawn(3, constructs_alone)[0]
    assert said.startswith("global rank 0: ranks [0, 2] did not connect ("), said
    assert said.endswith("). Construct a communicator on all of them, in the same order."), said


def fails_while_another_is_silent(comm) -> float:
    """Seconds until an error has left the communicator of rank 0, whose thread waits for the size of what rank 1 has."""
    store, began = dist.distributed_c10d._get_default_store(), time.monotonic()
    if comm.rank == 1:
        store.wait(["rank 0 has failed"], timedelta(seconds=100))
        return 0.0
    with pytest.raises(ZeroDivisionError), comm:
        comm.all_gather(torch.ones(3), variable=True)
        raise ZeroDivisionError
    store.set("rank 0 has failed", "")
    return time.monotonic() - began


def test_an_error_waits_for_no_other_worker():
    assert spawn(2, fails_while_another_is_silent)[0] < 30  # half of the time limit


def abandons_while_idle(comm, transport: str) -> str:
    """What the others hear in their next operation, of a worker that has left it and still lives."""
    said = ""
    with connect(transport, timeout_seconds=60.0) as own:  # the one that ends below refers to it
        ended = connect(transport, timeout_seconds=60.0)
        if comm.rank == 1:
            ended.abandon()
        own.barrier()
        if comm.rank != 1:
            began = time.monotonic()
            with pytest.raises(
                CommunicationError, match=r"failed: .*rank \d.*(closed|hung up|reset)|lost rank 1"
            ) as raised:
                ended.all_reduce(torch.ones(4)).wait()
            said = str(raised.value)
            assert time.monotonic() - began < 30  # half of the time limit
        own.barrier()  # else a third worker might hear of the second one's end first
        if comm.rank != 1:
            ended.abandon()
        own.barrier()
    return said


@pytest.mark.parametrize("transport", ["gloo", "tcp"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_worker_that_gives_up_while_idle_is_an_error_at_once(transport, size):
    """Over Gloo, a third worker that is late hears from one that has noticed, and has hung up too."""
    said = spawn(size, abandons_while_idle, transport)
    assert any("rank 1" in line.partition("failed: ")[2] for line in said), said


def default_group_destroyed_first(comm, again: bool, end: str) -> None:
    comm.all_reduce(torch.ones(1)).wait()
    dist.destroy_process_group()
    if again:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    getattr(comm, end)()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_close_after_the_default_group_is_gone(again, end):
    spawn(2, default_group_destroyed_first, again, end)


def test_a_process_group_is_needed():
    with pytest.raises(ValueError, match=r"Call dist\.init_process_group"):
        ProcessGroupCommunicator()


def forgets_to_close(store):
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    comm = ProcessGroupCommunicator()
    handle = comm.all_reduce(torch.ones(1))
    print(comm.all_gather(torch.ones(1)).wait())
    sys.modules["forgotten"] = comm, handle  # a script's names live on until the interpreter ends


def test_a_forgotten_close_does_not_keep_the_interpreter(tmp_path):
    with programs(forgets_to_close, [(str(tmp_path / "store"),)], tmp_path) as (program,):
        assert (program.wait(150), program.stdout) == (0, "[tensor([1.])]\n"), program.stderr


def wait_over_gloo(rank, store):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm = ProcessGroupCommunicator()
    return lambda: comm.all_reduce(torch.ones(1)).wait()


def wait_in_an_elastic_round(rank, store):
    groups_of_round = groups.Groups(timedelta(seconds=60))
    groups_of_round.connect(dist.PrefixStore("round", store), rank, 2, timedelta(seconds=60))
    return lambda: groups_of_round.all_reduce(torch.ones(1))()


def send_a_slow_heartbeat(rank, store):
    def heartbeat(id, timeout):
        store.wait(["an answer"], timedelta(seconds=0.6))

    asker = Asker(SimpleNamespace(heartbeat=heartbeat), "worker 0")
    asker._until = math.inf
    return asker._beat


def compute_in_the_background(rank, store):
    """For a minute, if nothing ends it."""
    background, x = Background("computing"), torch.zeros(1000)

    def compute():
        end = time.monotonic() + 60
        while time.monotonic() < end:
            x.add_(1.0)

    return background.submit(compute).wait


def start_an_operation_that_never_starts(rank, store):
    """As over NCCL, whose first message between two workers connects them, and waits for the other one."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm = ProcessGroupCommunicator()
    return comm._issuer.submit(threading.Event().wait).wait


def finalize_for_a_second():
    sys.modules["late"] = late = types.ModuleType("late")
    late.value = type("Late", (), {"__del__": lambda self, sleep=time.sleep: sleep(1)})()


def ends_while_a_thread_waits(start, rank, folder):
    """Rank 0 ends while a thread of it waits, for rank 1 or for a while; the wait would be over while Python finalizes."""
    store = dist.FileStore(f"{folder}/store", 2)
    wait = start(rank, store)
    if rank == 1:
        store.wait(["end"])
        time.sleep(0.5)
        os._exit(0)
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    if start is wait_in_an_elastic_round:
        wait_until(lambda: sys._current_frames()[waiting.ident].f_code is Endpoint.wait.__code__)
    else:
        has_other = start in (compute_in_the_background, start_an_operation_that_never_starts)  # a thread of its own
        wait_until(lambda: exit._at_work if has_other else waiting.ident in exit._at_work)
    finalize_for_a_second()
    store.set("end", "")
    sys.exit(1)


@pytest.mark.parametrize(
    "start",
    [
        wait_over_gloo,
        wait_in_an_elastic_round,
        send_a_slow_heartbeat,
        compute_in_the_background,
        start_an_operation_that_never_starts,
    ],
)
def test_a_process_ends_with_its_own_exit_code_while_a_thread_is_at_work(start, tmp_path):
    arguments = [(start, rank, str(tmp_path)) for rank in range(2)]
    with programs(ends_while_a_thread_waits, arguments, tmp_path) as (first, second):
        assert (first.wait(150), second.wait(150)) == (1, 0), first.stderr


def ends_while_a_thread_holds_what_it_waited_for():
    class Work:
        """As PyTorch's, whose destructor comes back to Python from C++."""

        def __del__(self, say=os.write):
            say(1, b"destroyed\n")

    def wait():
        work, is_at_work = Work(), at_work.set
        with until_exit(come.set):
            is_at_work()
            come.wait()
        del work

    at_work, come = threading.Event(), threading.Event()
    threading.Thread(target=wait, daemon=True).start()
    at_work.wait()
    finalize_for_a_second()
    sys.exit(3)


def test_a_thread_that_has_waited_destroys_nothing_while_its_process_ends(tmp_path):
    """It had 0.05 seconds for that."""
    with programs(ends_while_a_thread_holds_what_it_waited_for, [()], tmp_path) as (program,):
        assert (program.wait(150), program.stdout) == (3, ""), program.stderr


def ends_while_a_thread_makes_finalizers():
    def work():
        with until_exit(stop.set):
            while not stop.is_set():
                weakref.finalize(has_begun, print).detach()
                has_begun.set()

    has_begun, stop = threading.Event(), threading.Event()
    sys.setswitchinterval(1e-6)
    sys.modules["many"] = [weakref.finalize(has_begun, abs, -1) for _ in range(10_000)]
    threading.Thread(target=work, daemon=True).start()
    has_begun.wait()
    sys.exit(3)


def test_a_process_ends_quietly_while_a_thread_makes_finalizers(tmp_path):
    """Python's own handler fails if their table changes while it goes through it."""
    with programs(ends_while_a_thread_makes_finalizers, [()], tmp_path) as (program,):
        assert (program.wait(150), program.stderr) == (3, "")


def averages_and_ends(rank, folder):
    """The script never detaches, and the thread that averages goes on."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sys.modules["attached"] = tw.attach(model, optimizer, tw.Asynchronous())
    for _ in range(3):
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
    dist.barrier()  # else a worker that is slower by a second is told, in a step, that the other has hung up
    finalize_for_a_second()


def test_a_script_may_end_while_a_thread_averages(tmp_path):
    with programs(averages_and_ends, [(rank, str(tmp_path)) for rank in range(2)], tmp_path) as (first, second):
        assert (first.wait(150), second.wait(150)) == (0, 0), first.stderr + second.stderr


def waits_for_ever(comm, folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(3600)


def is_orphaned(folder):
    ProcessWorld(2).run(waits_for_ever, folder)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_workers_end_quietly_when_their_parent_is_killed(tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    with programs(is_orphaned, [(str(pids),)], tmp_path) as (parent,):
        wait_until(lambda: len(list(pids.iterdir())) == 2)
        workers = [int(path.name) for path in pids.iterdir()]
        parent.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        assert len(workers) == 2 and parent.stderr == ""


def wait_until(holds, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# ---- the ledger against the operating system ----


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads TCP_INFO as Linux lays it out")
@TRANSPORTS
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_worker_sends_and_receives_what_its_ledger_says(run, size):
    """Gloo adds at most 144 bytes to a message.

    Connections of our own add 32 bytes to a chunk of at most 256 KiB, and 32 to acknowledge 512 KiB.
    """
    for rank, measured in enumerate(run(size, measure_all)):
        for operation, worker in zip(traffic.OPERATIONS, measured, strict=True):
            with case(operation, rank):
                for recorded, counted in zip(worker["ledger"], worker["tcp"], strict=True):
                    assert recorded <= counted <= recorded + 200 * (worker["messages"] + 3 + counted // 2**18)


def measure_all(comm):
    return [traffic.measure(comm, operation) for operation in traffic.OPERATIONS]


ISOLATED = ["unshare", "--net", "--map-root-user", "sh", "-c"]


def test_the_loopback_interface_carries_what_the_ledgers_say():
    """Within 5 %, without the headers of TCP and IP. In a network namespace, where nobody else uses the interface."""
    up = "ip link set lo up"
    if not shutil.which("unshare") or subprocess.run([*ISOLATED, up], capture_output=True).returncode:
        pytest.skip("cannot make a network namespace: needs Linux, `unshare`, `ip`, and root or user namespaces")
    command = f"{up} && exec {sys.executable} -m helpers.traffic"
    tests = Path(traffic.__file__).parents[1]
    done = subprocess.run([*ISOLATED, command], cwd=tests, timeout=400, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3 * len(traffic.OPERATIONS)
    for size, operation, recorded, counted in rows:
        assert recorded <= counted <= 1.05 * recorded, (size, operation)


def ends_its_group(comm, how: str) -> bool:
    """Whether PyTorch's group is gone when a communicator over it is closed, though garbage is not collected."""
    gc.disable()
    try:
        ours = ProcessGroupCommunicator()
        ours.all_reduce(torch.ones(3)).wait()
        group = weakref.ref(ours._group)
        comm.barrier()
        getattr(ours, how)()
        return group() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["close", "abandon"])
def test_no_group_of_pytorch_is_left_to_a_fork(how):
    """A data loader's worker that collected it waited for ever for threads which a fork does not have."""
    assert spawn(2, ends_its_group, how) == [True, True]
