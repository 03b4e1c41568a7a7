"""Kernels write the same bytes and results with any number of threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.cases import case
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.levels import Levels
from thinwire.kernels.momentum import Buffers, Momentum
from thinwire.kernels.quantize import Quantizer
from thinwire.kernels.ternary import Ternary

LIMIT = 2**17  # calls of so many elements are split, in pieces of about half as many
NUMELS = [[LIMIT - 1], [LIMIT], [LIMIT + 1], [2**16 + 9, 0, 3, 2**16 - 1], [300_000, 517, 200_003]]
BUCKET_SIZES = (1, 7, 512, 1001, 2**16 + 1, 10**9)

Compute = Callable[[list[Tensor]], list[Tensor]]


def inputs(numels: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) for n in numels]


def zeros(xs: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) for x in xs]


def numels_of(xs: list[Tensor]) -> list[int]:
    return [x.numel() for x in xs]


def bytes_of(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def quantized(quantizer: Quantizer, xs: list[Tensor]) -> list[Tensor]:
    payload, total = bytes_of(quantizer.nbytes(numels_of(xs))), zeros(xs)
    work, keys = [x.clone() for x in xs], list(range(len(xs)))
    kernels.quantize.encode(work, payload, keys, quantizer, residuals=work)
    added = [x.clone() for x in xs]
    kernels.quantize.decode_add(payload, added, 0.3, quantizer)
    assert kernels.quantize.decode_sum([payload, payload], total, 0.3, quantizer)
    return [payload, *work, *added, *total]


def levelled(levels: Levels, xs: list[Tensor]) -> list[Tensor]:
    payload, added, work = bytes_of(levels.nbytes(numels_of(xs))), zeros(xs), [x.clone() for x in xs]
    kernels.levels.encode(work, payload, list(range(len(xs))), levels, residuals=work)
    kernels.levels.decode_add(payload, added, 0.3, levels)
    return [payload, *work, *added]


def one_bit(bucket_size: int, xs: list[Tensor]) -> list[Tensor]:
    payload = bytes_of(kernels.onebit.nbytes(numels_of(xs), bucket_size))
    added, work = zeros(xs), [x.clone() for x in xs]
    kernels.onebit.encode(work, payload, bucket_size, residuals=work)
    kernels.onebit.decode_add(payload, added, 0.3, bucket_size)
    return [payload, *work, *added]


def ternary(base: int, bucket_size: int, xs: list[Tensor]) -> list[Tensor]:
    rule, clipped = Ternary(base, bucket_size), kernels.ternary.scales(xs, 2.5, bucket_size)
    payload, added, work = bytes_of(rule.nbytes(numels_of(xs))), zeros(xs), [x.clone() for x in xs]
    kernels.ternary.encode(work, clipped, payload, list(range(len(xs))), rule, residuals=work)
    kernels.ternary.decode_add(payload, clipped, added, 0.3, rule)
    return [clipped, payload, *work, *added]


def signs(xs: list[Tensor]) -> list[Tensor]:
    payload, added, work = bytes_of(kernels.sign.nbytes(numels_of(xs))), zeros(xs), [x.clone() for x in xs]
    kernels.sign.encode(work, payload, residuals=work)
    kernels.sign.decode_add(payload, added, 0.3)
    return [payload, *work, *added]


def rounded(dtype: str, xs: list[Tensor]) -> list[Tensor]:
    payload, added, work = bytes_of(kernels.cast.nbytes(numels_of(xs), dtype)), zeros(xs), [x.clone() for x in xs]
    kernels.cast.encode(work, payload, dtype, residuals=work)
    kernels.cast.decode_add(payload, added, 0.3, dtype)
    return [payload, *work, *added]


def finite(xs: list[Tensor]) -> list[Tensor]:
    last = [x.clone() for x in xs]
    last[0][-1] = torch.inf
    return [torch.tensor([kernels.all_finite(xs), kernels.all_finite(last)])]


def selected(ratio: float, xs: list[Tensor]) -> list[Tensor]:
    counts = [int(ratio * x.numel()) for x in xs]
    tied = [(4 * x).round() for x in xs]  # ties go to the lowest index
    skewed = [x * torch.linspace(0, 1, x.numel()) ** 8 for x in xs]  # all in the last range
    return [part for of in (xs, tied, skewed) for part in kernels.select.topk(of, counts)]


def with_momentum(nesterov: bool, xs: list[Tensor]) -> list[Tensor]:
    rule, counts = Momentum(0.9, 0.5, nesterov), [x.numel() // 100 for x in xs]
    us, vs = inputs(numels_of(xs), 1), inputs(numels_of(xs), 2)
    buffers, both = Buffers(xs, us, vs, zeros(xs), zeros(xs)), Buffers(xs, us, vs, zeros(xs), zeros(xs))
    kernels.momentum.correct(buffers, rule)
    return [
        *kernels.momentum.correct_topk(both, rule, counts),
        *(part for b in (buffers, both) for part in (*b.new_us, *b.new_vs)),
    ]


def with_feedback(xs: list[Tensor]) -> list[Tensor]:
    outs = zeros(xs)
    kept = kernels.momentum.add_topk(xs, inputs(numels_of(xs), 1), outs, 0.5, [x.numel() // 10 for x in xs])
    return [*kept, *outs]


def cases() -> Iterator[tuple[str, Compute]]:
    for size in BUCKET_SIZES:
        for bits, norm in ((3, "max"), (4, "l2"), (11, "max")):
            quantizer = Quantizer(bits, 2**bits - 1, size, norm)
            yield f"quantize {quantizer}", lambda xs, q=quantizer: quantized(q, xs)
        for bits in (3, 8):
            levels = Levels(torch.linspace(-1, 1, 2**bits).tolist(), size, "max")
            yield f"levels {bits} {size}", lambda xs, rule=levels: levelled(rule, xs)
        yield f"onebit {size}", lambda xs, s=size: one_bit(s, xs)
        for base in (3, 17):
            yield f"ternary {base} {size}", lambda xs, b=base, s=size: ternary(b, s, xs)
    yield "sign", signs
    for dtype in kernels.cast.WIDTHS:
        yield f"cast {dtype}", lambda xs, d=dtype: rounded(d, xs)
    yield "all_finite", finite
    for ratio in (0.0001, 0.01, 0.1, 0.9):
        yield f"topk {ratio}", lambda xs, r=ratio: selected(r, xs)
    for nesterov in (False, True):
        yield f"momentum {nesterov}", lambda xs, n=nesterov: with_momentum(n, xs)
    yield "add_topk", with_feedback


@contextmanager
def set_threads(number: int) -> Iterator[None]:
    before = kernels.threads()
    kernels.set_threads(number)
    try:
        yield
    finally:
        kernels.set_threads(before)


def assert_equal(ours: list[Tensor], truth: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))


@pytest.mark.parametrize("numels", NUMELS, ids=str)
def test_any_number_of_threads_gives_the_results_of_one(numels):
    xs = inputs(numels)
    for name, compute in cases():
        expected = compute(xs)
        for number in (2, 3, 5):
            with case(name, number), set_threads(number):
                assert_equal(compute(xs), expected)


def test_callers_that_find_the_threads_busy_work_alone():
    xs = inputs(NUMELS[-1])
    chosen = [(name, compute) for name, compute in cases() if name.startswith(("quantize", "topk", "momentum"))]
    expected, failed = [compute(xs) for _, compute in chosen], []

    def call() -> None:
        for (name, compute), truth in zip(chosen, expected, strict=True):
            if not all(torch.equal(a, b) for a, b in zip(compute(xs), truth, strict=True)):
                failed.append(name)

    with set_threads(3):
        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not failed


FORK = """
import os, sys
import torch
from thinwire import kernels
torch.set_num_threads(1)
xs = [torch.randn(10**6)]
expected = kernels.select.topk(xs, [1000])
kernels.set_threads(3)
same = lambda: all(torch.equal(a, b) for a, b in zip(kernels.select.topk(xs, [1000]), expected))
assert same()
child = os.fork()
if child == 0:
    os._exit(0 if same() and kernels.threads() == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert same()
"""


def test_a_forked_child_starts_threads_of_its_own():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_number_of_threads_is_checked():
    assert kernels.threads() == 1
    for number in (0, 1025):
        with pytest.raises(ValueError, match=f"threads must be an integer from 1 to 1024, got {number}"):
            kernels.set_threads(number)
    assert kernels.threads() == 1
