"""A list of named tensors as one flat float32 vector, and back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..algorithm import require
from .base import NamedTensors


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in the flat vector: one after another, in the order of the list.

    Example:
        >>> tensors = [("w", torch.ones(2, 2)), ("b", torch.zeros(1))]
        >>> layout = Layout.of(tensors)
        >>> layout.flatten(tensors)
        tensor([1., 1., 1., 1., 0.])
        >>> layout.add(tensors, torch.full((5,), 2.0))
        >>> tensors[1]
        ('b', tensor([2.]))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: NamedTensors) -> Layout:
        return cls(tuple(name for name, _ in tensors), tuple(t.shape for _, t in tensors))

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def check(self, tensors: NamedTensors) -> None:
        """Raise ValueError unless these are the tensors of `init`, in its order."""
        now = Layout.of(tensors)
        require(
            now == self,
            f"a round takes the tensors of init in their order; expected {_summary(self)}, got {_summary(now)}",
        )

    def flatten(self, tensors: NamedTensors) -> Tensor:
        """A new float32 vector of all elements."""
        self.check(tensors)
        return torch.cat([t.detach().reshape(-1).to(torch.float32) for _, t in tensors]) if tensors else torch.empty(0)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views into the flat vector, in the tensors' shapes."""
        ends = list(accumulate(shape.numel() for shape in self.shapes))
        return [flat[end - shape.numel() : end].view(shape) for end, shape in zip(ends, self.shapes, strict=True)]

    def add(self, tensors: NamedTensors, change: Tensor) -> None:
        """Add the flat vector to the tensors, in float32, in place."""
        for (_, t), part in zip(tensors, self.split(change), strict=True):
            t = t.detach()
            if t.dtype == torch.float32:
                t.add_(part)
            else:
                t.copy_(t.to(torch.float32).add_(part))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A copy of the flat vector, keyed by tensor name."""
        return {name: part.clone() for name, part in zip(self.names, self.split(flat), strict=True)}

    def load(self, flat: Tensor, saved: dict[str, Tensor]) -> None:
        """Overwrite the flat vector by what `named` returned."""
        differing = sorted(set(self.names) ^ saved.keys())
        require(not differing, f"saved memory does not fit these tensors: {differing[:5]} stand on one side only")
        for name, part in zip(self.names, self.split(flat), strict=True):
            require(
                part.shape == saved[name].shape,
                f"saved memory of {name!r} has shape {tuple(saved[name].shape)}, expected {tuple(part.shape)}",
            )
            part.copy_(saved[name])


def _summary(layout: Layout) -> str:
    first = ", ".join(f"{name} {tuple(shape)}" for name, shape in zip(layout.names[:3], layout.shapes, strict=False))
    return f"{len(layout.names)} tensors ({first}{', ...' if len(layout.names) > 3 else ''})"
