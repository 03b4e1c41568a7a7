"""The mean of the workers' models: exact where they are equal, and no more bytes than it takes."""

import pytest
import torch

import thinwire as tw
from thinwire.strategy.model.mean_model import holding_mean


def test_what_is_equal_keeps_its_bits_and_is_not_sent():
    """Sums of seven equal numbers in float32, divided by seven, are often not these numbers."""
    equal = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(sum([equal] * 7) / 7, equal)

    def worker(comm):
        own = torch.full((50,), float(comm.rank))
        table, count = equal.clone(), torch.tensor(comm.rank)
        before = comm.ledger.snapshot()
        with holding_mean([table, own], 1.0, [equal.clone(), count], comm):
            held = table.clone(), own.clone(), count.item()
        assert own[0] == comm.rank and count == comm.rank
        return held, comm.ledger.since(before).collectives["all_reduce"].bytes_sent

    results = tw.LocalWorld(7).run(worker)
    assert all(torch.equal(table, equal) and (own == 3).all() and count == 0 for (table, own, count), _ in results)
    assert sum(num_bytes for _, num_bytes in results) == 2 * 6 * 4 * 50


@pytest.mark.parametrize("weights", [(1.5, 0.5), (0.5, 0.5)])
def test_equal_models_of_other_weights_have_the_weighted_mean(weights):
    def worker(comm):
        x = torch.ones(3)
        with holding_mean([x], weights[comm.rank], [], comm):
            return x.clone()

    assert all(torch.equal(mean, torch.full((3,), sum(weights) / 2)) for mean in tw.LocalWorld(2).run(worker))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float32, 24), (torch.float64, 53)])
def test_the_mean_is_as_exact_as_the_tensors_are(dtype, bits):
    models = [
        torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)
    ]

    def worker(comm):
        own = models[comm.rank].clone()
        with holding_mean([own], 1.0, [], comm):
            return own.clone()

    exact = sum(model.double() for model in models) / 4
    for mean in tw.LocalWorld(4).run(worker):
        assert mean.dtype == dtype and ((mean.double() - exact).abs() <= 4 * 2.0**-bits).all()
