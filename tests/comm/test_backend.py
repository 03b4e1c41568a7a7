"""The backend of torch.distributed on our connections, against Gloo and closed forms, in real processes."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.keys import keys_of
from helpers.program import programs
from helpers.spawn import retire, run_tcp, spawn
from torch import nn

import thinwire as tw
from thinwire.comm import CommunicationError
from thinwire.comm.backend import ThinwireGroup
from thinwire.comm.backend.reductions import OPERATIONS
from thinwire.comm.tcp import is_available
from thinwire.comm.tcp.tagged import UNASKED_BYTES
from thinwire.comm.tls.relay import Relay

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="the extension was not built"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]
Op = dist.ReduceOp


def on(backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group within the outer one of `spawn`, which is on Gloo."""
    return dist.new_group(ranks, timeout=timedelta(seconds=60), backend=backend)


# ---- reductions ----


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
BITS = (Op.BAND, Op.BOR, Op.BXOR)


def is_defined(op, dtype: torch.dtype) -> bool:
    if op == Op.AVG:
        return dtype.is_floating_point
    return op not in BITS or not dtype.is_floating_point


def reduces(comm) -> dict[str, torch.Tensor]:
    """Every operation on every dtype, of small numbers, so that all results are exact."""
    group, results = on("thinwire"), {}
    for dtype in DTYPES:
        x = (torch.arange(37) * (comm.rank + 2) % 5).to(dtype)
        results[f"{dtype}"] = x.clone()
        for op in OPERATIONS:
            if op == Op.PREMUL_SUM:
                continue
            name = f"{op} {dtype}"
            if not is_defined(op, dtype):
                with pytest.raises(ValueError, match=f"is not defined for {dtype}"):
                    dist.all_reduce(x.clone(), op, group)
                continue
            dist.all_reduce(y := x.clone(), op, group)
            dist.reduce(z := x.clone(), 1, op, group)
            dist.reduce_scatter(part := torch.empty(7, dtype=dtype), list(x[:35].split(7))[: comm.size], op, group)
            assert torch.equal(z, y if comm.rank == 1 else x), name
            assert torch.equal(part, y[7 * comm.rank :][:7]), name
            results[name] = y
    dist.all_reduce(x := torch.ones(3), dist._make_nccl_premul_sum(0.5), group)
    assert x.tolist() == [comm.size / 2] * 3
    return results


