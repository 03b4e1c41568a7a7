"""Sign codecs: one bit per element."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ... import kernels
from ...kernels import Flag
from ...options import require_integer, require_number
from ..base import Codec
from ..traits import Traits


class _SignCodec(Codec):
    """One bit an element, and a scale a segment: its mean magnitude, or `_fixed_scale`."""

    @property
    def _fixed_scale(self) -> float | None:
        return None

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = self._empty_payload(segments)
        kernels.sign.encode(segments, payload, residuals, self._fixed_scale)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        kernels.sign.decode_add(payload, outs, weight)

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        return kernels.sign.decode_sum(payloads, outs, weight)

    def segments_nbytes(self, numels: list[int]) -> int:
        return kernels.sign.nbytes(numels)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return self._head_and_rest(4, size)


@dataclass(frozen=True, repr=False)
class SignNorm(_SignCodec):
    """One bit an element and one scale a segment: `C(x) = |x|_1 / n * sign(x)`, with sign(0) = +1.

    Biased: use it with a memory such as `ErrorFeedback`. Check: `|x - C(x)|^2 = |x|^2 - |x|_1^2 / n`.

    Source: Karimireddy et al. 2019, EF-SGD, arXiv 1901.09847.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.SignNorm()
        >>> codec.decode(codec.encode(torch.tensor([3.0, -1.0])), 2)
        tensor([ 2., -2.])
    """


@dataclass(frozen=True, repr=False)
class SignSGD(_SignCodec):
    """One bit an element; workers take a majority vote: the result is `scale * sign(sum_i sign(x_i))`.

    A worker sends signs, with sign(0) = +1, and every worker counts them. A tie gives 0, so the element is not changed.
    The result does not depend on the size of the gradients: the learning rate and `scale` alone set the step. A
    segment also sends its scale (4 bytes), which is NaN if an element is infinite or NaN. A segment that is zero everywhere
    has scale 0: its worker does not vote, so a layer that has no gradient on any worker is not changed.

    Args:
        scale: factor of the vote, above 0.

    Raises:
        ValueError: scale out of range.

    Source: Bernstein et al. 2018, signSGD, arXiv 1802.04434; with majority vote, arXiv 1810.05291.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.tensor([[1.0, -1.0, 1.0], [-5.0, -1.0, 9.0], [2.0, 1.0, 0.1]])[comm.rank].view(1, 3)
        ...     averager = tw.Mean(tw.SignSGD())
        ...     averager.step(averager.init([("x", x)], comm), [("x", x)], comm).wait()
        ...     return x
        >>> tw.LocalWorld(3).run(worker)[0]
        tensor([[ 1., -1.,  1.]])
    """

    scale: float = 1.0

    traits = Traits(votes=True)

    def __post_init__(self) -> None:
        require_number("SignSGD: scale", self.scale, least=2.0**-100, most=2.0**100)

    def combine(self, totals: list[Tensor]) -> None:
        """The sign of each sum, times the scale.

        The division rounds to the nearest integer, because counts of votes are integers and sums of scales are rounded.
        """
        for total in totals:
            votes = (total / self.scale).round_().sign_()
            total.sub_(total).add_(votes, alpha=self.scale)  # zero, or NaN where the sum was not finite

    @property
    def _fixed_scale(self) -> float:
        return self.scale


@dataclass(frozen=True, repr=False)
class OneBit(Codec):
    """One bit per element: negative elements become their mean, all others theirs. Two float32 means per bucket.

        C(x_i) = mean of {x_j : x_j < 0} if x_i < 0 else mean of {x_j : x_j >= 0}

    Biased: use it with a memory such as `ErrorFeedback`. Check: of all codecs that send these bits and two values,
    this one has the least error, `|x - C(x)|^2 = |x|^2 - |C(x)|^2`. The mean of a bucket is kept.

    Args:
        bucket_size: elements that share two means; None for the whole segment. The number of columns of a matrix makes
            each row a bucket, as in the paper.

    Raises:
        ValueError: bucket_size out of range.

    Source: Seide et al. 2014, 1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs.

    Example:
        >>> import torch, thinwire as tw
        >>> codec = tw.codec.OneBit()
        >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 3.0, -6.0])), 4)
        tensor([ 2., -4.,  2., -4.])
    """

    bucket_size: int | None = None

    def __post_init__(self) -> None:
        require_integer("OneBit: bucket_size", self.bucket_size, 1, or_none=True)

    @cached_property
    def traits(self) -> Traits:
        return Traits(bucket_size=self.bucket_size)

    def encode_segments(self, segments: list[Tensor], keys: list[int], residuals: list[Tensor] | None) -> Tensor:
        payload = self._empty_payload(segments)
        kernels.onebit.encode(segments, payload, self.bucket_size, residuals)
        return payload

    def decode_add_segments(self, payload: Tensor, outs: list[Tensor], weight: float, keys: list[int]) -> None:
        kernels.onebit.decode_add(payload, outs, weight, self.bucket_size)

    def decode_sum_segments(self, payloads: list[Tensor], outs: list[Tensor], weight: float, keys: list[int]) -> Flag:
        return kernels.onebit.decode_sum(payloads, outs, weight, self.bucket_size)

    def segments_nbytes(self, numels: list[int]) -> int:
        return kernels.onebit.nbytes(numels, self.bucket_size)

    def section_nbytes(self, size: int) -> tuple[int, ...]:
        return self._head_and_rest(8 * kernels.num_buckets([size], self.bucket_size), size)
