"""Both kernel backends against independent truth: float64 formulas, NumPy's bit packing, sorting, a slow Elias-Fano."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from helpers.documented_format import hashed

from thinwire import kernels
from thinwire.kernels.quantize import Quantizer

BACKENDS = ["cpu", "reference"]
SIZES = [0, 1, 7, 8, 9, 511, 512, 513, 1024, 1025, 5000]


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request):
    with kernels.use_backend(request.param):
        yield request.param


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def quantized(xs, bits=4, num_steps=14, bucket_size=512, norm="max", residuals=None, key=5):
    quantizer = Quantizer(bits, num_steps, bucket_size, norm)
    payload = torch.empty(quantizer.nbytes([x.numel() for x in xs]), dtype=torch.uint8)
    kernels.quantize.encode(xs, payload, [key + i for i in range(len(xs))], quantizer, residuals)
    return payload


def dequantized(payload, numels, bits=4, num_steps=14, bucket_size=512):
    outs = [torch.zeros(n) for n in numels]
    kernels.quantize.decode_add(payload, outs, 1.0, Quantizer(bits, num_steps, bucket_size))
    return outs


def packed_indices(indices, counts, numels):
    out = torch.empty(sum(map(kernels.indices.nbytes, counts, numels)), dtype=torch.uint8)
    kernels.indices.encode(torch.tensor(indices, dtype=torch.int32), counts, numels, out)
    return out


def uniform_by_definition(key: int, count: int) -> np.ndarray:
    return (hashed(key, np.arange(count)) >> 8) / 2**24


def test_uniform_is_its_definition():
    key = kernels.mix_key(1, 2, 3)
    assert kernels.uniform(key, 50).tolist() == uniform_by_definition(key, 50).tolist()


def test_documented_values():
    assert kernels.mix_key(0, 0, 0) == 0x238275BC38FCBE91
    assert (kernels.uniform(1, 2) * 2**24).tolist() == [6850960, 10440790]
    assert bytes(packed_indices([3, 70], [2], [100]).tolist()) == b"\x69\x18"


def test_uniform_is_uniform_and_uncorrelated():
    u = kernels.uniform(kernels.mix_key(0, 0, 0), 100_000).double()
    v = kernels.uniform(kernels.mix_key(0, 0, 1), 100_000).double()
    # Five standard deviations of a mean, of a bin's count and of a correlation of 100 000 independent draws.
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 1e5)
    assert (torch.histc(u, 64, 0, 1) - 1e5 / 64).abs().max() < 5 * math.sqrt(1e5 / 64)
    for a, b in ((u, v), (u[1:], u[:-1])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / math.sqrt(1e5)


def test_keys_differ_in_every_part():
    keys = {kernels.mix_key(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(keys) == 512
    assert all(0 <= key < 2**64 for key in keys)
    assert kernels.mix_key(-1, 0, 0) == kernels.mix_key(2**64 - 1, 0, 0)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_quantize_follows_the_formula(bits, norm):
    """Codes by float64 arithmetic and NumPy's bit order; a draw within rounding of a boundary may fall either way."""
    x, steps, bucket = gaussian(1000), max(1, 2**bits - 2), 300
    payload = quantized([x], bits, steps, bucket, norm).numpy()
    scales = payload[: 4 * 4].view(np.float32).astype(np.float64)
    parts = [part.double().numpy() for part in x.split(bucket)]
    truth = [np.abs(p).max() if norm == "max" else np.linalg.norm(p) for p in parts]
    np.testing.assert_allclose(scales, truth, rtol=2**-23)
    stream = np.unpackbits(payload[16:], bitorder="little")
    codes = (stream[: 1000 * bits].reshape(-1, bits) << np.arange(bits)).sum(-1)
    assert not stream[1000 * bits :].any()
    t = np.concatenate([(p * steps / s + steps) / 2 for p, s in zip(parts, scales, strict=True)])
    u = uniform_by_definition(5, 1000)
    expected = np.clip(np.floor(t + u), 0, steps)
    near = np.abs(t + u - np.round(t + u)) < steps * 2**-21
    assert np.array_equal(codes[~near], expected[~near])
    assert near.sum() < 20


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bucket_size", [1, 3, 100, 512, 4096])
@pytest.mark.parametrize("alias", [False, True])
def test_residual_is_what_the_payload_fails_to_carry(numel, bucket_size, alias):
    xs = [gaussian(numel), gaussian(10, seed=1)]
    work = [x.clone() for x in xs]
    residuals = work if alias else [torch.full_like(x, math.nan) for x in xs]
    payload = quantized(work, bucket_size=bucket_size, residuals=residuals)
    values = dequantized(payload, [numel, 10], bucket_size=bucket_size)
    for x, residual, value in zip(xs, residuals, values, strict=True):
        assert torch.equal(residual, x - value)


