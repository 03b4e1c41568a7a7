"""What is special to each sparsifier; what all codecs share is in `test_codecs.py`."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire import kernels


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sent(codec: tw.codec.Codec, x: torch.Tensor, key: tw.codec.Key = tw.codec.Key()) -> torch.Tensor:
    return codec.decode(codec.encode(x, key), x.numel(), key)


# ---- thresholds ----


@pytest.mark.parametrize("value", [0.5, 1.0, 2.5, 100.0])
def test_threshold_keeps_what_reaches_it(value):
    x = normal(5000)
    x[7] = -value  # exactly at it
    codec = tw.Threshold(value)
    assert torch.equal(sent(codec, x), torch.where(x.abs() >= value, x, 0.0))
    k = int((x.abs() >= value).sum())
    assert codec.encode(x).numel() == 4 + 4 * k + kernels.indices.nbytes(k, 5000)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_adaptive_threshold_follows_the_largest_of_each_segment(fraction):
    xs = [normal(3000), normal(700, 1) * 1e-20, torch.zeros(50), torch.full((9,), -3.0)]
    codec = tw.AdaptiveThreshold(fraction)
    decoded = codec.decode(codec.encode(xs, [tw.codec.Key()] * 4), [x.numel() for x in xs])
    for x, got in zip(xs, decoded, strict=True):
        limit = (fraction * x.abs().max().double()).float()
        assert torch.equal(got, torch.where(x.abs() >= limit, x, 0.0))


def test_nothing_to_send_costs_the_count():
    codec = tw.chain(tw.Threshold(9.0), tw.QSGD(bits=4))
    assert codec.encode(torch.ones(1000)).numel() == 4
    assert tw.AdaptiveThreshold().encode(torch.zeros(1000)).numel() == 4
    assert torch.equal(sent(codec, torch.ones(1000)), torch.zeros(1000))


@pytest.mark.parametrize("values", [None, tw.QSGD(bits=4), tw.Cast(), tw.codec.SignNorm()], ids=repr)
@pytest.mark.parametrize("value", [1e-9, 0.01, 0.02, 0.1, 0.3, 1.0])
def test_never_larger_than_dense_and_the_count(values, value):
    x = normal(3000, 2)
    codec = tw.Threshold(value) if values is None else tw.chain(tw.Threshold(value), values)
    dense = (values or tw.codec.Identity()).nbytes(3000)
    assert codec.encode(x).numel() <= codec.nbytes(3000) == dense + 4


def test_all_is_sent_where_that_is_smaller():
    x = normal(1000, 3)
    x[::100] = 0.0  # ten elements below the threshold, which cost less than 125 bytes of indices
    assert tw.Threshold(1e-6).encode(x).numel() == 4004
    residual = torch.empty(1000)
    tw.Threshold(1e-6).encode(x, residual=residual)
    assert not residual.any()


# ---- sampled top-k ----


def sampled_by_definition(x: torch.Tensor, ratio: float, sample: float, key: int) -> torch.Tensor:
    """Deep Gradient Compression's selection, spelled out: the mask of what is sent."""
    n, k = x.numel(), max(1, math.ceil(ratio * x.numel()))
    wanted = max(math.ceil(sample * n), math.ceil(2 * n / k))
    stride = max(1, n // wanted)
    stride -= stride > 1 and stride % 2 == 0
    part = x if wanted >= n else x[key % stride :: stride]
    threshold = part.abs().sort(descending=True).values[math.ceil(k / n * part.numel()) - 1].item()
    for _ in range(10):
        if int((x.abs() >= threshold).sum()) >= 0.8 * k:
            break
        threshold *= 0.8
    mask = x.abs() >= threshold
    if int(mask.sum()) > k:
        mask = torch.zeros(n, dtype=torch.bool)
        mask[x.abs().sort(descending=True, stable=True).indices[:k]] = True
    return mask


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("sample", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("heavy", [False, True])
def test_sampled_topk_is_that_of_dgc(ratio, sample, heavy):
    for step in range(5):
        x = normal(20_000, step) ** (5 if heavy else 1)
        key = tw.codec.Key(1, 2, step)
        mask = sampled_by_definition(x, ratio, sample, key.mixed())
        got = sent(tw.TopK(ratio, sample=sample), x, key)
        assert torch.equal(got, torch.where(mask, x, 0.0))


def test_sampled_topk_sends_at_most_k():
    k = 1000
    for step in range(20):
        x = normal(100_000, step)
        codec, key = tw.TopK(0.01, sample=0.05), tw.codec.Key(step=step)
        (count,) = codec.support(codec.encode(x, key), x.numel()).counts
        assert 0.8 * k <= count <= k


def test_sampled_topk_of_few_large_elements():
    """All but a few are zero: the threshold is zero, everything reaches it, and the k largest of them are sent."""
    x = torch.zeros(10_000)
    x[[3, 77, 9000]] = torch.tensor([1.0, -5.0, 2.0])
    assert torch.equal(sent(tw.TopK(0.01, sample=0.01), x), x)


def test_a_sample_may_see_large_elements_alone_so_that_nothing_is_lossless():
    codec, each = tw.TopK(1.0, sample=0.1), torch.full((9, 999), 0.01)
    for start, x in enumerate(each):
        x[start::9] = 1.0  # the sample is every ninth element, from some start
    assert sum(torch.equal(sent(codec, x), x) for x in each) == 8
    assert not codec.traits.lossless and tw.TopK(1.0).traits.lossless


# ---- random-k ----


def test_random_subsets_are_uniform():
    """Each subset of 2 of 6 as often as any other: chi-squared of 14 degrees of freedom, chance of failure 1e-6."""
    draws = 15_000
    random_indices = kernels.permutation.random_indices
    seen = Counter(tuple(random_indices([kernels.mix_key(5, i, 0)], [2], [6]).tolist()) for i in range(draws))
    expected = draws / 15
    chi2 = sum((seen[pair] - expected) ** 2 / expected for pair in combinations(range(6), 2))
    assert sum(seen.values()) == draws
    assert chi2 < 56.5  # scipy.stats.chi2.isf(1e-6, 14) = 56.49


@pytest.mark.parametrize("n, k", [(300, 30), (1000, 400), (1000, 700), (5000, 25)])
def test_every_coordinate_is_as_likely_as_another(n, k):
    """Counts are hypergeometric; their chi-squared is near n - 1, and |z| < 5 fails by chance once in 10^6."""
    draws = 4000
    seen = torch.zeros(n)
    for i in range(draws):
        seen[kernels.permutation.random_indices([kernels.mix_key(0, n, i)], [k], [n]).long()] += 1
    p = k / n
    chi2 = float(((seen - draws * p) ** 2).sum() / (draws * p * (1 - p)))
    assert abs(chi2 - (n - 1)) < 5 * math.sqrt(2 * n)


def test_neighbours_are_chosen_independently():
    n, k, draws = 1000, 200, 3000
    both = 0
    for i in range(draws):
        kept = torch.zeros(n, dtype=torch.bool)
        kept[kernels.permutation.random_indices([kernels.mix_key(1, 0, i)], [k], [n]).long()] = True
        both += int((kept[1:] & kept[:-1]).sum())
    expected = draws * (n - 1) * (k / n) * ((k - 1) / (n - 1))
    assert abs(both - expected) < 6 * math.sqrt(expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.6, 1.0])
def test_random_k_error(ratio, shared):
    """E|C(x)-x|^2 = (1-k/n)|x|^2, scaled (n/k-1)|x|^2, within 6 standard errors of 400 keys."""
    n, draws = 2000, 400
    x = normal(n, 4)
    square = float(x.double().square().sum())
    for scaled in (False, True):
        codec = tw.RandomK(ratio, shared=shared, scaled=scaled)
        errors = torch.tensor(
            [float((sent(codec, x, tw.codec.Key(step=i)) - x).double().square().sum()) for i in range(draws)]
        )
        k = codec.count(n)
        expected = (n / k - 1 if scaled else 1 - k / n) * square
        assert abs(float(errors.mean()) - expected) <= 6 * float(errors.std()) / math.sqrt(draws) + 1e-6 * square


def test_shared_random_k_adds_on_the_wire():
    a, b, key = normal(1000, 6), normal(1000, 7), tw.codec.Key(3, 4, 5)
    for codec in (tw.RandomK(0.1, shared=True), tw.RandomK(0.1, shared=True, scaled=True)):
        total = codec.encode(a, key).view(torch.float32) + codec.encode(b, key).view(torch.float32)
        got = codec.decode(total.view(torch.uint8), 1000, key)
        assert codec.encode(a, key).numel() == 400
        torch.testing.assert_close(got, sent(codec, a, key) + sent(codec, b, key), rtol=1e-6, atol=1e-6)


def test_own_keys_differ_and_travel():
    codec, x = tw.RandomK(0.1), torch.ones(1000)
    first, second = (codec.encode(x, tw.codec.Key(stream=s)) for s in (1, 2))
    assert first.numel() == 408
    assert not torch.equal(codec.decode(first, 1000), codec.decode(second, 1000))


def test_a_shared_key_must_be_given():
    with pytest.raises(ValueError, match="pass it as `key`"):
        tw.RandomK(0.1, shared=True).decode(torch.zeros(400, dtype=torch.uint8), 1000)


# ---- chunks ----


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 500), chunk=st.integers(1, 100), ratio=st.floats(0.001, 1))
def test_top_k_in_chunks_is_top_k_of_each(n, chunk, ratio):
    x = normal(n, n)
    by_hand = torch.cat([sent(tw.TopK(ratio), part) for part in x.split(chunk)])
    codec = tw.codec.BlockwiseTopK(ratio, block=chunk)
    assert torch.equal(sent(codec, x), by_hand)
    assert codec.encode(x).numel() == codec.nbytes(n)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 16, 64])
