"""What methods keep on a worker, as `thinwire plan` says, against the tensors that are alive after steps of training."""

import copy
import gc

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.comm import LocalWorld
from thinwire.plan.methods import methods

METHODS = {method.name: method for method in methods()}
WIDTH, STEPS = 192, 61  # two rounds of 30 steps
FACTORS = {"Dion, rank 64": 64 / WIDTH}  # of low rank, which a plan leaves out: they are small beside wide matrices


@pytest.mark.parametrize("name", METHODS)
def test_a_method_keeps_as_much_as_its_plan_says(name):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    numel = sum(p.numel() for p in model.parameters())
    models = [model, copy.deepcopy(model)]
    before, kept = _alive(models), []

    def train(comm):
        own, optimizer = models[comm.rank], torch.optim.SGD(models[comm.rank].parameters(), lr=1e-4)
        handle = tw.attach(own, optimizer, METHODS[name].strategy, comm=comm)
        for _ in range(STEPS):
            optimizer.zero_grad()
            own(torch.ones(1, WIDTH)).square().mean().backward()
            optimizer.step()
        comm.barrier()
        if comm.rank == 0:
            kept.append((_alive(models) - before) / comm.size / (4 * numel))
        comm.barrier()
        handle.detach()

    LocalWorld(2).run(train)
    assert kept[0] == pytest.approx(METHODS[name].state_floats + FACTORS.get(name, 0), abs=0.1)


def _alive(models: list[nn.Module]) -> int:
    """Bytes of all tensors in this process, but for models and their gradients."""
    gc.collect()
    plain = torch.Tensor, nn.Parameter  # other tests of this process may have left fake ones, which have no memory
    tensors = [o for o in gc.get_objects() if type(o) in plain and o.layout == torch.strided]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for p in (p for model in models for p in model.parameters()):
        for t in (p, p.grad):
            sizes.pop(t.untyped_storage().data_ptr() if t is not None else 0, 0)
    return sum(sizes.values())
