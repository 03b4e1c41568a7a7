"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...algorithm import require


class MuonAdamW(torch.optim.Optimizer):
    """PyTorch's `Muon` on parameters of two dimensions, and its `AdamW` on the others, in one optimizer.

    Its momentum is MuLoCo's: 0.9, not Nesterov's. Embeddings and the output layer are usually left to AdamW.

    Muon's update of a matrix has about equal singular values. `match_rms` scales it to the size of AdamW's, so that both take
    the same learning rate.

    Args:
        params: parameters.
        lr: learning rate of both.
        weight_decay: decoupled, of matrices only.
        momentum: Muon's.
        adamw: parameters of two dimensions that take AdamW too, such as embeddings and the output layer.
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        ValueError: no parameter, or a value that Muon or AdamW refuses.

    Source: Jordan et al. 2024, Muon; Liu et al. 2025, Muon is scalable for LLM training, arXiv 2502.16982 (`match_rms`);
        Therien et al. 2025, MuLoCo, arXiv 2505.23725.

    Example:
        >>> import torch, thinwire as tw
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = tw.strategy.MuonAdamW(model.parameters(), lr=0.1)
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
        momentum: float = 0.9,
        adamw: Iterable[torch.Tensor] = (),
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        held, spared = list(params), {id(p) for p in adamw}
        is_matrix = [p.ndim == 2 and id(p) not in spared for p in held]
        matrices = [p for p, yes in zip(held, is_matrix, strict=True) if yes]
        others = [p for p, yes in zip(held, is_matrix, strict=True) if not yes]
        require(bool(held), "MuonAdamW: there are no parameters")
        self._parts: list[tuple[bool, torch.optim.Optimizer]] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=False,
                adjust_lr_fn="match_rms_adamw",
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
            vars(type(part).step)["__wrapped__"](part)  # without hooks: one optimizer steps here, not two
        return loss
