"""`compress_gradients` in an ordinary training loop: DDP in real processes, plain modules in threads."""

from __future__ import annotations

import contextlib
import copy
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.gradients import (
    batch,
    both_branches,
    fingerprint,
    make_model,
    one_branch,
    optimizer_of,
    train,
    train_with_scaler,
)
from helpers.spawn import run_threads, spawn
from helpers.states import leaves
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.strategy.gradients.rounds import GradientRounds

SPARSE = tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback())


def ddp_worker(comm, averager, ddp_options, accumulate, alternate):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(make_model(), **ddp_options)
    handle = tw.compress_gradients(ddp, averager, seed=3)
    uses = one_branch if alternate else both_branches
    train(ddp, comm.rank, no_sync=handle.no_sync if accumulate else None, uses=uses, parameters=ddp.module)
    names = sorted(name.partition(".")[2] for name in leaves(handle.state_dict()[f"rank{comm.rank}"]["memory"]))
    result = fingerprint(ddp.module), handle.ledger.bytes_sent, names, list(ddp.module.state_dict())
    handle.detach()
    return result


@pytest.mark.parametrize(
    "ddp_options, accumulate, alternate",
    [
        ({}, False, False),
        ({"gradient_as_bucket_view": True}, True, False),
        ({"bucket_cap_mb": 0.002}, True, False),
        ({"static_graph": True}, False, False),
        ({"find_unused_parameters": True, "bucket_cap_mb": 0.002}, False, True),
    ],
    ids=["default", "bucket_view+no_sync", "many buckets+no_sync", "static_graph", "unused"],
)
def test_ddp_and_a_plain_module_train_alike(ddp_options, accumulate, alternate):
    """Bit-identical replicas, and the same bits from DDP's buckets (rebuilt or not) as from our own."""
    by_ddp = spawn(3, ddp_worker, SPARSE, ddp_options, accumulate, alternate)

    def plain_worker(comm):
        model = make_model(seed=comm.rank)  # attaching makes them equal to rank 0's
        handle = tw.compress_gradients(model, SPARSE, comm=comm, seed=3, bucket_bytes=1000)
        uses = one_branch if alternate else both_branches
        train(model, comm.rank, no_sync=handle.no_sync if accumulate else None, uses=uses)
        handle.detach()
        return fingerprint(model)

    hashes = {h for h, *_ in by_ddp}
    assert len(hashes) == 1
    assert set(tw.LocalWorld(3).run(plain_worker)) == hashes
    _, sent, memory, keys = by_ddp[0]
    assert sent > 0
    assert memory == ["head.weight", "left.weight", "right.weight"]
    assert keys == list(make_model().state_dict())


def dense_worker(comm):
    torch.set_num_threads(1)
    ours, theirs = DistributedDataParallel(make_model()), DistributedDataParallel(make_model())
    handle = tw.compress_gradients(ours, tw.Mean())
    train(ours, comm.rank, parameters=ours.module), train(theirs, comm.rank, parameters=theirs.module)
    handle.detach()
    return [
        (a.detach() - b.detach()).abs().max().item()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    ]


def test_the_identity_codec_is_ddp():
    """Equal to dense DDP but for the order of one division and one sum (a unit in the last place a step)."""
    for differences in spawn(2, dense_worker):
        assert max(differences) < 1e-6


def granularity_worker(comm, granularity):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.002)
    handle = tw.compress_gradients(ddp, tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), granularity=granularity))
    train(ddp, comm.rank, parameters=ddp.module)
    handle.detach()
    return fingerprint(ddp.module)


@pytest.mark.parametrize("granularity", ["bucket", "model"])
def test_other_granularities_keep_replicas_identical(granularity):
    assert len(set(spawn(2, granularity_worker, granularity))) == 1


def hook_pair_worker(comm):
    torch.set_num_threads(1)
    model = make_model()
    state, hook = tw.strategy.gradient_hook(model, SPARSE, seed=3)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hook)
    train(ddp, comm.rank, parameters=model)
    state.detach()
    return fingerprint(model)


def test_the_plain_hook_pair_is_the_same_hook():
    expected = {h for h, *_ in spawn(2, ddp_worker, SPARSE, {}, False, False)}
    assert set(spawn(2, hook_pair_worker)) == expected and len(expected) == 1


