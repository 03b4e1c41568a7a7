"""Communicators: what every backend promises, on threads and on real processes over Gloo."""

from __future__ import annotations

import resource
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.operations import all_operations, many_outstanding, values
from helpers.program import wait_until
from helpers.spawn import WORLDS
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.comm import CommunicationError, Ledger, LocalWorld, ProcessGroupCommunicator
from thinwire.comm.background import Background

SIZES = [1, 2, 3, 4]


@pytest.fixture(params=WORLDS)
def run(request):
    return WORLDS[request.param]


# ---- every operation has its answer in closed form ----


@pytest.mark.parametrize("size", SIZES)
def test_every_operation(run, size):
    run(size, all_operations)


def ring_exchange(comm) -> list:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sends = {right: values(comm.rank, 12, torch.float64).reshape(3, 4)} if comm.size > 1 else {}
    receives = {left: torch.zeros(3, 4, dtype=torch.float64)} if comm.size > 1 else {}
    assert comm.exchange(sends, receives).wait() is receives
    comm.exchange({}, {}).wait()
    return [tensor.tolist() for tensor in receives.values()]


@pytest.mark.parametrize("size", SIZES)
def test_exchange_along_a_ring(run, size):
    for rank, received in enumerate(run(size, ring_exchange)):
        assert received == [values((rank - 1) % size, 12, torch.float64).reshape(3, 4).tolist()] * (size > 1)


def one_way(comm) -> float:
    """Rank 0 sends twice to rank 1; the others take no part."""
    first, second = torch.zeros(3), torch.zeros(0)
    if comm.rank == 0:
        handles = [comm.exchange({1: torch.full((3,), 1.0)}, {}), comm.exchange({1: torch.full((3,), 2.0)}, {})]
    elif comm.rank == 1:
        second = torch.zeros(3)
        handles = [comm.exchange({}, {0: first}), comm.exchange({}, {0: second})]
    else:
        handles = []
    for handle in reversed(handles):
        handle.wait()
    return first.tolist() + second.tolist()


def test_messages_of_a_pair_are_matched_in_order(run):
    assert run(3, one_way)[1] == [1.0] * 3 + [2.0] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_many_outstanding_operations(run, size):
    run(size, many_outstanding)


def beside_a_round(comm) -> tuple[float, float]:
    """An operation that is called while a round of equal messages is under way, but has not begun on the last worker."""
    is_late, has_begun = comm.rank == comm.size - 1, threading.Event()

    def of_round() -> float:
        time.sleep(0.2 * is_late)
        summed = comm.all_reduce(torch.tensor([1.0]))
        has_begun.set()
        return summed.wait().item()

    summed = comm.round_thread.submit(of_round)
    assert is_late or has_begun.wait(30)
    own = comm.all_reduce(torch.tensor([10.0])).wait().item()
    return summed.wait(), own


def test_an_operation_beside_a_round_keeps_its_place_after_it(run):
    assert run(3, beside_a_round) == [(3.0, 30.0)] * 3


def gathered_in_slots(comm) -> None:
    """As over NCCL: messages of nearly one size are padded to slots of one size, and the ledger counts the padding."""
    comm._backends = {"cpu": "nccl"}
    for numels, slot in [([5, 5, 5], 32), ([1, 1, 1], 16), ([40, 39, 36], 160), ([400, 2, 0], None), ([0, 0, 0], None)]:
        before, sizes = comm.ledger.snapshot(), [4 * n for n in numels]
        own = torch.arange(numels[comm.rank], dtype=torch.float32) + comm.rank
        parts = comm.all_gather(own, numels).wait()
        assert parts[comm.rank] is own
        for rank, part in enumerate(parts):
            assert part.tolist() == [float(rank + i) for i in range(numels[rank])] and part.data_ptr() % 16 == 0
        sent = comm.ledger.since(before)
        assert sent.bytes_sent == 2 * (sizes[comm.rank] if slot is None else slot)
        assert sent.bytes_received == (sum(sizes) - sizes[comm.rank] if slot is None else 2 * slot)


def test_nccl_gathers_slots_of_one_size():
    WORLDS["processes"](3, gathered_in_slots)


