"""The SVD codec: no matrix of its rank is closer, and shapes survive on the way to it."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
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


@pytest.mark.parametrize(
    "build, message",
    [
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
