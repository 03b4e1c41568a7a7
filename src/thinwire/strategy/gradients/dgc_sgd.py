"""The optimizer for averagers that apply momentum themselves: it does the step and weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...algorithm import require


class DGCSGD(Optimizer):
    """Gradient descent for gradients that contain momentum already; only its weight decay has a momentum buffer.

    With the averaged result g of `tw.dgc`, weights w and decay d = weight_decay * w:

        plain       b = m b + d        w = w - lr (g + b)
        Nesterov    b = m b + d        w = w - lr (g + d + m b)

    The decay is dense and the same on all workers, so its momentum needs no correction. Check: if g is the `u` of
    momentum SGD, this is `torch.optim.SGD(momentum=m, weight_decay=weight_decay)`.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        lr: learning rate.
        weight_decay: higher => smaller weights.
        momentum: m of the decay term only, the same as the averager's; 0 => ordinary weight decay.
        nesterov: whether the averager's momentum is Nesterov's.

    Raises:
        ValueError: a value out of range.

    Source: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887, in the authors' implementation.

    Example:
        >>> import torch, thinwire as tw
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = tw.strategy.DGCSGD([w], lr=0.5, weight_decay=0.5)
        >>> w.grad = torch.ones(1)
        >>> optimizer.step()
        >>> w.item()  # 1 - 0.5 * (1 + 0.5)
        0.25
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        nesterov: bool = False,
    ):
        require(lr >= 0, f"DGCSGD: lr must be 0 or more, got {lr}")
        require(weight_decay >= 0, f"DGCSGD: weight_decay must be 0 or more, got {weight_decay}")
        require(0 <= momentum < 1, f"DGCSGD: momentum must be at least 0 and below 1, got {momentum}")
        # Not called "momentum" in the groups, so that schedulers that cycle momentum leave it alone.
        defaults = {"lr": lr, "weight_decay": weight_decay, "decay_momentum": momentum, "nesterov": nesterov}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; `closure`, if given, computes gradients and returns the loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self._with_decay(p, p.grad, group), alpha=-group["lr"])
        return loss

    def _with_decay(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        if group["weight_decay"] == 0:
            return grad
        decay = p * group["weight_decay"]
        buffer: Tensor = self.state[p].setdefault("decay_buffer", torch.zeros_like(p))
        buffer.mul_(group["decay_momentum"]).add_(decay)
        return grad + (decay + buffer * group["decay_momentum"] if group["nesterov"] else buffer)


def check_optimizer(
    optimizer: Optimizer, parameters: Sequence[Tensor], momentum_of_averager: float | None = None
) -> None:
    """Raise a ValueError if `optimizer` applies momentum of its own to any of `parameters`.

    Where the averager's factor is known, the momentum of weight decay in `DGCSGD` must have it too, or be 0.
    """
    ours = {id(p) for p in parameters}
    for group in optimizer.param_groups:
        if ours.isdisjoint(map(id, group["params"])):
            continue
        # The first beta of Adam is momentum too.
        own = group.get("momentum")
        momentum = own or next(iter(group.get("betas", ())), 0)
        remedy = "--optimizer.momentum 0" if own else "--optimizer.kind DGCSGD"
        require(
            not momentum,
            f"{type(optimizer).__name__} has momentum {momentum} of its own, and the averaged gradients carry momentum "
            "already; use tw.strategy.DGCSGD(..., weight_decay=...) or torch.optim.SGD(..., momentum=0), on the command line "
            f"{remedy}",
        )
        of_decay = group.get("weight_decay") and group.get("decay_momentum", 0)
        require(
            momentum_of_averager is None or not of_decay or of_decay == momentum_of_averager,
            f"DGCSGD has momentum {of_decay} for weight decay, and the averager {momentum_of_averager} for gradients; give it "
            f"momentum={momentum_of_averager} too, or 0 for weight decay without momentum",
        )
