"""Statistics of the codec for the metrics: its relative variance on a gradient, its adaptive levels, its choice for layers.

The measurement sends nothing and uses no random state, so it does not change the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....average import Mean
from ....codec import Codec, Key
from ....codec.quantize.levels import level_values
from ....strategy import AveragerAttachment, GradientCompression

CHOSEN = ("bits", "budget_bits", "error")


def has_variance(strategy: AveragerAttachment) -> bool:
    """Whether the strategy encodes gradients by a codec whose variance can be measured: lossy, and without a vote."""
    averager = strategy.averager
    return not strategy.models_differ and isinstance(averager, Mean) and _is_lossy(averager.codec)


def codec_statistics(strategy: AveragerAttachment, gradients: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the codec's relative `variance` on these gradients, its `levels` if they adapt, and what it chose for layers.

        variance = |Q(g) - g|^2 / |g|^2

    over the gradients that are encoded. It costs one more encoding. It does not include the memory: g is the gradient alone.

    Args:
        strategy: the run's, at work.
        gradients: this worker's gradients before averaging, by name; see `own_gradients`. Empty => no `variance`.

    Returns:
        `variance`, a float, `levels`, ascending from -1 to 1, and `bits`, `budget_bits` and `error` of `Fitted`, each only
        if it exists. Gossip has none; lossless codecs and votes have no variance. A gradient that is infinite or NaN has
        the variance NaN.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     handle = tw.compress_gradients(model, tw.Mean(tw.TopK(0.5)), comm=comm)
        ...     found = codec_statistics(handle, {"weight": torch.tensor([[1.0, 3.0]])})
        ...     handle.detach()
        ...     return found
        >>> tw.LocalWorld(1).run(worker)
        [{'variance': 0.1}]
    """
    chosen = strategy.diagnostics() if strategy.averager.traits.has_rounds else {}
    found: dict[str, Any] = {name: chosen[name] for name in CHOSEN if name in chosen}
    if strategy.models_differ:
        return found
    handle = cast(GradientCompression, strategy)  # models are equal only if their gradients are averaged
    codec = handle.codec
    if codec is None:
        return found
    mean = cast(Mean, handle.averager)  # no other averager of gradients has a codec
    if codec.traits.by_layer:  # its layers are in the order of the parameters
        names = [name for name, p in handle.parameters if p.ndim >= mean.min_ndim]
        codec = codec.pick([names.index(name) for name, g in gradients.items() if g.ndim >= mean.min_ndim])
    variance = _variance(codec, _encoded(mean, list(gradients.values())))
    if variance is not None:
        found["variance"] = variance
    has_levels = mean.codec.traits.adaptive is not None and not codec.traits.by_layer  # of all layers alike
    levels = level_values(codec) if has_levels else None
    if levels is not None:
        found["levels"] = list(levels)
    return found


@contextmanager
def own_gradients(model: nn.Module, scale: float = 1.0) -> Iterator[dict[str, Tensor]]:
    """Context that collects copies of this worker's gradients in the backward pass, before they are averaged.

    Args:
        model: whose gradients.
        scale: the loss scale, by which they are divided.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with own_gradients(model) as gradients:
        ...     model(torch.tensor([[1.0, 3.0]])).sum().backward()
        >>> gradients
        {'weight': tensor([[1., 3.]])}
    """
    gradients: dict[str, Tensor] = {}

    def keep(name: str, gradient: Tensor) -> None:
        own, before = gradient.detach() / scale, gradients.get(name)
        gradients[name] = own if before is None else before + own

    with ExitStack() as hooks:
        for name, p in model.named_parameters():
            if p.requires_grad:
                hooks.enter_context(p.register_hook(partial(keep, name)))
        yield gradients


def _encoded(mean: Mean, tensors: list[Tensor]) -> list[Tensor]:
    """What the codec encodes in a round with these tensors."""
    encoded = [tensor for tensor in tensors if tensor.ndim >= mean.min_ndim]
    if mean.granularity == "layer" or not encoded:
        return encoded
    return [torch.cat([tensor.reshape(-1) for tensor in encoded])]


def _variance(codec: Codec, encoded: list[Tensor]) -> float | None:
    if not _is_lossy(codec) or not encoded:
        return None
    if not all(g.isfinite().all() for g in encoded):
        return math.nan
    encoded = [g.to(torch.float32) for g in encoded]
    lost = [torch.empty(g.numel(), dtype=torch.float32, device=g.device) for g in encoded]
    codec.encode(encoded, [Key(stream=i) for i in range(len(encoded))], lost)
    total = _squared(encoded)
    return _squared(lost) / total if total else None


def _is_lossy(codec: Codec) -> bool:
    return not (codec.traits.lossless or codec.traits.votes)


def _squared(tensors: list[Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors)
