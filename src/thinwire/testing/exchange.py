"""The conformance suite of exchanges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..average.mean.exchange import Exchange, Load
from ..average.mean.exchange.base import split_like
from ..codec import QSGD, SVD, Cast, Codec, Identity, RandomK, SignSGD, TernGrad, Threshold, TopK, chain
from ..memory import ErrorFeedback
from ..plan.replay import Replay
from .exchange_round import EVEN, ExchangeRound, Outcome, flat, run
from .random import untouched_random_state

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
NODES = ((2, 2), (4, 2), (6, 3))  # workers, and how many of them share a node
SCALE = 4.0  # a power of two, so that scaling rounds nothing and the bits must agree


def check_exchange(
    exchange: Exchange,
    codecs: Sequence[Codec] = CODECS,
    sizes: Sequence[int] = (1, 2, 3, 4, 5),
    nodes: Sequence[tuple[int, int]] = NODES,
) -> None:
    """Check that an exchange fulfils the contract of `thinwire.average.mean.exchange`.

    All workers get the same bits, which point where the mean does, and `W result + residuals + W owners' memories` is the sum
    of all workers' tensors; dense vectors become their mean. An exchange that `gathers` gives `1/W sum_i C(x_i)`, added in rank
    order, or what a rule makes of the messages. A memory, its selection, a loss scale, other buckets under way and a caller
    that overwrites its tensors change nothing. `finish` says whether all is finite. One of `one_step` sends all of it in
    `begin`; one that `tells_support` clears the masks where something was sent. With codecs of fixed size `steps` is how many
    messages wait for one another, and the cost by `num_bytes` is what leaves the node that sends most: exactly, or within a
    tenth where it `selects_again`. Workers of one that `is_uniform` send to as many peers. No global random state is changed.

    Args:
        exchange: the exchange to check.
        codecs: to check it with; those that `exchange.check` refuses are left out.
        sizes: numbers of workers, each a node of its own.
        nodes: numbers of workers and of those that share a node, for exchanges that need nodes or that "auto" may choose.

    Raises:
        AssertionError: the exchange breaks the contract.

    Example:
        >>> from thinwire.average.mean.exchange import EXCHANGES
        >>> from thinwire.testing import check_exchange
        >>> check_exchange(EXCHANGES["all_gather"], sizes=[3])
    """
    assert isinstance(exchange, Exchange), f"expected an object of a class derived from Exchange, got {exchange!r}"
    accepted = [codec for codec in codecs if _accepts(exchange, codec)]
    assert accepted, f"{exchange.word}: `check` refuses all of {', '.join(map(str, codecs))}"
    alone = [(size, 1) for size in sizes]
    with untouched_random_state(exchange.word):
        for i, codec in enumerate(accepted):
            for j, (size, workers_per_node) in enumerate([*alone, *(nodes if exchange.needs_nodes else ())]):
                # Each codec, and each size, with and without merging.
                merged = (i + j) % 2 == 1 and not codec.traits.by_layer
                _check_round(ExchangeRound(exchange, codec, size, workers_per_node, merged=merged))
            for size, workers_per_node in [*alone, *nodes]:
                _check_cost(ExchangeRound(exchange, codec, size, workers_per_node, EVEN))
    assert not vars(exchange), f"{exchange.word}: an exchange is an object without fields, got {sorted(vars(exchange))}"


def _accepts(exchange: Exchange, codec: Codec) -> bool:
    try:
        exchange.check(codec)
    except ValueError:
        return False
    return True


def _check_round(plain: ExchangeRound) -> None:
    exchange = plain.exchange
    first, *_ = run(plain)
    mean = torch.stack([plain.vector(rank) for rank in range(plain.size)]).mean(0)
    assert first.result.dot(mean) > 0, f"{plain}: the result does not point where the mean does"
    _check_dense(plain, first)
    if exchange.gathers:
        _check_gathered(plain, first)
    for other in _variants(plain):
        outcomes = run(other)
        assert torch.equal(outcomes[0].result, first.result), f"{other}: the result is another one"
        if other.remembers:
            _check_residuals(other, outcomes)
    if exchange.has_owners and plain.size == 3:
        uneven = replace(plain, what=", of which one owns nothing", remembers=True, shares=(0.6, 0.0, 0.4))
        _check_residuals(uneven, run(uneven))
    bad = math.nan if plain.merged else math.inf
    for rank, outcome in enumerate(run(replace(plain, bad=bad))):
        told = [not outcome.result.isfinite().all(), not outcome.dense.isfinite().all(), not all(outcome.finite)]
        assert all(told), f"{plain}: rank {rank} does not learn of {bad} on rank {plain.size - 1}"


def _variants(plain: ExchangeRound) -> Iterator[ExchangeRound]:
    """Rounds with the result of `plain`."""
    yield replace(plain, what=", other buckets under way", together=True)
    yield replace(plain, what=", where the caller overwrites its tensors", overwrites=True)
    yield replace(plain, what=", under a loss scale", scale=SCALE)
    yield replace(plain, what=", with a memory", together=True, remembers=True)
    if plain.exchange.takes_selection and plain.codec.traits.sparse is not None and not plain.merged:
        yield replace(plain, what=", where memory selects", remembers=True, selects=True)


def _check_dense(plain: ExchangeRound, first: Outcome) -> None:
    vectors = torch.stack([flat([plain.values(rank, b)[1] for b in plain.buckets]) for rank in range(plain.size)])
    error = (first.dense - vectors.double().mean(0)).abs().max().item()
    assert error <= 1e-5, f"{plain}: dense vectors differ from their mean by {error}"


def _check_gathered(plain: ExchangeRound, first: Outcome) -> None:
    """The definition: all payloads, decoded and added in rank order; a rule gets each alone."""
    votes, results = plain.codec.traits.votes, torch.zeros(2, first.result.numel(), device="cpu")
    for bucket, outs, last in zip(plain.buckets, *(_split(plain, result) for result in results), strict=True):
        for rank in range(plain.size if outs else 0):
            segments, _ = plain.values(rank, bucket)
            segments = [flat(segments)] if plain.merged else segments
            keys = plain.keys(rank, bucket)[: len(segments)]
            payload = plain.codec.encode(segments, keys)
            plain.codec.decode_add(payload, outs, 1.0 if votes else 1.0 / plain.size, keys)
        if outs:
            plain.codec.decode_add(payload, last, 1.0, keys)
        for each in (outs, last) if votes else ():
            plain.codec.combine(each)
    wrong = f"{plain}: the result is not 1/W sum_i C(x_i), added in rank order"
    assert torch.equal(first.result, results[0]), wrong
    combined = run(replace(plain, combines=True))[0].result
    assert torch.equal(combined, results[1]), f"{plain}: a rule does not get every worker's message, in rank order"


def _check_residuals(used: ExchangeRound, outcomes: list[Outcome]) -> None:
    """Nothing is lost: what was delivered and what is kept are the sum of all tensors, to float32 rounding."""
    if used.codec.traits.votes:
        return  # their result is no mean
    everyone = torch.stack([used.vector(rank) for rank in range(used.size)]).double()
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


def _check_masks(used: ExchangeRound, outcomes: list[Outcome]) -> None:
    sent = torch.stack([outcome.masked == 0 for outcome in outcomes])
    hidden = int((outcomes[0].result.ne(0) & ~sent.any(0)).sum())
    assert not hidden, f"{used}: {hidden} elements are in the result, and no worker learns that they were sent for it"
    # The values of others are lossy, so that something is left of what was sent.
    for rank, outcome in enumerate(outcomes if isinstance(used.codec, TopK) else ()):
        wrong = int((sent[rank] & outcome.residual.ne(0)).sum())
        assert not wrong, f"{used}: rank {rank} is told that {wrong} elements were sent, and memory keeps them"


def _check_cost(even: ExchangeRound) -> None:
    exchange, codec, size, n = even.exchange, even.codec, even.size, even.workers_per_node
    (bucket,) = even.buckets
    shapes = tuple(map(torch.Size, bucket.shapes.values()))
    load = Load(codec, shapes, bucket.dense_numel, size, n, memory=ErrorFeedback())
    is_asked = n == 1 or exchange.needs_nodes or exchange.suits(load)
    if not is_asked or not codec.traits.fixed_size or codec.traits.agreement is not None:
        return
    outcomes = run(replace(even, remembers=True))
    steps, counted = exchange.steps(size, n), round(Replay(even.network).play([outcome.trace for outcome in outcomes]))
    assert steps == counted, f"{even}: {counted} messages follow one another, `steps` says {steps}"
    if exchange.is_uniform:
        for kind in (outcomes[::n], [o for rank, o in enumerate(outcomes) if rank % n]):
            peers = [len({peer for peer, _ in outcome.sends}) for outcome in kind]
            assert len(set(peers)) <= 1, f"{even}: workers send to {peers} peers, so `is_uniform` must be False"
    leaves = [0.0] * (size // n)
    for rank, outcome in enumerate(outcomes):
        leaves[rank // n] += sum(num_bytes for peer, num_bytes in outcome.sends if peer // n != rank // n)
    cost = exchange.cost(load)
    # How many coordinates a worker selects of each owner depends on their values.
    is_right = math.isclose(cost, max(leaves), rel_tol=0.1 if exchange.selects_again else 1e-9)
    assert is_right, f"{even}: {max(leaves):.0f} bytes leave a node, `num_bytes` says {cost:.0f}"


def _split(plain: ExchangeRound, vector: Tensor) -> list[list[Tensor]]:
    """Views of a vector of all buckets: the segments of each that are encoded."""
    split = list[list[Tensor]]()
    sizes = [sum(map(math.prod, bucket.shapes.values())) for bucket in plain.buckets]
    for bucket, part in zip(plain.buckets, vector.split(sizes), strict=True):
        tensors = split_like(part, plain.values(0, bucket)[0])
        split.append([part] if plain.merged and tensors else tensors)
    return split
