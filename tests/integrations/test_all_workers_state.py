"""The states of all workers, as trainers save them."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.sharded import SPARSE, Net, fingerprint, sharded, train
from helpers.spawn import device_mesh, spawn
from torch import nn

import thinwire as tw
from thinwire.comm import laid_out
from thinwire.comm.layout import Layout
from thinwire.integrations.state import AllWorkersState, num_workers


def test_the_main_process_has_all_states_where_a_layout_gives_it_another_rank():
    def worker(comm):
        given, model = comm.rank, nn.Linear(2, 2)
        with tw.compress_gradients(model, tw.Mean(), comm=laid_out(comm, Layout((2, 0, 1)))) as strategy:
            assert strategy.comm.rank == (1, 2, 0)[given]
            return sorted(AllWorkersState(strategy, model, []).state_dict())

    assert tw.LocalWorld(3).run(worker) == [["rank0", "rank1", "rank2"], ["rank2"], ["rank0"]]


def sharded_worker(comm, folder):
    mesh = device_mesh(2, 2)

    def attached(strategy, seed):
        model = sharded(mesh["shard"], seed, width=8)  # all shards are of one size, so that those of others would fit
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = tw.attach(model, optimizer, strategy, replicas=mesh["replicate"])
        return model, optimizer, handle, AllWorkersState(handle, model, [optimizer])

    for i, strategy in enumerate((tw.Gradients(SPARSE), tw.Local(tw.Mean(), every=3))):
        model, optimizer, handle, state = attached(strategy, 0)
        with handle:
            train(model, comm.rank, 4, optimizer=optimizer)
            saved, shards = state.state_dict(), [part.to_local().clone() for part in model.state_dict().values()]
            optimizer_state = copy.deepcopy(optimizer.state_dict())
            if comm.rank == 0:
                torch.save(saved, folder / f"{i}.pt")
            comm.barrier()
            train(model, comm.rank, 2, optimizer=optimizer)
            end = fingerprint(model)
        saved = torch.load(folder / f"{i}.pt", weights_only=True)
        assert num_workers(saved) == 4
        again, optimizer, handle, state = attached(strategy, 9)
        with handle:
            if i == 0:  # a trainer saves these itself, unless they differ
                for part, held in zip(again.state_dict().values(), shards, strict=True):
                    part.to_local().copy_(held)
                optimizer.load_state_dict(optimizer_state)
            state.load_state_dict(saved)
            train(again, comm.rank, 2, optimizer=optimizer)
            assert fingerprint(again) == end
    whole = Net()
    with tw.compress_gradients(whole, SPARSE) as handle:
        with pytest.raises(
            ValueError, match="the state of a whole model is needed, .* 'shard 0 of 2, rank0'.* as many shards"
        ):
            AllWorkersState(handle, whole, []).load_state_dict(saved)
    return sorted(saved)


def fewer_worker(comm, folder):
    """One replica goes on from the states of two."""
    mesh, saved = device_mesh(1, 2), torch.load(folder / "0.pt", weights_only=True)
    model = sharded(mesh["shard"], width=8)
    with tw.compress_gradients(model, SPARSE, replicas=mesh["replicate"]) as handle:
        AllWorkersState(handle, model, []).load_state_dict(saved)
        found = handle.state_dict()["rank0"]["memory"]["residual"]
        first, second = (saved[f"shard {comm.rank} of 2, rank{rank}"]["memory"]["residual"] for rank in (0, 1))
    assert any(residual.any() for residual in found.values())
    for name, residual in found.items():
        torch.testing.assert_close(residual, (first[name] + second[name]) / 2)


def test_each_worker_of_a_sharded_model_gets_its_own_state_back(tmp_path):
    keys = spawn(4, sharded_worker, tmp_path)[0]
    rows = [(shard, own, rank) for shard in (0, 1) for own in ("own of ", "") for rank in (0, 1)]
    assert keys == [f"shard {shard} of 2, {own}rank{rank}" for shard, own, rank in rows]
    spawn(2, fewer_worker, tmp_path)
