"""The contract of an exchange: one call of `Mean.step`, and how what is encoded in it meets.

An exchange is a function of a `Job`. It encodes, and returns `finish(totals, dense_total)`, which adds up what all
workers sent, in rank order, so that every worker computes the same sums in the same order. Both leave holding the mean,
times `job.scale`; `totals` come holding anything, `dense_total` zeroed. It returns whether all of `totals` is finite,
which the decoder knows without reading them again. Before `finish` is called the tensors of the job may be overwritten
by others, and with `keep_residual` they hold what the payload failed to carry once `finish` has returned.

An exchange of one step sends before it returns; one of several issues all of its collectives in `finish`. So they come
from one thread, in the order of the steps, on all workers; a run uses one exchange only.

Message    [dense float32][payload], so that the floats are aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ... import debug, kernels
from ...clock import Clock
from ...codec import Codec, Key, Selection
from ...comm import Communicator
from ...memory import ErrorFeedbackState

Finish = Callable[[list[Tensor], Tensor], bool]
Observe = Callable[[Codec, Sequence[Tensor], Sequence[Key]], None]


@dataclass
class Job:
    """One call of `Mean.step`: what is to meet.

    Args:
        tensors: what is to be encoded; with `keep_residual` contiguous float32 buffers that receive the residual.
        names: their names.
        keys: the random key of each of them.
        merged: whether they are encoded as one segment, with the first key, instead of each for itself.
        keep_residual: whether there is a memory.
        masked: empty, or a contiguous float32 buffer for each tensor that is zeroed wherever something of it was sent.
        selection: what the codec, a sparsifier, selects of `tensors`, if that is known already.
        observe: is shown codec, segments and keys before they are encoded, if a codec is to learn from them.
        dense: float32 vector of what travels unencoded.
        scale: factor by which the mean of what is encoded leaves: memory is unscaled, and gradients are not.
        owner_memory: the memory of a second encoding, for exchanges that encode twice.
        workers_per_node: how many consecutive ranks share a node.
    """

    comm: Communicator
    codec: Codec
    clock: Clock
    tensors: list[Tensor]
    names: list[str]
    keys: list[Key]
    merged: bool
    keep_residual: bool
    dense: Tensor
    scale: float
    owner_memory: ErrorFeedbackState | None = None
    workers_per_node: int = 1
    masked: list[Tensor] = field(default_factory=list)
    selection: Selection | None = None
    observe: Observe | None = None

    def encode(self, parts: Sequence[Tensor], keys: Sequence[Key], masked: Sequence[Tensor] = ()) -> Tensor:
        """The payload of `parts`, from one call to the codec; the residual is left in them if it is kept.

        `masked`, if not empty, is zeroed wherever something was sent.
        """
        with self.clock("encode"):
            if not parts:
                return torch.empty(0, dtype=torch.uint8, device=self.dense.device)
            segments = [flatten(parts, self.dense.device)] if self.merged else list(parts)
            keys = keys[: len(segments)]
            codec = self.codec if self.selection is None else self.codec.with_selection(self.selection)
            if self.observe is not None:
                self.observe(codec, segments, keys)
            payload = codec.encode(segments, keys, segments if self.keep_residual else None)
            if self.merged and self.keep_residual:
                torch._foreach_copy_(list(parts), split_like(segments[0], parts))
            if masked:
                self._mask(payload, keys, masked)
            return payload

    def _mask(self, payload: Tensor, keys: Sequence[Key], masked: Sequence[Tensor]) -> None:
        segments = [flatten(masked, payload.device)] if self.merged else [m.view(-1) for m in masked]
        sent = self.selection or self.codec.support(payload, [s.numel() for s in segments], list(keys))
        if sent is None:  # the codec sends every element
            torch._foreach_zero_(list(masked))
            return
        kernels.scatter.clear(segments, sent.indices, sent.counts)
        if self.merged:
            torch._foreach_copy_(list(masked), split_like(segments[0], masked))

    def decode(self, payloads: Sequence[Tensor], parts: Sequence[Tensor], weight: float, keys: Sequence[Key]) -> bool:
        """`parts` become `weight` times the sum of the payloads, added in their order; returns whether all is finite.

        What a codec that `votes` makes of that sum stands for the mean. Where the codec has a `shared_key`, `keys` are
        those that the parts were encoded with.
        """
        with self.clock("decode"):
            if not parts:
                return True
            numel = sum(part.numel() for part in parts)
            segments = [debug.empty(numel, device=self.dense.device)] if self.merged else list(parts)
            votes = self.codec.votes
            finite = self.codec.decode_sum(payloads, segments, 1.0 if votes else weight, keys[: len(segments)])
            if votes:
                self.codec.combine(segments)
                torch._foreach_mul_(segments, weight * len(payloads))
                finite = kernels.all_finite(segments)
            if self.merged:
                torch._foreach_copy_(list(parts), split_like(segments[0], parts))
            return finite

    def message_nbytes(self, parts: Sequence[Tensor], dense: Tensor) -> int:
        """Size of the message of a dense vector and encoded parts: a bound where the codec's size is not fixed."""
        return message_nbytes(self.codec, [p.shape for p in parts], dense.numel(), self.merged)


def message_nbytes(codec: Codec, shapes: Sequence[torch.Size], dense_numel: int, merged: bool) -> int:
    """Size of one message, whose parts are encoded as one segment or each for itself."""
    if not shapes:
        return 4 * dense_numel
    return codec.nbytes([sum(s.numel() for s in shapes)] if merged else list(shapes)) + 4 * dense_numel


def pack(dense: Tensor, payload: Tensor) -> Tensor:
    """The message of a dense float32 vector and a payload."""
    return torch.cat([dense.view(torch.uint8), payload]) if dense.numel() else payload


def unpack(message: Tensor, dense_numel: int) -> tuple[Tensor, Tensor]:
    """The dense vector and the payload of a message."""
    return message[: 4 * dense_numel].view(torch.float32), message[4 * dense_numel :]


def flatten(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """A new float32 vector of all elements."""
    if not parts:
        return torch.empty(0, device=device)
    return torch.cat([t.reshape(-1).to(torch.float32) for t in parts])


def split_like(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Views of consecutive pieces of `flat`, in the shapes of `parts`."""
    pieces = flat.split([p.numel() for p in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
