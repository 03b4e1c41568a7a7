"""What changes while `Mean` runs."""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...algorithm import require
from ...clock import Clock
from ...codec import AdaptiveCodec, Key
from ...comm import Communicator
from ...kernels import Flag
from ...memory import ErrorFeedbackState
from ...schedule import Progress
from .exchange import Observe, PendingExchange


@dataclass
class MeanState:
    """The state of `Mean`: what rounds change, and the exchange that `init` chose.

    Attributes:
        seed: the seed of all random numbers of the run.
        memory: the state of `Mean.memory`; None without a memory.
        exchange: the exchange of all rounds and buckets; never "auto".
        workers_per_node: how many consecutive ranks share a node.
        owner_memory: what the second encoding of `scatter_reduce` lost; None without one.
        owner: rank and number of workers that `owner_memory` was cut for.
        codec: the state of the codec's adaptive part; None if nothing adapts.
        codec_before: a copy from before this round's update of it, in case the round is discarded.
        flights: the exchanges that were begun and not yet finished, in their order.
        progress: rounds so far, and the epoch as the training loop counts it.
        finite: whether all results of the round so far were finite.
    """

    seed: int
    memory: Any
    exchange: str
    workers_per_node: int = 1
    owner_memory: ErrorFeedbackState | None = None
    owner: tuple[int, int] = (0, 1)
    codec: Any = None
    codec_before: Any = None
    flights: list[PendingExchange] = field(default_factory=list)
    progress: Progress = Progress()
    finite: Flag = True
    clock: Clock = field(default_factory=Clock)

    def key(self, name: str, rank: int) -> Key:
        """The random key of a tensor on one worker in this round; it does not depend on the bucket.

        Under a `shared_key` all workers pass rank 0.
        """
        return Key(self.seed, zlib.crc32(name.encode()) | rank << 32, self.progress.step)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, keyed by parameter name. Memory differs between workers, so each saves its own."""
        memories = {name: None if m is None else m.state_dict() for name, m in self._memories().items()}
        return {"step": self.progress.step, "epoch": self.progress.epoch} | memories

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the saved state is of another averager or model.
        """
        if saved["owner_memory"] is not None and "exchange" in saved:
            self._follow(saved["owner_memory"], saved["exchange"])
        elif saved["owner_memory"] is None and self.owner_memory is not None:
            zeros = {name: torch.zeros_like(t) for name, t in self.owner_memory.residual.items()}
            saved = saved | {"owner_memory": zeros}
        for name, memory in self._memories().items():
            require(
                (saved[name] is None) == (memory is None),
                f"only one of the saved state and this averager has {name}; use the averager it was saved with",
            )
            if memory is not None:
                memory.load_state_dict(saved[name])
        self.progress = Progress(saved["step"], saved["epoch"])

    def _follow(self, owner_memory: dict[str, Tensor], exchange: str) -> None:
        """Take the exchange that owners remember something for, where "auto" has chosen another on more or fewer workers."""
        if self.owner_memory is None:
            residual, spare = ({name: torch.zeros_like(t) for name, t in owner_memory.items()} for _ in range(2))
            self.exchange, self.owner_memory = exchange, ErrorFeedbackState(residual, spare)

    def adapt(self, part: AdaptiveCodec, comm: Communicator, device: torch.device) -> Observe | None:
        """Update an adaptive codec if it is due. Returns a function that shows it this round's gradients, or None.

        Args:
            part: the adaptive part of the codec.
            comm: connects the workers.
            device: of the gradients.
        """
        step = self.progress.step
        if part.is_due(self.codec, step):
            with self.clock("adapt"):
                statistics = comm.all_gather(part.statistics(self.codec).to(device)).wait()
                learned = part.learn(self.codec, statistics).to(device)
                self.codec_before = copy.deepcopy(self.codec)  # until the round is committed
                part.adopt(self.codec, comm.broadcast(learned).wait(), step)
        if not part.observes(step):
            return None
        return lambda codec, segments, keys: part.observe(self.codec, codec.reaching(segments, keys), keys)

    def restore_codec(self) -> None:
        """Forget an update of the adaptive part in a round that is discarded."""
        if self.codec_before is not None:
            self.codec, self.codec_before = self.codec_before, None

    def _memories(self) -> dict[str, Any]:
        return {"memory": self.memory, "owner_memory": self.owner_memory, "codec": self.codec}
