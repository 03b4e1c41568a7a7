"""PowerGossip: gossip on low-rank approximations of the differences along edges, by power iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import require
from ...comm import Communicator
from ...membership import WHOLE, State, config, restart, shared
from ...options import require_integer
from ...streams import in_use
from ...topology import Ring, Topology
from ..base import Before, NamedTensors
from ..traits import AveragerTraits
from .base import GossipAverager
from .checks import check_fixed_undirected, check_stable, check_step_size
from .layout import FlatLayout
from .round import Apply, Arrive, GossipState, Round
from .values import Parts, flat

Directions = dict[str, Tensor]  # tensor name -> p', (r, rows) of the side that the next half step multiplies


@dataclass
class PowerGossipMemory(State):
    """What `PowerGossip` remembers.

    Attributes:
        layout: where each tensor lies in the flat vector.
        half_steps: half steps so far.
        directions: rank of a neighbour, as text -> the directions for its next half step; empty if p is always drawn afresh.
    """

    layout: FlatLayout = config()
    half_steps: int = shared(default=0)
    directions: dict[str, Directions] = restart(value={}, form=WHOLE, default_factory=dict)


@dataclass(frozen=True, repr=False)
class PowerGossip(GossipAverager):
    """Each edge moves along a rank-r approximation of its difference `D = M_i - M_j`, found without sending M.

    A tensor of two or more dimensions is a matrix M (n, m), n its first dimension. Both ends of an edge know the same p,
    with r orthonormal columns. Even half steps multiply on the left side, odd ones on the right:

        even:  p is (n, r);   q = D' p = M_i' p - M_j' p;   D ~ p q'
        odd:   p is (m, r);   q = D p  = M_i p  - M_j p ;   D ~ q p'

    The ends exchange their products, m r or n r floats. Then each moves towards the other by `step_size P_ij` times the
    approximation. The two changes are exactly opposite, so the mean over workers is kept. The next half step starts from
    q ("warm start"): this is power iteration, which finds the largest differences. Vectors and scalars mix densely, as in
    `Mix` with step size 1, in the first half step of a round. Nothing needs tuning: step size 1 is stable wherever `Mix`
    is. Above 1, the bound of `Mix` holds (1.5 on a ring; 1.308 is the fastest on a ring of 8 at full rank). With full
    rank on square matrices it equals `Mix`; on others, half steps with p on the smaller side do.

    Bytes to each neighbour: per matrix `4 r m` in even half steps and `4 r n` in odd ones, so `4 r (n + m)` in a full
    power iteration, with r at most `min(n, m)`. Each round adds 4 bytes per element of vectors and scalars. A half step
    is one message. Half steps after the first of a round run in `wait`. The topology must be static and undirected.

    If q is zero or not finite, a fresh p is drawn instead. Both ends hold the same bits of q, so they decide alike. So
    non-finite parameters spread, but no edge remembers them. Both ends must find the same bits of p: on CPUs, up to rank
    16, their processors may differ. While all workers agree, all differences are zero: so a
    strategy starts its first round after the first update of the parameters.

    Args:
        topology: who talks to whom, with which weights.
        rank: columns of p; higher => better approximations, larger messages.
        iterations: half steps a round, one message each; higher => faster agreement per round, more bytes.
        warm_start: whether p is the last q of its edge; if not, p is drawn afresh for each half step.
        shared_p: whether all edges share one fresh p, so that one product serves all neighbours; needs
            `warm_start=False`.
        sign_p: whether p is rounded to signs, `sign(p) / sqrt(n)`; needs rank 1.
        step_size: above 0, of matrices; higher => faster, up to the fastest step size of `Mix`.

    Raises:
        ValueError: a field is out of range, or options exclude each other. In `init`: a directed or time-varying
            topology, or one on which gossip with this step size diverges.

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
            require_integer(f"PowerGossip: {name}", getattr(self, name), 1)
        require(
            not (self.shared_p and self.warm_start),
            "PowerGossip: warm-started directions belong to one edge; add warm_start=False to share p",
        )
        require(
            not self.sign_p or self.rank == 1, "PowerGossip: columns of signs are not orthogonal; sign_p needs rank 1"
        )
        check_step_size(self, self.step_size)

    @cached_property
    def traits(self) -> AveragerTraits:
        # After an odd number of half steps the next round begins on the other side of each matrix.
        return replace(super().traits, period=1 + self.iterations % 2)

    def check_topology(self, size: int) -> None:
        check_fixed_undirected(self, size)
        check_stable(self, self.step_size, size)

    def init_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator) -> PowerGossipMemory:
        return PowerGossipMemory(state.layout)

    def regroup_memory(self, state: GossipState, tensors: NamedTensors, comm: Communicator, before: Before) -> None:
        """Keep the directions of an edge if both of its ends were there before; draw all others afresh."""
        old, was_here = state.memory.directions, before is not None and before[comm.rank] is not None
        peers = enumerate(before or []) if was_here else ()
        state.memory.directions = {
            str(now): old[str(rank)] for now, rank in peers if rank is not None and str(rank) in old
        }

    def begin(self, state: GossipState, round: Round, own: Parts) -> Arrive:
        # Half steps after the first read x as the first has left it, which may differ from the caller's tensors by then.
        x = own if self.iterations == 1 else [part.clone() for part in own]
        first = _HalfStep(self, state, round, x, with_vectors=True)

        def arrive() -> Apply:
            last = change = first.finish()
            for _ in range(1, self.iterations):
                last.apply(x)
                last = _HalfStep(self, state, round, x, with_vectors=False).finish()
                change = change.then(last)
            return change.apply

        return arrive


