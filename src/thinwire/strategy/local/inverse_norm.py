"""Weighted means of pseudo-gradients: small changes count more, and outliers do not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from ...algorithm import Algorithm
from ...comm import Communicator
from ...membership import State, shared
from ...options import require_number
from ...streams import uploaded

_MIN_ROUNDS = 5  # the deviation of fewer norms says little


@dataclass
class NormStatistics(State):
    """Running mean and variance of the norms of one worker's changes in one fragment.

    With another number of workers those of one stand for all.

    Attributes:
        rounds: how many norms were counted.
        num_dropped: how many rounds this worker did not count in.
    """

    mean: float = shared(default=0.0)
    variance: float = shared(default=0.0)
    rounds: int = shared(default=0)
    num_dropped: int = shared(default=0)


@dataclass(frozen=True, repr=False)
class InverseNorm(Algorithm):
    """Weighs each worker's change by the inverse of its norm, and drops outliers, in `local_updates(weights=...)`.

        u_i = 1 / |g_i|,  or 0 for an outlier;    w_i = u_i / sum_j u_j;    result = sum_i w_i g_i

    A worker's change is an outlier if its norm is more than `outlier` standard deviations above the running mean of that
    worker's own earlier norms in the same fragment. An infinite norm is one too, and so is a change of zero. If all are
    outliers, the result is zero. Workers exchange 8 bytes each per fragment and round.

    Args:
        outlier: in standard deviations; lower => drops more. None drops nothing, and an infinite change then makes the
            round fail on all workers, as without weights.
        decay: of the running mean and variance, in [0, 1); higher => a longer memory of norms.

    Raises:
        ValueError: a value out of range.

    Source: Cheng et al. 2024, EDiT, arXiv 2412.07210.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     g = torch.tensor([1.0, 3.0][comm.rank])
        ...     is_finite = tw.strategy.InverseNorm().scale([g], NormStatistics(), comm)
        ...     return g.item()
        >>> tw.LocalWorld(2).run(worker)  # the mean is 3/4 * 1 + 1/4 * 3
        [1.5, 1.5]
    """

    outlier: float | None = 3.0
    decay: float = 0.9

    def __post_init__(self) -> None:
        require_number("InverseNorm: outlier", self.outlier, above=0, or_none=True)
        require_number("InverseNorm: decay", self.decay, least=0, below=1)

    def scale(self, changes: Sequence[Tensor], statistics: NormStatistics, comm: Communicator) -> bool:
        """Multiply this worker's changes by `W w_i`, in place, so that the mean over workers is the weighted mean.

        Args:
            changes: float tensors of any shapes; together one vector.
            statistics: of this worker and fragment; updated.
            comm: connects the workers; all call this together.

        Returns:
            Whether they were finite.
        """
        # In float64, where the squares of float32 values do not overflow.
        norm = float(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in changes]).norm())
        is_outlier = self._is_outlier(norm, statistics)
        own = 0.0 if is_outlier else 1.0 / norm
        shares = comm.all_gather(uploaded(changes[0].device, [own], torch.float64)).wait()
        total = sum(torch.cat(shares).tolist())  # in one read of a GPU
        factor = comm.size * own / total if total else 0.0
        for g in changes:
            if is_outlier:
                g.zero_()  # also where it is infinite
            else:
                g.mul_(factor)
        statistics.num_dropped += is_outlier
        # Outliers leave the statistics alone, as in EDiT's code for DDP; its code for FSDP counts them.
        if not is_outlier and isfinite(norm):
            self._count(norm, statistics)
        return isfinite(norm)

    def _is_outlier(self, norm: float, statistics: NormStatistics) -> bool:
        # Its weight, the inverse of the norm, would be infinite.
        if norm == 0:
            return True
        if self.outlier is None:
            return False
        limit = statistics.mean + self.outlier * sqrt(statistics.variance)
        return not isfinite(norm) or (statistics.rounds >= _MIN_ROUNDS and norm > limit)

    def _count(self, norm: float, statistics: NormStatistics) -> None:
        """Exponential means, which begin as plain ones."""
        statistics.rounds += 1
        share = max(1.0 / statistics.rounds, 1.0 - self.decay)
        difference = norm - statistics.mean
        statistics.mean += share * difference
        statistics.variance = (1.0 - share) * (statistics.variance + share * difference**2)
