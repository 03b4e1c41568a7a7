"""What all strategies do with a model: find its parameters, and make workers' models equal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...algorithm import require
from ...comm import Communicator
from ...comm.compare import differing
from .joined import exchange_joined
from .shards import is_sharded, local, reshard

NamedParameters = list[tuple[str, nn.Parameter]]


class ParameterKind(NamedTuple):
    """The properties of a parameter that an averager's state relies on. Every step compares them; errors show them as text.

    Example:
        >>> str(kind_of(torch.ones(2, 3)))
        '(2, 3) torch.float32 on cpu'
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} on {self.device}"


def kind_of(t: Tensor) -> ParameterKind:
    """Shape, dtype and device of a tensor, or of the shard of it that this worker holds."""
    t = local(t)
    return ParameterKind(t.shape, t.dtype, t.device)


def trainable(module: nn.Module, ignored: Collection[str] = ()) -> NamedParameters:
    """The parameters that require a gradient, with their names, but for those named in `ignored`.

    Raises:
        ValueError: there are none.
    """
    reshard(module)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    require(bool(named), "the model has no parameter that requires a gradient; there is nothing to average")
    return named


def updated_by(call: str, optimizer: Optimizer, module: nn.Module) -> NamedParameters:
    """The trainable parameters of the module, with their names, that the optimizer updates; it may update no others.

    Raises:
        ValueError: there are none, or others.
    """
    reshard(module)
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) in updated]
    require(
        bool(named),
        f"{call}: the optimizer has no trainable parameter of the model; there is nothing to average. Is it another model's?",
    )
    own = {id(p) for _, p in named}
    others = [p for p in trained_by(optimizer) if id(p) not in own]
    require(
        not others,
        f"{call}: {len(others)} of the optimizer's parameters are not the model's and would drift apart; put them into one "
        "module with it",
    )
    return named


def trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer that require a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def require_steps_on(call: str, optimizer: Optimizer, module: nn.Module) -> None:
    """Raise a ValueError if the optimizer has no parameter of the module."""
    reshard(module)
    held = {id(p) for p in module.parameters()}
    require(
        any(id(p) in held for group in optimizer.param_groups for p in group["params"]),
        f"{call}: the optimizer has no parameter of the model, so its steps would not change the model; give the model's "
        "optimizer, and make it after fully_shard, which replaces parameters",
    )


def check_model(call: str, model: nn.Module) -> None:
    """Make sure that a strategy can work on the model's tensors.

    Raises:
        ValueError: the model or a part is in `FullyShardedDataParallel`; a tensor is sparse, has no storage (meta device) or is
            a conjugate view; or a parameter's elements share memory.
    """
    library = sys.modules.get("torch.distributed.fsdp")  # no such part exists unless somebody imported it
    for name, module in model.named_modules():
        require(
            library is None or not isinstance(module, library.FullyShardedDataParallel),
            f"{call}: {f'part {name!r} of the model' if name else 'the model'} is in FullyShardedDataParallel, whose "
            "parameters are others on each worker; shard it by fully_shard instead, of torch.distributed.fsdp too",
        )
    for name, t in _tensors(model):
        require(not is_lazy(t), f"{call}: {name!r} has no shape yet; run one forward pass, or give the layer its sizes")
        require(
            t.device.type != "meta",
            f"{call}: {name!r} is on the meta device, without values; materialise the model first, such as by "
            "model.to_empty(device=...)",
        )
        require(
            t.layout == torch.strided,
            f"{call}: {name!r} is sparse ({t.layout}), and workers compare and send dense tensors; make it a plain attribute "
            "of its module in place of a buffer, or a dense tensor",
        )
        require(
            not t.is_conj(),
            f"{call}: {name!r} is a conjugate view, whose numbers cannot be averaged in place; make the tensor from "
            ".resolve_conj()",
        )
    for name, p in model.named_parameters():
        require(
            unexpanded(local(p)).shape == local(p).shape,
            f"{call}: elements of parameter {name!r}, shape {tuple(p.shape)} and strides {p.stride()}, share memory, so that "
            "no step can update them apart; use a parameter of its own, such as nn.Parameter(p.clone())",
        )


def check_apart(call: str, parameters: NamedParameters) -> None:
    """Make sure that a round in place on one parameter does not move another one too.

    Raises:
        ValueError: two parameters begin at the same place in memory.
    """
    places: dict[tuple[int, int], str] = {}
    for name, p in parameters:
        held = local(p)
        if not held.numel():
            continue
        # An address would need real memory, which the tensors of the planner lack.
        first = places.setdefault((held.untyped_storage()._cdata, int(held.storage_offset())), name)
        require(
            first == name,
            f"{call}: parameters {first!r} and {name!r} share memory, so that each round would move it twice; tie them as one "
            "parameter, by assigning the parameter itself and not its data",
        )


def check_one_device(call: str, parameters: NamedParameters) -> None:
    """Make sure that the parameters can be encoded together.

    Raises:
        ValueError: they are on several devices.
    """
    name, device = parameters[0][0], local(parameters[0][1]).device
    for other, p in parameters:
        require(
            local(p).device == device,
            f"{call}: parameter {name!r} is on {device} and {other!r} on {local(p).device}; put them on one device, or give "
            "the part of the model on each device a strategy of its own",
        )


def refuse_shards(call: str, model: nn.Module) -> None:
    """Raise a ValueError if a tensor of the model is sharded."""
    for name, t in _tensors(model):
        require(
            not is_sharded(t),
            f"{call}: {name!r} is a DTensor, and {call} needs workers that hold whole parameters, as shards of a "
            "model must be averaged at the same step; use Gossip or Local, with replicas=mesh['replicate']",
        )


def make_equal(module: nn.Module, comm: Communicator, **options: object) -> None:
    """Give every worker rank 0's parameters and buffers, once all have the same names, shapes and dtypes.

    Those travel in which workers differ, by a hash of the bits of all values.

    Of a sharded model each worker gets the shard that rank 0 of `comm` holds.

    Args:
        module: changed in place.
        comm: connects the workers.
        **options: what else must be the same on all workers.

    Raises:
        ValueError: on all workers together, naming what differs and on which rank.
    """
    tensors = [(name, local(t)) for name, t in _tensors(module)]
    comm.check_agreement({name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors} | options)
    broadcast_from_zero(differing(comm, [t for _, t in tensors]), comm)


def broadcast_from_zero(tensors: Iterable[Tensor], comm: Communicator) -> None:
    """Overwrite each tensor by rank 0's, whatever its layout in memory."""
    exchange_joined(
        [unexpanded(t.detach()) for t in tensors],
        comm.broadcast,
        lambda t, result: t.copy_(result) if comm.rank else None,  # rank 0 has its own values already
    )


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def unexpanded(t: Tensor) -> Tensor:
    """The part of an expanded tensor that has memory of its own."""
    for dim, stride in enumerate(t.stride()):
        if stride == 0 and t.shape[dim] > 1:
            t = t.narrow(dim, 0, 1)
    return t


def values_of(t: Tensor) -> Tensor:
    """The elements of a tensor that this worker holds, in the same memory; complex ones as pairs of real numbers."""
    t = local(t)
    return torch.view_as_real(t) if t.is_complex() else t
