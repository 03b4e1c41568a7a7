"""Top-k: the largest magnitudes, selected exactly or by a threshold estimated from a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import require
from ...options import require_number
from ...schedule import Schedule
from ..dense.cast import Identity
from ..traits import Traits
from ..types import Selection, number
from .base import Sparsifier, check_ratio
from .payload import SparseParts, with_length, without_length

# From Deep Gradient Compression: the fewest coordinates, in units of k, and how the threshold is lowered.
_TOO_FEW, _LOWER_BY, _MAX_ROUNDS = 0.8, 0.8, 10


@dataclass(frozen=True, repr=False)
class TopK(Sparsifier):
    """Keeps the `k = max(1, ceil(ratio * n))` largest magnitudes of each segment, exactly k, ties by lowest index.

    Biased: use it with a memory such as `ErrorFeedback`. Check: `|x - C(x)|^2 <= (1 - k/n) |x|^2`. An index costs about
    `log2(1/ratio) + 2` bits: 12 at ratio 0.001, 8.6 at 0.01.

    With `sample` it keeps 0.8 k to k coordinates: those that reach a threshold, estimated as in Deep Gradient Compression.

        1. sample     every (1/sample)-th element from a random start, at least 2/ratio of them
        2. estimate   the threshold: the ceil(ratio * num_samples)-th largest magnitude of the sample
        3. select     all elements that reach it
        4. adapt      more than k: keep the k largest of them; fewer than 0.8 k: multiply the threshold by 0.8 and
                      repeat step 3, ten times at most

    The exact selection is about as fast here; use `sample` to compare with the published method.

    Args:
        ratio: fraction of the coordinates that is kept, in (0, 1]; lower => smaller messages.
        sample: fraction of the elements that is sampled, in (0, 1]; None selects exactly. With a sample the size of the
            payload depends on the data.
        indices: "fixed" codes indices in a size that n and k determine. "auto" also tries packed gaps and takes the
            smallest code, so the size depends on the data.

    Raises:
        ValueError: a field out of range.

    Source: Aji and Heafield 2017, arXiv 1704.05021; Stich et al. 2018, arXiv 1809.07599; for `sample` Lin et al. 2018,
    Deep Gradient Compression, arXiv 1712.01887.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.TopK(ratio=0.001)
        >>> codec.nbytes(1_000_000)  # a thousand float32 values and 11.95 bits for each index
        5495
    """

    ratio: float | Schedule
    sample: float | None = None
    indices: str = "fixed"

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)
        require_number(
            "TopK: sample", self.sample, above=0, most=1, or_none=True, hint="; 0.01 samples one in a hundred"
        )
        require(self.indices in ("fixed", "auto"), f"TopK: indices must be 'fixed' or 'auto', got {self.indices!r}")

    @property
    def cautions(self) -> list[str]:
        return [f"{self} sends every element; write TopK(0.01) for 1 % of them"] if self.ratio == 1 else []

    @property
    def counts_travel(self) -> bool:
        return self.sample is not None

    @cached_property
    def traits(self) -> Traits:
        fixed_size = self.sample is None and self.indices == "fixed"
        sparse = SparseParts(self, self, Identity(), is_topk=self.sample is None)
        lossless = self.ratio == 1 and self.sample is None  # a sample may leave out some of all
        return Traits(lossless=lossless, fixed_size=fixed_size, sparse=sparse)

    @property
    def codes_plainly(self) -> bool:
        return self.indices == "fixed"

    def count(self, numel: int) -> int:
        return num_kept(self.ratio, numel)

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        targets = [num_kept(self.ratio, s.numel()) for s in segments]
        if self.sample is None:
            return Selection(*kernels.select.topk(segments, targets), targets)
        thresholds = sampled_thresholds(segments, keys, targets, self.sample)
        return _adapted(segments, thresholds, targets)

    def pack_indices(self, indices: Tensor, counts: list[int], numels: list[int]) -> Tensor:
        if self.indices == "fixed":
            return super().pack_indices(indices, counts, numels)
        # Which code is smallest depends on the data, so the length travels.
        return with_length(kernels.smallest.encode(indices, counts, numels))

    def unpack_indices(self, payload: Tensor, counts: list[int], numels: list[int]) -> tuple[Tensor, int]:
        if self.indices == "fixed":
            return super().unpack_indices(payload, counts, numels)
        codes, nbytes = without_length(self, payload)
        return kernels.smallest.decode(codes, counts, numels), nbytes

    def indices_nbytes(self, counts: list[int], numels: list[int]) -> int:
        # 4 for the length, and a byte a segment that names its code.
        return super().indices_nbytes(counts, numels) + (4 + len(counts)) * (self.indices == "auto")


@lru_cache(maxsize=4096)
def num_kept(ratio: float | Schedule, numel: int) -> int:
    """`ceil(ratio * numel)`, and at least one unless `numel` is zero."""
    # The factor keeps binary rounding from adding a coordinate: 0.07 * 100 is 7.000000000000001.
    return min(numel, max(1, math.ceil(number(ratio) * numel * (1 - 1e-12))))


def sampled_thresholds(segments: list[Tensor], keys: list[int], targets: list[int], sample: float) -> list[float]:
    """For each segment a magnitude that about `targets[i]` elements reach, estimated from a strided sample."""
    samples = [_sample(x, key, k, sample) for x, key, k in zip(segments, keys, targets, strict=True)]
    counts = [math.ceil(k / max(1, x.numel()) * s.numel()) for x, k, s in zip(segments, targets, samples, strict=True)]
    _, largest = kernels.select.topk(samples, counts)
    # NaN counts as the largest magnitude; as an infinite threshold it still selects NaN.
    return [float(v.abs().nan_to_num(torch.inf, torch.inf).min()) if v.numel() else 0.0 for v in largest.split(counts)]


def _sample(x: Tensor, key: int, target: int, sample: float) -> Tensor:
    wanted = max(math.ceil(sample * x.numel()), math.ceil(2 * x.numel() / max(1, target)))
    if wanted >= x.numel():
        return x
    stride = x.numel() // wanted
    stride -= stride % 2 == 0  # odd, so that it visits all columns of a matrix of even width
    return x[key % stride :: stride].contiguous()


def _adapted(segments: list[Tensor], thresholds: list[float], targets: list[int]) -> Selection:
    indices, values, counts = kernels.select.above(segments, thresholds)
    parts = [list(indices.split(counts)), list(values.split(counts))]
    for i, x in enumerate(segments):
        for _ in range(_MAX_ROUNDS):
            if counts[i] >= _TOO_FEW * targets[i]:
                break
            thresholds[i] *= _LOWER_BY
            parts[0][i], parts[1][i], (counts[i],) = kernels.select.above([x], [thresholds[i]])
        if counts[i] > targets[i]:
            at, parts[1][i] = kernels.select.topk([parts[1][i]], [targets[i]])
            parts[0][i], counts[i] = parts[0][i][at.long()], targets[i]
    return Selection(torch.cat(parts[0]), torch.cat(parts[1]), counts)
