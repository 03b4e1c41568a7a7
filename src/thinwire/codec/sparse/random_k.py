"""Random-k: the random key determines the coordinates, so no index is sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ... import kernels
from ...schedule import Schedule
from ..traits import Traits
from ..types import Selection
from .base import Sparsifier, check_ratio
from .payload import tail
from .top_k import num_kept


@dataclass(frozen=True, repr=False)
class RandomK(Sparsifier):
    """Keeps `k = max(1, ceil(ratio * n))` coordinates of each segment, chosen uniformly without replacement.

    The choice is a function of the key, and the receiver repeats it. Each worker has its own key and sends it, eight
    bytes a segment, in place of indices. With a `shared` key all workers keep the same coordinates in a step, and other
    ones in the next step. Then only values are sent, and payloads may be added on the wire by an all-reduce.

    By default the codec is biased, with `E|C(x) - x|^2 = (1 - k/n) |x|^2`: use it with a memory such as
    `ErrorFeedback`. With `scaled` it is unbiased, with `E|C(x) - x|^2 = (n/k - 1) |x|^2`, and needs no memory.

    A NaN or infinity is reported even if its coordinate is not chosen: the segment's first value is then sent as NaN.

    Args:
        ratio: fraction of the coordinates that is kept, in (0, 1]; lower => smaller messages.
        shared: whether all workers choose the same coordinates.
        scaled: whether values are multiplied by n/k.

    Raises:
        ValueError: ratio out of range.

    Source: Stich et al. 2018, arXiv 1809.07599; Konecny et al. 2016, arXiv 1610.05492; Wangni et al. 2018, arXiv
    1710.09854.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.RandomK(ratio=0.5, shared=True)
        >>> key = tw.codec.Key(seed=1)
        >>> payload = codec.encode(torch.tensor([1.0, 2.0, 3.0, 4.0]), key)
        >>> payload.numel(), codec.decode(payload, 4, key)
        (8, tensor([1., 0., 3., 0.]))
    """

    ratio: float | Schedule
    shared: bool = False
    scaled: bool = False

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)

    @cached_property
    def traits(self) -> Traits:
        sum_dtype = torch.float32 if self.shared else None
        return Traits(unbiased=self.scaled or self.ratio == 1, shared_key=self.shared, sum_dtype=sum_dtype)

    def count(self, numel: int) -> int:
        return num_kept(self.ratio, numel)

    def gains(self, numels: list[int]) -> list[float] | None:
        gains = [n / self.count(n) if self.scaled and n else 1.0 for n in numels]
        return None if all(gain == 1.0 for gain in gains) else gains

    def select(self, segments: list[Tensor], keys: list[int]) -> Selection:
        numels = [s.numel() for s in segments]
        counts = [self.count(n) for n in numels]
        indices = kernels.permutation.random_indices(keys, counts, numels, segments[0].device if segments else "cpu")
        values = kernels.scatter.gather_marked(segments, indices, counts)
        return Selection(indices, values, counts)

    def write_support(self, indices: Tensor, counts: list[int], numels: list[int], keys: list[int]) -> Tensor:
        if self.shared:
            return torch.empty(0, dtype=torch.uint8, device=indices.device)
        return kernels.random.keys_on(keys, indices.device).view(torch.uint8)

    def read_support(self, payload: Tensor, numels: list[int], keys: list[int]) -> tuple[Tensor, list[int], int]:
        counts = [self.count(n) for n in numels]
        nbytes = self.support_nbytes(counts, numels)
        used = keys if self.shared else kernels.payload_as(tail(payload, nbytes), torch.int64)
        return kernels.permutation.random_indices(used, counts, numels, payload.device), counts, nbytes

    def support_nbytes(self, counts: list[int], numels: list[int]) -> int:
        return 0 if self.shared else 8 * len(numels)
