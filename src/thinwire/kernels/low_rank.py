"""Products of matrices with a few vectors, and updates of low rank, each in one pass over the matrices.

A matrix is a segment with its number of rows. Factors lie vector by vector, `(rank, n)` or `(rank, m)`, for a matrix of
n rows and m columns. Sums are taken in any order, so backends agree up to rounding; but not for bases and stored products.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from .. import debug
from ..streams import load_solvers
from . import flags
from .backend import kernel
from .checks import check_length, device_of, segments, segments_alike
from .flags import Flag
from .parallel import one_thread
from .reduce import all_finite
from .scales import float32, tree_sum

ALIGNMENT = 64  # bytes; new tensors have it
PORTABLE_RANK = 16
"""Up to so many vectors, bases and stored products in main memory have the same bits on every processor."""


def products(xs: Sequence[Tensor], rows: Sequence[int], ps: Sequence[Tensor], left: bool) -> list[Tensor]:
    """`p x` for each matrix if `left`, else `p x'`, for all vectors of p in one read of x.

    Args:
        xs: segments of float32, each a matrix (n, m) in rows.
        rows: n of each.
        ps: float32 of shape (rank, n) if `left`, else (rank, m).
        left: whether the vectors multiply the rows' side.

    Returns:
        Tensors of shape (rank, m) if `left`, else (rank, n). An infinite or NaN element of x makes some of them so.

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> products([x], [2], [torch.tensor([[1.0, 10.0]])], left=True)
        [tensor([[31., 42.]])]
    """
    device = device_of(xs)
    checked = _matrices(xs, rows, device)
    vectors, outs = _vectors(checked, rows, ps, left, device)
    _products.on[device.type](checked, list(rows), vectors, left, outs)
    return outs


def orthonormal(x: Tensor) -> Tensor:
    """Orthonormal vectors that span those of x, whatever its rank: Q' of x' = QR, where no number on R's diagonal is negative.

    In main memory up to 16 vectors are computed in float64 by Householder reflections, in a fixed order of operations.

    Args:
        x: stacks of vectors (..., rank, n), float32.

    Returns:
        (..., min(rank, n), n); some are infinite or NaN if x is.

    Raises:
        ValueError: if x is no stack of float32 vectors, contiguous and not empty.

    Example:
        >>> orthonormal(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """
    if x.dtype != torch.float32 or x.dim() < 2 or not x.numel() or not x.is_contiguous():
        raise ValueError(
            f"x: expected contiguous float32 vectors (..., rank, n), got {x.dtype} of shape {tuple(x.shape)}"
        )
    *stack, rank, n = x.shape
    out = debug.empty(*stack, min(rank, n), n, dtype=torch.float32, device=x.device)
    _orthonormal.on[x.device.type](x.detach(), out)
    return out


def add(xs: Sequence[Tensor], rows: Sequence[int], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """`x += a' b` for each matrix, in place: the sum of `rank` outer products, added in one pass.

    Args:
        xs: segments of float32, each a matrix (n, m) in rows; changed.
        rows: n of each.
        a: float32 of shape (rank, n).
        b: float32 of shape (rank, m).

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> x = torch.zeros(4)
        >>> add([x], [2], [torch.tensor([[1.0, 10.0]])], [torch.tensor([[2.0, 3.0]])])
        >>> x
        tensor([ 2.,  3., 20., 30.])
    """
    device = device_of(xs)
    checked = _checked_factors(xs, rows, a, b, device)
    _add.on[device.type](checked, list(rows), _detached(a), _detached(b))


def add_products(
    gs: Sequence[Tensor],
    es: Sequence[Tensor],
    outs: Sequence[Tensor],
    factor: float,
    rows: Sequence[int],
    ps: Sequence[Tensor],
) -> list[Tensor]:
    """Error feedback with its products: `outs[i] = es[i] + factor * gs[i]`, and `products(outs, ..., left=False)` in one pass.

    Args:
        gs: segments of float32, each a matrix (n, m) in rows.
        es: what is added to them, of the same sizes.
        outs: written.
        factor: such as one over the loss scale.
        rows: n of each.
        ps: float32 of shape (rank, m).

    Returns:
        `p out'` of each matrix, of shape (rank, n).

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> out = torch.empty(2)
        >>> add_products([torch.ones(2)], [torch.tensor([0.0, 1.0])], [out], 2.0, [1], [torch.tensor([[1.0, 10.0]])])
        [tensor([[32.]])]
        >>> out
        tensor([2., 3.])
    """
    device = device_of(gs)
    checked = _matrices(gs, rows, device)
    es = segments_alike("es", es, gs, device, "gradients")
    outs = segments_alike("outs", outs, gs, device, "gradients")
    vectors, made = _vectors(checked, rows, ps, False, device)
    _add_products.on[device.type](checked, es, factor, list(rows), vectors, outs, made)
    return made


def store(xs: Sequence[Tensor], rows: Sequence[int], a: Sequence[Tensor], b: Sequence[Tensor]) -> Flag:
    """`x = a' b` for each matrix, and whether all of it is finite.

    Results depend neither on where x lies nor on the number of threads. In main memory up to 16 outer products are added up in
    order, and each operation is rounded.

    Args:
        xs: segments of float32, each a matrix (n, m) in rows; overwritten.
        rows: n of each.
        a: float32 of shape (rank, n).
        b: float32 of shape (rank, m).

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> x = torch.empty(4)
        >>> store([x], [2], [torch.tensor([[1.0, 10.0]])], [torch.tensor([[2.0, 3.0]])])
        True
        >>> x
        tensor([ 2.,  3., 20., 30.])
    """
    device = device_of(xs)
    checked = _checked_factors(xs, rows, a, b, device)
    return _store.on[device.type](checked, list(rows), _detached(a), _detached(b))


def _vectors(
    xs: Sequence[Tensor], rows: Sequence[int], ps: Sequence[Tensor], left: bool, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Check the vectors; return them detached, and buffers for their products."""
    check_length("ps", ps, len(xs))
    outs = []
    for i, (x, n, p) in enumerate(zip(xs, rows, ps, strict=True)):
        sides = (n, x.numel() // n) if left else (x.numel() // n, n)
        _check_factor(f"ps[{i}]", p, sides[0], device)
        outs.append(debug.empty(p.shape[0], sides[1], dtype=torch.float32, device=device))
    return _detached(ps), outs


def _checked_factors(
    xs: Sequence[Tensor], rows: Sequence[int], a: Sequence[Tensor], b: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    checked = _matrices(xs, rows, device)
    check_length("a", a, len(xs))
    check_length("b", b, len(xs))
    for i, (x, n, left, right) in enumerate(zip(checked, rows, a, b, strict=True)):
        _check_factor(f"a[{i}]", left, n, device)
        _check_factor(f"b[{i}]", right, x.numel() // n, device)
        if left.shape[0] != right.shape[0]:
            raise ValueError(f"b[{i}]: expected {len(left)} vectors, as in a[{i}], got {len(right)}")
    return checked


def _detached(factors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach() if t.requires_grad else t for t in factors]


def _matrices(xs: Sequence[Tensor], rows: Sequence[int], device: torch.device) -> list[Tensor]:
    check_length("rows", rows, len(xs))
    for i, (x, n) in enumerate(zip(xs, rows, strict=True)):
        if n < 1 or x.numel() == 0 or x.numel() % n:
            raise ValueError(f"rows[{i}]: expected a divisor of the matrix's {x.numel()} elements, got {n}")
    return segments("xs", xs, device)


def _check_factor(name: str, factor: Tensor, side: int, device: torch.device) -> None:
    if (
        factor.dtype != torch.float32
        or factor.dim() != 2
        or factor.shape[0] < 1
        or factor.shape[1] != side
        or not factor.is_contiguous()
        or factor.device != device
    ):
        raise ValueError(
            f"{name}: expected contiguous float32 of shape (rank, {side}) on {device}, got {factor.dtype} of shape "
            f"{tuple(factor.shape)} on {factor.device}"
        )


# ---- the reference ----


@kernel
def _products(xs: list[Tensor], rows: list[int], ps: list[Tensor], left: bool, outs: list[Tensor]) -> None:
    for x, n, p, out in zip(xs, rows, ps, outs, strict=True):
        matrix = x.view(n, -1)
        torch.mm(p, matrix if left else matrix.t(), out=out)


@kernel
def _orthonormal(x: Tensor, out: Tensor) -> None:
    rank = x.shape[-2]
    if flags.in_main_memory(x.device) and rank <= PORTABLE_RANK:
        for vectors, result in zip(x.view(-1, *x.shape[-2:]), out.view(-1, *out.shape[-2:]), strict=True):
            _by_reflections(vectors.double(), result)
        return
    if rank == 1:  # without a solver
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        out.zero_()[..., 0] = 1.0
        out.copy_(torch.where(norm == 0, out, x / norm))
        return
    load_solvers(x.device)
    with one_thread():
        q, r = torch.linalg.qr(x.mT)
    negative = r.diagonal(dim1=-2, dim2=-1) < 0
    out.copy_(torch.where(negative[..., None], -q.mT, q.mT))


def _by_reflections(vectors: Tensor, out: Tensor) -> None:
    """Householder's QR in float64, in a fixed order. Reflection j is `1 - factor v v'`, and v begins with j zeros."""
    reflections = list[tuple[Tensor, float]]()
    signs = list[float]()
    for j, v in enumerate(vectors[: len(out)]):
        for reflection in reflections:
            _reflect(v, *reflection)
        first = v[j].item()
        v[: j + 1] = 0.0
        rest, sign = tree_sum(v * v).item(), -1.0 if first < 0 else 1.0
        if rest == 0:
            factor = 0.0 * first  # NaN if `first` is infinite
        else:
            sign = -sign  # so that the subtraction below does not cancel
            turned = sign * sqrt(first * first + rest)
            factor = (turned - first) / turned
            v /= first - turned
        v[j] = 1.0
        reflections.append((v, factor))
        signs.append(sign)
    for j, (sign, q) in enumerate(zip(signs, out, strict=True)):
        x = torch.zeros_like(vectors[0])
        x[j] = sign
        for reflection in reversed(reflections[: j + 1]):
            _reflect(x, *reflection)
        q.copy_(x)


def _reflect(x: Tensor, v: Tensor, factor: float) -> None:
    x -= factor * tree_sum(v * x).item() * v


@kernel
def _add(xs: list[Tensor], rows: list[int], a: list[Tensor], b: list[Tensor]) -> None:
    for x, n, left, right in zip(xs, rows, a, b, strict=True):
        left, right = _exact_factors(left, right)
        x.view(n, -1).addmm_(left.t(), right)


@kernel
def _add_products(
    gs: list[Tensor],
    es: list[Tensor],
    factor: float,
    rows: list[int],
    ps: list[Tensor],
    outs: list[Tensor],
    made: list[Tensor],
) -> None:
    for g, e, out in zip(gs, es, outs, strict=True):
        torch.add(e, g if factor == 1.0 else g * float32(factor, g.device), out=out)
    _products.on[device_of(outs).type](outs, rows, ps, False, made)


@kernel
def _store(xs: list[Tensor], rows: list[int], a: list[Tensor], b: list[Tensor]) -> Flag:
    for x, n, left, right in zip(xs, rows, a, b, strict=True):
        if flags.in_main_memory(x.device) and len(left) <= PORTABLE_RANK:
            matrix = torch.mul(left[0][:, None], right[0], out=x.view(n, -1))
            for column, row in zip(left[1:], right[1:], strict=True):
                matrix += column[:, None] * row
            continue
        left, right = _exact_factors(left, right)
        with one_thread():
            # Elsewhere BLAS may round differently, and workers' tensors may lie differently.
            if x.data_ptr() % ALIGNMENT == 0:
                torch.mm(left.t(), right, out=x.view(n, -1))
            else:
                x.view(n, -1).copy_(left.t() @ right)
    return all_finite(xs)


def _exact_factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product, which matrix units that read TensorFloat-32 (10 bits of mantissa) compute in float32.

    What a worker subtracts from its memory and what the others add are products of one factor with different others.
    Rounded one by one, they would not cancel.
    """
    if not _reads_tf32(a.device):
        return a, b
    a_high, b_high = _high_bits(a), _high_bits(b)
    return torch.cat([a_high, a_high, a - a_high]), torch.cat([b_high, b - b_high, b_high])


def _reads_tf32(device: torch.device) -> bool:
    """Whether the user lets matrix products on this device read TensorFloat-32."""
    return device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _high_bits(x: Tensor) -> Tensor:
    """What TensorFloat-32 holds of x."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)  # 10 of the mantissa's 23 bits stay
