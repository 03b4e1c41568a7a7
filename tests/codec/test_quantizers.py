"""The quantizer family: kernels against each other and against the formulas, and the statistics that papers promise."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.backends import assert_backends_agree, clones, segments
from hypothesis import example, given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire import kernels
from thinwire.codec.quantize.ternary import SharedTernary

LEVELS = [
    (-1.0, 1.0),
    (-1.0, 0.0, 1.0),
    (-1.0, -0.3, 0.1, 0.9),
    (-0.5, 0.25, 0.75),
    tuple(i / 7 for i in range(-7, 8)),
    tuple(sorted([2.0**-j for j in range(8)] + [-(2.0**-j) for j in range(8)])),
    tuple(i / 127 for i in range(-127, 128)),
]


LARGEST = torch.finfo(torch.float32).max


@settings(max_examples=50)
@given(
    segments(), st.integers(9, 16), st.floats(0, 1), st.sampled_from([1, 3, 100, 512, 5000]), st.integers(0, 2**64 - 1)
)
@example([torch.tensor([-LARGEST])], 15, 0.5, 1, 0)  # scales end below the largest float, so that it lies beyond them
@example([torch.tensor([-LARGEST, LARGEST, 1e38, 1.0])], 16, 1.0, 512, 7)
def test_wide_codes_backends_agree(xs, bits, part, bucket_size, key):
    num_steps = max(1, round(part * (2**bits - 1)))
    keys = [key + i & 2**64 - 1 for i in range(len(xs))]

    def compute():
        work, outs = clones(xs), clones(xs)
        quantizer = kernels.quantize.Quantizer(bits, num_steps, bucket_size)
        payload = torch.empty(quantizer.nbytes([x.numel() for x in xs]), dtype=torch.uint8)
        kernels.quantize.encode(work, payload, keys, quantizer, work)
        kernels.quantize.decode_add(payload, outs, 0.7, quantizer)
        return [payload, *work, *outs]

    assert_backends_agree(compute)


@settings(max_examples=75)
@given(segments(), st.sampled_from([3, 5, 7, 9, 17, 33, 129, 70001]), st.data())
def test_ternary_backends_agree(xs, base, data):
    bucket_size = data.draw(st.sampled_from([None, 1, 3, 100, 512, 5000]))
    clip = data.draw(st.sampled_from([0.5, 2.5, math.inf]))
    keys = [data.draw(st.integers(0, 2**64 - 1)) for _ in xs]
    corrupt = data.draw(st.booleans())

    def compute():
        work, outs = clones(xs), clones(xs)
        scales = kernels.ternary.scales(work, clip, bucket_size)
        ternary = kernels.ternary.Ternary(base, bucket_size)
        payload = torch.empty(ternary.nbytes([x.numel() for x in xs]), dtype=torch.uint8)
        kernels.ternary.encode(work, scales, payload, keys, ternary, work)
        received = payload.clone().fill_(251) if corrupt else payload
        kernels.ternary.decode_add(received, scales, outs, 0.3, ternary)
        return [scales, payload, *work, *outs]

    assert_backends_agree(compute)


@settings(max_examples=50)
@given(segments(), st.sampled_from([None, 1, 3, 100, 512, 5000]), st.booleans())
def test_onebit_backends_agree(xs, bucket_size, fixed):
    def compute():
        work, outs = clones(xs), clones(xs)
        payload = torch.empty(kernels.onebit.nbytes([x.numel() for x in xs], bucket_size), dtype=torch.uint8)
        kernels.onebit.encode(work, payload, bucket_size, work)
        kernels.onebit.decode_add(payload, outs, 0.3, bucket_size)
        signs = torch.empty(kernels.sign.nbytes([x.numel() for x in xs]), dtype=torch.uint8)
        kernels.sign.encode(xs, signs, None, 0.1 if fixed else None)
        return [payload, *work, *outs, signs]

    assert_backends_agree(compute)


@settings(max_examples=50)
@given(segments(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([None, 1, 3, 100, 512, 5000]))
def test_bin_means_backends_agree(xs, bits, bucket_size):
    def compute():
        work, outs = clones(xs), clones(xs)
        payload = torch.empty(kernels.bin_means.nbytes([x.numel() for x in xs], bits, bucket_size), dtype=torch.uint8)
        kernels.bin_means.encode(work, payload, bits, bucket_size, work)
        kernels.bin_means.decode_add(payload, outs, 0.3, bits, bucket_size)
        return [payload, *work, *outs]

    assert_backends_agree(compute)


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def mean_and_error(codec, x, num_rounds):
    """The mean of decodings over keys, and the mean squared error of each element."""
    total, error = torch.zeros(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)
    for step in range(num_rounds):
        difference = codec.decode(codec.encode(x, tw.codec.Key(step=step)), len(x)).double() - x.double()
        total += difference
        error += difference.square()
    return total / num_rounds + x, error / num_rounds


def variance_of_levels(x, levels, bucket_size, norm):
    """(h - r)(r - l) scale^2 for each element, in float64."""
    levels, out = torch.tensor(levels, dtype=torch.float64), []
    for bucket in x.double().split(bucket_size):
        scale = bucket.abs().max() if norm == "max" else bucket.norm()
        r = bucket / scale
        at = (torch.searchsorted(levels, r, right=True) - 1).clamp(0, len(levels) - 2)
        out.append((levels[at + 1] - r) * (r - levels[at]) * scale**2)
    return torch.cat(out).clamp(min=0)


UNBIASED = [
    tw.codec.Quantize(levels=(-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)),
    tw.codec.Quantize(levels=tuple(i / 10 for i in range(-10, 11)), bucket_size=100, norm="l2"),
    tw.codec.Quantize(levels=(-1.0, 0.1, 0.2, 1.0), bucket_size=64),
    tw.NUQSGD(bits=3),
    tw.NUQSGD(bits=4, multiplier=0.3, bucket_size=2048),
    tw.TernGrad(clip=None),
    tw.TernGrad(clip=None, bucket_size=100),
]


@pytest.mark.parametrize("codec", UNBIASED, ids=repr)
def test_mean_and_variance_are_those_of_the_formula(codec):
    """Each element within 5.5 of its own standard errors (chance under 1e-4 for 2048), the total error within 3 %."""
    x, num_rounds = gaussian(2048), 400
    ternary = isinstance(codec, tw.TernGrad)
    levels = (-1.0, 0.0, 1.0) if ternary else codec.level_values
    variance = variance_of_levels(x, levels, codec.bucket_size or len(x), "max" if ternary else codec.norm)
    mean, error = mean_and_error(codec, x, num_rounds)
    # Rare roundings make the distribution of a mean wider than a normal one: a bound on that is added.
    largest = max(x.double().norm() if not ternary and codec.norm == "l2" else x.double().abs().max(), 1e-9)
    tolerance = 5.5 * (variance / num_rounds).sqrt() + 10 * largest / num_rounds + 1e-6
    assert ((mean - x.double()).abs() <= tolerance).all()
    # The relative standard error of the sum of 800 000 squared errors is below 1 %.
    assert error.sum().item() == pytest.approx(variance.sum().item(), rel=0.03)


@pytest.mark.parametrize("levels", LEVELS, ids=len)
def test_an_element_at_a_level_stays_there(levels):
    levels = [lv for lv in levels if lv > -1 and lv < 1]
    x = torch.tensor([1.0, *levels, -1.0] * 50)
    codec = tw.codec.Quantize(levels=(-1.0, *levels, 1.0))
    for step in range(20):
        torch.testing.assert_close(codec.decode(codec.encode(x, tw.codec.Key(step=step)), len(x)), x, rtol=0, atol=0)


def test_what_lies_beyond_the_levels_goes_to_the_nearest():
    x = torch.tensor([1.0, 0.76, -0.51, -0.9])
    codec = tw.codec.Quantize(levels=(-0.5, 0.25, 0.75))
    assert codec.decode(codec.encode(x), 4).tolist() == [0.75, 0.75, -0.5, -0.5]
    assert not codec.traits.unbiased


@pytest.mark.parametrize(("bits", "bucket_size"), [(2, 64), (3, 512), (4, 8192), (6, 100)])
def test_nuqsgd_is_within_its_variance_bound(bits, bucket_size):
    """E|C(x)-x|^2 <= (1/8 + d p^(2s) / 4)|x|^2 with p = 1/2: derived in the docstring, as arXiv 1908.06077 does."""
    x = gaussian(bucket_size * 4, seed=3)
    _, error = mean_and_error(tw.NUQSGD(bits=bits, bucket_size=bucket_size), x, 30)
    smallest = 0.5 ** (2 ** (bits - 1) - 2)
    assert 0 < error.sum() <= (1 / 8 + bucket_size * smallest**2 / 4) * x.double().square().sum()


def test_nuqsgd_levels():
    assert tw.NUQSGD(bits=2).level_values == (-1.0, 0.0, 1.0)
    assert tw.NUQSGD(bits=4, multiplier=0.3).level_values[8:] == tuple(0.3**j for j in range(6, -1, -1))


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 7, 255, 32767])
def test_qsgd_by_levels(levels, norm):
    """2s + 1 levels, ceil(log2(2s + 1)) bits; every decoded element is one of the two levels around it."""
    x, codec = gaussian(5000), tw.QSGD(levels=levels, bucket_size=1000, norm=norm)
    assert codec.code_bits == math.ceil(math.log2(2 * levels + 1))
    assert codec.nbytes(5000) == 4 * 5 + 5000 * codec.code_bits // 8
    decoded = codec.decode(codec.encode(x), 5000).double()
    for bucket, value in zip(x.double().split(1000), decoded.split(1000), strict=True):
        scale = bucket.abs().max() if norm == "max" else bucket.norm()
        level = value / scale * levels
        assert (level - level.round()).abs().max() < 1e-6 * levels
        assert (level - bucket / scale * levels).abs().max() < 1 + 1e-6 * levels


def test_dense_last_bucket_is_exact():
    x, codec = gaussian(1000), tw.codec.DenseLast(tw.QSGD(bits=2, bucket_size=300))
    residual = torch.empty_like(x)
    payload = codec.encode(x, residual=residual)
    assert payload.numel() == tw.QSGD(bits=2, bucket_size=300).nbytes(900) + 4 * 100
    assert torch.equal(codec.decode(payload, 1000)[900:], x[900:])
    assert not residual[900:].any()
    assert residual[:900].any()


def test_qsgd_schedules():
    codec = tw.QSGD(bits=tw.schedule.Values((8, 4), every=10, unit="step"))
    from thinwire.schedule import resolve

    assert resolve(codec, tw.schedule.Progress(step=9)) == tw.QSGD(bits=8)
    assert resolve(codec, tw.schedule.Progress(step=10)) == tw.QSGD(bits=4)


def test_terngrad_clips_at_standard_deviations():
    x = torch.cat([gaussian(10_000) + 0.5, torch.tensor([100.0, -80.0])])
    decoded = tw.TernGrad(clip=2.5).decode(tw.TernGrad(clip=2.5).encode(x), len(x))
    limit = 2.5 * x.double().std(correction=0).item()
    assert decoded.abs().max().item() == pytest.approx(limit, rel=1e-6)
    assert decoded[-2] > 0 > decoded[-1]
    constant = torch.full((100,), 3.0)
    assert torch.equal(tw.TernGrad().decode(tw.TernGrad().encode(constant), 100), constant)


@pytest.mark.parametrize("numel", [1, 4, 5, 319, 320, 321, 100_000])
def test_sizes(numel):
    """1.6 bits an element and a scale; one bit an element and its scales."""
    assert tw.TernGrad().nbytes(numel) == 4 + -(-numel // 5)
    assert tw.codec.OneBit().nbytes(numel) == 8 + -(-numel // 8)
    assert tw.SignSGD().nbytes(numel) == 4 + -(-numel // 8)
    assert tw.Cast("float8_e5m2").nbytes(numel) == 4 + numel


@pytest.mark.parametrize("num_workers", [2, 3, 4, 7, 8, 16, 100])
def test_ternary_digits_add_up_without_carry(num_workers):
    """The decoded sum of payloads is the sum of decodings, even where every worker sends the largest digit."""
    xs = [gaussian(3000, seed=w).abs() * 10 if w % 2 else gaussian(3000, seed=w) for w in range(num_workers)]
    codec = SharedTernary(torch.tensor([0.5, 2.0, 9.0]), num_workers, bucket_size=1000)
    payloads = [codec.encode(x, tw.codec.Key(step=w)).view(torch.int32) for w, x in enumerate(xs)]
    total = torch.stack(payloads).long().sum(0)
    assert 0 <= total.min() <= total.max() < 2**31
    alone, ternary = tw.TernGrad(clip=None, bucket_size=1000), kernels.ternary.Ternary(bucket_size=1000)
    digits = torch.zeros(3000, dtype=torch.float64)
    for w, x in enumerate(xs):
        packed = torch.empty(600, dtype=torch.uint8)
        kernels.ternary.encode([x], codec.scales, packed, [tw.codec.Key(step=w).mixed()], ternary)
        one = torch.zeros(3000)
        kernels.ternary.decode_add(packed, codec.scales, [one], 1.0, ternary)
        digits += one.double()
    torch.testing.assert_close(codec.decode(total.int().view(torch.uint8), 3000).double(), digits, rtol=1e-6, atol=0)
    assert alone.nbytes(3000) < codec.nbytes(3000)


def test_onebit_is_the_best_two_values():
    x = gaussian(1000) + 0.3
    decoded = tw.codec.OneBit().decode(tw.codec.OneBit().encode(x), 1000).double()
    expected = torch.where(x < 0, x[x < 0].double().mean(), x[x >= 0].double().mean())
    torch.testing.assert_close(decoded, expected, rtol=2.0**-23, atol=0)
    lost = x.double().square().sum() - decoded.square().sum()
    torch.testing.assert_close((x.double() - decoded).square().sum(), lost, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "largest", "precision"), [("float8_e4m3fn", 448, 4), ("float8_e5m2", 57344, 3)])
def test_fp8_neither_overflows_nor_loses_small_segments(dtype, largest, precision):
    codec = tw.Cast(dtype)
    for factor in (1e-30, 1e-5, 1.0, 3e37):
        x = gaussian(1000).clamp(-3, 3) * factor
        decoded = codec.decode(codec.encode(x), 1000)
        normal = x.abs() > x.abs().max() / 64
        assert ((decoded - x).abs()[normal] <= x.abs()[normal] * 2.0**-precision).all()
    x = torch.tensor([float(largest), 1.0])
    payload = codec.encode(x)
    assert payload[:4].clone().view(torch.float32).item() == 1.0
    assert torch.equal(payload[4:].view(getattr(torch, dtype)).float(), x)


def averaged(averager, size, shape=(30, 40), scale=1.0, num_steps=1):
    def worker(comm):
        x = torch.empty(shape)
        state = averager.init([("x", x)], comm, seed=5)
        before = comm.ledger.bytes_sent
        for step in range(num_steps):
            x.copy_(gaussian(x.numel(), seed=10 * comm.rank + step).view(shape) * scale)
            averager.step(state, [("x", x)], comm, scale).wait()
            averager.commit(state)
        return x, comm.ledger.bytes_sent - before

    results = tw.LocalWorld(size).run(worker)
    assert all(torch.equal(x, results[0][0]) for x, _ in results)
    return results[0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("memory", [None, tw.ErrorFeedback()], ids=repr)
def test_shared_terngrad_averages_on_the_wire(size, memory):
    """Workers agree on the scale, and send 4 (W-1) bytes of proposals and 2(W-1)/W of int32 words."""
    averager = tw.Mean(tw.TernGrad(shared=True), memory)
    result, sent = averaged(averager, size)
    scale = max(float(kernels.ternary.scales([gaussian(1200, seed=10 * r)], 2.5)) for r in range(size))
    counts = result.double() * size / scale
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-5)
    assert counts.abs().max() <= size
    payload = SharedTernary(torch.zeros(1), size, None).nbytes(1200)
    assert sent == pytest.approx(4 * (size - 1) + 2 * (size - 1) / size * payload, abs=8 * size)


def test_shared_terngrad_with_memory_loses_nothing():
    """The sum of results is the mean of all gradients less what memories hold."""

    def worker(comm):
        averager = tw.Mean(tw.TernGrad(shared=True), tw.ErrorFeedback())
        x, total, given = torch.empty(20, 30), torch.zeros(20, 30), torch.zeros(20, 30)
        state = averager.init([("x", x)], comm)
        for step in range(10):
            x.copy_(gaussian(600, seed=100 * comm.rank + step).view(20, 30))
            given += x
            averager.step(state, [("x", x)], comm).wait()
            averager.commit(state)
            total += x
        return total, given, state.memory.residual["x"]

    results = tw.LocalWorld(4).run(worker)
    expected = sum(given.double() - residual.view(20, 30) for _, given, residual in results) / 4
    torch.testing.assert_close(results[0][0].double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_majority_vote(size, scale):
    """The sign of the sum of signs, ties 0, whatever the loss scale."""
    for loss_scale in (1.0, 1024.0):
        result, _ = averaged(tw.Mean(tw.SignSGD(scale=scale)), size, scale=loss_scale)
        signs = sum(torch.where(gaussian(1200, seed=10 * r) < 0, -1, 1) for r in range(size)).view(30, 40)
        torch.testing.assert_close(result, signs.sign() * scale * loss_scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", [tw.SignSGD(), tw.TernGrad(shared=True), tw.codec.OneBit()], ids=repr)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_not_finite_on_one_worker_reaches_all(codec, bad):
    def worker(comm):
        x = gaussian(200, seed=comm.rank).view(10, 20)
        if comm.rank == 1:
            x[3, 4] = bad
        averager = tw.Mean(codec)
        state = averager.init([("x", x)], comm)
        averager.step(state, [("x", x)], comm).wait()
        return averager.commit(state), bool(x.isfinite().all())

    assert tw.LocalWorld(3).run(worker) == [(False, False)] * 3


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tw.QSGD(), "either bits or levels, such as bits=4"),
        (lambda: tw.QSGD(bits=4, levels=7), "either bits or levels"),
        (lambda: tw.QSGD(levels=40000), "levels must be an integer from 1 to 32767"),
        (lambda: tw.QSGD(levels=7, zero=False), "levels include zero; give bits"),
        (lambda: tw.codec.Quantize(levels=(0.0,)), "expected 2 to 256"),
        (lambda: tw.codec.Quantize(levels=(0.0, 0.0)), "ascending"),
        (lambda: tw.codec.Quantize(levels=(0.0, 1.5)), r"in \[-1, 1\]"),
        (lambda: tw.codec.Quantize(levels=(0.0, math.nan)), "ascending"),
        (lambda: tw.NUQSGD(bits=1), "bits must be"),
        (lambda: tw.NUQSGD(multiplier=1.0), "multiplier"),
        (lambda: tw.NUQSGD(bits=8, multiplier=0.1), "ascending"),
        (lambda: tw.TernGrad(clip=0), "clip"),
        (lambda: tw.TernGrad(bucket_size=0), "bucket_size"),
        (lambda: tw.codec.OneBit(bucket_size=0), "bucket_size"),
        (lambda: tw.SignSGD(scale=0), "scale"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_natural_compression_has_the_variance_of_its_formula():
    """Between 2^k and 2^(k+1), `E|C(x) - x|^2 = (x - 2^k)(2^(k+1) - x)`, at most x^2/8; estimated from 4000 draws."""
    x = torch.tensor([1.5, -0.3, 3.5, 1e-3, 1.0, -4.0])
    draws = torch.stack(
        [
            tw.codec.NaturalCompression().decode(tw.codec.NaturalCompression().encode(x, tw.codec.Key(step=i)), 6)
            for i in range(4000)
        ]
    )
    low = torch.exp2(x.abs().log2().floor())
    variance = (x.abs() - low) * (2 * low - x.abs())
    error = (draws - x).double().square().mean(0).float()
    torch.testing.assert_close(error, variance, rtol=0.1, atol=1e-9)
    assert (variance <= x.square() / 8 + 1e-9).all() and draws.abs().log2().frac().eq(0).all()


def test_natural_compression_at_the_ends_of_float32():
    x = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan])
    for step in range(20):
        decoded = (
            tw.codec.NaturalCompression()
            .decode(tw.codec.NaturalCompression().encode(x, tw.codec.Key(step=step)), len(x))
            .tolist()
        )
        assert decoded[:2] == [0, 0] and decoded[2] in (0, 2.0**-126)
        assert decoded[3:5] == [2.0**127, -(2.0**127)]
        assert [abs(value) for value in decoded[5:]] == [math.inf] * 3


def test_dynamic_numbers_are_as_dense_in_each_decade_as_their_fraction_has_bits():
    levels = torch.tensor(tw.codec.Dynamic8().level_values, dtype=torch.float64)
    assert len(levels) == 255 and torch.equal(levels, -levels.flip(0)) and levels[-1] == 1
    counts = [int(((levels > 10.0 ** -(e + 1)) & (levels <= 10.0**-e)).sum()) for e in range(7)]
    assert counts == [64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("codec", [tw.SignSGD(scale=0.5), tw.chain(tw.TopK(1.0), tw.SignSGD(scale=0.5))], ids=repr)
def test_a_segment_of_zeros_does_not_vote(codec, backend):
    """A layer without a gradient is not changed, and a worker without one leaves the vote to the others."""

    def worker(comm):
        used, one_uses = torch.full((2, 2), -1.0 - comm.rank), torch.full((2, 2), -3.0 * (comm.rank == 1))
        tensors = [("used", used), ("unused", torch.zeros(2, 2)), ("one uses", one_uses)]
        averager = tw.Mean(codec)
        averager.step(averager.init(tensors, comm), tensors, comm).wait()
        return [t[0, 0].item() for _, t in tensors]

    with kernels.use_backend(backend):
        assert tw.LocalWorld(3).run(worker) == [[-0.5, 0.0, -0.5]] * 3


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_one_bit_of_huge_gradients_leaves_a_finite_memory(backend):
    """The two levels are twice the scale apart. Where that overflows, all workers see the infinity, and none remembers it."""

    def worker(comm):
        averager = tw.Mean(tw.QSGD(bits=1, zero=False), tw.ErrorFeedback(), exchange="all_gather")
        x = torch.empty(1, 64)
        state = averager.init([("x", x)], comm)
        committed = []
        for largest in (1.0, 3e38, 1.0):
            x.copy_(torch.linspace(-largest, largest, 64))
            averager.step(state, [("x", x)], comm).wait()
            committed.append(averager.commit(state))
        return committed, bool(state.memory.residual["x"].isfinite().all())

    with kernels.use_backend(backend):
        assert tw.LocalWorld(2).run(worker) == [([True, False, True], True)] * 2
