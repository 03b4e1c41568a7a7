"""AD-PSGD: pairs of workers average whenever they are ready; there are no rounds.

`Pairwise` is no `Averager`, because that contract is about rounds. `init` makes a state. The four operations below change it,
and two workers average by calling them in turn. The strategy sends the messages and owns the thread
(`strategy/gossip/asynchronous.py`).

A worker holds `x = published + pending`: its parameters after its last optimizer step, and the changes that averaging has made
since then. The training works on the model's own parameters, which averaging never touches.

    ask       active i      sends x_i
    answer    passive j     sends x_j back, and x_j <- x_j + (x_i - x_j)/2
    absorb    active i      x_i(now) <- x_i(now) + (x_j - x_i(sent))/2
    publish   both          after an optimizer step: parameters <- parameters + pending; published <- parameters; pending <- 0

Guarantees. Each operation is atomic: it holds the worker's lock, and no worker waits for a message under it. The two changes
of a pair are exactly opposite in floating point, so only optimizer steps move the sum over workers, up to the rounding of the
additions. The states equal those of a serial run in which each pair averages at the moment of the answer. A step that worker i
takes between asking and absorbing counts as taken after that moment, with an older gradient. Such stale gradients are part of
AD-PSGD.

Infinite and NaN values spread to the workers that average with them, as in any gossip. `pending` never keeps them, so training
can go on from restored parameters.

Precision. Vectors are float32, or float64 where a parameter is float64, so that nothing is rounded.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...algorithm import Algorithm, require
from ...clock import Clock
from ...comm import Communicator
from ...membership import State, config, pending, restart, shared
from ...topology import BipartiteExponential
from ...topology.bipartite import Bipartite
from ..base import NamedTensors, check_agreement
from ..traits import AveragerTraits
from .layout import FLAT, FlatLayout


@dataclass
class PairwiseState(State):
    """What a worker holds; see the module's text. Vectors have all elements and lie on the CPU.

    Attributes:
        changes: `pending`, what averaging has changed since then.
        published: parameters after the last optimizer step; None before the first.
        asked: how many averagings this worker has begun; the number chooses its next peer.
        averaged: how many averagings have changed x.
    """

    layout: FlatLayout = config()
    changes: Tensor = restart(value=0.0, form=FLAT)
    published: Tensor | None = pending(default=None)
    asked: int = shared(default=0)
    averaged: int = shared(default=0)
    lock: threading.Lock = config(default_factory=threading.Lock)
    clock: Clock = config(default_factory=Clock)

    def ask(self) -> Tensor | None:
        """A copy of x, to be sent; None before the first `publish`, and from `load_state_dict` to the next one."""
        with self.lock, self.clock("average"):
            if self.published is None:
                return None
            self.asked += 1
            return self.published + self.changes

    def answer(self, theirs: Tensor) -> Tensor | None:
        """Return x, to be sent back, and then move x half way towards `theirs`; None when `ask` returns None."""
        with self.lock, self.clock("average"):
            if self.published is None:
                return None
            own = self.published + self.changes
            self._move(theirs, own)
            return own

    def absorb(self, sent: Tensor, theirs: Tensor) -> None:
        """Add half of the difference between the answer and the x that was sent."""
        with self.lock, self.clock("average"):
            self._move(theirs, sent)

    def publish(self, tensors: NamedTensors) -> None:
        """Add the pending changes to the parameters, and remember the result."""
        with self.clock("publish"):
            # Without the lock, as a GPU may have yet to compute it. `flatten` has made a copy, which may be changed.
            wanted = self.layout.flatten(tensors).cpu()
            with self.lock:
                wanted.add_(self.changes)
                for (_, t), part in zip(tensors, self.layout.split(wanted), strict=True):
                    t.detach().copy_(part)
                self.published = self.layout.flatten(tensors).cpu()
                # What half precision could not hold stays pending. Infinite values do not.
                self.changes = wanted.sub_(self.published).nan_to_num_(0.0, 0.0, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, keyed by tensor name; each worker saves its own."""
        # The thread that averages may change the vectors meanwhile.
        with self.lock:
            return super().state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing is held until `publish`."""
        with self.lock:
            super().load_state_dict(saved)

    def _move(self, theirs: Tensor, own: Tensor) -> None:
        # Both ends subtract the same two vectors, so their changes are exactly opposite.
        self.changes.add_(theirs - own, alpha=0.5)
        self.averaged += 1


@dataclass(frozen=True, repr=False)
class Pairwise(Algorithm):
    """Asynchronous pairwise averaging, `x_i, x_j <- (x_i + x_j)/2`, atomically, whenever i and j are ready.

    Odd ranks are active: after each optimizer step of its own (one in flight at a time) such a worker averages with one of
    the even ranks, which are passive and answer in the order of arrival. Active workers wait for passive ones only, so that
    no circle of waiting exists, and no training step waits for another worker. The mean over workers is kept.

    Both send `4n + 9` bytes per averaging, n the number of elements: two steps, there and back (`8n + 9` where a parameter is
    float64). It has no rounds, and works with `gossip_asynchronously` only.

    Args:
        topology: a bipartite one; an active worker's k-th averaging is with its neighbour of step k.

    Raises:
        ValueError: a topology that is not bipartite, or gives more than one peer a step; in `init`, an odd number of workers.

    Source: Lian et al. 2018, Asynchronous Decentralized Parallel Stochastic Gradient Descent, arXiv 1710.06952.

    Example:
        >>> import thinwire as tw
        >>> [tw.Pairwise().peer(rank=1, asked=k, size=8) for k in range(4)]
        [2, 0, 4, 6]
        >>> tw.parse("Pairwise(BipartiteLinear())")
        Pairwise(BipartiteLinear())
    """

    traits = AveragerTraits(has_rounds=False, gives_one_mean=False)

    topology: Bipartite = field(default_factory=BipartiteExponential)

    def __post_init__(self) -> None:
        require(
            isinstance(self.topology, Bipartite),
            f"Pairwise: one side asks and the other answers; use BipartiteExponential() or BipartiteLinear(), got "
            f"{self.topology!r}",
        )
        require(
            self.topology.peers == 1 and not self.topology.static,
            f"Pairwise: a pair is two workers; use peers=1 and static=False, got {self.topology!r}",
        )

    def set_epoch(self, state: PairwiseState, epoch: int) -> None:
        """Do nothing: it has no schedules; see `Averager.set_epoch`."""

    def diagnostics(self, state: PairwiseState) -> dict[str, float]:
        """Nothing: it measures nothing; see `Averager.diagnostics`."""
        return {}

    def init(self, tensors: NamedTensors, comm: Communicator) -> PairwiseState:
        """Make the state for these tensors, after checking that all workers have the same averager and tensors."""
        check_agreement(self, tensors, comm, seed=0)
        self.topology.validate(comm.size)
        layout = FlatLayout.of(tensors, exact=True)
        return PairwiseState(layout, changes=torch.zeros(layout.numel, dtype=layout.dtype, device="cpu"))

    def is_active(self, rank: int) -> bool:
        """Whether a rank asks (odd), rather than answers (even)."""
        return self.topology.is_active(rank)

    def partners(self, rank: int, size: int) -> list[int]:
        """All ranks of the other side."""
        return [peer for peer in range(size) if self.is_active(peer) != self.is_active(rank)]

    def peer(self, rank: int, asked: int, size: int) -> int:
        """The rank with which an active rank averages next, after `asked` averagings."""
        return next(iter(self.topology.neighbours(rank, asked, size).sends))
