"""Redistribute states when the number of workers changes, by the metadata of their fields.

A state is a dataclass derived from `State`. Each of its fields has a kind:

    own        tensors of this worker alone, such as the residual of error feedback; a worker that joins starts at zero
    cut        coordinates that this worker owns, such as a shard's memory; cut anew by `State.place`
    shared     the same on all workers, such as adaptive levels or PowerSGD's Q
    averaged   differs between workers under gossip; all go on from the mean
    restart    saved to resume, and begins again when the workers change, such as push-sum's weight
    nested     another state, or a list or dict of states, or None
    agreed     chosen by `init` on all workers together: not saved, but a worker that joins takes it over
    pending    of the round under way; not saved, and forgotten by loading
    config     anything else; not saved

Own memory is late gradient: what worker i keeps as e_i enters the parameters as `1/W sum_i e_i`. So this mean is the total
that is kept when W changes, not the plain sum: with the sum alone, late gradients would weigh W/W' times what they are worth.

    1/W' sum_j e'_j  =  1/W sum_i e_i

Example:
    >>> @dataclass
    ... class Residual(State):
    ...     error: Tensor = own()
    ...     rounds: int = shared(default=0)
    >>> saved = [Residual(torch.tensor([value]), rounds=7).state_dict() for value in (2.0, 4.0)]
    >>> state = Residual(torch.zeros(1))
    >>> redistribute(state, saved, rank=0, size=1)
    >>> state
    Residual(error=tensor([3.]), rounds=7)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .algorithm import require
from .schedule import Progress

NORM_ELEMENTS = 1 << 17
AS_MADE: Any = object()
"""Restart with what `init` has made."""


class Form(NamedTuple):
    """How a field is saved that is more than tensors, numbers, and dicts and lists of them.

    Args:
        save: of the state and the field's value, makes what is saved.
        load: of the state, the present value and what was saved, makes the new value.
    """

    save: Callable[[Any, Any], Any]
    load: Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class FieldKind:
    """The kind of a field.

    Attributes:
        name: as in the module's text.
        form: how the field is saved; None as it is.
        value: where it restarts; tensors are filled with it.
        default: makes the value of a pending field between two rounds.
        tied: whether it holds among these workers only, and becomes zero when others take part within a run.
    """

    name: str
    form: Form | None
    value: Any
    default: Callable[[], Any]
    tied: bool

    @property
    def is_saved(self) -> bool:
        """Whether `state_dict` has it."""
        return self.name not in ("agreed", "pending", "config")


def _field(name: str, *, form: Form | None = None, value: Any = AS_MADE, tied: bool = False, **options: Any) -> Any:
    """A dataclass field of this kind; `options` are those of `dataclasses.field`."""
    default = options.get("default_factory", lambda: options.get("default"))
    return field(metadata={"kind": FieldKind(name, form, value, default, tied)}, **options)


own = partial(_field, "own")
cut = partial(_field, "cut")
shared = partial(_field, "shared")
averaged = partial(_field, "averaged")
restart = partial(_field, "restart")
nested = partial(_field, "nested")
agreed = partial(_field, "agreed")
pending = partial(_field, "pending")
config = partial(_field, "config")


def kinds(state: State) -> dict[str, FieldKind]:
    """The kind of each field of a state, by name.

    Raises:
        TypeError: a field has none.
    """
    found: Any = fields(state)  # type: ignore[arg-type]  # states are dataclasses
    for missing in (f.name for f in found if "kind" not in f.metadata):
        raise TypeError(
            f"{type(state).__name__}.{missing} must say what becomes of it when the number of workers changes; write "
            f"`{missing}: ... = own()`, shared(), averaged(), restart(value=...), nested(), pending(default=...) or config(), "
            "of thinwire.membership"
        )
    return {f.name: f.metadata["kind"] for f in found}


class State:
    """What changes while an algorithm runs: a dataclass whose fields each have a kind.

    Raises:
        TypeError: when it is made, if a field has none.
    """

    def __post_init__(self) -> None:
        kinds(self)

    def state_dict(self) -> dict[str, Any]:
        """This worker's part: tensors and plain values, by the names of the fields."""
        return {name: saved_field(self, name) for name, kind in kinds(self).items() if kind.is_saved}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, bit for bit, in place. What is pending is forgotten.

        Raises:
            ValueError: it is of another algorithm or of other tensors.
        """
        require_names([name for name, kind in kinds(self).items() if kind.is_saved], saved, type(self).__name__)
        self.load_fields(saved)

    def load_fields(self, saved: Mapping[str, Any]) -> None:
        """Restore these fields alone. What is pending is forgotten."""
        for name, kind in ((name, kind) for name, kind in kinds(self).items() if name in saved):
            value = getattr(self, name)
            loaded = kind.form.load(self, value, saved[name]) if kind.form else _loaded(value, saved[name], name)
            setattr(self, name, loaded)
        forget(self)

    def make_room(self, saved: Mapping[str, Any], rank: int, size: int) -> None:
        """`redistribute` calls it first, to make what `saved`, of a worker before, has and this state has not."""

    def place(self, name: str, rank: int, size: int) -> slice:
        """The coordinates of a tensor that worker `rank` of `size` owns; for states with a field that is `cut`."""
        raise NotImplementedError(f"{type(self).__name__} has a field that is cut, so it must define place()")


def check_state(state: Any, owner: object) -> Any:
    """Return the state that `owner` has made.

    Raises:
        TypeError: it is not derived from `State`.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"{owner}: its state must be a dataclass derived from thinwire.membership.State, each field of a kind such as "
            f"own() or shared(); got {type(state).__name__}"
        )
    return state


