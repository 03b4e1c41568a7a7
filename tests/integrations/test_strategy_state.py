"""The state of a strategy through `torch.distributed.checkpoint`, between meshes and DDP's layout."""

from __future__ import annotations

import hashlib

import pytest
import torch
from helpers.sharded import SPARSE, Net, batch, sharded
from helpers.spawn import device_mesh, spawn
from torch import nn

import thinwire as tw


def whole(state, model) -> dict[str, torch.Tensor]:
    """The memory of this worker's replica, put together from all shards."""
    from torch.distributed.tensor import DTensor

    ((_, entry),) = state.state_dict().items()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in entry["memory"]["residual"].items()}


def train(model, rank, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
