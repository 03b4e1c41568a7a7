"""Inputs for checks of Triton kernels: few and small, because the interpreter takes a while for each operation.

The checks run on the GPU where there is one, else on a simulated one: in Triton's interpreter with `-p helpers.simulated_gpu`
and the environment variable `TRITON_INTERPRET=1`, while with `-p helpers.compile_launches` kernels are only compiled.
"""

from __future__ import annotations

import torch

from helpers import fake_driver
from helpers.backends import SPECIAL, assert_backends_agree
from thinwire import kernels

DEVICE = torch.device("cuda:0")


def gaussian(numel: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def any_bits(numel: int, seed: int = 0) -> torch.Tensor:
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(seed))
    return bits.int().view(torch.float32).to(DEVICE)


def hard_segments() -> list[torch.Tensor]:
    """Several segments: odd and even sizes, an empty one, huge and tiny numbers, zeros, ties, infinity and NaN."""
    special = gaussian(521, seed=1)
    special[: len(SPECIAL)] = torch.tensor(SPECIAL, device=DEVICE)
    special[500] = float("nan")
    return [
        gaussian(2500),
        gaussian(2304, seed=4),  # aligned: loaded 16 bytes at a time, in a launch of its own
        special,
        torch.empty(0, device=DEVICE),
        gaussian(7, scale=1e-40),
        gaussian(1030, seed=2, scale=1e37).round(),
        any_bits(100),
        torch.zeros(9, device=DEVICE),
    ]


def payload_of(nbytes: int, offset: int = 0) -> torch.Tensor:
    """Bytes that begin at an address which is `offset` modulo 4, set to 0xFF so that missing writes show."""
    return torch.full((nbytes + offset,), 255, dtype=torch.uint8, device=DEVICE)[offset:]


def assert_triton_agrees(compute) -> None:
    """`compute()` gives the same tensors and values in Triton as in the reference."""
    if fake_driver.is_installed:
        with kernels.use_backend("triton"):
            compute()
    else:
        assert_backends_agree(compute, "triton")
