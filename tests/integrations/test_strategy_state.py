"""The state of a strategy through `torch.distributed.checkpoint`, between meshes and DDP's layout."""

from __future__ import annotations

import copy
import hashlib
import warnings

import pytest
import torch
from helpers.sharded import SPARSE, Net, batch, fingerprint, sharded
from helpers.spawn import device_mesh, spawn
from torch import nn

import thinwire as tw


def whole(state, model) -> dict[str, torch.Tensor]:
    """The memory of this worker's replica, put together from all shards."""
    from torch.distributed.tensor import DTensor

    ((_, entry),) = state.state_dict().items()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in entry["memory"]["residual"].items()}


def train(model, rank, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batch(rank, step)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpoint_worker(comm, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    from thinwire.integrations.checkpoint import StrategyState, load

    torch.set_num_threads(1)
    mesh = device_mesh(2, 2)
    model = sharded(mesh["shard"])
    with tw.compress_gradients(model, SPARSE, replicas=mesh["replicate"]) as handle:
        train(model, comm.rank, 3)
        dcp.save({"model": get_model_state_dict(model), "thinwire": StrategyState(handle)}, checkpoint_id=folder)
        held = whole(StrategyState(handle), model)
        replicas = [
            {k: torch.tensor(v) for k, v in one.items()}
            for one in comm.gather_objects({k: v.tolist() for k, v in held.items()})
        ]
        assert any(t.any() for t in held.values()) and not torch.equal(*(r["hidden.weight"] for r in replicas[::2]))

    def state_of(model):
        values = get_model_state_dict(model)
        full = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values.values()]
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in full)).hexdigest()

    # The same mesh: the same bits.
    again = sharded(mesh["shard"], seed=9)
    with tw.compress_gradients(again, SPARSE, replicas=mesh["replicate"]) as handle:
        values = {"model": get_model_state_dict(again)}
        dcp.load(values, checkpoint_id=folder)
        set_model_state_dict(again, values["model"])
        load(handle, folder)
        assert all(torch.equal(t, held[name]) for name, t in whole(StrategyState(handle), again).items())
        with tw.compress_gradients(model, SPARSE, replicas=mesh["replicate"]) as first:
            load(first, folder)
            train(model, comm.rank, 2)
            train(again, comm.rank, 2)
        assert state_of(model) == state_of(again)

    # State that has not the shape of parameters: the same shards, the same bits.
    for i, averager in enumerate(
        (tw.PowerSGD(rank=2), tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback(), exchange="scatter_reduce"))
    ):
        place = f"{folder}-{i}"
        with tw.compress_gradients(model, averager, replicas=mesh["replicate"]) as handle:
            train(model, comm.rank, 2)
            dcp.save({"model": get_model_state_dict(model), "thinwire": StrategyState(handle)}, checkpoint_id=place)
            train(model, comm.rank, 2)
        end = state_of(model)
        with tw.compress_gradients(model, averager, replicas=mesh["replicate"]) as handle:
            values = {"model": get_model_state_dict(model)}
            dcp.load(values, checkpoint_id=place)
            set_model_state_dict(model, values["model"])
            load(handle, place)
            train(model, comm.rank, 2)
        assert state_of(model) == end
    with (
        tw.compress_gradients(Net(), tw.PowerSGD(rank=2)) as handle,
        pytest.raises(ValueError, match="loads on as many shards as it was saved on"),
    ):
        load(handle, f"{folder}-0")

    # State that a new strategy has not: the outer optimizer's momentum, and a round in flight.
    strategy = tw.Local(tw.Mean(), every=2, outer=tw.OuterSGD(), fragments=2, delay=1)

    def attached(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return tw.attach(model, optimizer, strategy, replicas=mesh["replicate"]), optimizer

    handle, optimizer = attached(model)
    with handle:
        train(model, comm.rank, 3, optimizer)
        values = copy.deepcopy(get_model_state_dict(model))  # of this replica: they differ within a period
        dcp.save({"thinwire": StrategyState(handle)}, checkpoint_id=f"{folder}-local")
        train(model, comm.rank, 3, optimizer)
        end = state_of(model)
    handle, optimizer = attached(model)
    with handle:
        set_model_state_dict(model, values)
        load(handle, f"{folder}-local")
        train(model, comm.rank, 3, optimizer)
        assert state_of(model) == end

    # Another number of replicas: one of four shards, and four whole models, keep the mean of the memories.
    expected = {name: (replicas[0][name] + replicas[2][name]) / 2 for name in held}
    one = device_mesh(1, 4)
    for other, replicas_of_other in ((sharded(one["shard"]), one["replicate"]), (Net(), None)):
        with tw.compress_gradients(other, SPARSE, replicas=replicas_of_other) as handle:
            load(handle, folder)
            memories = comm.gather_objects({k: v.tolist() for k, v in whole(StrategyState(handle), other).items()})
            for name, mean in expected.items():
                torch.testing.assert_close(torch.tensor([m[name] for m in memories]).mean(0), mean)
            train(other, comm.rank, 1)
            with pytest.raises(ValueError, match="holds no state of a strategy under 'nothing'"):
                load(handle, folder, key="nothing")


def test_a_checkpoint_of_two_by_two_workers_goes_on_elsewhere(tmp_path):
    spawn(4, checkpoint_worker, str(tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    "strategy",
    [
        "Local(Mean(), every=2, outer=OuterSGD())",
        "Local(Mean(), every=4, delay=2, fragments=2)",
        "Local(Mix(), every=4, delay=2, pull=1.0)",
        "Local(Mean(ALQ(bits=3)), every=2)",
        "Gossip(Mix(), overlap=True)",
    ],
)
def test_a_new_strategy_loads_what_it_has_not(strategy, tmp_path):
    import torch.distributed.checkpoint as dcp

    from thinwire.integrations.checkpoint import StrategyState, load

    def worker(comm, steps):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, strategy, comm=comm) as handle:
            for _ in range(steps):
                model(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
            if steps:
                dcp.save({"thinwire": StrategyState(handle)}, checkpoint_id=tmp_path)
            else:
                load(handle, tmp_path)
            return handle.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch takes one worker without a process group for a mistake
        (saved,), (loaded,) = (tw.LocalWorld(1).run(worker, steps) for steps in (3, 0))
    assert repr(loaded) == repr(saved)


def test_the_state_of_another_strategy_is_refused_by_name(tmp_path):
    import torch.distributed.checkpoint as dcp

    from thinwire.integrations.checkpoint import StrategyState, load

    def worker(comm):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, "Gradients(Mean())", comm=comm) as handle:
            dcp.save({"thinwire": StrategyState(handle)}, checkpoint_id=tmp_path)
        with (
            tw.attach(model, optimizer, "Local(Mean(), every=2)", comm=comm) as handle,
            pytest.raises(ValueError, match="another configuration: its strategy is Gradients, expected Local"),
        ):
            load(handle, tmp_path)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        tw.LocalWorld(1).run(worker)


@pytest.mark.parametrize("strategy", ["Gossip(Mix())", "Local(Mean(), every=1)", "Local(Mean(), every=2, delay=1)"])
def test_saving_and_loading_the_state_of_an_optimizer_without_state_is_no_step(strategy):
    """PyTorch steps there, at a learning rate of 0, to make the state. A round would change the model that was just loaded."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def worker(comm):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, tw.parse(strategy), comm=comm) as handle:
            model(torch.full((1, 3), comm.rank + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            handle.settle()
            sent = comm.ledger.bytes_sent
            for _ in range(comm.rank + 1):  # a worker may do it alone
                values, state = get_state_dict(model, optimizer)
                other = {name: value + comm.rank for name, value in values.items()}
                set_state_dict(model, optimizer, model_state_dict=other, optim_state_dict=state)
            assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
            assert comm.ledger.bytes_sent == sent

    tw.LocalWorld(2, timeout_seconds=20).run(worker)


@pytest.mark.parametrize(
    "codec", [tw.ALQ(bucket_size=64, update_steps=(2,)), tw.Fitted(budget=4, measure_steps=(2,))], ids=repr
)
def test_adaptive_codecs_go_on_from_between_a_measurement_and_its_update(tmp_path, codec):
    import torch.distributed.checkpoint as dcp

    from thinwire.integrations.checkpoint import StrategyState, load

    def attached(comm):
        torch.manual_seed(0)
        model = nn.Linear(64, 32)
        return model, tw.compress_gradients(model, tw.Mean(codec, tw.ErrorFeedback()), comm=comm)

    def gradient(model, step):
        model.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        return model.weight.grad

    def worker(comm):
        (first, handle), (second, other) = attached(comm), attached(comm)
        for step in range(2):
            gradient(first, step)
        dcp.save({"thinwire": StrategyState(handle)}, checkpoint_id=tmp_path)
        load(other, tmp_path)
        for step in range(2, 5):
            assert torch.equal(gradient(first, step), gradient(second, step))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch takes one worker without a process group for a mistake
        tw.LocalWorld(1).run(worker)


LOW_RANK = [
    "Gradients(PowerSGD(rank=1))",  # gains on two rows of 8, and not on one
    "Gradients(Dion(rank=1))",
    "Gossip(PowerGossip(Ring(), rank=2), order='adapt_then_combine')",  # its directions have as many numbers as two rows
    "Gradients(Mean(QSGD(bits=4), ErrorFeedback(), exchange='scatter_reduce', min_ndim=0))",  # one shard of a bias is empty
]
PER_SHARD = [  # step sizes, bounds and choices of codecs, which each shard has for itself
    "Gossip(Choco(Ring(), TopK(0.3)))",
    "Gossip(Moniqua(Ring()))",
    "Gradients(Mean(Fitted(budget=6, measure_steps=(2,)), ErrorFeedback()))",
]


def low_rank_worker(comm, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    from thinwire.integrations.checkpoint import StrategyState, load

    torch.set_num_threads(1)
    mesh = device_mesh(2, 2)

    def steps(model, optimizer, first):
        for step in range(first, first + 3):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + comm.rank))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.reshard()
        return fingerprint(model)

    def attached(strategy, seed):
        torch.manual_seed(seed)
        model = fully_shard(nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1)), mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, optimizer, tw.attach(model, optimizer, tw.parse(strategy), replicas=mesh["replicate"])

    for i, strategy in enumerate(LOW_RANK + PER_SHARD):
        model, optimizer, handle = attached(strategy, 0)
        steps(model, optimizer, 0)
        key = f"model {mesh['replicate'].get_local_rank()}"
        dcp.save({key: get_model_state_dict(model), "thinwire": StrategyState(handle)}, checkpoint_id=f"{folder}/{i}")
        expected = steps(model, optimizer, 3)
        handle.detach()
        model, optimizer, handle = attached(strategy, 1)
        values = get_model_state_dict(model)
        dcp.load({key: values}, checkpoint_id=f"{folder}/{i}")
        model.load_state_dict(values)
        load(handle, f"{folder}/{i}")
        assert steps(model, optimizer, 3) == expected, strategy
        handle.detach()
        if strategy in PER_SHARD[:2]:  # Fitted has errors of shards
            model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with tw.attach(model, optimizer, tw.parse(strategy), replicas=mesh["replicate"]) as handle:
                load(handle, f"{folder}/{i}")  # from two shards onto whole models


def test_uneven_shards_go_on_with_the_same_bits_where_some_have_other_state_than_others(tmp_path):
    spawn(4, low_rank_worker, str(tmp_path))