def resumed_worker(comm):
    """The fingerprints of models that go on from one checkpoint: by a handle, by a hook, and by a hook without the state."""
    torch.set_num_threads(1)
    model = make_model()
    with tw.compress_gradients(model, SPARSE, seed=3, comm=comm) as handle:
        train(model, comm.rank, steps=2)
        saved = handle.state_dict()

    def by_handle(own):
        ddp = DistributedDataParallel(own)
        return ddp, tw.compress_gradients(ddp, SPARSE, seed=3)

    def by_hook(own):
        state, hook = tw.strategy.gradient_hook(own, SPARSE, seed=3)
        ddp = DistributedDataParallel(own)
        ddp.register_comm_hook(state, hook)
        return ddp, state

    found = []
    for attached, loads in ((by_handle, True), (by_hook, True), (by_hook, False)):
        own = copy.deepcopy(model)
        ddp, handle = attached(own)
        if loads:
            handle.load_state_dict(saved)
        train(ddp, comm.rank, steps=2, parameters=own)
        handle.detach()
        found.append(fingerprint(own))
    return found


def test_a_hook_restores_its_state_once_the_first_bucket_has_connected_it():
    (by_handle, by_hook, without), other = spawn(2, resumed_worker)
    assert by_handle == by_hook != without and other == [by_handle, by_hook, without]


def scaler_worker(comm, poison_step):
    states, scales, model = train_with_scaler(comm, SPARSE, poison_step, seed=3)
    before, after = ({k: v for k, v in s.items() if k.startswith("memory.")} for s in states[poison_step - 1 :][:2])
    unchanged = all(torch.equal(after[k], v) for k, v in before.items())
    return scales, unchanged, model


def test_a_loss_scaler_skips_the_step_on_every_worker_and_memory_stays():
    results = spawn(3, scaler_worker, 2)
    assert all(unchanged for _, unchanged, _ in results)
    assert len({h for *_, h in results}) == 1
    assert all(scales[2] == scales[1] / 2 for scales, *_ in results)


