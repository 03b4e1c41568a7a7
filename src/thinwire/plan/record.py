"""What a worker does in one round: the real averager runs without values, and its operations are noted.

A *program* lists the actions of one worker for one call of `Averager.step`:

    Work(part, numel, name)   encode or decode so many float32 elements
    (PeerMessages, ...)       one operation of a communicator: the messages of each step, bytes by peer
    Wait(operation)           wait until that operation of the program is done

Tensors lie on PyTorch's meta device, so a model of any size costs no memory. A codec is replaced by a stand-in that has
its `nbytes` and makes payloads of that size; see `sized.py`. A payload of variable size counts with its upper bound.

Exchanges that add coordinates before they send them on (`sparse_reduce`) read positions and counts, and some averagers read
values (`ClippedGossip`). These are recorded on tensors of zeros, of which the stand-in selects evenly spaced coordinates. Every
other worker is taken to send what this one would send to itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..algorithm import require
from ..average import Averager
from ..average.base import NamedTensors
from ..clock import Clock
from ..comm import Communicator, Handle, Layout, Ledger
from ..comm.base import Start
from ..comm.channel import MAX_BYTES, Channel
from ..comm.sums import Route
from .averagers import adds_coordinates, multiplies, parts_of
from .network import Network
from .operations import Moves, PeerMessages, all_reduce, broadcast, gather_of_sizes
from .shapes import Shapes
from .sized import Work, sized


@dataclass(frozen=True)
class Wait:
    """Wait for the operation of this number, counted from 0 in the program."""

    operation: int


Action = Work | Moves | Wait


@dataclass(frozen=True)
class Program:
    """What one worker does for one call of `step`.

    Attributes:
        step: during the call, which issues the first operation.
        stages: what follows, one operation each; later calls of `step` and `wait` perform them as soon as they can.
        wait: the rest.
        ledger: of all of it.
        sends_at_once: whether `wait` may come when all buckets are sent.
    """

    step: tuple[Action, ...]
    stages: tuple[tuple[Action, ...], ...]
    wait: tuple[Action, ...]
    ledger: Ledger
    sends_at_once: bool

    @property
    def actions(self) -> list[Action]:
        """All of them, in order."""
        return [*self.step, *chain.from_iterable(self.stages), *self.wait]

    @property
    def sums_by_hosts(self) -> bool:
        """Whether it has all-reduces inside nodes and then between them, so that no other worker of its node does the same."""
        return any(isinstance(action, tuple) and len(action) > 2 for action in self.actions)

    def bytes_out(self, network: Network, node: int = 0) -> float:
        """What it adds to the bytes that its node sends to other nodes."""
        return sum(
            n
            for a in self.actions
            if isinstance(a, tuple)
            for step in a
            for peer, n in step.sends
            if peer // network.workers_per_node != node
        )

    def shifted(self, by: int, size: int) -> Program:
        """The program of the worker whose rank is `by` higher, if it does the same with peers as far away."""
        return self.renamed(lambda peer: (peer + by) % size)

    def renamed(self, peer_of: Callable[[int], int]) -> Program:
        """The program of a worker that does the same with other peers, whose ranks `peer_of` gives."""
        stages = tuple(_renamed(stage, peer_of) for stage in self.stages)
        return replace(self, step=_renamed(self.step, peer_of), stages=stages, wait=_renamed(self.wait, peer_of))


def _renamed(actions: Sequence[Action], peer_of: Callable[[int], int]) -> tuple[Action, ...]:
    several = [a for a in actions if isinstance(a, tuple) and len(a) > 1]
    broadcasts = any(bool(step.sends) != bool(step.receives) for a in several for step in a)
    require(not broadcasts, "a broadcast has a root, so workers differ; `is_uniform` of an exchange must be False then")
    return tuple(tuple(step.renamed(peer_of) for step in a) if isinstance(a, tuple) else a for a in actions)


def record(
    averager: Averager,
    shapes: Sequence[torch.Size],
    ranks: Sequence[int],
    size: int,
    workers_per_node: int = 1,
    shares: tuple[float, ...] = (),
    round: int = 0,
) -> list[Program]:
    """The programs of some workers of `size` for one call of `step` with tensors of these shapes.

    Args:
        averager: how workers agree.
        shapes: of the tensors.
        ranks: whose programs; those of one node together, its first worker first.
        size: number of workers.
        workers_per_node: how many consecutive ranks share a node.
        shares: which part each rank owns, where workers own parts; empty for equal parts.
        round: which round, counted from 0, where a topology or the averager varies in time.

    Raises:
        ValueError: an averager whose messages depend on values, such as a codec that needs an agreement.
    """

    def on(device: str) -> list[Program]:
        mail: Mail = defaultdict(deque)
        tensors: NamedTensors = [
            (f"t{i}", torch.zeros(shape, dtype=torch.float32, device=device)) for i, shape in enumerate(shapes)
        ]
        recorders = [Recorder(rank, size, workers_per_node, shares) for rank in ranks]
        return [_record(averager, tensors, recorder, mail, workers_per_node, round) for recorder in recorders]

    if adds_coordinates(averager):
        return on("cpu")
    try:
        with Shapes():
            return on("meta")
    except RuntimeError:  # of PyTorch, where an averager reads values
        return on("cpu")


def _record(
    averager: Averager, tensors: NamedTensors, comm: Recorder, mail: Mail, workers_per_node: int, round: int
) -> Program:
    actions = comm.actions
    stand_in = sized(averager, actions, workers_per_node)
    state = stand_in.init(tensors, comm)
    state.clock = _Untimed()
    for _ in range(round % averager.traits.period):
        comm.begin(mail)
        stand_in.step(state, tensors, comm).wait()
        stand_in.commit(state)
    state.progress = state.progress._replace(step=round)
    # `init` compares configurations, which is no part of a round.
    before = comm.ledger.snapshot()
    comm.begin(mail)
    handle = stand_in.step(state, tensors, comm)
    step = _taken(actions)
    stages = []
    for flight in getattr(state, "flights", ()):  # only the state of `Mean` has them
        while flight.finish is None:
            flight.advance()
            stages.append(_taken(actions))
    handle.wait()
    wait = _taken(actions)
    # These averagers have no codec that would note their work.
    if multiplies(averager):
        numel, rank = sum(t.numel() for _, t in tensors), parts_of(stand_in)["rank"]
        encode, decode = (Work(part, numel, repr(stand_in), rank) for part in ("encode", "decode"))
        step, wait = (encode, *step), (*wait, decode)
    return Program(step, tuple(stages), wait, comm.ledger.since(before), stand_in.sends_at_once(state))


class _Untimed(Clock):
    """Times nothing: with a thousand workers, that would take a quarter of the recording."""

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext()


def _taken(actions: list[Action]) -> tuple[Action, ...]:
    """The actions, with neighbouring pieces of equal work as one; leaves none."""
    merged: list[Action] = []
    for action in actions:
        last = merged[-1] if merged else None
        if isinstance(action, Work) and isinstance(last, Work) and (action.part, action.name) == (last.part, last.name):
            merged[-1] = Work(action.part, last.numel + action.numel, action.name)
        else:
            merged.append(action)
    actions.clear()
    return tuple(merged)


def _alike(handle: Handle, own: Tensor) -> Handle:
    """The same, with `own` for every message of its size."""
    return Handle(lambda: [own if t.numel() == own.numel() else t for t in handle.wait()])


Mail = defaultdict[tuple[int, int], deque[Tensor]]
"""(sender, receiver) => what is on its way."""


class Recorder(Communicator):
    """Worker `rank` of `size`: sends nothing and notes each operation in `actions`.

    Args:
        rank: whose operations are noted.
        size: W.
        workers_per_node: how many consecutive ranks share a node.
        shares: of a layout, in which nothing else is said.
    """

    def __init__(self, rank: int, size: int, workers_per_node: int = 1, shares: tuple[float, ...] = ()):
        super().__init__(rank, size)
        self.layout = Layout(tuple(range(size)), shares=shares) if shares else None
        self.actions: list[Action] = []
        self._operations, self.route = 0, Route(rank, [one // workers_per_node for one in range(size)])
        self._mail: Mail | None = None

    def begin(self, mail: Mail) -> None:
        """Forget all operations so far.

        Args:
            mail: gets what is sent from now on, and has what workers sent that were recorded before. Other messages
                stay empty.
        """
        self.actions.clear()
        self._operations, self._mail = 0, mail

    def _close(self) -> None:
        """Nothing to do."""

    def all_gather(
        self, tensor: Tensor, sizes: list[int] | None = None, variable: bool = False, limit: int = MAX_BYTES
    ) -> Handle:
        """As that of a communicator; every worker has what this one has."""
        return _alike(super().all_gather(tensor, sizes, variable, limit), tensor)

    def all_to_all(
        self, tensors: list[Tensor], sizes: list[int] | None = None, ranks: Sequence[int] | None = None
    ) -> Handle:
        """As that of a communicator; every worker sends what this one keeps."""
        own = tensors[list(ranks or range(self.size)).index(self.rank)]
        with torch._C.DisableTorchFunction():
            return _alike(super().all_to_all(tensors, sizes, ranks), own)

    def _submit(self, *args: Any, **kwargs: Any) -> Handle:
        with torch._C.DisableTorchFunction():  # no operation in here needs `Shapes`
            return super()._submit(*args, **kwargs)

    def _gather(self, operation: str, tensor: Tensor, sizes: list[int]) -> Handle:
        if self._mail is None:  # configurations: all workers have the same
            return Handle(lambda: [tensor] * self.size)
        with torch._C.DisableTorchFunction():
            return super()._gather(operation, tensor, sizes)

    def _issue(self, tensors: list[Tensor], start: Start) -> Callable[[], Any]:
        return start()

    def _note(self, operation: Moves) -> Callable[[], Any]:
        number = self._operations
        self._operations += 1
        self.actions.append(operation)
        return lambda: self.actions.append(Wait(number))

    def _start_all_reduce(self, tensor: Tensor) -> Callable[[], Any]:
        return self._note(all_reduce(self.route, tensor.nbytes))

    def _start_all_gather(self, gathered: list[Tensor]) -> Callable[[], Any]:
        return self._note_messages(self._others([gathered[self.rank]] * self.size), self._others(gathered))

    def _start_gather_variable(self, tensor: Tensor, result: list[Tensor], limit: int) -> Callable[[], Any]:
        result += [tensor] * self.size
        return self._note(gather_of_sizes(list(self._others(result)), tensor.nbytes))

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        if self._mail is not None:
            for peer, tensor in sends.items():
                self._mail[self.rank, peer].append(tensor)
            for peer, tensor in receives.items():
                # `get` adds no queue for a worker that is not recorded.
                if waiting := self._mail.get((peer, self.rank)):
                    tensor.copy_(waiting.popleft())
        return self._note_messages(*self._with_empty)

    def _submit_exchange(
        self, operation: str, sends: dict[int, Tensor], receives: dict[int, Tensor], result: Any
    ) -> Handle:
        # The base class drops empty messages before `_start_exchange`, which notes them.
        self._with_empty = sends, receives
        return super()._submit_exchange(operation, sends, receives, result)

    def _note_messages(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        """Empty messages count too, with no bytes: another worker may have none where this one has some."""
        sides = [tuple((peer, t.nbytes) for peer, t in side.items()) for side in (sends, receives)]
        return self._note((PeerMessages(sides[0], sides[1]),))

    def _start_broadcast(self, tensor: Tensor, root: int) -> Callable[[], Any]:
        return self._note(broadcast(self.size, self.rank, root, tensor.nbytes))

    def _open_channel(self, peers: list[int], max_bytes: int) -> Channel:
        raise NotImplementedError("asynchronous averaging has no rounds to record")