def slots_are_in_use(comm) -> bool:
    """Whether the communicator is told of the memory of all slots, so that a stream of its own may use it."""
    comm._backends = {"cpu": "nccl"}
    issued, issue = [], comm._issue
    comm._issue = lambda tensors, start: issued.append((tensors, start)) or issue(tensors, start)
    comm.all_gather(torch.arange(5.0)).wait()
    ((tensors, start),) = issued
    slots = start.args[1]
    return slots.numel() == 32 * comm.size and any(t.data_ptr() == slots.data_ptr() for t in tensors)


@pytest.mark.parametrize("size", [1, 3])
def test_slots_are_kept_while_a_stream_uses_them(size):
    assert all(WORLDS["processes"](size, slots_are_in_use))


def limits(comm) -> list[timedelta]:
    """Of operations over a group with a limit of its own, over the same group with another one, and over one without."""
    own = dist.new_group(range(comm.size), timeout=timedelta(seconds=77))
    found = []
    for group, seconds in ((own, None), (own, 5.0), (dist.new_group(range(comm.size)), None)):
        with ProcessGroupCommunicator(group, seconds) as ours:
            found.append(ours._group._get_backend(torch.device("cpu")).options._timeout)
    return found


def test_operations_have_the_limit_of_the_group_unless_told_otherwise():
    assert WORLDS["processes"](2, limits) == [[timedelta(seconds=seconds) for seconds in (77, 5, 60)]] * 2


def abandoned_over_nccl(comm) -> tuple[float, bool]:
    """Seconds until an error has left the communicator, while an operation waits for ever, and whether the group is left."""
    comm._backends = {"cpu": "nccl"}
    destroyed, never = [], threading.Event()
    with mock.patch.object(dist, "destroy_process_group", destroyed.append):
        began = time.monotonic()
        with pytest.raises(ZeroDivisionError), comm:
            comm._issuer.submit(never.wait)
            raise ZeroDivisionError
        seconds = time.monotonic() - began
    never.set()
    return seconds, not destroyed


def test_an_error_over_nccl_waits_for_no_other_worker():
    """To end a group of NCCL waits for the others, who may wait in an operation that this worker will never join."""
    for seconds, is_left in WORLDS["processes"](2, abandoned_over_nccl):
        assert seconds < 100 and is_left


