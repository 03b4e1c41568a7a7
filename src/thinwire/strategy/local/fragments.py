"""The fragments of a model: which parameters are exchanged together, and when.

Fragment p of P is exchanged every H steps, first after `ceil((p + 1) H / P)` steps. So one exchange carries about 1/P of the
model, and the peak of the traffic is 1/P of that of one fragment. With P = 1 the whole model is exchanged after H steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ...algorithm import require, required
from ...average.base import NamedTensors
from ...membership import Form, State, config, copied, load_tensors, nested, pending, restart, shared
from ..flight import Flight
from .inverse_norm import NormStatistics

Fragments = int | Sequence[str | Sequence[str]]
"""How to divide a model: into P fragments with strides over its layers, or by patterns of parameter names."""


def layer_of(name: str) -> str:
    """The layer of a parameter: up to the first number in its name, or else the module that owns it.

    Example:
        >>> [layer_of(name) for name in ("blocks.3.attention.weight", "embedding.weight", "scale")]
        ['blocks.3', 'embedding', 'scale']
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[:-1]) or name


def divide(names: Sequence[str], fragments: Fragments) -> list[list[str]]:
    """The names of the parameters of each fragment.

    Args:
        names: of all parameters, in the model's order.
        fragments: P, layer i belongs to fragment `i mod P`; or one pattern, or several, for each fragment. `*` stands for any
            characters, and the first fragment that matches a name has it.

    Raises:
        ValueError: more fragments than layers, a name that no pattern matches, or a fragment without parameters.

    Example:
        >>> names = ["embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight"]
        >>> divide(names, 2)
        [['embed.weight', 'blocks.1.weight'], ['blocks.0.weight', 'head.weight']]
        >>> divide(names, [("embed.*", "head.*"), "blocks.*"])
        [['embed.weight', 'head.weight'], ['blocks.0.weight', 'blocks.1.weight']]
    """
    if isinstance(fragments, int):
        layers = list(dict.fromkeys(layer_of(name) for name in names))
        require(
            1 <= fragments <= len(layers),
            f"Local: fragments must be 1 to {len(layers)}, the number of layers, got {fragments}",
        )
        place = {layer: i % fragments for i, layer in enumerate(layers)}
        return [[name for name in names if place[layer_of(name)] == i] for i in range(fragments)]
    patterns = [[one] if isinstance(one, str) else list(one) for one in fragments]
    divided: list[list[str]] = [[] for _ in patterns]
    for name in names:
        owner = next((i for i, some in enumerate(patterns) if any(fnmatchcase(name, p) for p in some)), None)
        mistake = f"Local: no pattern of fragments matches parameter {name!r}; add one, such as '*' at the end"
        divided[required(owner, mistake)].append(name)
    for some, found in zip(patterns, divided, strict=True):
        require(bool(found), f"Local: the patterns {some} of a fragment match no parameter that is left")
    return divided


