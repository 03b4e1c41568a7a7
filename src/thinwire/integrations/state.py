"""What a strategy adds to a trainer's checkpoints: the state of a worker, or of all as one object."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import debug
from ..comm import Communicator, ProcessGroupCommunicator
from ..strategy import AveragerAttachment
from ..strategy.model.ddp import wrapped_ddp

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

    def state_dict(self) -> dict[str, Any]:
        """The state of this worker, under keys with its rank."""
        state = self._strategy.state_dict()
        if self._strategy.models_differ:
            (rank,) = state
            own = {"model": self.model.state_dict(), "optimizers": [one.state_dict() for one in self._optimizers]}
            state |= {OWN + rank: own}
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, of this worker or of all.

        On another number of workers, model and optimizers stay as the trainer has loaded them; but `Local` begins with the
        model of its last round, and warns if that loses steps.

        Raises:
            ValueError: it holds no state of this worker, or that of another configuration.
        """
        averagers = {key: value for key, value in saved.items() if not key.startswith(OWN)}
        comm = self._strategy.comm
        own = saved.get(f"{OWN}rank{comm.rank}")
        if own is not None and num_workers(saved) == comm.size:
            self.model.load_state_dict(own["model"])
            for optimizer, state in zip(self._optimizers, own["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        self._strategy.load_state_dict(averagers)

    def mean_model(self) -> dict[str, Any]:
        """A copy of the model's state, in which it is the mean of all workers, which call this together."""
        with self._strategy.average_model():
            return {name: copy.deepcopy(value) for name, value in self.model.state_dict().items()}


def num_workers(saved: dict[str, Any]) -> int:
    """How many workers there were when a state was saved."""
    size: int = next(one["identity"]["world_size"] for key, one in saved.items() if not key.startswith(OWN))
    return size


class AllWorkersState(WorkerState):
    """Gathers every worker's state when it is saved, and gives each worker its own back when it is loaded.

    Trainers such as Accelerate and Lightning write the state of the main process alone, so the memory of all others would be
    lost. With this object it holds the states of all workers when it saves: W times one worker's, which for error
    feedback is W times the model in float32, and where models differ also W models and states of optimizers. Each other
    worker sends its own to the main process, which is rank 0 before any layout. The strategy's ledger counts that.

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
        if not self._strategy.is_detached:
            return _gathered(own, self._strategy.comm)
        with ProcessGroupCommunicator() as comm:  # `detach` has closed the strategy's own
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
