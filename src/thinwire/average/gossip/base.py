"""The contract of a gossip averager's round.

A round moves every worker towards its neighbours in `topology`:

    1. encode      read the tensors in place, and make one message for each neighbour, of all tensors together
    2. exchange    send to and receive from `topology.neighbours(rank, step, size)`
    3. apply       decode the messages, in rank order, and add the change to the tensors in the same pass

The tensors, one after another, are the vector x, float32 (see Precision). No step makes a copy of it that it can avoid:
a contiguous tensor is read and changed where it lies, by kernels that decode, add and check in one pass.

Overlap. `step` reads the tensors and begins to send. Until `wait`, the caller may change them. `wait` *adds the change* to
the tensors as they are then: `x(now) + change(x(then))`. If nothing happened in between, this is the mixed value. If the
optimizer stepped in between, the mixture arrives late and no step is lost. Another thread may call `wait`. `start` divides
`wait` into two: a thread waits for the messages, and later the training's thread applies the change.

One round at a time. Wait for a round before the next one begins; any number of training steps may lie in between. Several
rounds in flight do not see each other's changes, which makes `x += (P - I) x(delayed)`. That diverges on an ordinary ring
even at a delay of one, because eigenvalues of P below 0 grow.

Memory. A message cannot be taken back, so a round changes memory as it goes. It does so in place: a round in flight works on a
stream of its own on a GPU, and what `init` has made may not be freed before it is read there. `commit` only reports whether
this worker's part of the round was finite. `discard` undoes nothing, and a round that has begun must be waited for even then. A
NaN or infinite parameter spreads to neighbours, as in any gossip. Memory stays finite, so training can go on from restored
parameters; each algorithm's docstring says how.

Precision. x is float32. If a tensor is float64, `Mix` and `PushSum` send and add all of x in float64 (`is_exact`), 8 bytes
an element, and round nothing. Averagers with a codec exchange float32 copies, and add the resulting float32 change to the
float64 values. The values keep their own digits, and workers agree up to float32 precision.

Hierarchy. `nodes.py` describes a round of `Hierarchical(inner, workers_per_node)`; it runs in `wait`.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ... import kernels
from ...algorithm import require
from ...comm import Communicator, Handle
from ...membership import check_state
from ...options import require_kind
from ...topology import Hierarchical, Neighbours, Ring, Topology
from ..base import Averager, Before, NamedTensors, Pending, check_agreement, check_pairs
from ..traits import AveragerTraits
from .checks import check_graph
from .layout import FlatLayout
from .nodes import mix_nodes
from .round import Apply, Arrive, GossipState, Round, add_vector
from .values import Parts, flat, move, parts_of

_GOSSIP = AveragerTraits(whole_model=True, gives_one_mean=False, suits_parameters=True)


class GossipAverager(Averager):
    """An averager that exchanges with neighbours only; the module's docstring is the contract.

    An algorithm defines `check_topology`, `begin`, and, if it has a memory, `init_memory`.

    Args:
        topology: who talks to whom, with which weights.

    Raises:
        ValueError: topology is not a topology.
    """

    is_exact: ClassVar[bool] = False
    """Whether float64 tensors are carried and added in float64; if not, what is sent of them is rounded to float32."""

    topology: Topology

    def __post_init__(self) -> None:
        require_kind(f"{type(self).__name__}: topology", self.topology, Topology, "a topology such as Ring()")

    @property
    def traits(self) -> AveragerTraits:
        return _GOSSIP

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> GossipState:
        check_agreement(self, tensors, comm, seed)
        self._check(comm.size)
        state = GossipState(FlatLayout.of(tensors, self.is_exact), seed, self.topology)
        memory = self.init_memory(state, tensors, comm)
        state.memory = None if memory is None else check_state(memory, self)
        state.step_control = self.init_step_control(state, tensors, comm)
        return state

    def step(self, state: GossipState, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        require(scale == 1.0, f"{self}: gossip averages parameters, which have no loss scale; got scale={scale}")
        arrive = self.start(state, tensors, comm)
        return Handle(lambda: arrive()(tensors))

    def start(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> Pending:
        require(
            not state.in_flight,
            f"rank {comm.rank}: {self} has a round in flight; wait() for it before the next, or where an error broke it off, "
            "detach() the strategy and attach it again",
        )
        check_pairs(tensors, comm.rank)
        state.layout.check(tensors)
        comm.ledger.count_averaged(state.layout.numel)
        arrive = self._start(state, comm, parts_of(tensors, state.layout.dtype))
        # Set last: a start that raises leaves no round in flight.
        state.progress, state.in_flight = state.progress._replace(step=state.progress.step + 1), True

        def arrived() -> Callable[[NamedTensors], None]:
            apply = arrive()
            return lambda now: self._apply(state, now, apply)

        return arrived

    def commit(self, state: GossipState) -> bool:
        finite, state.finite = kernels.flags.read(state.finite), True
        return finite

    def discard(self, state: GossipState) -> None:
        state.finite = True

    def debias_factor(self, state: GossipState) -> float:
        return 1.0 / state.weight

    @abstractmethod
    def check_topology(self, size: int) -> None:
        """Raise ValueError if a valid topology does not suit the algorithm."""

    @abstractmethod
    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        """Encode `own` and begin to send.

        Args:
            state: of this worker.
            round: the neighbours and weights of this round.
            own: this worker's values, each part flat. Do not change them, and do not read them after this call: the
                caller may change them while the messages fly.

        Returns:
            A function that waits for the messages, in any thread, and returns another one. That one decodes the messages,
            adds the change of `own` to the parts that it is given, and returns whether `own` and the change are finite.
        """

    def init_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> Any:
        """The algorithm's memory, a `thinwire.membership.State`; None without memory."""
        return None

    def init_step_control(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> Any:
        """What step sizes follow from: a `thinwire.membership.State` with `diagnostics`; None if they are numbers.

        It may communicate.
        """
        return None

    def diagnostics(self, state: GossipState) -> dict[str, float]:
        """The step sizes in force, by name, where they follow from measurements; empty where they are numbers."""
        return {} if state.step_control is None else dict(state.step_control.diagnostics())

    # ---- when workers come and go ----

    def regroup(self, state: GossipState, tensors: NamedTensors, comm: Communicator, before: Before = None) -> None:
        """Derive the neighbours anew; scale push-sum's weights so that they add up to the number of workers again.

        A topology that cannot connect this many workers gives way to `Ring()`, until it can again.
        """
        state.topology = self._topology_of(comm.size)
        # All workers choose alike, so one warning is enough.
        if state.topology != self.topology and comm.rank == 0:
            warnings.warn(f"{self}: {self.topology} cannot connect {comm.size} workers, so a ring does", stacklevel=2)
        # Workers that left took their part of the weight with them.
        weights = comm.all_reduce(torch.tensor([state.weight], dtype=torch.float64, device=comm.device)).wait()
        state.weight *= comm.size / weights.item()
        if state.memory is not None:
            self.regroup_memory(state, tensors, comm, before)
        # Step sizes follow from the graph, which has changed.
        state.step_control = self.init_step_control(state, tensors, comm)

    def _topology_of(self, size: int) -> Topology:
        if isinstance(self.topology, Hierarchical):  # its nodes are consecutive ranks, which the living need not be
            return Ring()
        try:
            self._check(size)
        except ValueError:
            return Ring()
        return self.topology

    def _check(self, size: int) -> None:
        self.topology.validate(size)
        check_graph(self, size)
        self.check_topology(size)

    def regroup_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator, before: Before) -> None:
        """Restart the memory of edges that have changed; see `Averager.regroup`."""

    def _start(self, state: GossipState, comm: Communicator, own: Parts) -> Arrive:
        topology, progress = state.topology, state.progress
        if isinstance(topology, Hierarchical) and topology.workers_per_node > 1 and comm.size > 1:
            # A copy: the round runs in `wait`, and the caller may change the tensors before.
            x = flat(own)

            def begin(near: Neighbours, mean: Parts) -> Arrive:
                return self.begin(state, Round(comm, state.clock, progress, *near), mean)

            return lambda: add_vector(mix_nodes(topology, state, comm, x, begin))
        near = topology.neighbours(comm.rank, progress.step, comm.size)
        if not near.receives:  # no change tells whether its own values are finite
            state.finite = kernels.flags.both(state.finite, kernels.all_finite(own))
        return self.begin(state, Round(comm, state.clock, progress, *near), own)

    def _apply(self, state: GossipState, tensors: NamedTensors, apply: Apply) -> None:
        state.layout.check(tensors)
        with state.clock("decode"):
            state.finite = kernels.flags.both(state.finite, move(tensors, state.layout.dtype, apply))
        state.in_flight = False
