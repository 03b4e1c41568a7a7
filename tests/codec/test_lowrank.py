"""The codecs `SVD` and `LowRank`: how close they come, their bytes, and that shapes survive on the way to them."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire import kernels
from thinwire.codec.dense.svd import best_factors, matrix_shape


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 60), m=st.integers(2, 60), rank=st.integers(1, 8), decay=st.floats(0, 3), seed=st.integers(0, 9)
)
def test_no_matrix_of_the_rank_is_closer(n, m, rank, decay, seed):
    """Eckart and Young: the squared error is the sum of the other singular values' squares."""
    u, s, v = torch.linalg.svd(randn(n, m, seed=seed), full_matrices=False)
    x = u @ torch.diag(s * torch.arange(1.0, len(s) + 1) ** -decay) @ v
    codec = tw.codec.SVD(rank)
    residual = torch.empty_like(x)
    payload = codec.encode(x, residual=residual)
    assert payload.numel() == 4 * min(rank * (n + m), n * m)
    optimal = torch.linalg.svdvals(x.double())[rank:].square().sum() if rank * (n + m) < n * m else 0.0
    # Each float32 rounding of a factor moves an entry of the product by 2^-24 of the largest singular value.
    assert residual.double().norm() <= math.sqrt(optimal) * (1 + 1e-6) + 1e-6 * x.norm()


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (50, 50)])
def test_factors_are_scaled_left_vectors_and_orthonormal_right_vectors(shape):
    x = randn(*shape)
    left, right = best_factors(x, 3)
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    torch.testing.assert_close(right.t() @ right, torch.eye(3), rtol=0, atol=1e-6)
    torch.testing.assert_close(left.double().norm(dim=0), s[:3], rtol=1e-6, atol=0)
    torch.testing.assert_close((left @ right.t()).double(), u[:, :3] @ torch.diag(s[:3]) @ v[:3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 40), (40, 6)])
