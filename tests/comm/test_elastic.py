"""Workers that come, go and die within one run."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.elastic import serve, worker
from helpers.program import Program, wait_until
from torch._subclasses import FakeTensorMode

from thinwire.comm import CommunicationError, ElasticCommunicator, LocalWorld, elastic, lighthouse
from thinwire.comm.elastic_groups import wait_for_all
from thinwire.comm.lighthouse import Quorums, _meet, torchft


def test_four_workers_become_two_and_then_six(tmp_path, monkeypatch):
    """Rank 0 is killed in a round, another while the rest regroup; these go on, also when the Lighthouse restarts. Four join:
    all end with the same bits."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = Program(serve, 0, folder=tmp_path)
    wait_until(lambda: place.stdout.endswith("\n"), "a Lighthouse")
    port = int(place.stdout)
    averager = "Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback(), exchange='scatter_reduce')"

    def start(number, *dies):
        return Program(worker, f"http://127.0.0.1:{port}", number, averager, 6, 20, *dies, folder=tmp_path)

    survivors = [start(2), start(3)]  # before the others, whose state would heal them if they came late
    wait_until(lambda: survivors[0].stdout.split() == ["2"], "a round of the first two")
    victims = [start(0, 4, "round"), start(1, 3, "regroup")]
    assert [victim.wait(60) for victim in victims] == [-signal.SIGKILL] * 2
    wait_until(lambda: survivors[0].stdout.split()[-1:] == ["2"], "a round of the two that are left")
    place.kill()
    place.wait(60)
    place = Program(serve, port, folder=tmp_path)
    joined = [start(number) for number in (0, 1, 4, 5)]  # the dead come back, and two others with them
    assert [program.wait(90) for program in (*survivors, *joined)] == [0] * 6, [p.stderr for p in (*survivors, *joined)]
    facts = [json.loads(program.stdout.splitlines()[-1]) for program in (*survivors, *joined)]
    assert len({fact["model"] for fact in facts}) == 1
    for fact in facts[:2]:
        assert fact["healings"] == 0, fact  # they have kept their memory
        assert fact["aborted"] >= 2 and fact["slowest"] < 20, fact
        for victim in (0, 1):  # one that joined again and fell behind at once has lost nothing
            assert any(number == victim and norm > 0 for _, number, norm, _ in fact["losses"]), fact
        assert 2 in fact["sizes"] and fact["sizes"][-1] == 6, fact
    assert [fact["healings"] for fact in facts[2:]] == [1] * 4
    place.kill()


def test_workers_connect_anew_together_though_a_lighthouse_counts_from_the_start_again():
    """Its numbers come back: with whole connections, with those of one worker lost, and before it knows all workers."""

    def worker(comm):
        told = iter([(1, "ab"), (1, "ab"), (2, "ab"), (1, "ab"), (1, "ab"), (1, "bc"), (2, "bc")])

        def quorum(step, init_sync):
            latest = max(int(other) for other in comm.all_gather(torch.tensor([step])).wait())
            number, workers = next(told)
            facts = {"quorum_id": number, "replica_ids": list(workers), "replica_rank": comm.rank}
            return SimpleNamespace(**facts, max_step=latest, replica_world_size=2, store_address="host:1")

        quorums = Quorums(SimpleNamespace(_quorum=quorum))
        found = []
        for lost in ((), (), (0, 1), (), (0,), (), (0, 1)):
            if comm.rank in lost:
                quorums.disconnected()
            found.append((quorums._quorum(step=0).quorum_id, quorums.is_partial))
        return found

    found, other = LocalWorld(2).run(worker)
    assert found == other
    places, partial_quorums = zip(*found, strict=True)
    assert places[0] == places[1] < places[2] == places[3] < places[4] < places[5] < places[6], places
    assert partial_quorums == (False, False, False, False, False, True, False)


def test_a_quorum_with_a_worker_that_has_just_died_is_given_up_soon():
    """The one that owns the store, whose port refuses; and another one, which does not come."""
    connect = partial(dist.TCPStore, "127.0.0.1", is_master=False, wait_for_workers=False)

    def meet(port):
        began = time.monotonic()
        with pytest.raises((OSError, dist.DistError)):
            _meet(
                lambda address, limit: connect(port, timeout=limit),
                f"127.0.0.1:{port}/place",
                0,
                2,
                timedelta(seconds=1),
            )
        return time.monotonic() - began

    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert meet(closed) < 1 <= meet(store.port) < 5


