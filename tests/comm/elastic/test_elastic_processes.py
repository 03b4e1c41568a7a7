"""Workers of several processes in elastic rounds: all processes of a worker take part in a round, or none does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from thinwire import Mean
from thinwire.comm import CommunicationError, ElasticCommunicator, LeftOut, Lighthouse, LocalWorld
from thinwire.comm.elastic import communicator, forming
from thinwire.comm.elastic.replica import Processes
from thinwire.strategy.transaction import Transaction

SECONDS = 120.0


@pytest.fixture
def run(monkeypatch):
    """Runs `fn(comm, number)` in a thread for each process; `sizes` has the number of processes of each worker."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(communicator, "ProcessGroupCommunicator", lambda world, seconds: world)
    monkeypatch.setattr(forming, "CONNECT_SECONDS", SECONDS)
    place = Lighthouse(2, "127.0.0.1")

    def run(fn, sizes=(2, 2)):
        ended = threading.Barrier(sum(sizes))

        def process(world, number):
            comm = ElasticCommunicator(place.address, number, timeout_seconds=SECONDS / 4, replica=world)
            try:
                return fn(comm, number)
            finally:
                ended.wait(SECONDS)
                comm.close()

        with ThreadPoolExecutor(len(sizes)) as pool:
            return list(
                pool.map(lambda number: LocalWorld(sizes[number], SECONDS).run(process, number), range(len(sizes)))
            )

    yield run
    place.close()


def sum_rounds(comm, number, rounds, do=lambda taken: None):
    """Rounds that add up the numbers of process and worker; returns their sum over all rounds, and what was counted."""
    state = {"sum": torch.tensor([float(number)])}
    comm.share("state", lambda: state, state.update)
    transaction = Transaction(Mean(), comm, list)
    taken = 0
    while comm.counts.committed < rounds:
        transaction.begin()
        do(taken)
        taken += 1
        try:
            own = comm.all_reduce(torch.tensor([10.0 * comm._processes.rank + number])).wait()
            has_all = True
        except CommunicationError:
            has_all = False
        if transaction.end(has_all):
            state["sum"] = state["sum"] + own
    return float(state["sum"]), comm.counts.aborted, comm.counts.healings


def test_process_r_of_each_worker_meets_process_r_of_the_others(run):
    """Worker 0's state is the first one's: 0 for both of its processes. Each round adds 0 + 1, or 10 + 11."""
    found = run(lambda comm, number: sum_rounds(comm, number, 3))
    assert found == [[(3.0, 0, 0), (63.0, 0, 0)]] * 2


@pytest.mark.parametrize("where", ["connect", "heal", "finish"])
def test_what_one_process_cannot_do_while_a_round_forms_no_process_of_its_worker_has_done(run, where):
    """Process 1 of worker 1 fails once. Both workers give up what they had begun, and form the round again."""

    def worker(comm, number):
        target = {"connect": comm._groups, "heal": comm, "finish": comm._healing}[where]
        original, failures = getattr(target, where), [True] * (number == 1 and comm._processes.rank == 1)

        def fails_once(*args):
            if failures and where != "connect":
                failures.pop()
                raise CommunicationError("by order")
            result = original(*args)
            if failures:  # the others are connected with it, and need not wait until they give up
                failures.pop()
                raise CommunicationError("by order")
            return result

        setattr(target, where, fails_once)
        return sum_rounds(comm, number, 2)

    found = run(worker)
    assert [[total for total, *_ in one] for one in found] == [[2.0, 42.0]] * 2


def test_no_process_commits_what_one_of_them_has_not(run):
    def worker(comm, number):
        def fail(taken):
            if taken == 1 and number == 1 and comm._processes.rank == 1:
                comm._error = CommunicationError("by order")
                comm._groups.hang_up()

        return sum_rounds(comm, number, 3, fail)

    assert run(worker) == [[(3.0, 1, 0), (63.0, 1, 0)]] * 2


def test_a_worker_of_which_one_process_missed_the_result_of_a_vote_is_healed_whole(run):
    """The other worker commits that round; process 0 of this one had the result too, and does not."""

    def worker(comm, number):
        vote = comm._vote

        def missed(norm):
            committed = vote(norm)
            if number == 1 and comm._processes.rank == 1 and comm.counts.committed == 1 and not comm.counts.healings:
                raise CommunicationError("by order")
            return committed

        comm._vote = missed
        return sum_rounds(comm, number, 4)

    found = run(worker)
    assert [[total for total, *_ in one] for one in found] == [[4.0, 84.0]] * 2
    assert [[healings for *_, healings in one] for one in found] == [[0, 0], [1, 1]]


def test_a_worker_whose_processes_have_different_rounds_has_no_state(run):
    """As from checkpoints of which one is older. The other worker heals both processes."""

    def worker(comm, number):
        comm.load_state_dict({"rounds": 5 + (number == 1 and comm._processes.rank)})
        return sum_rounds(comm, number, 7)

    found = run(worker)
    assert [[total for total, *_ in one] for one in found] == [[2.0, 42.0]] * 2
    assert [[healings for *_, healings in one] for one in found] == [[0, 0], [1, 1]]


def test_a_worker_of_another_number_of_processes_is_refused(run):
    def worker(comm, number):
        if number < 2:
            assert is_known.wait(SECONDS)  # then the first quorum waits for worker 2
            return sum_rounds(comm, number, 1)[0]
        if comm._processes.rank == 0:
            comm._asker._client.heartbeat(comm._asker._id, 30.0)
            is_known.set()
        with pytest.raises(
            ValueError, match=r"worker 2 is refused.* of worker 0: processes of a worker: 3 here, 2 there$"
        ):
            comm.form_round()
        return comm._processes.rank

    is_known = threading.Event()
    assert run(worker, (2, 2, 3)) == [[1.0, 21.0], [1.0, 21.0], [0, 1, 2]]


def test_the_other_processes_learn_that_one_has_ended():
    def worker(world):
        processes = Processes(7, world)
        if world.rank == 1:
            world.close()
            return None
        with pytest.raises(LeftOut, match="worker 7: another of its 2 processes has ended or is silent"):
            processes.gather(0)
        return None

    LocalWorld(2, timeout_seconds=1.0).run(worker)