def test_quantize_is_unbiased():
    x, rounds = gaussian(64), 4000
    payload = quantized([x] * rounds, bits=2, num_steps=2, key=1000)  # each copy has a key of its own
    total = torch.stack(dequantized(payload, [64] * rounds, bits=2, num_steps=2)).sum(0)
    # The step is scale; a rounding error's standard deviation is at most half a step. Five of them.
    assert ((total / rounds - x).abs() < 5 * 0.5 * x.abs().max() / math.sqrt(rounds)).all()


def test_bytes_do_not_depend_on_the_bucket_of_segments():
    a, b = gaussian(700), gaussian(300, seed=1)
    both = quantized([a, b])
    alone = quantized([b], key=6)
    assert torch.equal(both[-150:], alone[-150:])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_a_non_finite_element_spoils_its_bucket_only(bad, norm):
    x = gaussian(1024)
    x[600] = bad
    (out,) = dequantized(quantized([x], norm=norm), [1024])
    assert out[:512].isfinite().all()
    assert not out[512:].isfinite().any()


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_extreme_magnitudes_stay_finite(norm):
    largest = torch.finfo(torch.float32).max
    for scale in (largest, 1e38, 2.0**-117, 2.0**-118):
        x = torch.tensor([scale, -scale, 0.0])
        for bits, steps in ((1, 1), (4, 14), (8, 255)):
            (out,) = dequantized(quantized([x], bits, steps, norm=norm), [3], bits, steps)
            if steps == 1 and scale > 1.7e38:  # the step from -scale to scale is no float: it is reported, not lost
                assert not out.isfinite().any()
                continue
            assert out.isfinite().all()
    for scale in (2.0**-120, 1e-45, 0.0, -0.0):
        (out,) = dequantized(quantized([torch.full((3,), scale)], norm=norm), [3])
        assert torch.equal(out, torch.zeros(3))


@pytest.mark.parametrize("numel", SIZES)
def test_signs(numel):
    x = gaussian(numel)
    residual = torch.empty_like(x)
    payload = torch.empty(kernels.sign.nbytes([numel]), dtype=torch.uint8)
    kernels.sign.encode([x], payload, [residual])
    assert np.array_equal(payload[4:].numpy(), np.packbits(x.numpy() < 0, bitorder="little"))
    scale = float(payload[:4].clone().view(torch.float32))
    assert scale == pytest.approx(float(x.double().abs().mean()) if numel else 0.0, rel=2**-23)
    out = torch.zeros(numel)
    kernels.sign.decode_add(payload, [out], 1.0)
    assert torch.equal(out, torch.where(x < 0, -scale, scale))
    assert torch.equal(residual, x - out)


def largest_by_sorting(x: torch.Tensor, count: int) -> list[int]:
    magnitude = x.numpy().view(np.int32) & 0x7FFFFFFF
    return sorted(np.argsort(-magnitude, kind="stable")[:count].tolist())  # of equal ones the first


