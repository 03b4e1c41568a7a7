"""Memory that is used again."""

from __future__ import annotations

import pytest
import torch

from thinwire import debug
from thinwire.comm.buffers import Spare


@pytest.fixture
def spare(monkeypatch) -> Spare:
    monkeypatch.setattr(debug, "enabled", False)
    return Spare()


def test_memory_of_the_same_size_is_used_again(spare):
    first = spare.take(torch.empty(Spare.MIN_BYTES, dtype=torch.uint8))
    assert spare.take(torch.empty(first.numel(), dtype=torch.uint8)).data_ptr() != first.data_ptr()
    spare.give_back(first)
    assert spare.take(torch.empty(first.numel() + 1, dtype=torch.uint8)).data_ptr() != first.data_ptr()
    again = spare.take(torch.empty(2, Spare.MIN_BYTES // 8))
    assert again.data_ptr() == first.data_ptr()
    assert again.dtype == torch.float32 and again.shape == (Spare.MIN_BYTES // 4,)


def test_so_much_is_kept_and_the_oldest_goes(spare, monkeypatch):
    monkeypatch.setattr(Spare, "MAX_BYTES", 2 * Spare.MIN_BYTES)
    taken = [spare.take(torch.empty(Spare.MIN_BYTES, dtype=torch.uint8)) for _ in range(3)]
    for memory in taken:
        spare.give_back(memory)
    kept = [spare.take(taken[0]).data_ptr() for _ in range(2)]
    assert kept == [memory.data_ptr() for memory in taken[1:]]
