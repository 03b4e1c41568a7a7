"""The distance of workers' models from their mean, which travels as a sketch."""

import pytest
import torch
from helpers.calls import Operations

import thinwire as tw
from thinwire.strategy.model import mean_model
from thinwire.strategy.model.mean_model import SKETCH_SIZE, consensus_distance


def exact(models, weights):
    """The distance by its definition, in float64."""
    z = torch.stack([torch.cat([t.double().reshape(-1) for t in model]) for model in models])
    mean = (torch.tensor(weights, dtype=torch.float64).view(-1, 1) * z).sum(0) / len(models)
    return (z - mean).square().sum(1).mean().sqrt().item()


def measured(models, weights):
    return tw.LocalWorld(len(models)).run(lambda comm: consensus_distance(models[comm.rank], weights[comm.rank], comm))


def drawn(shape, seed, rows=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * rows


# A model whose differences lie in few columns: they are a multiple of the sketch's size apart.
COLUMNS = torch.zeros(1024)
COLUMNS[[3, 700]] = 1.0


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda rank: [drawn((300, 1000), rank)], id="random"),
        pytest.param(lambda rank: [drawn((300, 1024), rank, COLUMNS)], id="columns"),
        pytest.param(lambda rank: [torch.full((300_000,), float(rank)), drawn((7,), rank)], id="constant"),
        pytest.param(lambda rank: [drawn((90, 1000), rank).bfloat16() for _ in range(3)], id="bfloat16"),
    ],
)
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 1.25, 1.25)], ids=str)
def test_the_distance_of_large_models_is_within_five_standard_errors(model, weights):
    models = [model(rank) for rank in range(3)]
    distances = measured(models, weights)
    assert len(set(distances)) == 1
    assert distances[0] == pytest.approx(exact(models, weights), rel=5 * (2 * SKETCH_SIZE) ** -0.5)


def test_the_square_of_the_distance_has_no_bias_and_the_spread_it_claims():
    def ratio(seed):
        models = [[drawn((2 * SKETCH_SIZE,), 2 * seed + rank)] for rank in range(2)]
        return (measured(models, (1.0, 1.0))[0] / exact(models, (1.0, 1.0))) ** 2

    ratios = torch.tensor([ratio(seed) for seed in range(200)], dtype=torch.float64)
    # Two elements share each number: the square of a sum of two has a variance of 4 x^2 y^2.
    spread = SKETCH_SIZE**-0.5
    assert abs(ratios.mean() - 1) < 5 * spread / 200**0.5
    assert 0.75 * spread < ratios.std() < 1.25 * spread


def test_models_as_large_as_the_sketch_have_an_exact_distance():
    models = [[drawn((20, 100), rank), drawn((SKETCH_SIZE - 2_000,), 9 + rank)] for rank in range(4)]
    assert measured(models, [1.0] * 4)[0] == pytest.approx(exact(models, [1.0] * 4), rel=1e-12)


def test_the_look_at_a_small_model_costs_no_more_than_the_model_in_float64():
    def worker(comm):
        consensus_distance([drawn((100,), comm.rank)], 1.0, comm)
        return comm.ledger.bytes_sent

    assert tw.LocalWorld(2).run(worker) == [8 * 101] * 2


@pytest.mark.parametrize("numel", [0, 5, 70_000])
def test_equal_models_have_no_distance(numel):
    """A shard may have no element at all."""
    assert measured([[drawn((numel,), 1)]] * 4, [1.0] * 4) == [0.0] * 4


@pytest.mark.parametrize("numel", [0, 5, 300 * SKETCH_SIZE + 7])
def test_on_a_gpu_the_sketch_is_the_same_in_few_launches(numel, monkeypatch):
    z = drawn((numel,), 1)
    size = min(SKETCH_SIZE, max(1, numel))
    expected = mean_model._sketch(z, size)
    monkeypatch.setattr(mean_model, "in_main_memory", lambda device: False)
    with Operations() as operations:
        assert torch.equal(mean_model._sketch(z, size), expected)
    assert operations.number < 60 + 3 * (numel // size)


def test_a_look_at_a_large_model_costs_a_few_kilobytes():
    def worker(comm):
        model = torch.nn.Linear(1000, 1000)
        handle = tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), tw.Gossip(tw.Mix()), comm=comm)
        before = comm.ledger.bytes_sent
        handle.consensus_distance()
        return comm.ledger.bytes_sent - before

    # All-reduces of 4,096 numbers of 8 bytes, and of one: 2 (W-1) times as much of all workers together.
    assert sum(tw.LocalWorld(4).run(worker)) == 6 * 8 * (SKETCH_SIZE + 1)
