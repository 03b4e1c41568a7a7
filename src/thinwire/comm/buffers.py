"""Tensors as memory: their bytes, new ones to receive into, copies in main memory, and copies back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import debug
from .handle import Wait


def flat_like(tensor: Tensor, numel: int) -> Tensor:
    """A new flat tensor of the same dtype and device, to receive into."""
    return debug.empty(numel, dtype=tensor.dtype, device=tensor.device)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as (num_bytes,) uint8."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() < 2:  # the stride of so few elements may be anything, and `view` asks for 1
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def wait_and_copy(wait: Wait, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Wait, and copy what came to where it belongs.

    Args:
        wait: for an operation.
        copies: pairs of a tensor of the caller's and the one in main memory that was written, which may be the same.
    """
    wait()
    for tensor, staged in copies:
        if staged is not tensor:
            tensor.copy_(staged, non_blocking=True)


def staged_tensor(tensor: Tensor, copied: bool = True) -> Tensor:
    """The tensor itself if it is in main memory; else pinned memory of its shape, with its contents if `copied`.

    The thread sleeps until a GPU has copied it; a blocking copy would spin.
    """
    if tensor.device.type == "cpu":
        return tensor
    staged = debug.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    if copied:
        staged.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            done = torch.cuda.Event(blocking=True)
            done.record(torch.cuda.current_stream(tensor.device))
            done.synchronize()
    return staged


def all_staged(sends: dict[int, Tensor]) -> dict[int, Tensor]:
    """`staged_tensor` of vectors of bytes, by one copy; a vector may go to several peers."""
    once = {id(tensor): tensor for tensor in sends.values()}
    tensors = list(once.values())
    if len(tensors) > 1 and tensors[0].device.type != "cpu":
        tensors = list(staged_tensor(torch.cat(tensors)).split([tensor.numel() for tensor in tensors]))
    else:
        tensors = [staged_tensor(tensor) for tensor in tensors]
    staged = dict(zip(once, tensors, strict=True))
    return {peer: staged[id(tensor)] for peer, tensor in sends.items()}


class Spare:
    """Memory to receive into that is used again: the first touch of fresh pages costs about as much as receiving into them.

    Example:
        >>> spare = Spare()
        >>> memory = spare.take(torch.zeros(2, 3))
        >>> memory.shape
        torch.Size([6])
        >>> spare.give_back(memory)
    """

    MIN_BYTES = 1 << 17  # below, `malloc` uses memory again by itself
    MAX_BYTES = 1 << 26  # kept in all

    def __init__(self) -> None:
        self._kept: deque[Tensor] = deque()  # the oldest first
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Tensor:
        """A flat tensor with the dtype and the number of elements of `like`."""
        with self._lock:
            for index, memory in enumerate(self._kept):
                if memory.numel() == like.nbytes:
                    del self._kept[index]
                    return memory.view(like.dtype)
        return debug.empty(like.numel(), dtype=like.dtype, device="cpu")

    def give_back(self, tensor: Tensor) -> None:
        """Take back what `take` has returned; nobody reads or writes it any more."""
        if tensor.nbytes < self.MIN_BYTES or debug.enabled:
            return
        with self._lock:
            self._kept.append(as_bytes(tensor))
            while sum(memory.numel() for memory in self._kept) > self.MAX_BYTES:
                self._kept.popleft()
