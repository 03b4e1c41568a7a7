"""`torch.distributed.checkpoint`: the state of a strategy, saved on one mesh and loaded on another.

save    every tensor of the state that belongs to a parameter is saved in the parameter's shape; of a sharded parameter each
        worker writes its shard. The state of replica r lies under `rank<r>`. What has another size, such as PowerSGD's Q of
        a shard, lies under a key that names the shard. So do other values that differ between shards, such as step sizes.
load    as many replicas as before: each reads its own state, with the same bits. Another number: each reads the states of
        all, and `Strategy.load_state_dict` divides what was a worker's own among them, so that what is late keeps its weight.
        What is read follows from the checkpoint, because a state may have grown since it was made: by the momentum of an outer
        optimizer, or by a round in flight. On another number of shards, values that belong to no parameter are those of
        the first shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._pytree import KeyPath, MappingKey, keystr, tree_leaves_with_path, tree_map_with_path

from ..algorithm import require
from ..strategy import AveragerAttachment
from ..strategy.model.shards import placed

PLACE = "shard "
Path = tuple[str | int, ...]
"""The keys and positions that lead to a value in a checkpoint."""


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
        """The state of this worker's replica; tensors of a parameter in its shape, of sharded ones as DTensors.

        All workers of the replica call it.
        """
        parameters, state = dict(self._strategy.parameters), self._strategy.state_dict()
        leaves = tree_leaves_with_path(state)
        tensors = [(path, value) for path, value in leaves if isinstance(value, Tensor)]
        owners = {path: owner for path, _ in tensors if (owner := _owner(parameters, map(_key, path))) is not None}
        # On some shards other tensors may have a parameter's size by chance.
        fitting = [keystr(path) for path, value in tensors if path in owners and _fits(value, owners[path])]
        # What each shard measures or chooses for itself differs, such as a step size, and one key keeps one value.
        texts = {path: f"{keystr(path)} {_text(value)}" for path, value in leaves if path not in owners}
        common = self._strategy.on_all_shards([*fitting, *texts.values()])
        place = _place_among(parameters)

        def shaped(path: KeyPath, value: Any) -> Any:
            if path in owners:
                return _as_parameter(value, owners[path], keystr(path) in common)
            return value if texts[path] in common else {place: value}

        whole: dict[str, Any] = tree_map_with_path(shaped, state)
        return whole

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
    saved = dcp.FileSystemReader(checkpoint_id).read_metadata()
    paths = {name: path for name, path in (saved.planner_data or {}).items() if path[0] == key and len(path) > 2}
    found = {path[1] for path in paths.values()}
    require(
        bool(found), f"{checkpoint_id} holds no state of a strategy under {key!r}; save StrategyState(strategy) there"
    )
    is_own = len(found) == strategy.comm.size and own_key in found  # elastic: a worker's rank may have been another one
    template = {name: _emptied(own) for name in ([own_key] if is_own else sorted(found))}
    parameters = dict(strategy.parameters)
    place = _place_among(parameters)
    for name, path in paths.items():
        parameter, value = _owner(parameters, path), saved.state_dict_metadata[name]
        if isinstance(value, TensorStorageMetadata) and parameter is not None:
            is_held = _is_held(path, parameter)
        else:
            is_held = _is_taken(path, place)
        if path[1] in template and is_held:
            set_element(template, path[1:], _room(value, path, parameter))
    # Fills the tensors of the template. Another strategy's state lacks some of its lists; `load_state_dict` names the two.
    dcp.load({key: template}, checkpoint_id=checkpoint_id, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    state.load_state_dict(template)


def _key(entry: Any) -> str | int:
    """The key of a dictionary or the place in a list that an entry of a path stands for."""
    key: str | int = entry.key if isinstance(entry, MappingKey) else entry.idx
    return key


def _fits(value: Tensor, parameter: Any) -> bool:
    """Whether a tensor has an element for each of the parameter that this worker holds, in its order."""
    held = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
    in_order = value.ndim == 1 or value.shape[0] == held[:1].numel()  # flat, or a matrix of as many rows
    return value.numel() == held.numel() and in_order


def _as_parameter(value: Tensor, parameter: Any, fits: bool) -> Tensor | dict[str, Tensor]:
    sharded = isinstance(parameter, DTensor)
    if not fits:
        return {_place(parameter): value} if sharded else value
    if not sharded:
        return value.reshape(parameter.shape)
    return placed(value, parameter)


def _place(parameter: DTensor) -> str:
    """The key of what belongs to this worker's shard of a parameter, and has not its shape."""
    place = parameter.device_mesh.get_coordinate()
    return f"{PLACE}{place} of {list(parameter.device_mesh.shape)}"


