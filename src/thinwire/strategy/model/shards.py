"""Sharded models: the part of each tensor that this worker holds, and the workers that hold the other parts.

`fully_shard` and tensor parallelism make parameters DTensors. Each worker of a mesh holds a local part, its *shard*, and
all shards of a mesh are one *replica* of the model. A strategy averages each shard with the shards of the other replicas
that hold the same elements:

    mesh         replica 0    replica 1
    shard 0      worker 0     worker 2      these two average their shard
    shard 1      worker 1     worker 3      and so do these two

The workers of one replica decide together whether a step is finite (`Replica.all`), so that a step is applied, and memory
commits, on all shards of the model or on none.

FSDP replaces a module's parameters by gathered ones during forward and backward, and leaves those of the root in place after a
forward pass without a backward pass. `Replica.reshard` puts the shards back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import kernels
from ...algorithm import require
from ...average.base import Averager, NamedTensors
from ...average.gossip.pairwise import Pairwise
from ...comm import Communicator, ProcessGroupCommunicator
from ...kernels.checks import described


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor. Importing DTensor takes a second; nobody can hold one without having imported it."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(t, library.DTensor)


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this worker holds, in the same memory: all of it, unless it is a DTensor."""
    if not is_sharded(t):
        return t.detach()
    with torch.no_grad():
        part: Tensor = t.to_local()  # type: ignore[attr-defined]  # a method of DTensor, which is not imported here
    return part.detach()


