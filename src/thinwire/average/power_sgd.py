"""PowerSGD: the mean of all workers, by one step of power iteration, in two sums on the wire.

A tensor of two or more dimensions is a matrix M (n x m), n its first dimension. W workers, rank r. Per call of `step`:

    1. compensate   M_i = g_i + e_i                                   memory
    2. P            P = sum_i M_i Q, all matrices in one all-reduce, the dense tensors with them
    3. orthogonal   P <- orthonormal basis of its columns, on every worker for itself
    4. Q            Q_i = M_i' P; Q = 1/W sum_i Q_i, all matrices in one all-reduce
    5. decode       every worker gets P Q'
    6. commit       e_i = M_i - P Q_i', and the next step starts from Q, if all was finite

Steps 2 to 5 run in `wait`, so that all collectives of a worker come from one thread in the order of the steps.

What a worker keeps is what *it* failed to send, `M_i - P Q_i'`, where the authors' code keeps `M_i - P Q'`, Q the mean.
All is linear, so that the mean of the memories, and with it every result, is the same in exact arithmetic. But the
latter drift apart without bound, since what distinguishes workers is never sent; the former stay below M_i.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..algorithm import require
from ..clock import Clock
from ..codec import Key
from ..comm import Communicator, Handle
from ..memory import ErrorFeedback, Memory
from ..schedule import Progress, Schedule, resolve
from .base import Averager, NamedTensors, check_agreement


@dataclass
class PowerSGDState:
    """What changes while `PowerSGD` runs. `q` holds Q' (r, m) of each matrix, its rows scaled to a peak of 1."""

    seed: int
    memory: Any
    q: dict[str, Tensor]
    pending_q: dict[str, Tensor] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    finite: bool = True
    clock: Clock = field(default_factory=Clock)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, keyed by parameter name; memory differs between workers, so each saves its own."""
        return {
            "step": self.progress.step,
            "epoch": self.progress.epoch,
            "memory": None if self.memory is None else self.memory.state_dict(),
            "q": {name: q.clone() for name, q in self.q.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        require(
            (saved["memory"] is None) == (self.memory is None),
            "the saved state has a memory and this averager has none, or the reverse; use the one it was saved with",
        )
        differing = sorted(self.q.keys() ^ saved["q"].keys())
        require(not differing, f"the saved state does not fit this model: {differing[:5]} stand on one side only")
        for name, q in self.q.items():
            rows = saved["q"][name].shape[1]
            require(rows == q.shape[1], f"the saved Q of {name!r} has {rows} rows, expected {q.shape[1]}")
        if self.memory is not None:
            self.memory.load_state_dict(saved["memory"])
        self.q = {name: saved["q"][name].to(q.device, copy=True) for name, q in self.q.items()}
        self.pending_q.clear()
        self.progress = Progress(saved["step"], saved["epoch"])


@dataclass
class _Item:
    """One tensor of a call of `step`: `x` (n, m) is what should be sent, and `target` where the mean belongs."""

    name: str
    x: Tensor
    target: Tensor
    scale: float  # of target over x: the loss scale if x is unscaled
    remembers: bool  # x is memory's buffer for what is lost
    q: Tensor | None = None  # Q' (r, m), of the last step; None if it travels dense
    p: Tensor | None = None  # P (n, r), orthonormal


@dataclass(frozen=True, repr=False)
class PowerSGD(Averager):
    """Every worker gets `P Q'`, a rank-r approximation of `1/W sum_i (g_i + e_i)`, for each matrix-shaped tensor.

    One step of power iteration, warm-started with the last step's Q: on a matrix that stays the same it converges to
    the best approximation of rank r. Sums over workers, so bytes do not grow with their number: in two dependent
    all-reduces (4(W-1) steps) a worker sends

        2(W-1)/W * 4 * (sum over matrices of r (n + m)  +  number of dense elements)    bytes per step.

    Vectors travel dense, and so do matrices too small to gain, `r (n + m) >= n m`. The first Q is drawn at random
    from the seed, the tensor's name and the column, alike on all workers.

    Results have the same bits on all workers if they have the same processor type and PyTorch build: each
    orthogonalises P, by Householder's QR, and multiplies P by Q' for itself, from bits that are the same everywhere.

    Args:
        rank: r, columns of P and Q; higher => more bytes, better approximation. May be a schedule of integers: where it
            falls, Q loses its last columns; where it rises, new ones are drawn. A huge rank sends everything dense.
        memory: what happens to what a worker did not send, such as `ErrorFeedback()`; None forgets it. It sees the
            matrices only. A memory with momentum is refused.

    Raises:
        ValueError: rank is no positive integer, or memory is no memory without momentum.

    Source: Vogels et al. 2019, PowerSGD, arXiv 1905.13727.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.outer(torch.arange(4.0), torch.ones(4)) * (comm.rank + 1)
        ...     averager = tw.PowerSGD(rank=1)
        ...     state = averager.init([("x", x)], comm)
        ...     averager.step(state, [("x", x)], comm).wait()
        ...     averager.commit(state)
        ...     return [round(value, 4) for value in x[:, 0].tolist()]
        >>> tw.LocalWorld(2).run(worker)[1]
        [0.0, 1.5, 3.0, 4.5]
    """

    rank: int | Schedule = 4
    memory: Memory | None = field(default_factory=ErrorFeedback)

    def __post_init__(self):
        require(
            isinstance(self.rank, Schedule) or (isinstance(self.rank, int) and self.rank >= 1),
            f"PowerSGD: rank must be a positive integer, got {self.rank!r}",
        )
        require(
            self.memory is None or (isinstance(self.memory, Memory) and not self.memory.has_momentum),
            f"PowerSGD: memory must be a memory without momentum, such as ErrorFeedback(), or None, got {self.memory!r}",
        )

    def init(self, tensors: NamedTensors, comm: Communicator, seed: int = 0) -> PowerSGDState:
        check_agreement(self, tensors, comm, seed)
        matrices = [(name, t) for name, t in tensors if _gains(t, rank=1)]
        return PowerSGDState(
            seed=seed,
            memory=None if self.memory is None else self.memory.init(matrices, num_workers=comm.size),
            q={name: torch.empty(0, _columns(t), device=t.device) for name, t in matrices},
        )

    def step(self, state: PowerSGDState, tensors: NamedTensors, comm: Communicator, scale: float = 1.0) -> Handle:
        comm.ledger.add_dense(sum(t.numel() for _, t in tensors))
        rank = resolve(self, state.progress).rank
        with state.clock("compensate"):
            items = [self._compensate(state, name, t.detach(), scale) for name, t in tensors]
        for item in items:
            if _gains(item.target, rank):
                item.q = _warm_start(state, item.name, rank)
        return Handle(lambda: self._finish(state, items, comm))

    def commit(self, state: PowerSGDState) -> bool:
        finite = state.finite
        if finite:
            state.q.update(state.pending_q)
        if finite and self.memory is not None:
            self.memory.commit(state.memory)
        self.discard(state)
        state.progress = state.progress._replace(step=state.progress.step + 1)
        return finite

    def discard(self, state: PowerSGDState) -> None:
        if self.memory is not None:
            self.memory.discard(state.memory)
        state.pending_q.clear()
        state.finite = True

    def _compensate(self, state: PowerSGDState, name: str, t: Tensor, scale: float) -> _Item:
        """Float32 and contiguous: memory's buffer where there is one, the tensor itself where possible."""
        remembers = self.memory is not None and name in state.q
        if self.memory is not None and remembers:
            x = self.memory.compensate(state.memory, name, t, scale)
        else:
            x = t.to(torch.float32).contiguous()
        return _Item(name, x.view(-1, _columns(t)), t, scale if remembers else 1.0, remembers)

    def _finish(self, state: PowerSGDState, items: list[_Item], comm: Communicator) -> None:
        """Steps 2 to 5 of the module's text."""
        clock = state.clock
        matrices, dense = ([i for i in items if (i.q is None) == is_dense] for is_dense in (False, True))
        with clock("encode"):
            # Q is kept transposed: with rows of length m, BLAS takes a tenth of the time for both products with x.
            parts = [i.x @ i.q.t() for i in matrices] + [i.x for i in dense]
        sums = _all_reduce(parts, comm, clock)()
        with clock("encode"):
            for i, p in zip(matrices, sums, strict=False):
                i.p = torch.linalg.qr(p).Q  # orthonormal whatever the rank of p; the unit vectors where p is zero
            own_qs = [i.p.t() @ i.x for i in matrices]
        wait = _all_reduce(own_qs, comm, clock)
        with clock("encode"):  # while the sums are under way
            _keep_what_is_lost(matrices, own_qs, dense)
        qs = wait()
        with clock("decode"):
            for i, q in zip(matrices, qs, strict=True):
                state.pending_q[i.name] = _rescaled(q, i.q)
                _store_product(i.target, i.p, q * (i.scale / comm.size))
            for i, total in zip(dense, sums[len(matrices) :], strict=True):
                i.target.copy_((total * (i.scale / comm.size)).view(i.target.shape))
            if self.memory is not None:
                for i in (i for i in items if i.remembers):
                    self.memory.decoded(state.memory, i.name, i.target, scale=i.scale)
            state.finite = state.finite and kernels.all_finite([i.target for i in items])


