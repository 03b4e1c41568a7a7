"""The simulated GPU sees what a kernel does wrong that its results need not show.

TRITON_INTERPRET=1 PYTHONPATH=tests .venv/bin/python -m pytest -p helpers.simulated_gpu tests/gpu/check_interpreted.py
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers.simulated_gpu import GPU, SIMULATED


@triton.jit
def _load(x, y, IS_RIGHT: tl.constexpr):
    mask = tl.arange(0, 128) < 100
    tl.store(y + tl.arange(0, 128), tl.load(x + tl.arange(0, 128), mask=mask if IS_RIGHT else None), mask=mask)


@triton.jit
def _store(x, y, IS_RIGHT: tl.constexpr):
    tl.store(y + tl.arange(0, 128), 1.0, mask=tl.arange(0, 128) < (100 if IS_RIGHT else 101))


@triton.jit
def _unwritten(x, y, IS_RIGHT: tl.constexpr):
    if IS_RIGHT:
        tl.store(y, 1.0)
        tl.debug_barrier()
    tl.store(x, tl.load(y) * 0)


@triton.jit
def _other_program(x, y, IS_RIGHT: tl.constexpr):
    tl.store(x, 7.0 if IS_RIGHT else tl.program_id(0).to(tl.float32))


@triton.jit
def _sum(x, y, IS_RIGHT: tl.constexpr):
    if IS_RIGHT:
        tl.atomic_add(x, 1.0, sem="relaxed")
    else:
        tl.store(x, tl.load(x) + 1.0)


@triton.jit
def _reverse(x, y, IS_RIGHT: tl.constexpr):
    turned = tl.load(x + 63 - tl.arange(0, 64))
    if IS_RIGHT:
        tl.debug_barrier()
    tl.store(x + tl.arange(0, 64), turned)


@triton.jit
def _last(x, y, IS_RIGHT: tl.constexpr):
    first = tl.load(x + tl.arange(0, 64) * 0)
    if IS_RIGHT:
        tl.debug_barrier()
    tl.store(x + tl.arange(0, 64) * 0, first + 1, mask=tl.arange(0, 64) == 63)


@triton.jit
def _add(x, y, IS_RIGHT: tl.constexpr):
    if IS_RIGHT:
        tl.store(y, 0.0)
        tl.store(y, 1.0)  # by the same thread
        tl.debug_barrier()
    tl.atomic_add(y, 1.0, sem="relaxed")


@triton.jit
def _address(x, y, IS_RIGHT: tl.constexpr):
    tl.store((x.to(tl.pointer_type(tl.uint8)) + (4 if IS_RIGHT else 2)).to(tl.pointer_type(tl.float32)), 1.0)


@pytest.mark.parametrize(
    "kernel, num_programs, message",
    [
        (_load, 1, "program 0 loads what no memory of the GPU has"),
        (_store, 1, "program 0 stores what no memory of the GPU has"),
        (_unwritten, 1, "program 0 loads what nothing has written"),
        (_other_program, 2, "program 1 stores what another program stores"),
        (_sum, 2, "program 0 stores what another thread loads"),
        (_reverse, 1, "program 0 stores what another thread loads"),
        (_last, 1, "program 0 stores what another thread loads"),
        (_add, 1, "program 0 changes what nothing has written"),
        (_address, 1, "no multiples of 4"),
    ],
)
def test_a_mistake_is_an_error(kernel, num_programs, message):
    for is_right in (True, False):
        x, y = torch.arange(100.0, device=GPU), torch.empty(100, device=GPU)
        if is_right:
            kernel[(num_programs,)](x, y, IS_RIGHT=True)
            continue
        with pytest.raises(Exception, match=message):
            kernel[(num_programs,)](x, y, IS_RIGHT=False)
    assert len(SIMULATED.races()) == (kernel is not _address)  # the interpreter's own


def test_what_the_compiler_is_told_of_an_address_must_hold():
    x = torch.zeros(100, device=GPU)
    _told[(1,)](x)
    with pytest.raises(Exception, match="no multiples of 16"):
        _told[(1,)](x[1:])


@triton.jit
def _told(x):
    tl.store(tl.multiple_of(x, 16), 1.0)


def test_a_kernel_waits_for_the_stream_that_made_what_it_reads():
    x, y, side = torch.zeros(100, device=GPU), torch.zeros(100, device=GPU), torch.cuda.Stream()
    with (
        torch.cuda.stream(side),
        pytest.raises(RuntimeError, match="by _load on stream .* has not waited for the write"),
    ):
        _load[(1,)](x, y, IS_RIGHT=True)
    SIMULATED.races()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _load[(1,)](x, y, IS_RIGHT=True)
    with pytest.raises(RuntimeError, match="has not waited for the write by _load"):
        y.sum()
    SIMULATED.races()
    torch.cuda.synchronize()
