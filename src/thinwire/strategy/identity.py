"""Whose state it is: the worker, the number of workers and the configuration that a saved state belongs to."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from ..algorithm import require
from ..average.base import NamedTensors
from .advice import FOR_MUON, FOR_ONE, FOR_SEVERAL

CHOICES = tuple(map(repr, (FOR_ONE, FOR_SEVERAL, FOR_MUON)))
"""The averagers that `default_averager` chooses from. They keep nothing between rounds, so one goes on where another ended."""


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


def check_identity(call: str, saved: dict[str, Any], own: dict[str, Any], is_elastic: bool) -> list[dict[str, Any]]:
    """What the worker of identity `own` may load of `saved`: its own state, or those of all workers to redistribute.

    A worker of an elastic run loads before it knows the others, so it may load the states of any of the workers before.

    Args:
        call: the strategy's name, for messages.
        saved: what `AveragerAttachment.state_dict` returned, of this worker or of several.
        own: this worker's identity.
        is_elastic: whether workers come and go.

    Returns:
        One state if it was saved on as many workers; else those of all workers that there were, in rank order.

    Raises:
        ValueError: an entry is missing, or of another configuration.
    """
    rank, size = own["rank"], own["world_size"]
    require(
        isinstance(saved, dict) and all(isinstance(entry, dict) for entry in saved.values()),
        f"{call}: load_state_dict takes what state_dict() returned, such as {{'rank{rank}': ...}}, got {_outline(saved)}",
    )
    where = f"{call}: rank {rank} of {size} cannot load the state"
    owners = ", ".join(map(_worker, saved.values())) or "nobody"
    before = next(iter(saved.values()), own).get("identity", own)["world_size"]
    needed = [rank] if before == size and not is_elastic else list(range(before))
    entries = [saved.get(key_of(r)) for r in needed if not is_elastic or key_of(r) in saved]
    remedy = (
        "each worker loads what its own state_dict() returned"
        if before == size
        else f"another number of workers needs the states of all {before} in one dictionary"
    )
    found = [entry for entry in entries if entry is not None and "identity" in entry]
    require(bool(found) and len(found) == len(entries), f"{where} of {owners}; {remedy}")
    for entry in found:
        theirs = entry["identity"]
        require(
            theirs["world_size"] == before, f"{where} of {_worker(entry)} beside that of {_worker(found[0])}; {remedy}"
        )
        for field in (name for name in own if name not in ("rank", "world_size")):
            there, here = _first_difference(theirs.get(field, "(absent)"), own[field])
            if 1 in (before, size) and before != size and {there, here} <= set(CHOICES):
                continue  # the default of one worker is another than that of several
            require(there == here, f"{where} of another configuration: its {field} is {there}, expected {here}")
    return found


def _outline(value: Any) -> str:
    """A dictionary's keys, or the type of anything else."""
    return f"the keys {list(value)}" if isinstance(value, dict) else type(value).__name__


def _worker(entry: Any) -> str:
    identity = entry.get("identity") if isinstance(entry, dict) else None
    return f"rank {identity['rank']} of {identity['world_size']}" if identity else "an unknown worker"


def _first_difference(there: str, here: str) -> tuple[str, str]:
    """The first line in which two texts differ, of each; both are the same if they do not."""
    pairs = zip_longest(there.split("\n"), here.split("\n"), fillvalue="(absent)")
    return next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
