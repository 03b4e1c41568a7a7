"""What a strategy adds to a trainer's checkpoints: the state of a worker, or of all as one object.

Where the model is sharded, workers that average with each other hold the same shard, and all their keys begin with it, such as
"shard 0 of 2, rank1". Of the model and the optimizers each worker saves its own shard, as a plain tensor.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .. import debug
from ..algorithm import require
from ..comm import Communicator, ProcessGroupCommunicator
from ..comm.process_group import num_ranks
from ..strategy import AveragerAttachment, OwnModelAttachment
from ..strategy.model.ddp import wrapped_ddp
from ..strategy.model.shards import is_sharded, local, placed

OWN = "own of "


class WorkerState:
    """What a worker has for itself: the strategy's state, and if models differ between workers, its model and optimizers.

    Args:
        strategy: what `attach` returned.
        model: the model that it was given.
        optimizers: those that step on the model.

    Attributes:
        model: without DDP around it.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.integrations.state import WorkerState
        >>> def worker(comm):
        ...     model = torch.nn.Linear(2, 2, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     with tw.attach(model, optimizer, "Local(Mean(), every=2)", comm=comm) as strategy:
        ...         return sorted(WorkerState(strategy, model, [optimizer]).state_dict())
        >>> tw.LocalWorld(2).run(worker)
        [['own of rank0', 'rank0'], ['own of rank1', 'rank1']]
    """

    def __init__(self, strategy: AveragerAttachment, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]):
        ddp = wrapped_ddp(model)
        self._strategy, self._optimizers = strategy, optimizers
        self.model = model if ddp is None else ddp.module
        self._shard = _shard_of(strategy)
        if self._shard and isinstance(strategy, OwnModelAttachment):
            strategy.end_with_mean()

    def state_dict(self) -> dict[str, Any]:
        """The state of this worker, under keys with its rank."""
        state = self._strategy.state_dict()
        if self._strategy.models_differ:
            (rank,) = state
            own = {"model": self.model.state_dict(), "optimizers": [one.state_dict() for one in self._optimizers]}
            state |= {OWN + rank: tree_map(lambda value: local(value) if isinstance(value, Tensor) else value, own)}
        return {f"{self._shard}, {key}" if self._shard else key: value for key, value in state.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, of this worker or of all.

        On another number of workers, model and optimizers stay as the trainer has loaded them; but `Local` begins with the
        model of its last round, and warns if that loses steps.

        Raises:
            ValueError: it holds no state of this worker, or that of another configuration, or of other shards.
        """
        found = {own: value for key, value in saved.items() for shard, own in [_split(key)] if shard == self._shard}
        require(
            bool(found),
            f"the state of {self._shard or 'a whole model'} is needed, and the checkpoint has {sorted(saved)}; resume on as "
            "many shards, or save with thinwire.integrations.checkpoint, which loads on any number",
        )
        averagers = {key: value for key, value in found.items() if not key.startswith(OWN)}
        comm = self._strategy.comm
        own = found.get(f"{OWN}rank{comm.rank}")
        if own is not None and num_workers(found) == comm.size:
            held = self.model.state_dict()
            self.model.load_state_dict({name: _placed(value, held[name]) for name, value in own["model"].items()})
            for optimizer, state in zip(self._optimizers, own["optimizers"], strict=True):
                optimizer.load_state_dict(state)
                for p, values in optimizer.state.items():
                    values.update({name: _placed(value, p) for name, value in values.items()})
        self._strategy.load_state_dict(averagers)

    def mean_model(self) -> dict[str, Any]:
        """A copy of the model's state, in which it is the mean of all workers, which call this together."""
        with self._strategy.average_model():
            return {name: copy.deepcopy(value) for name, value in self.model.state_dict().items()}


def num_workers(saved: dict[str, Any]) -> int:
    """How many workers there were when a state was saved, those of all shards."""
    entries = [(*_split(key), entry) for key, entry in saved.items()]
    shard, entry = next((shard, entry) for shard, key, entry in entries if not key.startswith(OWN))
    num_shards = int(shard.rpartition(" ")[2] or 1)
    return int(entry["identity"]["world_size"] * num_shards)


def _shard_of(strategy: AveragerAttachment) -> str:
    """Which shard of the model this worker holds, by its first worker, and of how many; empty if the model is whole."""
    if not any(is_sharded(p) for _, p in strategy.parameters):
        return ""
    comm = strategy.comm
    return f"shard {min(comm.global_ranks)} of {num_ranks() // comm.size}"


def _split(key: str) -> tuple[str, str]:
    """The shard that a key begins with, empty if there is none, and the rest."""
    shard, _, rest = key.rpartition(", ")
    return shard, rest


def _placed(value: Any, parameter: Any) -> Any:
    """A shard that was saved as a plain tensor, as a DTensor placed like the parameter; any other value unchanged."""
    if not is_sharded(parameter) or not isinstance(value, Tensor) or value.shape != local(parameter).shape:
        return value
    return placed(value.to(parameter.device), parameter)


class AllWorkersState(WorkerState):
    """Gathers every worker's state when it is saved, and gives each worker its own back when it is loaded.

    Trainers such as Accelerate and Lightning write the state of the main process alone, so the memory of all others would be
    lost. With this object it holds the states of all workers when it saves: W times one worker's, which for error
    feedback is W times the model in float32, and where models differ also W models and states of optimizers. Each other
    worker sends its own to the main process, which is rank 0 before any layout. The strategy's ledger counts that, unless the
    model is sharded: then the strategy connects only workers that hold the same shard, and all connect once more here.

    Args:
        strategy, model, optimizers: as of `WorkerState`.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.integrations.state import AllWorkersState
        >>> def worker(comm):
        ...     model = torch.nn.Linear(2, 2, bias=False)
        ...     with tw.compress_gradients(model, tw.Mean(tw.TopK(0.5), tw.ErrorFeedback()), comm=comm) as strategy:
        ...         state = AllWorkersState(strategy, model, [])
        ...         saved = state.state_dict()
        ...         state.load_state_dict(saved)
        ...     return sorted(saved)
        >>> tw.LocalWorld(2).run(worker)
        [['rank0', 'rank1'], ['rank1']]
    """

    def state_dict(self) -> dict[str, Any]:
        """On the main process the states of all workers, by rank; on each other its own. All workers call it together."""
        own = super().state_dict()
        if not self._strategy.is_detached and not self._shard:
            return _gathered(own, self._strategy.comm)
        # `detach` has closed the strategy's own communicator, which connects the workers of one shard only.
        with ProcessGroupCommunicator() as comm:
            return _gathered(own, comm)


def _gathered(own: dict[str, Any], comm: Communicator) -> dict[str, Any]:
    payload, main = _pack(own), 0 if comm.layout is None else comm.layout.order.index(0)
    # States differ in length, and `exchange` needs buffers of the right size.
    sizes = comm.all_gather(torch.tensor([payload.numel()], device=comm.device)).wait()
    if comm.rank != main:
        comm.exchange({main: payload.to(comm.device)}, {}).wait()
        return own
    for rank in (rank for rank in range(comm.size) if rank != main):
        # One after the other: over NCCL they come to the GPU, which may have room for one.
        buffer = debug.empty(int(sizes[rank]), dtype=torch.uint8, device=comm.device)
        own |= _unpack(comm.exchange({}, {rank: buffer}).wait()[rank])
    return own


def _pack(state: dict[str, Any]) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    # A copy, as PyTorch wants a writable buffer.
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpack(payload: Tensor) -> dict[str, Any]:
    # Not on the sender's GPU, and without the code that a pickle of another worker could run.
    state: dict[str, Any] = torch.load(
        io.BytesIO(payload.cpu().numpy().tobytes()), map_location="cpu", weights_only=True
    )
    return state
