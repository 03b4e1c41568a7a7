"""What `LocalUpdates` saves and restores, deals out to more or fewer workers, and hands to a worker that joins."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..algorithm import require
from ..average.base import Averager, NamedTensors
from ..membership import mean_of
from .fragments import Fragment
from .gossip_base import GossipAttachment
from .live_parameters import LiveParameters
from .local_tensors import renamed

if TYPE_CHECKING:
    from .local_updates import Local


class LocalState(GossipAttachment):
    """The state of `LocalUpdates`, which sets it up and changes it."""

    averager: Averager
    strategy: Local
    _live: LiveParameters
    _anchors: list[tuple[str, nn.Parameter]]
    _outer: torch.optim.Optimizer
    _scheduler: LRScheduler | None
    _fragments: list[Fragment]
    _step: int
    _num_steps: int

    @property
    def _states(self) -> list[Any]:
        return [fragment.state for fragment in self._fragments]

    def _own_state(self) -> dict[str, Any]:
        """Anchor, outer optimizer, fragments and steps since the last round; with the model and the inner optimizer, beside
        which each worker saves it, training resumes bit for bit. Results of rounds in flight are saved, not merged."""
        return {
            "step": self._step,
            "num_steps": self._num_steps,
            "anchor": {name: anchor.detach().clone() for name, anchor in self._anchors},
            "outer": renamed(copy.deepcopy(self._outer.state_dict()), dict(enumerate(self._outer_names()))),
            "scheduler": None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict()),
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    @torch.no_grad()
    def _load_own(self, saved: dict[str, Any]) -> None:
        there, here = len(saved["fragments"]), len(self._fragments)
        require(there == here, f"Local: the saved state has {there} fragments, expected {here}")
        for name, anchor in self._anchors:
            anchor.data.copy_(saved["anchor"][name])
        indices = {name: i for i, name in enumerate(self._outer_names())}
        self._outer.load_state_dict(renamed(copy.deepcopy(saved["outer"]), indices))
        if self._scheduler is not None:
            self._scheduler.load_state_dict(copy.deepcopy(saved["scheduler"]))
        for fragment, state in zip(self._fragments, saved["fragments"], strict=True):
            fragment.load_state_dict(state)
            if saved.get("restarts"):
                self._restart(fragment, alpha=0.0)
        self._step, self._num_steps = saved["step"], saved["num_steps"]

    def _deal(self, saved: list[dict[str, Any]]) -> dict[str, Any]:
        """All workers go on from the anchors, because changes since the last rounds were each worker's own."""
        if any(fragment["has_moved"] for fragment in saved[0]["fragments"]):
            text = f"{self.call}: what workers changed since their last rounds belongs to no worker now, and is lost"
            warnings.warn(f"{text}; call synchronize() before saving to keep it", RuntimeWarning, stacklevel=2)
        differing = saved[:1] if self.averager.gives_one_mean else saved
        agreed = {key: mean_of([one[key] for one in differing]) for key in ("anchor", "outer")}
        fragments = []
        for i, fragment in enumerate(self._fragments):
            states = [one["fragments"][i] for one in saved]
            tensors = fragment.anchors if self.strategy.pull is None else fragment.named_pulled()
            averager = self.averager.deal([s["averager"] for s in states], tensors, self.comm.rank, self.comm.size)
            landed = {} if self.averager.gives_one_mean else {"landed": None, "finite": None, "steps_to_merge": 0}
            fragments.append(states[0] | landed | {"averager": averager, "has_moved": False, "gave_up": False})
        return saved[0] | agreed | {"fragments": fragments, "restarts": True}

    def _averaged(self) -> list[tuple[Any, NamedTensors]]:
        pulls = self.strategy.pull is not None
        return [(f.state, f.named_pulled() if pulls else f.anchors) for f in self._fragments]

    def _shared(self) -> dict[str, Any]:
        """Without what the live worker has changed since its last round, which is its own."""
        own, averager = self._own_state(), self.averager
        fragments = [
            saved | {"averager": averager.shared(fragment.state), "has_moved": False, "gave_up": False}
            for fragment, saved in zip(self._fragments, own["fragments"], strict=True)
        ]
        buffers = {name: b for name, b in self._model.named_buffers()}
        inner = self._optimizer.state_dict()
        return own | {"fragments": fragments, "buffers": buffers, "inner": inner, "restarts": True}

    def _adopt(self, shared: dict[str, Any]) -> None:
        for fragment, saved in zip(self._fragments, shared["fragments"], strict=True):
            self.averager.adopt(fragment.state, saved["averager"])
            saved["averager"] = fragment.state.state_dict()
        self._load_own(shared)
        self._optimizer.load_state_dict(shared["inner"])
        for name, buffer in self._model.named_buffers():
            buffer.copy_(shared["buffers"][name])

    def _restart(self, fragment: Fragment, alpha: float) -> None:
        factor = self.averager.debias_factor(fragment.state)
        for (_, anchor), p in zip(fragment.anchors, self._parts(fragment), strict=True):
            start = anchor * factor
            p.copy_(start if alpha == 0 else torch.lerp(start, p.to(start.dtype), alpha))
        fragment.has_moved = alpha != 0

    def _parts(self, fragment: Fragment) -> list[Tensor]:
        """The parameters of a fragment, as they are now."""
        parameters = self._live.tensors()
        return [parameters[place][1] for place in fragment.places]

    def _outer_names(self) -> list[str]:
        """Names of the anchors in the order in which the outer optimizer numbers them."""
        names = {id(anchor): name for name, anchor in self._anchors}
        return [names[id(p)] for group in self._outer.param_groups for p in group["params"]]
