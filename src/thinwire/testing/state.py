"""What the conformance suites check of a state: other numbers of workers, a worker that joins, a round that is given up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..membership import State, check_state, kinds, load_shared, own_norm, redistribute, saved_field, shared_part


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Tensors and plain values of a saved state, by their dotted path.

    Example:
        >>> leaves({"progress": {"step": 2}, "levels": [0.5, 1.0]})
        {'progress.step': 2, 'levels.0': 0.5, 'levels.1': 1.0}
    """
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    parts = [leaves(one, f"{path}.{key}" if path else str(key)) for key, one in items]
    return {key: one for part in parts for key, one in part.items()}


def same(a: Any, b: Any) -> bool:
    """Whether two saved states have the same bits."""
    x, y = leaves(a), leaves(b)
    return x.keys() == y.keys() and all(
        torch.equal(x[key], y[key]) if isinstance(x[key], Tensor) else x[key] == y[key] for key in x
    )


def of_kind(state: State, name: str) -> dict[str, Any]:
    """What a state saves of one kind, nested states included.

    Args:
        state: any state.
        name: of the kind.
    """
    found: dict[str, Any] = {}
    for field, kind in kinds(state).items():
        value = getattr(state, field)
        if kind.name == name:
            found |= leaves(saved_field(state, field), field)
        elif kind.name == "nested":
            several = (
                value if isinstance(value, Mapping) else dict(enumerate(value if isinstance(value, list) else [value]))
            )
            for key, child in several.items():
                found |= {} if child is None else {f"{field}.{key}.{at}": v for at, v in of_kind(child, name).items()}
    return found


def check_redistribution(
    owner: object, before: Sequence[State], after: Sequence[State], rounding: float = 1e-6
) -> None:
    """Check that the states of other workers keep the mean of what is own, all that is cut, and the bits of what is shared.

    Args:
        owner: whose states they are, for messages.
        before: of all workers after some rounds, in rank order.
        after: as `init` has made them for another number of workers; changed.
        rounding: how far a number may be rounded when it is kept, relative to the largest.
    """
    saved = [check_state(state, owner).state_dict() for state in before]
    for rank, state in enumerate(after):
        redistribute(state, saved, rank, len(after))
    moved = f"{owner}: from {len(before)} to {len(after)} workers,"
    for name, value in of_kind(before[0], "own").items():
        assert isinstance(value, Tensor), (
            f"{owner}: {name} is own(), whose mean is kept among other workers, so it must be a tensor, got {value!r}"
        )
        # In float64, so that the means of this check add no rounding of their own.
        old, new = (torch.stack([of_kind(s, "own")[name] for s in states]).double() for states in (before, after))
        largest = old.abs().max().item() if old.numel() else 0.0
        is_kept = torch.allclose(new.mean(0), old.mean(0), rtol=0, atol=rounding * len(before) * largest)
        assert is_kept, f"{moved} the mean of {name} moved"
    for name in of_kind(before[0], "cut"):
        old, new = (torch.cat([of_kind(s, "cut")[name] for s in states]) for states in (before, after))
        assert torch.equal(old, new), f"{moved} {name} was cut wrongly"
    for state in after:
        assert same(of_kind(state, "shared"), of_kind(before[0], "shared")), f"{moved} what is shared has other bits"


def check_joining(owner: object, live: State, fresh: State) -> None:
    """Check that a worker that joins has the shared bits of a live one, and nothing of its own.

    Args:
        owner: whose states they are, for messages.
        live: of a worker after some rounds.
        fresh: as `init` has made it; changed.
    """
    load_shared(fresh, shared_part(live))
    assert same(of_kind(fresh, "shared"), of_kind(live, "shared")), (
        f"{owner}: a worker that joins has other shared bits"
    )
    assert own_norm(fresh) == 0, f"{owner}: a worker that joins has a memory of its own"