def test_an_index_in_a_chunk_takes_at_most_12_bits(k):
    n = 4096 * 50
    codec = tw.codec.BlockwiseTopK(k / 4096)
    assert codec.count(n) == 50 * k
    assert (codec.nbytes(n) - 4 * 50 * k) * 8 <= 12 * 50 * k


def chunk_mean(comm, codec, n, memory=None):
    x = normal(n, comm.rank) * (1 + comm.rank)
    averager = tw.Mean(codec, memory, min_ndim=0)
    state = averager.init([("x", x)], comm)
    before = comm.ledger.bytes_sent
    averager.step(state, [("x", x)], comm).wait()
    averager.commit(state)
    return x, comm.ledger.bytes_sent - before


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1000, 1024, 37])
def test_chunk_top_k_averages_the_chunks_of_largest_summed_norm(size, n):
    codec = tw.codec.CoarseGrainedTopK(0.2, chunk=64)
    results = tw.LocalWorld(size).run(chunk_mean, codec, n)
    xs = [normal(n, rank) * (1 + rank) for rank in range(size)]
    norms = sum(torch.stack([part.double().abs().sum() for part in x.split(64)]) for x in xs)
    expected = torch.zeros(n, dtype=torch.float64)
    m = len(norms)
    k = math.ceil(0.2 * m)
    for chunk in norms.topk(k).indices.tolist():
        at = slice(64 * chunk, 64 * chunk + 64)
        expected[at] = sum(x[at].double() for x in xs) / size
    for got, num_bytes in results:
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(got, results[0][0])
        values = 4 * k * min(64, n)
        assert num_bytes == pytest.approx(2 * (size - 1) / size * (4 * m + values), abs=2 * 4 * size)


