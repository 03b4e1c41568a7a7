"""Saved state names its worker: nobody loads another's, also not by way of `torch.distributed.checkpoint`."""

from __future__ import annotations

import pytest
import torch
from helpers.gradients import make_model, train
from helpers.spawn import spawn
from torch import nn

import thinwire as tw

MEAN = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback())


def trained(comm, averager=MEAN, model=None):
    model = make_model() if model is None else model
    handle = tw.compress_gradients(model, averager, comm=comm)
    if hasattr(model, "head"):
        train(model, comm.rank, steps=2)
    return handle


def test_state_is_keyed_by_rank_and_loads_again():
    def worker(comm):
        with trained(comm) as handle:
            saved = handle.state_dict()
        assert list(saved) == [f"rank{comm.rank}"] and saved[f"rank{comm.rank}"]["step"] == 2
        with tw.compress_gradients(make_model(), MEAN, comm=comm) as handle:
            handle.load_state_dict(saved)
            assert handle.state_dict()[f"rank{comm.rank}"]["step"] == 2
        return saved

    saved = tw.LocalWorld(2).run(worker)
    memories = [saved[rank][f"rank{rank}"]["memory"]["head.weight"] for rank in (0, 1)]
    assert not torch.equal(*memories)


def test_another_workers_state_is_refused():
    def worker(comm):
        with trained(comm) as handle:
            theirs = {f"rank{1 - comm.rank}": handle.state_dict()[f"rank{comm.rank}"]}
            theirs[f"rank{1 - comm.rank}"]["identity"]["rank"] = 1 - comm.rank
            with pytest.raises(
                ValueError, match=f"rank {comm.rank} of 2 cannot load the state of rank {1 - comm.rank} of 2"
            ):
                handle.load_state_dict(theirs)

    tw.LocalWorld(2).run(worker)


def test_another_number_of_workers_is_refused():
    def worker(comm):
        with trained(comm) as handle:
            return handle.state_dict()

    (saved,) = tw.LocalWorld(1).run(worker)

    def pair(comm):
        with trained(comm) as handle, pytest.raises(ValueError, match=f"rank {comm.rank} of 2 .* rank 0 of 1"):
            handle.load_state_dict(saved)

    tw.LocalWorld(2).run(pair)


@pytest.mark.parametrize(
    "averager, model, message",
    [
        (
            tw.Mean(tw.TopK(0.2), tw.ErrorFeedback()),
            None,
            r"its averager is .*TopK\(ratio=0.1\).* expected .*ratio=0.2",
        ),
        (MEAN, nn.Linear(8, 4), r"its tensors is left.weight \(32, 16\) torch.float32, expected weight \(4, 8\)"),
    ],
    ids=["averager", "tensors"],
)
def test_another_configurations_state_is_refused(averager, model, message):
    def worker(comm):
        with trained(comm) as handle:
            saved = handle.state_dict()
        with trained(comm, averager, model) as handle, pytest.raises(ValueError, match=message) as caught:
            handle.load_state_dict(saved)
        assert "\n" not in str(caught.value)

    tw.LocalWorld(1).run(worker)


def checkpointed_worker(comm, folder):
    import torch.distributed.checkpoint as dcp

    with trained(comm) as handle:
        saved = handle.state_dict()
        dcp.save({"averager": saved}, checkpoint_id=folder)
    with tw.compress_gradients(make_model(), MEAN, comm=comm) as handle:
        loaded = {"averager": handle.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
        handle.load_state_dict(loaded["averager"])
        now = handle.state_dict()
    own = f"rank{comm.rank}"
    same = all(torch.equal(now[own]["memory"][name], m) for name, m in saved[own]["memory"].items())
    return same, now[own]["step"], now[own]["memory"]["head.weight"].abs().sum().item()


def test_distributed_checkpoint_gives_each_worker_its_own_memory_back(tmp_path):
    results = spawn(2, checkpointed_worker, str(tmp_path))
    assert [result[:2] for result in results] == [(True, 2)] * 2
    assert results[0][2] != results[1][2]