@dataclass(frozen=True)
class _LowRankChange:
    """The change of a round: `a' b` for each matrix, a vector for each other part.

    Attributes:
        matrices: index of a part -> its number of rows, a (r, n) and b (r, m).
        vectors: index of a part -> its change.
    """

    matrices: dict[int, tuple[int, Tensor, Tensor]]
    vectors: dict[int, Tensor]

    def apply(self, targets: Parts) -> kernels.Flag:
        """Add the change in one pass; returns whether it is finite."""
        entries = self.matrices.values()
        a, b = [a for _, a, _ in entries], [b for _, _, b in entries]
        kernels.low_rank.add([targets[i] for i in self.matrices], [n for n, _, _ in entries], a, b)
        for i, change in self.vectors.items():
            targets[i].add_(change)
        # Directions are of length one, so products of finite factors are finite.
        return kernels.all_finite([factor.view(-1) for factor in (*a, *b, *self.vectors.values())])

    def then(self, later: _LowRankChange) -> _LowRankChange:
        """Both changes as one, of the ranks' sum."""
        matrices = {
            i: (n, torch.cat([a, later.matrices[i][1]]), torch.cat([b, later.matrices[i][2]]))
            for i, (n, a, b) in self.matrices.items()
        }
        return _LowRankChange(matrices, self.vectors)


