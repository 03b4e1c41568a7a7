"""AD-PSGD: pairs of workers average whenever they are ready; there are no rounds.

Not an `Averager`, whose contract is one of rounds, but its counterpart without: `init` makes a state, and what two
workers do to each other's states are the three operations below. Threads and messages are the strategy's
(`parallel/asynchronous.py`).

What a worker holds is `x = published + pending`: its parameters as its last optimizer step left them, and what averaging has
changed since. The compute side works on parameters of its own, which nobody else touches.

    ask       active i      sends x_i
    answer    passive j     sends x_j back, and x_j <- x_j + (x_i - x_j)/2
    absorb    active i      x_i(now) <- x_i(now) + (x_j - x_i(sent))/2
    publish   both          after an optimizer step: parameters <- parameters + pending; published <- parameters; pending <- 0

What holds. Each operation is atomic, under the worker's lock, which is never held while waiting for a message. The two changes
are exactly opposite in floating point, so that the sum over workers moves by optimizer steps alone, but for the rounding of
the additions. The state of all workers is at all times that of a serial execution in which every pair averages in one
instant, that of the answer: what i has stepped between asking and absorbing comes out as a step that was taken after it, with
a gradient from before it. Such stale gradients are the algorithm's own; a gradient is taken at parameters that miss what was
averaged during its forward and backward pass.

What is not finite spreads to those who average with it, as in any gossip; the state does not remember it beyond the
parameters, so that training may go on from restored ones.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..algorithm import Algorithm, require
from ..clock import Clock
from ..comm import Communicator
from ..topology import BipartiteExponential
from ..topology.bipartite import Bipartite
from .base import NamedTensors, check_agreement
from .layout import Layout


@dataclass
class PairwiseState:
    """What a worker holds; see the module's text. Vectors are float32, of all elements, on the CPU.

    Attributes:
        published: parameters after the last optimizer step; None before the first.
        asked: averagings that this worker has begun, which choose its next peer.
        averaged: averagings that have changed what this worker holds.
    """

    layout: Layout
    pending: Tensor
    published: Tensor | None = None
    asked: int = 0
    averaged: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    clock: Clock = field(default_factory=Clock)

    def ask(self) -> Tensor:
        """A copy of x, to be sent."""
        with self.lock, self.clock("average"):
            self.asked += 1
            return self.published + self.pending

    def answer(self, theirs: Tensor) -> Tensor:
        """x as it is to be sent back; half the difference to `theirs` is added to what is held."""
        with self.lock, self.clock("average"):
            own = self.published + self.pending
            self._move(theirs, own)
            return own

    def absorb(self, sent: Tensor, theirs: Tensor) -> None:
        """Adds half the difference of what came back and what was sent."""
        with self.lock, self.clock("average"):
            self._move(theirs, sent)

    def publish(self, tensors: NamedTensors) -> None:
        """Adds what is pending to the parameters, and holds these from now on."""
        with self.lock, self.clock("publish"):
            wanted = self.layout.flatten(tensors).cpu().add_(self.pending)
            for (_, t), part in zip(tensors, self.layout.split(wanted), strict=True):
                t.detach().copy_(part)
            self.published = self.layout.flatten(tensors).cpu()
            # What half precision could not hold stays pending; of infinities nothing does.
            self.pending = wanted.sub_(self.published).nan_to_num_(0.0, 0.0, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, keyed by tensor name; each worker saves its own."""
        with self.lock:
            return {"asked": self.asked, "averaged": self.averaged, "pending": self.layout.named(self.pending)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing is held until `publish`."""
        with self.lock:
            self.layout.load(self.pending, saved["pending"])
            self.asked, self.averaged, self.published = saved["asked"], saved["averaged"], None

    def _move(self, theirs: Tensor, own: Tensor) -> None:
        self.pending.add_(theirs - own, alpha=0.5)
        self.averaged += 1


@dataclass(frozen=True, repr=False)
class Pairwise(Algorithm):
    """Asynchronous pairwise averaging, `x_i, x_j <- (x_i + x_j)/2`, atomically, whenever i and j are ready.

    Odd ranks are active: after each optimizer step of its own (one in flight at a time) such a worker averages with one of
    the even ranks, which are passive and answer in the order of arrival. Active workers wait for passive ones only, so that
    no circle of waiting exists; nobody's training waits for anybody. The mean over workers is kept.

    Both send `4n + 9` bytes per averaging, n the number of elements: two steps, there and back. It has no rounds, so that it
    goes with `gossip_parameters` alone.

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

    topology: Bipartite = field(default_factory=BipartiteExponential)

    def __post_init__(self):
        require(
            isinstance(self.topology, Bipartite),
            f"Pairwise: one side asks and the other answers; use BipartiteExponential() or BipartiteLinear(), got "
            f"{self.topology!r}",
        )
        require(
            self.topology.peers == 1 and not self.topology.static,
            f"Pairwise: a pair is two workers; use peers=1 and static=False, got {self.topology!r}",
        )

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> PairwiseState:
        """Make the state for these tensors, after checking that all workers agree on what they are about to do."""
        check_agreement(self, tensors, comm, seed)
        self.topology.validate(comm.size)
        layout = Layout.of(tensors)
        return PairwiseState(layout, pending=torch.zeros(layout.numel))

    def is_active(self, rank: int) -> bool:
        """Whether a rank asks (odd), rather than answers (even)."""
        return self.topology.is_active(rank)

    def partners(self, rank: int, size: int) -> list[int]:
        """All ranks of the other side."""
        return [peer for peer in range(size) if self.is_active(peer) != self.is_active(rank)]

    def peer(self, rank: int, asked: int, size: int) -> int:
        """With whom an active rank averages after `asked` averagings."""
        return next(iter(self.topology.neighbours(rank, asked, size).sends))
