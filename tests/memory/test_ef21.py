"""EF21 follows its definition, and reaches the optimum that plain top-k on different losses misses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw

ROUNDS, SIZE, WORKERS = 12, 60, 4


def gradients(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 10, generator=generator) for _ in range(ROUNDS)]


def run(averager: tw.average.Averager, scale: float = 1.0, poisoned: int | None = None) -> list[list[torch.Tensor]]:
    """The results of all rounds on every worker; round `poisoned` has an infinite gradient and is not counted."""

    def worker(comm: tw.comm.Communicator) -> list[torch.Tensor]:
        x, results = torch.zeros(6, 10), []
        state = averager.init([("w", x)], comm)
        for step, gradient in enumerate(gradients(comm.rank)):
            if step == poisoned:
                x.fill_(float("inf") if comm.rank == 1 else 1.0)
                averager.step(state, [("w", x)], comm, scale).wait()
                assert not averager.commit(state)
            x.copy_(gradient * scale)
            averager.step(state, [("w", x)], comm, scale).wait()
            assert averager.commit(state)
            results.append(x / scale)
        return results

    return tw.LocalWorld(WORKERS).run(worker)


def reference(k: int) -> list[np.ndarray]:
    """EF21 with top-k, in float64."""
    estimates, mean, results = np.zeros((WORKERS, SIZE)), np.zeros(SIZE), []
    all_gradients = [gradients(rank) for rank in range(WORKERS)]
    for step in range(ROUNDS):
        for rank in range(WORKERS):
            difference = all_gradients[rank][step].double().numpy().reshape(-1) - estimates[rank]
            kept = np.argsort(-np.abs(difference), kind="stable")[:k]
            estimates[rank][kept] += difference[kept]
            mean[kept] += difference[kept] / WORKERS
        results.append(mean.copy())
    return results


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("poisoned", [None, 5])
def test_results_are_those_of_the_definition(scale, poisoned):
    results = run(tw.Mean(tw.TopK(0.1), tw.memory.EF21()), scale, poisoned)
    for worker in results:
        for x, expected, first in zip(worker, reference(k=6), results[0], strict=True):
            assert torch.equal(x, first)  # the same bits on every worker
            # 12 rounds of a few roundings of numbers below 8
            np.testing.assert_allclose(x.double().numpy().reshape(-1), expected, rtol=0, atol=12 * 2.0**-19)


@pytest.mark.parametrize(
    "exchange", ["all_gather", "scatter_reduce", "hierarchical", "sparse_reduce", "hierarchical_sparse"]
)
def test_estimates_and_mean_stay_together(exchange):
    """g is the mean of all g_i, up to what the second encoding of scatter_reduce has lost so far."""
    codec = tw.chain(tw.TopK(0.2), tw.QSGD(bits=4)) if "sparse" in exchange else tw.QSGD(bits=4)
    averager = tw.Mean(codec, tw.memory.EF21(), exchange=exchange, workers_per_node=2 if exchange[0] == "h" else None)

    def worker(comm: tw.comm.Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.zeros(6, 10)
        state = averager.init([("w", x)], comm)
        for gradient in gradients(comm.rank):
            x.copy_(gradient)
            averager.step(state, [("w", x)], comm).wait()
            averager.commit(state)
        lost = torch.zeros(SIZE)
        if state.owner_memory is not None:
            lost.tensor_split(comm.size)[comm.rank].copy_(state.owner_memory.residual["w"])
        return state.memory.estimate["w"], state.memory.mean["w"], lost

    results = tw.LocalWorld(WORKERS).run(worker)
    mean = sum(estimate for estimate, _, _ in results) / WORKERS - sum(lost for _, _, lost in results)
    # roundings of 12 rounds of numbers below 8
    torch.testing.assert_close(results[0][1], mean, rtol=0, atol=12 * 2.0**-18)


@pytest.mark.parametrize(
    "averager", [tw.Mean(tw.TopK(0.1), tw.memory.EF21()), tw.PowerSGD(rank=1, memory=tw.memory.EF21())], ids=repr
)
def test_it_converges_to_gradients_that_stay_the_same(averager):
    def worker(comm: tw.comm.Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        own, x = gradients(comm.rank)[0], torch.zeros(6, 10)
        state = averager.init([("w", x)], comm)
        for _ in range(150):
            x.copy_(own)
            averager.step(state, [("w", x)], comm).wait()
            averager.commit(state)
        return own, x

    results = tw.LocalWorld(WORKERS).run(worker)
    mean = sum(own for own, _ in results) / WORKERS
    torch.testing.assert_close(results[0][1], mean, rtol=0, atol=1e-4)


def test_a_saved_state_resumes_bit_for_bit():
    averager = tw.Mean(tw.TopK(0.1), tw.memory.EF21())

    def worker(comm: tw.comm.Communicator, interrupted: bool) -> torch.Tensor:
        x = torch.zeros(6, 10)
        state = averager.init([("w", x)], comm)
        for step, gradient in enumerate(gradients(comm.rank)):
            if interrupted and step == 6:
                saved, state = state.state_dict(), averager.init([("w", x)], comm)
                state.load_state_dict(saved)
            x.copy_(gradient)
            averager.step(state, [("w", x)], comm).wait()
            averager.commit(state)
        return x

    for whole, resumed in zip(*(tw.LocalWorld(2).run(worker, flag) for flag in (False, True)), strict=True):
        assert torch.equal(whole, resumed)


def test_powersgd_refuses_a_memory_with_momentum():
    with pytest.raises(ValueError, match="memory without momentum, such as ErrorFeedback"):
        tw.PowerSGD(memory=tw.MomentumCorrection())


def test_sign_descent_needs_the_mean_where_its_memory_does():
    memory = tw.memory.SignDescent(tw.memory.EF21())
    with pytest.raises(ValueError, match="SignDescent.* needs the mean over all workers"):
        tw.Mean(tw.TopK(0.1), memory, exchange="all_gather", divide_by="senders")
    with pytest.raises(ValueError, match="SignDescent.* needs the mean over all workers"):
        tw.Mean(tw.QSGD(bits=4), memory, rule=tw.average.Krum(faulty=1))
