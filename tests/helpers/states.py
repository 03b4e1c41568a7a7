"""Saved states, flat."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def leaves(saved, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a saved state by their dotted path, such as "memory.residual.weight"."""
    if isinstance(saved, Tensor):
        return {prefix: saved}
    items = saved.items() if isinstance(saved, Mapping) else enumerate(saved) if isinstance(saved, list) else ()
    found: dict[str, Tensor] = {}
    for key, value in items:
        found |= leaves(value, f"{prefix}.{key}" if prefix else str(key))
    return found
