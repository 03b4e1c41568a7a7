"""The contract of a codec that adapts to the gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from ..base import Codec
from ..traits import Traits
from ..types import Key, Symbols


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

    @abstractmethod
    def init_state(self) -> Any:
        """The state before the first round."""

    @abstractmethod
    def at(self, state: Any) -> Codec:
        """The codec of a round; the size of its payload is the same in all rounds."""

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
    def statistics(self, state: Any) -> Tensor:
        """The observations of this worker: a float64 vector of the same length on all workers."""

    @abstractmethod
    def learn(self, state: Any, statistics: Sequence[Tensor]) -> Tensor:
        """The update for the statistics of all workers, in rank order: a float64 vector of fixed length."""

    @abstractmethod
    def update(self, state: Any, learned: Tensor, step: int) -> None:
        """Use `learned` from round `step` on, and clear the observations."""

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        return self.at(self.init_state()).encode_segments(segments, keys, residuals)

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        self.at(self.init_state()).decode_add_segments(payload, outs, weight, keys)

    def segments_nbytes(self, numels: list[int]) -> int:
        return self.at(self.init_state()).segments_nbytes(numels)

    def symbols(self, numels: list[int]) -> Symbols | None:
        return self.at(self.init_state()).symbols(numels)


def adapted(codec: Codec, state: Any) -> Codec:
    """The codec of a round: its adaptive part is replaced by what that part is at `state`."""
    return codec.at(state) if isinstance(codec, AdaptiveCodec) else codec.map(lambda part: adapted(part, state))