def test_the_support_of_chunk_top_k_is_flat_for_a_matrix():
    codec, x = tw.codec.CoarseGrainedTopK(0.3, chunk=8), normal(20 * 30, 0).view(20, 30)
    payload = codec.encode(x)
    support = codec.support(payload, x.shape)
    assert torch.equal(support.indices.long(), codec.decode(payload, x.shape).view(-1).nonzero().view(-1))
    assert support.counts == [len(support.indices)]


def test_bytes_of_chunk_top_k_do_not_grow_with_workers():
    """By the ledger, at 0.1 % of 100,000 elements in chunks of 64: norms and values of 32 workers beside those of two."""
    codec = tw.codec.CoarseGrainedTopK(0.001, chunk=64)
    few, many = (max(sent for _, sent in tw.LocalWorld(size).run(chunk_mean, codec, 100_000)) for size in (2, 32))
    assert few == 4 * (1563 + 2 * 64)
    assert many <= 2.1 * few


def test_chunk_top_k_loses_nothing_with_a_memory():
    def worker(comm):
        averager = tw.Mean(tw.codec.CoarseGrainedTopK(0.25, chunk=16), tw.ErrorFeedback(), min_ndim=0)
        state = averager.init([("x", torch.zeros(200))], comm)
        given, got = torch.zeros(200, dtype=torch.float64), torch.zeros(200, dtype=torch.float64)
        for step in range(6):
            x = normal(200, 10 * comm.rank + step)
            given += x.double()
            averager.step(state, [("x", x)], comm).wait()
            averager.commit(state)
            got += x.double()
        return given, got, state.state_dict()["memory"]["residual"]["x"].double()

    results = tw.LocalWorld(3).run(worker)
    given, left = (sum(part) / 3 for part in zip(*[(g, e.flatten()) for g, _, e in results], strict=True))
    torch.testing.assert_close(results[0][1] + left, given, rtol=1e-5, atol=1e-5)


