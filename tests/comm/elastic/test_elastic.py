"""Workers that come, go and die within one run."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.elastic import serve, worker
from helpers.keys import keys_of
from helpers.listeners import listening
from helpers.program import Program, wait_until

from thinwire import Mean
from thinwire.comm import CommunicationError, ElasticCommunicator, LocalWorld
from thinwire.comm.elastic import communicator, lighthouse, quorums
from thinwire.comm.elastic.groups import Groups
from thinwire.comm.elastic.lighthouse import Asker
from thinwire.comm.elastic.meeting import Missing, met, store_at
from thinwire.comm.elastic.quorums import QuorumClient
from thinwire.comm.ledger import Traffic
from thinwire.comm.tls.store import OwnStore
from thinwire.strategy.transaction import Transaction


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_four_workers_become_two_and_then_six(is_encrypted, tmp_path, monkeypatch):
    """Rank 0 is killed in a round, another while the rest regroup; these go on, also when the Lighthouse restarts. Four join:
    all end with the same bits."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    folder = keys_of(tmp_path / "keys", "one")[0].folder if is_encrypted else None
    place = Program(serve, 0, 2, folder, folder=tmp_path)
    wait_until(lambda: place.stdout.endswith("\n"), "a Lighthouse")
    port = int(place.stdout)
    address = f"http{'s' * is_encrypted}://127.0.0.1:{port}"
    averager = "Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback(), exchange='scatter_reduce')"

    def start(number, dies_among=None, dies_in="round"):
        return Program(worker, address, number, averager, 6, 8, dies_among, dies_in, 2, folder, folder=tmp_path)

    survivors = [start(2), start(3)]  # before the others, whose state would heal them if they came late
    wait_until(lambda: survivors[0].stdout.split() == ["2"], "a round of the first two")
    victims = [start(0, 4, "round"), start(1, 3, "regroup")]
    assert [victim.wait(400) for victim in victims] == [-signal.SIGKILL] * 2
    wait_until(lambda: survivors[0].stdout.split()[-1:] == ["2"], "a round of the two that are left")
    place.kill()
    place.wait(60)
    place = Program(serve, port, 2, folder, folder=tmp_path)
    joined = [start(number) for number in (0, 1, 4, 5)]  # the dead come back, and two others with them
    assert [program.wait(400) for program in (*survivors, *joined)] == [0] * 6, [
        p.stderr for p in (*survivors, *joined)
    ]
    results = [json.loads(program.stdout.splitlines()[-1]) for program in (*survivors, *joined)]
    assert len({result["model"] for result in results}) == 1
    for result in results[:2]:
        assert result["healings"] == 0, result  # they have kept their memory
        assert result["aborted"] >= 2 and result["slowest"] < 60, result  # nobody was silent for as long as is allowed
        for victim in (0, 1):  # one that joined again and fell behind at once has lost nothing
            assert any(number == victim and norm > 0 for _, number, norm in result["losses"]), result
        assert 2 in result["sizes"] and result["sizes"][-1] == 6, result
    assert [result["healings"] for result in results[2:]] == [1] * 4
    place.kill()


def test_new_workers_begin_no_run_of_their_own_while_a_new_lighthouse_does_not_know_the_old_ones(monkeypatch):
    """Two new workers reach it first. The one that has committed rounds comes later, in a long round, and heals both."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(quorums, "RESTART_SECONDS", math.inf)
    are_early, have_formed = threading.Event(), threading.Barrier(3)
    place = lighthouse.Lighthouse(2, "127.0.0.1")

    def worker(world):
        if world.rank == 2:
            assert are_early.wait(60)
            time.sleep(0.5)  # the others ask meanwhile
        comm = ElasticCommunicator(place.address, world.rank, quorum_seconds=60)
        if world.rank == 2:
            comm.load_state_dict({"rounds": 5})
            comm._asker._client.heartbeat(comm._asker._id, 30.0)
            quorums.RESTART_SECONDS = 0.0  # enough time has passed
            time.sleep(0.5)
        are_early.set()
        members = comm.form_round()
        have_formed.wait(60)  # one that closed earlier could cut the connection that another one still makes
        comm.close()
        return members.numbers, members.healed, members.version.committed

    assert LocalWorld(3).run(worker) == [((0, 1, 2), (0, 1), 5)] * 3
    place.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_a_lighthouse_at_an_ipv6_host_is_reached_at_its_address():
    """The host in its address had no brackets, so no client found the port."""
    place = lighthouse.Lighthouse(1, "::1")
    QuorumClient(place.address, None, 20.0).heartbeat("a", 20.0)
    place.close()


class Name:
    """A place where the connections that are made lead to what it stands for then, and where `move` silences those before."""

    def __init__(self, port: int):
        self._ports, self._listener = [port], socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def move(self, port: int) -> None:
        self._ports.append(port)

    def _accept(self):
        while True:
            caller, called = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._ports[-1]))
            self._ends += caller, called  # a connection that nobody held would be closed
            for ends in ((caller, called), (called, caller)):
                threading.Thread(target=self._pass_on, args=(*ends, len(self._ports)), daemon=True).start()

    def _pass_on(self, source, target, moves):
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                if len(self._ports) == moves:
                    target.sendall(received)


def test_a_lighthouse_that_moves_while_its_host_is_silent_is_found_again(monkeypatch):
    """Nothing ends the connection with the silent host, and the next question must not go there."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(lighthouse, "HEARTBEAT_SECONDS", 1.0)
    before, after = (lighthouse.Lighthouse(1, "127.0.0.1") for _ in range(2))
    name = Name(int(before.address.rpartition(":")[2]))
    comm = ElasticCommunicator(f"http://127.0.0.1:{name.port}", min_workers=1, quorum_seconds=200.0)
    comm.open_round(comm.form_round())
    assert comm.close_round(True)
    name.move(int(after.address.rpartition(":")[2]))
    began = time.monotonic()
    comm.open_round(comm.form_round())
    assert comm.close_round(True) and time.monotonic() - began < 60
    comm.close()
    before.close(), after.close()


