"""PowerGossip: gossip on low-rank approximations of the differences along edges, by power iteration."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..algorithm import require
from ..comm import Communicator
from ..topology import Ring, Topology
from .base import NamedTensors
from .gossip_base import Gossip
from .gossip_checks import check_fixed_undirected, check_stable, check_step_size
from .gossip_round import Change, GossipState, Round
from .layout import Layout

Directions = dict[str, Tensor]  # tensor name -> p, (rows, r) of the side that the next half step multiplies


@dataclass
class PowerGossipMemory:
    """What `PowerGossip` remembers.

    Attributes:
        layout: where each tensor lies in the flat vector.
        half_steps: half steps so far.
        directions: neighbour -> the directions for its next half step; empty if p is always drawn afresh.
    """

    layout: Layout
    half_steps: int = 0
    directions: dict[int, Directions] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """The directions keyed by tensor name, then by the neighbour's rank as a string."""
        by_name: dict[str, dict[str, Tensor]] = {name: {} for name in self.layout.names}
        for peer, directions in self.directions.items():
            for name, p in directions.items():
                by_name[name][str(peer)] = p.clone()
        return {"half_steps": self.half_steps, "directions": by_name}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        differing = sorted(set(self.layout.names) ^ saved["directions"].keys())
        require(not differing, f"saved directions do not fit these tensors: {differing[:5]} are only in one of them")
        self.half_steps, self.directions = saved["half_steps"], {}
        for name, by_peer in saved["directions"].items():
            for peer, p in by_peer.items():
                self.directions.setdefault(int(peer), {})[name] = p.clone()


@dataclass(frozen=True, repr=False)
class PowerGossip(Gossip):
    """Each edge moves along a rank-r approximation of its difference `D = M_i - M_j`, found without sending M.

    A tensor of two or more dimensions is a matrix M (n, m), n its first dimension. Both ends of an edge know the same p,
    with r orthonormal columns. Even half steps multiply on the left side, odd ones on the right:

        even:  p is (n, r);   q = D' p = M_i' p - M_j' p;   D ~ p q'
        odd:   p is (m, r);   q = D p  = M_i p  - M_j p ;   D ~ q p'

    The ends exchange their products, m r or n r floats. Then each moves towards the other by `step_size P_ij` times the
    approximation. The two changes are exactly opposite, so the mean over workers is kept. The next half step starts from
    q ("warm start"): this is power iteration, which finds the largest differences. Vectors and scalars mix densely, as in
    `Mix`, in the first half step of a round. Nothing needs tuning: step size 1 is stable wherever `Mix` is. With full
    rank on square matrices it equals `Mix`; on others, half steps with p on the smaller side do.

    Bytes to each neighbour: per matrix `4 r m` in even half steps and `4 r n` in odd ones, so `4 r (n + m)` in a full
    power iteration, with r at most `min(n, m)`. Each round adds 4 bytes per element of vectors and scalars. A half step
    is one message. Half steps after the first of a round run in `wait`. The topology must be static and undirected.

    If q is zero or not finite, a fresh p is drawn instead. Both ends hold the same bits of q, so they decide alike. So
    non-finite parameters spread, but no edge remembers them. Both ends must round alike, which equal hardware does; on
    other hardware the two changes are opposite up to rounding. While all workers agree, all differences are zero: so a
    strategy starts its first round after the first update of the parameters.

    Args:
        topology: who talks to whom, with which weights.
        rank: columns of p; higher => better approximations, larger messages.
        iterations: half steps a round, one message each; higher => faster agreement per round, more bytes.
        warm_start: whether p is the last q of its edge; if not, p is drawn afresh for each half step.
        shared_p: whether all edges share one fresh p, so that one product serves all neighbours; needs
            `warm_start=False`.
        sign_p: whether p is rounded to signs, `sign(p) / sqrt(n)`; needs rank 1.
        step_size: in (0, 1]; higher => faster.

    Raises:
        ValueError: a field is out of range, or options exclude each other. In `init`: a directed or time-varying
            topology.

    Source: Vogels et al. 2020, PowerGossip, arXiv 2008.01425.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.full((4, 6), float(comm.rank))  # differences have rank 1
        ...     averager = tw.PowerGossip(tw.Complete(), rank=1, iterations=2)
        ...     state = averager.init([("x", x)], comm)
        ...     for _ in range(2):
        ...         averager.step(state, [("x", x)], comm).wait()
        ...     return x.mean().item()
        >>> [round(value, 4) for value in tw.LocalWorld(2).run(worker)]
        [0.5, 0.5]
    """

    topology: Topology = field(default_factory=Ring)
    rank: int = 1
    iterations: int = 1
    warm_start: bool = True
    shared_p: bool = False
    sign_p: bool = False
    step_size: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank", "iterations"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, f"PowerGossip: {name} must be 1 or more, got {value!r}")
        require(
            not (self.shared_p and self.warm_start),
            "PowerGossip: warm-started directions belong to one edge; add warm_start=False to share p",
        )
        require(
            not self.sign_p or self.rank == 1, "PowerGossip: columns of signs are not orthogonal; sign_p needs rank 1"
        )
        check_step_size(self, self.step_size)

    @property
    def multiplies(self) -> bool:
        return True

    def check_topology(self, size: int) -> None:
        check_fixed_undirected(self, size)
        check_stable(self, self.step_size, size)

    def init_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> PowerGossipMemory:
        return PowerGossipMemory(state.layout)

    def deal_memory(self, saved: list[Any], rank: int, size: int) -> Any:
        """Edges are new, so all directions are drawn afresh."""
        return saved[0] | {"directions": {name: {} for name in saved[0]["directions"]}}

    def shared_memory(self, state: GossipState) -> Any:
        return state.memory.half_steps

    def adopt_memory(self, state: GossipState, shared: Any) -> None:
        state.memory.half_steps, state.memory.directions = shared, {}

    def regroup_memory(
        self, state: GossipState, tensors: NamedTensors, comm: Communicator, before: Sequence[int | None] | None
    ) -> None:
        """Keep the directions of an edge if both of its ends were there before; draw all others afresh."""
        old, was_here = state.memory.directions, before is not None and before[comm.rank] is not None
        peers = enumerate(before or []) if was_here else ()
        state.memory.directions = {now: old[rank] for now, rank in peers if rank is not None and rank in old}

    def begin(self, state: GossipState, round: Round, own: Tensor) -> Change:
        first = _HalfStep(self, state, round, own.clone(), torch.zeros_like(own), with_vectors=True)

        def finish() -> Tensor:
            first.finish()
            for _ in range(1, self.iterations):
                _HalfStep(self, state, round, first.x, first.change, with_vectors=False).finish()
            return first.change

        return finish