def expected(op, terms: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.float64 if terms[0].is_floating_point() else torch.int64
    stacked = torch.stack(terms).to(wide)
    by_bits = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
    if op in by_bits:
        total = stacked[0]
        for term in stacked[1:]:
            total = by_bits[op](total, term)
    else:
        whole = {Op.SUM: torch.sum, Op.AVG: torch.mean, Op.PRODUCT: torch.prod, Op.MIN: torch.amin, Op.MAX: torch.amax}
        total = whole[op](stacked, dim=0)
    return total.to(terms[0].dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_reductions_have_the_exact_results(size):
    workers = spawn(size, reduces)
    for dtype in DTYPES:
        terms = [worker[f"{dtype}"] for worker in workers]
        for op in OPERATIONS:
            for worker in workers:
                if (name := f"{op} {dtype}") in worker:
                    assert torch.equal(worker[name], expected(op, terms)), name


def sums_noise(comm) -> list[torch.Tensor]:
    group, x = on("thinwire"), torch.randn(900_001, generator=torch.Generator().manual_seed(comm.rank))
    dist.all_reduce(total := x.clone(), group=group)
    several = [x[:5].clone(), x[5:300_000].clone()]
    dist.all_reduce_coalesced(several, group=group)
    dist.reduce_scatter_tensor(part := torch.empty(300_000), x[: 300_000 * comm.size].clone(), group=group)
    parts = [torch.empty(1), torch.empty(100)]
    with dist.distributed_c10d._coalescing_manager(group):
        for one, whole in zip(parts, x[: 101 * comm.size].split([comm.size, 100 * comm.size]), strict=True):
            dist.reduce_scatter_tensor(one, whole, group=group)
    return [x, total, torch.cat(several), part, torch.cat(parts)]


def test_sums_are_taken_in_rank_order():
    workers = spawn(3, sums_noise)
    total = workers[0][0] + workers[1][0] + workers[2][0]
    for rank, (_, whole, several, part, parts) in enumerate(workers):
        assert torch.equal(whole, total)
        assert torch.equal(several, total[:300_000])
        assert torch.equal(part, total[300_000 * rank :][:300_000])
        assert torch.equal(parts, torch.cat([total[rank : rank + 1], total[3 + 100 * rank :][:100]]))


def sums_sparse(comm) -> list[torch.Tensor]:
    """Rows that some ranks have, all have, or none has; rank 2 has none at all."""
    rows = torch.tensor([[0, 2, 2], [2, 5, 0], []][comm.rank], dtype=torch.int64)
    values = torch.randn(len(rows), 4, generator=torch.Generator().manual_seed(comm.rank))
    x = torch.sparse_coo_tensor(rows[None], values, (7, 4), check_invariants=True)
    dense = x.to_dense()
    dist.all_reduce(x, group=on("thinwire"))
    return [dense, x.to_dense()]


def test_sparse_tensors_are_summed():
    workers = spawn(3, sums_sparse)
    total = workers[0][0] + workers[1][0] + workers[2][0]
    assert all(torch.equal(worker[1], total) for worker in workers)


# ---- moving data ----


def moves(comm, backend: str) -> list[torch.Tensor]:
    """Every collective that moves data, on tensors that are contiguous, transposed and empty."""
    group, rank, size, results = on(backend), comm.rank, comm.size, []

    def numbers(*shape: int, offset: int = 0) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * rank + offset

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    for x in (
        numbers(4, 6),
        numbers(6, 4).t() if backend == "thinwire" else numbers(6, 4).t().contiguous(),
        numbers(0),
    ):
        dist.broadcast(y := x.clone(), 1, group=group)
        gathered = [torch.zeros_like(x) for _ in range(size)]
        dist.all_gather(gathered, x, group=group)
        on_root = [torch.zeros_like(x) for _ in range(size)] if rank == 0 else None
        dist.gather(x, on_root, 0, group=group)
        given = [x + 10 * other for other in range(size)] if rank == size - 1 else None
        dist.scatter(z := torch.zeros_like(x), given, size - 1, group=group)
        results += [y, *gathered, *(on_root or []), z]
    lists = [[zeros(2), zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [numbers(2), numbers(3, offset=10)], group)
    results += [y for of_rank in lists for y in of_rank]
    dist.all_gather_into_tensor(whole := zeros(size * 3, 2), numbers(3, 2), group=group)
    dist.all_to_all(outputs := [zeros(2) for _ in range(size)], [numbers(2, offset=10 * r) for r in range(size)], group)
    dist.all_to_all_single(rows := zeros(size * (rank + 1), 2), numbers(sum(range(size + 1)), 2),
                           [rank + 1] * size, [r + 1 for r in range(size)], group=group)  # fmt: skip
    dist.all_to_all_single(even := zeros(size * 2), numbers(size * 2), group=group)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank}, group=group)
    dist.broadcast_object_list(told := [rank * "y"], 1, group=group)
    dist.barrier(group=group)
    return [*results, whole, *outputs, rows, even, objects, told]


@pytest.mark.parametrize("size", [2, 3])
def test_data_moves_as_over_gloo(size):
    ours, theirs = spawn(size, moves, "thinwire"), spawn(size, moves, "gloo")
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# ---- point to point ----


def sends_with_tags(comm) -> None:
    """More bytes than a receiver keeps, received in another order than they were sent, with a collective in between."""
    group, count = on("thinwire"), 6
    tensors = [torch.full((UNASKED_BYTES,), tag, dtype=torch.uint8) for tag in range(count)]
    if comm.rank == 0:
        works = [dist.isend(tensor, 1, group, tag) for tag, tensor in enumerate(tensors)]
        works += [dist.isend(torch.tensor([tag]), 1, group, 7) for tag in range(3)]
        dist.all_reduce(x := torch.ones(2), group=group)
        for work in works:
            work.wait()
    else:
        dist.all_reduce(x := torch.ones(2), group=group)
        small = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        for tensor in small:
            dist.recv(tensor, 0, group, 7)
        assert [int(tensor) for tensor in small] == [0, 1, 2]  # of one tag, in order
        for tag in reversed(range(count)):
            dist.recv(received := torch.zeros_like(tensors[0]), 0, group, tag)
            assert torch.equal(received, tensors[tag])
    assert x.tolist() == [2.0, 2.0]


def test_messages_with_tags_come_in_any_order():
    spawn(2, sends_with_tags)


def expects_nothing(comm) -> None:
    """Once with a message that has no bytes, and once with one that has some, which has come by then."""
    group, nothing = on("thinwire"), torch.empty(0)
    if comm.rank == 0:
        dist.send(nothing, 1, group, 1)
        dist.send(torch.ones(3), 1, group, 1)
        dist.send(torch.ones(1), 1, group, 2)
        comm.barrier()
    else:
        dist.recv(torch.zeros(1), 0, group, 2)
        dist.recv(nothing, 0, group, 1)
        with pytest.raises(RuntimeError, match="rank 0 sent a message of 12 bytes, expected 0"):
            dist.recv(nothing, 0, group, 1)
        comm.barrier()


def test_an_empty_message_is_a_message_and_no_other_is_taken_for_it():
    spawn(2, expects_nothing)


def receives_from_any(comm) -> None:
    group, size, each = on("thinwire"), comm.size, 20
    large = UNASKED_BYTES // 8 + 1  # of a large message, which travels when the receiver asks for it
    if comm.rank == 0:
        seen = {rank: [] for rank in range(1, size)}
        for _ in range(each * (size - 1)):
            x = torch.zeros(2, dtype=torch.int64)
            source = dist.recv(x, None, group, 3)
            assert x[0] == source
            seen[source].append(int(x[1]))
        assert all(order == list(range(each)) for order in seen.values())
        work = dist.irecv(whole := torch.zeros(large, dtype=torch.int64), None, group, 4)
        work.wait()
        assert work._source_rank() == 2 and bool((whole == 2).all())
    else:
        for i in range(each):
            dist.send(torch.tensor([comm.rank, i]), 0, group, 3)
        if comm.rank == 2:
            dist.send(torch.full((large,), 2), 0, group, 4)
    batch = [dist.P2POp(dist.irecv, y := torch.zeros(5), (comm.rank - 1) % size, group),
             dist.P2POp(dist.isend, torch.full((5,), float(comm.rank)), (comm.rank + 1) % size, group)]  # fmt: skip
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert y.tolist() == [float((comm.rank - 1) % size)] * 5


def test_a_receiver_takes_from_whoever_sends():
    spawn(3, receives_from_any)


def hears_nobody(comm) -> None:
    if comm.rank == 0:
        comm._tagged._timeout, began = 0.2, time.monotonic()
        with pytest.raises(
            RuntimeError, match="rank 0: receive failed: no rank sent a message with tag 3 in 0.2 seconds"
        ):
            comm.receive(torch.zeros(1), None, 3).wait()
        assert time.monotonic() - began < 20
    comm.barrier()


def test_a_receiver_to_whom_nobody_sends_waits_no_longer_than_its_limit():
    run_tcp(2, hears_nobody)


def counts_bytes(comm) -> dict:
    group = on("thinwire")
    dist.reduce(torch.ones(300), 1, group=group)
    dist.reduce_scatter_tensor(torch.ones(100), torch.ones(300), group=group)
    if comm.rank == 0:
        dist.send(torch.ones(100), 2, group, 1)
    elif comm.rank == 2:
        dist.recv(torch.ones(100), None, group, 1)
    return {
        name: [t.messages, t.bytes_sent, t.bytes_received] for name, t in group.communicator.ledger.collectives.items()
    }


def test_the_ledger_counts_by_its_formulas():
    first, root, last = spawn(3, counts_bytes)
    assert first == {"reduce": [3, 1200, 800], "reduce_scatter": [2, 800, 800], "send": [2, 401, 1]}
    assert root == {"reduce": [2, 800, 1600], "reduce_scatter": [2, 800, 800]}
    assert last == {"reduce": [3, 1200, 800], "reduce_scatter": [2, 800, 800], "receive": [1, 1, 401]}


# ---- results on their way ----


def has_futures(comm) -> None:
    group, peer = on("thinwire"), 1 - comm.rank
    x = torch.full((4,), float(comm.rank + 1))
    work = dist.all_reduce(x, group=group, async_op=True)
    chained = work.get_future().then(lambda future: [float(future.value()[0].sum())])
    assert chained.wait() == [12.0]
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is x

    def next_collective(future):
        """As PyTorch's hook for PowerSGD: a callback that waits for another collective."""
        return dist.all_reduce(future.value()[0], group=group, async_op=True).get_future().wait()[0]

    started = dist.all_reduce(y := torch.ones(2), group=group, async_op=True)
    assert started.get_future().then(next_collective).wait().tolist() == [4.0, 4.0]

    late = dist.irecv(z := torch.zeros(1), peer, group, 9)
    assert not late.is_completed()
    with pytest.raises(RuntimeError, match="recv took longer than 0.05 seconds"):
        late.wait(timedelta(seconds=0.05))
    dist.barrier(group=group)
    dist.send(torch.ones(1) + comm.rank, peer, group, 9)
    late.wait()  # the limit was that of one call; nothing was lost
    assert float(z) == 1 + peer and y.tolist() == [4.0, 4.0]


def test_futures_and_limits_of_a_call():
    spawn(2, has_futures)


def reduces_in_inference_mode(comm) -> list[torch.Tensor]:
    """Threads of ours, which have a mode of their own, write into tensors that only this mode may change."""
    group = on("thinwire")
    with torch.inference_mode():
        dist.all_reduce(plain := torch.ones(5), group=group)
        dist.all_reduce(turned := torch.ones(2, 3).t(), group=group, async_op=True).get_future().wait()
        late = dist.all_reduce(x := torch.ones(3, 2).t(), Op.AVG, group, async_op=True)
    late.wait()
    return [plain, turned, x]


@pytest.mark.parametrize("size", [2, 3])
def test_inference_mode(size):
    for plain, turned, averaged in spawn(size, reduces_in_inference_mode):
        assert plain.tolist() == [size] * 5
        assert turned.tolist() == [[size] * 2] * 3 and averaged.tolist() == [[1] * 3] * 2


# ---- groups ----


def has_subgroups(comm) -> None:
    for round in range(2):
        pair, rest = on("thinwire", [0, 2]), on("thinwire", [1])
        if comm.rank == 1:
            assert dist.get_rank(pair) == -1
            dist.all_reduce(x := torch.ones(1), group=rest)
            assert float(x) == 1.0
            dist.destroy_process_group(rest)
            continue
        assert isinstance(pair, ThinwireGroup) and dist.get_backend(pair) == "thinwire"
        dist.all_reduce(x := torch.full((2,), float(comm.rank + round)), group=pair)
        assert x.tolist() == [2.0 + 2 * round] * 2
        objects = [None, None]
        dist.all_gather_object(objects, comm.rank, group=pair)
        assert objects == [0, 2]
        dist.broadcast(y := torch.tensor([comm.rank]), 2, group=pair)  # named by its global rank
        assert int(y) == 2
        dist.destroy_process_group(pair)


def test_groups_of_fewer_ranks():
    spawn(3, has_subgroups)


# ---- errors ----


def joined(rank: int, size: int, folder: str, seconds: float) -> dist.Store:
    def meet(name: str) -> None:
        store.set(f"{name}/{rank}", "")
        store.wait([f"{name}/{other}" for other in range(size)], timedelta(seconds=400))

    store = dist.FileStore(f"{folder}/store", size)
    meet("come")  # before the time limit counts
    dist.init_process_group("thinwire", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    dist.barrier()
    meet("connected")  # one that dies when it has left the barrier can end that of others
    return store


def loses_a_peer(rank: int, folder: str, how: str) -> None:
    """Of three, rank 2 dies, or is stopped; both others name it."""
    store = joined(rank, 3, folder, 600.0 if how == "dies" else 2.0)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(1000))
    except CommunicationError as error:
        assert "2" in str(error).partition(": ")[2], error
        print(f"named: {error}", flush=True)
    if how == "silent":
        store.set(f"named/{rank}", "")
        store.wait([f"named/{other}" for other in range(2)], timedelta(seconds=60))


@pytest.mark.parametrize("how", ["dies", "silent"])
def test_a_peer_that_dies_or_is_silent_is_named(tmp_path, how):
    with programs(loses_a_peer, [(rank, str(tmp_path), how) for rank in range(3)], tmp_path) as started:
        for program in started[:2]:
            assert program.wait(400) == 0, program.stderr
            assert "named: rank " in program.stdout


def aborts(comm) -> str:
    retire()
    group = [on("thinwire") for _ in range(2)][
        comm.rank
    ]  # the other rank keeps this one, else it would seem to have died
    work = dist.irecv(torch.zeros(1), 1 - comm.rank, group)
    future = work.get_future()
    comm.barrier()
    group.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        future.wait()
    with pytest.raises(RuntimeError, match="all_reduce failed: the communicator was aborted"):
        dist.all_reduce(torch.ones(1), group=group)
    comm.barrier()
    return str(work.exception())


def test_abort_ends_what_is_under_way():
    assert all("the communicator was aborted" in text for text in spawn(2, aborts))


def refuses(comm) -> None:
    group = on("thinwire")
    with pytest.raises(ValueError, match="expects a tag in 0..2097151, got -1"):
        dist.isend(torch.ones(1), 1 - comm.rank, group, -1)
    with pytest.raises(ValueError, match="expected 2 times the 3 elements of torch.float32, got 5 of torch.float32"):
        dist.all_gather_into_tensor(torch.empty(5), torch.ones(3), group=group)
    with pytest.raises(ValueError, match="expected a tensor for each of 2 ranks, got 2 to send and 1 to receive into"):
        dist.all_gather([torch.empty(3)], torch.ones(3), group=group)
    with pytest.raises(ValueError, match="as many elements from itself as it sends itself, 2, got room for [13]"):
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3], [2, 2], group=group)
    with pytest.raises(ValueError, match=r"got shape \(3, 3\) with torch.sparse_csr. Pass tensor.to_dense\(\)"):
        dist.all_reduce(torch.eye(3).to_sparse_csr(), group=group)
    with pytest.raises(ValueError, match="ReduceOp.MAX is not defined for sparse tensors"):
        dist.all_reduce(torch.eye(3).to_sparse(), Op.MAX, group)
    with pytest.raises(ValueError, match="expects a contiguous tensor, got shape"):
        dist.broadcast(torch.eye(3).to_sparse(), 0, group)
    with pytest.raises(ValueError, match="thinwire sends from main memory, got a tensor on meta"):
        dist.all_reduce(torch.ones(2, device="meta"), group=group)


