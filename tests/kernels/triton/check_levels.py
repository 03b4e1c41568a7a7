"""Quantization to levels in Triton writes the reference's bytes and residuals."""

from __future__ import annotations

import pytest
import torch
from helpers.backends import clones
from helpers.on_triton import assert_triton_agrees, hard_segments, payload_of

from thinwire import kernels
from thinwire.kernels.levels import Levels

NUQ = (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)
MANY = tuple(torch.linspace(-0.9, 1, 256).tolist())
CASES = [(NUQ, 512, "l2"), ((-0.3, 0.8), 8, "max"), (MANY, 1000, "max"), (NUQ[:5], 77, "max"), (NUQ[1:], 16384, "l2")]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_levels(case):
    levels, xs = Levels(*CASES[case]), hard_segments()
    numels = [x.numel() for x in xs]

    def compute():
        work = clones(xs)
        residuals = work if case % 2 else clones(xs)  # in place, or not
        payload = payload_of(levels.nbytes(numels), offset=case % 2)
        kernels.levels.encode(work, payload, [2**64 - 3 + i if i < 3 else i for i in range(len(xs))], levels, residuals)
        outs = clones(xs)
        kernels.levels.decode_add(payload, outs, -1 / 3, levels)
        corrupt = torch.full_like(payload, 0x7F)  # codes beyond the last level
        beyond = clones(xs)
        kernels.levels.decode_add(corrupt, beyond, 1.0, levels)
        return [payload, *residuals, *outs, *beyond]

    assert_triton_agrees(compute)
