"""Operations of an elastic round on its process groups: torchft's Gloo, and NCCL for tensors on GPUs if asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .handle import CommunicationError, reason_of

HANG_UP_TAG = 1  # all messages have tag 0


class Groups:
    """The process groups of a round. Each operation is started at the call, and returns a function that waits for its end.

    Args:
        nccl: for tensors on a GPU; None sends them through main memory.
        limit: how long to wait for a message over Gloo; it may be changed.

    Attributes:
        gloo: the group of the present round; None before the first, and while one is connected.
    """

    def __init__(self, nccl: Any, limit: timedelta):
        self.nccl, self.gloo, self.limit = nccl, None, limit

    gloo: Any

    def all_reduce(self, tensor: Tensor) -> Callable[[], Any]:
        """Add up a tensor over all workers, in place."""
        if self._goes_over_nccl(tensor):
            return partial(_order_stream, self.nccl.allreduce([tensor], dist.AllreduceOptions()))
        sent = _in_main_memory(tensor)
        work = self.gloo.allreduce([sent], dist.AllreduceOptions())
        return partial(wait_for_all, [("", work)], [(tensor, sent)], self.limit)

    def broadcast(self, tensor: Tensor, root: int) -> Callable[[], Any]:
        """Give all workers the tensor of rank `root`, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if self._goes_over_nccl(tensor):
            return partial(_order_stream, self.nccl.broadcast([tensor], options))
        sent = _in_main_memory(tensor)
        work = self.gloo.broadcast([sent], options)
        return partial(wait_for_all, [(f"from rank {root}", work)], [(tensor, sent)], self.limit)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        """Send a tensor to each of some ranks, and receive into a tensor from each of some."""
        if any(map(self._goes_over_nccl, (*sends.values(), *receives.values()))):
            return partial(_order_stream, self.nccl.exchange(sends, receives))
        landing = {peer: _in_main_memory(tensor) for peer, tensor in receives.items()}
        works = [(f"from rank {peer}", self.gloo.recv([tensor], peer, 0)) for peer, tensor in landing.items()]
        works += [(f"to rank {peer}", self.gloo.send([_in_main_memory(t)], peer, 0)) for peer, t in sends.items()]
        copies = [(receives[peer], tensor) for peer, tensor in landing.items()]
        return partial(wait_for_all, works, copies, self.limit)

    def hang_up(self, rank: int, size: int) -> None:
        """Close the connections. Over Gloo, workers that wait for this one fail at once; see `process_group.py`."""
        if self.nccl is not None:
            self.nccl.abort()
        for peer in range(size if self.gloo is not None else 0):
            if peer != rank:
                with contextlib.suppress(RuntimeError, ValueError):
                    self.gloo.recv([torch.empty(1, device="cpu")], peer, HANG_UP_TAG).wait(timedelta(milliseconds=1))

    def _goes_over_nccl(self, tensor: Tensor) -> bool:
        return self.nccl is not None and tensor.device.type == "cuda"


def wait_for_all(works: list[tuple[str, Any]], copies: list[tuple[Tensor, Tensor]], limit: timedelta) -> None:
    """Wait for operations over Gloo, and copy what came to where it belongs.

    Args:
        works: what each is called in an error, and the operation.
        copies: pairs of a tensor of the caller's and the one in main memory that Gloo wrote, which may be the same.
        limit: how long to wait for each.

    Raises:
        CommunicationError: an operation failed.
    """
    for what, work in works:
        try:
            work.wait(limit)  # Gloo's own limit is that of connecting
        except RuntimeError as error:
            raise CommunicationError(f"{what}: {reason_of(error)}" if what else reason_of(error)) from error
    for tensor, received in copies:
        if received is not tensor:
            tensor.copy_(received)


def _order_stream(work: Any) -> None:
    """Make the current stream wait; the host does not."""
    work.wait()


def _in_main_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