def test_a_worker_may_be_silent_for_longer_than_connecting_may_take(monkeypatch):
    monkeypatch.setattr(lighthouse, "CONNECT_SECONDS", 3.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def worker(comm):
        group = torchft().reconfigurable_group(timedelta(seconds=60), lambda: None)
        group.configure(f"127.0.0.1:{store.port}/place", "worker", comm.rank, 2)
        received = torch.zeros(1)
        if comm.rank == 0:
            wait_for_all([("from rank 1", group.parent.recv([received], 1, 0))], [], timedelta(seconds=60))
        else:
            time.sleep(4)
            wait_for_all([("to rank 0", group.parent.send([torch.ones(1)], 0, 0))], [], timedelta(seconds=60))
        return float(received)

    assert LocalWorld(2).run(worker) == [1.0, 0.0]


@pytest.mark.skipif(not Path("/proc/self/net/tcp6").exists(), reason="reads Linux's list of sockets")
def test_a_worker_and_its_lighthouse_listen_on_the_chosen_interface_only(monkeypatch):
    """A worker has a store and torchft's server of a Manager, and Gloo has connected it with another one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = listening()
    place = lighthouse.Lighthouse(2)

    def worker(world):
        comm = ElasticCommunicator(place.address, world.rank, timeout_seconds=20)
        comm.open_round(comm.form_round())
        world.barrier()
        found = listening() - before
        world.barrier()
        comm.close()
        return found

    found, _ = LocalWorld(2).run(worker)
    place.close()
    assert len(found) >= 5, found  # the Lighthouse, two stores, two servers of Managers
    assert {address for address, _ in found} == {"0100007F"}, found  # 127.0.0.1


def listening():
    """The addresses, as hexadecimal numbers, and inodes of this process' sockets that wait for connections."""
    targets = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()]
    is_listening = "0A"
    return {
        (row[1].split(":")[0], row[9]) for row in rows if row[3] == is_listening and f"socket:[{row[9]}]" in targets
    }


def test_forming_a_round_ends_after_quorum_seconds_though_a_quorum_came_meanwhile(monkeypatch):
    """The second worker asks for one quorum and dies: the first cannot connect, asks again, and must not wait so long again."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = lighthouse.Lighthouse(2, "127.0.0.1")
    comm = ElasticCommunicator(place.address, min_workers=2, quorum_seconds=2.0)
    ask, asked = comm._manager.start_quorum, []

    def start_quorum(**options):
        asked.append(options)
        if len(asked) > 1:
            ask(**options)

    def connect():
        time.sleep(1.5)
        raise CommunicationError("a worker died meanwhile")

    monkeypatch.setattr(comm._manager, "start_quorum", start_quorum)
    monkeypatch.setattr(comm, "_connect", connect)
    began = time.monotonic()
    with pytest.raises(CommunicationError, match="no quorum of 2 workers within 2 seconds; see whether"):
        comm.form_round()
    assert 1.9 < time.monotonic() - began < 3.0 and len(asked) == 2
    comm.close()
    place.close()


class OnGpus:
    """In place of the process group over NCCL, which needs GPUs: notes what it is asked to do."""

    def __init__(self):
        self.places, self.done, self.error = [], [], None

    def configure(self, place, *args):
        self.places.append(place)

    def errored(self):
        return self.error

    def abort(self):
        self.done.append("abort")

    def allreduce(self, tensors, options):
        return self._work("all-reduce")

    def broadcast(self, tensors, options):
        return self._work(f"broadcast from {options.rootRank}")

    def exchange(self, sends, receives):
        return self._work(f"exchange with {sorted(sends)}")

    def _work(self, name):
        self.done.append(name)
        return SimpleNamespace(wait=lambda: None)


def test_tensors_on_gpus_have_a_group_of_their_own_whose_failures_give_up_the_round(monkeypatch):
    """Two workers over a Lighthouse; no GPU: the tensors on one have no contents."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(elastic, "require", lambda *args: None)  # there is no GPU
    monkeypatch.setattr(torchft, "nccl_group", lambda self, timeout: OnGpus())
    place = lighthouse.Lighthouse(2, "127.0.0.1")
    with FakeTensorMode():
        on_gpu = torch.empty(6, dtype=torch.uint8, device="cuda")

    def worker(world):
        comm = ElasticCommunicator(place.address, world.rank, timeout_seconds=20, backend="nccl")
        group, committed = comm._groups.nccl, []
        for error in (None, RuntimeError("a peer is gone") if world.rank else None, None):
            comm.open_round(comm.form_round())
            number = torch.tensor([world.rank])
            assert [int(other) for other in comm.all_gather(number).wait()] == [0, 1]
            assert comm.all_reduce(torch.ones(3)).wait().tolist() == [2.0] * 3
            assert comm.broadcast(number.clone(), 1).wait().tolist() == [1]
            comm._start_all_reduce(on_gpu)()
            comm._start_broadcast(on_gpu, 1)()
            comm._start_exchange({1 - comm.rank: on_gpu}, {1 - comm.rank: on_gpu})()
            group.error = error
            committed.append(comm.close_round(True))
            group.error = None
        comm.close()
        return committed, group.done, group.places

    first, second = LocalWorld(2).run(worker)
    place.close()
    for rank, (committed, done, places) in enumerate((first, second)):
        operations = ["all-reduce", "broadcast from 1", f"exchange with [{1 - rank}]"]
        assert committed == [True, False, True]
        assert [name for name in done if name != "abort"] == 3 * operations
        assert "abort" in done[2 * len(operations) :]
        assert len(set(places)) == len(places) == 2 and all(name.endswith("/gpus") for name in places), places
    assert first[2] == second[2]


def test_nccl_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="worker 3: backend 'nccl' needs a GPU"):
        ElasticCommunicator("http://127.0.0.1:1", 3, backend="nccl")


def test_only_an_elastic_communicator_has_rounds():
    def worker(comm):
        assert not comm.is_elastic and comm.in_round
        with pytest.raises(NotImplementedError, match="one round, which never ends"):
            comm.form_round()

    LocalWorld(1).run(worker)
