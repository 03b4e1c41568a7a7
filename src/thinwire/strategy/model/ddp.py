"""What strategies do about `DistributedDataParallel`: find it in a model, and refuse it around attached parameters.

DDP averages by itself whatever parameters it got when it was made, also those of a plain model that it runs only parts of.
A hook in the forward pass of such a DDP raises; one that shares no parameter gets no hook, so that training pays nothing.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ...algorithm import require
from ...comm import Communicator, Group
from ...comm.process_group import num_ranks
from .models import NamedParameters


def refuse_ddp(call: str, model: nn.Module) -> None:
    """Raise a ValueError if the model is wrapped in DistributedDataParallel, or has a part that is."""
    for name, module in model.named_modules():
        where = f"part {name!r} of the model" if name else "the model"
        require(
            not isinstance(module, DistributedDataParallel),
            f"{call}: {where} is wrapped in DistributedDataParallel, which would average its gradients densely besides; pass "
            "the plain module",
        )


def unwrapped(
    call: str, model: nn.Module, comm: Communicator | None, replicas: Group | None
) -> tuple[DistributedDataParallel | None, nn.Module]:
    """The model in DDP, if it is, and the plain module.

    Raises:
        ValueError: a part of the model is in DDP, the model and `replicas` both say who the workers are, or `comm` does not
            connect all workers of DDP, which averages nothing itself.
    """
    ddp = wrapped_ddp(model)
    module = model if ddp is None else ddp.module
    refuse_ddp(call, module)
    require(
        ddp is None or replicas is None,
        f"{call}: replicas={replicas} and a model in DistributedDataParallel, which has workers of its own; give one",
    )
    if ddp is not None and comm is not None and (size := ddp.process_group.size()) > 1:
        require(
            not comm.is_elastic,
            f"{call}: this DistributedDataParallel connects {size} processes, which cannot come and go; pass the plain "
            "module, or wrap it over a process group of this process alone",
        )
        ranks = torch.distributed.get_process_group_ranks(ddp.process_group)
        require(
            not comm.global_ranks or set(ranks) <= set(comm.global_ranks),
            f"{call}: this DistributedDataParallel connects ranks {ranks}, and comm ranks {list(comm.global_ranks)}; DDP "
            "averages nothing itself here, so give a comm of all its ranks",
        )
    return ddp, module


_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("lightning.fabric.wrappers", "_FabricModule", "_forward_module"),
)
"""Wrappers of a whole model: the library, its class, and where that keeps what it wraps."""


def wrapped_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The model in DDP, also inside of what torch.compile or Fabric's `setup` makes of it; None for another model."""
    for name, kind, inner in _WRAPPERS:
        library = sys.modules.get(name)  # no such wrapper exists unless somebody imported it
        if library is not None and isinstance(model, getattr(library, kind)):
            return wrapped_ddp(getattr(model, inner))
    return model if isinstance(model, DistributedDataParallel) else None


class DdpRefusal:
    """Makes a DDP that averages parameters of a strategy raise a ValueError in its forward pass, before anything is averaged.

    It holds for a DDP that exists and for one made later, until `end` or until the strategy is garbage.

    Args:
        call: the name of the strategy, for the message.
        parameters: the strategy's; it keeps them alive.
    """

    def __init__(self, call: str, parameters: NamedParameters):
        self._call, self._names = call, {id(p): name for name, p in parameters}
        _REFUSALS[id(self)] = self
        _see_new_ones()
        for ddp in _existing():
            self.watch(ddp, ddp.module)

    def watch(self, ddp: DistributedDataParallel, module: nn.Module) -> None:
        """Look at each forward pass of `ddp` if the module in it has a parameter of the strategy."""
        if any(id(p) in self._names for p in module.parameters()):
            ddp.register_forward_pre_hook(_before_forward)

    def check(self, ddp: DistributedDataParallel) -> None:
        """Raise a ValueError if the backward pass that follows averages a parameter of the strategy."""
        for name, p in ddp.module.named_parameters():
            if p.requires_grad and id(p) in self._names and name not in ddp.parameters_to_ignore:
                raise ValueError(
                    f"{self._call}: parameter {self._names[id(p)]!r} is trained inside of DistributedDataParallel, which "
                    "averages its gradient densely besides, so that nothing is saved; train the plain model, or attach "
                    "to the wrapped one"
                )

    def end(self) -> None:
        """Let DDP train the parameters."""
        _REFUSALS.pop(id(self), None)


_REFUSALS: WeakValueDictionary[int, DdpRefusal] = WeakValueDictionary()


def _refusals() -> list[DdpRefusal]:
    """Those in force. A list, because workers in other threads attach and detach meanwhile."""
    return [refusal for found in _REFUSALS.valuerefs() if (refusal := found()) is not None]


def _existing() -> Iterator[DistributedDataParallel]:
    """Every DDP of the process. No list of them exists; each refers to its class, which the garbage collector can tell."""
    if num_ranks():  # without processes none can train, and many workers in threads need not search
        kinds = [DistributedDataParallel]
        for kind in kinds:
            kinds += kind.__subclasses__()
        for found in gc.get_referrers(*kinds):
            # Its constructor may have failed.
            if isinstance(found, DistributedDataParallel) and "module" in found._modules:
                yield found


def _before_forward(ddp: DistributedDataParallel, args: object) -> None:
    # Without a gradient, or in no_sync, DDP averages nothing.
    if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        for refusal in _refusals():
            refusal.check(ddp)


def _on_registration(module: nn.Module, name: str, part: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel) and part is not None:
        for refusal in _refusals():
            refusal.watch(module, part)


@functools.cache
def _see_new_ones() -> None:
    """From the first strategy on, for good: taking the hook off would disturb threads that build modules."""
    register_module_module_registration_hook(_on_registration)
