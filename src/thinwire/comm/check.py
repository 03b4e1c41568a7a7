"""Checks of the arguments of operations. Each error names the rank, what was expected and what came."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .handle import CommunicationError

if TYPE_CHECKING:
    from .base import Communicator

SUMMABLE = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64]
)


def own_process(comm: Communicator) -> None:
    """Not a fork of the process that connected, which has its sockets, and not its threads."""
    if os.getpid() != comm.process:
        raise ValueError(
            f"rank {comm.rank}: this process is a fork of the worker, which alone can communicate. Train in the worker, or "
            "start the child by 'spawn' and connect it as a worker of its own."
        )


def tensor(comm: Communicator, operation: str, value: Any) -> None:
    """Dense and contiguous."""
    if not isinstance(value, Tensor):
        raise ValueError(f"rank {comm.rank}: {operation} expects a tensor, got {type(value).__name__}.")
    if value.layout != torch.strided or not value.is_contiguous():
        raise ValueError(
            f"rank {comm.rank}: {operation} expects a contiguous tensor, got shape {tuple(value.shape)} with "
            f"{'strides ' + str(value.stride()) if value.layout == torch.strided else value.layout}. "
            f"Pass tensor.{'contiguous' if value.layout == torch.strided else 'to_dense'}(), and copy the result back where "
            "it is in place."
        )
    if value.is_conj() or value.is_neg():
        raise ValueError(
            f"rank {comm.rank}: {operation} expects a tensor whose memory has its values, got a "
            f"{'conjugate' if value.is_conj() else 'negative'} view. Pass tensor.resolve_conj().resolve_neg(), and copy the "
            "result back where it is in place."
        )


def summable(comm: Communicator, value: Any) -> None:
    tensor(comm, "all_reduce", value)
    if value.dtype not in SUMMABLE:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in SUMMABLE))
        raise ValueError(f"rank {comm.rank}: all_reduce sums {names}, got {value.dtype}. Convert the tensor first.")


def flat(comm: Communicator, operation: str, value: Any) -> None:
    tensor(comm, operation, value)
    if value.dim() != 1:
        raise ValueError(
            f"rank {comm.rank}: {operation} expects 1-D tensors, got shape {tuple(value.shape)}. Pass tensor.view(-1)."
        )


def rank(comm: Communicator, operation: str, name: str, value: Any) -> None:
    if not isinstance(value, int) or not 0 <= value < comm.size:
        raise ValueError(f"rank {comm.rank}: {operation} expects {name} in 0..{comm.size - 1}, got {value!r}.")


def peers(comm: Communicator, operation: str, name: str, values: Iterable[int]) -> None:
    for peer in values:
        rank(comm, operation, f"peers in {name}", peer)
        if peer == comm.rank:
            raise ValueError(f"rank {comm.rank}: {operation} has this worker itself in {name}. Name others.")


def gather_sizes(comm: Communicator, value: Tensor, sizes: list[int] | None) -> list[int]:
    """Number of elements on each worker, the own one checked."""
    flat(comm, "all_gather", value)
    sizes = [value.numel()] * comm.size if sizes is None else list(sizes)
    own_size(comm, "all_gather", sizes, value.numel(), range(comm.size))
    return sizes


def team(comm: Communicator, ranks: Sequence[int] | None) -> list[int]:
    """The ranks that take part in an `all_to_all`: all of them if None."""
    if ranks is None:
        return list(range(comm.size))
    for value in ranks:
        rank(comm, "all_to_all", "ranks", value)
    if comm.rank not in ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"rank {comm.rank}: all_to_all expects ranks that differ, this one among them, got {ranks}.")
    return list(ranks)


def all_to_all_sizes(
    comm: Communicator, tensors: list[Tensor], sizes: list[int] | None, ranks: Sequence[int]
) -> list[int]:
    """Number of elements that comes from each worker of `ranks`."""
    one_each(comm, "all_to_all", tensors, len(ranks))
    for value in tensors:
        flat(comm, "all_to_all", value)
    of_one_dtype(comm, "all_to_all", "tensors", tensors)
    sizes = [value.numel() for value in tensors] if sizes is None else list(sizes)
    own_size(comm, "all_to_all", sizes, tensors[ranks.index(comm.rank)].numel(), ranks)
    return sizes


def parts(comm: Communicator, operation: str, values: list[Tensor], out: Tensor) -> None:
    """A tensor for each worker, the own one as large as the result; all of one dtype."""
    for value in (*values, out):
        tensor(comm, operation, value)
    one_each(comm, operation, values, comm.size)
    of_one_dtype(comm, operation, "parts and a result", [*values, out])
    if values[comm.rank].numel() != out.numel():
        raise ValueError(
            f"rank {comm.rank}: {operation} expects a result as large as the own part, {values[comm.rank].numel()} elements, "
            f"got {out.numel()}."
        )


def one_each(comm: Communicator, operation: str, values: list[Tensor], size: int) -> None:
    if len(values) != size:
        raise ValueError(f"rank {comm.rank}: {operation} expects one tensor per worker, {size}, got {len(values)}.")


def of_one_dtype(comm: Communicator, operation: str, what: str, values: list[Tensor]) -> None:
    if len({value.dtype for value in values}) > 1:
        dtypes = ", ".join(str(value.dtype) for value in values)
        raise ValueError(f"rank {comm.rank}: {operation} expects {what} of one dtype, got {dtypes}.")


def own_size(comm: Communicator, operation: str, sizes: list[int], numel: int, ranks: Sequence[int]) -> None:
    if len(sizes) != len(ranks) or min(sizes) < 0:
        raise ValueError(f"rank {comm.rank}: {operation} expects {len(ranks)} sizes, one per worker, got {sizes}.")
    own = ranks.index(comm.rank)
    if sizes[own] != numel:
        raise ValueError(
            f"rank {comm.rank}: {operation} got sizes[{own}] = {sizes[own]}, but this worker's own tensor "
            f"has {numel} elements. Pass the same sizes on every worker."
        )


def message(rank: int, peer: int, num_bytes: int, max_bytes: int) -> None:
    """A message of a channel fits its limit."""
    if num_bytes > max_bytes:
        raise ValueError(
            f"rank {rank}: a message of {num_bytes} bytes to rank {peer} exceeds the channel's limit of {max_bytes}; "
            "give open_channel a larger max_bytes on all workers."
        )


def announced_sizes(sizes: list[int], limit: int) -> list[int]:
    """Sizes that came from other workers, by rank; none chooses more memory than `limit` elements.

    Raises:
        CommunicationError: a size is below zero or above the limit.
    """
    for rank, size in enumerate(sizes):
        if not 0 <= size <= limit:
            raise CommunicationError(
                f"rank {rank} announced {size} elements, expected 0 to {limit}; do all workers run the same version and "
                "configuration?"
            )
    return sizes
