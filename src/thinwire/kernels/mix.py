"""A multiple of a vector, and weighted differences to other vectors, added to values as they are now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import kernel
from .checks import check_length, device_of, numels_of, segments, vector
from .flags import Flag
from .reduce import finite


def add(
    outs: Sequence[Tensor],
    own: Tensor,
    theirs: Sequence[Tensor] = (),
    weights: Sequence[float] = (),
    own_weight: float = 0.0,
) -> Flag:
    """`outs += own_weight own + sum_k weights[k] (theirs[k] - own)`, added in this order, in one pass over memory.

    It rounds after each operation, as all kernels do; PyTorch's `add_(own, alpha=own_weight)` rounds once on some processors.

    Args:
        outs: segments of float32, changed.
        own: float32 vector of all segments' elements, in order.
        theirs: vectors like `own`.
        weights: one for each of `theirs`.
        own_weight: factor of `own` itself.

    Returns:
        Whether all that was added is finite: a `bool` in main memory, elsewhere a flag on the device.

    Raises:
        ValueError: if sizes do not fit.

    Example:
        >>> out = torch.tensor([1.0, 2.0])
        >>> add([out], torch.tensor([1.0, 0.0]), [torch.tensor([3.0, 1.0])], [0.5])
        True
        >>> out
        tensor([2.0000, 2.5000])
    """
    device = device_of(outs, own)
    checked = segments("outs", outs, device)
    check_length("weights", weights, len(theirs))
    numel = sum(numels_of(checked))
    for name, x in [("own", own), *((f"theirs[{k}]", x) for k, x in enumerate(theirs))]:
        if x.numel() != numel:
            raise ValueError(f"{name}: expected {numel} elements, those of all segments, got {x.numel()}")
    vectors = [vector(f"theirs[{k}]", x, torch.float32, device) for k, x in enumerate(theirs)]
    return _add.on[device.type](checked, vector("own", own, torch.float32, device), vectors, list(weights), own_weight)


def change_of(own: Tensor, theirs: Sequence[Tensor], weights: Sequence[float], own_weight: float) -> Tensor:
    """The change that `add` adds, in plain PyTorch, for any float type."""
    change = own * own_weight
    for x, weight in zip(theirs, weights, strict=True):
        change.add_((x - own).mul_(weight))
    return change


def add_flat(outs: Sequence[Tensor], change: Tensor) -> None:
    """`outs += change`, a vector of all segments' elements, in order."""
    for out, part in zip(outs, change.split(numels_of(outs)), strict=True):
        out.add_(part)


# ---- the reference ----


@kernel
def _add(outs: list[Tensor], own: Tensor, theirs: list[Tensor], weights: list[float], own_weight: float) -> Flag:
    change = change_of(own, theirs, weights, own_weight)
    add_flat(outs, change)
    return finite([change])
