"""One round of an exchange on all workers of a `LocalWorld`, as `Mean` runs it, and what it leaves there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..average.mean.exchange import Exchange
from ..average.mean.exchange.base import Job, PendingExchange, complete, flatten
from ..average.mean.exchange.scatter_reduce import OWNER_MEMORY, OwnerMemory, Whole
from ..clock import Clock
from ..codec import Codec, Key, Selection
from ..comm import Communicator, LocalWorld
from ..comm.local_world import LocalCommunicator
from ..plan import Link, Network
from ..plan.traced import TracedCommunicator

SEED, STEP = 5, 3


@dataclass(frozen=True)
class Bucket:
    """The tensors that one call of `Mean.step` encodes, and the number of elements that travel dense."""

    shapes: Mapping[str, tuple[int, ...]]
    dense_numel: int


# Tensors that W does not divide, and one with fewer elements than workers; a bucket of dense tensors alone.
BUCKETS = (
    Bucket({"kernel": (8, 3, 3, 3), "tiny": (1, 2)}, 17),
    Bucket({"weight": (11, 41)}, 0),
    Bucket({}, 9),
)
# Every W divides these, so that formulas are exact; large enough for all-reduces by hosts.
EVEN = (Bucket({"kernel": (240, 240), "weight": (120, 120)}, 18_000),)


@dataclass(frozen=True)
class ExchangeRound:
    """One round to run. See `Job` for what it says of `scale`, `merged` and `shares`.

    Attributes:
        what: is special about it.
        together: whether all buckets are under way at once.
        remembers: whether there is a memory.
        selects: whether memory selects for the codec, if that keeps exactly the largest.
        overwrites: whether the caller overwrites tensors once the exchange has begun.
        combines: whether a rule takes the message of the last worker in place of the mean.
        bad: the first element of each tensor and of each dense vector on the last worker; None is a finite one.
    """

    exchange: Exchange
    codec: Codec
    size: int
    workers_per_node: int = 1
    buckets: tuple[Bucket, ...] = BUCKETS
    merged: bool = False
    scale: float = 1.0
    shares: tuple[float, ...] = ()
    what: str = ""
    together: bool = False
    remembers: bool = False
    selects: bool = False
    overwrites: bool = False
    combines: bool = False
    bad: float | None = None

    @property
    def network(self) -> Network:
        """On which a message takes a second, and a byte no time."""
        link = Link(bytes_per_second=1e30, latency_seconds=1.0)
        return Network(self.size, self.workers_per_node, outer=link, inner=link)

    def __str__(self) -> str:
        nodes = f", {self.workers_per_node} a node" if self.workers_per_node > 1 else ""
        return f"{self.exchange.word}, {self.codec}, {self.size} workers{nodes}{self.what}"

    def values(self, rank: int, bucket: Bucket) -> tuple[list[Tensor], Tensor]:
        """What worker `rank` averages: the tensors, and the dense vector."""
        generator = torch.Generator().manual_seed(1000 * rank + self.buckets.index(bucket))
        *tensors, dense = (
            torch.randn(shape, generator=generator, device="cpu")
            for shape in (*bucket.shapes.values(), (bucket.dense_numel,))
        )
        if self.bad is not None and rank == self.size - 1:
            for t in (*tensors, dense):
                t.view(-1)[:1] = self.bad
        return tensors, dense

    def vector(self, rank: int) -> Tensor:
        """The tensors of worker `rank`, of all buckets."""
        return flat([t for bucket in self.buckets for t in self.values(rank, bucket)[0]])

    def keys(self, rank: int, bucket: Bucket) -> list[Key]:
        rank = 0 if self.codec.traits.shared_key else rank
        return [Key.of(SEED, name, rank, STEP) for name in bucket.shapes]


@dataclass
class Outcome:
    """What a round left on one worker; vectors have the elements of all buckets.

    Attributes:
        result: of what was encoded, without the scale.
        dense: the mean of the dense vectors.
        finite: what `finish` returned, of each bucket.
        residual: what the job's tensors hold.
        masked: 1 where nothing was sent for this worker, if the exchange tells.
        owned: by tensor, the memory of the second encoding.
        trace: what was sent, and waited for.
        is_late: whether anything was sent after `begin`.
    """

    result: Tensor
    dense: Tensor
    finite: list[bool]
    residual: Tensor
    masked: Tensor
    owned: list[Tensor]
    trace: list[Any]
    is_late: bool

    @property
    def sends(self) -> list[tuple[int, float]]:
        """The receivers and bytes of all messages."""
        moves = [steps for _, entries in self.trace for kind, _, *steps in entries if kind == "messages"]
        return [send for steps in moves for sends, _ in steps for send in sends]


def run(case: ExchangeRound) -> list[Outcome]:
    outcomes: list[Outcome] = LocalWorld(case.size).run(_worker, case)
    for rank, outcome in enumerate(outcomes):
        if case.exchange.one_step and case.codec.traits.agreement is None:
            assert not outcome.is_late, f"{case}: rank {rank} sends something after `begin`, in spite of `one_step`"
        if case.bad is None:
            is_finite = outcome.result.isfinite().all() and outcome.dense.isfinite().all()
            assert is_finite, (
                f"{case}: rank {rank} has a result that is not finite, of finite tensors and `totals` of NaN"
            )
            same = torch.equal(outcome.result, outcomes[0].result) and torch.equal(outcome.dense, outcomes[0].dense)
            assert same, f"{case}: rank {rank} has other bits than rank 0"
            assert all(outcome.finite), f"{case}: `finish` says on rank {rank} that a finite result is not finite"
    return outcomes


def _worker(comm: LocalCommunicator, case: ExchangeRound) -> Outcome:
    traced, owners, is_late = TracedCommunicator(comm, case.network, measures=False), _owners(comm, case), False
    traced.start(comm)
    assert traced.trace is not None
    done = list[tuple[Job, list[Tensor], Tensor, bool]]()
    for buckets in [case.buckets] if case.together else [(bucket,) for bucket in case.buckets]:
        flights = list[PendingExchange]()
        for bucket in buckets:
            flight = PendingExchange(case.exchange.begin, _job(traced, case, bucket, owners), counts=False)
            # As `Mean` does it: in the same order on all workers.
            for earlier in flights:
                earlier.advance()
            flights.append(flight)
            for tensor in flight.job.tensors if case.overwrites else ():
                tensor.fill_(math.nan)
        sent = traced.ledger.bytes_sent
        done += [_finished(flight, flights) for flight in flights]
        is_late = is_late or traced.ledger.bytes_sent > sent
    jobs, totals, dense, finite = zip(*done, strict=True)
    if owners is not None:
        OWNER_MEMORY.commit(owners)
    return Outcome(
        result=flat([total for each in totals for total in each]) / case.scale,
        dense=flat(dense),
        finite=list(finite),
        residual=flat([tensor for job in jobs for tensor in job.tensors]),
        masked=flat([mask for job in jobs for mask in job.masked]),
        owned=[] if owners is None else [owners.residual[name] for job in jobs for name in job.names],
        trace=traced.trace.take(),
        is_late=is_late,
    )


def _owners(comm: Communicator, case: ExchangeRound) -> OwnerMemory | None:
    if not (case.exchange.has_owners and case.remembers):
        return None
    tensors = [(name, t) for b in case.buckets for name, t in zip(b.shapes, case.values(0, b)[0], strict=True)]
    wholes = {name: Whole.of(case.codec, t) for name, t in tensors}
    return OwnerMemory.of(wholes, comm.rank, comm.size, case.shares)


def _job(comm: Communicator, case: ExchangeRound, bucket: Bucket, owners: OwnerMemory | None) -> Job:
    (tensors, dense), keys = case.values(comm.rank, bucket), case.keys(comm.rank, bucket)
    sparse, selection = case.codec.traits.sparse, None
    counts = sparse.topk_counts([t.numel() for t in tensors]) if case.selects and sparse is not None else None
    if counts:
        selection = Selection(*kernels.select.topk([t.view(-1) for t in tensors], counts), counts)
    return Job(
        comm=comm,
        codec=case.codec,
        clock=Clock(),
        tensors=tensors,
        names=list(bucket.shapes),
        keys=keys,
        merged=case.merged,
        keep_residual=case.remembers,
        dense=dense,
        scale=case.scale,
        owner_memory=owners,
        workers_per_node=case.workers_per_node,
        shares=case.shares,
        masked=list(map(torch.ones_like, tensors)) if case.remembers and case.exchange.tells_support else [],
        selection=selection,
        combine=(lambda rows: rows[-1]) if case.combines else None,
    )


def _finished(flight: PendingExchange, flights: list[PendingExchange]) -> tuple[Job, list[Tensor], Tensor, bool]:
    complete(flight, flights)
    # NaN, which `finish` must overwrite.
    totals = [torch.full_like(tensor, math.nan) for tensor in flight.job.tensors]
    dense = torch.zeros_like(flight.job.dense)
    return flight.job, totals, dense, kernels.flags.read(flight.finished(totals, dense))


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return flatten(tensors, torch.device("cpu"))
