"""The kernels of gossip agree with the plain reference: bit by bit, and up to rounding where sums have no fixed order."""

from __future__ import annotations

import pytest
import torch
from helpers.backends import assert_backends_agree, clones, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import kernels


@settings(max_examples=40)
@given(segments(), st.integers(0, 3), st.sampled_from([0.0, -0.25]))
def test_mix(xs, num_peers, own_weight):
    own = torch.cat([torch.empty(0), *xs])
    theirs = [own.flip(0) * (k + 1) for k in range(num_peers)]
    weights = [0.25, -1 / 3, 1.5][:num_peers]

    def compute():
        outs = [x * 0.5 for x in xs]
        return [kernels.mix.add(outs, own, theirs, weights, own_weight), *outs]

    assert_backends_agree(compute)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("n", "m", "rank"), [(1, 1, 1), (9, 4100, 1), (40, 33, 3), (17, 2048, 2)])
def test_low_rank_products_and_updates(n, m, rank, left):
    generator = torch.Generator().manual_seed(n)
    xs = [torch.randn(n * m, generator=generator), torch.randn(6, generator=generator)]
    rows, sides = [n, 2], [(n, m), (2, 3)]
    ps = [torch.randn(rank, side[0 if left else 1], generator=generator) for side in sides]
    products = kernels.low_rank.products(xs, rows, ps, left)
    for x, (rows_, columns), p, product in zip(xs, sides, ps, products, strict=True):
        matrix = x.double().view(rows_, columns)
        truth = p.double() @ (matrix if left else matrix.t())
        torch.testing.assert_close(product.double(), truth, rtol=0, atol=2e-6 * max(n, m) ** 0.5 * 4)
    a, b = (ps, products) if left else (products, ps)
    sums = clones(xs)
    kernels.low_rank.add(sums, rows, a, b)
    with kernels.use_backend("reference"):
        expected = clones(xs)
        kernels.low_rank.add(expected, rows, a, b)
    for ours, truth in zip(sums, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("left", [True, False])
def test_products_pass_on_what_is_not_finite(bad, left):
    """PowerGossip looks for such elements in products only; a factor of zero must not hide them."""
    for at in (0, 34, 69):
        x = torch.zeros(70)
        x[at] = bad
        [product] = kernels.low_rank.products([x], [10], [torch.zeros(1, 10 if left else 7)], left)
        assert not product.isfinite().all()


def test_factors_that_do_not_fit():
    x, p = torch.zeros(6), torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"ps\[0\]: expected contiguous float32 of shape \(rank, 3\)"):
        kernels.low_rank.products([x], [2], [p], left=False)
    with pytest.raises(ValueError, match=r"b\[0\]: expected 1 vectors"):
        kernels.low_rank.add([x], [2], [p], [torch.zeros(2, 3)])
    with pytest.raises(ValueError, match=r"own: expected 6 elements"):
        kernels.mix.add([x], torch.zeros(5), [], [])