def placed(shard: Tensor, parameter: Any) -> Tensor:
    """A DTensor placed like a parameter, of this worker's shard of it: as many elements as the parameter's, in any shape."""
    kind: Any = type(parameter)
    whole: Tensor = kind.from_local(
        shard.reshape(parameter.to_local().shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,  # without shape and stride PyTorch takes all shards to be of equal size
        stride=parameter.stride(),
    )
    return whole


def layout_of(t: Any) -> str:
    """The tensor's global shape, placement and mesh coordinate; workers with equal layouts hold the same elements."""
    if not is_sharded(t):
        return f"whole {tuple(t.shape)} {t.dtype}"
    mesh = t.device_mesh
    placements = ", ".join(map(repr, t.placements))
    return (
        f"{tuple(t.shape)} {t.dtype} placed ({placements}) at {tuple(mesh.get_coordinate() or ())} of a mesh of "
        f"{tuple(mesh.shape)}"
    )


def trained(tensors: NamedTensors) -> dict[str, object]:
    """Which shards are trained: FSDP sums the gradients of all workers, and fails where one has frozen a parameter alone."""
    return {f"{name!r} is trained": t.requires_grad for name, t in tensors if is_sharded(t)}


class Replica:
    """The workers that together hold one replica of a model, this one among them.

    Args:
        call: the strategy's name, for messages.
        model: the model; no replica is sharded if none of its tensors is a DTensor.

    Raises:
        ValueError: a parameter is a partial sum, which no shard of another replica corresponds to.
    """

    def __init__(self, call: str, model: nn.Module):
        self._call = call
        self._modules = reshard(model)
        self._tensors: NamedTensors = [*model.named_parameters(), *model.named_buffers()]
        sharded: list[tuple[str, Any]] = [(name, t) for name, t in self._tensors if is_sharded(t)]
        self._first = sharded[0][0] if sharded else None
        # Each mesh once, in the same order on all workers, who connect in this order.
        self._meshes = list(dict.fromkeys(t.device_mesh for _, t in sharded))
        self._comms: dict[Any, list[ProcessGroupCommunicator]] = {}
        self._round_comms: list[ProcessGroupCommunicator] = []  # of their own: rounds may end in another thread
        for name, t in sharded:
            require(
                not any(placement.is_partial() for placement in t.placements),
                f"{call}: {name!r} is a DTensor of partial sums, {t.placements}; redistribute it first, such as by "
                "t.redistribute(placements=[Replicate()])",
            )

    def __bool__(self) -> bool:
        """Whether the model is sharded."""
        return self._first is not None

    def require_same_copies(self, averager: Averager | Pairwise) -> None:
        """Raise a ValueError if workers of one replica hold copies of a tensor that the averager would move apart."""
        copied = next((name for name, t in self._tensors if self._is_copied(t)), None)
        require(
            copied is None or not averager.traits.couples_tensors,
            f"{self._call}: several workers of a replica hold {copied!r}, beside shards that differ, and {averager} looks at "
            "all tensors to decide about one, so that these copies would drift apart; take an averager that looks at each "
            "tensor alone, such as Mean(QSGD(bits=4))",
        )

    def require_sharded_root(self) -> None:
        """Raise a ValueError if FSDP has a part of the model, and nothing averages the rest inside of the replica."""
        held = {id(p) for module in self._modules for p in module.parameters()}
        for name, p in self._tensors:
            require(
                not self._modules or not p.requires_grad or id(p) in held,
                f"{self._call}: {name!r} is trained, and lies outside of all modules under fully_shard, so that nothing "
                "averages its gradient inside of a replica; call fully_shard on the whole model too, after its parts",
            )

    def require_replicas(self) -> None:
        """Raise a ValueError if the model is sharded; called where the user has not said which workers are replicas."""
        if self._first is not None:
            mesh = self._meshes[0]
            raise ValueError(
                f"{self._call}: {self._first!r} is a DTensor over a mesh of {tuple(mesh.shape)}, so the model is sharded; say "
                "which workers hold the same shard of other replicas: replicas=mesh['replicate'], where the model was sharded "
                "by fully_shard(model, mesh=mesh['shard']). For a model with one replica use Shards()"
            )

    def require_mesh(self, mesh: Any) -> None:
        """Check that an elastic worker consists of the processes that hold this replica.

        Args:
            mesh: of the worker's processes; None for one.

        Raises:
            ValueError: the shards lie on other processes, or the worker has several and the model is whole.
        """
        found = next((other for other in self._meshes if other != mesh), None)
        require(
            found is None,
            f"{self._call}: {self._first!r} is a DTensor over the processes {found and found.mesh.tolist()}, which come and go "
            "together; give the communicator their mesh of one dimension, ElasticCommunicator(..., replica=mesh)",
        )
        require(
            bool(self) or mesh is None or mesh.size() == 1,
            f"{self._call}: replica={mesh} says that the model is sharded, and it is whole; leave replica out, or call "
            "fully_shard(model, mesh=mesh) first",
        )

    def connect(self, comm: Communicator) -> None:
        """Connect the workers of this replica, and check that the replicas' shards correspond. All workers call it.

        Args:
            comm: connects the workers that hold the same shard of all replicas.

        Raises:
            ValueError: on all workers of `comm`, if a tensor's layout differs between replicas, or its mesh spans them.
        """
        if self._first is None:
            return
        others = set(comm.global_ranks or []) - {(comm.global_ranks or [0])[comm.rank]}
        for mesh in self._meshes:
            shared = sorted(others & set(mesh.mesh.flatten().tolist()))
            require(
                not shared,
                f"{self._call}: the mesh of {self._first!r}, {tuple(mesh.shape)}, holds rank {shared[:1]} of another replica, "
                "so that its gradients are averaged densely already; shard over one dimension only, before a trainer does, "
                "fully_shard(model, mesh=mesh['shard']), and pass replicas=mesh['replicate']",
            )
        try:
            comm.check_agreement({f"layout of {name!r}": layout_of(t) for name, t in self._tensors})
        except ValueError as error:
            raise ValueError(
                f"{self._call}: shards of the replicas do not correspond; shard every replica alike, and let `replicas` be the "
                f"workers at the same place of each: {error}"
            ) from None
        self.connect_replica()
        for mesh in self._meshes:
            self._round_comms += self._connected_over(mesh)

    def check_agreement(self, options: dict[str, object]) -> None:
        """Raise a ValueError on all workers of this replica if options or frozen shards differ. They call it together."""
        for comm in self._connected():
            comm.check_agreement(options | trained(self._tensors))

    def connect_replica(self) -> None:
        """Connect the workers of this replica alone, without rounds. All of them call it."""
        for mesh in self._meshes:
            self._comms[mesh] = self._connected_over(mesh)

    def _connected_over(self, mesh: Any) -> list[ProcessGroupCommunicator]:
        """A communicator for each dimension of a mesh that has several workers."""
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        return [ProcessGroupCommunicator(group, device=local(self._tensors[0][1]).device) for group in groups]

    def close(self, waits: bool = True) -> None:
        """Close the connections between the workers of this replica; after an error it must not wait for the others."""
        for comm in (*self._connected(), *self._round_comms):
            comm.close() if waits else comm.abandon()
        self._comms.clear()
        self._round_comms.clear()

    def all(self, flag: bool) -> bool:
        """Whether all workers of this replica passed True. They call it together; it costs a byte a message."""
        return _all_of(self._connected(), flag)

    def commit(self, averager: Averager, state: Any) -> bool:
        """End the averager's round; memory changes only if the results on all shards are finite. Returns whether they are.

        All workers of this replica call it together.
        """
        if self:
            state.finite = _all_of(self._round_comms, kernels.flags.read(state.finite))
        finite: object = averager.commit(state)
        if not isinstance(finite, bool):  # in every round, so the message is built only when it is raised
            raise ValueError(f"{averager}: commit must return whether all results were finite, got {described(finite)}")
        return finite

    def first(self, found: Any) -> Any:
        """What the first worker of this replica passed that did not pass None. They call it together."""
        for comm in self._connected():
            found = next((value for value in comm.gather_objects(found) if value is not None), None)
        return found

    def common(self, names: Iterable[str]) -> set[str]:
        """The names that all workers of this replica passed. They call it together."""
        found = set(names)
        for comm in self._connected():
            found.intersection_update(*comm.gather_objects(sorted(found)))
        return found

    def grouped(self, tensors: Iterable[Tensor]) -> list[list[Tensor]]:
        """The tensors in groups: those of one lie on the same workers, equally many of which hold an element."""
        groups: dict[Any, list[Tensor]] = {}
        for t in tensors:
            placed: Any = t
            place = (placed.device_mesh, _num_copies(placed)) if is_sharded(t) else None
            groups.setdefault(place, []).append(t)
        return list(groups.values())

    def sum(self, values: Sequence[Tensor], of: Sequence[Tensor]) -> float:
        """The sum of `values` over all shards of this replica. Its workers call it together.

        Args:
            values: float64 scalars: of each tensor of `of`, a sum over the elements that this worker holds.
            of: the tensors themselves; an element that several workers hold counts once.
        """
        pairs: list[tuple[Tensor, Any]] = list(zip(values, of, strict=True))
        total = float(sum(value for value, t in pairs if not is_sharded(t)))
        for mesh, comms in self._comms.items():
            own = sum(float(value) / _num_copies(t) for value, t in pairs if is_sharded(t) and t.device_mesh == mesh)
            for comm in comms:
                own = sum(comm.gather_objects(own))
            total += own
        return total

    def reshard(self) -> None:
        """Make FSDP drop gathered parameters, so that the next forward pass gathers the shards as they are now."""
        for module in self._modules:
            module.reshard()

    def gathered(self) -> set[int]:
        """The `id`s of the parameters that FSDP gathers, and whose gradients it reduces."""
        return {id(p) for module in self._modules for p in module.parameters() if is_sharded(p)}

    def _is_copied(self, t: Any) -> bool:
        if is_sharded(t):
            return _num_copies(t) > 1
        # Beside FSDP, a plain tensor is one that it ignores, and has gradients of this worker alone.
        return not self._modules and t.requires_grad and any(mesh.size() > 1 for mesh in self._meshes)

    def _connected(self) -> list[ProcessGroupCommunicator]:
        return [comm for comms in self._comms.values() for comm in comms]


def reshard(model: nn.Module) -> list[Any]:
    """Make FSDP put the shards of all parameters back in place, and return the modules of `fully_shard`."""
    library = sys.modules.get("torch.distributed.fsdp")
    modules: list[Any] = [] if library is None else [m for m in model.modules() if isinstance(m, library.FSDPModule)]
    for module in modules:
        module.reshard()
    return modules


def _all_of(comms: Sequence[Communicator], flag: bool) -> bool:
    for comm in comms:
        flag = comm.all_true(flag)
    return flag


def _num_copies(t: Any) -> int:
    """How many workers of a replica hold each element of a DTensor."""
    return math.prod(t.device_mesh.size(dim) for dim, placement in enumerate(t.placements) if placement.is_replicate())
