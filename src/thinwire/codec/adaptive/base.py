"""The contract of a codec that adapts to the gradients."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base import Codec
from ..traits import Traits
from ..types import Key, Symbols


class LineMeasurement(NamedTuple):
    """What a worker sees of the line: `thinwire.average.mean.line_meter` measures it.

    Attributes:
        rate: bytes a second that the line carries.
        slack: seconds that there are for each byte that the worker sends in a round.
        waited: for the line, over what may be waited.
    """

    rate: float
    slack: float
    waited: float


UNKNOWN = LineMeasurement(math.nan, math.nan, math.nan)


class AdaptiveCodec(Codec):
    """A codec that learns from gradients; between two updates it is the pure codec `at(state)`.

    The averager keeps the state, a `thinwire.membership.State`. If `observes(step)`, the averager calls
    `observe` with all segments that it encodes in that round. If `is_due(state, step)`, the round begins with an update:
    workers exchange their `statistics`, each calls `learn`, and all `update` to the result of rank 0. So all workers hold the
    same bits, even if their processors compute `exp` differently. Outside of an averager the codec is never updated.
    """

    @cached_property
    def traits(self) -> Traits:
        return Traits(adaptive=self)

    @property
    def needs_memory(self) -> bool:
        """Whether a memory must keep what it loses."""
        return False

    @property
    def line_share(self) -> float | None:
        """The share of a round that may wait for the line, for a codec that follows it; None for others."""
        return None

    def _named_parts(self) -> dict[str, Codec | tuple[Codec, ...]]:
        return {}  # codecs in its fields are what it chooses from

    def settings(self) -> tuple[Codec, ...]:
        """Codecs that a plan may put in its place, those of the most bytes first; empty if it cannot be planned."""
        return ()

    @abstractmethod
    def init_state(self, shapes: Mapping[str, torch.Size] | None = None) -> Any:
        """The state before the first round.

        Args:
            shapes: of each tensor that is encoded, by name; None outside of an averager.
        """

    @abstractmethod
    def at(self, state: Any) -> Codec:
        """The codec of a round; the size of its payload is the same in all rounds, unless it has the trait `by_layer`."""

    @abstractmethod
    def observes(self, step: int) -> bool:
        """Whether the averager must call `observe` with the segments of round `step`."""

    @abstractmethod
    def observe(self, state: Any, segments: Sequence[Tensor], keys: Sequence[Key]) -> None:
        """Sample the segments of a round before they are encoded; changes only the state.

        The segments have any shape and any float type.
        """

    @abstractmethod
    def is_due(self, state: Any, step: int) -> bool:
        """Whether round `step` must begin with an update, and that update is not made yet."""

    @abstractmethod
    def statistics(self, state: Any, step: int = 0, line: LineMeasurement = UNKNOWN) -> Tensor:
        """The observations of this worker: a float64 vector of the same length on all workers.

        Args:
            state: of this worker.
            step: the round that begins.
            line: of the rounds since the last update; unknown unless `line_share` is a number.
        """

    @abstractmethod
    def learn(self, state: Any, statistics: Sequence[Tensor]) -> Tensor:
        """The update for the statistics of all workers, in rank order: a float64 vector, as long on all workers."""

    @abstractmethod
    def update(self, state: Any, learned: Tensor, step: int) -> None:
        """Use `learned` from round `step` on, and clear the observations."""

    def diagnostics(self, state: Any) -> dict[str, float]:
        """What it has chosen, by name."""
        return {}

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        codec = self.at(self.init_state())
        return codec.encode_segments(codec.seen(segments), keys, None if residuals is None else codec.seen(residuals))

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        codec = self.at(self.init_state())
        codec.decode_add_segments(payload, codec.seen(outs), weight, keys)

    def segments_nbytes(self, sizes: list[Any]) -> int:
        return self.at(self.init_state()).nbytes(sizes)

    def symbols(self, numels: list[int]) -> Symbols | None:
        return self.at(self.init_state()).symbols(numels)


def adapted(codec: Codec, state: Any) -> Codec:
    """The codec of a round: its adaptive part is replaced by what that part is at `state`."""
    return codec.at(state) if isinstance(codec, AdaptiveCodec) else codec.map(lambda part: adapted(part, state))