def hostile_segments() -> dict[str, torch.Tensor]:
    special = gaussian(6000)
    special[100:110] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38, -3e38, 1e-40, math.nan])
    decoy = torch.zeros(100_000)  # nothing at the sampled places
    decoy[torch.arange(1000) * 97 % 100_000] = gaussian(1000)
    loud = gaussian(100_000) * 1e-3
    loud[390::781] = 100.0  # many large values at sampled places
    return {
        "gaussian": gaussian(20_000),
        "zeros": torch.zeros(9000),
        "ties": gaussian(30_000).round(),
        "special": special,
        "ascending": torch.arange(10_000.0),
        "decoy": decoy,
        "loud": loud,
        "small": gaussian(65),
    }


@pytest.mark.parametrize("name", list(hostile_segments()))
def test_topk_is_exact(name):
    x = hostile_segments()[name]
    for count in (0, 1, 5, len(x) // 1000, len(x) // 100, len(x) // 2, len(x)):
        indices, values = kernels.select.topk([x], [count])
        assert indices.tolist() == largest_by_sorting(x, count)
        assert torch.equal(values.view(torch.int32), x[indices.long()].view(torch.int32))


def test_topk_of_several_segments_and_empty_ones():
    xs = [gaussian(10), torch.empty(0), gaussian(5000, seed=1)]
    indices, _ = kernels.select.topk(xs, [3, 0, 7])
    assert indices.tolist() == largest_by_sorting(xs[0], 3) + largest_by_sorting(xs[2], 7)


@pytest.mark.parametrize("threshold", [0.0, -0.0, 1e-45, 0.5, 3.0, math.inf])
def test_select(threshold):
    xs = [gaussian(9001), torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])]
    indices, values, counts = kernels.select.above(xs, [threshold] * 2)
    expected = [(~(x.abs() < threshold)).nonzero().flatten() for x in xs]
    assert counts == [len(e) for e in expected]
    assert torch.equal(indices.long(), torch.cat(expected))
    assert torch.equal(
        values.nan_to_num(7.0), torch.cat([x[e] for x, e in zip(xs, expected, strict=True)]).nan_to_num(7.0)
    )


def test_scatter_and_scatter_add():
    x = gaussian(1000)
    indices, values = kernels.select.topk([x, x], [10, 20])
    outs = [torch.ones(1000), torch.ones(1000)]
    kernels.scatter.add(outs, indices, values, [10, 20], 0.5)
    expected = torch.ones(1000)
    expected[indices[:10].long()] += values[:10] * 0.5
    assert torch.equal(outs[0], expected)
    kernels.scatter.write(outs, indices, values, [10, 20])
    assert torch.equal(outs[1][indices[10:].long()], values[10:])
    before = outs[1].clone()
    kernels.scatter.clear(outs, indices, [10, 20])
    before[indices[10:].long()] = 0
    assert torch.equal(outs[1], before)


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_scatter_refuses_an_index_outside(bad):
    out, index = torch.zeros(4), torch.tensor([0, bad], dtype=torch.int32)
    calls = [
        lambda: kernels.scatter.write([out], index, torch.ones(2), [2]),
        lambda: kernels.scatter.add([out], index, torch.ones(2), [2], 1.0),
        lambda: kernels.scatter.clear([out], index, [2]),
    ]
    out += 1
    for call in calls:
        with pytest.raises(ValueError, match="indices"):
            call()
    assert torch.equal(out, torch.ones(4))
    with pytest.raises(ValueError, match="indices"):  # it overwrites, so it may have zeroed the segment
        kernels.scatter.total([out], [index], [torch.ones(2)], [[2]], 1.0)


def elias_fano_by_python(indices: list[int], numel: int) -> bytes:
    """The documented layout, bit by bit."""
    count = len(indices)
    if count in (0, numel):
        return b""
    size, low = min((count * (w + 1) + ((numel - 1) >> w), w) for w in range(32) if numel >> w)
    if size < numel:
        bits = [0] * size
        for j, index in enumerate(indices):
            bits[(index >> low) + j] = 1
            for b in range(low):
                bits[size - count * low + j * low + b] = index >> b & 1
    else:
        bits = [int(i in set(indices)) for i in range(numel)]
    bits += [0] * (-len(bits) % 8)
    return bytes(sum(bit << b for b, bit in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8))