def test_others_do_not_wait_for_a_worker_that_missed_the_answer_of_a_lighthouse_that_ended(monkeypatch):
    """The first worker got the answer, and is in the round; the second one asks the next Lighthouse."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = lighthouse.Lighthouse(2, "127.0.0.1")

    def worker(world):
        comm = ElasticCommunicator(place.address, world.rank, timeout_seconds=100)
        comm.open_round(comm.form_round())
        assert comm.close_round(True)
        if world.rank == 1:
            client, asked = comm._asker._client, []

            def missed(*question):
                asked.append(client.quorum(*question))
                if len(asked) == 1:
                    raise ConnectionError("the Lighthouse has ended")
                return asked[-1]

            comm._asker._client = SimpleNamespace(quorum=missed, heartbeat=client.heartbeat)
        comm.open_round(comm.form_round())
        began = time.monotonic()
        try:
            comm.all_gather(torch.ones(1)).wait()
            has_all = True
        except CommunicationError:
            has_all = False
        seconds, committed = time.monotonic() - began, comm.close_round(has_all)
        if world.rank == 0:
            comm.open_round(comm.form_round())
            comm.all_gather(torch.ones(1)).wait()
            committed = comm.close_round(True)
        comm.close()
        return seconds, committed, comm.counts.aborted, comm.counts.healings

    (first, *rest), (_, *others) = LocalWorld(2).run(worker)
    place.close()
    assert first < 50 and rest == [True, 1, 0] and others == [True, 0, 0]


def test_survivors_do_not_wait_for_the_data_of_a_worker_that_is_started_again(monkeypatch):
    """The third worker dies, and its successor loads data until the others have committed without it."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = lighthouse.Lighthouse(2, "127.0.0.1", join_seconds=100.0)
    all_committed, is_dead, is_back, went_on = (
        threading.Barrier(3),
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )

    def committed(comm):
        try:
            comm.open_round(comm.form_round())
            comm.all_gather(torch.ones(1)).wait()
            return comm.close_round(True)
        except CommunicationError:
            return comm.close_round(False)

    def worker(world):
        if world.rank == 3:
            assert is_dead.wait(60)
            comm = ElasticCommunicator(place.address, 2, is_late=True)
            is_back.set()
            had_gone_on = went_on.wait(60)
            comm.close()
            return had_gone_on
        comm = ElasticCommunicator(place.address, world.rank, timeout_seconds=100)
        while not (committed(comm) and comm.size == 3):
            pass
        all_committed.wait(60)  # a worker that hangs up right after its own vote can end that of others
        if world.rank == 2:
            comm._groups.hang_up()
            is_dead.set()
        else:
            assert is_back.wait(60)
            while not (committed(comm) and comm.size == 2):
                pass
            went_on.set()
        comm.close()
        return True

    assert LocalWorld(4).run(worker) == [True] * 4
    place.close()


