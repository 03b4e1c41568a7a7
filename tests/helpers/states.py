"""The tensors of saved states."""

from __future__ import annotations

from torch import Tensor

from thinwire.testing import state


def leaves(saved) -> dict[str, Tensor]:
    """The tensors of a saved state by their dotted path, such as "memory.residual.weight"."""
    return {name: value for name, value in state.leaves(saved).items() if isinstance(value, Tensor)}
