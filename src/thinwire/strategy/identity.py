"""Whose state it is: the worker, the number of workers and the configuration that a saved state belongs to."""

from __future__ import annotations

from typing import Any

from ..algorithm import require
from ..average.base import NamedTensors


def key_of(rank: int) -> str:
    """The key under which a worker saves all that is its own; different on each, as one checkpoint may hold them all."""
    return f"rank{rank}"


def describe_tensors(tensors: NamedTensors) -> str:
    """Names, shapes and dtypes, one tensor a line.

    Example:
        >>> import torch
        >>> describe_tensors([("weight", torch.ones(2, 3)), ("bias", torch.ones(2))])
        'weight (2, 3) torch.float32\\nbias (2,) torch.float32'
    """
    return "\n".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors)


def check_identity(call: str, saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What the worker of identity `own` may load of `saved`.

    Args:
        call: the strategy's public function, for messages.
        saved: what `Strategy.state_dict` returned, of this worker or of several.
        own: this worker's identity.

    Raises:
        ValueError: it has no entry of this worker, or one of another world size or configuration.
    """
    rank, size = own["rank"], own["world_size"]
    where = f"{call}: rank {rank} of {size} cannot load the state"
    entry = saved.get(key_of(rank))
    owners = ", ".join(map(_worker, saved.values())) or "nobody"
    require(entry is not None, f"{where} of {owners}; each worker loads what its own state_dict() returned")
    assert entry is not None
    theirs = entry["identity"]
    require(theirs["world_size"] == size, f"{where} of {_worker(entry)}; resume on as many workers")
    for field in ("strategy", "averager", "tensors"):
        there, here = _first_difference(theirs[field], own[field])
        require(there == here, f"{where} of another configuration: its {field} is {there}, expected {here}")
    return {name: value for name, value in entry.items() if name != "identity"}


def _worker(entry: Any) -> str:
    identity = entry.get("identity") if isinstance(entry, dict) else None
    return f"rank {identity['rank']} of {identity['world_size']}" if identity else "an unknown worker"


def _first_difference(there: str, here: str) -> tuple[str, str]:
    """The first line in which two texts differ, of each; both are the same if they do not."""
    theirs, ours = there.split("\n"), here.split("\n")
    for i in range(max(len(theirs), len(ours))):
        pair = tuple(lines[i] if i < len(lines) else "(absent)" for lines in (theirs, ours))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    return "", ""
