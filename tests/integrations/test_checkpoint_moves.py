"""A checkpoint of 2 x 2 workers goes on as 1 x 2 and as DDP, and from there on 2 x 2 again, with its memory and optimizer."""

from __future__ import annotations

import torch
from helpers.sharded import SPARSE, Net, fingerprint, loss_of, replicas_are_equal, sharded, train
from helpers.spawn import device_mesh, spawn
from helpers.states import leaves
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.membership import keep_mean

# Their state has other shapes than parameters too.
OTHERS = (tw.PowerSGD(rank=2), tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback(), exchange="scatter_reduce"))


def memory_of(handle):
    """The memory of this worker's replica, put together from its shards."""
    from torch.distributed.tensor import DTensor

    from thinwire.integrations.checkpoint import StrategyState

    (state,) = StrategyState(handle).state_dict().values()
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in leaves(state["memory"]).items()
    }


class Run:
    """A model with momentum, compressed between replicas; sharded models also encode what FSDP sends."""

    def __init__(self, comm, mesh=None):
        torch.set_num_threads(1)
        self.comm, self.mesh, replicas = comm, mesh, None
        if mesh is None:
            torch.manual_seed(5)
            self.model = DistributedDataParallel(Net())
        else:
            self.model, replicas = sharded(mesh["shard"], seed=7), mesh["replicate"]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.handle = tw.compress_gradients(self.model, SPARSE, replicas=replicas)
        self.shards = None if mesh is None else tw.compress_shards(self.model, seed=3)

    def train(self, steps):
        return train(self.model, self.comm.rank, steps, optimizer=self.optimizer)

    def save(self, folder):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        from thinwire.integrations.checkpoint import StrategyState

        model, optimizer = get_state_dict(self.model, self.optimizer)
        entries = {"model": model, "optimizer": optimizer, "thinwire": StrategyState(self.handle)}
        dcp.save(entries | ({"shards": self.shards} if self.shards else {}), checkpoint_id=folder)

    def load(self, folder, with_shards=True):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        from thinwire.integrations.checkpoint import load

        model, optimizer = get_state_dict(self.model, self.optimizer)
        entries = {"model": model, "optimizer": optimizer}
        dcp.load(entries | ({"shards": self.shards} if self.shards and with_shards else {}), checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=entries["model"], optim_state_dict=entries["optimizer"]
        )
        load(self.handle, folder)
        return self

    def close(self):
        self.handle.detach()
        if self.shards is not None:
            self.shards.detach()


def first_run(comm, folder):
    run = Run(comm, device_mesh(2, 2))
    run.train(8)
    run.save(folder)
    held = memory_of(run.handle)
    run.train(3)
    ends = fingerprint(run.model), loss_of(run.model)
    run.close()
    return held, ends, [with_other(run, averager, f"{folder}-{i}") for i, averager in enumerate(OTHERS)]


def with_other(run, averager, folder):
    """Save another averager's state; returns its memory."""
    import torch.distributed.checkpoint as dcp

    from thinwire.integrations.checkpoint import StrategyState

    with tw.compress_gradients(run.model, averager, replicas=run.mesh["replicate"]) as handle:
        train(run.model, run.comm.rank, 2)
        dcp.save({"thinwire": StrategyState(handle)}, checkpoint_id=folder)
        return memory_of(handle)


def elsewhere(comm, folder, memories, loss, others, to_one_replica, to_ddp):
    """One replica of two shards, then two replicas of whole models."""
    from thinwire.integrations.checkpoint import load

    run = Run(comm, device_mesh(1, 2)).load(folder)
    expected = {name: keep_mean([m[name] for m in memories], 0, 1) for name in memories[0]}
    assert all(torch.equal(t, expected[name]) for name, t in memory_of(run.handle).items())
    assert run.shards.state_dict() == {"": 8, "hidden": 8}
    run.train(3)
    assert loss_of(run.model) < 1.1 * loss
    run.save(to_one_replica)
    one = memory_of(run.handle)
    run.close()
    for i, averager in enumerate(OTHERS):
        with tw.compress_gradients(run.model, averager, replicas=run.mesh["replicate"]) as handle:
            load(handle, f"{folder}-{i}")
            for name, t in memory_of(handle).items():
                assert torch.equal(t, keep_mean([replica[i][name] for replica in others], 0, 1))
            train(run.model, comm.rank, 1)

    run = Run(comm).load(folder)
    assert all(torch.equal(t, memories[comm.rank][name]) for name, t in memory_of(run.handle).items())
    run.save(to_ddp)
    run.train(3)
    run.close()
    return one


def back_again(comm, one_replica, ddp, memory, ends):
    mesh = device_mesh(2, 2)
    # Through DDP and back, without a step there: the same bits as if it had stayed.
    run = Run(comm, mesh).load(ddp, with_shards=False)
    run.shards.load_state_dict({"": 8, "hidden": 8})
    run.train(3)
    assert fingerprint(run.model) == ends[comm.rank]
    run.close()
    # One replica's memory is shared by two; its mean is kept.
    run = Run(comm, mesh).load(one_replica)
    parts = comm.gather_objects({name: t.tolist() for name, t in memory_of(run.handle).items()})
    for name, t in memory.items():
        kept = (torch.tensor(parts[0][name]) + torch.tensor(parts[2][name])) / 2
        torch.testing.assert_close(kept, t)
    run.train(2)
    assert replicas_are_equal(comm, mesh, run.model)
    run.close()


def test_a_checkpoint_moves_between_meshes_and_ddp(tmp_path):
    first, one, ddp = (str(tmp_path / name) for name in ("first", "one", "ddp"))
    results = spawn(4, first_run, first)
    memories = [results[0][0], results[2][0]]
    assert any(t.any() for t in memories[0].values())
    others = [results[0][2], results[2][2]]
    moved = spawn(2, elsewhere, first, memories, results[0][1][1], others, one, ddp)
    spawn(4, back_again, one, ddp, moved[0], [ends[0] for _, ends, _ in results])
