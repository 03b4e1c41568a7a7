"""Signum, LoCo and DIANA against float64 simulations of their equations, worker by worker; EF-SignSGD is a composition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw

WORKERS, ROUNDS, SIZE = 3, 9, 40
TARGETS = np.random.default_rng(0).standard_normal((WORKERS, SIZE))
SCALES = np.random.default_rng(1).uniform(0.5, 1.5, (WORKERS, SIZE))


def gradient(x: np.ndarray, rank: int) -> np.ndarray:
    """Of the loss `1/2 sum scale (x - target)^2` of one worker."""
    return SCALES[rank] * (x - TARGETS[rank])


def train(memory: tw.memory.Memory, codec: tw.codec.Codec, lr: float) -> list[np.ndarray]:
    """x after each round of `x <- x - lr result` on worker 0, in float32; the same bits on all workers."""

    def worker(comm: tw.comm.Communicator) -> list[np.ndarray]:
        averager, x, history = tw.Mean(codec, memory, min_ndim=0), torch.zeros(SIZE), []
        g = torch.zeros(SIZE)
        state = averager.init([("x", g)], comm)
        for _ in range(ROUNDS):
            g.copy_(torch.from_numpy(gradient(x.double().numpy(), comm.rank)))
            averager.step(state, [("x", g)], comm).wait()
            assert averager.commit(state)
            x.sub_(g, alpha=lr)
            history.append(x.double().numpy().copy())
        return history

    results = tw.LocalWorld(WORKERS).run(worker)
    assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    return results[0]


def signs(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1.0, -1.0)


def largest(x: np.ndarray, k: int) -> np.ndarray:
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    sent = np.zeros_like(x)
    sent[kept] = x[kept]
    return sent


def test_signum_votes_with_the_signs_of_momenta():
    expected, x, u = [], np.zeros(SIZE), np.zeros((WORKERS, SIZE))
    for _ in range(ROUNDS):
        votes = np.zeros(SIZE)
        for rank in range(WORKERS):
            u[rank] = 0.6 * u[rank] + 0.4 * gradient(x, rank)
            votes += signs(u[rank])
        x = x - 0.1 * np.sign(votes)
        expected.append(x)
    found = train(tw.memory.LocalMomentum(0.6), tw.SignSGD(), lr=0.1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)  # a sign that differed would cost 0.2


def test_a_lossless_codec_gives_the_momentum_of_the_mean():
    expected, x, u = [], np.zeros(SIZE), np.zeros(SIZE)
    for _ in range(ROUNDS):
        u = 0.6 * u + 0.4 * np.mean([gradient(x, rank) for rank in range(WORKERS)], axis=0)
        x = x - 0.5 * u
        expected.append(x)
    np.testing.assert_allclose(
        train(tw.memory.LocalMomentum(0.6), tw.codec.Identity(), lr=0.5), expected, rtol=0, atol=1e-6
    )


def in_8_bits(e: np.ndarray) -> np.ndarray:
    """The nearest multiples of the smallest power of two of which 127 reach the largest magnitude."""
    if not e.any():
        return e
    scale = 2.0 ** np.ceil(np.log2(np.abs(e).max() / 127))
    return np.round(e / scale) * scale


@pytest.mark.parametrize("reset_every", [4, None])
def test_loco_sends_a_moving_average_of_errors_and_clears_it(reset_every):
    expected, x, e = [], np.zeros(SIZE), np.zeros((WORKERS, SIZE))
    for number in range(1, ROUNDS + 1):
        sent = np.zeros((WORKERS, SIZE))
        for rank in range(WORKERS):
            h = gradient(x, rank) + e[rank]
            sent[rank] = largest(h, 8)
            e[rank] = in_8_bits(0.75 * e[rank] + 0.25 * (h - sent[rank]))
            if reset_every and number % reset_every == 0:
                e[rank] = 0
        x = x - 0.3 * sent.mean(axis=0)
        expected.append(x)
    found = train(tw.memory.LoCo(beta=0.25, reset_every=reset_every), tw.TopK(0.2), lr=0.3)
    # An element of e at a tie of rounding may fall either way: one step of at most 2^-6 of e, times 0.3.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)
    np.testing.assert_allclose(np.median(np.abs(np.subtract(found, expected))), 0, atol=1e-6)


def test_loco_keeps_its_8_bits_through_a_checkpoint():
    memory = tw.memory.LoCo(beta=0.5)
    state = memory.init([("x", torch.zeros(SIZE))])
    x = memory.compensate(state, "x", torch.from_numpy(TARGETS[0]).float())
    memory.commit(state)
    saved, other = state.state_dict(), memory.init([("x", torch.zeros(SIZE))])
    other.load_state_dict(saved)
    assert torch.equal(other.codes["x"], state.codes["x"]) and other.codes["x"].dtype == torch.int8
    assert torch.equal(other.scales["x"], state.scales["x"]) and other.rounds == 1
    assert (saved["codes"]["x"] - x / 2).abs().max() <= state.scales["x"] / 2


def test_diana_follows_its_definition():
    """With powers of two that no rounding changes: top-k is deterministic, and a = 1/4."""
    expected, x, h, mean = [], np.zeros(SIZE), np.zeros((WORKERS, SIZE)), np.zeros(SIZE)
    for _ in range(ROUNDS):
        sent = np.stack([largest(gradient(x, rank) - h[rank], 8) for rank in range(WORKERS)])
        x = x - 0.3 * (mean + sent.mean(axis=0))
        h, mean = h + 0.25 * sent, mean + 0.25 * sent.mean(axis=0)
        expected.append(x)
    np.testing.assert_allclose(train(tw.memory.DIANA(alpha=0.25), tw.TopK(0.2), lr=0.3), expected, rtol=0, atol=1e-5)


def test_diana_reaches_the_optimum_that_plain_quantization_misses():
    optimum = (SCALES * TARGETS).sum(0) / SCALES.sum(0)

    def error(memory: tw.memory.Memory | None) -> float:
        def worker(comm: tw.comm.Communicator) -> float:
            averager, x, g = (
                tw.Mean(tw.codec.NaturalCompression(), memory, min_ndim=0),
                torch.zeros(SIZE),
                torch.zeros(SIZE),
            )
            state = averager.init([("x", g)], comm)
            for _ in range(150):
                g.copy_(torch.from_numpy(gradient(x.double().numpy(), comm.rank)))
                averager.step(state, [("x", g)], comm).wait()
                averager.commit(state)
                x.sub_(g, alpha=0.5)
            return float(np.abs(x.double().numpy() - optimum).max())

        return tw.LocalWorld(WORKERS).run(worker)[0]

    assert error(tw.memory.DIANA(alpha=0.5)) < 1e-5 < 1e-2 < error(None)


def test_ef_signsgd_is_signs_with_error_feedback():
    expected, x, e = [], np.zeros(SIZE), np.zeros((WORKERS, SIZE))
    for _ in range(ROUNDS):
        sent = np.zeros((WORKERS, SIZE))
        for rank in range(WORKERS):
            p = gradient(x, rank) + e[rank]
            sent[rank] = np.abs(p).mean() * signs(p)
            e[rank] = p - sent[rank]
        x = x - 0.1 * sent.mean(axis=0)
        expected.append(x)
    np.testing.assert_allclose(train(tw.ErrorFeedback(), tw.codec.SignNorm(), lr=0.1), expected, rtol=0, atol=1e-5)
