"""Workers that come, go and die within one run."""

from __future__ import annotations

import json
import signal
import socket
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.elastic import serve, worker
from helpers.program import Program, wait_until

from thinwire.comm import LocalWorld
from thinwire.comm.lighthouse import Quorums, _meet


def test_four_workers_become_two_and_then_six(tmp_path, monkeypatch):
    """Rank 0 is killed in a round, another while the rest regroup; these go on, also when the Lighthouse restarts. Four join:
    all end with the same bits."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    lighthouse = Program(serve, 0, folder=tmp_path)
    wait_until(lambda: lighthouse.stdout.endswith("\n"), "a Lighthouse")
    port = int(lighthouse.stdout)
    averager = "Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback(), exchange='scatter_reduce')"

    def start(number, *dies):
        return Program(worker, f"http://127.0.0.1:{port}", number, averager, 6, 20, *dies, folder=tmp_path)

    survivors = [start(2), start(3)]  # before the others, whose state would heal them if they came late
    wait_until(lambda: survivors[0].stdout.split() == ["2"], "a round of the first two")
    victims = [start(0, 4, "round"), start(1, 3, "regroup")]
    assert [victim.wait(60) for victim in victims] == [-signal.SIGKILL] * 2
    wait_until(lambda: survivors[0].stdout.split()[-1:] == ["2"], "a round of the two that are left")
    lighthouse.kill()
    lighthouse.wait(60)
    lighthouse = Program(serve, port, folder=tmp_path)
    joined = [start(number) for number in (0, 1, 4, 5)]  # the dead come back, and two others with them
    assert [program.wait(90) for program in (*survivors, *joined)] == [0] * 6, [p.stderr for p in (*survivors, *joined)]
    facts = [json.loads(program.stdout.splitlines()[-1]) for program in (*survivors, *joined)]
    assert len({fact["model"] for fact in facts}) == 1
    for fact in facts[:2]:
        assert fact["healings"] == 0, fact  # they have kept their memory
        assert fact["aborted"] >= 2 and fact["slowest"] < 10, fact
        for victim in (0, 1):  # one that joined again and fell behind at once has lost nothing
            assert any(number == victim and norm > 0 for _, number, norm, _ in fact["losses"]), fact
        assert 2 in fact["sizes"] and fact["sizes"][-1] == 6, fact
    assert [fact["healings"] for fact in facts[2:]] == [1] * 4
    lighthouse.kill()


def test_workers_connect_anew_together_though_a_lighthouse_counts_from_the_start_again():
    """Its numbers come back: once with connections that are whole, once with those of one worker lost."""

    def worker(comm):
        numbers = iter((1, 1, 2, 1, 1))

        def quorum(step, init_sync):
            latest = max(int(other) for other in comm.all_gather(torch.tensor([step])).wait())
            facts = {"quorum_id": next(numbers), "replica_ids": ["a", "b"], "replica_rank": comm.rank}
            return SimpleNamespace(**facts, max_step=latest, replica_world_size=2, store_address="host:1")

        quorums = Quorums(SimpleNamespace(_quorum=quorum))
        found = []
        for lost in ((), (), (0, 1), (), (0,)):
            if comm.rank in lost:
                quorums.disconnected()
            found.append((quorums._quorum(step=0).quorum_id, quorums.has_restarted))
        return found

    found, other = LocalWorld(2).run(worker)
    assert found == other
    places, restarts = zip(*found, strict=True)
    assert places[0] == places[1] < places[2] == places[3] < places[4], places
    assert restarts == (False, False, False, True, False)


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


def test_only_an_elastic_communicator_has_rounds():
    def worker(comm):
        assert not comm.is_elastic and comm.in_round
        with pytest.raises(NotImplementedError, match="one round, which never ends"):
            comm.form_round()

    LocalWorld(1).run(worker)
