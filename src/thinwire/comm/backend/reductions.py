"""What `ReduceOp` means: how the tensors of all ranks are combined, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..reduction import Reduction, combine, summing

Kind = Any  # PyTorch's type for these is `ReduceOp` itself
OPERATIONS: dict[Kind, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """How tensors of this dtype are combined.

    Raises:
        ValueError: PyTorch has no such operation for the dtype; an average of integers is none.
    """
    kind: Kind = getattr(op, "op", op)
    averages = kind == dist.ReduceOp.AVG
    if kind not in OPERATIONS or not _is_defined(OPERATIONS[kind], dtype) or (averages and not _divides(dtype)):
        raise ValueError(
            f"ReduceOp.{name_of(op)} is not defined for {dtype}; convert the tensor, or choose another operation"
        )
    if averages:
        return _mean
    if kind == dist.ReduceOp.PREMUL_SUM:
        return partial(_scaled_sum, op.__getstate__()[1])
    return partial(combine, OPERATIONS[kind])


def name_of(op: Any) -> str:
    """Such as SUM."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _mean(terms: Sequence[Tensor], out: Tensor) -> None:
    summing(terms, out)
    out.div_(len(terms))


def _scaled_sum(factor: float | Tensor, terms: Sequence[Tensor], out: Tensor) -> None:
    summing([term * factor for term in terms], out)


def _divides(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@lru_cache
def _is_defined(operation: Callable[..., Tensor], dtype: torch.dtype) -> bool:
    one = torch.ones(1, dtype=torch.uint8, device="cpu").to(dtype)
    try:
        operation(one, one)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True
