"""What all gossip averagers share: the contract of a round, one message per neighbour, and who the neighbours are.

A round moves every worker towards its neighbours in `topology`:

    1. read        all tensors become one flat vector x, float32 (see Precision)
    2. encode      the algorithm makes a message of it, one for each neighbour whatever the number of tensors
    3. exchange    with the neighbours of this step, `topology.neighbours(rank, step, size)`
    4. decode      what came, in the order of ranks, into the change of x
    5. add         the change to the tensors

Overlap. `step` reads the tensors and begins to send; until `wait` they are the caller's again. `wait` *adds the change*
to what they hold by then, as `x(now) + change(x(then))`. Without anything in between that is the mixed value; with
optimizer steps in between, the mixture arrives late and no step is lost. `wait` may be called in another thread.

One round at a time. A round must have been waited for before the next begins, late by as many training steps as one
likes. Several rounds in flight, each unaware of the others' changes, would make `x += (P - I) x(delayed)`, which
diverges on an ordinary ring: already at a delay of one, eigenvalues of P below 0 grow.

Memory. What neighbours have been sent cannot be taken back, so that a round commits as it goes and `commit` only
reports whether this worker's part of it was finite; `discard` has nothing to undo, and rounds that were begun must be
waited for even then. A NaN or infinite parameter spreads to the neighbours, as in any gossip; what an algorithm
remembers stays finite (its text says how), so that training may go on from restored parameters.

Precision. x is float32. Where a tensor is float64, `Mix` and `PushSum` carry and add all of x in float64 (`is_exact`), at
8 bytes an element, so that nothing is rounded. Averagers with a codec exchange float32 copies, and add the change that these
give, in float32, to the float64 values: the values keep their own digits, and workers agree up to float32's.

Hierarchy. Under `Hierarchical(inner, workers_per_node)` the members of a node send x to their leader, which takes the
mean in rank order, gossips it with the other leaders along `inner`, and sends its members the result; all of this
happens in `wait`. A member sends 4n bytes a round, a leader its messages to other leaders and 4n + 8 bytes, x and the
push-sum weight, to each of its m - 1 members. Inside `Phases`, or of another hierarchy, it is the flat graph that
it equals.

State. One typed record, `GossipState`; its `state_dict` is keyed by tensor name and differs between workers.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import debug, kernels
from ..algorithm import require
from ..clock import Clock
from ..codec import Codec, Key
from ..comm import Communicator, Handle
from ..schedule import Progress
from ..topology import Hierarchical, Neighbours, Topology
from .base import Averager, NamedTensors, check_agreement
from .layout import Layout

Change = Callable[[], Tensor]


@dataclass
class GossipState:
    """What changes while an averager gossips.

    Attributes:
        memory: the algorithm's own, with `state_dict` and `load_state_dict`; None where it has none.
        weight: push-sum's w, 1.0 for all others. The estimate of the mean is `tensors / weight`.
        progress: rounds begun, and the epoch as the training loop counts it.
        completed: rounds that have been waited for, in the same count.
    """

    layout: Layout
    seed: int
    memory: Any = None
    weight: float = 1.0
    progress: Progress = field(default_factory=Progress)
    completed: int = 0
    finite: bool = True
    clock: Clock = field(default_factory=Clock)

    @property
    def in_flight(self) -> bool:
        """Whether a round has been begun and not been waited for."""
        return self.progress.step != self.completed

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, keyed by tensor name; each worker saves its own.

        Raises:
            ValueError: a round is in flight; its messages would be lost.
        """
        require(not self.in_flight, "a gossip round is in flight; wait() for it before saving, so that nothing is lost")
        memory = None if self.memory is None else self.memory.state_dict()
        return {"step": self.progress.step, "epoch": self.progress.epoch, "weight": self.weight, "memory": memory}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        require(not self.in_flight, "a gossip round is in flight; wait() for it before loading")
        require(
            (saved["memory"] is None) == (self.memory is None),
            "only one of the saved state and this averager has a memory; use the averager it was saved with",
        )
        if self.memory is not None:
            self.memory.load_state_dict(saved["memory"])
        self.progress, self.completed = Progress(saved["step"], saved["epoch"]), saved["step"]
        self.weight = saved["weight"]


