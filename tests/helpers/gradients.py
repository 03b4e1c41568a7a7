"""A small network and its training loop, for tests of gradient averaging."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

from .states import leaves


class Net(nn.Module):
    """Two branches of which a batch may leave one unused, a frozen layer and a norm."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 16)
        self.frozen.requires_grad_(False)
        self.left, self.right = nn.Linear(16, 32), nn.Linear(16, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x, use=("left", "right")):
        h = torch.relu(self.frozen(x))
        return self.head(self.norm(sum(getattr(self, name)(h) for name in use)))


def make_model(seed=0):
    """The same for the same seed, also where threads build models at the same time."""
    model, generator = Net(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3, generator=generator)
    return model


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def fingerprint(module) -> str:
    flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def optimizer_of(module):
    """Several parameter groups."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.SGD(
        [{"params": matrices, "weight_decay": 1e-3}, {"params": vectors, "lr": 0.02}], lr=0.05, momentum=0.9
    )


def both_branches(rank, step):
    return "left", "right"


def one_branch(rank, step):
    return ("left",) if (rank + step) % 2 else ("right",)


def train(model, rank, steps=6, no_sync=None, uses=both_branches, parameters=None):
    """An ordinary loop; with `no_sync` every step accumulates over two backward passes."""
    optimizer, losses = optimizer_of(parameters or model), []
    for step in range(steps):
        optimizer.zero_grad()
        if no_sync is not None:
            with no_sync():
                x, y = batch(rank, 50 + step)
                nn.functional.cross_entropy(model(x, uses(rank, step)), y).backward()
        x, y = batch(rank, step)
        loss = nn.functional.cross_entropy(model(x, uses(rank, step)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_with_scaler(comm, averager, poison_step, **options):
    """Five steps in DDP with a loss scaler; rank 1 has an infinite loss in one of them, which no worker takes.

    The scaler is one of float32, so that the same run can be had without it. Returns the state's tensors and the scale after
    each step, and the fingerprint of the model.
    """
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=0.002)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    handle = tw.compress_gradients(ddp, averager, scaler=scaler, **options)
    optimizer, states, scales = optimizer_of(ddp.module), [], []
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(comm.rank, step)
        loss = nn.functional.cross_entropy(ddp(x), y)
        if step == poison_step and comm.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = fingerprint(ddp.module)
        scaler.step(optimizer)
        scaler.update()
        assert (fingerprint(ddp.module) == before) == (step == poison_step)
        states.append(leaves(handle.state_dict()[f"rank{comm.rank}"]))
        scales.append(scaler.get_scale())
    handle.detach()
    return states, scales, fingerprint(ddp.module)
