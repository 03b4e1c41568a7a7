"""Every Triton kernel compiles for all targets without spills, rounds as the reference does, and reads memory once."""

from __future__ import annotations

import inspect
import re

import pytest
import scipy.stats
from helpers.triton_code import (
    TARGETS,
    bytes_per_element,
    compile_variant,
    element_loop,
    inexact_instructions,
    instructions_of_a_trip,
    instructions_per_element,
)
from helpers.triton_variants import VARIANTS

from thinwire.kernels import backend
from thinwire.kernels.triton import histograms

# The encoder and the decoder of buckets take the family's rule as a constant.
FIRST_OF_EACH_KERNEL = list({(v.function, v.constants.get("RULE")): v for v in reversed(VARIANTS)}.values())


@pytest.mark.parametrize("kernel", [k for k in backend.KERNELS if "triton" in k.functions], ids=lambda k: k.name)
def test_a_function_has_the_parameters_of_its_reference(kernel):
    ours, truth = map(inspect.signature, (kernel.functions["triton"], kernel.reference))
    assert list(ours.parameters) == list(truth.parameters)


def test_each_variant_has_its_own_name():
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_kernel_rounds_as_the_reference_and_moves_few_bytes(variant):
    code = compile_variant(variant, "sm_90")
    assert code.spills == 0 and code.registers < 255
    assert inexact_instructions(code.text) == []
    assert re.search(r"\b(st|atom|red)\.global", code.text)
    moved = sum(bytes_per_element(variant, code.text))
    assert moved <= 1.5 * (variant.least_bytes + variant.cached_bytes) + 0.25, moved


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.constants.get("VECTOR", 1) > 1], ids=lambda v: v.name)
def test_aligned_segments_are_read_and_written_sixteen_bytes_at_a_time(variant):
    code = compile_variant(variant, "sm_90")
    assert re.search(r"\b(LDG|STG)\.E\.128\b", code.machine_code)


MOST_INSTRUCTIONS = {  # per element; at first 350 in all, 224, 480, 297, 50, 46, 81, 38, 47, 34, 14
    "select.topk: candidates, none": 50,
    "select.topk: rows of 4096": 85,
    "select.topk: rows of 64": 240,
    "permutation: mark": 135,
    "permutation: write": 8,
    "scatter.total": 36,
    "quantize.encode: 4 bits, buckets of 512, max, residual": 58,
    "quantize.decode_add: 4 bits, buckets of 512": 23,
    "quantize.decode_sum, one payload: 4 bits, buckets of 512": 33,
    "sign.encode: whole segments, residual": 25,
    "block_sums: magnitudes": 9,
}


@pytest.mark.parametrize("name", MOST_INSTRUCTIONS)
def test_instructions_of_an_element(name):
    (variant,) = (v for v in VARIANTS if v.name == name)
    count = instructions_per_element(variant, compile_variant(variant, "sm_90"))
    assert 1 < count <= MOST_INSTRUCTIONS[name]


MOST_INSTRUCTIONS_OF_A_PAYLOAD = {  # per element; when codes moved between threads: 17.9, 12.4, 31.5, 10.4, 12.5, 5.6
    "quantize.decode_sum, one payload: 4 bits, buckets of 512": 9,
    "quantize.decode_sum, one payload: 8 bits, buckets of 512": 9,
    "quantize.decode_sum, one payload: 3 bits, buckets of 1000": 12,
    "levels.decode_sum, one payload: 16 levels, buckets of 512": 9.5,
    "cast.decode_sum, one payload: float16": 12,
    "sign.decode_sum, one payload: whole segments": 6.5,
}


@pytest.mark.parametrize("name", MOST_INSTRUCTIONS_OF_A_PAYLOAD)
def test_a_further_payload_costs_few_instructions_and_no_barrier(name):
    (variant,) = (v for v in VARIANTS if v.name == name)
    code = compile_variant(variant, "sm_90")
    assert 1 < instructions_of_a_trip(variant, code) <= MOST_INSTRUCTIONS_OF_A_PAYLOAD[name]
    assert not any("BAR" in line for line in element_loop(code))


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "sm_90"])
def test_every_kernel_compiles(target):
    for variant in FIRST_OF_EACH_KERNEL:
        code = compile_variant(variant, target)
        assert code.spills == 0 and code.registers > 0, variant.name


@pytest.mark.parametrize("numel", [4_097, 10**6, 2**31 - 1])
@pytest.mark.parametrize("share", [0, 1e-4, 1e-3, 0.01, 0.1, 0.2])
def test_the_bound_of_a_selection_is_rarely_bad(numel, share):
    """Binomial: how many of a sample are among the kept elements, and among those that there is room for."""
    count = max(1, int(share * numel))
    rank = histograms._rank(count, numel)
    room = histograms._room(rank, numel)
    assert scipy.stats.binom.sf(rank - 1, histograms.SAMPLE, (count - 1) / numel) < 1e-7
    assert scipy.stats.binom.cdf(rank - 1, histograms.SAMPLE, room / numel) < 1e-7
    assert room < numel / 2


def test_inexact_instructions_are_found():
    ptx = "fma.rn.f32 %f1, %f2;\n div.full.f32 %f1;\n mul.ftz.f32 %f;\n ex2.approx.f32 %f;\n div.rn.f32 %f; fma.rn.f64 %fd"
    assert len(inexact_instructions(ptx)) == 5
