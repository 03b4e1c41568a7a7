"""A list of named tensors as one flat vector, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...algorithm import require
from ...membership import Form, load_tensors
from ..base import NamedTensors
from .values import flat


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor lies in the flat vector: one after another, in the order of the list.

    The vector is float32. With `exact` it is float64 if any of the tensors is.

    Example:
        >>> tensors = [("w", torch.ones(2, 2)), ("b", torch.zeros(1))]
        >>> layout = FlatLayout.of(tensors)
        >>> layout.flatten(tensors)
        tensor([1., 1., 1., 1., 0.])
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, tensors: NamedTensors, exact: bool = False) -> FlatLayout:
        """The layout of these tensors.

        Args:
            tensors: of any float dtype; they need not be contiguous.
            exact: whether float64 tensors keep all of their digits; if not, the vector rounds them to float32.
        """
        is_double = exact and any(t.dtype == torch.float64 for _, t in tensors)
        names, shapes = tuple(name for name, _ in tensors), tuple(t.shape for _, t in tensors)
        return cls(names, shapes, torch.float64 if is_double else torch.float32)

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def check(self, tensors: NamedTensors) -> None:
        """Raise ValueError unless these are the tensors of `init`, in its order."""
        now = FlatLayout.of(tensors)
        require(
            (now.names, now.shapes) == (self.names, self.shapes),
            f"a round takes the tensors of init in their order; expected {_summary(self)}, got {_summary(now)}",
        )

    def flatten(self, tensors: NamedTensors) -> Tensor:
        """A new vector of all elements, in `dtype`."""
        self.check(tensors)
        return flat([t.detach().reshape(-1).to(self.dtype) for _, t in tensors])

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views into the flat vector, in the tensors' shapes."""
        return [part.view(shape) for part, shape in zip(self.parts(flat), self.shapes, strict=True)]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Flat views into the flat vector, one for each tensor."""
        return list(flat.split([shape.numel() for shape in self.shapes]))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A copy of the flat vector, keyed by tensor name."""
        return {name: part.clone() for name, part in zip(self.names, self.split(flat), strict=True)}

    def load(self, flat: Tensor, saved: dict[str, Tensor]) -> Tensor:
        """Overwrite the flat vector by what `named` returned, and return it."""
        load_tensors(dict(zip(self.names, self.split(flat), strict=True)), saved, "memory")
        return flat


FLAT = Form(lambda state, flat: state.layout.named(flat), lambda state, flat, saved: state.layout.load(flat, saved))
"""A flat vector of a state with a `layout`, saved by tensor name."""


def _summary(layout: FlatLayout) -> str:
    first = ", ".join(f"{name} {tuple(shape)}" for name, shape in zip(layout.names[:3], layout.shapes, strict=False))
    return f"{len(layout.names)} tensors ({first}{', ...' if len(layout.names) > 3 else ''})"