class _HalfStep:
    """One exchange along all edges: the constructor begins it, `finish` ends it.

    Args:
        averager: the configuration.
        state: of this worker; `finish` updates its memory.
        round: the neighbours and weights.
        x: this worker's flat vector; `finish` moves it.
        change: flat vector; `finish` adds the same change to it.
        with_vectors: whether vectors and scalars take part.
    """

    def __init__(
        self, averager: PowerGossip, state: GossipState, round: Round, x: Tensor, change: Tensor, with_vectors: bool
    ):
        self.averager, self.state, self.round, self.x, self.change = averager, state, round, x, change
        self.left = state.memory.half_steps % 2 == 0
        parts = list(zip(state.layout.names, state.layout.split(x), state.layout.split(change), strict=True))
        self.matrices = [(name, _matrix(t), _matrix(c)) for name, t, c in parts if _is_matrix(t)]
        self.vectors = [(t, c) for _, t, c in parts if not _is_matrix(t)] if with_vectors else []
        with state.clock("encode"):
            self.p = self._all_directions()
            self.sent = self._messages()
        self.wait = round.exchange(self.sent)

    def finish(self) -> None:
        """Wait, and move x along every edge."""
        with self.state.clock("wait"):
            received = self.wait()
        with self.state.clock("decode"):
            for peer, theirs in received.items():
                self._move(peer, theirs)
        self.state.memory.half_steps += 1

    def _side(self, matrix: Tensor) -> Tensor:
        """The matrix, transposed if p multiplies its columns."""
        return matrix if self.left else matrix.t()

    def _all_directions(self) -> dict[int, Directions]:
        peers = list(self.round.receives)
        if self.averager.shared_p and peers:
            return dict.fromkeys(peers, self._directions(peers[0]))
        return {peer: self._directions(peer) for peer in peers}

    def _directions(self, peer: int) -> Directions:
        """p of the edge to `peer` for each matrix: orthonormal columns, the same bits at both ends."""
        warm = self.state.memory.directions.get(peer, {})
        return {name: self._direction(peer, name, self._side(m), warm.get(name)) for name, m, _ in self.matrices}

    def _direction(self, peer: int, name: str, side: Tensor, warm: Tensor | None) -> Tensor:
        p = None if warm is None else _orthonormal(warm, self.averager.sign_p)
        if p is None or not kernels.all_finite([p.reshape(-1)]):  # `_orthonormal` of zero is not finite
            shape = (side.shape[0], min(self.averager.rank, *side.shape))
            p = _orthonormal(self._draw(peer, name, shape, side.device), self.averager.sign_p)
        return p

    def _draw(self, peer: int, name: str, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Uniform in [-1, 1), by the common seed, the edge, the tensor and the half step."""
        low, high = sorted((self.round.comm.rank, peer))
        edge = 0 if self.averager.shared_p else 1 + low * self.round.comm.size + high
        stream = zlib.crc32(name.encode()) | edge << 32
        key = kernels.mix_key(self.state.seed, stream, self.state.memory.half_steps)
        return kernels.uniform(key, math.prod(shape), device).mul_(2.0).sub_(1.0).view(shape)

    def _messages(self) -> dict[int, Tensor]:
        """The message to each neighbour: vectors and scalars, then each matrix times the edge's p."""
        products: dict[int, list[Tensor]] = {peer: [t.reshape(-1) for t, _ in self.vectors] for peer in self.p}
        for name, matrix, _ in self.matrices:
            for peer, product in self._products(name, self._side(matrix).t()).items():
                products[peer].append(product.reshape(-1))
        return {peer: torch.cat(parts) if parts else self.x[:0] for peer, parts in products.items()}

    def _products(self, name: str, transposed: Tensor) -> dict[int, Tensor]:
        """The matrix times each edge's p, in one product for all neighbours; with a shared p, that product serves all."""
        if not self.p:
            return {}
        ps = [directions[name] for directions in self.p.values()]
        if self.averager.shared_p:
            return dict.fromkeys(self.p, transposed @ ps[0])
        products = transposed @ torch.cat(ps, dim=1)
        return dict(zip(self.p, products.split([p.shape[1] for p in ps], dim=1), strict=True))

    def _move(self, peer: int, theirs: Tensor) -> None:
        # Both ends subtract the higher rank from the lower, so that they hold the same bits of q.
        sign = 1.0 if self.round.comm.rank < peer else -1.0
        difference = (self.sent[peer] - theirs).mul_(sign)
        weight, offset = self.round.receives[peer] * -sign, 0
        for t, change in self.vectors:
            part = difference[offset : offset + t.numel()].view(t.shape)
            offset += t.numel()
            _add(t, change, part, weight)
        warm = self.state.memory.directions.setdefault(peer, {}) if self.averager.warm_start else {}
        for name, matrix, change in self.matrices:
            p, others = self.p[peer][name], self._side(matrix).shape[1]
            q = difference[offset : offset + others * p.shape[1]].view(others, -1)
            offset += q.numel()
            _add(self._side(matrix), self._side(change), p @ q.t(), weight * self.averager.step_size)
            warm[name] = q.clone()


def _add(x: Tensor, change: Tensor, difference: Tensor, weight: float) -> None:
    x.add_(difference, alpha=weight)
    change.add_(difference, alpha=weight)


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.ndim >= 2 and tensor.numel() > 0


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], -1)


def _orthonormal(p: Tensor, signs: bool) -> Tensor:
    """The columns of p made orthonormal, or rounded to signs; not finite if p is zero or not finite."""
    norm: Tensor = torch.linalg.vector_norm(p)
    if signs:
        rounded = torch.where(p < 0, -1.0, 1.0) / math.sqrt(p.shape[0])
        return rounded / (norm > 0) + norm * 0.0
    if p.shape[1] == 1:
        return p / norm
    # Householder reflections give an orthonormal basis even if columns depend on each other.
    basis: Tensor = torch.linalg.qr(p).Q
    return basis / (norm > 0)
