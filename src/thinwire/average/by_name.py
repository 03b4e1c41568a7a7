"""A policy by parameter name: each parameter is averaged by the averager of the first pattern that matches its name.

One `step` splits its tensors among the children, the averagers of the patterns. A child that owns none of them does
nothing. The round is one transaction: if the result of any child is not finite, no child's memory changes.

Order of collectives. If every child sends all that it sends in `step`, so does the policy, and the children's
exchanges overlap with the backward pass. If one child waits between its collectives, as `PowerSGD` and
`exchange="scatter_reduce"` do, all collectives run in `wait`, so that they have the same order on all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from .. import kernels
from ..algorithm import require
from ..clock import Clock
from ..comm import Communicator, Handle
from ..membership import State, check_state, config, nested, pending
from ..options import require_kind
from ..schedule import Progress
from .base import Averager, Before, NamedTensors, check_agreement, check_pairs, check_waited
from .traits import AveragerTraits


@dataclass
class ByNameState(State):
    """What changes while `ByName` runs.

    Args:
        children: the state of each child, by its pattern.
        owners: tensor name -> pattern of the child that averages it.
        handles: of this round.
    """

    children: dict[str, Any] = nested()
    owners: dict[str, str] = config()
    clock: Clock = config(default_factory=Clock)
    handles: list[Handle] = pending(default_factory=list)

    @property
    def progress(self) -> Progress:
        """Rounds and epochs, the same for all children."""
        progress: Progress = next(iter(self.children.values())).progress
        return progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        for child in self.children.values():
            child.progress = progress

    @property
    def finite(self) -> kernels.Flag:
        """Whether all results of the round so far were finite."""
        return kernels.flags.all_of(child.finite for child in self.children.values())

    @finite.setter
    def finite(self, finite: kernels.Flag) -> None:
        for child in self.children.values():
            child.finite = finite


@dataclass(frozen=True, repr=False)
class ByName(Averager):
    """Averages each parameter with the averager of the first pattern that matches its name.

    Equation: `averagers[p](x_1, ..., x_W)` for a tensor called n, with p the first pattern for which
    `fnmatch.fnmatchcase(n, p)`. `*` matches any text, `?` one character, `[ab]` one of these. Every child keeps its own
    codec, memory, granularity and exchange, and sees its own tensors alone: `granularity="model"` means all tensors of
    that child. Where one pattern matches everything, results and bytes are those of that child. Bytes and steps are
    the sums over the children; each child sends messages of its own, so that more children => more latency.

    If any child needs the whole model at once, all tensors wait for the end of the backward pass.

    Args:
        averagers: pattern -> averager of gradients, the most special patterns first. An averager that is not a gossip
            averager: `Mean`, `PowerSGD`, or `ByName` itself. Kept as a tuple of pairs.

    Raises:
        ValueError: no pattern, a child that is not such an averager, or children of which only some apply momentum. In
            `init`: a parameter that no pattern matches. In `check_names`: also a pattern that gets no parameter of the model.

    Source: what is kept out of compression by name is usual practice, such as embeddings and norms in 1-bit Adam, Tang
    et al. 2021, arXiv 2102.02888.

    Example:
        >>> import torch, thinwire as tw
        >>> averager = tw.ByName({"embed*": tw.Mean(), "*": tw.Mean(tw.QSGD(bits=4))})
        >>> averager
        ByName({'embed*': Mean(), '*': Mean(QSGD(bits=4))})
        >>> def worker(comm):
        ...     tensors = [(name, torch.full((2, 2), float(comm.rank))) for name in ("embed.weight", "fc.weight")]
        ...     state = averager.init(tensors, comm)
        ...     averager.step(state, tensors, comm).wait()
        ...     averager.commit(state)
        ...     return tensors[0][1][0, 0].item()
        >>> tw.LocalWorld(4).run(worker)
        [1.5, 1.5, 1.5, 1.5]
    """

    averagers: Mapping[str, Averager] | tuple[tuple[str, Averager], ...]

    def __post_init__(self) -> None:
        given = self.averagers
        require_kind(
            "ByName: averagers", given, (Mapping, tuple), "a dict such as {'*embed*': Mean(), '*': Mean(QSGD(bits=4))}"
        )
        pairs = tuple(given.items()) if isinstance(given, Mapping) else given
        require(len(pairs) > 0, "ByName: give at least one pattern, such as '*'")
        for pattern, averager in pairs:
            require(
                isinstance(pattern, str) and pattern != "",
                f"ByName: a pattern must be a text such as '*', got {pattern!r}",
            )
            require(
                isinstance(averager, Averager) and averager.traits.gives_one_mean,
                f"ByName: the averager of {pattern!r} must give all workers one mean, as Mean and PowerSGD do, got "
                f"{averager!r}",
            )
        patterns = [pattern for pattern, _ in pairs]
        require(len(set(patterns)) == len(patterns), f"ByName: give each pattern once, got {patterns}")
        with_momentum = [pattern for pattern, averager in pairs if averager.traits.has_momentum]
        require(
            len(with_momentum) in (0, len(pairs)),
            f"ByName: the averagers of {with_momentum} apply momentum and the others do not, but one optimizer serves "
            "all parameters; give MomentumCorrection to all of them or to none",
        )
        object.__setattr__(self, "averagers", pairs)

    def __repr__(self) -> str:
        return f"ByName({self._children!r})"

    @cached_property
    def _children(self) -> dict[str, Averager]:
        return dict(self.averagers)

    @cached_property
    def traits(self) -> AveragerTraits:
        each = [child.traits for child in self._children.values()]
        return AveragerTraits(
            whole_model=any(traits.whole_model for traits in each),
            couples_tensors=any(traits.couples_tensors for traits in each),
            needs_names=True,
            has_momentum=each[0].has_momentum,
            suits_parameters=all(traits.suits_parameters for traits in each),
        )

    def _with(self, state: ByNameState) -> list[tuple[Averager, Any]]:
        """The children with their states."""
        return [(child, state.children[pattern]) for pattern, child in self._children.items()]

    def sends_at_once(self, state: ByNameState) -> bool:
        return all(child.sends_at_once(s) for child, s in self._with(state))

    def sends_while_waiting(self, state: ByNameState) -> bool:
        return any(child.sends_while_waiting(s) for child, s in self._with(state))

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> ByNameState:
        check_agreement(self, tensors, comm, seed)
        owners = self._owners([name for name, _ in tensors], comm.rank)
        parts = _split(tensors, owners, self._children)
        states = {pattern: child.init(parts[pattern], comm, seed) for pattern, child in self._children.items()}
        state = ByNameState(states, owners)
        for child, child_state in self._with(state):
            # One clock, so that the phases of all children add up.
            check_state(child_state, child).clock = state.clock
        return state

    def _owners(self, names: list[str], rank: int) -> dict[str, str]:
        """The pattern of each tensor."""
        patterns = list(self._children)
        # No pattern is empty, so that "" stands for none.
        owners = {name: next((p for p in patterns if fnmatchcase(name, p)), "") for name in names}
        unmatched = [name for name, owner in owners.items() if not owner]
        require(
            not unmatched,
            f"rank {rank}: ByName has no pattern for {unmatched[:5]}, got {patterns}; add '*' as the last pattern",
        )
        return owners

    def check_names(self, names: list[str], rank: int) -> None:
        patterns, owners = list(self._children), self._owners(names, rank)
        for pattern in patterns:
            earlier = any(fnmatchcase(name, pattern) for name in names)
            why = "earlier patterns match all of its parameters" if earlier else f"the parameters are {names[:5]}"
            require(
                pattern in owners.values(),
                f"rank {rank}: ByName's pattern {pattern!r} gets no parameter: {why}; remove or reorder it",
            )
            self._children[pattern].check_names([name for name, owner in owners.items() if owner == pattern], rank)

    def step(self, state: ByNameState, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        check_pairs(tensors, comm.rank)
        try:
            parts = _split(tensors, state.owners, self._children)
        except KeyError as error:
            known = list(state.owners)[:5]
            raise ValueError(
                f"rank {comm.rank}: {self}: step takes tensors of init, got {error}, and init got the names {known}; call init "
                "with all tensors that will be stepped"
            ) from None

        def begin() -> list[Handle]:
            each = zip(self._with(state), parts.values(), strict=True)
            return [child.step(child_state, part, comm, scale) for (child, child_state), part in each if part]

        begun = begin() if self.sends_at_once(state) else None

        def wait() -> None:
            for handle in begin() if begun is None else begun:
                handle.wait()

        handle = Handle(wait)
        state.handles.append(handle)
        return handle

    def commit(self, state: ByNameState) -> bool:
        check_waited(self, state.handles)
        finite = kernels.flags.read(state.finite)
        state.finite = finite  # of every child, so that one that is not finite makes all of them discard
        for child, child_state in self._with(state):
            child.commit(child_state)
        state.handles.clear()
        return finite

    def discard(self, state: ByNameState) -> None:
        for child, child_state in self._with(state):
            child.discard(child_state)
        state.handles.clear()

    def diagnostics(self, state: ByNameState) -> dict[str, float]:
        """Those of the children, behind their patterns."""
        found = {pattern: child.diagnostics(state.children[pattern]) for pattern, child in self._children.items()}
        return {f"{pattern}/{name}": value for pattern, child in found.items() for name, value in child.items()}

    def regroup(self, state: ByNameState, tensors: NamedTensors, comm: Communicator, before: Before = None) -> None:
        parts = _split(tensors, state.owners, self._children)
        for (child, child_state), part in zip(self._with(state), parts.values(), strict=True):
            child.regroup(child_state, part, comm, before)


def _split(tensors: NamedTensors, owners: Mapping[str, str], patterns: Iterable[str]) -> dict[str, NamedTensors]:
    """The tensors of each child, in the order in which they came."""
    return {pattern: [pair for pair in tensors if owners[pair[0]] == pattern] for pattern in patterns}
