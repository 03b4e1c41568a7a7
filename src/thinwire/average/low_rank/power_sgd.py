"""PowerSGD: the mean of all workers, by one step of power iteration and two all-reduces.

A tensor of two or more dimensions is a matrix M (n x m), n its first dimension. For W workers and rank r, each call of
`step` does:

    1. compensate   M_i = g_i + e_i                                   memory
    2. P            P = sum_i M_i Q, all matrices in one all-reduce, the dense tensors with them
    3. orthogonal   P <- orthonormal basis of its columns, computed by every worker
    4. Q            Q_i = M_i' P; Q = 1/W sum_i Q_i, all matrices in one all-reduce
    5. decode       every worker gets P Q'
    6. commit       e_i = M_i - P Q_i', and the next step starts from Q, if all was finite

Phases 2 to 5 run in `wait`, so that one thread issues all collectives of a worker, in the order of the calls of `step`.

Memory. A worker keeps what *it* did not send, `M_i - P Q_i'`. The authors' code keeps `M_i - P Q'`, with Q the mean. Both
have the same mean over workers, so every result is the same in exact arithmetic. But the authors' memories drift apart
without bound, because the differences between workers are never sent; ours stay below M_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import require
from ...comm import Communicator, Handle
from ...membership import Form, check_state, config, copied, nested, pending, require_names, shared
from ...memory import ErrorFeedback, Memory
from ...options import require_integer
from ...schedule import Schedule, resolve
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
from .matrices import all_reduce_parts, bases, by_shape, columns, gains, scaled_each, warm_start


def _load_q(state: PowerSGDState, q: dict[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The number of columns of a saved Q may differ: a schedule sets it."""
    require_names(q, saved, "Q")
    for name, old in q.items():
        rows = saved[name].shape[1]
        require(rows == old.shape[1], f"the saved Q of {name!r} has {rows} rows, expected {old.shape[1]}")
    return {name: saved[name].to(old.device, copy=True) for name, old in q.items()}


