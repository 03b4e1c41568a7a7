"""Any input for a kernel, and the comparison of a backend with the reference."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from thinwire import kernels

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 2.0**-118, 2.0**-119, 2.0**-126, 3.4028234e38, -3.4028234e38,
           float("inf"), float("-inf"), float("nan")]  # fmt: skip
SIZES = [0, 1, 2, 7, 8, 9, 100, 511, 512, 513, 1024, 1025, 3000, 9000]


@st.composite
def segments(draw) -> list[torch.Tensor]:
    """Up to three segments: any bits at all, or Gaussians of any scale with a few special values and ties."""
    xs = []
    for numel in draw(st.lists(st.sampled_from(SIZES), max_size=3)):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        if draw(st.integers(0, 4)) == 0:
            x = torch.randint(-(2**31), 2**31, (numel,), generator=generator).int().view(torch.float32)
        else:
            x = torch.randn(numel, generator=generator) * 10.0 ** draw(st.sampled_from([-44, -38, -10, 0, 0, 0, 5, 37]))
            x = x.round() if draw(st.booleans()) else x
            for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)) if numel else ():
                x[draw(st.integers(0, numel - 1))] = value
        xs.append(x)
    return xs


def clones(xs):
    return [x.clone() for x in xs]


def assert_backends_agree(compute, backend: str = "cpu") -> None:
    """`compute()` gives tensors (compared bit by bit, but for NaN's payload), flags and plain values."""
    results = []
    for name in (backend, "reference"):
        with kernels.use_backend(name):
            results.append(compute())
    for ours, truth in zip(*results, strict=True):
        if isinstance(ours, torch.Tensor) and ours.is_floating_point():
            assert torch.equal(ours.isnan(), truth.isnan()) and ours.dtype == truth.dtype
            ours, truth = (t[~t.isnan()].view(torch.uint8) for t in (ours, truth))
        if isinstance(ours, kernels.flags.Unread):  # a kernel has one condition for all segments
            ours, truth = kernels.flags.read(ours), kernels.flags.read(truth)
        assert torch.equal(ours, truth) if isinstance(ours, torch.Tensor) else ours == truth
