"""The communicator on connections of our own: what its connections do between real processes."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from helpers import traffic
from helpers.keys import keys_of
from helpers.lost_connections import loses_all_connections
from helpers.ports import free_port
from helpers.program import programs, wait_until
from helpers.spawn import logged, meet, retire, run_tcp, spawn

from thinwire.comm import CommunicationError, transport
from thinwire.comm.ledger import Traffic
from thinwire.comm.store import gathering
from thinwire.comm.tcp import TcpCommunicator, endpoint, is_available
from thinwire.comm.tcp.connections import Place
from thinwire.comm.transport import connect
from thinwire.testing import check_communicator

pytestmark = pytest.mark.skipif(not is_available(), reason="the extension was not built")


def conforms(comm) -> None:
    check_communicator(lambda operation: operation(comm))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_it_fulfils_the_contract(size):
    run_tcp(size, conforms)


# ---- where workers meet ----


def meets_in_a_store(rank: int, folder: str) -> None:
    """Twice over the same store; no process group is there."""
    store = dist.FileStore(f"{folder}/store", 3)
    for round in range(2):
        with TcpCommunicator.from_store(store, rank, 3, timeout_seconds=60.0, interface="lo") as comm:
            assert comm.all_gather(torch.tensor([rank + 10 * round])).wait() == [
                10 * round,
                10 * round + 1,
                10 * round + 2,
            ]
            assert comm.ledger.bytes_sent == 16
    assert not dist.is_initialized()


def test_workers_meet_in_any_store(tmp_path):
    with programs(meets_in_a_store, [(rank, str(tmp_path)) for rank in range(3)], tmp_path) as started:
        assert [program.wait(400) for program in started] == [0] * 3, [program.stderr for program in started]


def test_who_does_not_come_to_the_store_is_named():
    with pytest.raises(
        CommunicationError, match=r"rank 1: ranks \[0, 2\] did not come to the store within 0.2 seconds"
    ):
        TcpCommunicator.from_store(dist.HashStore(), 1, 3, timeout_seconds=0.2)


def test_a_meeting_in_which_one_waited_in_vain_fails_for_all_and_the_next_one_succeeds():
    """Who came later took what the other one had left, and their meetings never matched again."""
    store = dist.HashStore()
    gather = [gathering(store, rank, 2, seconds) for rank, seconds in enumerate((0.1, 60.0))]
    for one, rank in zip(gather, range(2), strict=True):
        with pytest.raises(
            CommunicationError, match=rf"rank {rank}: ranks \[1\] did not come to the store within 0.1 seconds"
        ):
            one(f"first of {rank}")
    with ThreadPoolExecutor() as pool:
        late = pool.submit(gather[1], "b")
        wait_until(lambda: store.check(["thinwire/2/1"]), "rank 1 in the store")
        assert gather[0]("a") == late.result() == ["a", "b"]


class Asked(dist.Store):
    """Counts the questions to a store that are answered."""

    def __init__(self):
        super().__init__()
        self.store, self.questions = dist.HashStore(), []

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        return self._ask("get", key)

    def add(self, key, number):
        return self._ask("add", key, number)

    def wait(self, keys, timeout):
        return self._ask("wait", keys, timeout)

    def compare_set(self, key, expected, desired):
        return self._ask("compare_set", key, expected, desired)

    def multi_get(self, keys):
        return self._ask("multi_get", keys)

    def _ask(self, name, *arguments):
        self.questions.append(name)
        return getattr(self.store, name)(*arguments)


def test_a_meeting_asks_the_store_as_often_however_many_come():
    """And no more often than it must: each question is a round trip, for PyTorch's store two for `multi_get`."""
    store = Asked()
    for rank in range(9):
        store.set(f"thinwire/1/{rank}", str(rank))
    assert gathering(store, 9, 10, 60.0)(9) == [*range(10)]
    assert store.questions == ["add", "compare_set", "multi_get"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 2}, "expected a rank in 0..1, got 2"),
        ({"interface": "no-such0"}, "interface 'no-such0' does not exist here"),
    ],
)
def test_wrong_arguments_of_a_meeting_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TcpCommunicator.from_store(dist.HashStore(), **{"rank": 0, "size": 2, **options})