def _place_among(parameters: Mapping[str, Tensor]) -> str:
    """The key of what this worker's shards have for themselves, and belongs to no parameter; "" if none is sharded."""
    return next((_place(p) for p in parameters.values() if isinstance(p, DTensor)), "")


def _text(value: Any) -> str:
    """A value that belongs to no parameter, for comparison between shards."""
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def _held(state: Any) -> Any:
    """The state with the local parts of DTensors, and without the keys of `_place`."""
    if isinstance(state, Mapping):
        values = {key: _held(value) for key, value in state.items()}
        (only, *others) = values or [""]
        return values[only] if not others and str(only).startswith(PLACE) else values
    if isinstance(state, list):
        return [_held(value) for value in state]
    return state.to_local() if isinstance(state, DTensor) else state


def _emptied(state: Any) -> Any:
    """The dictionaries and lists of a state without what they hold, because a checkpoint has no empty dictionaries."""
    if isinstance(state, list):
        return [_emptied(value) for value in state if isinstance(value, (Mapping, list))]
    return {
        key: _emptied(value)
        for key, value in state.items()
        if isinstance(value, (Mapping, list)) and not any(str(name).startswith(PLACE) for name in value)
    }


def _room(saved: Any, path: Path, parameter: Tensor | None) -> Tensor | None:
    """What to load a saved value into: a tensor of its size, a DTensor where it has a sharded parameter's shape, or None."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if not isinstance(parameter, DTensor) or str(path[-1]).startswith(PLACE):
        return torch.zeros(saved.size, dtype=dtype, device=None if parameter is None else parameter.device)
    require(saved.size == parameter.shape, _other_shards(path))
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _is_taken(path: Path, own: str) -> bool:
    """Whether this worker takes a value that belongs to no parameter: its own shard's, or of other shards the first one's."""
    place = str(path[-1])
    if not place.startswith(PLACE) or place == own:
        return True
    coordinate, _, shape = place.partition(" of ")
    return shape != own.partition(" of ")[2] and not any(digit in coordinate for digit in "123456789")


def _is_held(path: Path, parameter: Tensor) -> bool:
    """Whether this worker holds what is saved there: all that is not another shard's."""
    place = str(path[-1])
    if not place.startswith(PLACE):
        return True
    own = _place(parameter) if isinstance(parameter, DTensor) else ""
    require(place.partition(" of ")[2] == own.partition(" of ")[2], _other_shards(path))
    return place == own


def _owner(parameters: Mapping[str, Tensor], path: Iterable[str | int]) -> Tensor | None:
    """The parameter below whose name a path leads."""
    owner = None
    for key in path:
        owner = _named(parameters, key, owner) if isinstance(key, str) else owner
    return owner


def _named(parameters: Mapping[str, Tensor], key: str, otherwise: Tensor | None) -> Tensor | None:
    return parameters.get(key, parameters.get(key.rpartition(".")[0], otherwise))


def _other_shards(path: Path) -> str:
    return (
        f"{'.'.join(map(str, path))} is of other shards; a state whose size is not that of a parameter, such as PowerSGD's Q "
        "or the memory of scatter_reduce's owners, loads on as many shards as it was saved on"
    )