@pytest.mark.parametrize("true_rank", [0, 1, 2])
def test_matrices_of_lower_rank_are_sent_exactly(shape, true_rank):
    """Also where some of the sent singular values are zero."""
    x = randn(shape[0], true_rank) @ randn(true_rank, shape[1], seed=1)
    decoded = tw.codec.SVD(3).decode(tw.codec.SVD(3).encode(x), x.shape)
    torch.testing.assert_close(decoded, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_any_scale(scale):
    x = randn(20, 30)
    scaled = tw.codec.SVD(2).decode(tw.codec.SVD(2).encode(x * scale), x.shape)
    torch.testing.assert_close(
        scaled / scale, tw.codec.SVD(2).decode(tw.codec.SVD(2).encode(x), x.shape), rtol=0, atol=1e-5
    )


def test_the_wire_layout_can_be_written_by_hand():
    """U diag(s), then V, row by row; two segments follow each other; the second is too small to gain."""
    left, right, dense = [1.0, 2.0, 0.5], [4.0, -1.0, 0.0, 8.0], [7.0, 9.0]
    payload = torch.frombuffer(bytearray(struct.pack("<9f", *left, *right, *dense)), dtype=torch.uint8)
    codec, shapes = tw.codec.SVD(rank=1), [torch.Size([3, 2, 2]), torch.Size([1, 2])]
    assert codec.nbytes(shapes) == payload.numel() == 36
    first, second = codec.decode(payload, shapes)
    assert torch.equal(first, torch.outer(torch.tensor(left), torch.tensor(right)).view(3, 2, 2))
    assert torch.equal(second, torch.tensor([dense]))


@pytest.mark.parametrize(
    "shape, expected",
    [((), (1, 1)), ((0,), (0, 1)), ((4,), (2, 2)), ((5,), (2, 3)), ((7,), (3, 3)), ((10_000,), (100, 100)),
     ((8, 3, 3, 3), (8, 27)), ((0, 5), (0, 0)), ((5, 0), (5, 0))],
)  # fmt: skip
def test_tensors_as_matrices(shape, expected):
    assert matrix_shape(torch.Size(shape)) == expected
    x = randn(*shape)
    assert torch.equal(tw.codec.SVD(99).decode(tw.codec.SVD(99).encode(x), x.shape), x)


def test_a_vector_is_folded():
    x = randn(1000)
    decoded = tw.codec.SVD(2).decode(tw.codec.SVD(2).encode(x), 1000)
    folded = torch.nn.functional.pad(x, (0, 24)).view(32, 32)
    as_matrix = tw.codec.SVD(2).decode(tw.codec.SVD(2).encode(folded), folded.shape)
    assert torch.equal(decoded, as_matrix.view(-1)[:1000])


def test_rank_may_follow_a_schedule():
    codec = tw.codec.SVD(tw.schedule.Values((8, 2), every=1, unit="step"))
    assert tw.parse(repr(codec)) == codec

    def worker(comm):
        averager, x = tw.Mean(codec, tw.ErrorFeedback()), randn(30, 40)
        state, sent = averager.init([("x", x)], comm), []
        for _ in range(2):
            before = comm.ledger.bytes_sent
            averager.step(state, [("x", x.clone())], comm).wait()
            averager.commit(state)
            sent.append(comm.ledger.bytes_sent - before)
        return sent

    assert tw.LocalWorld(2).run(worker)[0] == [4 * 8 * 70, 4 * 2 * 70]


# ---- LowRank ----


def decaying(n, m, seed=0):
    """A matrix whose singular values fall as those of gradients do."""
    u, s, v = torch.linalg.svd(randn(n, m, seed=seed), full_matrices=False)
    return u @ torch.diag(torch.arange(1.0, len(s) + 1) ** -1.0) @ v


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (12, 3, 5)])
@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_it_is_subspace_iteration(shape, iterations):
    """By hand in float64, from the same first Q."""
    x, key = randn(*shape), tw.codec.Key(1, 2, 3)
    matrix, rank = x.double().flatten(1), 4
    start = kernels.uniform(kernels.mix_key(key.mixed(), 0, 0), rank * matrix.shape[1])
    q = (2 * start.double() - 1).view(rank, -1).t()
    for _ in range(iterations):
        p = torch.linalg.qr(matrix @ q).Q
        q = torch.linalg.qr(matrix.t() @ p).Q
    p = torch.linalg.qr(matrix @ q).Q
    codec = tw.codec.LowRank(rank, tw.codec.Identity(), iterations)
    decoded = codec.decode(codec.encode(x, key), x.shape)
    torch.testing.assert_close(decoded.double().flatten(1), p @ (p.t() @ matrix), rtol=0, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(20, 60), m=st.integers(20, 60), rank=st.integers(1, 8), seed=st.integers(0, 9))
@example(n=53, m=53, rank=4, seed=2)  # an unlucky first Q: after 8 iterations still 1.104 times the least error
def test_iterations_come_close_to_the_best_approximation(n, m, rank, seed):
    """Within the bound of Halko, Martinsson and Tropp 2011, theorem 9.1, for the first Q that was drawn.

    With x = U S V^T, W = V^T Q split after `rank` rows, and i iterations it is
    |S_2|^2 + |S_2^(2i + 1) W_2 W_1^-1 S_1^(-2i)|^2.
    """
    x, key = decaying(n, m, seed), tw.codec.Key(seed)
    _, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    start = 2 * kernels.uniform(kernels.mix_key(key.mixed(), 0, 0), rank * m).double() - 1
    first, others = (v @ start.view(rank, m).t()).split([rank, len(s) - rank])
    optimal = s[rank:].square().sum()
    for iterations in (1, 8):
        residual = torch.empty_like(x)
        tw.codec.LowRank(rank, tw.codec.Identity(), iterations).encode(x, key, residual)
        excess = s[rank:, None] ** (2 * iterations + 1) * (others @ first.inverse()) * s[:rank] ** (-2 * iterations)
        error = residual.double().square().sum()
        assert optimal <= error * (1 + 1e-5) and error <= (optimal + excess.square().sum()) * (1 + 1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e12, 1e30])
