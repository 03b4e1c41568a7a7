"""Tensors that travel together: what comes back, and how many messages it takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.comm import compare
from thinwire.strategy.model import joined
from thinwire.strategy.model.models import broadcast_from_zero, make_equal


def tensors(rank: int) -> list[torch.Tensor]:
    """Of several dtypes and layouts, all of them other numbers on each worker."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(6, 4, generator=generator)
    return [
        torch.randn(3, 5, generator=generator),
        torch.randint(0, 9, (), generator=generator),
        wide.t(),
        torch.randn(2, generator=generator).to(torch.float8_e4m3fn),
        torch.zeros(0, 3),
        wide[:, 1:3].clone()[:, 1],
        torch.randn(7, generator=generator, dtype=torch.complex64),
        torch.randn(4, 2, generator=generator).to(torch.bfloat16),
        torch.rand(5, generator=generator) < 0.5,
        torch.randn(40, generator=generator),
        torch.randn(1, generator=generator),
    ]


@pytest.mark.parametrize(("limit", "messages"), [(joined.JOINED_BYTES, 6), (16, 10), (160, 9)])
def test_each_tensor_gets_its_own_part_whatever_travels_together(limit, messages, monkeypatch):
    """With the first limit a message for each of six dtypes; the second one leaves most tensors alone."""
    monkeypatch.setattr(joined, "JOINED_BYTES", limit)

    def worker(comm):
        own = tensors(comm.rank)
        broadcast_from_zero(own, comm)
        return own, comm.ledger.collectives["broadcast"].calls

    for got, calls in tw.LocalWorld(3).run(worker):
        for ours, zeros in zip(got, tensors(0), strict=True):
            assert torch.equal(ours.to(torch.complex64), zeros.to(torch.complex64)), ours.dtype
        assert calls == messages


def prepared(x):
    """Ways in which models differ that hardly show."""
    return {
        "nothing": x,
        "layout": x.t().contiguous().t(),
        "the sign of zero": torch.cat([x.view(-1)[:-1], torch.tensor([-0.0])]).view_as(x),
        "the last bit": torch.cat([torch.tensor([1e-45]), x.view(-1)[1:]]).view_as(x),
        "NaN": torch.cat([x.view(-1)[:-1], torch.tensor([math.nan])]).view_as(x),
    }


@pytest.mark.parametrize("differs", prepared(torch.ones(2, 2)))
def test_a_model_is_sent_only_where_it_differs(differs, monkeypatch):
    """In one bit of one value of one worker; all workers find out together, and have rank 0's bits in the end."""
    monkeypatch.setattr(compare, "CHUNK_BYTES", 16)  # a tensor is hashed in several chunks, the last one shorter

    def worker(comm):
        x = torch.zeros(3, 5)
        model = nn.ParameterList([prepared(x)[differs] if comm.rank == 1 else x, torch.ones(3, dtype=torch.bfloat16)])
        model.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        make_equal(model, comm)
        return bytes(
            model[0].detach().contiguous().view(-1).view(torch.uint8).tolist()
        ), "broadcast" in comm.ledger.collectives

    assert tw.LocalWorld(3).run(worker) == [(bytes(60), differs not in ("nothing", "layout"))] * 3


def test_a_model_is_made_equal_and_averaged_in_one_message_each():
    """One for each of its 24 tensors took seconds on a line of 100 ms."""

    def worker(comm):
        torch.manual_seed(comm.rank)
        model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(12)])
        own = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, "Local(Mean(), every=9)", comm=comm) as handle:
            assert comm.ledger.collectives["broadcast"].calls == 1
            with torch.no_grad():
                for p, value in zip(model.parameters(), own, strict=True):
                    p.copy_(value)
            before = comm.ledger.snapshot()
            with handle.average_model():
                mean = [p.detach().clone() for p in model.parameters()]
            assert comm.ledger.since(before).collectives["all_reduce"].calls == 1
            assert all(torch.equal(p, value) for p, value in zip(model.parameters(), own, strict=True))
        return own, mean

    results = tw.LocalWorld(3).run(worker)
    for number, values in enumerate(zip(*[own for own, _ in results], strict=True)):
        exact = sum(value.double() for value in values) / 3
        rounding = 3 * 2**-24 * sum(value.double().abs() for value in values)  # two sums and a division, in float32
        assert all(((mean[number] - exact).abs() <= rounding).all() for _, mean in results)
        assert all(torch.equal(mean[number], results[0][1][number]) for _, mean in results)
