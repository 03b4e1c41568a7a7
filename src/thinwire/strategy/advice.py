"""Warnings about configurations that are allowed but rarely meant, and the choice where the user makes none."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from ..algorithm import Algorithm
from ..average.base import Averager
from ..average.mean.mean import Mean
from ..codec import QSGD
from ..comm import Communicator
from ..messages import log
from ..schedule import Schedule
from .model.optimizer_step import unwrapped
from .strategy import Averaging

if TYPE_CHECKING:
    from .base import Attachment

_ADAM = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
FOR_ONE, FOR_SEVERAL = Mean(), Mean(QSGD(bits=4))
"""The averagers where the user names none, by the number of workers."""
FOR_MUON = Mean(QSGD(bits=8), exchange="scatter_reduce")
"""Muon sets all singular values of an update to one, so it enlarges the noise in the small ones; see docs/first-lines.md."""
STEPS_WITHOUT_EPOCH = 50  # who sets the epoch where it begins has done so long before


def advice(algorithm: Algorithm) -> list[str]:
    """What a user should know before training starts, a line each.

    Example:
        >>> import thinwire as tw
        >>> advice(tw.Gradients(tw.Mean(tw.TopK(0.01))))[0]
        'Mean(TopK(ratio=0.01)) loses what TopK(ratio=0.01) does not send; write Mean(TopK(ratio=0.01), ErrorFeedback())'
        >>> advice(tw.Gradients(tw.Mean(tw.QSGD(bits=4))))
        []
    """
    return [line for part in algorithm.walk() for line in part.cautions]


def advice_on_optimizer(strategy: Averaging[Attachment], optimizer: Optimizer) -> list[str]:
    """Whether the optimizer bears what the strategy does to its gradients, a line for each averager that it does not.

    Example:
        >>> import torch, thinwire as tw
        >>> adam = torch.optim.Adam([torch.zeros(1)])
        >>> advice_on_optimizer(tw.Gradients(tw.sparse(warmup_steps=0)), adam)[0].partition(";")[2]
        ' Mean(QSGD(bits=4)) suits it'
    """
    if not strategy.rhythm.in_backward:
        return []
    if is_muon(optimizer):
        return [
            f"{type(optimizer).__name__} trains language models worse by {part} than by dense gradients; "
            f"{FOR_MUON!r} suits it"
            for part in strategy.walk()
            if isinstance(part, QSGD) and isinstance(part.bits, int) and part.bits < 8
        ]
    if not isinstance(optimizer, _ADAM):
        return []
    return [
        f"{type(optimizer).__name__} trains worse by {part} than by dense gradients; Mean(QSGD(bits=4)) suits it"
        for part in strategy.walk()
        if isinstance(part, Averager) and not part.traits.suits_adam
    ]


def is_muon(optimizer: Optimizer) -> bool:
    """Whether it is a Muon, of any library: it or a class that it derives from has "Muon" in its name."""
    return any("Muon" in cls.__name__ for cls in type(unwrapped(optimizer)).__mro__)


def follows_epochs(algorithm: Algorithm) -> bool:
    """Whether a number in it follows epochs, so that the training must say which epoch it is.

    Example:
        >>> import thinwire as tw
        >>> follows_epochs(tw.dgc()), follows_epochs(tw.sparse())
        (True, False)
    """
    return any(isinstance(part, Schedule) and part.follows_epochs for part in algorithm.walk())


class Advisor:
    """Gives its advice as warnings, each once, on rank 0: when a strategy attaches, and as training goes on.

    Args:
        strategy: what was attached.
        rank: of this worker.
    """

    def __init__(self, strategy: Averaging[Attachment], rank: int):
        self._strategy, self._is_first = strategy, rank == 0
        self._waits_for_epoch, self._steps = follows_epochs(strategy), 0
        self._said: set[str] = set()
        self._held: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._warn(advice(strategy))

    def before_step(self, optimizer: Optimizer) -> bool:
        """Look at the optimizer in the first step, and at the epoch in a late one.

        Returns:
            Whether the optimizer is new, or has got parameters since its last step.
        """
        self._steps += 1
        if self._steps == 1:
            self._warn(advice_on_optimizer(self._strategy, optimizer))
        if self._steps == STEPS_WITHOUT_EPOCH and self._waits_for_epoch:
            self._warn([f"{self._strategy} changes by epochs, and still is in epoch 0: call handle.set_epoch(epoch)"])
        before, self._held[optimizer] = self._held.get(optimizer), sum(len(g["params"]) for g in optimizer.param_groups)
        return before != self._held[optimizer]

    def say_once(self, line: str) -> None:
        """Warn of what was found while it trains."""
        if line not in self._said:
            self._said.add(line)
            self._warn([line])

    def epoch_begins(self) -> None:
        """The training says which epoch it is."""
        self._waits_for_epoch = False

    def _warn(self, lines: list[str]) -> None:
        for line in lines if self._is_first else []:
            warnings.warn(line, stacklevel=2)


_LOGGED: set[str] = set()
"""The choices that this process has logged."""


def log_choice(strategy: Algorithm, comm: Communicator, optimizer: Optimizer | None = None) -> None:
    """Log what was chosen for a user who chose nothing, and for what: on rank 0 alone, each choice once in a process."""
    choice = repr(strategy)
    if comm.rank or choice in _LOGGED:
        return
    _LOGGED.add(choice)
    workers = "workers that come and go" if comm.is_elastic else f"{comm.size} worker{'s' * (comm.size > 1)}"
    under = "" if optimizer is None else f" under {type(unwrapped(optimizer)).__name__}"
    log.info(f"no strategy was given; for {workers}{under} it takes {choice}")
