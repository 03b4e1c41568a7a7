"""What changes while `Mean` runs."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...codec import AdaptiveCodec, Codec
from ...codec.adaptive.base import UNKNOWN
from ...comm import Communicator
from ...membership import agreed, config, nested, pending
from ..base import AveragerState
from ..robust.record import RuleState
from .exchange.base import Observe, PendingExchange, Shares
from .exchange.scatter_reduce import OwnerMemory, ScatterReduce, Whole
from .line_meter import LineMeter, SentMessage


@dataclass
class MeanState(AveragerState):
    """The state of `Mean`: what rounds change, and the exchange that `init` chose.

    Attributes:
        seed: the seed of all random numbers of the run.
        memory: the state of `Mean.memory`; None without a memory.
        exchange: the exchange of all rounds and buckets; never "auto".
        workers_per_node: how many consecutive ranks share a node.
        shares: which part of every tensor each worker owns in this exchange; empty for equal parts.
        owner_memory: what the second encoding of `scatter_reduce` lost; None without one.
        wholes: the tensors that are encoded, as owners cut them.
        codec: the state of the codec's adaptive part; None if nothing adapts.
        codec_before: a copy from before this round's update of it, in case the round is discarded.
        meter: what this worker sees of the line, where the codec follows it.
        flights: the exchanges that were begun and not yet finished, in their order.
        rule: what `Mean.rule` remembers; None without a rule.
        was_not_finite: whether this worker's message was left out of the round, so that its memory must not change.
    """

    seed: int = config()
    memory: Any = nested()
    exchange: str = agreed()
    workers_per_node: int = agreed(default=1)
    shares: Shares = agreed(default=())
    owner_memory: OwnerMemory | None = nested(default=None)
    wholes: dict[str, Whole] = config(default_factory=dict)
    codec: Any = nested(default=None)
    codec_before: Any = pending(default=None)
    meter: LineMeter = pending(default_factory=LineMeter)
    flights: list[PendingExchange] = pending(default_factory=list)
    rule: RuleState | None = nested(default=None)
    was_not_finite: bool = pending(default=False)

    def codec_of(self, codec: Codec, tensors: Sequence[tuple[str, Tensor]]) -> Codec:
        """The part of a codec with `by_layer` that encodes these tensors, which are some of those of `init`."""
        positions = {name: i for i, name in enumerate(self.wholes)}
        return codec.pick([positions[name] for name, _ in tensors])

    def make_room(self, saved: Mapping[str, Any], rank: int, size: int) -> None:
        """Take the exchange whose owners remember something, where "auto" has chosen another for this number of workers."""
        if saved["owner_memory"] is not None and self.owner_memory is None:
            self.exchange, self.owner_memory = ScatterReduce.word, OwnerMemory.of(self.wholes, rank, size, self.shares)

    def adapt(self, part: AdaptiveCodec, comm: Communicator, device: torch.device) -> Observe | None:
        """Update an adaptive codec if it is due. Returns a function that shows it this round's gradients, or None.

        Args:
            part: the adaptive part of the codec.
            comm: connects the workers.
            device: of the gradients.
        """
        step = self.progress.step
        if part.line_share is not None:
            self.meter.begin_round(self.waited_seconds)
        if part.is_due(self.codec, step):
            with self.clock("adapt"):
                line = UNKNOWN if part.line_share is None else self.meter.take(part.line_share)
                own, began = part.statistics(self.codec, step, line).to(device), time.perf_counter()
                statistics = comm.all_gather(own).wait()
                # With so few bytes, nearly all of the time is latency.
                self.meter.add_latency(time.perf_counter() - began)
                learned = part.learn(self.codec, statistics).to(device)
                self.codec_before = copy.deepcopy(self.codec)  # until the round is committed
                part.update(self.codec, comm.broadcast(learned).wait(), step)
        if not part.observes(step):
            return None
        return lambda codec, segments, keys: part.observe(self.codec, codec.reaching(segments, keys), keys)

    @property
    def waited_seconds(self) -> float:
        """Seconds that the training has waited for messages. A phase "blocked" has the waiting in the training's thread alone,
        and decoding too."""
        seconds = self.clock.seconds
        waited = seconds.get("wait", 0.0)
        return min(waited, seconds.get("blocked", waited))

    def arrived(self, flight: PendingExchange, decode_seconds: float) -> None:
        """Note that an exchange has ended, so many seconds ago."""
        arrived = time.perf_counter() - decode_seconds
        self.meter.add(SentMessage(flight.sent, arrived, flight.num_bytes, flight.steps, flight.waited))

    def restore_codec(self) -> None:
        """Forget an update of the adaptive part in a round that is discarded."""
        if self.codec_before is not None:
            self.codec, self.codec_before = self.codec_before, None
