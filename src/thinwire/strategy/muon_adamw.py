"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..algorithm import require


class MuonAdamW(torch.optim.Optimizer):
    """PyTorch's `Muon` on parameters of two dimensions, and its `AdamW` on the others, in one optimizer.

    Muon's update of a matrix has about equal singular values. `match_rms` scales it to the size of AdamW's, so that both take
    the same learning rate.

    Args:
        params: parameters.
        lr: learning rate of both.
        weight_decay: decoupled, of matrices only.
        momentum: Muon's.
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        ValueError: no parameter, or a value that Muon or AdamW refuses.

    Source: Jordan et al. 2024, Muon; Liu et al. 2025, Muon is scalable for LLM training, arXiv 2502.16982 (`match_rms`).

    Example:
        >>> import torch, thinwire as tw
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = tw.MuonAdamW(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight]), sorted(optimizer.state[model.bias])
        (['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        held = list(params)
        matrices, others = [p for p in held if p.ndim == 2], [p for p in held if p.ndim != 2]
        require(bool(held), "MuonAdamW: there are no parameters")
        self._parts: list[tuple[bool, torch.optim.Optimizer]] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append((True, muon))
        if others:
            self._parts.append((False, torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=betas, eps=eps)))
        groups = [group | {"is_muon": kind} for kind, part in self._parts for group in part.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; `closure`, if given, computes gradients and returns the loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for kind, part in self._parts:
            # The groups and states are this optimizer's, so that schedulers and checkpoints see one optimizer.
            part.param_groups = [group for group in self.param_groups if group["is_muon"] == kind]
            part.state = self.state
            part.step()
        return loss
