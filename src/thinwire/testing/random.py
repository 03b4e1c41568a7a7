"""Random numbers of the conformance suites: drawn from a seed, and without the global generator, which nobody may touch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def normal(shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Independent normal elements, drawn on the CPU, so that every device gets the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)


@contextmanager
def untouched_random_state(who: object) -> Iterator[None]:
    """Context that fails if the state of PyTorch's global generator has changed in it.

    Args:
        who: an algorithm, or what else the message says has changed it.
    """
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), f"{who} touched the global random state"
