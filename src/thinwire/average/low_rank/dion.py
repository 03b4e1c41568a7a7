"""Dion: orthonormal updates of low rank. The result of a round is the update itself.

A tensor of two or more dimensions is a matrix X (n x m). Each worker has a momentum M, and all share Q (m x r):

    1. B = M + g                              each worker
    2. P = orth(1/W sum_i B_i Q)              one all-reduce, the dense tensors with it
    3. R = 1/W sum_i B_i' P                   one all-reduce
    4. M <- B - (1 - mu) P R'                 each worker, if all was finite
    5. Q <- R with columns of length 1        the same on all workers
    6. result = sqrt(n/m) P Q'

Phases 2 to 6 run in `wait`, so that one thread issues all collectives of a worker, in the order of the calls of `step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from ... import kernels
from ...comm import Communicator, Handle
from ...membership import config, own, pending, shared
from ...options import require_integer, require_number
from ..base import (
    Averager,
    AveragerState,
    NamedTensors,
    begin_step,
    check_agreement,
    check_waited,
    copy_changed,
    result_buffers,
)
from ..traits import AveragerTraits
from .matrices import all_reduce_parts, bases, by_shape, columns, gains, scaled_each, warm_start


@dataclass
class DionState(AveragerState):
    """What changes while `Dion` runs.

    Attributes:
        seed: the seed of all random numbers of the run.
        momentum: M (n, m) of each matrix, unscaled.
        q: Q' (r, m) of each matrix.
        pending: what M and Q' become at `commit`.
    """

    seed: int = config()
    momentum: dict[str, Tensor] = own()
    q: dict[str, Tensor] = shared()
    pending: dict[str, tuple[Tensor, Tensor]] = pending(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Dion(Averager):
    """Every worker gets `sqrt(n/m) P Q'`, an orthonormal update of rank r, for each matrix-shaped tensor.

    The result is the update: use an optimizer without momentum, `x <- x - lr sqrt(n/m) P Q'`, such as `torch.optim.SGD`.
    It follows Muon's direction, of which it keeps the r leading singular vectors, with singular values of one. What a
    round leaves out stays in the momentum M, so there is no error feedback besides. Two all-reduces, one after the other;
    a worker sends

        2(W-1)/W * 4 * (sum over matrices of r (n + m)  +  number of dense elements)    bytes per step.

    Vectors travel dense, and so do matrices too small to gain, `r (n + m) >= n m`; their result is the mean gradient, to which
    no momentum is applied. Results have the same bits on all workers, as those of `PowerSGD` do.

    Args:
        rank: r, columns of P and Q; higher => more bytes, more directions in an update.
        mu: share of what was applied that stays in the momentum, in [0, 1); higher => a longer memory.

    Raises:
        ValueError: a value out of range.

    Source: Ahn et al. 2025, Dion, arXiv 2504.05295.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.outer(torch.arange(4.0), torch.ones(4)) * (comm.rank + 1)
        ...     averager = tw.average.Dion(rank=1)
        ...     state = averager.init([("x", x)], comm)
        ...     averager.step(state, [("x", x)], comm).wait()
        ...     averager.commit(state)
        ...     return round(torch.linalg.matrix_norm(x, 2).item(), 5)
        >>> tw.LocalWorld(2).run(worker)  # whatever the gradient's size
        [1.0, 1.0]
    """

    traits = AveragerTraits(has_momentum=True)

    rank: int = 16
    mu: float = 0.95

    def __post_init__(self) -> None:
        require_integer("Dion: rank", self.rank, 1)
        require_number("Dion: mu", self.mu, least=0, below=1)

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> DionState:
        check_agreement(self, tensors, comm, seed)
        matrices = [(name, t) for name, t in tensors if gains(t, self.rank)]
        empty = {name: torch.empty((0, columns(t)), dtype=torch.float32, device=t.device) for name, t in matrices}
        return DionState(
            seed=seed,
            momentum={
                name: torch.zeros((len(t), columns(t)), dtype=torch.float32, device=t.device) for name, t in matrices
            },
            q={name: _unit_rows(warm_start(q, seed, name, self.rank)) for name, q in empty.items()},
            shapes={name: t.shape for name, t in tensors},
        )

    def step(self, state: DionState, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        begin_step(self, state, tensors, comm.rank)
        comm.ledger.count_averaged(sum([t.numel() for _, t in tensors]))
        matrices = [(name, t.detach()) for name, t in tensors if name in state.q]
        dense = [t.detach() for name, t in tensors if name not in state.q]
        with state.clock("compensate"):
            # Momentum is unscaled, and gradients carry the loss scale.
            bs = [torch.add(state.momentum[n], t.float().reshape(len(t), -1), alpha=1 / scale) for n, t in matrices]
        handle = Handle(lambda: self._finish(state, matrices, bs, dense, comm, scale))
        state.handles.append(handle)
        return handle

    def commit(self, state: DionState) -> bool:
        check_waited(self, state.handles)
        finite = kernels.flags.read(state.finite)
        if finite:
            for name, (momentum, q) in state.pending.items():
                state.momentum[name], state.q[name] = momentum, q
        self.discard(state)
        state.progress = state.progress._replace(step=state.progress.step + 1)
        return finite

    def _finish(
        self,
        state: DionState,
        matrices: list[tuple[str, Tensor]],
        bs: list[Tensor],
        dense: list[Tensor],
        comm: Communicator,
        scale: float,
    ) -> None:
        """Phases 2 to 6 of the module's docstring."""
        clock, rows, xs = state.clock, [len(b) for b in bs], [b.view(-1) for b in bs]
        with clock("encode"):
            products = kernels.low_rank.products(xs, rows, [state.q[name] for name, _ in matrices], left=False)
        sums = all_reduce_parts([*products, *(t.float() for t in dense)], comm, clock)()
        with clock("encode"):
            ps = bases(sums[: len(matrices)])  # the scale of a sum does not change them
            own = kernels.low_rank.products(xs, rows, ps, left=True)
        totals = all_reduce_parts(own, comm, clock)()
        with clock("decode"):
            rs = by_shape(lambda total: total / comm.size, totals)
            # No update where there is no gradient. Results carry the loss scale, as gradients do.
            units = by_shape(_unit_rows, rs)
            updates = scaled_each(units, [scale * sqrt(b.shape[0] / b.shape[1]) for b in bs])
            kernels.low_rank.add(xs, rows, by_shape(lambda p: p * (self.mu - 1.0), ps), rs)
            qs = by_shape(_or_old, units, [state.q[name] for name, _ in matrices])
            state.pending.update((name, (b, q)) for (name, _), b, q in zip(matrices, bs, qs, strict=True))
            targets = [t for _, t in matrices]
            outs = result_buffers(targets)
            finite = kernels.low_rank.store([out.view(-1) for out in outs], rows, ps, updates)
            for t, total in zip(dense, sums[len(matrices) :], strict=True):
                t.copy_(total / comm.size)
            results = [finite, copy_changed(outs, targets), kernels.all_finite(dense)]
            # A row of R may be infinite, and its unit vector not.
            state.finite = kernels.flags.all_of([state.finite, *results, kernels.all_finite(totals)])


def _unit_rows(q: Tensor) -> Tensor:
    """Rows scaled to length 1; a row of zeros stays zero."""
    units = kernels.low_rank.orthonormal(q.unsqueeze(-2)).squeeze(-2)
    return torch.where(q.abs().amax(dim=-1, keepdim=True) > 0, units, 0.0)


def _or_old(units: Tensor, old: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros becomes that of `old`."""
    return torch.where(units.abs().amax(dim=-1, keepdim=True) > 0, units, old)
