"""The conformance suite of memories."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..codec import Codec, Key, TopK
from ..kernels.checks import described
from ..membership import check_state
from ..memory import Memory
from .algorithm import check_algorithm
from .random import normal, untouched_random_state
from .state import check_joining, check_redistribution, same

NUMEL = 100
SIZES = (1, 2, 3, 4, 8)  # numbers of workers


def check_memory(memory: Memory, codec: Codec = TopK(0.1), named: bool = True, rounding: float = 1e-6) -> None:
    """Check that a memory fulfils the contract of `thinwire.memory.base`.

    `compensate` does not change the gradient; `commit` keeps something of it; a discarded round with infinities does not
    change the memory; a loaded state continues with the same bits; on another number of workers what is a worker's own keeps
    its mean; a loss scale that is a power of two does not change the result; no global random state is changed.

    Args:
        memory: the memory to check.
        codec: a lossy codec for the values.
        named: whether `parse(repr(memory))` must equal it.
        rounding: how far the memory rounds what it keeps, relative to the largest number.

    Raises:
        AssertionError: the memory breaks the contract.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_memory
        >>> check_memory(tw.ErrorFeedback())
    """
    check_algorithm(memory, Memory, named)
    with untouched_random_state(memory):
        plain, state = _rounds(memory, codec, _init(memory), range(6))

    before = state.state_dict()
    kept = not before or not same(before, _init(memory).state_dict())
    assert kept, f"{memory}: commit keeps nothing of rounds that lost something"
    _round(memory, codec, state, torch.full((NUMEL,), float("inf"), device="cpu"), step=6)
    assert same(state.state_dict(), before), f"{memory}: memory changed before commit"
    memory.discard(state)
    assert same(state.state_dict(), before), f"{memory}: a discarded round left a trace"
    memory.commit(state)
    assert same(state.state_dict(), before), f"{memory}: commit after discard changed memory"

    first, saved = _rounds(memory, codec, _init(memory), range(3))
    resumed = _init(memory)
    resumed.load_state_dict(saved.state_dict())
    rest, _ = _rounds(memory, codec, resumed, range(3, 6))
    assert all(map(torch.equal, first + rest, plain)), f"{memory}: a restored state goes on differently"

    # Steps seed the gradients, so each worker has its own.
    workers = [
        _rounds(memory, codec, _init(memory), range(100 * rank, 100 * rank + 3))[1] for rank in range(max(SIZES))
    ]
    for before_size, after_size in product(SIZES, SIZES):
        check_redistribution(memory, workers[:before_size], [_init(memory) for _ in range(after_size)], rounding)
    check_joining(memory, workers[0], _rounds(memory, codec, _init(memory), range(3))[1])

    # A power of two, so that scaling rounds nothing and the bits must agree.
    scaled, _ = _rounds(memory, codec, _init(memory), range(6), scale=1024.0)
    assert all(map(torch.equal, scaled, plain)), f"{memory}: the loss scale changes results"


def _init(memory: Memory) -> Any:
    return check_state(memory.init([("w", torch.zeros(NUMEL, device="cpu"))]), memory)


def _rounds(memory: Memory, codec: Codec, state: Any, steps: range, scale: float = 1.0) -> tuple[list[Tensor], Any]:
    results = []
    for step in steps:
        gradient = normal((NUMEL,), step) * scale
        results.append(_round(memory, codec, state, gradient, step, scale))
        memory.commit(state)
    return results, state


def _round(memory: Memory, codec: Codec, state: Any, gradient: Tensor, step: int, scale: float = 1.0) -> Tensor:
    """The unscaled result of a round of one worker."""
    before = gradient.clone()
    x = memory.compensate(state, "w", gradient, scale)
    assert torch.equal(gradient, before), f"{memory}: compensate changed the gradient"
    is_buffer = isinstance(x, Tensor) and x.dtype == torch.float32 and x.shape == (NUMEL,)
    assert is_buffer, f"{memory}: compensate returns a flat float32 buffer, got {described(x)}"
    payload = codec.encode(x, Key(step=step), x)
    mean = codec.decode(payload, NUMEL)
    assert isinstance(mean, Tensor)
    mean *= scale
    memory.decoded(state, "w", mean, scale)
    return mean / scale