def _columns(t: Tensor) -> int:
    """m, of the matrix that a tensor is seen as."""
    return max(1, t[0].numel() if t.ndim > 1 and len(t) else 1)


def _gains(t: Tensor, rank: int) -> bool:
    """Whether P and Q are smaller than the matrix itself. It implies r < n, m."""
    return t.ndim > 1 and rank * (len(t) + _columns(t)) < t.numel()


def _warm_start(state: PowerSGDState, name: str, rank: int) -> Tensor:
    """Q' of the last step (r, m); rows that it lacks are drawn, each from a key of its own."""
    q = state.q[name]
    stream = zlib.crc32(name.encode())
    keys = [Key(state.seed, stream, row).mixed() for row in range(len(q), rank)]
    fresh = [2.0 * kernels.uniform(key, q.shape[1], q.device)[None] - 1.0 for key in keys]
    return torch.cat([q[:rank], *fresh])


def _rescaled(q: Tensor, old: Tensor) -> Tensor:
    """Rows of Q' with a peak of 1, which leaves their span alone and keeps P as large as the gradient.

    Left as it is, Q would be as large as the gradient, and P as its square: out of float32's range below 1e-19. A row
    that came out zero would stay so for ever; it takes its old value.
    """
    peak = q.abs().amax(dim=1, keepdim=True)
    return torch.where(peak > 0, q / peak, old)


