"""`torch.distributed.checkpoint`: the state of a strategy, saved on one mesh and loaded on another.

save    every tensor of the state that belongs to a parameter is saved in the parameter's shape; of a sharded parameter each
        worker writes its shard. The state of replica r lies under `rank<r>`. What has another size, such as PowerSGD's Q of
        a shard, lies under a key that names the shard.
load    as many replicas as before: each reads its own state, with the same bits. Another number: each reads the states of
        all, and `Strategy.load_state_dict` divides what was a worker's own among them, so that what is late keeps its weight.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..algorithm import require
from ..strategy import AveragerAttachment

PLACE = "shard "


class StrategyState:
    """A strategy as an entry of what `torch.distributed.checkpoint.save` takes.

    Args:
        strategy: what `attach` returned.

    Example:
        >>> import tempfile, torch, thinwire as tw
        >>> import torch.distributed.checkpoint as dcp
        >>> def worker(comm):
        ...     model = torch.nn.Linear(4, 3)
        ...     handle = tw.compress_gradients(model, tw.Mean(tw.TopK(0.5), tw.ErrorFeedback()), comm=comm)
        ...     model(torch.ones(2, 4)).square().sum().backward()
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         dcp.save({"thinwire": StrategyState(handle)}, checkpoint_id=folder)
        ...         load(handle, folder)
        ...     return list(handle.state_dict())
        >>> tw.LocalWorld(1).run(worker)
        [['rank0']]
    """

    def __init__(self, strategy: AveragerAttachment):
        self._strategy = strategy

    def state_dict(self) -> dict[str, Any]:
        """The state of this worker's replica; tensors of a parameter in its shape, of sharded ones as DTensors."""
        shaped: dict[str, Any] = _shaped(self._strategy, self._strategy.state_dict())
        return shaped

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, of this replica or of all."""
        self._strategy.load_state_dict(_held(saved))


def load(strategy: AveragerAttachment, checkpoint_id: str | os.PathLike[str], key: str = "thinwire") -> None:
    """Restore a strategy from a checkpoint of any number of replicas and shards. All workers call it.

    Args:
        strategy: attached to the model, with the averager that it was saved with.
        checkpoint_id: the folder that `torch.distributed.checkpoint.save` has written.
        key: under which `StrategyState(strategy)` was saved.

    Raises:
        ValueError: the checkpoint has no such key, or the state is of another configuration.
    """
    state = StrategyState(strategy)
    ((own_key, own),) = state.state_dict().items()
    saved = dcp.FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    found = {name.removeprefix(f"{key}.").split(".")[0] for name in saved if name.startswith(f"{key}.rank")}
    require(
        bool(found), f"{checkpoint_id} holds no state of a strategy under {key!r}; save StrategyState(strategy) there"
    )
    is_own = len(found) == strategy.comm.size and own_key in found  # elastic: a worker's rank may have been another one
    needed = [own_key] if is_own else sorted(found)
    template = {name: _template(own, f"{key}.{name}", saved) for name in needed}
    dcp.load({key: template}, checkpoint_id=checkpoint_id)  # fills the tensors of the template
    state.load_state_dict(template)


def _shaped(strategy: AveragerAttachment, state: Any, parameter: Tensor | None = None) -> Any:
    """The state with each tensor below a parameter's name in the parameter's shape, as far as it has its size."""
    parameters = dict(strategy.parameters)
    if isinstance(state, Mapping):
        owners = {key: parameters.get(key, parameters.get(str(key).rpartition(".")[0], parameter)) for key in state}
        return {key: _shaped(strategy, value, owners[key]) for key, value in state.items()}
    if isinstance(state, list):
        return [_shaped(strategy, value, parameter) for value in state]
    if isinstance(state, Tensor) and parameter is not None:
        return _as_parameter(state, parameter)
    return state


def _as_parameter(value: Tensor, parameter: Any) -> Tensor | dict[str, Tensor]:
    sharded = isinstance(parameter, DTensor)
    held = parameter.to_local().shape if sharded else parameter.shape
    if value.numel() != held.numel():
        return {_place(parameter): value} if sharded else value
    if not sharded:
        return value.reshape(held)
    # Without them PyTorch takes all shards to be of equal size.
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        value.reshape(held), parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _place(parameter: DTensor) -> str:
    """The key of what belongs to this worker's shard of a parameter, and has not its shape."""
    place = parameter.device_mesh.get_coordinate()
    return f"{PLACE}{place} of {list(parameter.device_mesh.shape)}"


def _held(state: Any) -> Any:
    """The state with the local parts of DTensors, and without the keys of `_place`."""
    if isinstance(state, Mapping):
        values = {key: _held(value) for key, value in state.items()}
        (only, *others) = values or [""]
        return values[only] if not others and str(only).startswith(PLACE) else values
    if isinstance(state, list):
        return [_held(value) for value in state]
    return state.to_local() if isinstance(state, DTensor) else state


def _template(state: Any, path: str, saved: Mapping[str, Any]) -> Any:
    """What to load into: built as `state` is, its tensors of the sizes that were saved under `path`."""
    if isinstance(state, Mapping):
        return {key: _template(value, f"{path}.{key}", saved) for key, value in state.items()}
    if isinstance(state, list):
        return [_template(value, f"{path}.{i}", saved) for i, value in enumerate(state)]
    if not isinstance(state, Tensor):
        return state
    if isinstance(state, DTensor) and path not in saved:  # one replica owns all of what replicas have shared
        return {_place(state): _template(state.to_local(), f"{path}.{_place(state)}", saved)}
    require(
        path in saved,
        f"the checkpoint has no {path}; a state whose size is not that of a parameter, such as PowerSGD's Q or the memory of "
        "scatter_reduce's owners, loads on as many shards as it was saved on",
    )
    # The size as saved: that of PowerSGD's Q is 0 until the first step.
    return torch.zeros_like(state) if isinstance(state, DTensor) else state.new_zeros(saved[path].size)
