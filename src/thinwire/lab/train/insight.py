"""What a quantizer does to the gradients of a run: its relative variance, and the levels that it has found.

Both are for the records: nothing is sent, no random state is read or touched, and the run is the same without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...average import Mean
from ...codec import Codec, Key
from ...codec.adaptive.adaptation import adaptive_part
from ...codec.compose.chain import Chain
from ...codec.compose.huffman import EntropyCoded
from ...strategy import GradientCompression
from .strategy import Strategy

NOTHING: Mapping[str, Tensor] = {}


def insight(strategy: Strategy, gradients: Mapping[str, Tensor] = NOTHING) -> dict[str, Any]:
    """What there is to know of the codec at work: `variance`, where gradients are given, and `levels`, where they adapt.

        variance = |Q(g) - g|^2 / |g|^2

    over the gradients that are encoded, at the price of one more encoding. Memory has no part in it: it is what the codec
    does to this gradient, not to what memory adds.

    Args:
        strategy: of the run.
        gradients: this worker's own, before averaging, by name; see `own_gradients`.

    Returns:
        `variance`, a float, and `levels`, ascending from -1 to 1; each only where there is such a thing. Averagers of
        parameters have neither, and neither have votes nor what is sent without a loss.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.lab.train.strategy import Strategy
        >>> def worker(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     handle = tw.compress_gradients(model, tw.Mean(tw.TopK(0.5)), comm=comm)
        ...     found = insight(Strategy(handle, False, ()), {"weight": torch.tensor([[1.0, 3.0]])})
        ...     handle.detach()
        ...     return found
        >>> tw.LocalWorld(1).run(worker)
        [{'variance': 0.1}]
    """
    handle = strategy.handle
    if not isinstance(handle, GradientCompression) or not isinstance(handle.averager, Mean):
        return {}
    found: dict[str, Any] = {}
    variance = _variance(handle.averager, handle.codec, gradients)
    if variance is not None:
        found["variance"] = variance
    if adaptive_part(handle.averager.codec) is not None:
        found["levels"] = list(_values_codec(handle.codec).levels)
    return found


@contextmanager
def own_gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context in which a backward pass leaves copies of this worker's gradients, as they are before averaging.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with own_gradients(model) as gradients:
        ...     model(torch.tensor([[1.0, 3.0]])).sum().backward()
        >>> gradients
        {'weight': tensor([[1., 3.]])}
    """
    gradients: dict[str, Tensor] = {}

    def keeping(name: str):
        def keep(gradient: Tensor) -> None:
            before = gradients.get(name)
            gradients[name] = gradient.detach().clone() if before is None else before + gradient.detach()

        return keep

    hooks = [p.register_hook(keeping(name)) for name, p in model.named_parameters() if p.requires_grad]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()


def _variance(averager: Mean, codec: Codec, gradients: Mapping[str, Tensor]) -> float | None:
    encoded = [g for g in gradients.values() if g.ndim >= averager.min_ndim]
    if codec.lossless or codec.votes or not encoded:
        return None
    if averager.granularity != "layer":
        encoded = [torch.cat([g.reshape(-1) for g in encoded])]
    encoded = [g.to(torch.float32) for g in encoded]
    lost = [torch.empty(g.numel(), dtype=torch.float32, device=g.device) for g in encoded]
    codec.encode(encoded, [Key(stream=i) for i in range(len(encoded))], lost)
    total = _squared(encoded)
    return _squared(lost) / total if total else None


def _squared(tensors: list[Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors)


def _values_codec(codec: Codec) -> Codec:
    """The link that quantizes."""
    if isinstance(codec, Chain):
        return _values_codec(codec.values)
    return _values_codec(codec.codec) if isinstance(codec, EntropyCoded) else codec