# ---- indices ----


@settings(max_examples=100)
@given(n=st.integers(1, 3000), density=st.floats(0, 1), runs=st.booleans(), seed=st.integers(0, 2**31))
def test_auto_indices_are_the_smallest(n, density, runs, seed):
    """Not larger than plain, bitmap, Elias-Fano or packed gaps, but for the byte that names the code."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(n, generator=generator) < density
    if runs:
        kept = kept[: n // 50 + 1].repeat_interleave(50)[:n]
    indices = kept.nonzero().flatten().int()
    k = indices.numel()
    code = kernels.smallest.encode(indices, [k], [n])
    assert torch.equal(kernels.smallest.decode(code, [k], [n]), indices)
    gaps = torch.diff(indices, prepend=torch.tensor([-1], dtype=torch.int32)) - 1
    packed_gaps = sum(1 + (len(b) * int(b.max()).bit_length() + 7) // 8 for b in gaps.split(128)) if k else 0
    others = [4 * k, (n + 7) // 8, packed_gaps]
    others += [(k * (low + 1) + ((n - 1) >> low) + 7) // 8 for low in range(n.bit_length()) if k]
    assert code.numel() - 1 <= min(others)
    with kernels.use_backend("reference"):
        assert torch.equal(kernels.smallest.encode(indices, [k], [n]), code)
        assert torch.equal(kernels.smallest.decode(code, [k], [n]), indices)


def rice_by_hand(indices: list[int], n: int) -> bytes:
    """The definition, bit by bit: the width that bounds the size best, quotients in unary, then low bits."""
    k = len(indices)
    if k in (0, n):
        return b""
    low = min(range(31), key=lambda width: k * (width + 1) + (n - k) // 2**width)
    gaps = [b - a - 1 for a, b in zip([-1, *indices], indices, strict=False)]
    bits = [bit for gap in gaps for bit in [0] * (gap >> low) + [1]]
    bits += [gap >> i & 1 for gap in gaps for i in range(low)]
    return sum(bit << i for i, bit in enumerate(bits)).to_bytes((len(bits) + 7) // 8, "little")


@settings(max_examples=100)
@given(n=st.integers(1, 3000), density=st.floats(0, 1), runs=st.booleans(), seed=st.integers(0, 2**31))
def test_rice_coded_gaps(n, density, runs, seed):
    """As defined, by both backends; what was coded comes back; never more than a bitmap or Elias-Fano."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(n, generator=generator) < density**3  # sparse ones too
    if runs:
        kept = kept[: n // 50 + 1].repeat_interleave(50)[:n]
    indices = kept.nonzero().flatten().int()
    k = indices.numel()
    for backend in ("cpu", "reference"):
        with kernels.use_backend(backend):
            code = kernels.rice.encode(indices, [k], [n])
            assert bytes(code.tolist()) == rice_by_hand(indices.tolist(), n)
            assert torch.equal(kernels.rice.decode(code, [k], [n]), indices)
    assert code.numel() <= kernels.rice.max_nbytes(k, n) <= kernels.indices.nbytes(k, n)


def test_rice_coded_gaps_of_many_segments_and_of_the_widest():
    segments = [([0, 2**31 - 2], 2**31 - 1), ([], 5), ([0, 1, 2], 3), ([7], 8), ([1, 2, 4], 9)]
    indices = torch.tensor(sum((i for i, _ in segments), []), dtype=torch.int32)
    counts, numels = [len(i) for i, _ in segments], [n for _, n in segments]
    for backend in ("cpu", "reference"):
        with kernels.use_backend(backend):
            code = kernels.rice.encode(indices, counts, numels)
            assert bytes(code.tolist()) == b"".join(rice_by_hand(i, n) for i, n in segments)
            assert torch.equal(kernels.rice.decode(code, counts, numels), indices)
            with pytest.raises(ValueError, match="ascending"):
                kernels.rice.encode(indices.flip(0), counts[::-1], numels[::-1])
            with pytest.raises(ValueError, match="sum of counts"):
                kernels.rice.encode(indices[1:], counts, numels)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.3])
