"""The state of all workers as one object, for trainers that save a checkpoint on one worker alone."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from .. import debug
from ..comm import Communicator
from ..strategy import AveragerAttachment


class AllWorkersState:
    """Gathers every worker's state when it is saved, and gives each worker its own back when it is loaded.

    A strategy's `state_dict` holds the memory of one worker. Trainers such as Accelerate and Lightning write the state of
    the main process alone, so the memory of all others would be lost. With this object rank 0 holds the states of all
    workers when it saves: W times one worker's, which for error feedback is W times the model in float32. Each other
    worker sends its own to rank 0; the strategy's ledger counts that.

    Args:
        strategy: what `attach` returned.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.integrations.state import AllWorkersState
        >>> def worker(comm):
        ...     model = torch.nn.Linear(2, 2, bias=False)
        ...     with tw.compress_gradients(model, tw.Mean(tw.TopK(0.5), tw.ErrorFeedback()), comm=comm) as strategy:
        ...         state = AllWorkersState(strategy)
        ...         saved = state.state_dict()
        ...         state.load_state_dict(saved)
        ...     return sorted(saved)
        >>> tw.LocalWorld(2).run(worker)
        [['rank0', 'rank1'], ['rank1']]
    """

    def __init__(self, strategy: AveragerAttachment):
        self._strategy = strategy

    def state_dict(self, comm: Communicator | None = None) -> dict[str, Any]:
        """On rank 0 the states of all workers, by rank; on each other worker its own. All workers call it together.

        Args:
            comm: how to gather them; by default the strategy's communicator, whose ledger then counts it.
        """
        comm, own = comm or self._strategy.comm, self._strategy.state_dict()
        payload = _pack(own)
        # States differ in length, and `exchange` needs buffers of the right size.
        sizes = comm.all_gather(torch.tensor([payload.numel()], device=comm.device)).wait()
        if comm.rank:
            comm.exchange({0: payload.to(comm.device)}, {}).wait()
            return own
        for rank in range(1, comm.size):
            # One after the other: over NCCL they come to the GPU, which may have room for one.
            buffer = debug.empty(int(sizes[rank]), dtype=torch.uint8, device=comm.device)
            own |= _unpack(comm.exchange({}, {rank: buffer}).wait()[rank])
        return own

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore this worker's part of what `state_dict` returned on rank 0.

        Raises:
            ValueError: it holds no state of this worker, or that of another number of workers or another configuration.
        """
        self._strategy.load_state_dict(saved)


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
