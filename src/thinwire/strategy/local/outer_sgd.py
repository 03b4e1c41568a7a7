"""The outer optimizer of `local_updates` as data, for the command line and saved runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...algorithm import Algorithm
from ...options import require_number


@dataclass(frozen=True, repr=False)
class OuterSGD(Algorithm):
    """Makes the outer optimizer of DiLoCo: SGD over anchors, with Nesterov momentum.

        v <- momentum v + g;   anchor <- anchor - lr (g + momentum v);   or anchor - lr v without Nesterov

    With `lr=1.0, momentum=0.0` it is plain averaging. Steps have the same bits on all processors.

    Args:
        lr: outer learning rate; higher => larger outer steps.
        momentum: in [0, 1); higher => steadier outer steps.
        nesterov: whether momentum is Nesterov's.

    Raises:
        ValueError: a value out of range.

    Source: Douillard et al. 2023, DiLoCo, arXiv 2311.08105, with these defaults.

    Example:
        >>> import torch, thinwire as tw
        >>> outer = tw.OuterSGD(lr=0.7)
        >>> outer
        OuterSGD()
        >>> outer([torch.nn.Parameter(torch.ones(2))]).defaults["nesterov"]
        True
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        require_number("OuterSGD: lr", self.lr, above=0)
        require_number("OuterSGD: momentum", self.momentum, least=0, below=1)

    def __call__(self, anchors: Iterable[nn.Parameter]) -> Optimizer:
        """An optimizer over these parameters."""
        return PortableSGD(anchors, {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov})


class PortableSGD(Optimizer):
    """The optimizer of `OuterSGD`; it rounds after each operation.

    `torch.optim.SGD` adds a multiple of a tensor with one rounding where the processor can, and with two elsewhere.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # closures are for optimizers that evaluate
        """Apply the gradients of those anchors that have one."""
        for group in self.param_groups:
            for anchor in group["params"]:
                if anchor.grad is not None:
                    self._change(anchor, anchor.grad, group)

    def _change(self, anchor: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        if not momentum:
            anchor.sub_(gradient * lr)
            return
        state = self.state[anchor]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(anchor)
        velocity = state["momentum_buffer"].mul_(momentum).add_(gradient)
        anchor.sub_((velocity * momentum).add_(gradient).mul_(lr) if group["nesterov"] else velocity * lr)
