"""What an averager is, for callers: one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .mean.mean import LoneMessages


@dataclass(frozen=True)
class AveragerTraits:
    """What callers may rely on, and what they must do, for one averager. The defaults suit an averager of gradients.

    Args:
        whole_model: a round must be one call of `step` with all tensors.
        couples_tensors: what a tensor becomes depends on the values of other tensors too.
        needs_names: it only suits models whose parameters have certain names.
        has_momentum: the result carries momentum already, so that the optimizer must not apply its own.
        has_rounds: all workers average at the same time, in rounds; `Pairwise` alone has none.
        gives_one_mean: a round leaves the same mean on all workers; gossip leaves each worker a value of its own.
        suits_parameters: values themselves may be averaged, round after round; lossy codecs suit gradients and changes alone.
        suits_adam: optimizers that divide by the root of mean squares train about as well by it as by dense gradients.
        keeps_mean: gossip keeps the mean over workers; clipping does not.
        mixes_plainly: a round is a weighted mean of neighbours' values alone, with nothing kept of earlier rounds.
        leaves_out_nonfinite: a round continues without a worker whose values are not finite; otherwise no worker commits it.
        period: rounds after which messages have the same sizes again, on a topology that does not change.
        lone_messages: how a worker makes its message without the others, and how any set of messages is merged; None if
            workers must average together.

    Example:
        >>> import thinwire as tw
        >>> tw.Mean().traits.gives_one_mean, tw.Mix().traits.gives_one_mean
        (True, False)
    """

    whole_model: bool = False
    couples_tensors: bool = False
    needs_names: bool = False
    has_momentum: bool = False
    has_rounds: bool = True
    gives_one_mean: bool = True
    suits_parameters: bool = False
    suits_adam: bool = True
    keeps_mean: bool = True
    mixes_plainly: bool = False
    leaves_out_nonfinite: bool = False
    period: int = 1
    lone_messages: LoneMessages | None = None