def reentrant_worker(comm):
    """Each layer has a bucket. The first and the last one are reduced in backward passes inside of the model's."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    ddp, optimizer = DistributedDataParallel(Checkpointed(net), bucket_cap_mb=1e-4), optimizer_of(net)
    with tw.compress_gradients(ddp, SPARSE) as handle:
        for step in range(4):
            before = fingerprint(net)
            optimizer.zero_grad()
            ddp(batch(comm.rank, step)[0]).sum().mul(float("inf") if step == 2 else 1.0).backward()
            optimizer.step()
            assert (fingerprint(net) == before) == (step == 2)
        assert handle.num_skipped == 1


class Checkpointed(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        x = checkpoint(self.net[0], x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.net[2], self.net[1](x), use_reentrant=True)


@pytest.mark.filterwarnings("ignore:Gradients. a step was not finite")
def test_a_step_that_is_not_finite_is_skipped_under_reentrant_checkpoints():
    spawn(2, reentrant_worker)


def broken_backward_worker(comm):
    """An error that the loop survives: the next backward begins a new round."""
    model = make_model()
    handle = tw.compress_gradients(model, SPARSE, comm=comm, bucket_bytes=1000)

    def explode(grad):
        raise RuntimeError("on purpose")

    x, _ = batch(comm.rank, 0)
    out = model(x)
    hidden = model.left.weight.register_hook(explode)
    with pytest.raises(RuntimeError, match="on purpose"):
        out.sum().backward()
    hidden.remove()
    assert all(not v.any() for v in leaves(handle.state_dict()[f"rank{comm.rank}"]["memory"]).values())
    model.zero_grad()
    train(model, comm.rank, steps=2)
    handle.detach()
    return fingerprint(model)


def test_an_error_in_backward_abandons_the_round():
    assert len(set(tw.LocalWorld(2).run(broken_backward_worker))) == 1


@pytest.mark.parametrize("where", ["in the middle", "after the last bucket", "of two optimizers"])
def test_gradients_of_a_backward_pass_that_an_error_broke_off_are_not_used_again(where, monkeypatch):
    """Its averages may come when the next pass has begun, and are decoded into tensors that it must not use."""
    decode, is_late = GradientRounds._finish, [False]
    monkeypatch.setattr(GradientRounds, "_finish", lambda *args: (time.sleep(0.2 * is_late[0]), decode(*args))[1])

    def worker(comm):
        model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 4))
        x = torch.ones(3, 20, requires_grad=True)
        with tw.compress_gradients(model, tw.Mean(), comm=comm, bucket_bytes=1):
            model(x * 1).sum().backward()
            expected = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            fails = (x if where == "after the last bucket" else model[0].weight).register_hook(lambda grad: 1 / 0)
            is_late[0] = True
            with pytest.raises(ZeroDivisionError):
                model(x * 1).sum().backward()
            is_late[0] = False
            fails.remove()
            model[0].zero_grad(set_to_none=False)
            model[1].zero_grad(set_to_none=where == "of two optimizers")
            with pytest.raises(ValueError, match="rank 0: an error broke off the last backward pass.*set_to_none=True"):
                model(x * 1).sum().backward()
            model.zero_grad(set_to_none=True)
            model(x * 1).sum().backward()
            assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))

    tw.LocalWorld(1).run(worker)


def test_a_bucket_that_fails_abandons_the_round_even_if_the_last_one_succeeds(monkeypatch):
    sums, failures = tw.TopK.decode_sum_segments, iter([RuntimeError("on purpose")])

    def fails_once(*arguments):
        for error in failures:
            raise error
        return sums(*arguments)

    monkeypatch.setattr(tw.TopK, "decode_sum_segments", fails_once)

    def worker(comm):
        model = make_model()
        handle = tw.compress_gradients(model, tw.Mean(tw.TopK(0.01), tw.ErrorFeedback()), comm=comm, bucket_bytes=1000)
        x, _ = batch(comm.rank, 0)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x).sum().backward()
        before = handle.state_dict()["rank0"]
        model.zero_grad()
        model(x).sum().backward()
        after = handle.state_dict()["rank0"]
        handle.detach()
        return before, after

    ((before, after),) = tw.LocalWorld(1).run(worker)
    assert before["progress"]["step"] == 0 and not any(v.any() for v in leaves(before["memory"]).values())
    assert after["progress"]["step"] == 1 and any(v.any() for v in leaves(after["memory"]).values())


def lost_peer_worker(comm):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(make_model())
    own = tw.comm.ProcessGroupCommunicator(timeout_seconds=5)
    tw.compress_gradients(ddp, SPARSE, comm=own)
    train(ddp, comm.rank, steps=3, parameters=ddp.module)  # by now DDP has rebuilt its buckets, over its own group
    store = dist.distributed_c10d._get_default_store()
    if comm.rank == 1:  # to the other one it is lost
        store.wait(["rank 0 has failed"], timedelta(seconds=50))
        return "lost"
    with pytest.raises(tw.comm.CommunicationError, match="rank 0: all_gather failed"):
        train(ddp, comm.rank, steps=1, parameters=ddp.module)
    store.set("rank 0 has failed", "")
    return "raised"


def test_a_lost_peer_is_an_error_not_a_hang():
    assert spawn(2, lost_peer_worker) == ["raised", "lost"]


def test_resumed_state_is_the_same_state():
    def worker(comm, resume):
        model = make_model()
        handle = tw.compress_gradients(model, SPARSE, comm=comm)
        train(model, comm.rank, steps=3)
        if resume:
            saved = handle.state_dict()
            handle.detach()
            handle = tw.compress_gradients(model, SPARSE, comm=comm)
            handle.load_state_dict(saved)
        train(model, comm.rank, steps=3)
        handle.detach()
        return fingerprint(model)

    assert tw.LocalWorld(2).run(worker, True) == tw.LocalWorld(2).run(worker, False)


def test_a_parameter_that_is_frozen_later_stays_as_it_is():
    def worker(comm):
        model = make_model()
        optimizer = optimizer_of(model)  # with momentum and weight decay
        with tw.compress_gradients(model, SPARSE, comm=comm):
            for step in range(3):
                if step == 2:
                    model.left.requires_grad_(False)
                    before = fingerprint(model.left)
                optimizer.zero_grad()
                x, y = batch(comm.rank, step)
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert fingerprint(model.left) == before
        return fingerprint(model)

    assert len(set(tw.LocalWorld(2).run(worker))) == 1


@dataclass(frozen=True, repr=False)
class WithoutHandle(tw.Mean):
    """Forgets to return what `wait` is called on."""

    def step(self, state, tensors, comm, scale=1.0):
        super().step(state, tensors, comm, scale)


def test_mistakes_have_one_clear_line():
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            stack.enter_context(pytest.raises(ValueError, match="init_process_group"))
            tw.compress_gradients(make_model(), SPARSE)

    def frozen(comm):
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            tw.compress_gradients(nn.Linear(2, 2).requires_grad_(False), SPARSE, comm=comm)
        model = nn.Linear(2, 2)
        with tw.compress_gradients(model, WithoutHandle(), comm=comm):
            with pytest.raises(ValueError, match=r"WithoutHandle\(\): step must return a Handle, got None"):
                model(torch.ones(1, 2)).sum().backward()
        embedding = nn.Embedding(5, 3, sparse=True)
        tw.compress_gradients(embedding, SPARSE, comm=comm)
        with pytest.raises(ValueError, match="'weight' is sparse"):
            embedding(torch.tensor([1])).sum().backward()

    tw.LocalWorld(1).run(frozen)


def test_float64_gradients_are_averaged_in_float32():
    def worker(comm):
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        with tw.compress_gradients(model, tw.Mean(), comm=comm):
            model(torch.full((1, 1), comm.rank + 1 / 3, dtype=torch.float64)).sum().backward()
        return model.weight.grad

    first, second = tw.LocalWorld(2).run(worker)
    assert first.dtype == torch.float64 and torch.equal(first, second)
    assert first.item() == first.float().item() == pytest.approx(5 / 6, rel=2e-7)


def in_one_backward(comm, exchange, shared):
    """Two models whose gradients one backward pass makes, over one communicator or over two."""
    torch.manual_seed(0)
    a, b = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)
    averager = tw.Mean(tw.QSGD(bits=4), exchange=exchange)
    for model in (a, b):
        tw.Gradients(averager, bucket_bytes=64).attach(model, comm=comm if shared else None)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        (a(x) + b(x)).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for model in (a, b) for p in model.parameters()])


def test_two_strategies_may_share_a_communicator_in_one_backward_pass_if_each_sends_at_once():
    for together, apart in zip(
        *(spawn(2, in_one_backward, "all_gather", shared) for shared in (True, False)), strict=True
    ):
        assert torch.equal(together, apart)
    with pytest.raises(ValueError, match="QSGD.* sends several messages one after the other; leave comm out"):
        spawn(2, in_one_backward, "scatter_reduce", True)
    spawn(2, in_one_backward, "scatter_reduce", False)


EACH_WAY = [
    "Mean()",
    "Mean(QSGD(bits=8), exchange='all_gather')",
    "Mean(QSGD(bits=8), ErrorFeedback(), exchange='scatter_reduce')",
    "Mean(TopK(0.1), ErrorFeedback())",
    "Mean(Threshold(0.01), ErrorFeedback())",
    "PowerSGD(rank=1)",
]


def survives_alone(comm, averager: str):
    """Rank 1 loses a batch to an error, with some buckets of its backward pass sent, and goes on with the next one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fails = []

    def explode(grad):
        if fails and comm.rank == 1:
            fails.clear()
            raise torch.OutOfMemoryError("on purpose")

    model[1].weight.register_hook(explode)
    generator, num_lost, skips = torch.Generator().manual_seed(comm.rank), 0, []
    with tw.compress_gradients(model, tw.parse(averager), comm=comm, bucket_bytes=1000, max_nonfinite=3) as handle:
        for step in range(6):
            fails += [step] if step == 2 else []
            optimizer.zero_grad()
            try:
                model(torch.randn(2, 16, generator=generator)).square().sum().backward()
            except torch.OutOfMemoryError:
                num_lost += 1
                continue
            optimizer.step()
            skips.append(handle.num_skipped)
    return fingerprint(model), num_lost, skips


@pytest.mark.filterwarnings("ignore:Gradients. a step was not finite")
@pytest.mark.parametrize("averager", EACH_WAY)
@pytest.mark.parametrize("run", [spawn, run_threads])
def test_an_error_that_one_worker_survives_is_a_step_that_all_skip(averager, run):
    """The others get NaN for the rest; they got the buckets of its next batch, and models drifted apart."""
    (model, num_lost, skips), (other, other_lost, other_skips) = run(2, survives_alone, averager)
    assert model == other and (num_lost, other_lost) == (0, 1)
    assert skips == [0, 0, 1, 1, 1, 1] and other_skips == [0, 0, 1, 1, 1]


def test_an_optimizer_of_other_parameters_is_refused():
    def worker(comm):
        model = nn.Linear(2, 2)
        before = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)  # as one that was made before `fully_shard`
        with pytest.raises(
            ValueError, match=r"the optimizer has no parameter of the model, .* make it after fully_shard"
        ):
            tw.attach(model, before, tw.Gradients(tw.Mean()), comm=comm)

    tw.LocalWorld(1).run(worker)