def test_mistakes_are_refused_at_the_call():
    spawn(2, refuses)


# ---- what trains on it ----


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def trains(comm, backend: str, kind: str, folder: str) -> list[torch.Tensor]:
    """DDP, or FSDP2 with a checkpoint that is saved, lost and loaded; returns the whole parameters."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    retire()
    group, net = on(backend), model()
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.001)
    elif kind == "compiled ddp":
        net = torch.compile(nn.parallel.DistributedDataParallel(net, process_group=group), backend="eager")
    else:
        mesh = dist.DeviceMesh.from_group(group, "cpu")
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(4):
        net(torch.randn(8, 16, generator=generator)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if kind == "fsdp2":
        saved = {"model": net.state_dict()}
        dcp.save(saved, checkpoint_id=f"{folder}/{backend}", process_group=group)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        dcp.load(saved, checkpoint_id=f"{folder}/{backend}", process_group=group)
    whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    return [value.clone() for value in whole.values()] if comm.rank == 0 or kind != "fsdp2" else []


@pytest.mark.parametrize("kind", ["ddp", "compiled ddp", "fsdp2"])
def test_training_ends_as_over_gloo(tmp_path, kind):
    ours, theirs = (spawn(2, trains, backend, kind, str(tmp_path)) for backend in ("thinwire", "gloo"))
    assert len(ours[0]) == 4
    for a, b in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # two terms have one sum; DDP scales before, FSDP2 after it
    if kind != "fsdp2":
        assert all(torch.equal(a, b) for a, b in zip(*ours, strict=True))


def is_a_script(rank: int, folder: str) -> None:
    """Nothing but the import and the name differ from a script for Gloo; it compresses, and forgets to close."""
    import thinwire.comm.backend  # noqa: F401

    dist.init_process_group("thinwire", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    net = nn.parallel.DistributedDataParallel(model())
    handle = tw.compress_gradients(net, tw.Mean(tw.QSGD(bits=4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
    sampler = torch.utils.data.DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    digests = [None, None]
    dist.all_gather_object(digests, sum(float(p.double().sum()) for p in net.parameters()))
    assert digests[0] == digests[1]
    assert handle.ledger.bytes_sent > 0
    print(
        dist.group.WORLD.communicator.ledger.bytes_sent > 0, handle.ledger.bytes_sent < handle.ledger.dense_fp32_bytes
    )


def test_a_script_needs_the_name_alone(tmp_path):
    with programs(is_a_script, [(rank, str(tmp_path)) for rank in range(2)], tmp_path) as started:
        for program in started:
            assert program.wait(400) == 0, program.stderr
            assert program.stdout == "True True\n" and "leaked" not in program.stderr


def is_encrypted_and_relayed(rank: int, folder: str, relay: str) -> None:
    os.environ.update(THINWIRE_CREDENTIALS=f"{folder}/worker{rank}", THINWIRE_NO_LISTEN="1", THINWIRE_RELAY=relay)
    joined(rank, 2, folder, 60.0)
    dist.all_reduce(x := torch.arange(100_000.0))
    assert torch.equal(x, 2 * torch.arange(100_000.0))
    place = dist.group.WORLD.communicator._meeting.place
    assert place.credentials is not None and not place.listens
    dist.destroy_process_group()


def test_variables_name_credentials_and_a_relay(tmp_path):
    keys_of(tmp_path, "worker0", "worker1")
    with Relay("127.0.0.1") as relay:
        address = f"127.0.0.1:{relay.address[1]}"
        with programs(is_encrypted_and_relayed, [(r, str(tmp_path), address) for r in range(2)], tmp_path) as started:
            for program in started:
                assert program.wait(400) == 0, program.stderr


def trains_by_torchft(number: int, lighthouse: str) -> None:
    """DiLoCo of torchft, which makes its process groups anew whenever workers come or go."""
    logging.disable(logging.CRITICAL)
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupWrapper

    class ProcessGroupThinwire(ProcessGroupWrapper):
        def _create_pg(self, store, rank, world_size):
            return ThinwireGroup(store, rank, world_size, self._timeout)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = model()
    manager = Manager(
        pg=ProcessGroupThinwire(timedelta(seconds=60)),
        min_replica_size=2,
        use_async_quorum=False,
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        replica_id=f"worker{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=60),
        hostname="127.0.0.1",
    )
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    torch.manual_seed(number)
    with DiLoCo(manager, [net], inner, outer, sync_every=4):
        for _ in range(12):
            net(torch.randn(8, 16)).square().mean().backward()
            inner.step()
            inner.zero_grad()
    digest = sum(float(parameter.double().sum()) for parameter in net.parameters())
    sent = manager._pg.parent.communicator.ledger.bytes_sent
    print(f"{digest!r} {manager.current_step()} {sent > 0}", flush=True)
    os._exit(0)  # torchft's server would wait for its threads


def test_torchft_trains_on_it(tmp_path):
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=500)
    try:
        address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
        with programs(trains_by_torchft, [(number, address) for number in range(2)], tmp_path) as started:
            for program in started:
                assert program.wait(400) == 0, program.stderr
            assert started[0].stdout == started[1].stdout
            assert started[0].stdout.endswith(" 3 True\n")
    finally:
        lighthouse.shutdown()