def test_low_rank_at_any_scale(scale):
    x, codec = decaying(30, 20), tw.codec.LowRank(2, tw.codec.Identity())
    expected, decoded = (codec.decode(codec.encode(y), y.shape) for y in (x, x * scale))
    torch.testing.assert_close(decoded, expected * scale, rtol=1e-4, atol=1e-6 * scale)


def test_another_default_type_changes_nothing():
    x, codec = decaying(30, 20), tw.codec.LowRank(2)
    payload = codec.encode(x)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(codec.encode(x), payload)
        assert codec.decode(payload, x.shape).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_its_payload_is_that_of_its_factors():
    """All columns of P together, then those of Q one by one, matrix by matrix; nothing for empty tensors."""
    values, shapes = tw.QSGD(bits=4, bucket_size=None), [torch.Size([6, 10]), torch.Size([0, 7]), torch.Size([2, 9])]
    codec = tw.codec.LowRank(3, values)
    vectors = [
        torch.ones(18),
        *[torch.full((10,), float(i)) for i in (1, 2, 3)],
        torch.ones(4),
        torch.ones(9),
        torch.ones(9),
    ]
    payload = values.encode(vectors, [tw.codec.Key()] * len(vectors))
    assert payload.numel() == codec.nbytes(shapes) == 4 * 7 + 9 + 3 * 5 + 2 + 2 * 5
    first, empty, second = codec.decode(payload, shapes)
    assert torch.equal(first, torch.full((6, 10), 6.0)) and torch.equal(second, torch.full((2, 9), 2.0))
    assert empty.shape == (0, 7)


def test_workers_train_to_the_same_bits_with_it():
    """Over an exchange that cuts matrices between rows, too: each piece is a matrix of its own."""

    def worker(comm, exchange):
        averager = tw.Mean(tw.codec.LowRank(2), tw.ErrorFeedback(), exchange=exchange)
        xs = {"w": randn(30, 20, seed=comm.rank), "b": randn(30, seed=9), "k": randn(4, 3, 5, seed=comm.rank)}
        state, sums = averager.init(list(xs.items()), comm), dict.fromkeys(xs, 0.0)
        for _ in range(40):
            given = {name: x.clone() for name, x in xs.items()}
            averager.step(state, list(given.items()), comm).wait()
            averager.commit(state)
            sums = {name: sums[name] + x for name, x in given.items()}
        return sums

    for exchange in ("all_gather", "scatter_reduce"):
        first, second = tw.LocalWorld(2).run(worker, exchange)
        for name, shape in (("w", (30, 20)), ("k", (4, 3, 5))):
            assert torch.equal(first[name], second[name])
            mean = (randn(*shape, seed=0) + randn(*shape, seed=1)) / 2
            assert (first[name] / 40 - mean).norm() < 0.3 * mean.norm()  # memory sends the rest later


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: tw.codec.LowRank(0), "LowRank: rank must be an integer, 1 or more, got 0"),
        (lambda: tw.codec.LowRank(2, iterations=-1), "LowRank: iterations must be an integer, 0 or more, got -1"),
        (lambda: tw.codec.LowRank(2, 4), "LowRank: values must be a codec such as QSGD"),
        (lambda: tw.codec.LowRank(2, tw.codec.SVD(1)), "needs the shapes of tensors, which is not possible here"),
        (lambda: tw.codec.SVD(rank=0), "rank must be an integer, 1 or more, got 0"),
        (lambda: tw.codec.SVD(rank=1.5), "rank must be an integer, 1 or more, got 1.5"),
        (lambda: tw.chain(tw.TopK(0.1), tw.codec.SVD(rank=1)), "second link"),
        (
            lambda: tw.codec.SVD(rank=1).decode(torch.zeros(28, dtype=torch.uint8), torch.Size([4, 4])),
            "has 32 bytes, got 28",
        ),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()
