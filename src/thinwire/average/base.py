"""The contract of an averager: how workers agree.

An averager takes a list of named tensors, one list on every worker, and moves them towards their mean over all workers.

    state = averager.init(tensors, comm)             once; workers compare their configuration and fail together
    handle = averager.step(state, tensors, comm)     may be called for parts of the tensors, a DDP bucket at a time
    handle.wait()                                    leaves the result in `tensors`
    averager.commit(state)                           ends the round, once all of its handles have been waited for

A round is one training step: every tensor is stepped once, in one call or in several, in the same order on all workers.
Memory changes in `commit` alone, and only where every result of the round is finite; results are the same on all
workers, so all commit or none does. `discard` abandons a round that was broken off, such as by an error in backward.

Collectives are issued in `step` and `wait`, never from a completion callback. The caller may issue the next `step` before
waiting for the last; it waits in the order of the steps. Where an averager `sends_while_waiting`, the calls of `step` and
`wait` come in the same order on all workers.

State. What `init` returns is an `AveragerState`, or another `thinwire.membership.State` with its fields. The fields say what is
saved and what becomes of them with another number of workers. `ByName` gives its children one clock, and makes their `finite`
one before it commits them.

Membership. Rank and number of workers are those of the communicator when a round begins. Between two rounds `regroup`
tells the averager that other workers take part from now on.

Traits. `traits` is the one record of what an averager is: `traits.py` lists them.

Averagers of parameters have a contract of their own on top of this one, for overlap and memory: see `gossip/base.py`.

Units. Under a loss scaler the tensors come multiplied by `scale`, and leave so; what is remembered is unscaled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import debug, kernels
from ..algorithm import Algorithm, require
from ..clock import Clock
from ..codec import Codec
from ..comm import Communicator, Handle
from ..kernels import Flag
from ..membership import State, config, forget, pending, shared, untie
from ..memory import Memory
from ..schedule import Progress
from ..topology import Topology
from .traits import AveragerTraits

NamedTensors = Sequence[tuple[str, Tensor]]

_PLAIN = AveragerTraits()

Before = Sequence[int | None] | None
"""For each worker its rank in the last round, or None if it is new; None if all are new."""

Pending = Callable[[], Callable[[NamedTensors], None]]
"""Waits for the messages of a round, in any thread; what it returns adds the change to tensors as they are then."""


@dataclass(kw_only=True)
class AveragerState(State):
    """What strategies need of the state of every averager.

    Attributes:
        progress: rounds and epochs, which schedules follow.
        finite: whether all results of the round so far were finite as the tensors hold them; `commit` alone reads it.
        clock: times the phases of rounds.
        stepped: the names of the tensors that were stepped in this round.
        handles: of this round, which averagers of gradients note for `check_waited`.
        shapes: of the tensors of `init` by name, which `begin_step` compares; empty compares nothing.
    """

    progress: Progress = shared(default=Progress())
    finite: Flag = pending(default=True)
    clock: Clock = config(default_factory=Clock)
    stepped: set[str] = pending(default_factory=set)
    handles: list[Handle] = pending(default_factory=list)
    shapes: Mapping[str, torch.Size] = config(default_factory=dict)


class Averager(Algorithm, ABC):
    """See the module's text for the contract."""

    @property
    def traits(self) -> AveragerTraits:
        """What the averager promises and demands. A class attribute serves where no field matters."""
        return _PLAIN

    def sends_at_once(self, state: Any) -> bool:
        """Whether `step` sends all that can be sent by then, so that `wait` may come late without delaying the others."""
        return False

    def sends_while_waiting(self, state: Any) -> bool:
        """Whether `wait` sends too, so that its place among the calls of `step` must be the same on all workers."""
        return True

    def set_epoch(self, state: Any, epoch: int) -> None:
        """Tell schedules which epoch it is, between rounds and alike on all workers."""
        state.progress = state.progress._replace(epoch=epoch)

    def debias_factor(self, state: Any) -> float:
        """What to multiply the tensors by to read the estimate of the mean: 1/w under push-sum, else 1.0."""
        return 1.0

    def current_codec(self, state: Any) -> Codec | None:
        """The codec of the present round, its schedules resolved and its levels adapted; None if there is none."""
        return None

    def diagnostics(self, state: Any) -> dict[str, float]:
        """What was found out or chosen in the last rounds, by name; empty where nothing is."""
        return {}

    def check_names(self, names: list[str], rank: int) -> None:
        """Check that the averager suits a model with parameters of these names. `init` may get a part of them.

        Raises:
            ValueError: it does not; the message names the rank.
        """

    def regroup(self, state: Any, tensors: NamedTensors, comm: Communicator, before: Before = None) -> None:
        """Continue with other workers. All of them call it together, between two rounds; it may communicate.

        Args:
            state: of this worker.
            tensors: those of `init`.
            comm: connects the workers of the next round.
            before: their ranks in the last round.
        """
        untie(state)

    @abstractmethod
    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> Any:
        """Make the state for these tensors, after checking that all workers have the same configuration."""

    @abstractmethod
    def step(self, state: Any, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        """Begin to average `tensors`; the handle's `wait` leaves the result in them."""

    def start(self, state: Any, tensors: NamedTensors, comm: Communicator) -> Pending:
        """Start a round that ends in two parts: a thread waits for its messages, and later its change is added.

        Only gossip can: averagers that give one mean replace the tensors.
        """
        raise NotImplementedError(f"{self} replaces tensors, so its rounds cannot end while tensors change")

    @abstractmethod
    def commit(self, state: Any) -> bool:
        """End the round: keep what memory learned if every result was finite. Returns whether it was."""

    def discard(self, state: Any) -> None:
        """Abandon the round that was begun: forget the fields of the state, and of the memory in it, that are `pending`."""
        forget(state)


def averager_of_part(value: object, text: str) -> tuple[str, str] | None:
    """What kind of part of an averager a value is, and the notation of an averager that has it; None for other values.

    Args:
        value: a codec, a memory or a topology.
        text: its notation.

    Example:
        >>> import thinwire as tw
        >>> averager_of_part(tw.TopK(0.01), "TopK(0.01)")
        ('codec', 'Mean(TopK(0.01), ErrorFeedback())')
    """
    if isinstance(value, Codec):
        loses = not (value.traits.unbiased or value.traits.lossless or value.traits.votes)
        # A codec that loses with a bias needs a memory; the others do not.
        return "codec", f"Mean({text}{', ErrorFeedback()' if loses else ''})"
    if isinstance(value, Memory):
        return "memory", f"Mean(TopK(0.01), {text})"
    return ("topology", f"Mix({text})") if isinstance(value, Topology) else None


def averager_hint(value: object) -> str | None:
    """A suggestion for a value that is only a part of an averager, or its text; None otherwise.

    Example:
        >>> import thinwire as tw
        >>> averager_hint(tw.QSGD(bits=4))
        'QSGD(bits=4) is a codec; write Mean(QSGD(bits=4))'
    """
    if isinstance(value, str):
        return (
            f"{value!r} is text; write an averager, such as Mean(TopK(0.01), ErrorFeedback()); thinwire.parse reads one"
        )
    part = averager_of_part(value, repr(value))
    return None if part is None else f"{value!r} is a {part[0]}; write {part[1]}"


def check_agreement(averager: Algorithm, tensors: NamedTensors, comm: Communicator, seed: int) -> None:
    """Raise the same error on all workers unless their configurations are equal, and their tensors real floats.

    Floats have 16 bits or more. It names each difference and its rank.
    """
    check_pairs(tensors, comm.rank)
    names = [name for name, _ in tensors]
    require(len(set(names)) == len(names), f"rank {comm.rank}: tensor names must be unique")
    described = {f"tensor {i}": f"{name} {tuple(t.shape)} {t.dtype}" for i, (name, t) in enumerate(tensors)}
    comm.check_agreement({"averager": repr(averager), "seed": seed, "number of tensors": len(names)} | described)
    for name, t in tensors:
        # A conversion to float32 would drop imaginary parts, and one to integers would cut means off.
        # PyTorch does not compute with floats of 8 bits.
        require(
            t.is_floating_point() and t.dtype.itemsize > 1,
            f"tensor {name!r} is {t.dtype}, and averagers take real floats of 16 bits or more; pass torch.view_as_real(tensor) "
            "of a complex tensor, or tensor.float()",
        )


def check_pairs(tensors: NamedTensors, rank: int) -> None:
    """Raise ValueError unless tensors are a list of pairs. A generator has nothing left when it is read a second time."""
    is_list = isinstance(tensors, Sequence)
    if not is_list or not all([isinstance(pair, tuple) and len(pair) == 2 for pair in tensors]):
        raise ValueError(
            f"rank {rank}: tensors must be a list of pairs (name, tensor), such as list(model.named_parameters()), got "
            f"{type(tensors).__name__}{' of something else' * is_list}"
        )


def begin_step(averager: Averager, state: AveragerState, tensors: NamedTensors, rank: int) -> None:
    """Raise ValueError unless there are tensors, those of `init`, each stepped once in a round; averagers of gradients begin
    `step` with it."""
    # This runs for each bucket, so messages are built only when they are raised.
    check_pairs(tensors, rank)
    if not tensors:
        raise ValueError(f"rank {rank}: {averager}: step needs one tensor or more, got none")
    shapes = state.shapes
    names = [name for name, t in tensors if not shapes or shapes.get(name) == t.shape]
    if len(names) < len(tensors):
        raise _not_of_init(averager, shapes, tensors, rank)
    if len(set(names)) < len(names):
        raise ValueError(f"rank {rank}: {averager}: step needs each tensor once, got {names[:5]}")
    if again := [name for name in names if name in state.stepped]:
        raise ValueError(
            f"rank {rank}: {averager}: {again[:5]} were stepped in this round already; call commit(state) at the end of each "
            "round, or discard(state) to give it up"
        )
    state.stepped.update(names)


def handle_of(averager: Averager, handle: Handle | None) -> Handle:
    """What `step` returned. It may be of any class in someone's own averager, but not None.

    Raises:
        ValueError: None.
    """
    if handle is None:  # in every round, so the message is built only when it is raised
        raise ValueError(f"{averager}: step must return a Handle, got None")
    return handle


def check_waited(averager: Averager, handles: Sequence[Handle]) -> None:
    """Raise ValueError unless each handle of the round has been waited for, without an error; averagers of gradients begin
    `commit` with it. Otherwise memory would keep a round whose results nobody has."""
    if num_open := sum(not handle.is_done for handle in handles):
        raise ValueError(
            f"{averager}: commit(state) comes after the wait() of each handle of the round, and {num_open} had none; "
            "call wait()"
        )


def _not_of_init(averager: Averager, shapes: Mapping[str, torch.Size], tensors: NamedTensors, rank: int) -> ValueError:
    """The error of `step` with tensors that `init` did not get."""
    name, t = next((name, t) for name, t in tensors if shapes.get(name) != t.shape)
    expected = f"that name with shape {tuple(shapes[name])}" if name in shapes else f"the names {list(shapes)[:5]}"
    return ValueError(
        f"rank {rank}: {averager}: step takes tensors of init, got {name!r} of shape {tuple(t.shape)}, and init got "
        f"{expected}; call init with all tensors that will be stepped"
    )


def copy_changed(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> Flag:
    """Copy each result into its tensor, unless it is the tensor itself; autograd learns that all tensors have changed.

    Returns:
        Whether what was written into narrower types is finite: a finite float32 value may be infinite in float16. Types
        that hold every float32 value take no pass over memory.

    Example:
        >>> half = torch.zeros(1, dtype=torch.float16)
        >>> copy_changed([torch.tensor([1e5])], [half])
        False
    """
    # `result_buffers` may have given out the tensor itself. Kernels write it through its address, which autograd does not see.
    pairs = list(zip(tensors, results, strict=True))
    torch.autograd.graph.increment_version([t for t, result in pairs if result is t])
    copied = [(t, result) for t, result in pairs if result is not t]
    # On a GPU, PyTorch before 2.11 writes all tensors of a call as if they had the type of the first.
    for dtype in {t.dtype for t, _ in copied}:
        targets, sources = zip(*[(t, result) for t, result in copied if t.dtype == dtype], strict=True)
        torch._foreach_copy_(targets, sources)
    return kernels.all_finite([t for t, result in copied if torch.promote_types(t.dtype, result.dtype) != t.dtype])


def result_buffers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A contiguous float32 buffer for the result of each tensor: the tensor itself if it is one, else new memory."""
    in_place = [t.dtype == torch.float32 and t.is_contiguous() for t in tensors]
    return [
        t if here else debug.empty(t.shape, dtype=torch.float32, device=t.device)
        for t, here in zip(tensors, in_place, strict=True)
    ]
