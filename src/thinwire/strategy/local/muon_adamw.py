"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from ...algorithm import require

Scale = Literal["spectral", "rms"]


class MuonAdamW(Optimizer):
    """PyTorch's `Muon` on parameters of two dimensions, and its `AdamW` on the others, in one optimizer.

        b <- mu b + (1 - mu) g;   x <- (1 - lr decay) x - lr s orth(b)

    where `orth` sets all singular values to about one (five Newton-Schulz steps in bfloat16), and s belongs to an n x m matrix:

        "spectral"   s = sqrt(n / m): outputs change by about lr, whatever the layer's size. MuLoCo's
        "rms"        s = 0.2 sqrt(max(n, m)): updates are as large as AdamW's, so that both take the same learning rate

    Momentum is MuLoCo's: 0.9, not Nesterov's. Embeddings and the output layer are usually left to AdamW.

    Args:
        params: parameters.
        lr: learning rate of both.
        weight_decay: decoupled, of matrices only; times `lr`, not times `lr s`.
        momentum: mu, Muon's.
        adamw: parameters of two dimensions that take AdamW too, such as embeddings and the output layer.
        betas: AdamW's.
        eps: AdamW's.
        scale: which s.

    Raises:
        ValueError: no parameter, an unknown scale, or a value that Muon or AdamW refuses.

    Source: Jordan et al. 2024, Muon; Liu et al. 2025, Muon is scalable for LLM training, arXiv 2502.16982 ("rms");
        Therien et al. 2025, MuLoCo, arXiv 2505.23725, whose code has "spectral", a rate of 0.044 (0.0224 with 2 bits) and a
        decay of 0.00125 (0.0001).

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
        lr: float = 0.02,
        weight_decay: float = 1e-4,
        momentum: float = 0.9,
        adamw: Iterable[torch.Tensor] = (),
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        scale: Scale = "spectral",
    ):
        held, spared = list(params), {id(p) for p in adamw}
        wrong = next((type(p).__name__ for p in held if not isinstance(p, torch.Tensor)), None)
        require(wrong is None, f"MuonAdamW: params must be parameters, as of model.parameters(), got a {wrong}")
        is_matrix = [p.ndim == 2 and p.numel() > 0 and id(p) not in spared for p in held]
        matrices = [p for p, yes in zip(held, is_matrix, strict=True) if yes]
        others = [p for p, yes in zip(held, is_matrix, strict=True) if not yes]
        require(bool(held), "MuonAdamW: there are no parameters")
        require(scale in get_args(Scale), f"MuonAdamW: scale must be 'spectral' or 'rms', got {scale!r}")
        self._parts: list[tuple[bool, Optimizer]] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=False,
                adjust_lr_fn="original" if scale == "spectral" else "match_rms_adamw",
            )
            self._parts.append((True, muon))
        if others:
            self._parts.append((False, torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=betas, eps=eps)))
        groups = [group | {"is_muon": kind} for kind, part in self._parts for group in part.param_groups]
        super().__init__(groups, {})

    def __getstate__(self) -> dict[str, Any]:
        # For copies and pickles, PyTorch leaves out what a subclass adds.
        return super().__getstate__() | {"_parts": self._parts}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group of the caller's: which parameters take Muon is decided once.

        Raises:
            ValueError: always, once the optimizer is made.
        """
        remedy = "give it all parameters when you make it; those without a gradient stay as they are"
        require("is_muon" in param_group, f"MuonAdamW takes no other group of parameters; {remedy}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; `closure`, if given, computes gradients and returns the loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for kind, part in self._parts:
            # The groups and states are this optimizer's, so that schedulers and checkpoints see one optimizer.
            groups = [group for group in self.param_groups if group["is_muon"] == kind]
            part.param_groups = [one for group in groups for one in _by_shape(group)] if kind else groups
            part.state = self.state
            vars(type(part).step)["__wrapped__"](part)  # without hooks: one optimizer steps here, not two
        return loss


def _by_shape(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The group of each matrix, for PyTorch's step. It has no spectral scale for wide matrices: its "original" one is
    `sqrt(max(1, n / m))`. So theirs is part of the rate, and the decay is divided by it."""
    for p in group["params"]:
        is_wide = group["adjust_lr_fn"] == "original" and p.shape[0] < p.shape[1]
        factor = math.sqrt(p.shape[0] / p.shape[1]) if is_wide else 1.0
        yield group | {"params": [p], "lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / factor}
