"""The kernels of gossip agree with the plain reference: bit by bit, and up to rounding where sums have no fixed order."""

from __future__ import annotations

import pytest
import torch
from helpers.backends import assert_backends_agree, clones, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels.quantize import Quantizer


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


@settings(max_examples=20)
@given(segments(), st.data())
def test_differences(xs, data):
    """What is encoded, the bytes of `quantize.encode`; how well it fits; and what a round makes of it."""
    bits, step = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([0.5, -1 / 3]))
    quantizer = Quantizer(
        bits, data.draw(st.integers(1, 2**bits - 1)), data.draw(st.sampled_from([1, 3, 512, 2048, 5000]))
    )
    keys, add = [data.draw(st.integers(0, 2**64 - 1)) for _ in xs], data.draw(st.booleans())
    ys, num_messages = [x.flip(0) * 0.5 for x in xs], data.draw(st.integers(1, 3))
    factors, weights = [0.5, 1.5, 1.0][:num_messages], [0.25, -1.0, 1 / 3][:num_messages]

    def compute():
        others, payload = clones(ys), torch.empty(quantizer.nbytes([x.numel() for x in xs]), dtype=torch.uint8)
        sums = kernels.difference.encode(xs, others, add, payload, keys, quantizer, measured=True)
        same = torch.empty_like(payload)
        vs = [x + y if add else x - y for x, y in zip(xs, ys, strict=True)]
        kernels.quantize.encode(vs, same, keys, quantizer)
        assert torch.equal(payload, same)
        payloads = [payload, same.clone(), same.clone()][:num_messages]
        choco = [clones(xs), clones(ys), [y.double() for y in ys]]
        squeezed = [clones(xs), clones(ys)]
        kernels.difference.choco_add(*choco, payloads, factors, weights, step, quantizer)
        kernels.difference.squeeze_add(*squeezed, payloads, factors, weights, step, quantizer)
        kept_sums.append(sums)
        return [payload, *others, *(t for group in (*choco, *squeezed) for t in group)]

    kept_sums: list[torch.Tensor] = []
    assert_backends_agree(compute)
    if kept_sums[1].isfinite().all() and kept_sums[1][2] < 1e60:
        largest = kept_sums[1].abs().max().clamp(min=1e-300)
        torch.testing.assert_close(kept_sums[0] / largest, kept_sums[1] / largest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("n", "m", "rank"), [(1, 1, 1), (9, 4100, 1), (40, 33, 3), (17, 2048, 2), (24, 70, 17)])
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


@pytest.mark.parametrize(
    ("n", "m", "rank"), [(1, 1, 1), (9, 4100, 1), (40, 33, 3), (17, 2048, 5), (520, 2050, 4), (24, 70, 17)]
)
def test_error_feedback_with_products_and_stored_products(n, m, rank):
    """One pass gives the sums and the products of two; the last case is stored past the cache, at odd addresses."""
    generator = torch.Generator().manual_seed(n)
    rows, sides = [n, 2], [(n, m), (2, 3)]
    gs, es = ([torch.randn(a * b, generator=generator) for a, b in sides] for _ in range(2))
    ps, qs = ([torch.randn(rank, side[k], generator=generator) for side in sides] for k in (1, 0))

    def computed():
        xs, stored = ([torch.empty(a * b + 1)[1:] for a, b in sides] for _ in range(2))
        products = kernels.low_rank.add_products(gs, es, xs, 0.3, rows, ps)
        return xs, products, stored, kernels.low_rank.store(stored, rows, qs, ps)

    xs, products, stored, finite = computed()
    with kernels.use_backend("reference"):
        same, expected, truth, expected_finite = computed()
    assert finite and expected_finite and all(map(torch.equal, xs, same))
    assert all(map(torch.equal, products, kernels.low_rank.products(xs, rows, ps, left=False)))
    torch.testing.assert_close(products, expected, rtol=0, atol=2e-6 * m**0.5 * 8)
    assert all(map(torch.equal, stored, truth))
    qs[0][-1, -1] = float("inf")
    assert not kernels.low_rank.store(stored, rows, qs, ps)


@pytest.mark.parametrize("rank", [1, 4, 16, 64])
@pytest.mark.parametrize(("n", "m"), [(1000, 10), (96, 200)])
def test_stored_products_do_not_depend_on_where_they_lie(n, m, rank):
    """BLAS rounds by the alignment of its result, and workers' buckets may lie differently."""
    generator = torch.Generator().manual_seed(n)
    a, b = torch.randn(rank, n, generator=generator), torch.randn(rank, m, generator=generator)

    def stored_at(offset):
        x = torch.empty(offset + n * m)[offset:]
        assert kernels.low_rank.store([x], [n], [a], [b])
        return x

    first = stored_at(0)
    assert all(torch.equal(stored_at(offset), first) for offset in range(1, 20))


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (3, 2), (2, 5, 300), (3, 2500), (16, 100), (17, 100)])
def test_orthonormal_vectors_are_those_of_the_one_qr_with_a_positive_diagonal(shape, monkeypatch):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    q, r = torch.linalg.qr(x.double().mT)
    expected = q.mT * r.diagonal(dim1=-2, dim2=-1).sign()[..., None]
    found = kernels.low_rank.orthonormal(x)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4e-7)
    with kernels.use_backend("reference"):
        assert torch.equal(found, kernels.low_rank.orthonormal(x))
        monkeypatch.setattr(kernels.flags, "in_main_memory", lambda device: False)  # as on a GPU
        torch.testing.assert_close(found, kernels.low_rank.orthonormal(x), rtol=0, atol=4e-7)


