"""What decides how an optimizer uses equal gradients, in a form that workers can compare."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...comm.compare import digests
from .optimizer_step import is_zero_redundancy, unwrapped
from .shards import local


def options_and_state(optimizer: Optimizer) -> dict[str, Any]:
    """The options of all groups, and a hash of what the optimizer remembers; empty if each worker steps on other parameters.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> found = options_and_state(optimizer)
        >>> found["SGD: lr"], found["SGD: what it remembers (a new one: nothing)"]
        (0.1, '0 tensors')
    """
    optimizer = unwrapped(optimizer)
    if is_zero_redundancy(optimizer):
        return {}
    name, groups = type(optimizer).__name__, optimizer.param_groups
    found = {
        f"{name}: {key}" + (f" of group {i}" if i else ""): _plain(value)
        for i, group in enumerate(groups)
        for key, value in group.items()
        if key != "params"
    }
    states = [optimizer.state.get(p, {}) for group in groups for p in group["params"]]
    tensors = [local(value) for state in states for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    # Not those of a library, such as in 8 bits.
    hashes = digests(t for t in tensors if type(t) is Tensor and t.layout == torch.strided)
    text = f", sha256 {hashlib.sha256(''.join(hashes).encode()).hexdigest()[:8]}" if hashes else ""
    return found | {f"{name}: what it remembers (a new one: nothing)": f"{len(tensors)} tensors{text}"}


def _plain(value: Any) -> Any:
    """A number, a text or a sequence of them; of other objects the class, because their text may be another on each worker."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    is_plain = value is None or isinstance(value, (bool, int, float, str, list, tuple))
    return value if is_plain else type(value).__name__