def _all_reduce(parts: list[Tensor], comm: Communicator, clock: Clock) -> Callable[[], list[Tensor]]:
    """Start to sum `parts` over all workers, in one message; call the result for the sums."""
    if not parts:
        return list
    with clock("exchange"):
        handle = comm.all_reduce(torch.cat([part.reshape(-1) for part in parts]))

    def wait() -> list[Tensor]:
        with clock("wait"):
            sums = handle.wait().split([part.numel() for part in parts])
        return [total.view(part.shape) for total, part in zip(sums, parts, strict=True)]

    return wait


def _keep_what_is_lost(matrices: list[_Item], own_qs: list[Tensor], dense: list[_Item]) -> None:
    """Leave in memory's buffers what the worker itself did not send."""
    for i, own_q in zip(matrices, own_qs, strict=True):
        if i.remembers:
            i.x.addmm_(i.p, own_q, alpha=-1.0)
    for i in dense:
        if i.remembers:
            i.x.zero_()


def _store_product(target: Tensor, p: Tensor, q: Tensor) -> None:
    """`target <- P Q'`, in place where its memory allows."""
    if target.dtype == torch.float32 and target.is_contiguous():
        torch.mm(p, q, out=target.view(len(p), -1))
    else:
        target.copy_((p @ q).view(target.shape))
