"""PyTorch's training features with averaged gradients: the same weights as one process that trains on all workers' data."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.spawn import device_mesh, spawn
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw

VOCABULARY, WIDTH, STEPS = 13, 16, 3


@dataclass(frozen=True)
class Features:
    compiled: bool = False
    scaled: bool = False
    autocast: bool = False
    accumulated: bool = False
    clipped: bool = False
    checkpointed: bool = False
    tied: bool = False
    keeps_zeros: bool = False  # zero_grad(set_to_none=False)


SOME = [
    Features(compiled=True),
    Features(checkpointed=True, tied=True),
    Features(accumulated=True, clipped=True),
    Features(scaled=True, keeps_zeros=True),
    Features(autocast=True),
]
ALL = Features(**{name: True for name in Features.__dataclass_fields__})


class Model(nn.Module):
    """Predicts a token from one before; the embedding may be the head too."""

    def __init__(self, features: Features):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if features.tied:
            self.head.weight = self.embedding.weight
        self.is_checkpointed = features.checkpointed

    def forward(self, tokens):
        h = self.embedding(tokens)
        if self.is_checkpointed:
            h = h + checkpoint(self.block, h, use_reentrant=False)
        else:
            h = h + self.block(h)
        return self.head(self.norm(h))


def make(features, seed=0, mesh=None):
    torch.manual_seed(seed)
    model = Model(features)
    if mesh is None:
        return torch.compile(model, backend="aot_eager") if features.compiled else model
    from torch.distributed.fsdp import fully_shard

    if features.compiled:  # block by block, as torchtitan does
        model.block.compile(backend="aot_eager")
    fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model, ranks, step, features):
    tokens = [torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(100 * step + r)) for r in ranks]
    x = torch.cat(tokens)
    with torch.autocast("cpu", torch.bfloat16) if features.autocast else contextlib.nullcontext():
        return nn.functional.cross_entropy(model(x), (3 * x + 1) % VOCABULARY)


def train(model, features, ranks, scaler, handle=None, sharded=False, poisoned=()):
    """Steps of an ordinary loop, two backward passes each if gradients accumulate; the loss of a poisoned step is infinite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        for part in range(1 + features.accumulated):
            is_last = part == features.accumulated
            if sharded and features.accumulated:
                model.set_requires_gradient_sync(is_last)
            no_sync = handle is not None and not sharded and not is_last
            with handle.no_sync() if no_sync else contextlib.nullcontext():
                loss = loss_of(model, ranks, 2 * step + part, features)
                losses.append(loss.item())
                scaler.scale(loss * float("inf") if step in poisoned else loss).backward()
        scaler.unscale_(optimizer)
        if features.clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=not features.keeps_zeros)
    return losses


def whole(model):
    from torch.distributed.tensor import DTensor

    values = [p.detach() for p in model.parameters()]
    return [v.full_tensor() if isinstance(v, DTensor) else v.clone() for v in values]


def worker(comm):
    torch.set_num_threads(1)
    mesh = device_mesh(2, 2)

    def attach(model, averager, codec, is_sharded, scaler):
        stack = contextlib.ExitStack()
        replicas = mesh["replicate"] if is_sharded else None
        handle = stack.enter_context(
            tw.compress_gradients(model, averager, replicas=replicas, scaler=scaler if scaler.is_enabled() else None)
        )
        if is_sharded:
            stack.enter_context(tw.compress_shards(model, gradients=codec, parameters=codec))
        return stack, handle

    def run(features, averager, codec, is_sharded):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=features.scaled)
        seed = mesh.get_coordinate()[0] if is_sharded else comm.rank  # attaching makes replicas equal to replica 0
        model = make(features, seed, mesh["shard"] if is_sharded else None)
        stack, handle = attach(model, averager, codec, is_sharded, scaler)
        with stack:
            poisoned = [1] if features.scaled and comm.rank == 3 else []
            losses = train(model, features, [comm.rank], scaler, handle, is_sharded, poisoned)
            return whole(model), losses, scaler.get_scale(), handle.num_skipped

    for features in SOME:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=features.scaled)
        alone = make(replace(features, compiled=False))
        train(alone, features, range(comm.size), scaler, poisoned=[1] if features.scaled else [])
        for is_sharded in (False, True):
            found, _, scale, num_skipped = run(features, tw.Mean(), tw.codec.Identity(), is_sharded)
            assert scale == scaler.get_scale() and num_skipped == features.scaled
            tolerance = 3e-2 if features.autocast else 2e-5
            for expected, got in zip(whole(alone), found, strict=True):
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=str(features))

    sparse = tw.Mean(tw.chain(tw.TopK(0.3), tw.QSGD(bits=4)), tw.ErrorFeedback())
    for is_sharded in (False, True):
        found, *_, scale, num_skipped = run(replace(ALL, compiled=is_sharded), sparse, tw.QSGD(bits=8), is_sharded)
        everywhere = comm.gather_objects(([p.tolist() for p in found], scale, num_skipped))
        assert all(other == everywhere[0] for other in everywhere) and num_skipped == 1


def test_features_train_to_the_weights_of_one_process():
    spawn(4, worker)


@pytest.mark.parametrize(
    "strategy",
    [
        "Gradients(Mean(LowRank(rank=2), ErrorFeedback()))",
        "Local(Mean(SVD(rank=2), ErrorFeedback()), every=1)",
        "Gossip(Choco(codec=SVD(rank=2), step_size=0.5))",
    ],
)
def test_backward_and_steps_inside_of_autocast_average_in_float32(strategy):
    def worker(comm, autocast):
        model = nn.ParameterDict({"weight": torch.full((10, 12), 0.1)})  # whose own backward has no product of matrices
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, strategy, comm=comm):
            for step in range(2):
                x = torch.randn(10, 12, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                optimizer.zero_grad()
                loss = (model.weight * x).square().sum()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss.backward()
                    optimizer.step()
        return model.weight

    expected, found = (tw.LocalWorld(2).run(worker, autocast) for autocast in (False, True))
    assert all(map(torch.equal, found, expected))