class _HalfStep:
    """One exchange along all edges: the constructor begins it, `finish` ends it.

    Args:
        averager: the configuration.
        state: of this worker; `finish` updates its memory.
        round: the neighbours and weights.
        x: this worker's values, each part flat; read by the constructor only.
        with_vectors: whether vectors and scalars take part.
    """

    def __init__(self, averager: PowerGossip, state: GossipState, round: Round, x: Parts, with_vectors: bool):
        self.averager, self.state, self.round = averager, state, round
        self.left = state.memory.half_steps % 2 == 0
        names, shapes = state.layout.names, state.layout.shapes
        self.matrices = {
            i: (names[i], len(x[i]) // shape[0], shape[0]) for i, shape in enumerate(shapes) if _is_matrix(shape)
        }
        self.vectors = {i: len(x[i]) for i in range(len(x)) if with_vectors and i not in self.matrices}
        with state.clock("encode"):
            self.p = self._all_directions(x)
            self.sent = self._messages(x)
        self.finish = round.exchange(self.sent, self._merge)
        """Waits, and returns how x moves along all edges."""

    def _merge(self, received: dict[int, Tensor]) -> _LowRankChange:
        with self.state.clock("decode"):
            change = self._change(received)
        self.state.memory.half_steps += 1
        return change

    def _sides(self, i: int) -> tuple[int, int]:
        """The side of matrix i that p multiplies, and the other one."""
        _, m, n = self.matrices[i]
        return (n, m) if self.left else (m, n)

    def _all_directions(self, x: Parts) -> dict[int, dict[int, Tensor]]:
        peers = list(self.round.receives)
        if self.averager.shared_p and peers:
            return dict.fromkeys(peers, self._directions(peers[0], x))
        return {peer: self._directions(peer, x) for peer in peers}

    def _directions(self, peer: int, x: Parts) -> dict[int, Tensor]:
        """p of the edge to `peer` for each matrix, (r, side): orthonormal vectors, the same bits at both ends."""
        warm = self.state.memory.directions.get(str(peer), {})
        return {i: self._direction(peer, i, x[i].device, warm.get(self.matrices[i][0])) for i in self.matrices}

    def _direction(self, peer: int, i: int, device: torch.device, warm: Tensor | None) -> Tensor:
        # Directions that were loaded may be in main memory, or memory of the training's stream; the round replaces them.
        p = None if warm is None else _orthonormal(in_use(warm.to(device)), self.averager.sign_p)
        finite = p is not None and kernels.all_finite([p.reshape(-1)])  # `_orthonormal` of zero is not finite
        # On a GPU the flag has one condition, for one tensor, and `torch.where` decides without a wait of the host.
        if finite is not True:
            shape = (min(self.averager.rank, *self._sides(i)), self._sides(i)[0])
            drawn = _orthonormal(self._draw(peer, self.matrices[i][0], shape, device), self.averager.sign_p)
            p = drawn if p is None or isinstance(finite, bool) else torch.where(finite[0], p, drawn)
        assert p is not None
        return p

    def _draw(self, peer: int, name: str, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Uniform in [-1, 1), by the common seed, the edge, the tensor and the half step."""
        # Ordered, so that both ends draw the same p.
        low, high = sorted((self.round.comm.rank, peer))
        edge = 0 if self.averager.shared_p else 1 + low * self.round.comm.size + high
        key = kernels.random.Key.of(self.state.seed, name, edge, self.state.memory.half_steps).mixed()
        return kernels.uniform(key, math.prod(shape), device).mul_(2.0).sub_(1.0).view(shape)

    def _messages(self, x: Parts) -> dict[int, Tensor]:
        """The message to each neighbour: vectors and scalars, then each matrix times the edge's p."""
        messages: dict[int, list[Tensor]] = {peer: [x[i] for i in self.vectors] for peer in self.p}
        for products in self._products(x):
            for peer, product in zip(self.p, products, strict=True):
                messages[peer].append(product.reshape(-1))
        return {peer: flat(parts) for peer, parts in messages.items()}

    def _products(self, x: Parts) -> list[list[Tensor]]:
        """Each matrix times each edge's p, in one read for all neighbours; with a shared p, one product serves all."""
        if not self.p:
            return []
        edges = list(self.p.values())[: 1 if self.averager.shared_p else None]
        parts, rows = [x[i] for i in self.matrices], [n for _, _, n in self.matrices.values()]
        ps = [torch.cat([p[i] for p in edges]) for i in self.matrices]
        products = kernels.low_rank.products(parts, rows, ps, self.left)
        copies = len(self.p) // len(edges)
        return [list(product.chunk(len(edges))) * copies for product in products]

    def _change(self, received: dict[int, Tensor]) -> _LowRankChange:
        factors: dict[int, list[tuple[Tensor, Tensor]]] = {i: [] for i in self.matrices}
        vectors: dict[int, Tensor] = {}
        for peer, theirs in received.items():
            # Both ends subtract the higher rank from the lower, so that they hold the same bits of q, of zeros too.
            is_lower, own = self.round.comm.rank < peer, self.sent[peer]
            difference = own - theirs if is_lower else theirs - own
            weight, offset = self.round.receives[peer] * (-1.0 if is_lower else 1.0), 0
            for i, numel in self.vectors.items():
                part = difference[offset : offset + numel] * weight
                vectors[i] = vectors[i].add_(part) if i in vectors else part
                offset += numel
            warm = self.state.memory.directions.setdefault(str(peer), {}) if self.averager.warm_start else {}
            for i, (name, _, _) in self.matrices.items():
                p, others = self.p[peer][i], self._sides(i)[1]
                q = difference[offset : offset + len(p) * others].view(len(p), others)
                offset += q.numel()
                # A view would keep the whole `difference` in memory.
                warm[name] = q.clone()
                factors[i].append((p, q * (weight * self.averager.step_size)))
        matrices = {}
        for i, pairs in factors.items():
            if pairs:
                # All edges together are one change, of the sum of their ranks, which takes one pass.
                p, q = (torch.cat(side) for side in zip(*pairs, strict=True))
                matrices[i] = (self.matrices[i][2], *((p, q) if self.left else (q, p)))
        return _LowRankChange(matrices, vectors)


def _is_matrix(shape: torch.Size) -> bool:
    return len(shape) >= 2 and shape.numel() > 0


def _orthonormal(p: Tensor, signs: bool) -> Tensor:
    """The rows of p made orthonormal, or rounded to signs; not finite if p is zero or not finite."""
    peak = p.abs().amax()
    if signs:
        rounded = torch.where(p < 0, -torch.ones_like(p), 1.0) / math.sqrt(p.numel())
        # Dividing by False gives infinity, and `peak * 0` keeps NaN: no branch on the host is needed.
        return rounded / (peak > 0) + peak * 0.0
    return kernels.low_rank.orthonormal(p) / (peak > 0)
