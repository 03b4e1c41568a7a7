"""Deep Gradient Compression, put together: top-k with a warm-up of the ratio, and momentum correction."""

from __future__ import annotations

from ...algorithm import require
from ...codec import QSGD, Cast, TopK, chain
from ...memory import MomentumCorrection
from ...options import require_integer
from ...schedule import GeometricWarmup, Schedule
from .clip import Clip
from .mean import Mean


def dgc(
    ratio: float | Schedule = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    warmup_epochs: int = 5,
    clip: Clip | None = None,
    bits: int | None = None,
    values: str | None = None,
    sample: float | None = None,
    exchange: str = "auto",
    min_ndim: int = 2,
) -> Mean:
    """Deep Gradient Compression as one averager: `Mean(TopK(GeometricWarmup(ratio)), MomentumCorrection(...))`.

    Each worker sends the largest `ratio` of the coordinates of its velocity `v = v + u`, `u = m u + g`, of every
    tensor of two or more dimensions. Momentum is applied here, so the optimizer must have none: use `DGCSGD`, or
    `torch.optim.SGD` without momentum. At ratio 1 all tensors travel dense, and the method is momentum SGD.

    Steps and bytes per worker and step: those of the exchange. By default 1 step and (W-1)(p + d) bytes. d is 4 bytes
    for each element that travels dense. Of n other elements, k = ratio * n are sent: at ratio 0.001, p = k (4 + 12/8)
    bytes; with `bits`, p = k (bits + 12)/8 bytes and the scales.

    Args:
        ratio: fraction of the coordinates that is sent after the warm-up; lower => smaller messages. A number above 1
            is a factor of compression, as in the original: 1000 means 1/1000. A schedule, such as
            `Values((0.25, 0.063, 0.015, 0.004, 0.001))`, is its own warm-up.
        momentum: m, in [0, 1).
        nesterov: whether momentum is Nesterov's.
        masking: whether momentum becomes 0 at every coordinate that was sent.
        warmup_epochs: number of epochs in which the ratio falls from 1; call `handle.set_epoch(epoch)` at the start of
            each, or the ratio stays at that of epoch 0.
        clip: how a worker clips its own gradients first, such as `ClipByNorm(1.0)`; None => no clipping.
        bits: where given, the number of bits in which each value is sent, `QSGD(bits)`.
        values: where given, the type in which values are sent: "float16" as in the original, "bfloat16" or an 8-bit
            float, `Cast(values)`. Without `bits` and `values` they are float32.
        sample: where given, the threshold is estimated from this fraction of the elements, as published (0.01 there);
            by default the selection is exact, which is faster here.
        exchange: as in `Mean`.
        min_ndim: tensors of fewer dimensions travel dense.

    Raises:
        ValueError: a value out of range, or both `bits` and `values`.

    Source: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887.

    Example:
        >>> import torch, thinwire as tw
        >>> tw.dgc(ratio=0.01, nesterov=True)
        Mean(TopK(GeometricWarmup(final=0.01)), MomentumCorrection(nesterov=True))
        >>> def worker(comm):
        ...     model = torch.nn.Linear(20, 10)
        ...     optimizer = tw.strategy.DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        ...     handle = tw.compress_gradients(model, tw.dgc(ratio=0.01), comm=comm)
        ...     for epoch in range(2):
        ...         handle.set_epoch(epoch)
        ...         optimizer.zero_grad()
        ...         model(torch.ones(4, 20)).square().mean().backward()
        ...         optimizer.step()
        ...     handle.detach()
        ...     return model.weight.grad.count_nonzero().item()
        >>> tw.LocalWorld(2).run(worker)  # in epoch 1 a worker sends 0.01^(2/6) of 200 coordinates
        [44, 44]
    """
    require_integer("dgc: warmup_epochs", warmup_epochs, 0)
    require(bits is None or values is None, f"dgc: give bits or values, got bits={bits!r} and values={values!r}")
    if not isinstance(ratio, Schedule) and ratio > 1:
        ratio = 1 / ratio
    if warmup_epochs > 0 and not isinstance(ratio, Schedule):
        ratio = GeometricWarmup(ratio, num=warmup_epochs)
    sparsifier = TopK(ratio, sample=sample)
    link = QSGD(bits=bits) if bits is not None else Cast(values) if values is not None else None
    return Mean(
        sparsifier if link is None else chain(sparsifier, link),
        MomentumCorrection(momentum, nesterov, masking),
        exchange=exchange,
        min_ndim=min_ndim,
        clip=clip,
    )