def random_sum(comm, dtype) -> bytes:
    x = torch.randn(10_007, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
    return comm.all_reduce(x).wait().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_has_the_same_bits_on_every_worker(run, dtype):
    results = run(4, random_sum, dtype)
    assert all(result == results[0] for result in results)


def small_operations(comm, count: int) -> tuple[int, int]:
    peaks = []
    for _ in range(2):
        for i in range(count // 2):
            assert comm.all_reduce(torch.tensor([1.0])).wait() == comm.size
            assert len(comm.all_gather(torch.tensor([i])).wait()) == comm.size
        peaks.append((threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    return peaks[1][0] - peaks[0][0], peaks[1][1] - peaks[0][1]


def test_threads_and_memory_stay_steady_over_500_small_operations():
    for new_threads, new_kilobytes in WORLDS["processes"](3, small_operations, 500):
        assert new_threads == 0
        assert new_kilobytes < 4096


def test_500_small_operations_in_threads():
    LocalWorld(3).run(small_operations, 500)


# ---- what the caller did wrong ----

MISTAKES = {
    "not a tensor": (lambda c: c.all_reduce([1.0]), "all_reduce expects a tensor, got list"),
    "not contiguous": (lambda c: c.broadcast(torch.ones(4, 6).t()), r"contiguous.*\(6, 4\) with strides \(1, 6\)"),
    "sparse": (lambda c: c.all_reduce(torch.ones(3).to_sparse()), "contiguous.*sparse_coo"),
    "conjugate": (lambda c: c.all_gather(torch.ones(3, dtype=torch.cfloat).conj()), "got a conjugate view. Pass"),
    "negative": (
        lambda c: c.broadcast(torch._neg_view(torch.ones(3))),
        "got a negative view. Pass tensor.resolve_conj",
    ),
    "dtype without a sum": (lambda c: c.all_reduce(torch.ones(3, dtype=torch.bool)), "sums .*float32.*got torch.bool"),
    "matrix": (lambda c: c.all_gather(torch.ones(2, 2)), r"1-D tensors, got shape \(2, 2\)"),
    "root": (lambda c: c.broadcast(torch.ones(1), root=2), r"root in 0\.\.1, got 2"),
    "peer": (lambda c: c.exchange({7: torch.ones(1)}, {}), r"peers in sends in 0\.\.1, got 7"),
    "itself": (lambda c: c.exchange({}, {c.rank: torch.ones(1)}), "has this worker itself in receives"),
    "number of sizes": (lambda c: c.all_gather(torch.ones(1), [1]), r"expects 2 sizes, one per worker, got \[1\]"),
    "own size": (lambda c: c.all_gather(torch.ones(3), [1, 1]), r"sizes\[.\] = 1, but this worker's own tensor has 3"),
    "number of tensors": (lambda c: c.all_to_all([torch.ones(1)]), "expects one tensor per worker, 2, got 1"),
    "mixed dtypes": (lambda c: c.all_to_all([torch.ones(1), torch.ones(1).int()]), "one dtype, got torch.float32, tor"),
}


def refused(comm) -> None:
    for mistake, message in MISTAKES.values():
        with pytest.raises(ValueError, match=rf"rank {comm.rank}: .*{message}"):
            mistake(comm)
    assert comm.ledger == Ledger(comm.size)
    assert comm.all_reduce(torch.ones(1)).wait() == comm.size  # the communicator is as good as before


def test_mistakes_are_refused_before_anything_is_sent(run):
    run(2, refused)


def closed(comm) -> None:
    comm.barrier()
    comm.close()
    comm.close()
    with pytest.raises(ValueError, match=f"rank {comm.rank}: all_reduce on a communicator that was closed"):
        comm.all_reduce(torch.ones(1))


def test_close(run):
    run(2, closed)


# ---- agreement ----


def disagree(comm, settings: list[dict]) -> str:
    try:
        comm.check_agreement(settings[comm.rank])
    except ValueError as error:
        assert comm.all_reduce(torch.ones(1)).wait() == comm.size  # still in step
        return str(error)
    return ""


@pytest.mark.parametrize("size", SIZES)
def test_workers_that_agree(run, size):
    settings = [{"averager": "Mean()", "shapes": [(3, 4), (5,)], "seed": 1.5}] * size
    assert run(size, disagree, settings) == [""] * size


def test_workers_that_disagree_all_say_so_alike(run):
    settings = [
        {"averager": "Mean()", "seed": 0},
        {"averager": "Mean()", "seed": 0, "layer.weight": (2000, 3)},
        {"averager": "Mean(TopK(0.01))", "seed": 0, "layer.weight": (2000, 30)},
    ]
    messages = run(3, disagree, settings)
    assert len(set(messages)) == 1
    assert "disagree on 2 of 3 settings" in messages[0]
    assert "averager: 'Mean()' on ranks 0, 1; 'Mean(TopK(0.01))' on rank 2" in messages[0]
    assert "layer.weight: (absent) on rank 0; (2000, 3) on rank 1; (2000, 30) on rank 2" in messages[0]
    assert "seed" not in messages[0]


def test_long_values_are_shown_where_they_differ():
    settings = [{"names": "a" * 5000 + last} for last in ("x" * 9, "y" * 9)]
    message = LocalWorld(2).run(disagree, settings)[0]
    assert "axxxxxxxxx" in message
    assert "ayyyyyyyyy" in message
    assert len(message) < 600


# ---- the ledger ----


def one_of_each(comm) -> dict:
    x = torch.zeros(1200)
    comm.all_reduce(x).wait()
    comm.all_gather(x).wait()
    comm.all_to_all(list(x.view(comm.size, -1))).wait()
    if comm.size > 1:
        comm.exchange({(comm.rank + 1) % comm.size: x}, {(comm.rank - 1) % comm.size: x.clone()}).wait()
    comm.broadcast(x, root=0).wait()
    comm.ledger.dense_numel += 1200
    return comm.ledger.as_dict()


@pytest.mark.parametrize("size", SIZES)
def test_the_ledger_holds_to_the_formulas(run, size):
    num_bytes = 4800
    children = {1: [0], 2: [1, 0], 3: [2, 0, 0], 4: [2, 1, 0, 0]}[size]
    for rank, ledger in enumerate(run(size, one_of_each)):
        others, ring = size - 1, 2 * (size - 1) * num_bytes // size
        expected = {
            "all_reduce": (1 if size == 2 else 2 * others, ring, ring),
            "all_gather": (others, others * num_bytes, others * num_bytes),
            "all_to_all": (others, others * num_bytes // size, others * num_bytes // size),
            "exchange": (1, num_bytes, num_bytes),
            "broadcast": (children[rank], children[rank] * num_bytes, num_bytes * (rank > 0)),
        }
        if size == 1:
            del expected["exchange"]
        got = {name: tuple(list(traffic.values())[1:]) for name, traffic in ledger["collectives"].items()}
        assert got == expected
        assert all(traffic["calls"] == 1 for traffic in ledger["collectives"].values())
        assert ledger["bytes_sent"] == sum(traffic[1] for traffic in expected.values())
        assert ledger["bytes_received"] == sum(traffic[2] for traffic in expected.values())
        assert ledger["messages"] == sum(traffic[0] for traffic in expected.values())
        assert (ledger["dense_fp32_bytes"], ledger["dense_bf16_bytes"]) == (ring, ring // 2)


def objects_of(comm, lengths: list[int]) -> tuple[list[str], int]:
    """Texts of so many bytes in JSON, the quotes included, and the messages that this worker sent."""
    own = "x" * (lengths[comm.rank % len(lengths)] - 2)
    return comm.gather_objects(own), comm.ledger.collectives["gather_objects"].messages


@pytest.mark.parametrize("size", SIZES)
def test_small_objects_travel_in_one_step(run, size):
    """On a long line, each step is half a round trip that a user waits for."""
    for lengths in ([2, 256], [257, 256], [1000, 2, 300]):
        of_rank = [lengths[rank % len(lengths)] for rank in range(size)]
        for rank, (texts, messages) in enumerate(run(size, objects_of, lengths)):
            assert texts == ["x" * (length - 2) for length in of_rank]
            assert messages == (size - 1) * (1 + (of_rank[rank] > 256))


def test_whether_all_passed_true_is_read_once():
    """Over NCCL the host waits for a GPU in each read."""

    class Reads(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    def worker(comm):
        with Reads() as reads:
            flags = comm.all_true(True), comm.all_true(comm.rank != 1)
        return *flags, reads.number

    assert LocalWorld(3).run(worker) == [(True, False, 2)] * 3


def test_since_a_snapshot():
    ledger = Ledger(size=2)
    ledger.record("all_gather", 1, 10, 20)
    ledger.record("broadcast", 1, 1, 0)
    ledger.dense_numel += 100
    before = ledger.snapshot()
    ledger.record("all_gather", 1, 5, 6)
    ledger.dense_numel += 7
    added = ledger.since(before)
    assert (added.bytes_sent, added.bytes_received, added.messages, added.dense_fp32_bytes) == (5, 6, 1, 28)
    assert list(added.collectives) == ["all_gather"]
    assert before.bytes_sent == 11


# ---- threads only ----


def raises_on_rank_one(comm, error):
    if comm.rank == 1:
        raise error
    comm.all_reduce(torch.ones(1)).wait()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("lost"), "\"rank 1: KeyError: 'lost'\""),  # Python quotes what a KeyError says
        (ZeroDivisionError("division by zero"), "rank 1: ZeroDivisionError: division by zero"),
        (AssertionError(), "rank 1: AssertionError"),
        (ValueError("lr must be above 0, got -1"), "rank 1: lr must be above 0, got -1"),
        (CommunicationError("rank 1: barrier failed"), "rank 1: barrier failed"),
        (FileNotFoundError(2, "No such file", "x.pt"), "[Errno 2] rank 1: No such file: 'x.pt'"),
        (RuntimeError("two", 3), "('rank 1: two', 3)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_error_releases_all_threads_and_keeps_its_class(error, text):
    with pytest.raises(type(error)) as raised:
        LocalWorld(4, timeout_seconds=60).run(raises_on_rank_one, error)
    assert str(raised.value) == text


def test_what_ended_a_connection_counts_before_the_errors_it_led_to():
    threads = {}

    def worker(comm):
        threads[comm.rank] = threading.current_thread()
        comm.barrier()
        if comm.rank == 0:  # as if rank 1 had told it
            raise CommunicationError("rank 1 raised ValueError('no such layer')")
        threads[0].join()
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="^rank 1: no such layer$"):
        LocalWorld(2).run(worker)


def test_an_error_that_a_lost_connection_led_to_is_no_cause_of_it():
    def worker(comm):
        if comm.rank == 0:
            raise CommunicationError("nobody listens")
        try:
            try:
                comm.all_reduce(torch.ones(1)).wait()
            except CommunicationError:
                raise RuntimeError("no sum") from None
        finally:
            raise ValueError("no mean")

    with pytest.raises(CommunicationError, match="^rank 0: nobody listens$"):
        LocalWorld(2).run(worker)


def test_a_worker_that_leaves_early_is_named():
    def leave(comm):
        if comm.rank == 0:
            comm.all_gather(torch.ones(1)).wait()

    with pytest.raises(CommunicationError, match="rank 0: all_gather failed: rank 1 has finished"):
        LocalWorld(2).run(leave)


def test_communicators_that_are_made_from_one_do_not_mix_their_messages():
    def talk(comm):
        peer = 1 - comm.rank
        ranks = range(comm.size)
        comms = [comm, comm.reordered(ranks), comm.reordered(ranks)]
        comms += [comms[1].reordered(ranks), comms[2].reordered(ranks)]
        channels = [own.open_channel([peer]) for own in comms]
        received = []
        for number, (own, channel) in enumerate(zip(comms, channels, strict=True)):
            own.exchange({peer: torch.tensor([number])}, {})
            channel.send(peer, 1 + number)
        for own, channel in reversed(list(zip(comms, channels, strict=True))):
            message = torch.zeros(1, dtype=torch.int64)
            own.exchange({}, {peer: message}).wait()
            received.append((message.item(), channel.receive([peer]).kind))
        return received

    assert LocalWorld(2).run(talk) == [[(number, 1 + number) for number in range(4, -1, -1)]] * 2


@pytest.mark.parametrize("by", ["exchange", "channel"])
def test_in_another_order_it_is_still_known_who_has_finished(by):
    """The worker that ends is rank 1 in the first order, and the one that sends after that in the other."""

    def work(comm):
        after = comm.reordered([1, 2, 0])
        channel = after.open_channel([3 - after.rank] if after.rank else [])
        if after.rank == 1:
            wait_until(lambda: comm._mail._left, "the end of the other one")
            time.sleep(0.1)  # the receiver waits
            after.exchange({2: torch.ones(1)}, {})
            channel.send(2, 5)
        elif after.rank == 2 and by == "exchange":
            after.exchange({}, {1: torch.zeros(1)}).wait()
        elif after.rank == 2:
            assert channel.receive([1], 10.0).kind == 5

    LocalWorld(3).run(work)


def test_a_silent_peer_is_named_at_the_timeout():
    done = threading.Event()

    def silent(comm):
        if comm.rank == 0:
            try:
                comm.exchange({}, {1: torch.ones(1)}).wait()
            finally:
                done.set()
        done.wait(400)

    with pytest.raises(CommunicationError, match=r"rank 0: exchange failed: nothing came from rank 1 in 0\.2 sec"):
        LocalWorld(2, timeout_seconds=0.2).run(silent)


def test_unequal_messages_are_named_in_threads():
    def unequal(comm):
        comm.all_reduce(torch.ones(3 + comm.rank)).wait()

    with pytest.raises(CommunicationError, match=r"expected \d x torch.float32 from rank \d, got \d x torch.float32"):
        LocalWorld(2).run(unequal)


def test_a_thread_that_does_not_start_is_the_error_and_not_that_it_cannot_be_joined():
    """The end of a communicator hid why there was no thread."""
    background = Background("refused")
    refusal = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with refusal, pytest.raises(RuntimeError, match="can't start new thread"):
        background.submit(int)
    background.close()
    assert background.join(1.0)


def test_a_world_needs_workers():
    with pytest.raises(ValueError, match="at least one worker, got size=0"):
        LocalWorld(0)