def offset(index: int, num_fragments: int, every: int) -> int:
    """After how many steps of a period of `every` steps the fragment is exchanged.

    Example:
        >>> [offset(i, 3, 30) for i in range(3)], offset(0, 1, 30)
        ([10, 20, 30], 30)
    """
    return -(-(index + 1) * every // num_fragments)


def _saved_changes(state: Fragment, changes: list[Tensor]) -> dict[str, Tensor] | None:
    return None if state.finite is None else copied(dict(state.exchanged))  # else nothing waits to be merged


def _loaded_changes(state: Fragment, changes: list[Tensor], saved: dict[str, Tensor] | None) -> list[Tensor]:
    if saved is not None:
        load_tensors(dict(state.exchanged), saved, "changes")
    return changes


@dataclass
class Fragment(State):
    """Some parameters of a model that are exchanged together, and what is known of them.

    Attributes:
        offset: after how many steps of a period it is exchanged, 1 .. H.
        index: which of the fragments it is.
        places: positions of its parameters among those of the strategy.
        anchors: its part of the anchor.
        changes: the pseudo-gradients, which become their mean. They are saved, with `pulled`, while they wait to be merged.
        pulled: copies of the anchors that are averaged too; empty without `pull`.
        state: of the averager.
        statistics: of the norms of its changes.
        flight: the round in flight; its result is whether it was finite, or in elastic rounds whether all messages came. None
            if the last round is merged, or was loaded.
        finite: whether the result that is to be merged is finite; None until it is there.
        is_sent: in elastic rounds, whether its changes are under way, and not committed yet.
        undo: goes back to where such a round began, if it is given up; None before this worker sends.
        began: how many steps this worker had taken when the last round began.
        steps_to_merge: how many steps later the round in flight is merged.
        has_moved: whether the parameters may differ from the anchor.
        rejected: under gossip and with weights, whether this worker's changes in the present round were not finite.
        tokens: with a quorum, those that this worker's next change is made from.
        committed_tokens: with a quorum, those that merged changes of all workers were made from.
        base: with a quorum, the version of this worker's anchors.
        sent: with a quorum, copies of its parameters when its change was sent.
        pending_share: with a quorum, the number of this worker's change that no round has merged yet.
    """

    offset: int = config()
    index: int = config()
    places: list[int] = config()
    anchors: list[tuple[str, nn.Parameter]] = config()
    changes: list[Tensor] = shared(form=Form(_saved_changes, _loaded_changes))
    pulled: list[Tensor] = config()
    state: Any = nested(default=None)
    statistics: NormStatistics = nested(default_factory=NormStatistics)
    flight: Flight[bool] | None = pending(default=None)
    finite: bool | None = shared(default=None)
    is_sent: bool = shared(default=False)
    undo: Callable[[], None] | None = pending(default=None)
    began: int = shared(default=0)
    steps_to_merge: int = shared(default=0)
    has_moved: bool = shared(default=False)
    rejected: bool = shared(default=False)
    tokens: int = restart(default=0)
    committed_tokens: int = shared(default=0)
    base: int = config(default=0)
    sent: list[Tensor] = pending(default_factory=list)
    pending_share: int | None = pending(default=None)

    @property
    def in_flight(self) -> bool:
        """Whether a round has begun and is not merged."""
        is_there = self.finite is not None or self.pending_share is not None
        return is_there or self.is_sent or self.flight is not None

    def settle(self) -> None:
        """Wait until the messages have come. Merges nothing."""
        result = None if self.flight is None else self.flight.settle()
        if result is not None and not self.is_sent:  # else the vote decides
            self.finite = result

    def named_changes(self) -> NamedTensors:
        """The pseudo-gradients by parameter name."""
        return [(name, g) for (name, _), g in zip(self.anchors, self.changes, strict=True)]

    @property
    def tensors(self) -> NamedTensors:
        """What the averager's state is made for: anchors, or with `pull` all that is exchanged."""
        return self.exchanged if self.pulled else self.anchors

    @property
    def exchanged(self) -> NamedTensors:
        """Pseudo-gradients, and copies of anchors, which `pull` averages too."""
        # Not strict, as `pulled` may be empty.
        copies = [(f"{name}.anchor", t) for (name, _), t in zip(self.anchors, self.pulled, strict=False)]
        return [*self.named_changes(), *copies]


def make_fragments(
    anchors: Sequence[tuple[str, nn.Parameter]], fragments: Fragments, every: int, pulls: bool
) -> list[Fragment]:
    """The fragments of a model whose anchors these are, without the averager's states.

    Args:
        anchors: by parameter name, in the order of the parameters.
        fragments: as in `divide`.
        every: H.
        pulls: whether anchors are averaged too.
    """
    names = [name for name, _ in anchors]
    divided = divide(names, fragments)
    made = []
    for i, own in enumerate(divided):
        members = set(own)
        places = [place for place, name in enumerate(names) if name in members]
        held = [anchors[place] for place in places]
        changes = [torch.zeros_like(anchor.detach()) for _, anchor in held]
        pulled = [torch.zeros_like(g) for g in changes] if pulls else []
        made.append(Fragment(offset(i, len(divided), every), i, places, held, changes, pulled))
    return made
