"""Step sizes for gossip through a codec, from the graph and from what the codec does to the values at hand.

Every encoding is scaled by the factor that fits it best. For a vector v and its decoding c:

    a = <v, c> / |c|^2            the least-squares factor; the payload is followed by it
    kept = 1 - |v - a c|^2 / |v|^2 = <v, c>^2 / (|v|^2 |c|^2)      in [0, 1]: the share of v that arrives

So every codec contracts, `|v - a c|^2 <= (1 - kept) |v|^2`, even one whose noise exceeds its input, such as 2-bit
quantization of large buckets; CHOCO's and DeepSqueeze's proofs ask for no more. Selections such as top-k have a = 1.

Workers agree on the smallest share, a mean over recent rounds, by `Maxima`. With mu_2 and mu_max the least and the largest
nonzero eigenvalue of `I - P`, the step size is

    step = kept / ((1 - kept) 2 mu_max + kept (mu_2 + mu_max) / 2)

Without loss it is `2 / (mu_2 + mu_max)`, the fastest constant step of uncompressed gossip. With little kept it is
`kept / (2 mu_max)`: a coordinate waits about 1/kept rounds until it is sent, and in that time its neighbours, which do not
see it move, would overshoot with a step of twice that size. Until workers have agreed, the step is zero: the first rounds
measure. A worker that has encoded zeros alone lost nothing, and leaves it to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import debug, kernels
from ...codec import Codec
from ...kernels.scales import float32
from ...membership import State, config, restart
from ...topology import Topology
from ...topology.speed import difference_rates
from .layout import FlatLayout
from .maxima import Maxima

MEMORY = 0.9  # of the running mean of the share that is kept
TRAILER_NBYTES = 8  # the factor of the payload, and the largest loss that the sender knows of
UNKNOWN = -1.0
ZEROS = 2.0  # more than any share, so that it never is the smallest


def step_for(kept: Tensor, slowest: float, fastest: float) -> Tensor:
    """The step size for a codec that keeps this share; see the module's docstring. Zero where the share is not known.

    Args:
        kept: float32 scalar, 1 - (relative squared error).
        slowest: mu_2.
        fastest: mu_max.

    Example:
        >>> [round(step_for(torch.tensor(kept), 0.1953, 1.3333).item(), 4) for kept in (1.0, 0.5, 0.01)]
        [1.3084, 0.2915, 0.0038]
    """
    kept = kept.clamp(0.0, 1.0)
    return kept / ((1.0 - kept) * (2.0 * fastest) + kept * (0.5 * (slowest + fastest)))


@dataclass
class FittedStep(State):
    """What a worker knows about its codec and the others'; all of it lies on the device of the tensors.

    Attributes:
        maxima: the windows in which workers agree.
        kept: running mean of the share that this worker's encodings keep; below 0 if none was measured yet, and above 1 if
            all of them were of zeros.
        step_size: the one in force; the same on all workers.
        factor: a of this round's vector, float32; `fit` sets it.
    """

    maxima: Maxima = restart()
    kept: Tensor = restart()
    step_size: Tensor = restart()
    factor: Tensor = config(init=False, repr=False)

    @classmethod
    def of(cls, topology: Topology, size: int, device: torch.device) -> FittedStep:
        """Nothing measured yet."""
        unknown = float32(UNKNOWN, device)
        return cls(Maxima(topology, size, float32(0.0, device).view(1)), unknown, float32(0.0, device))

    def fit(self, sums: Tensor) -> None:
        """Measure an encoding: sets `factor`, and updates `kept`.

        Args:
            sums: float64 `[<c, c>, <v, c>, <v, v>]` of the vector v and its decoding c. If they are not finite, nothing is
                measured.
        """
        squares, product, size = sums
        finite = squares.isfinite() & size.isfinite()
        # Where nothing can be measured, the payload counts as it is.
        factor = torch.where(finite & (squares > 0), (product / squares).clamp(min=0.0), 1.0).float()
        # With the factor as it is sent, in float32.
        share = (factor.double() * product / size).clamp(0.0, 1.0).float()
        measured = (self.kept > UNKNOWN) & (self.kept < ZEROS)
        mean = torch.where(measured, MEMORY * self.kept + (1.0 - MEMORY) * share, share)
        before = torch.where(finite, torch.where(measured, self.kept, ZEROS), self.kept)
        self.kept.copy_(torch.where(finite & (size > 0), mean, before))
        self.factor = factor

    def with_trailer(self, payload: Tensor, step: int) -> Tensor:
        """The message: the payload, then the factor and what workers are agreeing on, both float32.

        Args:
            payload: uint8, of the vector that was fitted last.
            step: of the round.
        """
        # The smallest share is the largest of the negated ones; an unknown one, -1, keeps the step at zero.
        trailer = torch.cat([self.factor.view(1), self.maxima.sent(-self.kept.view(1), step)])
        return torch.cat([payload, trailer.view(torch.uint8)])

    def agree(self, messages: Mapping[int, Tensor]) -> None:
        """Merge what neighbours sent; at the end of a window, set the step size from it."""
        agreed = self.maxima.received(_trailer(message)[1:] for message in messages.values())
        if agreed is not None:
            rates, smallest = difference_rates(self.maxima.topology, self.maxima.size), -agreed[0]
            self.step_size.copy_(torch.where(smallest < ZEROS, step_for(smallest, *rates), 0.0))

    def diagnostics(self) -> dict[str, float]:
        """The step size in force, and the share of its vectors that this worker's codec keeps."""
        return {"step_size": self.step_size.item(), "kept": min(1.0, max(0.0, self.kept.item()))}


def opened(message: Tensor, fitted: bool) -> tuple[Tensor, float]:
    """The payload of a message, and the sender's factor: the trailer's if the message is `fitted`, else 1.

    Args:
        message: what was sent, with the trailer of `with_trailer` if `fitted`.
        fitted: whether it has one.
    """
    return (message[:-TRAILER_NBYTES], on_host(_trailer(message)[0])) if fitted else (message, 1.0)


def on_host(scalar: Tensor) -> float:
    """The number. 1 while a plan records messages, which have no values."""
    return 1.0 if scalar.is_meta else scalar.item()


def decoded(layout: FlatLayout, codec: Codec, payload: Tensor, factor: float = 1.0) -> tuple[Tensor, kernels.Flag]:
    """What a payload holds times a factor, as a new flat vector, and whether it is finite.

    Args:
        layout: of the vector.
        codec: that encoded it.
        payload: of all tensors together.
        factor: of the payload.
    """
    flat = debug.empty(layout.numel, dtype=torch.float32, device=payload.device)
    finite = codec.decode_sum([payload], layout.split(flat), factor) if layout.names else True
    return flat, finite


def _trailer(message: Tensor) -> Tensor:
    return kernels.payload_as(message[-TRAILER_NBYTES:], torch.float32, "the step size's trailer")
