"""What the rounds of `Local` save, and hand to a worker that joins."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...algorithm import require
from ...membership import Form, State, averaged, nested, shared
from .asynchronous import Committed
from .fragments import Fragment

LATE = ("anchor", "outer")
"""Fields of `LocalState` that are as large as the model."""


def _renamed(saved: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with other names for its parameters: names for numbers, or numbers for names."""
    unknown = sorted(str(key) for group in saved["param_groups"] for key in group["params"] if key not in names)
    require(not unknown, f"saved outer optimizer does not fit this one: it has {unknown[:5]}")
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[key]: value for key, value in saved["state"].items()}, "param_groups": groups}


def _outer_names(state: LocalState) -> list[str]:
    """Names of the anchors in the order in which the outer optimizer numbers them."""
    names = {id(anchor): name for name, anchor in state.anchor.items()}
    return [names[id(p)] for group in state.outer.param_groups for p in group["params"]]


def named_outer(state: LocalState, outer: Optimizer) -> dict[str, Any]:
    """The outer optimizer's state by parameter name, with its own tensors, which its next step changes."""
    return _renamed(outer.state_dict(), dict(enumerate(_outer_names(state))))


def saved_outer(state: LocalState, outer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy(named_outer(state, outer))


def loaded_outer(state: LocalState, outer: Optimizer, saved: dict[str, Any]) -> Optimizer:
    outer.load_state_dict(_renamed(copy.deepcopy(saved), {name: i for i, name in enumerate(_outer_names(state))}))
    return outer


def _saved_scheduler(state: LocalState, scheduler: LRScheduler | None) -> dict[str, Any] | None:
    return None if scheduler is None else copy.deepcopy(scheduler.state_dict())


def _loaded_scheduler(state: LocalState, scheduler: LRScheduler | None, saved: dict[str, Any]) -> LRScheduler | None:
    if scheduler is not None:
        scheduler.load_state_dict(copy.deepcopy(saved))
    return scheduler


@dataclass
class LocalState(State):
    """What `Local` saves. With the model and the inner optimizer, beside which each worker saves it, training resumes bit for
    bit. Results of rounds in flight are saved, not merged.

    Attributes:
        anchor: the parameters after the last round.
        outer: the outer optimizer; its state is saved by parameter name.
        scheduler: of the outer optimizer's learning rate, if there is one.
        fragments: see `fragments.py`.
        step: of the present period.
        num_steps: since the start.
        committed: with a quorum, what its rounds have merged.
    """

    anchor: dict[str, nn.Parameter] = averaged()
    outer: Optimizer = averaged(form=Form(saved_outer, loaded_outer))
    scheduler: LRScheduler | None = shared(form=Form(_saved_scheduler, _loaded_scheduler))
    fragments: list[Fragment] = nested()
    step: int = shared(default=0)
    num_steps: int = shared(default=0)
    committed: Committed | None = nested(default=None)
