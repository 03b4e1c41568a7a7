"""The contract of exchanges: their properties and cost formulas, and the load of a round.

A message is m = p + d bytes: the payload and the dense vectors of one worker. N of the W workers share a node. The slow
network is the one between nodes, so the cost is what a node sends to all other nodes. With N = 1, a node is a worker.
Latency is the number of steps times the latency of one message. It dominates when messages are small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from ....codec import Codec
from ....memory import Memory
from .base import Finish, Job, Stages, message_nbytes

# An exchange that loses twice must send this many times fewer bytes to be chosen: the second encoding of `scatter_reduce`
# adds variance, and `sparse_reduce` delivers fewer coordinates than an all-gather.
SECOND_LOSS_FACTOR = 2


@dataclass(frozen=True)
class Load:
    """What one round averages.

    Args:
        codec: the codec of the round.
        shapes: the shape of each encoded tensor.
        dense_numel: number of elements that travel dense, as float32.
        size: number of workers, W.
        workers_per_node: N.
        merged: whether all tensors are encoded as one segment.
        memory: keeps what is lost; None if nothing does.
    """

    codec: Codec
    shapes: tuple[torch.Size, ...]
    dense_numel: int
    size: int
    workers_per_node: int = 1
    merged: bool = False
    memory: Memory | None = None


class Exchange(ABC):
    """How workers exchange payloads; `base.py` has the contract of `begin`. `Mean` reads the class attributes."""

    word: ClassVar[str]
    """Its name in the notation."""
    one_step: ClassVar[bool] = False
    """Whether it has sent everything when `begin` returns."""
    adds_payloads: ClassVar[bool] = False
    """Whether the backend adds payloads; workers agree first if the codec asks for it."""
    selects_again: ClassVar[bool] = False
    """Whether it keeps the largest coordinates of the sum, so that it suits codecs with the trait `sparse` alone."""
    needs_nodes: ClassVar[bool] = False
    """Whether it must know which workers share a node."""
    is_uniform: ClassVar[bool] = False
    """Whether all workers do the same with peers as far away; with `needs_nodes`, the first of each node, and all others.
    A plan then follows one worker of each kind. Otherwise it follows all, which is right for every exchange but slower."""
    tells_support: ClassVar[bool] = True
    """Whether every worker learns which coordinates were sent for it."""
    takes_selection: ClassVar[bool] = False
    """Whether workers encode their tensors as they are, so that a memory may select for the codec."""
    gathers: ClassVar[bool] = False
    """Whether every worker gets the messages of all, and decodes them with `Job.decode_messages`."""
    has_owners: ClassVar[bool] = False
    """Whether workers own parts of the result, which may be unequal; owners encode again, and remember what that lost."""

    @abstractmethod
    def begin(self, job: Job) -> Finish | Stages:
        """Encode the tensors of a job and issue the first collective."""

    @abstractmethod
    def steps(self, size: int, workers_per_node: int) -> int:
        """Communication steps, one after another, for W workers, N a node; 0 for one worker."""

    @abstractmethod
    def num_bytes(self, size: int, workers_per_node: int, message: float) -> float:
        """Bytes that leave the node that sends most, for W workers, N a node, and a message of m bytes."""

    def message_nbytes(self, load: Load) -> int:
        """Bytes of the message, m."""
        return message_nbytes(load.codec, list(load.shapes), load.dense_numel, load.merged)

    def cost(self, load: Load) -> float:
        """Bytes that leave a node in one round.

        Example:
            >>> import torch, thinwire as tw
            >>> from thinwire.average.mean.exchange import EXCHANGES, Load
            >>> load = Load(tw.QSGD(bits=4), shapes=(torch.Size([64, 128]),), dense_numel=0, size=8)
            >>> {name: EXCHANGES[name].cost(load) for name in ("all_gather", "scatter_reduce")}
            {'all_gather': 29120, 'scatter_reduce': 7280.0}
        """
        return self.num_bytes(load.size, load.workers_per_node, self.message_nbytes(load))

    def suits(self, load: Load) -> bool:
        """Whether "auto" may choose it."""
        return True

    def price(self, load: Load) -> float:
        """The cost by which "auto" compares."""
        return self.cost(load) * (SECOND_LOSS_FACTOR if self.selects_again or self.has_owners else 1)

    def check(self, codec: Codec) -> None:  # noqa: B027 -- most exchanges suit every codec
        """Raise ValueError unless the exchange suits the codec."""
