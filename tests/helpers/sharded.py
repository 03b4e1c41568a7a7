"""A model under `fully_shard`, its training loop, and what tests read of it."""

from __future__ import annotations

import contextlib
import hashlib

import torch
from torch import nn

import thinwire as tw

SPARSE = tw.Mean(tw.chain(tw.TopK(0.05), tw.QSGD(bits=4)), tw.ErrorFeedback())


class Net(nn.Module):
    """A residual network with shards of uneven sizes, some of them empty, and a layer that a step may leave out."""

    def __init__(self, width: int = 33):
        super().__init__()
        self.enter, self.hidden, self.extra = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.head, self.bias = nn.LayerNorm(width), nn.Linear(width, 4), nn.Parameter(torch.zeros(1))

    def forward(self, x, extra=True, poison=False):
        """With `poison`, the gradient of `bias` is infinite, and that of nothing else."""
        bias = self.bias.clone()
        if poison:
            bias.register_hook(lambda gradient: gradient * float("inf"))
        h = torch.relu(self.enter(x))
        h = h + torch.relu(self.hidden(h))
        return self.head(self.norm(h + torch.relu(self.extra(h)) if extra else h)) + bias


def sharded(mesh, seed=0, width=33, **options):
    """The same for the same seed; `hidden` is a unit of its own, so that gradients arrive in several steps."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Net(width)
    fully_shard(model.hidden, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(rank, step, size=64):
    """The largest of the first four inputs is the label; for a fifth of the examples, any label is."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 16, generator=generator)
    noise, is_noisy = torch.randint(4, (size,), generator=generator), torch.rand(size, generator=generator) < 0.2
    return x, torch.where(is_noisy, noise, x[:, :4].argmax(1))


@torch.no_grad()
def loss_of(model) -> float:
    x, y = batch(0, 10**6, size=2000)
    loss = nn.functional.cross_entropy(model(x), y).item()
    model.reshard()
    return loss


def train(
    model,
    rank,
    steps=6,
    lr=0.1,
    momentum=0.0,
    max_norm=None,
    extra=lambda rank, step: True,
    optimizer=None,
    accumulate=None,
):
    """An ordinary loop; `accumulate` is a context for a first backward pass of each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses = []
    for step in range(steps):
        for i, context in enumerate([accumulate, contextlib.nullcontext] if accumulate else [contextlib.nullcontext]):
            with context():
                x, y = batch(rank, 2 * step + i)
                loss = nn.functional.cross_entropy(model(x, extra(rank, step)), y)
                loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fingerprint(model) -> str:
    """Of the shards that this worker holds."""
    shards = [p.detach().to_local().contiguous() for p in model.parameters()]
    return hashlib.sha256(b"".join(shard.numpy().tobytes() for shard in shards)).hexdigest()


def replicas_are_equal(comm, mesh, model) -> bool:
    """Whether workers that hold the same shard hold the same bits, and differ from those that hold another."""
    place = mesh.get_coordinate()[-1]
    found = [tuple(pair) for pair in comm.gather_objects([place, fingerprint(model)])]
    return len(set(found)) == mesh.size(-1)