@pytest.mark.parametrize(
    "said", [["a\0b", 1, "", ""], ["127.0.0.1", 1 << 17, "", ""], ["127.0.0.1", 1, 2, ""], [], "x", None]
)
def test_an_address_that_cannot_be_one_names_who_told_it(said):
    store = dist.HashStore()
    store.set("thinwire/1/0", json.dumps([*said, "00" * 32] if isinstance(said, list) else said))
    with pytest.raises(CommunicationError, match="rank 0 says that it is at .* which is no address"):
        TcpCommunicator.from_store(store, 1, 2, timeout_seconds=60.0)


def test_workers_that_close_at_the_same_time_do_not_wait_for_each_others_last_words(monkeypatch):
    """Each asks the other what has arrived; nobody says that an answer has."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("thinwire.comm.tcp.communicator.CLOSE_SECONDS", 60.0)
    seconds = []

    def worker(rank: int, store: dist.Store, operations: int) -> None:
        comm = TcpCommunicator.from_store(store, rank, 2, timeout_seconds=60.0)
        for _ in range(operations):
            comm.all_reduce(torch.ones(3)).wait()
        began = time.monotonic()
        comm.close()
        seconds.append(time.monotonic() - began)

    for operations in range(3):
        store = dist.HashStore()
        threads = [threading.Thread(target=worker, args=(rank, store, operations)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seconds) == 6 and max(seconds) < 30


# ---- the bits of a sum ----


def sums(comm) -> list[torch.Tensor]:
    """Of tensors of one piece, of several, and of fewer elements than workers, on short and on long lines."""
    results = []
    for numel, comm.route.shard_bytes in itertools.product((1, 2, 1000, 1_500_001), (1 << 22, math.inf)):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank)) * 10.0 ** (4 * comm.rank)
        results += [x.clone(), comm.all_reduce(x).wait()]
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_taken_in_rank_order(size):
    workers = run_tcp(size, sums)
    for terms in zip(*(worker[0::2] for worker in workers), strict=True):
        expected = terms[0].clone()
        for term in terms[1:]:
            expected += term
        for worker in workers:
            assert any(torch.equal(expected, total) for total in worker[1::2])


@pytest.mark.parametrize(
    ("parts", "out", "message"),
    [
        ([], torch.ones(3), "expects one tensor per worker, 1, got 0"),
        ([torch.ones(3)], torch.ones(2), "expects a result as large as the own part, 3 elements, got 2"),
        (
            [torch.ones(3)],
            torch.ones(3).int(),
            r"expects parts and a result of one dtype, got torch.float32, torch.int32",
        ),
    ],
)
def test_parts_that_do_not_fit_the_result_are_refused(parts, out, message):
    with TcpCommunicator.from_store(dist.HashStore(), 0, 1) as comm:
        with pytest.raises(ValueError, match=f"rank 0: reduce_scatter {message}"):
            comm.reduce_scatter(parts, out)
        assert not comm.ledger.collectives


# ---- connections that are lost ----


def test_an_exchange_goes_on_after_all_connections_were_lost():
    results = run_tcp(3, loses_all_connections, 8_000_000, return_errors=True)
    # The outer communicator of `spawn`, over Gloo, may complain that its connections are gone.
    assert not any(isinstance(result, BaseException) for result in results), results
    assert [result[0] for result in results] == [True] * 3, results
    assert sum(result[1] for result in results) > 0


def cut_off(comm) -> Callable[[int], socket.socket]:
    """End all connections between two workers, which cannot make new ones; returns what made them."""
    own = comm._connections
    wait_until(lambda: not own._mending, "the connections that are being made")
    dial, own._dial = own._dial, unreachable
    meet("cannot dial")
    for connection in traffic.connections():
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: own.trouble(1 - comm.rank), "the end of the connections")
    return dial


def waits_long(comm) -> list[str]:
    """For a worker that is late, and then for a line that is cut."""
    retire()
    endpoint.LATE_SECONDS = 0.2
    lines = logged()
    with ThreadPoolExecutor(1) as pool:
        if comm.rank == 0:
            waiting = pool.submit(comm.barrier)
            wait_until(lambda: lines, "the line about a late worker")
        meet("rank 0 has waited")
        if comm.rank == 1:
            waiting = pool.submit(comm.barrier)
        waiting.result()
        dial = cut_off(comm)
        waiting = pool.submit(comm.barrier)
        wait_until(lambda: any("has no connection" in line for line in lines), "the line about the lost connections")
        meet("both have waited")
        comm._connections._dial = dial
        waiting.result()
    return lines


def waits_after_another_has_ended(comm) -> list[str]:
    """Rank 2 closes its communicator, and rank 1 lets rank 0 wait."""
    retire()
    endpoint.LATE_SECONDS = 0.2
    lines = logged()
    if comm.rank == 2:
        comm.close()
        return []
    wait_until(lambda: not comm.counts(2).connections, "the end of rank 2's connections")
    if comm.rank == 1:
        meet("rank 0 has waited")
    waiting = comm.exchange({1 - comm.rank: torch.ones(1)}, {1 - comm.rank: torch.ones(1)})
    if comm.rank == 0:
        with ThreadPoolExecutor(1) as pool:
            waited = pool.submit(waiting.wait)
            wait_until(lambda: lines, "the line about a late worker")
            meet("rank 0 has waited")
            waited.result()
    else:
        waiting.wait()
    return lines


def test_a_worker_does_not_wait_for_one_that_has_ended():
    said = run_tcp(3, waits_after_another_has_ended)[0]
    assert [line.partition(" (")[0] for line in said] == [
        "rank 0 waits for messages for more than 0.2 seconds: another worker is late, or a line is slow"
    ]


def unreachable(peer: int):
    raise OSError(errno.EHOSTUNREACH, "No route to host")


def test_a_worker_that_waits_long_says_why():
    """It was silent until the time limit, 300 seconds by default."""
    said, its = run_tcp(2, waits_long)
    assert sum("another worker is late, or a line is slow" in line for line in said) == 1, said
    assert sum("rank 0 has no connection with rank 1, and waits for one for at most" in line for line in said) == 1
    (line,) = (line for line in its if "rank 1 has no connection with rank 0" in line)
    assert re.search(r"\(rank 0 cannot be reached at 127\.0\.0\.1:\d+: No route to host\)$", line), line


def is_cut_off(comm) -> str:
    retire()
    comm.barrier()
    cut_off(comm)
    with pytest.raises(CommunicationError) as raised:
        comm.barrier()
    return str(raised.value)


def test_a_worker_that_cannot_dial_another_says_where_and_why():
    """It said that nothing came."""
    said = run_tcp(2, is_cut_off, comm_timeout_seconds=3.0)[1]
    assert re.search(r"rank 0 cannot be reached at 127\.0\.0\.1:\d+: No route to host$", said), said


def test_a_peer_that_has_never_been_reached_may_be_behind_a_firewall():
    """It was said to have died."""
    refusing = ("127.0.0.1", free_port())
    meeting = endpoint.Meeting(
        *(1, 2, lambda own: [[*refusing, "", "", bytes(32).hex()], own], Place(socket.AF_INET, "127.0.0.1"), 60.0)
    )
    worker = endpoint.Endpoint(meeting, [0])
    operation = worker.begin([], [endpoint.TaggedMessage(0, 0, torch.zeros(1, dtype=torch.uint8))])
    wrong = f"rank 0 has ended, or a firewall stands before it: 127.0.0.1:{refusing[1]} refuses connections"
    with pytest.raises(CommunicationError, match=wrong):
        worker.wait(operation)
    worker.close(0.0)


# ---- a machine that is full ----


def runs_out_of_descriptors(comm) -> float:
    """Rank 0 may open no more files while others knock; returns the seconds that this keeps a processor busy."""
    retire()
    lines = logged()
    host, port = comm.gather_objects(comm._connections.contact[:2])[0]
    if comm.rank == 0:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        try:
            while True:
                files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
    began = time.monotonic()  # before any connection, however long this thread waits for a core after the barrier
    comm.barrier()
    connections = [socket.create_connection((host, port)) for _ in range(4)] if comm.rank == 1 else []
    wait_until(lambda: lines or comm.rank == 1, "the line about a connection")
    busy = time.process_time()
    time.sleep(1.5)
    busy = time.process_time() - busy
    comm.barrier()
    allowed = 1 + (time.monotonic() - began)  # one a second
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in files:
            os.close(file)
        num_lines = sum("cannot take a connection: Too many open files" in line for line in lines)
        assert 1 <= num_lines <= allowed, (num_lines, allowed)
    conforms(comm)
    del connections
    return busy


def test_a_machine_without_descriptors_says_so_and_does_not_spin():
    assert run_tcp(2, runs_out_of_descriptors)[0] < 0.5


# ---- the end of a process ----


def in_a_fork(comm) -> str:
    retire()
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        conforms(comm)
        return str(os.waitstatus_to_exitcode(status))
    code = 1
    try:
        comm.barrier()
    except ValueError as error:
        code = 42 if "this process is a fork of the worker" in str(error) else 2
    os._exit(code)


def test_a_fork_cannot_use_it():
    assert run_tcp(2, in_a_fork) == ["42", "42"]


def fails_while_another_is_silent(comm) -> float:
    """Seconds until an error has left the communicator of rank 0, while an operation waits for rank 1."""
    store, began = dist.distributed_c10d._get_default_store(), time.monotonic()
    with pytest.raises(ZeroDivisionError), connect("tcp", timeout_seconds=60.0) as own:
        if comm.rank == 0:
            own.all_reduce(torch.ones(3, 1000))
        else:
            store.wait(["rank 0 has failed"])
        raise ZeroDivisionError
    store.set(f"rank {comm.rank} has failed", "")
    return time.monotonic() - began


def test_an_error_waits_for_no_other_worker():
    assert max(spawn(3, fails_while_another_is_silent)) < 30  # half of the time limit


def is_aborted_while_it_sums(comm) -> str:
    """The error of an operation of which the next messages are begun after the end; other operations were under way."""
    retire()
    began, store = threading.Event(), dist.distributed_c10d._get_default_store()

    def slow(terms: list[torch.Tensor], out: torch.Tensor) -> None:
        began.set()
        if comm.rank:  # so that rank 0 waits for its sum
            store.wait(["aborted"])
        else:
            wait_until(lambda: not comm._endpoint._alive, "the end")

    handle = comm.reduce(torch.ones(1000), slow)
    if comm.rank == 0:
        assert began.wait(60)
        comm.abort()
        store.set("aborted", "")
    with pytest.raises(CommunicationError) as failed:
        handle.wait()
    return str(failed.value)


def test_what_begins_after_the_end_fails_as_the_rest():
    assert "the communicator was aborted" in run_tcp(3, is_aborted_while_it_sums)[0]


def is_aborted_while_idle(comm) -> str:
    comm.abort("it has had enough")
    with pytest.raises(CommunicationError) as failed:
        comm.all_reduce(torch.ones(1))
    return str(failed.value)


def test_operations_after_an_abort_fail_with_its_reason():
    assert run_tcp(2, is_aborted_while_idle)[0] == "rank 0: all_reduce failed: it has had enough"


def forgets_to_close(store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    comm = connect("tcp")
    print(comm.all_gather(torch.ones(1)).wait())
    sys.modules["forgotten"] = comm  # type: ignore[assignment]  # a script's names live on until the interpreter ends


def test_a_forgotten_close_does_not_keep_the_interpreter(tmp_path):
    with programs(forgets_to_close, [(str(tmp_path / "store"),)], tmp_path) as (program,):
        assert (program.wait(200), program.stdout) == (0, "[tensor([1.])]\n"), program.stderr


def leaves_nothing(comm) -> None:
    """Ten more communicators leave no thread and no descriptor behind, once those end that were connecting."""

    def own() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def is_connecting() -> bool:
        return any(thread.name in ("thinwire-connect", "thinwire-greet") for thread in threading.enumerate())

    for _ in range(2):
        connect("tcp").close()
    comm.barrier()
    wait_until(lambda: not is_connecting(), "the end of threads that connect")
    before = own()
    for _ in range(10):
        with connect("tcp") as other:
            other.barrier()
            conforms(other)
    wait_until(lambda: all(now <= then for now, then in zip(own(), before, strict=True)), f"no more than {before}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_closed_one_leaves_no_threads_and_no_descriptors():
    run_tcp(2, leaves_nothing)


# ---- which communicator carries a run ----


def chosen(comm, name: str) -> str:
    with connect(name, timeout_seconds=60.0) as own:
        assert own.ledger.bytes_sent == 0
        conforms(own)
        return type(own).__name__


CHOSEN = {"auto": "ProcessGroupCommunicator", "gloo": "ProcessGroupCommunicator", "tcp": "TcpCommunicator"}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_transport_chooses_the_communicator(name):
    """The loopback is no network."""
    assert spawn(2, chosen, name) == [CHOSEN[name]] * 2


def chosen_between_machines(comm) -> tuple[str, int]:
    transport.own_address = lambda: (socket.AF_INET, "192.0.2.1")
    groups, new_group = [], dist.new_group
    dist.new_group = lambda *arguments: groups.append(new_group(*arguments)) or groups[-1]
    try:
        return chosen(comm, "auto"), len(groups)
    finally:
        dist.new_group = new_group


def test_auto_takes_our_own_connections_between_machines():
    """It made two process groups, each of which costs several round trips for every worker."""
    assert spawn(2, chosen_between_machines) == [("TcpCommunicator", 1)] * 2


def connected_with(comm, folders: list[str], seconds: float) -> str:
    os.environ["THINWIRE_CREDENTIALS"] = folders[comm.rank]
    try:
        with connect("tcp", timeout_seconds=seconds) as own:
            conforms(own)
            return "connected"
    except RuntimeError as error:
        return str(error)


def test_the_credentials_of_the_environment_close_connections_to_others(tmp_path):
    ours, theirs = (keys_of(tmp_path / run, "a", "b") for run in ("ours", "theirs"))
    assert spawn(2, connected_with, [ours[0].folder, ours[1].folder], 60.0) == ["connected"] * 2
    assert "connected" not in spawn(2, connected_with, [ours[0].folder, theirs[1].folder], 10.0)


def test_gpus_are_not_for_our_own_connections():
    with pytest.raises(ValueError, match="transport 'tcp' sends from main memory, got device cuda"):
        connect("tcp", device=torch.device("cuda"))


# ---- sums of several workers on each host ----


def on_hosts(comm, hosts: list[int]) -> TcpCommunicator:
    """Workers at 127.0.0.1, 127.0.0.2 and so on."""
    place = Place(socket.AF_INET, f"127.0.0.{1 + hosts[comm.rank]}")
    return TcpCommunicator(endpoint.Meeting(comm.rank, comm.size, comm.gather_objects, place, 60.0))


def summed_on_hosts(comm, hosts: list[int], numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """A sum, and what this worker has sent for it: bytes by peer, and in all as its ledger has it."""
    sent, found = [0] * comm.size, Traffic(calls=1)
    with on_hosts(comm, hosts) as own:
        begin = own._endpoint.begin

        def counted(sends, receives):
            for message in sends:
                sent[message.peer] += message.memory.numel()
            found.messages += len(sends)
            found.bytes_sent += sum(message.memory.numel() for message in sends)
            found.bytes_received += sum(message.memory.numel() for message in receives)
            return begin(sends, receives)

        own._endpoint.begin = counted
        mine = (torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank)) * 1000).to(dtype)
        total = own.all_reduce(mine).wait()
        assert own.ledger.collectives == {"all_reduce": found}
    return total, sent


@pytest.mark.parametrize(
    ("hosts", "numel", "dtype"),
    [
        ([0, 0, 1, 1], 1 << 20, torch.float32),
        ([0, 1, 0, 1], 100_003, torch.float32),
        ([0, 1, 1, 2, 0, 2], 100_003, torch.int64),
        ([0, 0, 0, 1, 1, 1], 100_003, torch.float16),
    ],
)
def test_a_host_of_several_workers_sends_a_sum_once(hosts, numel, dtype):
    """2 (L-1)/L n leave a host of L, however many workers it has, and each worker sends 2 (W-1)/W n."""
    size, num_hosts = len(hosts), len(set(hosts))
    found = spawn(size, summed_on_hosts, hosts, numel, dtype)
    terms = [(torch.randn(numel, generator=torch.Generator().manual_seed(r)) * 1000).to(dtype) for r in range(size)]
    expected = torch.stack(terms).to(torch.float64).sum(0)
    num_bytes, left = numel * dtype.itemsize, [0] * num_hosts
    for rank, (total, sent) in enumerate(found):
        assert torch.equal(total, found[0][0])  # the same bits
        # Numbers up to 5,000 whose last bit is at most 2, in four additions.
        torch.testing.assert_close(total.double(), expected, rtol=0, atol=20 if dtype == torch.float16 else 0.01)
        assert sum(sent) == pytest.approx(2 * (size - 1) / size * num_bytes, abs=8 * dtype.itemsize * size)
        left[hosts[rank]] += sum(n for peer, n in enumerate(sent) if hosts[peer] != hosts[rank])
    for of_host in left:
        assert of_host == pytest.approx(2 * (num_hosts - 1) / num_hosts * num_bytes, abs=8 * dtype.itemsize * size)


def many_operations_on_hosts(comm) -> list[float]:
    """Operations of two to four steps under way together; each worker waits for them in an order of its own."""
    with on_hosts(comm, [0, 0, 1, 1, 2, 2]) as own:
        random, found = torch.Generator().manual_seed(comm.rank), list[float]()
        for round in range(10):
            handles = []
            for kind in torch.randint(4, (12,), generator=torch.Generator().manual_seed(round)).tolist():
                x = torch.full((30_000 if kind < 2 else 1000,), float(1 + comm.rank))
                if kind < 3:
                    handles.append(own.broadcast(x, root=round % 6) if kind == 2 else own.all_reduce(x))
                else:
                    handles.append(own.all_gather(x[: 1 + comm.rank], variable=True))
            results = {}
            for index in torch.randperm(len(handles), generator=random).tolist():
                result = handles[index].wait()
                results[index] = torch.cat(result).sum().item() if isinstance(result, list) else result[-1].item()
            found += [results[index] for index in range(len(handles))]
        return found


def test_operations_of_many_steps_go_on_in_any_order():
    first, *others = spawn(6, many_operations_on_hosts)
    assert set(first) <= {21.0, 91.0, *range(1, 7)} and len(first) == 120
    assert others == [first] * 5


def in_a_sum_on_hosts(comm) -> str:
    with on_hosts(comm, [0, 0, 1, 1]) as own:
        comm.barrier()  # over Gloo: what rank 3 has sent over the others may be lost when it aborts
        if comm.rank == 3:
            own.abort("it has had enough")
            return ""
        with pytest.raises(CommunicationError) as found:
            own.all_reduce(torch.ones(1 << 20)).wait()
        return str(found.value)


def test_a_worker_that_ends_in_a_sum_on_hosts_is_an_error_on_all_others():
    """Also in another place of another host, which gets nothing from it."""
    *others, _ = spawn(4, in_a_sum_on_hosts)
    assert all(others)