# ---- other workers ----


def redistribute(
    state: State,
    saved: Sequence[Mapping[str, Any]],
    rank: int,
    size: int,
    owners: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Go on from the states of another number of workers, as worker `rank` of `size`.

    Args:
        state: that `init` has made for `size` workers; with `owners`, for one worker, which has not met the others yet.
        saved: what `state_dict` returned on each worker before, in rank order; with `owners`, on some of them.
        rank: of this worker.
        size: the new number of workers; with `owners`, of those that share `saved` among them.
        owners: rank and number of workers of each of `saved`; None if these are all.
    """
    rewind(state, _continued(state, saved, (rank, size), owners=owners))


def shared_part(state: State, without: Collection[str] = ()) -> dict[str, Any]:
    """The part of a state that a joining worker loads: all fields that are not this worker's own, but for some names."""
    names = [name for name in _of_kind(state, "shared", "averaged", "agreed") if name not in without]
    return {name: saved_field(state, name) for name in names} | {
        name: _each(getattr(state, name), [], lambda child, _: shared_part(child)) for name in _of_kind(state, "nested")
    }


def load_shared(state: State, part: Mapping[str, Any], without: Collection[str] = ()) -> None:
    """Take over what `shared_part` returned on a live worker. What is this worker's own starts at zero."""
    continued = _continued(state, [part], None, without)
    if without:
        state.load_fields(continued)
    else:
        rewind(state, continued)


def own_norm(state: State) -> float:
    """The Euclidean norm of this worker's own fields, which are lost if it fails."""
    own_fields = [(one, name, kind.form) for one, name, kind in _all_fields(state) if kind.name in ("own", "cut")]
    values = (form.save(one, getattr(one, name)) if form else getattr(one, name) for one, name, form in own_fields)
    return math.hypot(*(norm_of(tensors_in(value)) for value in values))


def before_regrouping(state: State) -> State:
    """A copy to go back to if regrouping fails. It shares the tensors that regrouping leaves alone: own memory, unless tied."""
    untouched = [
        tensor
        for one, name, kind in _all_fields(state)
        if kind.name in ("own", "config") and not kind.tied
        for tensor in tensors_in(getattr(one, name))
    ]
    return copy.deepcopy(state, {id(tensor): tensor for tensor in untouched})


def untie(state: State) -> None:
    """Set what held among the workers so far to zero, because others take part from now on."""
    for one, name, kind in _all_fields(state):
        if kind.tied:
            for tensor in tensors_in(getattr(one, name)):
                tensor.zero_()


def rewind(state: State, saved: Mapping[str, Any]) -> None:
    """Go back, in place, to what `state_dict` returned before a round that was given up, however far it came."""
    # First: a state of gossip refuses to load while its round is in flight.
    forget(state)
    state.load_state_dict(saved)


def _continued(
    state: State,
    saved: Sequence[Mapping[str, Any]],
    place: tuple[int, int] | None,
    without: Collection[str] = (),
    owners: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """The saved state of this worker: of this rank and number of workers, from all before; or None, it joins a live one."""
    if place is not None:
        state.make_room(saved[0], *(place if owners is None else (0, 1)))

    def part(name: str, kind: FieldKind) -> Any:
        if kind.name == "restart":
            return _restarted(kind.value, saved_field(state, name))
        if kind.name in ("own", "cut") and place is None:
            return _by_leaf([saved_field(state, name)], lambda tensors: torch.zeros_like(tensors[0]))
        value, theirs = getattr(state, name), [one[name] for one in saved]
        if kind.name == "own" and place is not None:
            return _by_leaf(theirs, lambda tensors: keep_mean(tensors, *place))
        if kind.name == "cut" and place is not None:
            if owners is not None:
                return {key: _own_piece(state, key, value[key], theirs, owners, place) for key in theirs[0]}
            return {key: torch.cat([one[key] for one in theirs])[state.place(key, *place)] for key in theirs[0]}
        if kind.name == "nested":  # of what a live worker has and this one has not, nothing is shared
            theirs = [None] if value is None and place is None else theirs
            return _each(value, theirs, lambda child, its: _continued(child, its, place, owners=owners))
        return mean_of(theirs) if kind.name == "averaged" else theirs[0]

    if place is None:
        for name in _of_kind(state, "agreed"):
            setattr(state, name, saved[0][name])
    return {name: part(name, kind) for name, kind in kinds(state).items() if kind.is_saved and name not in without}


def _own_piece(
    state: State,
    key: str,
    value: Tensor,
    theirs: Sequence[Mapping[str, Tensor]],
    owners: Sequence[tuple[int, int]],
    place: tuple[int, int],
) -> Tensor:
    """All coordinates, zero but for this worker's share of the pieces; the sum over all workers has every piece once."""
    whole, mine = torch.zeros_like(value), torch.zeros_like(value)
    for one, owner in zip(theirs, owners, strict=True):
        whole[state.place(key, *owner)] = one[key]
    own = state.place(key, *place)
    mine[own] = whole[own]
    return mine


def _restarted(value: Any, made: Any) -> Any:
    if value is AS_MADE:
        return made
    return _by_leaf([made], lambda tensors: torch.full_like(tensors[0], value)) if isinstance(value, float) else value


def _of_kind(state: State, *names: str) -> list[str]:
    return [name for name, kind in kinds(state).items() if kind.name in names]


def _all_fields(state: State) -> Iterator[tuple[State, str, FieldKind]]:
    """The fields of a state and of the states in it: whose they are, their names and kinds."""
    for name, kind in kinds(state).items():
        yield state, name, kind
        if kind.name == "nested":
            value = getattr(state, name)
            several = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
            for child in several:
                yield from () if child is None else _all_fields(child)


def _each(value: Any, theirs: Sequence[Any], change: Callable[[State, Sequence[Any]], Any]) -> Any:
    """Call `change` on each nested state and its saved part; a state without a saved part stays unchanged."""
    if isinstance(value, Mapping):
        return {key: _each(child, [one[key] for one in theirs], change) for key, child in value.items()}
    if isinstance(value, list):
        return [_each(child, [one[i] for one in theirs], change) for i, child in enumerate(value)]
    if value is None:
        return theirs[0] if theirs else None
    return value.state_dict() if None in theirs else change(value, theirs)


def forget(state: State) -> None:
    """Make what is pending what it is between two rounds."""
    for one, name, kind in _all_fields(state):
        if kind.name == "pending":
            setattr(one, name, kind.default())


# ---- saved values ----


WHOLE = Form(lambda state, value: copied(value), lambda state, value, saved: copied(saved))
"""A value that is replaced as a whole, whatever was there."""


def saved_field(state: State, name: str) -> Any:
    """A field as `state_dict` has it."""
    form, value = kinds(state)[name].form, getattr(state, name)
    return form.save(state, value) if form else copied(value)


def copied(value: Any) -> Any:
    """A value as it is saved: tensors are copied, and states become dicts."""
    if isinstance(value, Mapping):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    if isinstance(value, Progress):
        return value._asdict()
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.state_dict() if isinstance(value, State) else value


def _loaded(value: Any, saved: Any, what: str) -> Any:
    require(
        not (value is None and isinstance(saved, Mapping)) and not (isinstance(value, State) and saved is None),
        f"only one of the saved state and this averager has {what}; use the averager it was saved with",
    )
    if isinstance(value, State):
        value.load_state_dict(saved)
    elif isinstance(value, Tensor):
        load_tensors({what: value}, {what: saved}, "state")
    elif isinstance(value, Mapping) and not all(isinstance(one, Tensor) for one in value.values()):
        require_names(value, saved, what)
        return {key: _loaded(one, saved[key], f"{what} of {key!r}") for key, one in value.items()}
    elif isinstance(value, Mapping):
        load_tensors(value, saved, what)
    elif isinstance(value, list):
        require(len(value) == len(saved), f"the saved state has {len(saved)} {what}, expected {len(value)}")
        return [_loaded(one, theirs, what) for one, theirs in zip(value, saved, strict=True)]
    else:
        return Progress(**saved) if isinstance(value, Progress) else saved
    return value


@torch.no_grad()
def load_tensors(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    """Copy saved tensors into those of the same names.

    Raises:
        ValueError: names or sizes differ.
    """
    require_names(tensors, saved, what)
    for name, tensor in tensors.items():
        require(
            tensor.numel() == saved[name].numel(),
            f"saved {what} of {name!r} has {saved[name].numel()} elements, expected {tensor.numel()}",
        )
    # Nothing is copied unless all sizes fit.
    for name, tensor in tensors.items():
        tensor.copy_(saved[name].reshape(tensor.shape))


def require_names(here: Iterable[str], there: Iterable[str], what: str) -> None:
    """Raise a ValueError if these names differ."""
    differing = sorted(set(here) ^ set(there))
    require(not differing, f"saved {what} does not fit this model: {differing[:5]} are only in one of them")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a value, which may be a dict, a list, a tuple or a dataclass of such values."""
    if isinstance(value, Tensor):
        yield value
        return
    value = vars(value) if is_dataclass(value) else value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from tensors_in(part)


def _by_leaf(values: Sequence[Any], combine: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Equally built values with their tensors combined."""
    if isinstance(values[0], Mapping):
        return {key: _by_leaf([value[key] for value in values], combine) for key in values[0]}
    if isinstance(values[0], (list, tuple)):
        return type(values[0])(_by_leaf(parts, combine) for parts in zip(*values, strict=True))
    return combine(values) if isinstance(values[0], Tensor) else values[0]


# ---- the arithmetic ----


def keep_mean(parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """The part of worker `rank` of `size` in the own memory of W workers, so that the mean over workers is kept.

    With fewer workers than before, a worker takes over the memories of several; with more, several share one. As many
    workers as before keep their own, bit for bit.

    Args:
        parts: e_0 ... e_(W-1), in one shape.
        rank: of the worker that gets the result, 0..size-1.
        size: the new number of workers, W'.

    Returns:
        e'_rank, a new tensor.

    Example:
        >>> parts = [torch.tensor([float(value)]) for value in (1, 2, 3, 6)]  # their mean is 3
        >>> [keep_mean(parts, r, 2).item() for r in range(2)], [keep_mean(parts, r, 8).item() for r in range(8)][:4]
        ([2.0, 4.0], [1.0, 2.0, 3.0, 6.0])
    """
    before = len(parts)
    taken = parts[rank % before :: size]  # one part if there are more workers than before
    num_sharers = len(range(rank % before, size, before))
    return sum(taken[1:], start=taken[0]) * (size / (before * num_sharers))


def mean_of(states: Sequence[Any]) -> Any:
    """The mean of equally built states: of their floating-point tensors, element by element. All else is the first one's.

    Equal tensors keep their bits.

    Example:
        >>> mean_of([{"momentum": torch.tensor([1.0]), "steps": 3}, {"momentum": torch.tensor([2.0]), "steps": 3}])
        {'momentum': tensor([1.5000]), 'steps': 3}
    """
    return _by_leaf(states, _mean)


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point() or all(torch.equal(first, other) for other in tensors[1:]):
        return first.clone()
    # In float64, so that the mean is rounded once, to the tensors' own dtype.
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(first.dtype)


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all elements together.

    Example:
        >>> norm_of([torch.tensor([3.0]), torch.tensor([4.0])])
        5.0
    """
    # Parts fit into a processor's cache. The host reads once.
    parts = (part for t in tensors for part in t.reshape(-1).split(NORM_ELEMENTS))
    return math.sqrt(float(sum(part.double().square().sum() for part in parts)))