@pytest.mark.parametrize(
    ("count", "numel"), [(0, 0), (0, 9), (1, 1), (1, 1000), (5, 5), (7, 100), (30, 61), (99, 9999)]
)
def test_indices_follow_the_layout(count, numel):
    indices = sorted(torch.randperm(numel, generator=torch.Generator().manual_seed(count))[:count].tolist())
    code = packed_indices(indices, [count], [numel])
    assert bytes(code.tolist()) == elias_fano_by_python(indices, numel)
    assert kernels.indices.decode(code, [count], [numel]).tolist() == indices


def test_indices_take_at_most_12_bits_at_one_in_a_thousand():
    for numel in (100_000, 1_000_000, 25_000_000):
        assert kernels.indices.nbytes(numel // 1000, numel) * 8 <= 12 * (numel // 1000)


@pytest.mark.parametrize(("count", "numel"), [(20, 3000), (30, 60), (1, 1), (7, 2**31 - 1)])
def test_every_corrupt_byte_is_refused_or_decodes_inside(count, numel):
    """Any payload decodes to ascending indices inside the segment that encode back to it, or raises ValueError."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        code = torch.randint(0, 256, (kernels.indices.nbytes(count, numel),), generator=generator, dtype=torch.uint8)
        try:
            indices = kernels.indices.decode(code, [count], [numel])
        except ValueError:
            continue
        assert torch.equal(packed_indices(indices.tolist(), [count], [numel]), code)


def test_corrupt_indices_are_named():
    code = packed_indices([3, 500, 900], [3], [1000])
    for bad in (code | 255, code * 0):
        with pytest.raises(ValueError, match="corrupt"):
            kernels.indices.decode(bad, [3], [1000])


@pytest.mark.parametrize("indices", [[2, 1], [1, 1], [-1, 1], [1, 10]])
def test_pack_indices_refuses_what_it_cannot_code(indices):
    with pytest.raises(ValueError, match="ascending"):
        packed_indices(indices, [2], [10])


def test_a_sum_of_codes_beyond_the_last_level_may_be_infinite():
    """A corrupt payload's values exceed its scales, so that these do not tell whether the sum is finite."""
    quantizer, out = Quantizer(bits=14, num_steps=1, bucket_size=64), torch.empty(64)
    payload = torch.full((quantizer.nbytes([64]),), 255, dtype=torch.uint8)
    payload[:4] = torch.tensor([1e35]).view(torch.uint8)
    assert not kernels.quantize.decode_sum([payload], [out], 1.0, quantizer)
    assert out.isinf().all()


@pytest.mark.parametrize("numel", [0, 1, 100, 40_000])
def test_all_finite(numel):
    xs = [gaussian(100), gaussian(numel)]
    assert kernels.all_finite(xs)
    for bad in (math.nan, math.inf, -math.inf) if numel else ():
        xs[1][-1] = bad
        assert not kernels.all_finite(xs)
    assert kernels.all_finite([torch.full((3,), torch.finfo(torch.float32).max), torch.ones(2, 2).bfloat16()])
    assert not kernels.all_finite([torch.tensor([[math.inf]], dtype=torch.float16)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 17}, "bits"),
        ({"bits": 0}, "bits"),
        ({"num_steps": 16}, "num_steps"),
        ({"num_steps": 0}, "num_steps"),
        ({"bucket_size": 0}, "bucket_size"),
        ({"norm": "l1"}, "norm"),
        ({"keys": []}, "keys"),
        ({"out": torch.empty(3, dtype=torch.uint8)}, "out"),
        ({"xs": [torch.ones(8, dtype=torch.float64)]}, r"xs\[0\]"),
        ({"xs": [torch.ones(16)[::2]]}, r"xs\[0\]"),
        ({"residuals": [torch.ones(7)]}, "residuals"),
    ],
)
def test_quantize_names_what_is_wrong(change, message):
    good = {"xs": [torch.ones(8)], "out": torch.empty(8, dtype=torch.uint8), "keys": [1], "residuals": None}
    fields = {"bits": 4, "num_steps": 14, "bucket_size": 512, "norm": "max"}
    with pytest.raises(ValueError, match=message):
        quantizer = Quantizer(**{name: change.get(name, value) for name, value in fields.items()})
        arguments = {name: change.get(name, value) for name, value in good.items()}
        kernels.quantize.encode(**arguments, quantizer=quantizer)


