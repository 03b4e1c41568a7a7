"""Adaptive levels: stochastic quantization to levels that are fitted to the gradients while training.

The model of coordinates divided by their bucket's norm is a truncated normal, or a mixture of them. In the round before
an update, each worker measures the moments of the segments that it encodes. In the update, workers pool these moments
and search for the levels of least expected error. Between updates the codec is an ordinary `Quantize`. All workers know
the levels, so a payload does not contain them.

Source: Faghri et al. 2020, Adaptive Gradient Quantization for Data-Parallel SGD, arXiv 2010.12460.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ...algorithm import require
from ...membership import Form, State, restart, shared
from ...options import require_choice, require_integer, require_number
from ..quantize.checks import check_buckets
from ..quantize.levels import Quantize
from ..traits import Traits
from ..types import Key
from .base import UNKNOWN, AdaptiveCodec, LineMeasurement
from .distributions import TruncatedNormalMixture
from .level_search import alq, alq_gd, amq
from .level_sets import exponential_levels, fixed_multiplier
from .statistics import BucketStatistics, mixture, pooled, prior, sample_buckets

SAMPLE = Form(
    lambda state, sample: {stream: stats.to_tensor() for stream, stats in sample.items()},
    # `torch.distributed.checkpoint` turns keys into text.
    lambda state, sample, saved: {
        int(stream): BucketStatistics.from_tensor(flat.cpu()) for stream, flat in saved.items()
    },
)


@dataclass
class LevelState(State):
    """The state of adaptive levels.

    Attributes:
        learned: float64; the levels (ALQ), each exactly a float32 number, or the multiplier (AMQ).
        last_update: step of the last update, even if it changed nothing; 0 before the first.
        sample: statistics of every segment encoded in the round before an update. The keys are the streams of random
            keys, so they do not depend on DDP's buckets, and a repeated round overwrites its statistics. A worker that
            joins has none.
    """

    learned: Tensor = shared()
    last_update: int = shared(default=0)
    sample: dict[int, BucketStatistics] = restart(form=SAMPLE, default_factory=dict)

    def make_room(self, saved: Mapping[str, Any], rank: int, size: int) -> None:
        """From another number of workers, take the sample of one for that of all."""
        self.sample = SAMPLE.load(self, self.sample, saved["sample"])


@dataclass(frozen=True, repr=False)
class AdaptiveLevels(AdaptiveCodec):
    """The base of ALQ and AMQ: when levels are updated, and from which statistics."""

    bits: int = 3
    bucket_size: int = 8192
    norm: str = "l2"
    distribution: str = "mixture"
    weighting: str = "norm"
    num_buckets: int = 350
    zero: bool = False
    update_steps: tuple[int, ...] = (100, 2000)
    update_every: int | None = 10000

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_integer(f"{name}: bits", self.bits, 2, 8, hint="; levels are fitted for one number of bits")
        check_buckets(name, self.bucket_size, self.norm)
        for option, allowed in (("distribution", ("mixture", "pooled")), ("weighting", ("norm", "norm2"))):
            require_choice(f"{name}: {option}", getattr(self, option), allowed)
        require_integer(f"{name}: num_buckets", self.num_buckets, 1)
        object.__setattr__(self, "update_steps", tuple(self.update_steps))
        every = [] if self.update_every is None else [self.update_every]
        require(
            all(isinstance(step, int) and step >= 1 for step in (*self.update_steps, *every)),
            f"{name}: update_steps and update_every must be positive integers, got {self.update_steps} and "
            f"{self.update_every!r}; the first round has no gradients to learn from",
        )

    @cached_property
    def traits(self) -> Traits:
        return Traits(unbiased=True, bucket_size=self.bucket_size, adaptive=self)

    def _start_multiplier(self) -> float:
        return _multiplier_for(self.bits, self.bucket_size, self.norm, self.zero)

    @abstractmethod
    def _start(self) -> Tensor:
        """The value of `LevelState.learned` before the first update."""

    @abstractmethod
    def _search(self, learned: Tensor, dist: TruncatedNormalMixture) -> Tensor:
        """The new value of `learned` for this distribution."""

    @abstractmethod
    def _levels(self, learned: Tensor) -> Tensor:
        """The level set, float64, from -1 to 1."""

    def init_state(self, shapes: Mapping[str, torch.Size] | None = None) -> LevelState:
        return LevelState(self._start())

    def at(self, state: LevelState) -> Quantize:
        return Quantize(tuple(self._levels(state.learned).float().tolist()), self.bucket_size, self.norm)

    def observes(self, step: int) -> bool:
        return self._updates_at(step + 1)

    def observe(self, state: LevelState, segments: Sequence[Tensor], keys: Sequence[Key]) -> None:
        for x, key in zip(segments, keys, strict=True):
            state.sample[key.stream] = self._statistics_of(x)

    def _statistics_of(self, x: Tensor) -> BucketStatistics:
        is_mixture = self.distribution == "mixture"
        stats = sample_buckets(x, self.bucket_size, self.norm, self.num_buckets, largest=is_mixture)
        if is_mixture:
            return stats.largest(min(self.num_buckets, stats.norms.numel()))
        # The sample stands for the whole segment, so that segments count by their sizes.
        merged = stats.merged()  # one entry for the whole segment
        return merged._replace(counts=merged.counts * (x.numel() / max(1.0, stats.counts.sum().item())))

    def is_due(self, state: LevelState, step: int) -> bool:
        return self._updates_at(step) and state.last_update != step

    def _updates_at(self, step: int) -> bool:
        periodic = self.update_every is not None and step > 0 and step % self.update_every == 0
        return periodic or step in self.update_steps

    def statistics(self, state: LevelState, step: int = 0, line: LineMeasurement = UNKNOWN) -> Tensor:
        # First in the list, so that a worker without a sample also sends statistics, all zero.
        nothing = BucketStatistics(*[torch.zeros(0, dtype=torch.float64, device="cpu")] * 4)
        # Sorted: the order in which segments were encoded must not matter.
        stats = BucketStatistics.concatenate([nothing, *(state.sample[stream] for stream in sorted(state.sample))])
        return (stats.largest(self.num_buckets) if self.distribution == "mixture" else stats.merged()).to_tensor()

    def learn(self, state: LevelState, statistics: Sequence[Tensor]) -> Tensor:
        stats = BucketStatistics.concatenate([BucketStatistics.from_tensor(flat.cpu()) for flat in statistics])
        if not stats.informative:  # all buckets are zero or not finite
            return state.learned.clone()
        is_mixture = self.distribution == "mixture"
        dist = mixture(stats, self.num_buckets, self.weighting) if is_mixture else pooled(stats)
        found = self._search(state.learned, dist)
        # Under a distribution that is nearly a point mass, levels may become equal in float32.
        distinct = (self._levels(found).float().diff() > 0).all()
        return found if distinct else state.learned.clone()

    def update(self, state: LevelState, learned: Tensor, step: int) -> None:
        state.learned, state.last_update = learned.to("cpu", torch.float64), step
        state.sample.clear()


@dataclass(frozen=True, repr=False)
class ALQ(AdaptiveLevels):
    r"""Adaptive level quantization: an update moves all levels so that the expected error of the gradients is least.

    Coordinates are rounded as by `Quantize`, so the codec is unbiased with any levels. The expected squared error is

        sum over buckets of norm^2 d Psi(l)
        Psi(l) = sum_j integral over [l_j, l_{j+1}] of (l_{j+1}-r)(r-l_j) f(r) dr

    where f is the density of a bucket's d coordinates divided by its norm. The model of f is a mixture of truncated
    normals, one for each of the buckets of largest norm of all workers. `distribution="pooled"` uses one truncated
    normal for all coordinates; this is the variant ALQ-N. The search is coordinate descent: each level moves to its
    exact optimum given its neighbours. It starts from the present, uniform, exponential and quantile levels.
    `search="gradient"` moves all levels at once by clipped gradient steps; this is the variant ALQ-GD.

    The first levels are `+-p^j`, with the p that suits buckets of normal numbers. (The paper starts with p = 1/2. With
    the defaults here, the squared error would then be 120 times the gradient's square, which can ruin a network before
    the first update.) In `Mean`, the rounds `update_steps` and every multiple of `update_every` begin with an update
    from the segments encoded in the round before. It costs one all-gather of 32 `num_buckets` bytes (pooled: 32) and a
    broadcast. Statistics that are all zero or not finite leave the levels unchanged. Outside of `Mean`, the codec keeps
    the first levels.

    Args:
        bits: bits an element, 2 to 8; lower => smaller messages, more noise.
        bucket_size: elements that share a norm; larger => fewer scale bytes (4 a bucket), more noise.
        norm: "l2" as in the paper, or "max", the largest magnitude, which suits few bits and small buckets.
        distribution: "mixture", or "pooled" for ALQ-N.
        search: "coordinate", or "gradient" for ALQ-GD.
        weighting: weights of the mixture's components: "norm" as in the paper, or "norm2", the squared norm, with which
            Psi is the error of the gradient.
        num_buckets: components of the mixture (20 to 350 in the paper), and buckets sampled of each tensor; higher =>
            closer to the gradients, slower updates.
        symmetric: whether the negative of each level is a level.
        zero: whether zero is a level. Without it there are `2^bits` levels, as in the paper. With it there are
            `2^bits - 1` levels, and zeros stay zeros.
        update_steps: rounds that begin with an update; 100 and 2000 in the paper.
        update_every: also update in every multiple of this round, 10000 in the paper; None for no more updates.

    Raises:
        ValueError: a field out of range.

    Source: Faghri et al. 2020, arXiv 2010.12460.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     averager = tw.Mean(tw.ALQ(bits=2, norm="max", update_steps=(1,)))
        ...     x = torch.randn(100, 100, generator=torch.Generator().manual_seed(comm.rank))
        ...     state = averager.init([("x", x)], comm)
        ...     for _ in range(2):
        ...         averager.step(state, [("x", x.clone())], comm).wait()
        ...         averager.commit(state)
        ...     return [round(level, 2) for level in averager.current_codec(state).levels]
        >>> tw.LocalWorld(2).run(worker)
        [[-1.0, -0.21, 0.21, 1.0], [-1.0, -0.21, 0.21, 1.0]]
    """

    search: str = "coordinate"
    symmetric: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("ALQ: search", self.search, ("coordinate", "gradient"))

    def _start(self) -> Tensor:
        return exponential_levels(self.bits, self._start_multiplier(), self.zero)

    def _search(self, learned: Tensor, dist: TruncatedNormalMixture) -> Tensor:
        search = alq if self.search == "coordinate" else alq_gd
        # Quantizers take float32 levels, so these are kept as exactly such numbers.
        return search(learned, dist, self.symmetric).float().double()

    def _levels(self, learned: Tensor) -> Tensor:
        return learned


@dataclass(frozen=True, repr=False)
class AMQ(AdaptiveLevels):
    """Adaptive multiplier quantization: levels `+-p^j`, where only p adapts.

    Like `ALQ`, but gradient descent on `log Psi(p)` finds p, from p = 0.1, 0.2, ..., 0.9 and the present p.
    `distribution="pooled"` is the variant AMQ-N.

    Args:
        bits, bucket_size, norm, distribution, weighting, num_buckets, zero, update_steps, update_every: as in `ALQ`.
        multiplier: p before the first update, in (0, 1); None for the p that suits buckets of normal numbers.

    Raises:
        ValueError: a field out of range.

    Source: Faghri et al. 2020, arXiv 2010.12460.

    Example:
        >>> import thinwire as tw
        >>> codec = tw.AMQ(bits=2, multiplier=0.25)
        >>> codec.at(codec.init_state()).levels
        (-1.0, -0.25, 0.25, 1.0)
    """

    multiplier: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("AMQ: multiplier", self.multiplier, above=0, below=1, or_none=True)
        self.at(self.init_state())  # refuses levels that are not distinct

    def _start(self) -> Tensor:
        multiplier = self._start_multiplier() if self.multiplier is None else self.multiplier
        return torch.tensor([multiplier], dtype=torch.float64, device="cpu")

    def _search(self, learned: Tensor, dist: TruncatedNormalMixture) -> Tensor:
        return torch.tensor([amq(learned.item(), dist, self.bits, self.zero)], dtype=torch.float64, device="cpu")

    def _levels(self, learned: Tensor) -> Tensor:
        return exponential_levels(self.bits, learned.squeeze(), self.zero)


@lru_cache
def _multiplier_for(bits: int, bucket_size: int, norm: str, zero: bool) -> float:
    return fixed_multiplier(prior(bucket_size, norm), bits, zero)
