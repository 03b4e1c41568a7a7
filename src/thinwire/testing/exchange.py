"""The conformance suite of exchanges."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..average.mean.exchange import Exchange, Load
from ..average.mean.exchange.base import Job, PendingExchange, flatten, split_like
from ..average.mean.exchange.scatter_reduce import OWNER_MEMORY, OwnerMemory, Whole
from ..clock import Clock
from ..codec import QSGD, SVD, Cast, Codec, Identity, Key, RandomK, SignSGD, TernGrad, Threshold, TopK, chain
from ..comm import Communicator, LocalWorld
from ..comm.local_world import LocalCommunicator
from ..memory import ErrorFeedback
from .timed import Departures, TimedCommunicator

CODECS: tuple[Codec, ...] = (
    Identity(),
    Cast(),
    TopK(0.1),
    chain(TopK(0.1), QSGD(bits=4)),
    QSGD(bits=4),
    RandomK(0.3, shared=True),
    SVD(rank=1),
    Threshold(1.0),
    TernGrad(shared=True),
    SignSGD(),
)
SIZES = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1))
NODES = ((2, 2), (4, 2), (6, 3))
SEED, STEP = 5, 3
SCALE = 4.0  # a power of two, so that scaling rounds nothing and the bits must agree


@dataclass(frozen=True)
class _Bucket:
    """The tensors that one call of `Mean.step` encodes, and the number of elements that travel dense."""

    shapes: Mapping[str, tuple[int, ...]]
    dense_numel: int


# Tensors that W does not divide, and one with fewer elements than workers; a bucket of dense tensors alone.
BUCKETS = (
    _Bucket({"kernel": (8, 3, 3, 3), "tiny": (1, 2)}, 17),
    _Bucket({"weight": (11, 41)}, 0),
    _Bucket({}, 9),
)
# Every W divides these, so that formulas are exact.
EVEN = (_Bucket({"kernel": (120, 48), "weight": (60, 16)}, 60),)


@dataclass(frozen=True)
class _Round:
    """One round to run. See `Job` for what it says of `scale`, `merged` and `shares`.

    Attributes:
        what: is special about it.
        together: whether all buckets are under way at once.
        remembers: whether there is a memory.
        selects: whether memory selects for the codec.
        overwrites: whether the caller overwrites tensors once the exchange has begun.
        combines: whether a rule takes the message of the last worker in place of the mean.
        bad: the first element of each tensor and of each dense vector on the last worker; None is a finite one.
    """

    exchange: Exchange
    codec: Codec
    size: int
    workers_per_node: int = 1
    buckets: tuple[_Bucket, ...] = BUCKETS
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

    def __str__(self) -> str:
        nodes = f", {self.workers_per_node} a node" if self.workers_per_node > 1 else ""
        return f"{self.exchange.word}, {self.codec}, {self.size} workers{nodes}{self.what}"

    def values(self, rank: int, bucket: _Bucket) -> tuple[list[Tensor], Tensor]:
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

    def flat(self, rank: int) -> Tensor:
        """The tensors of worker `rank`, of all buckets."""
        return _flat([t for bucket in self.buckets for t in self.values(rank, bucket)[0]])

    def keys(self, rank: int, bucket: _Bucket) -> list[Key]:
        rank = 0 if self.codec.traits.shared_key else rank
        return [Key.of(SEED, name, rank, STEP) for name in bucket.shapes]


@dataclass
class _Outcome:
    """What a round left on one worker; vectors have the elements of all buckets.

    Attributes:
        result: of what was encoded, without the scale.
        dense: the mean of the dense vectors.
        finite: what `finish` returned, of each bucket.
        residual: what the job's tensors hold.
        masked: 1 where nothing was sent for this worker, if the exchange tells.
        owned: by tensor, the memory of the second encoding.
        sent: peer -> bytes.
        num_steps: of all messages, one after the other.
        is_late: whether anything was sent after `begin`.
    """

    result: Tensor
    dense: Tensor
    finite: list[bool]
    residual: Tensor
    masked: Tensor
    owned: list[Tensor]
    sent: Mapping[int, float]
    num_steps: int
    is_late: bool


def check_exchange(
    exchange: Exchange,
    codecs: Sequence[Codec] = CODECS,
    sizes: Sequence[tuple[int, int]] = SIZES,
    nodes: Sequence[tuple[int, int]] = NODES,
) -> None:
    """Check that an exchange fulfils the contract of `thinwire.average.mean.exchange`.

    All workers get the same bits, which point where the mean does, and `W result + residuals + W owners' memories` is the sum
    of all workers' tensors; dense vectors become their mean. An exchange that `gathers` gives `1/W sum_i C(x_i)`, added in rank
    order, or what a rule makes of the messages. A memory, its selection, a loss scale, other buckets under way and a caller
    that overwrites its tensors change nothing. `finish` says whether all is finite. One of `one_step` sends all of it in
    `begin`; one that `tells_support` clears the masks where something was sent. With codecs of fixed size `steps` is how many
    messages wait for one another, and the cost by `num_bytes` is what leaves the node that sends most: exactly, or within a
    tenth where it `selects_again`. No global random state is changed.

    Args:
        exchange: the exchange to check.
        codecs: to check it with; those that `exchange.check` refuses are left out.
        sizes: numbers of workers, each with the number that share a node.
        nodes: more of these, with several workers a node, for exchanges that need nodes or that "auto" may choose.

    Raises:
        AssertionError: the exchange breaks the contract.

    Example:
        >>> from thinwire.average.mean.exchange import EXCHANGES
        >>> from thinwire.testing import check_exchange
        >>> check_exchange(EXCHANGES["all_gather"], sizes=[(3, 1)])
    """
    random_state, accepted = torch.get_rng_state(), [codec for codec in codecs if _accepts(exchange, codec)]
    assert accepted, f"{exchange.word}: `check` refuses all of {', '.join(map(str, codecs))}"
    for i, codec in enumerate(accepted):
        for j, (size, workers_per_node) in enumerate([*sizes, *(nodes if exchange.needs_nodes else ())]):
            # Each codec, and each size, with and without merging.
            merged = (i + j) % 2 == 1 and not codec.traits.by_layer
            _check_round(_Round(exchange, codec, size, workers_per_node, merged=merged))
        for size, workers_per_node in [*sizes, *nodes]:
            _check_cost(_Round(exchange, codec, size, workers_per_node, EVEN))
    assert torch.equal(torch.get_rng_state(), random_state), f"{exchange.word} touched the global random state"
    assert not vars(exchange), f"{exchange.word}: an exchange is an object without fields, got {sorted(vars(exchange))}"


def _accepts(exchange: Exchange, codec: Codec) -> bool:
    try:
        exchange.check(codec)
    except ValueError:
        return False
    return True


def _check_round(plain: _Round) -> None:
    exchange = plain.exchange
    first, *_ = _run(plain)
    mean = torch.stack([plain.flat(rank) for rank in range(plain.size)]).mean(0)
    assert first.result.dot(mean) > 0, f"{plain}: the result does not point where the mean does"
    _check_dense(plain, first)
    if exchange.gathers:
        _check_gathered(plain, first)
    for other in _variants(plain):
        outcomes = _run(other)
        assert torch.equal(outcomes[0].result, first.result), f"{other}: the result is another one"
        if other.remembers:
            _check_residuals(other, outcomes)
    if exchange.has_owners and plain.size == 3:
        uneven = replace(plain, what=", of which one owns nothing", remembers=True, shares=(0.6, 0.0, 0.4))
        _check_residuals(uneven, _run(uneven))
    bad = math.nan if plain.merged else math.inf
    for rank, outcome in enumerate(_run(replace(plain, bad=bad))):
        told = [not outcome.result.isfinite().all(), not outcome.dense.isfinite().all(), not all(outcome.finite)]
        assert all(told), f"{plain}: rank {rank} does not learn of {bad} on rank {plain.size - 1}"


def _variants(plain: _Round) -> Iterator[_Round]:
    """Rounds with the result of `plain`."""
    yield replace(plain, what=", other buckets under way", together=True)
    yield replace(plain, what=", where the caller overwrites its tensors", overwrites=True)
    yield replace(plain, what=", under a loss scale", scale=SCALE)
    yield replace(plain, what=", with a memory", together=True, remembers=True)
    if plain.exchange.takes_selection and plain.codec.traits.sparse is not None and not plain.merged:
        yield replace(plain, what=", where memory selects", remembers=True, selects=True)


def _check_dense(plain: _Round, first: _Outcome) -> None:
    vectors = torch.stack([_flat([plain.values(rank, b)[1] for b in plain.buckets]) for rank in range(plain.size)])
    error = (first.dense - vectors.double().mean(0)).abs().max().item()
    assert error <= 1e-5, f"{plain}: dense vectors differ from their mean by {error}"


def _check_gathered(plain: _Round, first: _Outcome) -> None:
    """The definition: all payloads, decoded and added in rank order; a rule gets each alone."""
    votes, results = plain.codec.traits.votes, torch.zeros(2, first.result.numel(), device="cpu")
    for bucket, outs, last in zip(plain.buckets, *(_split(plain, result) for result in results), strict=True):
        for rank in range(plain.size if outs else 0):
            segments, _ = plain.values(rank, bucket)
            segments = [_flat(segments)] if plain.merged else segments
            keys = plain.keys(rank, bucket)[: len(segments)]
            payload = plain.codec.encode(segments, keys)
            plain.codec.decode_add(payload, outs, 1.0 if votes else 1.0 / plain.size, keys)
        if outs:
            plain.codec.decode_add(payload, last, 1.0, keys)
        for each in (outs, last) if votes else ():
            plain.codec.combine(each)
    wrong = f"{plain}: the result is not 1/W sum_i C(x_i), added in rank order"
    assert torch.equal(first.result, results[0]), wrong
    combined = _run(replace(plain, combines=True))[0].result
    assert torch.equal(combined, results[1]), f"{plain}: a rule does not get every worker's message, in rank order"


def _check_residuals(used: _Round, outcomes: list[_Outcome]) -> None:
    """Nothing is lost: what was delivered and what is kept are the sum of all tensors, to float32 rounding."""
    if used.codec.traits.votes:
        return  # their result is no mean
    everyone = torch.stack([used.flat(rank) for rank in range(used.size)]).double()
    kept = sum(outcome.residual.double() for outcome in outcomes)
    if used.exchange.has_owners:
        pieces = zip(*(outcome.owned for outcome in outcomes), strict=True)
        kept = kept + used.size * torch.cat([piece.double() for of_tensor in pieces for piece in of_tensor])
    error = (used.size * outcomes[0].result.double() + kept - everyone.sum(0)).abs()
    # Payloads that are added on the wire round in their own type.
    dtype = used.codec.traits.sum_dtype if used.exchange.adds_payloads else None
    eps = torch.finfo(dtype).eps if dtype is not None and dtype.is_floating_point else 0.0
    bound = used.size * (2.0**-18 + eps * everyone.abs().sum(0))
    worst = int((error - bound).argmax())
    assert bool((error <= bound).all()), (
        f"{used}: what is delivered and what memory keeps differ from the sum of all tensors by {error[worst]:.3g} in "
        f"element {worst}"
    )
    if used.exchange.tells_support:
        _check_masks(used, outcomes)


def _check_masks(used: _Round, outcomes: list[_Outcome]) -> None:
    sent = torch.stack([outcome.masked == 0 for outcome in outcomes])
    hidden = int((outcomes[0].result.ne(0) & ~sent.any(0)).sum())
    assert not hidden, f"{used}: {hidden} elements are in the result, and no worker learns that they were sent for it"
    # The values of others are lossy, so that something is left of what was sent.
    for rank, outcome in enumerate(outcomes if isinstance(used.codec, TopK) else ()):
        wrong = int((sent[rank] & outcome.residual.ne(0)).sum())
        assert not wrong, f"{used}: rank {rank} is told that {wrong} elements were sent, and memory keeps them"


def _check_cost(even: _Round) -> None:
    exchange, codec, size, n = even.exchange, even.codec, even.size, even.workers_per_node
    (bucket,) = even.buckets
    shapes = tuple(map(torch.Size, bucket.shapes.values()))
    load = Load(codec, shapes, bucket.dense_numel, size, n, memory=ErrorFeedback())
    is_asked = n == 1 or exchange.needs_nodes or exchange.suits(load)
    if not is_asked or not codec.traits.fixed_size or codec.traits.agreement is not None:
        return
    outcomes = _run(replace(even, remembers=True))
    steps, counted = exchange.steps(size, n), max(outcome.num_steps for outcome in outcomes)
    assert steps == counted, f"{even}: steps must be {counted}, the messages one after the other, got {steps}"
    leaves = [0.0] * (size // n)
    for rank, outcome in enumerate(outcomes):
        leaves[rank // n] += sum(num_bytes for peer, num_bytes in outcome.sent.items() if peer // n != rank // n)
    cost = exchange.cost(load)
    # How many coordinates a worker selects of each owner depends on their values.
    is_right = math.isclose(cost, max(leaves), rel_tol=0.1 if exchange.selects_again else 1e-9)
    assert is_right, f"{even}: {max(leaves):.0f} bytes leave a node, num_bytes says {cost:.0f}"


def _run(case: _Round) -> list[_Outcome]:
    departures: Departures = defaultdict(list)
    outcomes: list[_Outcome] = LocalWorld(case.size).run(_worker, case, departures)
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


def _worker(comm: LocalCommunicator, case: _Round, departures: Departures) -> _Outcome:
    timed, owners, is_late = TimedCommunicator(comm, departures), _owners(comm, case), False
    done = list[tuple[Job, list[Tensor], Tensor, bool]]()
    for buckets in [case.buckets] if case.together else [(bucket,) for bucket in case.buckets]:
        flights = list[PendingExchange]()
        for bucket in buckets:
            flight = PendingExchange(case.exchange.begin, _job(timed, case, bucket, owners), counts=False)
            # As `Mean` does it: in the same order on all workers.
            for earlier in flights:
                earlier.advance()
            flights.append(flight)
            for tensor in flight.job.tensors if case.overwrites else ():
                tensor.fill_(math.nan)
        sent = timed.ledger.bytes_sent
        done += [_finished(flight, flights) for flight in flights]
        is_late = is_late or timed.ledger.bytes_sent > sent
    jobs, totals, dense, finite = zip(*done, strict=True)
    if owners is not None:
        OWNER_MEMORY.commit(owners)
    return _Outcome(
        result=_flat([total for each in totals for total in each]) / case.scale,
        dense=_flat(dense),
        finite=list(finite),
        residual=_flat([tensor for job in jobs for tensor in job.tensors]),
        masked=_flat([mask for job in jobs for mask in job.masked]),
        owned=[] if owners is None else [owners.residual[name] for job in jobs for name in job.names],
        sent=timed.sent,
        num_steps=timed.num_steps,
        is_late=is_late,
    )


def _owners(comm: Communicator, case: _Round) -> OwnerMemory | None:
    if not (case.exchange.has_owners and case.remembers):
        return None
    tensors = [(name, t) for b in case.buckets for name, t in zip(b.shapes, case.values(0, b)[0], strict=True)]
    wholes = {name: Whole.of(case.codec, t) for name, t in tensors}
    return OwnerMemory.of(wholes, comm.rank, comm.size, case.shares)


def _job(comm: Communicator, case: _Round, bucket: _Bucket, owners: OwnerMemory | None) -> Job:
    (tensors, dense), keys = case.values(comm.rank, bucket), case.keys(comm.rank, bucket)
    sparse, selection = case.codec.traits.sparse, None
    if case.selects and tensors and sparse is not None:
        selection = sparse.sparsifier.select([t.view(-1) for t in tensors], [key.mixed() for key in keys])
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
    while flight.finish is None:
        for each in flights:
            each.advance()
    # NaN, which `finish` must overwrite.
    totals = [torch.full_like(tensor, math.nan) for tensor in flight.job.tensors]
    dense = torch.zeros_like(flight.job.dense)
    return flight.job, totals, dense, kernels.flags.read(flight.finish(totals, dense))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return flatten(tensors, torch.device("cpu"))


def _split(plain: _Round, flat: Tensor) -> list[list[Tensor]]:
    """Views of a vector of all buckets: the segments of each that are encoded."""
    split = list[list[Tensor]]()
    sizes = [sum(map(math.prod, bucket.shapes.values())) for bucket in plain.buckets]
    for bucket, part in zip(plain.buckets, flat.split(sizes), strict=True):
        tensors = split_like(part, plain.values(0, bucket)[0])
        split.append([part] if plain.merged and tensors else tensors)
    return split
