"""Which strategy a parameter is attached to: at most one that averages, so that no two average the same values.

Beside it, one `Shards` may encode what FSDP sends of the same parameters.

References are weak. A strategy keeps its parameters alive, so that an entry lives exactly as long as its strategy.
One hook, for every step of every optimizer in the process, finds the strategies of the optimizer's parameters here.
"""

from __future__ import annotations

import functools
import gc
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..average.base import NamedTensors
from ..comm import Communicator
from .model.optimizer_step import Arguments, makes_state_only, without_autocast

if TYPE_CHECKING:
    from .base import AveragerAttachment
    from .gradients.shard_compression import ShardCompression
    from .own_model import OwnModelAttachment

_LOCK = threading.Lock()
_S = TypeVar("_S", "AveragerAttachment", "ShardCompression")


class Holders(Generic[_S]):
    """The attached strategies of one kind, by the parameters that they hold."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[int, _S] = WeakValueDictionary()

    def of(self, parameter: int) -> _S | None:
        """The strategy that holds the parameter with this `id`."""
        return self._of.get(parameter)

    def all(self) -> set[_S]:
        """The attached strategies."""
        with _LOCK:  # another thread may attach one
            return set(self._of.values())

    def require_unattached(self, call: str, parameters: NamedTensors) -> None:
        """Raise a ValueError if one of the parameters is attached to a strategy of this kind already.

        Args:
            call: the name of the strategy that wants to attach, such as "Gradients"; for the message.
            parameters: with their names.
        """
        if self._first_attached(parameters) is not None:
            gc.collect()  # a strategy that nobody uses any more may still wait for the garbage collector
        found = self._first_attached(parameters)
        if found is not None:
            name, strategy = found
            raise ValueError(
                f"{call}: parameter {name!r} is attached to {strategy.strategy!r} already; a parameter takes "
                "part in one strategy only: call detach() on that one first"
            )

    def register(self, strategy: _S) -> None:
        """Note that the parameters of a strategy are attached to it.

        Raises:
            ValueError: one of them is attached already.
        """
        with _LOCK:
            # Checked again, because another thread may have attached since the first check.
            self.require_unattached(strategy.call, strategy.parameters)
            self._of.update((id(p), strategy) for _, p in strategy.parameters)
            _set_hook()

    def release(self, strategy: _S) -> None:
        """Forget the parameters of a strategy."""
        with _LOCK:
            for _, p in strategy.parameters:
                # A strategy that failed to attach is released too, while another one may hold the parameter.
                if self._of.get(id(p)) is strategy:
                    del self._of[id(p)]

    def _first_attached(self, parameters: NamedTensors) -> tuple[str, _S] | None:
        found = ((name, self._of.get(id(p))) for name, p in parameters)
        return next(((name, strategy) for name, strategy in found if strategy is not None), None)


AVERAGED: Holders[AveragerAttachment] = Holders()
SHARDED: Holders[ShardCompression] = Holders()
_LOOKED_AT: WeakSet[Optimizer] = WeakSet()
"""The optimizers without attached parameters that have stepped."""
BESIDE: WeakValueDictionary[int, OwnModelAttachment] = WeakValueDictionary()
"""The strategies whose models have trainable parameters beside those that they hold, by these parameters."""


def require_free(call: str, comm: Communicator) -> None:
    """Raise a ValueError if a strategy averages over this elastic communicator: a joiner gets the state of one."""
    for strategy in AVERAGED.all():
        if strategy.comm is comm:
            raise ValueError(
                f"{call}: {strategy.strategy!r} averages over this elastic communicator, which carries one strategy; make an "
                "ElasticCommunicator for each, or call detach() on that one first"
            )


@functools.cache
def _set_hook() -> None:
    """From the first strategy on, for good: taking the hook off would disturb optimizers that step in other threads."""
    register_optimizer_step_pre_hook(torch.compiler.disable(without_autocast(_before_step)))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Let the strategies of the optimizer's parameters check the step, and replace its arguments; then `Shards`."""
    arguments = args, kwargs
    if makes_state_only():
        return arguments
    parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
    found = (holders.of(p) for holders in (AVERAGED, SHARDED) for p in parameters)
    # A strategy is found once for each of its parameters, and checks the step once.
    checkers = {id(s): s for s in found if s is not None}
    for checker in checkers.values():
        arguments = checker.before_step(optimizer, arguments)
    if not checkers and optimizer not in _LOOKED_AT:
        _LOOKED_AT.add(optimizer)
        for strategy in AVERAGED.all():
            strategy.require_in_place(set(parameters))
    if BESIDE:
        alone = [p for p in parameters if p in BESIDE and AVERAGED.of(p) is None]
        for strategy in {id(s): s for s in map(BESIDE.get, alone) if s is not None}.values():
            strategy.warn_beside(optimizer, alone)
    return arguments
