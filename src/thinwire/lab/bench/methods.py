"""The methods that `thinwire bench step` compares, and the model that it trains with each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ...average import Averager
from .rows import as_parsed

if TYPE_CHECKING:
    from ..train.strategy import Strategy

NUM_INPUTS, NUM_CLASSES = 512, 10


def mlp(hidden: int, layers: int) -> nn.Sequential:
    """512 - hidden x layers - 10, with ReLU; 22 million parameters for 2048 x 6. The same on every worker."""
    torch.manual_seed(0)
    widths = [NUM_INPUTS, *[hidden] * layers]
    parts = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(hidden, NUM_CLASSES))


class Training:
    """A model, its data on the same device, and its optimizer; calling it makes one step."""

    def __init__(self, model: nn.Module, batch_size: int, rank: int):
        generator, device = torch.Generator().manual_seed(rank), next(model.parameters()).device
        self.model = model
        self.inputs = torch.randn(batch_size, NUM_INPUTS, generator=generator).to(device)
        self.targets = torch.randint(NUM_CLASSES, (batch_size,), generator=generator).to(device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with record_function("forward"):
            loss = self._loss(self.model(self.inputs))
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            self.optimizer.step()

    def _loss(self, outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, self.targets)


@dataclass(frozen=True)
class Method:
    """One way to train data-parallel.

    Args:
        name: of the row.
        ddp: whether the model is in DDP.
        attach: what makes the training data-parallel; it returns the strategy, or None where DDP itself averages.
        bytes_per_element: of DDP's own all-reduce; the ledger counts those of strategies.
        every: steps from one round to the next.
        is_concurrent: whether messages fly while the training goes on.
        is_late: whether a round ends in the step after the one that began it.
    """

    name: str
    ddp: bool
    attach: Callable[[Training], Strategy | None]
    bytes_per_element: int = 0
    every: int = 1
    is_concurrent: bool = True
    is_late: bool = False

    @contextmanager
    def on(self, training: Training) -> Iterator[Strategy | None]:
        """Context in which this method trains; yields the strategy, or None."""
        strategy = self.attach(training)
        try:
            yield strategy
        finally:
            if strategy is not None:
                strategy.detach()


def of_averager(text: str, overlap: bool, every: int | None, ddp: bool, bucket_bytes: int | None) -> Method:
    """What `thinwire train` does with the same averager and options, but that overlap is left out where it has no meaning.

    Args:
        text: an averager, in Python's notation.
        overlap: of averagers of parameters.
        every: steps between rounds of local updates; None averages gradients or parameters in every step.
        ddp: whether averagers of gradients are attached to a model in DDP.
        bucket_bytes: size of the buckets of gradients; None for the default of `compress_gradients`.
    """
    averager: Averager = as_parsed(text, Averager)
    is_of_gradients = averager.gives_one_mean and every is None
    is_late = overlap and every is None and not averager.gives_one_mean

    def attach(training: Training) -> Strategy:
        from ..train.config import RunConfig
        from ..train.strategy import attach

        config = RunConfig("bench", repr(averager), overlap=is_late, every=every)
        return attach(config, training.model, training.optimizer, bucket_bytes=bucket_bytes)

    name = repr(averager) + ", overlap" * is_late + (f", every {every}" if every else "")
    return Method(
        name, ddp and is_of_gradients, attach, 0, every or 1, is_concurrent=is_of_gradients or is_late, is_late=is_late
    )
