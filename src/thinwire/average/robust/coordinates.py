"""Rules that look at each coordinate alone: the median, and the mean without the extremes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from ... import debug
from ...algorithm import require
from ...codec import Codec, Key
from ...options import require_integer
from ...schedule import Progress, resolve
from .base import Combined, Messages, Rule, mean_of_rows

_SORTED = 1 << 22  # elements that are sorted at once, which takes five times their memory


def has_common_support(codec: Codec) -> bool:
    """Whether all workers send the same coordinates: all of them, or those that a shared key chooses.

    Example:
        >>> import thinwire as tw
        >>> [has_common_support(codec) for codec in (tw.QSGD(bits=4), tw.RandomK(0.1, shared=True), tw.TopK(0.1))]
        [True, True, False]
    """
    codec = resolve(codec, Progress())
    # These codecs choose by magnitude, each worker for itself.
    if codec.traits.sparse is not None:
        return False
    x, key = torch.ones(64, dtype=torch.float32, device="cpu"), Key(0, 0, 0)
    # A support of None means that every element is sent.
    return codec.traits.shared_key or codec.support(codec.encode([x], [key]), [x.numel()], [key]) is None


@dataclass(frozen=True, repr=False)
class CoordinateRule(Rule):
    """A mean of the middle values of each coordinate; the base of `Median` and `TrimmedMean`.

    Args:
        patience: as of `Rule`.
    """

    def check_codec(self, codec: Codec) -> None:
        # With 1 % of the coordinates from each of 8 workers, the median was zero at nearly all of the chosen ones.
        require(
            has_common_support(codec),
            f"{self}: under {codec} workers send different coordinates, so that most are zero at most workers, and so is "
            "the result; use RandomK(shared=True), a dense codec, or a rule such as CenteredClipping",
        )

    @abstractmethod
    def ends(self, messages: Messages) -> int:
        """How many of the k values of a coordinate are dropped at each end."""

    def combine(self, messages: Messages) -> Combined:
        ends, result = self.ends(messages), debug.empty_like(messages.rows[0])
        # One column at least, however many workers there are.
        columns = max(1, _SORTED // len(messages.rows))
        for rows, out in zip(messages.rows.split(columns, -1), result.split(columns), strict=True):
            out.copy_(mean_of_rows(rows.sort(0).values[ends : len(rows) - ends]))
        return Combined(result)


@dataclass(frozen=True, repr=False)
class Median(CoordinateRule):
    """The median of each coordinate over workers; of an even number, the mean of the two in the middle.

    It bears wrong workers as long as they are fewer than half. It is biased where honest workers' values are skewed, or
    where a codec sends few different values.

    Args:
        patience: as of `Rule`.

    Source: Yin et al. 2018, Byzantine-Robust Distributed Learning, arXiv 1803.01498.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.average.robust.base import Messages
        >>> tw.average.Median().combine(Messages(torch.tensor([[1.0], [2.0], [100.0]]), numels=[1])).result
        tensor([2.])
    """

    def ends(self, messages: Messages) -> int:
        return (len(messages.rows) - 1) // 2


@dataclass(frozen=True, repr=False)
class TrimmedMean(CoordinateRule):
    """The mean of each coordinate without its `faulty` smallest and `faulty` largest values.

    Args:
        faulty: m, the number of wrong workers to bear; needs 2m < W. Higher => more of honest workers is dropped. 0 gives
            the mean.
        patience: as of `Rule`.

    Raises:
        ValueError: faulty is not an integer, 0 or more. In `init`: too few workers.

    Source: Yin et al. 2018, Byzantine-Robust Distributed Learning, arXiv 1803.01498.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.average.robust.base import Messages
        >>> rule = tw.average.TrimmedMean(faulty=1)
        >>> rule.combine(Messages(torch.tensor([[1.0], [2.0], [4.0], [100.0]]), numels=[1])).result
        tensor([3.])
    """

    faulty: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("TrimmedMean: faulty", self.faulty, 0)

    @property
    def min_workers(self) -> int:
        return 2 * self.faulty + 1

    def ends(self, messages: Messages) -> int:
        return min(messages.faulty(self.faulty), (len(messages.rows) - 1) // 2)