@dataclass
class PowerSGDState(AveragerState):
    """What changes while `PowerSGD` runs.

    Attributes:
        seed: the seed of all random numbers of the run.
        q: Q' (r, m) of each matrix from the last commit; the largest magnitude of each row is 1.
        memory: the state of `PowerSGD.memory`; None without a memory.
        pending_q: Q' of this round.
    """

    seed: int = config()
    q: dict[str, Tensor] = shared(form=Form(lambda state, q: copied(q), _load_q))
    memory: Any = nested()
    pending_q: dict[str, Tensor] = pending(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """A tensor of a call of `step`.

    Attributes:
        name: of the tensor.
        x: the values to send, flat.
        target: receives the mean.
        scale: target over x: the loss scale if x is unscaled, else 1.
        remembers: whether x is memory's buffer for what was not sent.
    """

    name: str
    x: Tensor
    target: Tensor
    scale: float
    remembers: bool


@dataclass(frozen=True, repr=False)
class PowerSGD(Averager):
    """Every worker gets `P Q'`, a rank-r approximation of `1/W sum_i (g_i + e_i)`, for each matrix-shaped tensor.

    It does one step of power iteration from the last step's Q. On a constant matrix it converges to the best
    approximation of rank r. It needs sums only, so bytes do not grow with the number of workers. In two all-reduces, one
    after the other (4 steps), a worker sends

        2(W-1)/W * 4 * (sum over matrices of r (n + m)  +  number of dense elements)    bytes per step.

    Vectors travel dense, and so do matrices too small to gain, `r (n + m) >= n m`. The first Q is random, from the seed,
    the tensor's name and the column, and the same on all workers.

    Results have the same bits on all workers. Each orthogonalises P by Householder's QR, and multiplies P by Q', from inputs
    that have the same bits everywhere. On CPUs, up to rank 16, processors may differ; else workers need the same type of
    device and build of PyTorch.

    Args:
        rank: r, columns of P and Q; higher => more bytes, better approximation. It may be a schedule of integers. If it
            falls, Q loses its last columns; if it rises, new ones are drawn. A huge rank sends everything dense.
        memory: keeps what a worker did not send, such as `ErrorFeedback()`; None drops it. It sees the matrices only,
            and must have no momentum.

    Raises:
        ValueError: rank is not a positive integer, or memory is not a memory, or has momentum.

    Source: Vogels et al. 2019, PowerSGD, arXiv 1905.13727.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.outer(torch.arange(4.0), torch.ones(4)) * (comm.rank + 1)
        ...     averager = tw.PowerSGD(rank=1)
        ...     state = averager.init([("x", x)], comm)
        ...     averager.step(state, [("x", x)], comm).wait()
        ...     averager.commit(state)
        ...     return [round(value, 4) for value in x[1:, 0].tolist()]
        >>> tw.LocalWorld(2).run(worker)[1]
        [1.5, 3.0, 4.5]
    """

    rank: int | Schedule = 4
    memory: Memory | None = field(default_factory=ErrorFeedback)

    def __post_init__(self) -> None:
        require_integer("PowerSGD: rank", self.rank, 1, or_schedule=True)
        require(
            self.memory is None or (isinstance(self.memory, Memory) and not self.memory.has_momentum),
            f"PowerSGD: memory must be a memory without momentum, such as ErrorFeedback(), or None, got {self.memory!r}",
        )

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> PowerSGDState:
        check_agreement(self, tensors, comm, seed)
        matrices = [(name, t) for name, t in tensors if gains(t, rank=1)]
        return PowerSGDState(
            seed=seed,
            memory=None if self.memory is None else check_state(self.memory.init(matrices), self.memory),
            q={name: torch.empty(0, columns(t), dtype=torch.float32, device=t.device) for name, t in matrices},
            shapes={name: t.shape for name, t in tensors},
        )

    def step(self, state: PowerSGDState, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        begin_step(self, state, tensors, comm.rank)
        comm.ledger.count_averaged(sum([t.numel() for _, t in tensors]))
        rank = resolve(self, state.progress).rank
        assert isinstance(rank, int), f"{self}: the schedule of ranks gave {rank!r}"
        matrices = [(name, t.detach()) for name, t in tensors if gains(t, rank)]
        others = [(name, t.detach()) for name, t in tensors if not gains(t, rank)]
        qs = [warm_start(state.q[name], state.seed, name, rank) for name, _ in matrices]
        with state.clock("compensate"):
            xs, ps = self._products(state, matrices, scale, qs)
            remembers = self.memory is not None
            held = scale if remembers else 1.0  # memory is unscaled
            parts = [_Part(name, x, t, held, remembers) for (name, t), x in zip(matrices, xs, strict=True)]
            dense = [self._dense(state, name, t, scale) for name, t in others]
        handle = Handle(lambda: self._finish(state, parts, qs, ps, dense, comm))
        state.handles.append(handle)
        return handle

    def commit(self, state: PowerSGDState) -> bool:
        check_waited(self, state.handles)
        finite = kernels.flags.read(state.finite)
        if finite:
            state.q.update(state.pending_q)
        if finite and self.memory is not None:
            self.memory.commit(state.memory)
        self.discard(state)
        state.progress = state.progress._replace(step=state.progress.step + 1)
        return finite

    def _products(
        self, state: PowerSGDState, matrices: NamedTensors, scale: float, qs: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The values to send, flat float32, and P' (r, n) of each: memory's buffers if there is one, else the tensors."""
        if self.memory is not None:
            return self.memory.compensate_products(state.memory, matrices, scale, qs)
        xs = [t.to(torch.float32).reshape(-1).contiguous() for _, t in matrices]
        return xs, kernels.low_rank.products(xs, [len(t) for _, t in matrices], qs, left=False)

    def _dense(self, state: PowerSGDState, name: str, t: Tensor, scale: float) -> _Part:
        """A tensor that travels as it is; memory knows it if it is a matrix."""
        if self.memory is not None and name in state.q:
            return _Part(name, self.memory.compensate(state.memory, name, t, scale), t, scale, remembers=True)
        return _Part(name, t.to(torch.float32).reshape(-1), t, 1.0, remembers=False)

    def _finish(
        self,
        state: PowerSGDState,
        matrices: list[_Part],
        qs: list[Tensor],
        own_ps: list[Tensor],
        dense: list[_Part],
        comm: Communicator,
    ) -> None:
        """Phases 2 to 5 of the module's docstring, and memory.

        Args:
            state: of this worker.
            matrices: those that are approximated.
            qs: Q' (r, m) of each matrix at the start of the round.
            own_ps: this worker's P' (r, n) of each.
            dense: all other tensors.
            comm: all workers.
        """
        clock, memory = state.clock, self.memory
        sums = all_reduce_parts([*own_ps, *(d.x for d in dense)], comm, clock)()
        rows, xs = [m.target.shape[0] for m in matrices], [m.x for m in matrices]
        with clock("encode"):
            ps = bases(sums[: len(matrices)])
            own_qs = kernels.low_rank.products(xs, rows, ps, left=True)
        wait = all_reduce_parts(own_qs, comm, clock)
        with clock("encode"):  # while the all-reduce runs
            if memory is not None:
                kernels.low_rank.add(xs, rows, by_shape(torch.neg, ps), own_qs)  # what this worker did not send
            # They were sent whole, so nothing is left of them.
            for d in (d for d in dense if d.remembers):
                d.x.zero_()
        new_qs = wait()
        with clock("decode"):
            state.pending_q.update(zip([m.name for m in matrices], by_shape(_rescaled, new_qs, qs), strict=True))
            # The factor goes into Q, which is smaller than the result.
            scaled = scaled_each(new_qs, [m.scale / comm.size for m in matrices])
            parts = [*matrices, *dense]
            targets = [part.target for part in parts]
            # Float32, so that memory sees means before they are rounded to a shorter type.
            outs = result_buffers(targets)
            products = outs[: len(matrices)]
            finite = kernels.low_rank.store([out.view(-1) for out in products], rows, ps, scaled)
            means = scaled_each(sums[len(matrices) :], [d.scale / comm.size for d in dense])
            for out, mean in zip(outs[len(matrices) :], means, strict=True):
                out.copy_(mean.view(out.shape))
            for part, out in zip(parts, outs, strict=True):
                if memory is not None and part.remembers:
                    memory.decoded(state.memory, part.name, out, part.scale)
            others = kernels.all_finite(outs[len(matrices) :])
            finite = kernels.flags.all_of([finite, others, copy_changed(outs, targets)])
            state.finite = kernels.flags.both(state.finite, finite)


def _rescaled(q: Tensor, old: Tensor) -> Tensor:
    """Q' with rows scaled so that their largest magnitude is 1. Their span stays the same.

    Unscaled, Q would be as large as the gradient, and P as large as its square, which underflows float32 below 1e-19. A
    row of zeros would stay zero for ever, so it takes its old value.
    """
    peak = q.abs().amax(dim=-1, keepdim=True)
    return torch.where(peak > 0, q / peak, old)
