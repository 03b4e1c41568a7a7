"""What workers make of the tensors that all of them have, such as their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduction = Callable[[Sequence[Tensor], Tensor], None]
"""(terms, out): combine what all workers have, in rank order; `out` is new, or one of the terms."""


def summing(terms: Sequence[Tensor], out: Tensor) -> None:
    """out = terms[0] + terms[1] + ..., from left to right."""
    combine(torch.add, terms, out)


def combine(operation: Callable[..., Tensor], terms: Sequence[Tensor], out: Tensor) -> None:
    """out = operation(operation(terms[0], terms[1]), ...), where `out` may be any one of the terms."""
    total = terms[0]
    for index, term in enumerate(terms[1:], 2):
        # The result goes where it can stay; before the last term, not into one that is still to be combined.
        total = operation(total, term, out=out if index == len(terms) or any(out is t for t in terms[:index]) else None)
    if total is not out:
        out.copy_(total)


def reduce_into(out: Tensor, terms: Sequence[Tensor], reduction: Reduction) -> None:
    """`reduction(terms, out)` in any thread."""
    # A tensor that was made under `torch.inference_mode` can be written in this mode alone, and each thread has its own.
    with torch.inference_mode(out.is_inference()):
        reduction(terms, out)
