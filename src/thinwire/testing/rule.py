"""The conformance suite of rules."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..average import Rule
from ..average.robust.base import Combined, Messages
from ..kernels.checks import described
from .algorithm import check_algorithm
from .random import normal, untouched_random_state

NUMELS = [7, 0, 30, 3]
LARGE = [1 << 17]  # elements whose sum PyTorch gives to several threads
LARGEST = torch.finfo(torch.float32).max


def check_rule(rule: Rule, named: bool = True) -> None:
    """Check that a rule fulfils the contract of `thinwire.average.robust.base`.

    The result is a float32 vector of n elements; rows and the last result are not changed; norms, if any, are float64 numbers
    of each row, of which clipping dropped at most all. The same messages give the same bits, whatever was combined before and
    with any number of threads. A result is finite while half of the workers are left out, where all rows are zero or equal,
    and where one row has the largest numbers of float32. No global random state is used or changed.

    Args:
        rule: the rule to check.
        named: whether `parse(repr(rule))` must equal it.

    Raises:
        AssertionError: the rule breaks the contract.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_rule
        >>> check_rule(tw.average.Krum(faulty=1))
    """
    check_algorithm(rule, Rule, named)
    size = max(8, rule.min_workers)
    with untouched_random_state(rule):
        rule.check_size(0, size)
        first = _combine(rule, _messages(rule, size))
        # A round with fewer than half of the workers is not combined.
        for k in range((size + 1) // 2, size):
            _combine(rule, replace(_messages(rule, k, seed=k), left_out=size - k))
        for what, rows in _hard_rows(size):
            _combine(rule, replace(_messages(rule, size), rows=rows), what)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        again = _combine(rule, _messages(rule, size))
    assert _same(again, first), (
        f"{rule}: the same messages give other bits later; a rule remembers nothing but the center"
    )
    _check_threads(rule, size)


def _check_threads(rule: Rule, size: int) -> None:
    messages, threads = _messages(rule, size, LARGE), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _combine(rule, messages)
        torch.set_num_threads(3)
        assert _same(_combine(rule, messages), alone), (
            f"{rule}: other bits with 3 threads; add by `dots` and `weighted_sum`"
        )
    finally:
        torch.set_num_threads(threads)


def _combine(rule: Rule, messages: Messages, what: str = "finite rows") -> Combined:
    """What a rule makes of messages, checked."""
    rows, center = messages.rows.clone(), None if messages.center is None else messages.center.clone()
    combined, (k, n) = rule.combine(messages), rows.shape
    where = f"{rule}, {k} workers and {messages.left_out} left out"
    assert isinstance(combined, Combined), f"{where}: combine returns a Combined, got {described(combined)}"
    assert torch.equal(messages.rows, rows), f"{where}: combine changed the rows"
    is_kept = messages.center is None or center is None or torch.equal(messages.center, center)
    assert is_kept, f"{where}: combine changed the last result, which Messages.center holds"
    _check_vector(f"{where}: the result of {what}", combined.result, torch.float32, n)
    norms, dropped = combined.norms, combined.dropped
    assert (norms is None) == (dropped is None), f"{where}: norms come with what was dropped, got one of them"
    if norms is not None and dropped is not None:
        _check_vector(f"{where}: norms", norms, torch.float64, k)
        _check_vector(f"{where}: what was dropped", dropped, torch.float64, k)
        in_range = (dropped >= 0) & (dropped <= norms * (1 + 1e-9))
        assert bool(in_range.all()), (
            f"{where}: dropped must be from 0 to the norms {norms.tolist()}, got {dropped.tolist()}"
        )
    return combined


def _check_vector(what: str, vector: Tensor, dtype: torch.dtype, numel: int) -> None:
    expected, got = f"{dtype} of shape {(numel,)}", described(vector)
    assert expected == got, f"{what} must be a vector, {expected}, got {got}"
    assert vector.isfinite().all(), (
        f"{what} must be finite, got {int((~vector.isfinite()).sum())} elements that are not"
    )


def _hard_rows(size: int) -> list[tuple[str, Tensor]]:
    rows = normal((size, sum(NUMELS)), seed=1)
    huge = rows.clone()
    huge[1] = LARGEST * rows[1].sign()
    return [
        ("rows of zeros", torch.zeros_like(rows)),
        ("equal rows", rows[:1].expand(size, -1).contiguous()),
        ("rows of which one is huge", huge),
    ]


def _messages(rule: Rule, k: int, numels: list[int] = NUMELS, seed: int = 0) -> Messages:
    rows = normal((k + 1, sum(numels)), seed)
    return Messages(rows[:k], numels, center=rows[k] if rule.has_center else None, seed=seed)


def _same(a: Combined, b: Combined) -> bool:
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True))