def test_heartbeats_follow_progress(monkeypatch):
    """They end when there was none for long, and one that is late comes at once, before the next is due."""

    class Pause(threading.Event):
        """Notes how long the thread wants to wait for the next heartbeat."""

        def wait(self, timeout):
            pauses.append(timeout)
            return super().wait(timeout)

    def wait_for_pauses(number, seconds):
        before = len(pauses)
        wait_until(lambda: pauses[before:].count(seconds) >= number, "the thread that sends heartbeats")

    now, beats, pauses = [100.0], [], []
    monkeypatch.setattr(lighthouse, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lighthouse, "time", SimpleNamespace(monotonic=lambda: now[0]))
    left = []
    told = {"heartbeat": lambda *_, **__: beats.append(now[0]), "leave": lambda id, timeout: left.append(id)}
    asker = Asker(SimpleNamespace(**told), "a")
    asker._wakened = Pause()
    asker.expect(0.3)
    wait_until(lambda: len(beats) > 2, "heartbeats")
    now[0] += 0.3
    wait_for_pauses(2, 0.01)  # the thread may have been about to send one
    before = len(beats)
    wait_for_pauses(5, 0.01)
    assert len(beats) == before
    monkeypatch.setattr(lighthouse, "BEAT_SECONDS", 1000.0)
    wait_until(lambda: pauses[-1] == 1000.0, "a long pause")
    now[0] += 1.0
    asker.expect(60.0)
    wait_until(lambda: beats[-1] == now[0], "a heartbeat")
    asker.close()
    wait_until(lambda: left == ["a"], "the word that it leaves")


def test_a_step_in_a_round_is_progress():
    """So a round of local updates may take longer than a silent worker may."""
    progress = []
    comm = SimpleNamespace(is_elastic=True, in_round=True, progressed=lambda: progress.append(1))
    transaction = Transaction(Mean(), comm, list)
    assert [transaction.begin() for _ in range(3)] == [False] * 3 and len(progress) == 3


def missing(port, rank, seconds):
    """Who is missed in a round that meets in the store at a port, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(Missing) as raised, met(f"127.0.0.1:{port}", "place", rank, 2, timedelta(seconds=seconds)):
        pass
    return raised.value.ranks, time.monotonic() - began


def test_a_quorum_with_a_worker_that_has_just_died_is_given_up_soon():
    """The one that owns the store, whose port refuses; and another one, which does not come. The error names it."""
    store = OwnStore("127.0.0.1", 0, timedelta(seconds=60), None, listens=True)
    with socket.socket() as deaf:  # nobody else gets its port, and it does not listen
        deaf.bind(("127.0.0.1", 0))
        dead, soon = missing(deaf.getsockname()[1], 1, 60)
    late, then = missing(store.port, 0, 3)
    store.close()
    assert dead == [0] and late == [1]
    assert soon < 30 and 3 <= then < 33


def test_the_owner_of_a_store_that_falls_silent_keeps_the_others_no_longer_than_the_limit():
    """The system of a process that was stopped takes connections, and nothing answers. PyTorch's store has no limit then."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        ends = threading.Timer(100, stopped.close)
        ends.start()
        silent, then = missing(stopped.getsockname()[1], 1, 1)
        ends.cancel()
    assert silent == [0] and 1 <= then < 90


def test_a_worker_may_be_silent_for_longer_than_connecting_may_take():
    store = OwnStore("127.0.0.1", 0, timedelta(seconds=60), None, listens=True)

    def worker(comm):
        group = Groups(timedelta(seconds=60))
        with store_at(f"127.0.0.1:{store.port}/place", timedelta(seconds=3)) as found:
            group.connect(found, comm.rank, 2, timedelta(seconds=3))
        received = torch.zeros(1)
        if comm.rank == 0:
            group.exchange({}, {1: received})()
        else:
            time.sleep(4)
            group.exchange({0: torch.ones(1)}, {})()
        return float(received)

    assert LocalWorld(2).run(worker) == [1.0, 0.0]


@pytest.mark.skipif(not Path("/proc/self/net/tcp6").exists(), reason="reads Linux's list of sockets")
def test_a_worker_and_its_lighthouse_listen_on_the_chosen_interface_only(monkeypatch):
    """A worker has a store, and is connected with another one."""
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
    assert len(found) >= 3, found  # the Lighthouse, two stores
    assert {address for address, _ in found} == {"0100007F"}, found  # 127.0.0.1