def test_decoders_refuse_a_payload_of_the_wrong_size():
    outs = [torch.zeros(100)]
    short = torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected 54 bytes"):
        kernels.quantize.decode_add(short, outs, 1.0, Quantizer(4, 14, 512))
    with pytest.raises(ValueError, match="expected 17 bytes"):
        kernels.sign.decode_add(short, outs, 1.0)
    with pytest.raises(ValueError, match="expected 2 bytes"):
        kernels.indices.decode(short, [1], [1000])


def test_arguments_out_of_range_are_named():
    xs, one, two = [torch.ones(3)], torch.zeros(1, dtype=torch.int32), torch.ones(2)
    ternary, out = kernels.ternary.Ternary(), torch.zeros(1, dtype=torch.uint8)
    for message, call in {
        "counts[0]: expected 0 to 3": lambda: kernels.select.topk(xs, [4]),
        "counts[0]: expected 0 to 3 (the": lambda: kernels.select.topk(xs, [-1]),
        "counts: expected one per segment (1)": lambda: kernels.select.topk(xs, [1, 1]),
        "count: expected 0 to 2": lambda: kernels.select.topk_in_chunks(xs, 2, 3, [1]),
        "last_counts: expected one per segment": lambda: kernels.select.topk_in_chunks(xs, 2, 1, []),
        "thresholds[0]: expected a number >= 0, got -1.0": lambda: kernels.select.above(xs, [-1.0]),
        "thresholds[0]: expected a number >= 0, got nan": lambda: kernels.select.above(xs, [math.nan]),
        "indices: expected 2 elements": lambda: kernels.scatter.write(xs, one, torch.ones(1), [2]),
        "values: expected 1 elements (the sum of counts), got 2": lambda: kernels.scatter.write(xs, one, two, [1]),
        "indices: expected at least one payload": lambda: kernels.scatter.total(xs, [], [], [], 1.0),
        "words: expected 2 elements (the sum of counts), got 1": lambda: kernels.words.encode(one, [2], 4, out),
        "bits: expected 0 to 31, got 32": lambda: kernels.words.encode(one, [1], 32, out),
        "dtype: expected one of": lambda: kernels.cast.nbytes([3], "float32"),
        "segment 0: expected 0 to 2147483647 elements": lambda: kernels.sign.nbytes([2**31]),
        "payloads: expected at least one": lambda: kernels.sign.decode_sum([], xs, 1.0),
        "payload: expected a multiple of 4 bytes": lambda: kernels.payload_as(out, torch.float32),
        "chunk: expected at least 1, got 0": lambda: kernels.reduce.chunk_norms(xs, 0),
        "base: expected an odd number from 3 on": lambda: kernels.ternary.Ternary(base=4),
        "clip: expected a number above 0, got nan": lambda: kernels.ternary.scales(xs, math.nan),
        "scales: expected one for each of 1 buckets, got 2": lambda: kernels.ternary.decode_add(
            out, two, xs, 1.0, ternary
        ),
        "scales: expected one tensor for each of 1 payloads": lambda: kernels.ternary.decode_sum(
            [out], [], xs, 1.0, ternary
        ),
        "rows[0]: expected a divisor of the matrix's 3 elements, got 2": lambda: kernels.low_rank.products(
            xs, [2], [], False
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call()


def test_payloads_may_start_at_any_address():
    x = gaussian(1000)
    payload = quantized([x])
    shifted = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:]
    shifted.copy_(payload)
    assert torch.equal(dequantized(shifted, [1000])[0], dequantized(payload, [1000])[0])


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend"), kernels.use_backend("cuda"):
        pass