@dataclass(frozen=True)
class Round:
    """One worker's part in one round: with whom it exchanges, and when this is."""

    comm: Communicator
    progress: Progress
    sends: dict[int, float]
    receives: dict[int, float]
    self_weight: float

    def exchange(self, message: Tensor | dict[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Sends one message to each neighbour, the same to all or one each, and expects as many bytes from each.

        Returns a callable that waits, and gives {peer: what it sent} in the order of ranks.
        """
        messages = message if isinstance(message, dict) else dict.fromkeys(self.sends, message)
        like = message if isinstance(message, Tensor) else next(iter(message.values()), torch.empty(0))
        receives = {peer: debug.empty_like(like) for peer in sorted(self.receives)}
        return self.comm.exchange(messages, receives).wait


class Gossip(Averager):
    """An averager that exchanges with neighbours only; see the module's text for the contract."""

    topology: Topology

    def __post_init__(self):
        require(
            isinstance(self.topology, Topology),
            f"{type(self).__name__}: topology must be a topology such as Ring(), got {self.topology!r}",
        )

    @property
    def whole_model(self) -> bool:
        return True

    @property
    def gives_one_mean(self) -> bool:
        return False

    @property
    def suits_parameters(self) -> bool:
        return True

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> GossipState:
        check_agreement(self, tensors, comm, seed)
        self.topology.validate(comm.size)
        self.check_topology(comm.size)
        state = GossipState(Layout.of(tensors, self.is_exact), seed)
        state.memory = self.init_memory(state, tensors, comm)
        return state

    def step(self, state: GossipState, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        require(scale == 1.0, f"{self}: gossip averages parameters, which bear no loss scale; got scale={scale}")
        require(not state.in_flight, f"rank {comm.rank}: {self} has a round in flight; wait() for it before the next")
        own = state.layout.flatten(tensors)
        comm.ledger.add_dense(own.numel())
        state.finite = state.finite and kernels.all_finite([own])
        finish = self._start(state, comm, own)
        state.progress = state.progress._replace(step=state.progress.step + 1)
        return Handle(lambda: self._finish(state, tensors, finish))

    def commit(self, state: GossipState) -> bool:
        finite, state.finite = state.finite, True
        return finite

    def discard(self, state: GossipState) -> None:
        state.finite = True

    def debias_factor(self, state: GossipState) -> float:
        return 1.0 / state.weight

    @abstractmethod
    def check_topology(self, size: int) -> None:
        """Raise ValueError where the topology, valid in itself, does not suit the algorithm."""

    @abstractmethod
    def begin(self, state: GossipState, round: Round, own: Tensor) -> Change:
        """Encode `own` and begin to send; returns what waits, decodes and gives the change of `own`, a new vector."""

    def init_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> Any:
        """What the algorithm remembers: a record with `state_dict` and `load_state_dict`, or None for nothing."""
        return None

    def _start(self, state: GossipState, comm: Communicator, own: Tensor) -> Change:
        topology, progress = self.topology, state.progress
        if isinstance(topology, Hierarchical) and topology.workers_per_node > 1 and comm.size > 1:

            def begin(near: Neighbours, mean: Tensor) -> Change:
                return self.begin(state, Round(comm, progress, *near), mean)

            return lambda: mix_nodes(topology, state, comm, own, begin)
        near = topology.neighbours(comm.rank, progress.step, comm.size)
        return self.begin(state, Round(comm, progress, *near), own)

    def _finish(self, state: GossipState, tensors: NamedTensors, finish: Change) -> None:
        change = finish()
        with state.clock("decode"):
            state.layout.add(tensors, change)
            state.finite = state.finite and kernels.all_finite([change])
        state.completed += 1


def mix_nodes(
    topology: Hierarchical,
    state: GossipState,
    comm: Communicator,
    own: Tensor,
    begin: Callable[[Neighbours, Tensor], Change],
) -> Tensor:
    """One round of a hierarchy, as the module's text describes; the change of `own`."""
    leader, *others = topology.members(comm.rank)
    step = state.completed  # the round that is being waited for
    if comm.rank == leader:
        received = comm.exchange({}, {peer: debug.empty_like(own) for peer in others}).wait()
        mean = sum((received[peer] for peer in others), start=own) / (1 + len(others))
        mixed = mean + begin(_leaders(topology, comm, step), mean)()
        comm.exchange(dict.fromkeys(others, pack_weighted(state.weight, mixed)), {}).wait()
    else:
        up = comm.exchange({leader: own}, {})
        result = debug.empty(WEIGHT_NBYTES + own.element_size() * own.numel(), dtype=torch.uint8, device=own.device)
        comm.exchange({}, {leader: result}).wait()
        up.wait()
        # All members of a node have the same push-sum weight; it is the leader's gossip that changes it.
        state.weight, mixed = unpack_weighted(result, own.dtype)
    return mixed - own


def _leaders(topology: Hierarchical, comm: Communicator, step: int) -> Neighbours:
    """The inner topology's neighbours of this node, by the ranks of their leaders."""
    near = topology.inner.neighbours(topology.node(comm.rank), step, topology.num_nodes(comm.size))
    sends, receives = ({node * topology.workers_per_node: weight for node, weight in side.items()} for side in near[:2])
    return Neighbours(sends, receives, near.self_weight)


WEIGHT_NBYTES = 8


def pack_weighted(weight: float, x: Tensor) -> Tensor:
    """The message [w float64][x ...] as bytes."""
    w = torch.tensor([weight], dtype=torch.float64, device=x.device)
    return torch.cat([w.view(torch.uint8), x.view(torch.uint8)])


def unpack_weighted(message: Tensor, dtype: torch.dtype) -> tuple[float, Tensor]:
    """What `pack_weighted` was given, x having been of `dtype`."""
    w, x = message[:WEIGHT_NBYTES], message[WEIGHT_NBYTES:]
    return w.view(torch.float64).item(), x.view(dtype)


def tensor_keys(state: GossipState, round: Round) -> list[Key]:
    """Random numbers of each tensor on this worker in this round."""
    rank, step = round.comm.rank, round.progress.step
    return [Key(state.seed, zlib.crc32(name.encode()) | rank << 32, step) for name in state.layout.names]


def check_codec(averager: Gossip, codec: Codec) -> None:
    """Raise ValueError unless neighbours can know the size of a payload before it comes."""
    name = type(averager).__name__
    require(isinstance(codec, Codec), f"{name}: codec must be a codec such as TopK(0.01), got {codec!r}")
    require(
        codec.agreement is None and codec.adaptive_part is None,
        f"{name}: for {codec} all workers must agree now and then, and gossip asks neighbours only; use Mean",
    )
    require(
        codec.fixed_size,
        f"{name}: payloads of {codec} vary in size, which a neighbour must know beforehand; use a codec of fixed size "
        "such as TopK or QSGD",
    )


def check_doubly_stochastic(averager: Gossip, size: int) -> None:
    """Raise ValueError unless plain mixing keeps the mean."""
    require(
        averager.topology.is_doubly_stochastic(size),
        f"{averager}: the mixing matrix of {size} workers is not doubly stochastic, so the mean would not be kept; "
        "use weights='metropolis', a regular graph, or PushSum",
    )


def check_fixed_undirected(averager: Gossip, size: int) -> None:
    """Raise ValueError unless the graph is the same at every step and its mixing matrix symmetric."""
    topology = averager.topology
    require(
        len(topology.steps(size)) == 1,
        f"{averager}: the two ends of an edge remember each other, so the graph must not change with time, and "
        f"{topology} repeats every {topology.period(size)} steps; use a static graph such as Ring(), or Mix or PushSum",
    )
    require(
        topology.is_symmetric(size),
        f"{averager}: messages go both ways with equal weights, and {topology} is not symmetric for {size} workers; "
        "use an undirected graph such as Ring() (weights='metropolis'), or PushSum",
    )
    check_doubly_stochastic(averager, size)


def check_number(averager: Gossip, name: str, value: Any) -> None:
    """Raise ValueError unless a step size is a number above 0 and at most 1."""
    require(
        isinstance(value, (int, float)) and 0 < value <= 1,
        f"{type(averager).__name__}: {name} must be above 0 and at most 1, got {value!r}; lower is more stable",
    )