def test_forming_a_round_ends_after_quorum_seconds_though_a_quorum_came_meanwhile(monkeypatch):
    """The second worker asks for one quorum and dies: the first cannot connect, asks again, and must not wait so long again."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = lighthouse.Lighthouse(2, "127.0.0.1")
    comm = ElasticCommunicator(place.address, min_workers=2, quorum_seconds=100.0)
    ask, asked, now = comm._forming.claims, [], [0.0]
    monkeypatch.setattr(communicator, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def claims(seconds, *own):
        asked.append(seconds)
        return ask(seconds, *own) if len(asked) > 1 else ()

    def connect(members):
        now[0] += 99.5
        raise CommunicationError("a worker died meanwhile")

    monkeypatch.setattr(comm._forming, "claims", claims)
    monkeypatch.setattr(comm._forming, "connect", connect)
    with pytest.raises(CommunicationError, match="no quorum of 2 workers within 100 seconds; see whether"):
        comm.form_round()
    assert asked == [100.0, 0.5]
    comm.close()
    place.close()


def test_a_communicator_that_was_closed_joins_no_round(monkeypatch):
    """It took part in one, and failed only in its vote, so that the others had to give up the round."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = lighthouse.Lighthouse(1, "127.0.0.1")
    comm = ElasticCommunicator(place.address, 7, min_workers=1, quorum_seconds=5.0)
    comm.close()
    with pytest.raises(ValueError, match=r"worker 7: a round on a communicator that was closed\. Close it last"):
        comm.form_round()
    place.close()


def test_a_communicator_without_a_lighthouse_leaves_no_listener(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    before = listening()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(CommunicationError, match="does not answer"):
            ElasticCommunicator(f"http://127.0.0.1:{deaf.getsockname()[1]}", quorum_seconds=0.5)
        assert listening() <= before


def test_only_an_elastic_communicator_has_rounds():
    def worker(comm):
        assert not comm.is_elastic and comm.in_round
        with pytest.raises(NotImplementedError, match="one round, which never ends"):
            comm.form_round()

    LocalWorld(1).run(worker)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_round_has_the_operations_of_a_communicator_and_with_credentials_no_other_run_is_heard(
    is_encrypted, tmp_path, monkeypatch
):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    credentials, (other,) = [None, None], [None]
    if is_encrypted:
        credentials, (other,) = keys_of(tmp_path / "ours", "a", "b"), keys_of(tmp_path / "theirs", "a")
    place = lighthouse.Lighthouse(2, "127.0.0.1", credentials=credentials[0])
    if is_encrypted:
        line = "no connection with the Lighthouse at https://.*, because .*: its certificate is of another run; check --light"
        with pytest.raises(ValueError, match=line):
            ElasticCommunicator(place.address, 7, credentials=other)

    def worker(world):
        comm = ElasticCommunicator(place.address, world.rank, timeout_seconds=60, credentials=credentials[world.rank])
        sums = []
        for _ in range(3):
            comm.open_round(comm.form_round())
            sums.append(comm.all_reduce(torch.arange(3.0) + comm.rank).wait().tolist())
            assert [int(n) for n in comm.all_gather(torch.tensor([comm.rank])).wait()] == [0, 1]
            assert comm.broadcast(torch.tensor([comm.rank]), 1).wait().tolist() == [1]
            assert comm.close_round(True)
        comm.close()
        assert comm.ledger.collectives["all_reduce"] == Traffic(calls=3, messages=3, bytes_sent=36, bytes_received=36)
        return sums

    assert LocalWorld(2).run(worker) == [[[1.0, 3.0, 5.0]] * 3] * 2
    place.close()


def test_an_error_over_connections_of_our_own_waits_for_no_other_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    credentials, has_failed = keys_of(tmp_path / "ours", "a", "b", "c"), threading.Event()
    place = lighthouse.Lighthouse(3, "127.0.0.1", credentials=credentials[0])

    def worker(world):
        comm = ElasticCommunicator(place.address, world.rank, 3, 60, credentials=credentials[world.rank])
        comm.open_round(comm.form_round())
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError), comm:
            if world.rank == 0:
                comm.all_reduce(torch.ones(3))
                comm._issuer.drain()  # it has been started
            else:
                has_failed.wait(100)
            raise ZeroDivisionError
        has_failed.set()
        return time.monotonic() - began

    assert max(LocalWorld(3, timeout_seconds=120).run(worker)) < 30  # half of the time limit
    place.close()


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"number": "3"}, "number must be an integer from 0 to 1000000, got '3'"),
        ({"number": 10**7}, "number must be an integer from 0 to 1000000, got 10000000"),
        ({"min_workers": 0}, "min_workers must be an integer, 1 or more, got 0"),
        ({"timeout_seconds": -1}, "timeout_seconds must be above 0 and finite, got -1"),
        ({"quorum_seconds": 0}, "quorum_seconds must be above 0 and finite, got 0"),
        ({"check_every": 1.5}, "check_every must be an integer, 0 or more, got 1.5"),
    ],
)
def test_values_are_checked_before_the_lighthouse_is_asked(options, expected):
    with pytest.raises(ValueError, match=f"ElasticCommunicator: {expected}"):
        ElasticCommunicator("http://127.0.0.1:1", **options)
