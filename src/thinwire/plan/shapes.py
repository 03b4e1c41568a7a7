"""Shapes of results on the meta device, without PyTorch's compiler.

PyTorch finds the shapes of most meta operations in Python, and imports its compiler for that, which takes longer than a
whole plan. `Shapes` finds them for the operations that averagers use. PyTorch does all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Shapes(TorchFunctionMode):
    """Context in which results on the meta device get their shape and dtype from `RULES`.

    Example:
        >>> with Shapes():
        ...     x = torch.empty(2, 3, device="meta")
        ...     (x.abs() + 1.0).shape, torch.cat([x, x]).shape, (x @ x.T).shape, x.isfinite().dtype
        (torch.Size([2, 3]), torch.Size([4, 3]), torch.Size([2, 2]), torch.bool)
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(getattr(func, "__name__", ""))
        if rule is not None and _is_meta(args, kwargs):
            return rule(*args, **kwargs)
        return func(*args, **kwargs)


def _is_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the device that is asked for, the first argument, or the first one of a list is meta."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "meta"
    first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
    return isinstance(first, Tensor) and first.is_meta


def _empty(shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _elementwise(a: Tensor, b: Any, *, out: Tensor | None = None, **_: Any) -> Tensor:
    """The broadcast of two tensors, or of a tensor and a number."""
    if out is not None:
        return out
    if not isinstance(b, Tensor):
        return _empty(a.shape, torch.result_type(a, b))
    return _empty(_broadcast(a.shape, b.shape), torch.result_type(a, b))


def _broadcast(a: torch.Size, b: torch.Size) -> list[int]:
    """As `torch.broadcast_shapes`, which imports the compiler too."""
    if a == b:
        return list(a)
    longest = max(len(a), len(b))
    padded = [[1] * (longest - len(shape)) + list(shape) for shape in (a, b)]
    return [n if m == 1 else m for m, n in zip(*padded, strict=True)]


def _in_place(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _new(size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _empty((size,) if isinstance(size, int) else size, dtype)


def _arange(end: int, dtype: torch.dtype = torch.int64, **_: Any) -> Tensor:
    return _empty((end,), dtype)


def _like(x: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _empty(x.shape, dtype or x.dtype)


def _new_zeros(x: Tensor, size: Any, dtype: torch.dtype | None = None) -> Tensor:
    return _new(size, dtype or x.dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _empty(shape, tensors[0].dtype)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return _empty((len(tensors), *tensors[0].shape), tensors[0].dtype)


def _tensor_split(x: Tensor, sections: int | list[int]) -> tuple[Tensor, ...]:
    """Pieces of equal shape are one tensor: they have no values, and a thousand workers have as many pieces."""
    if not isinstance(sections, int):
        ends = [*sections, x.shape[0]]
        return tuple(x[start:end] for start, end in zip([0, *sections], ends, strict=True))
    rows, longer = divmod(x.shape[0], sections)
    return (x[: rows + 1],) * longer + (x[:rows],) * (sections - longer)


class _QR(NamedTuple):
    Q: Tensor
    R: Tensor


def _norm(x: Tensor, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    return _empty((), dtype or x.dtype) if dim is None else x.narrow(dim, 0, min(1, x.shape[dim]))


def _amax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        return _empty((), x.dtype)
    return x.narrow(dim, 0, 1) if keepdim else x.select(dim, 0)


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    return _empty((a.shape[0], b.shape[1]), a.dtype) if out is None else out


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "__and__", "__xor__", "__rshift__"), _elementwise),
    **dict.fromkeys(("add_", "sub_", "mul_", "zero_", "copy_", "addmm_"), _in_place),
    **dict.fromkeys(("zeros_like", "empty_like", "abs", "neg", "sign"), _like),
    "clamp": lambda x, *_, **__: _like(x),
    "_foreach_mul": lambda tensors, factors: list(map(_like, tensors)),
    **dict.fromkeys(("matmul", "mm"), _product),
    "zeros": _new,
    "arange": _arange,
    **dict.fromkeys(("new_zeros", "new_empty"), _new_zeros),
    "cat": _cat,
    "stack": _stack,
    "tensor_split": _tensor_split,
    "isfinite": lambda x: _empty(x.shape, torch.bool),
    "all": lambda x: _empty((), torch.bool),
    "linalg_vector_norm": _norm,
    "addmm": lambda x, a, b, **_: _empty(x.shape, x.dtype),
    "linalg_qr": lambda x: _QR(x, x[..., : x.shape[-1], :]),  # of tall matrices
    "amax": _amax,
    **dict.fromkeys(("__eq__", "gt", "lt"), lambda a, b: _empty(a.shape, torch.bool)),
    **dict.fromkeys(("maximum", "minimum"), _elementwise),
    "where": lambda condition, a, b: _elementwise(a, b),
}
"""Name of an operation => what makes a result of the right shape and dtype."""