def test_rice_comes_near_the_entropy(ratio):
    """Within 0.15 bits an index of log2 (n choose k) / k, where Elias-Fano or a bitmap takes 0.3 to 0.6 more."""
    n, k = 1_000_000, int(1_000_000 * ratio)
    indices = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:k].sort().values.int()
    entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k
    coded = 8 * kernels.rice.encode(indices, [k], [n]).numel() / k
    assert entropy < coded < entropy + 0.15
    assert coded < 8 * kernels.indices.nbytes(k, n) / k - 0.25


@pytest.mark.parametrize("family", [kernels.smallest, kernels.rice])
@pytest.mark.parametrize("runs", [False, True])
def test_corrupt_codes_of_indices_are_refused(family, runs):
    """Both backends take and refuse the same bytes; what they take are ascending indices inside the segment."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randperm(5000, generator=generator)[:300].sort().values.int()
    if runs:  # packed gaps are smallest; the last code has bits to spare
        indices = torch.cat([torch.arange(100, 399), torch.tensor([400])]).int()
    code = family.encode(indices, [300], [5000])
    beyond = family.encode(indices + 5000 - indices[-1], [300], [5001])
    trials = [torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8) for n in range(240)]
    trials += [torch.cat([code[:i], code[i : i + 1] ^ 64, code[i + 1 :]]) for i in range(code.numel())]
    results = []
    for payload in [*trials, beyond, code[:-1], torch.cat([code, code[:1]]), code[:0]]:
        for name in ("cpu", "reference"):
            with kernels.use_backend(name):
                try:
                    results.append(family.decode(payload, [300], [5000]))
                except ValueError:
                    results.append(None)
        ours, theirs = results[-2:]
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(ours, theirs)
            assert int(ours[0]) >= 0 and int(ours[-1]) < 5000 and bool((ours[1:] > ours[:-1]).all())
    assert results[-8:] == [None] * 8 and any(r is not None for r in results)


def test_all_indices_cost_nothing():
    assert tw.TopK(1.0).nbytes(1000) == tw.codec.Identity().nbytes(1000)


# ---- in common ----


@pytest.mark.parametrize(
    "codec",
    [
        tw.TopK(0.1),
        tw.TopK(0.1, indices="auto"),
        tw.Threshold(1.0),
        tw.RandomK(0.1),
        tw.RandomK(0.1, shared=True),
        tw.codec.BlockwiseTopK(0.1, block=32),
        tw.chain(tw.Threshold(1.0), tw.QSGD(bits=8)),
    ],
    ids=repr,
)
def test_support_names_what_was_sent(codec):
    xs, keys = [normal(500, 8), normal(77, 9)], [tw.codec.Key(1), tw.codec.Key(2)]
    payload = codec.encode(xs, keys)
    indices, _, counts = codec.support(payload, [500, 77], keys)
    for out, index in zip(codec.decode(payload, [500, 77], keys), indices.split(counts), strict=True):
        others = torch.ones(out.numel(), dtype=torch.bool)
        others[index.long()] = False
        assert not out[others].any()
        assert (out[index.long()] != 0).double().mean() > 0.9  # a quantizer may send zeros


@pytest.mark.parametrize(
    "build",
    [
        lambda s: tw.TopK(s),
        lambda s: tw.TopK(s, sample=0.1),
        lambda s: tw.RandomK(s),
        lambda s: tw.codec.BlockwiseTopK(s),
        lambda s: tw.codec.CoarseGrainedTopK(s),
        lambda s: tw.Threshold(s),
        lambda s: tw.AdaptiveThreshold(s),
        lambda s: tw.chain(tw.Threshold(s), tw.QSGD(bits=4)),
    ],
)
def test_schedules(build):
    from thinwire.schedule import resolve

    codec = build(tw.schedule.Values((0.5, 0.25), unit="step"))
    assert tw.parse(repr(codec)) == codec
    assert resolve(codec, tw.schedule.Progress(step=1)) == build(0.25)
    results = tw.LocalWorld(2).run(lambda comm: chunk_mean(comm, codec, 300, tw.ErrorFeedback())[0])
    assert torch.equal(results[0], results[1])


def test_the_ledger_of_variable_sizes():
    """(W-1)(p + 8): payloads and their sizes."""

    def worker(comm):
        averager, x = tw.Mean(tw.Threshold(1.5), min_ndim=0, exchange="all_gather"), normal(1000, comm.rank)
        payload = averager.codec.encode(x)
        state = averager.init([("x", x)], comm)
        before = comm.ledger.bytes_sent
        averager.step(state, [("x", x)], comm).wait()
        return comm.ledger.bytes_sent - before, payload.numel()

    for size in (1, 2, 3, 4, 8):
        for num_bytes, payload_bytes in tw.LocalWorld(size).run(worker):
            assert num_bytes == (size - 1) * (payload_bytes + 8)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: tw.Threshold(0), "value must be above 0 and finite"),
        (lambda: tw.Threshold(math.nan), "value must be above 0 and finite"),
        (lambda: tw.AdaptiveThreshold(1.5), "fraction must be above 0 and at most 1"),
        (lambda: tw.RandomK(0), "RandomK: ratio"),
        (lambda: tw.RandomK(0.1, shared=1), "shared must be True or False"),
        (lambda: tw.TopK(0.1, sample=0), "sample must be"),
        (lambda: tw.TopK(0.1, indices="delta"), "indices must be 'fixed' or 'auto'"),
        (lambda: tw.codec.BlockwiseTopK(0.1, block=4097), "from 1 to 4096"),
        (lambda: tw.codec.CoarseGrainedTopK(0.1, chunk=0), "chunk must be an integer, 1 or more, got 0"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_rice_changes_the_bytes_and_nothing_else():
    """Deep Gradient Compression, whose selection is made in the memory's own pass, gives the same with either code."""

    def worker(comm, codec):
        x = torch.randn(60, 50, generator=torch.Generator().manual_seed(comm.rank))
        averager = tw.Mean(codec, tw.MomentumCorrection())
        state = averager.init([("x", x)], comm)
        for _ in range(3):
            averager.step(state, [("x", x)], comm).wait()
            averager.commit(state)
        return x, comm.ledger.bytes_sent

    plain = tw.LocalWorld(2).run(worker, tw.TopK(0.1))
    coded = tw.LocalWorld(2).run(worker, tw.chain(tw.TopK(0.1), tw.codec.Rice()))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, coded, strict=True))
    assert coded[0][1] < plain[0][1]
