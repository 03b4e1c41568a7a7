"""Metrics of the user's own: functions that are called before each row of metrics is written.

def norms(model, row, comm):
    return {"norm": torch.nn.utils.get_total_norm(list(model.parameters())).item()}

train(config, callbacks=[norms])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....algorithm import require
from ....comm import Communicator

Callback = Callable[[nn.Module, Mapping[str, Any], Communicator], Mapping[str, float]]
"""`callback(model, row, comm)` is called on every worker together with the metrics so far. What it returns on the worker
that writes the row joins it. It must be a function that worker processes can import. `comm` is not the communicator that is
measured."""


@dataclass(frozen=True)
class EachStep:
    """Calls a callback after every step instead of before each row of metrics.

    What it returns is written at once, to `info.jsonl` and TensorBoard; where it returns `{}`, nothing is. `row` has the step,
    the epoch and the learning rate.

    Args:
        callback: see `Callback`.

    Example:
        >>> def first_bias(model, row, comm):
        ...     return {"bias": next(iter(model.parameters())).mean().item()} if row["step"] % 3 == 0 else {}
        >>> EachStep(first_bias)(nn.Linear(1, 1), {"step": 4}, None)
        {}
    """

    callback: Callback

    def __call__(self, model: nn.Module, row: Mapping[str, Any], comm: Communicator) -> Mapping[str, float]:
        """Call the callback."""
        return self.callback(model, row, comm)

    @property
    def __name__(self) -> str:
        return getattr(self.callback, "__name__", repr(self.callback))


def called(
    callbacks: Sequence[Callback], model: nn.Module, row: Mapping[str, Any], comm: Communicator
) -> dict[str, float]:
    """The values of all callbacks.

    Raises:
        ValueError: a callback returns something else, or a name that the row has already.
    """
    values: dict[str, float] = {}
    for callback in callbacks:
        name = getattr(callback, "__name__", repr(callback))
        made = callback(model, dict(row), comm)
        require(isinstance(made, Mapping), f"callback {name} must return a mapping of numbers by name, got {made!r}")
        for key, value in made.items():
            require(key not in row and key not in values, f"callback {name}: the row has a value {key!r} already")
            values[key] = float(value)
    return values


def worker_differences(model: nn.Module, row: Mapping[str, Any], comm: Communicator) -> dict[str, float]:
    """A callback: how far the differences between workers' matrices are from low rank.

    For each matrix, `D = X_rank1 - X_rank0`, with singular values `s_1 >= s_2 >= ...`. Returns the mean over matrices of
    `s_1^2 / sum s_i^2` as `difference_rank1_share`, and of the root of `sum s_i^2` as `difference_norm`. PowerGossip sends
    one rank-1 step of such differences (Vogels et al. 2020, arXiv 2008.01425, section 5).
    """
    matrices = [p.detach().float().reshape(len(p), -1) for p in model.parameters() if p.ndim >= 2]
    if comm.size == 1 or not matrices:
        return {}
    shares, norms = [], []
    for own in matrices:
        first, second = (comm.broadcast(own.clone(), root=rank).wait() for rank in (0, 1))
        squares = torch.linalg.svdvals(second - first).square()
        norms.append(squares.sum().sqrt().item())
        # Equal matrices have no difference to divide by.
        shares.append((squares[0] / squares.sum().clamp(min=1e-30)).item())
    return {"difference_rank1_share": sum(shares) / len(shares), "difference_norm": sum(norms) / len(norms)}


def gradient_spectra(model: nn.Module, row: Mapping[str, Any], comm: Communicator) -> dict[str, float]:
    """A callback: how far the gradients of this worker's last step are from low rank.

    For each matrix G with singular values `s_1 >= s_2 >= ...`, means over matrices of the share of the largest one,
    `s_1^2 / sum s_i^2` (`gradient_rank1_share`), of the four largest (`gradient_rank4_share`), and of the stable rank
    `sum s_i^2 / s_1^2` (`gradient_stable_rank`). PowerSGD of rank r keeps at most the share of the r largest (Vogels et al.
    2019, arXiv 1905.13727). Where gradients are averaged, they are those of the mean.
    """
    gradients = [p.grad.detach().float().reshape(len(p), -1) for p in model.parameters() if p.grad is not None]
    # Vectors are of rank 1 in any case. A step that is skipped may have gradients that are not finite.
    squares = [torch.linalg.svdvals(g).square() for g in gradients if min(g.shape) > 1 and g.isfinite().all()]
    spectra = [s / s.sum() for s in squares if s.sum() > 0]
    if not spectra:
        return {}
    values = [[s[0].item(), s[:4].sum().item(), 1 / s[0].item()] for s in spectra]
    names = ("gradient_rank1_share", "gradient_rank4_share", "gradient_stable_rank")
    return {name: sum(column) / len(column) for name, column in zip(names, zip(*values, strict=True), strict=True)}