@pytest.mark.parametrize("backend", ["cpu", "reference", "as on a GPU"])
@pytest.mark.parametrize("count", [1, 4])
def test_orthonormal_vectors_span_vectors_of_any_rank_and_size(backend, count, monkeypatch):
    if backend == "as on a GPU":
        monkeypatch.setattr(kernels.flags, "in_main_memory", lambda device: False)
        backend = "reference"
    row = torch.randn(count, 33, generator=torch.Generator().manual_seed(1))
    cases = [
        torch.zeros(count, 33),
        row[:1].repeat(count, 1),
        row * 1e-30,
        row * 1e30,
        row.clone(),
        torch.eye(33)[5 : 5 + count],
    ]
    cases[4][:, :7] = 0.0
    for x in cases:
        with kernels.use_backend(backend):
            q = kernels.low_rank.orthonormal(x)
            assert torch.equal(q, kernels.low_rank.orthonormal(torch.where(x == 0, -0.0, x)))
        torch.testing.assert_close(q.double() @ q.double().t(), torch.eye(count).double(), rtol=0, atol=1e-6)
        spanned = x.double() @ q.double().t() @ q.double()
        torch.testing.assert_close(spanned, x.double(), rtol=0, atol=1e-6 * x.double().norm())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1, 3])
def test_orthonormal_vectors_pass_on_what_is_not_finite(bad, count):
    """Also where all else is zero: Householder's reflections would be the identity."""
    for at in range(count):
        for x in (torch.zeros(count, 20), torch.ones(count, 20)):
            x[at, at] = bad
            assert not kernels.low_rank.orthonormal(x)[at].isfinite().any()


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
    with pytest.raises(ValueError, match=r"x: expected contiguous float32 vectors \(\.\.\., rank, n\), got .* \(6,\)"):
        kernels.low_rank.orthonormal(x)
    with pytest.raises(ValueError, match=r"own: expected 6 elements"):
        kernels.mix.add([x], torch.zeros(5), [], [])


@settings(max_examples=20)
@given(segments(), st.data())
def test_modular(xs, data):
    """Codes that cross segments, at any size; the reference takes the bytes of `quantize.encode`."""
    bits, key = data.draw(st.integers(2, 8)), data.draw(st.integers(0, 2**64 - 1))
    modulus = data.draw(st.sampled_from([6.0, 0.37, 1e3]))
    numel = sum(x.numel() for x in xs)
    xs = [torch.where(x.isfinite(), x.clamp(-1e6, 1e6), x) for x in xs]  # elements of many turns are not exact
    inside = all(bool(x.isfinite().all()) for x in xs)

    def compute():
        payloads, checks = [], []
        for factor in (1.0, 0.999, -0.5):
            payload = torch.empty(kernels.modular.nbytes(numel, bits), dtype=torch.uint8)
            check, largest = kernels.modular.encode([x * factor for x in xs], payload, key, bits, modulus)
            checks += [check if inside else 0, largest if inside else 0]
            payloads.append(payload)
        own = torch.cat([torch.empty(0), *xs])
        sums = [kernels.modular.sums(payloads[0], p, numel, key, bits) for p in payloads[1:]]
        added, recovered = clones(xs), clones(xs)
        kernels.modular.add(added, payloads, [0.5, -1 / 3], bits)
        finite = kernels.modular.recover_add(recovered, own, payloads, [0.5, -1 / 3], bits, modulus)
        return [*payloads, *checks, *sums, *added, *recovered, finite]

    assert_backends_agree(compute)


@pytest.mark.parametrize("modulus", [6.0, 0.37, 0.5, 3e-6])
def test_modular_values_near_whole_turns(modulus):
    """Where quotients are rounded across whole numbers, at many turns and beyond those that float32 counts."""
    half = torch.tensor(modulus / 2)
    turns = torch.cat([torch.arange(-6.0, 7.0), torch.tensor([1000.0, -4097.0, 0.9e6, -0.9e6, 1.9e6])])
    at = (turns[:, None] * modulus + torch.tensor([0.0, modulus / 2, -modulus / 2])).flatten()
    near = torch.stack([at, at.nextafter(at + 1), at.nextafter(at - 1), -half.nextafter(half * 2) + at * 0])
    x = near.t().flatten().repeat(5)[:1000]

    def compute():
        payload, other = (torch.empty(kernels.modular.nbytes(1000, 3), dtype=torch.uint8) for _ in range(2))
        check, largest = kernels.modular.encode([x], payload, 5, 3, modulus)
        kernels.modular.encode([x * 0.99], other, 5, 3, modulus)
        out = torch.zeros(1000)
        kernels.modular.recover_add([out], x, [payload, other], [0.5], 3, modulus)
        return [payload, check, largest, out]

    assert_backends_agree(compute)


@pytest.mark.parametrize("bits", [2, 5])
def test_the_check_of_codes_finds_one_element_beyond_the_bound(bits):
    last, theta = (1 << bits) - 1, 0.25
    modulus, key = 2 * theta * last / (last - 1), 11
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(5000, generator=generator)
    y = x + (torch.rand(5000, generator=generator) * 2 - 1) * 0.249

    def seen(y):
        payloads = [torch.empty(kernels.modular.nbytes(5000, bits), dtype=torch.uint8) for _ in range(2)]
        checks = [kernels.modular.encode([v], p, key, bits, modulus)[0] for v, p in zip((x, y), payloads, strict=True)]
        return bool(kernels.modular.sums(*payloads, 5000, key, bits)[0] == checks[1] - checks[0])

    assert seen(y)
    y[4321] = x[4321] + 2.2 * theta
    assert not seen(y)
