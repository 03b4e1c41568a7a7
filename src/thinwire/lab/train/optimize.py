"""Configurations of the optimizer, its learning rate schedule and weight decay."""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import nn

from ... import strategy
from ...algorithm import require
from ...options import require_choice, require_integer, require_number
from ...strategy.local.muon_adamw import Scale

# PyTorch has no public base of its batch-norms.
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
MEMORIES = {"momentum", "beta1", "beta2"}
"""Fields of optimizers that say which share of a running sum or mean a step keeps."""
Shape = Literal["constant", "linear", "cosine", "steps", "inverse_sqrt", "points"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """A schedule that multiplies the optimizer's learning rate: linear warm-up, then one of these shapes.

    Steps are s = 1..n. The first w steps warm up. After them, with p = (s - 1 - w) / (n - w):

        constant      1
        linear        1 - p
        cosine        (1 + cos(pi p)) / 2
        steps         drop_factor^(number of `drops` d with s - 1 >= round(d n))
        inverse_sqrt  sqrt(w / s)
        points        straight lines from each of the `points` (p, multiple) to the next

    With `scale_by_workers` all this is multiplied by the number of workers W, and warm-up starts at 1 instead of 0, unless
    `warmup_start` says otherwise.

    Raises:
        ValueError: an unknown shape, or a fraction outside [0, 1].

    Source: scaling and warm-up, Goyal et al. 2017, arXiv 1706.02677; cosine, Loshchilov and Hutter 2017, arXiv 1608.03983;
    inverse square root, Vaswani et al. 2017, arXiv 1706.03762.

    Example:
        >>> schedule = LearningRateSchedule(warmup_fraction=0.5)
        >>> [round(schedule.at(step, 8), 2) for step in range(8)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.85, 0.5, 0.15]
    """

    warmup_fraction: float = 0.1
    """Share of the run in which the learning rate rises; higher => a gentler start. `warmup_steps` overrides it."""
    shape: Shape = "cosine"
    """Shape of the schedule after warm-up."""
    drops: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)
    """For "steps": shares of the run after which the learning rate drops; the default is 30, 60 and 80 of 90 epochs."""
    drop_factor: float = 0.1
    """For "steps": factor of each drop."""
    points: tuple[tuple[float, float], ...] = ()
    """For "points": pairs of p, from 0 to 1, and the multiple there. Two pairs with the same p make a jump."""
    scale_by_workers: bool = False
    """Whether to multiply the learning rate by the number of workers."""
    warmup_steps: int | None = None
    """Number of warm-up steps; None => `warmup_fraction` of the run."""
    warmup_start: float | None = None
    """Share of the full learning rate at which warm-up starts; None => 0, or one worker's with `scale_by_workers`."""

    def __post_init__(self):
        require_choice("optimizer.schedule.shape", self.shape, get_args(Shape))
        for name in ("warmup_fraction", "drop_factor"):
            require_number(f"optimizer.schedule.{name}", getattr(self, name), least=0, most=1)
        fractions = list(self.drops)
        require_integer("optimizer.schedule.warmup_steps", self.warmup_steps, 0, or_none=True)
        require_number("optimizer.schedule.warmup_start", self.warmup_start, least=0, most=1, or_none=True)
        inside = all(0 < drop < 1 for drop in fractions) and fractions == sorted(fractions)
        require(inside, f"optimizer.schedule.drops must ascend between 0 and 1, got {self.drops}")

        at = [p for p, _ in self.points]
        whole = at == sorted(at) and at[:1] == [0] and at[-1:] == [1]
        require(
            self.shape != "points" or (whole and all(0 <= multiple < math.inf for _, multiple in self.points)),
            "optimizer.schedule.points must ascend from 0 to 1 and have multiples of 0 or more, such as ((0, 1), (1, 0)), got "
            f"{self.points}",
        )

    def at(self, step: int, num_steps: int, num_workers: int = 1) -> float:
        """The factor at a step, 0..num_steps-1."""
        scale = num_workers if self.scale_by_workers else 1
        warmup_steps = round(self.warmup_fraction * num_steps) if self.warmup_steps is None else self.warmup_steps
        if step >= warmup_steps:
            return scale * self._after(step, warmup_steps, num_steps)
        first = 1 if self.scale_by_workers else 0
        start = first if self.warmup_start is None else scale * self.warmup_start
        # The last step of warm-up has the full rate.
        return start + (scale - start) * (step + 1) / warmup_steps

    def _after(self, step: int, warmup_steps: int, num_steps: int) -> float:
        progress = (step - warmup_steps) / (num_steps - warmup_steps)
        match self.shape:
            case "constant":
                return 1.0
            case "linear":
                return 1 - progress
            case "cosine":
                return (1 + math.cos(math.pi * progress)) / 2
            case "steps":
                return self.drop_factor ** sum(step >= round(drop * num_steps) for drop in self.drops)
            case "inverse_sqrt":
                # Without warm-up the rate falls from the first step on.
                return math.sqrt(max(1, warmup_steps) / (step + 1))
            case "points":
                return self._between_points(progress)

    def _between_points(self, progress: float) -> float:
        # Of two pairs with the same p, the second one counts from there on.
        passed = sum(p <= progress for p, _ in self.points)
        (p, multiple), (next_p, next_multiple) = self.points[passed - 1], self.points[passed]
        return multiple + (next_multiple - multiple) * (progress - p) / (next_p - p)


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base of all optimizer configurations."""

    learning_rate: float
    """What one worker uses after warm-up; higher => faster, until it diverges. Sparse gradients bear less than dense ones."""
    weight_decay: float
    """Pull of the weights towards zero; higher => smaller weights."""
    undecayed: tuple[str, ...] = ("vectors",)
    """Parameters without weight decay: "vectors" (biases and norms), "norms", or patterns of names; () => none."""
    schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)

    def __post_init__(self):
        require_number("optimizer.learning_rate", self.learning_rate, above=0)
        require_number("optimizer.weight_decay", self.weight_decay, least=0)
        for name in {item.name for item in fields(self)} & MEMORIES:
            require_number(f"optimizer.{name}", getattr(self, name), least=0, below=1)

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the `torch.optim` optimizer over the model's parameters.

        Groups may have learning rates of their own: each stays the same multiple of `learning_rate` in all steps.
        """

    def learning_rate_at(self, step: int, num_steps: int, num_workers: int = 1) -> float:
        """Learning rate of a step, 0..num_steps-1, on this many workers."""
        return self.learning_rate * self.schedule.at(step, num_steps, num_workers)

    def loss_factor(self, learning_rate: float) -> float:
        """What the loss of a step with this learning rate is multiplied by before its backward pass."""
        return 1.0

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups for PyTorch: trainable parameters with weight decay, and those without.

        Raises:
            ValueError: a pattern in `undecayed` that no name matches.

        Example:
            >>> from torch import nn
            >>> [(len(group["params"]), group["weight_decay"]) for group in SGD().groups(nn.Linear(2, 3))]
            [(1, 0.0005), (1, 0.0)]
        """
        spared = set().union(*(_matching(model, pattern) for pattern in self.undecayed))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name not in spared], "weight_decay": self.weight_decay},
            {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


def _matching(model: nn.Module, pattern: str) -> set[str]:
    """Names of the parameters that "vectors", "norms" or a pattern means."""
    if pattern == "vectors":
        return {name for name, p in model.named_parameters() if p.dim() <= 1}
    if pattern == "norms":
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, NORMS)]
        return {f"{name}.{own}" for name, module in modules for own, _ in module.named_parameters()}
    found = set(fnmatch.filter((name for name, _ in model.named_parameters()), pattern))
    require(bool(found), f"optimizer.undecayed: no parameter's name matches {pattern!r}")
    return found


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum: `v = m v + g + d x; x -= r (g + d x + m v)`, or `x -= r v`.

    r is the learning rate, m the momentum, d the weight decay; the first form is Nesterov's.

    Raises:
        ValueError: a value out of range.
    """

    learning_rate: float = 0.05
    """What one worker uses after warm-up; higher => faster, until it diverges. Sparse gradients bear less than dense ones."""
    weight_decay: float = 5e-4
    """Pull of the weights towards zero; higher => smaller weights."""
    momentum: float = 0.9
    """Momentum factor; 0 => plain SGD."""
    nesterov: bool = True
    """Whether to use Nesterov momentum."""
    rate_in_loss: bool = False
    """Whether the loss is multiplied by the learning rate too: for DeMo, whose momentum adds up rate times gradient."""

    def loss_factor(self, learning_rate: float) -> float:
        return learning_rate if self.rate_in_loss else 1.0

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        # PyTorch refuses Nesterov momentum where there is no momentum.
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(self.groups(model), self.learning_rate, self.momentum, nesterov=nesterov)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with decoupled weight decay (AdamW): `x -= r (m' / (sqrt(v') + eps) + d x)`.

    m' and v' are the running means of the gradient and of its square, each divided by `1 - beta^step`. The defaults are the
    Transformer's.

    Raises:
        ValueError: a value out of range.

    Source: Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101.
    """

    learning_rate: float = 7e-4
    """What one worker uses after warm-up; higher => faster, until it diverges."""
    weight_decay: float = 0.0
    """Pull of the weights towards zero; 0 => Adam as first published."""
    beta1: float = 0.9
    """Share of the running mean of gradients that each step keeps."""
    beta2: float = 0.98
    """Share of the running mean of squared gradients that each step keeps; higher => steadier, slower to adapt."""
    eps: float = 1e-9
    """Added to the root of the mean square; higher => smaller steps where gradients are tiny."""

    def __post_init__(self):
        super().__post_init__()
        require_number("optimizer.eps", self.eps, above=0)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.groups(model), self.learning_rate, (self.beta1, self.beta2), self.eps)


@dataclass(frozen=True)
class DGCSGD(Optimizer):
    """`thinwire.strategy.DGCSGD`, for averagers that apply momentum to gradients themselves: `b = m b + d x; x -= r (g + b)`.

    r is the learning rate, m the momentum, d the weight decay. g contains momentum already; weight decay has a momentum buffer
    of its own. With a lossless codec the result equals that of `SGD`.

    Raises:
        ValueError: a value out of range.

    Source: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887, in the authors' implementation.
    """

    learning_rate: float = 0.05
    """What one worker uses after warm-up; higher => faster, until it diverges."""
    weight_decay: float = 5e-4
    """Pull of the weights towards zero; higher => smaller weights."""
    momentum: float = 0.9
    """Momentum of weight decay; it must equal the averager's momentum."""
    nesterov: bool = False
    """Whether the averager's momentum is Nesterov's."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return strategy.DGCSGD(self.groups(model), self.learning_rate, momentum=self.momentum, nesterov=self.nesterov)


@dataclass(frozen=True)
class Muon(Optimizer):
    """`thinwire.strategy.MuonAdamW`: PyTorch's Muon for matrices, and AdamW for embeddings and all other parameters.

    Raises:
        ValueError: a value out of range, an unknown scale, or matrices without decay.

    Source: Jordan et al. 2024, Muon; Liu et al. 2025, arXiv 2502.16982; Therien et al. 2025, arXiv 2505.23725.
    """

    learning_rate: float = 0.02
    """What one worker uses after warm-up; higher => faster, until it diverges."""
    weight_decay: float = 1e-4
    """Pull of the matrices towards zero; higher => smaller weights."""
    momentum: float = 0.9
    """Muon's momentum factor."""
    beta2: float = 0.99
    """AdamW's share of the running mean of squared gradients that each step keeps."""
    scale: Scale = "spectral"
    """Size of Muon's updates: "spectral", as MuLoCo's, or "rms", which takes AdamW's learning rates, such as 1e-3."""

    def __post_init__(self):
        super().__post_init__()
        require_choice("optimizer.scale", self.scale, get_args(Scale))
        require(
            {"vectors"} <= {*self.undecayed} <= {"vectors", "norms"},
            f"optimizer.undecayed: Muon decays all its matrices and nothing else, got {self.undecayed}; leave it out",
        )

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        return strategy.MuonAdamW(
            trained,
            self.learning_rate,
            self.weight_decay,
            self.momentum,
            embeddings,
            betas=(0.9, self.beta2),
            scale=self.scale,
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float, multiples: Sequence[float]) -> None:
    """Give each parameter group its multiple of this learning rate."""
    for group, multiple in zip(optimizer.param_groups, multiples, strict=True):
        group["lr"] = learning_rate * multiple
