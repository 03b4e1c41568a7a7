"""The methods that `thinwire bench step` compares, and the model that it trains with each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from torch.profiler import record_function

from ...algorithm import require
from ...attaching import strategy_of
from ...comm import Communicator
from ...strategy import AveragerAttachment, Averaging, Gradients, Rhythm

NUM_INPUTS, NUM_CLASSES = 512, 10


def mlp(hidden: int, layers: int) -> nn.Sequential:
    """512 - hidden x layers - 10, with ReLU; 22 million parameters for 2048 x 6. The same on every worker."""
    torch.manual_seed(0)
    widths = [NUM_INPUTS, *[hidden] * layers]
    parts = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(hidden, NUM_CLASSES))


class SyntheticTraining:
    """A model, its data on the same device, and its optimizer; calling it makes one step."""

    def __init__(self, model: nn.Module, batch_size: int, rank: int):
        generator, device = torch.Generator().manual_seed(rank), next(model.parameters()).device
        self.model = model
        self.inputs = torch.randn(batch_size, NUM_INPUTS, generator=generator).to(device)
        self.targets = torch.randint(NUM_CLASSES, (batch_size,), generator=generator).to(device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        # `timeline.COLORS` knows the phases by these names.
        with record_function("forward"):
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.targets)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            self.optimizer.step()


@dataclass(frozen=True)
class TimedMethod:
    """One way to train data-parallel.

    Args:
        name: of the row.
        ddp: whether the model is in DDP.
        attach: what makes the training data-parallel over a communicator; it returns the strategy at work, or None where DDP
            itself averages.
        bytes_per_element: of DDP's own all-reduce; the ledger counts those of strategies.
        rhythm: when workers exchange messages.
    """

    name: str
    ddp: bool
    attach: Callable[[SyntheticTraining, Communicator], AveragerAttachment | None]
    bytes_per_element: int = 0
    rhythm: Rhythm = Rhythm(in_backward=True)

    @property
    def is_concurrent(self) -> bool:
        """Whether messages fly while the training goes on."""
        return self.rhythm.in_backward or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether a round ends in the step after the one that began it."""
        return self.rhythm.delay > 0


def of_strategy(text: str, ddp: bool, bucket_bytes: int | None) -> TimedMethod:
    """What `thinwire train` does with the same strategy.

    Args:
        text: a strategy, in Python's notation.
        ddp: whether strategies of gradients are attached to a model in DDP.
        bucket_bytes: size of the buckets of gradients of a plain module; None for that of the strategy.

    Raises:
        ValueError: no strategy, or its rounds do not begin and end in a turn: asynchronous ones, and a delay of more steps.
    """
    strategy = strategy_of(text)
    require(
        isinstance(strategy, Averaging) and strategy.averager.traits.has_rounds,
        f"{text!r} has no rounds to measure; give one such as Gradients(Mean()), Gossip(Mix()) or Local(Mean(), every=4)",
    )
    assert isinstance(strategy, Averaging)
    rhythm = strategy.rhythm
    require(
        rhythm.delay == 0 or rhythm == Rhythm(delay=1),
        f"{strategy!r}: a turn of bench step begins and ends one round; leave delay and staleness out",
    )
    if isinstance(strategy, Gradients) and bucket_bytes is not None and not ddp:
        strategy = replace(strategy, bucket_bytes=bucket_bytes)

    # mypy keeps the narrowed type in the lambda only for a name that is assigned once.
    chosen = strategy
    return TimedMethod(
        repr(strategy),
        ddp and rhythm.in_backward,
        lambda training, comm: chosen.attach(training.model, training.optimizer, comm=comm),
        rhythm=rhythm,
    )
