"""The library's own exchanges, rules and clips pass the suites that authors of other packages run; broken ones do not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

import thinwire as tw
from thinwire.algorithm import require
from thinwire.average import (
    Bucketing,
    CenteredClipping,
    Clip,
    ClipByNorm,
    ClipByValue,
    ClipValueByGlobalNorm,
    GeometricMedian,
    Krum,
    Median,
    MedianNorm,
    Rule,
    TrimmedMean,
)
from thinwire.average.mean.exchange import EXCHANGES
from thinwire.average.mean.exchange.all_gather import AllGather
from thinwire.average.mean.exchange.base import pack
from thinwire.average.mean.exchange.hierarchical import HierarchicalReduce
from thinwire.average.mean.exchange.scatter_reduce import ScatterReduce
from thinwire.average.mean.exchange.sparse_reduce import SparseReduce
from thinwire.average.robust.base import Combined
from thinwire.testing import check_clip, check_exchange, check_rule

# ---- exchanges ----


@pytest.mark.parametrize("word", EXCHANGES)
def test_exchanges_keep_the_contract(word):
    check_exchange(EXCHANGES[word])


class Dear(AllGather):
    """Says that it sends more than it does."""

    def num_bytes(self, size, workers_per_node, message):
        return size * message


class Long(AllGather):
    """Says that it takes a step more than it does."""

    def steps(self, size, workers_per_node):
        return 2


def own_copies(job):
    """The job, with tensors that its caller does not overwrite."""
    return job if job.keep_residual else replace(job, tensors=[t.clone() for t in job.tensors])


class Slow(AllGather):
    """Waits for a message of no use before it sends, and claims one step."""

    def begin(self, job):
        job = own_copies(job)
        yield job.comm.all_gather(torch.zeros(1))
        return super().begin(job)


class Late(AllGather):
    """Sends when it is waited for."""

    def begin(self, job):
        own = own_copies(job)
        return lambda totals, dense: super(Late, self).begin(own)(totals, dense)


class Reading(AllGather):
    """Reads the tensors when it is waited for."""

    def begin(self, job):
        return lambda totals, dense: super(Reading, self).begin(job)(totals, dense)


class Deaf(AllGather):
    """Leaves out the last worker."""

    def begin(self, job):
        decode = job.decode_messages
        job.decode_messages = lambda messages, *outs: decode(messages[:-1] or messages, *outs)
        return super().begin(job)


class Reversed(AllGather):
    """Adds in the order from the last worker to the first."""

    def begin(self, job):
        decode = job.decode_messages
        job.decode_messages = lambda messages, *outs: decode(messages if job.combine else messages[::-1], *outs)
        return super().begin(job)


class OwnFirst(AllGather):
    """Every worker adds its own message first."""

    def begin(self, job):
        decode, rank = job.decode_messages, job.comm.rank
        job.decode_messages = lambda m, *outs: decode([m[rank], *m[:rank], *m[rank + 1 :]], *outs)
        return super().begin(job)


class Adding(AllGather):
    """Adds to `totals`, whatever they hold."""

    def begin(self, job):
        finish = super().begin(job)

        def add(totals, dense):
            before = [total.clone() for total in totals]
            finite = finish(totals, dense)
            for total, more in zip(totals, before, strict=True):
                total += more
            return finite

        return add


class Sum(AllGather):
    """Leaves the sum of the dense vectors."""

    def begin(self, job):
        finish = super().begin(job)

        def add(totals, dense):
            finite = finish(totals, dense)
            dense *= job.comm.size
            return finite

        return add


class Unscaled(AllGather):
    """Ignores the loss scale."""

    def begin(self, job):
        return super().begin(replace(job, scale=1.0))


class Amnesic(AllGather):
    """Leaves no residual."""

    def begin(self, job):
        own = replace(job, tensors=[t.clone() for t in job.tensors])
        for t in job.tensors if job.keep_residual else ():
            t.zero_()
        return super().begin(own)


class Trusting(AllGather):
    """Says that every result is finite."""

    def begin(self, job):
        finish = super().begin(job)
        return lambda totals, dense: finish(totals, dense) is not None


class Silent(AllGather):
    """Does not tell what was sent."""

    def begin(self, job):
        return super().begin(replace(job, masked=[]))


class Boastful(AllGather):
    """Tells that everything was sent."""

    def begin(self, job):
        for mask in job.masked:
            mask.zero_()
        return super().begin(job)


class Tossing(AllGather):
    """Draws from the global random numbers."""

    def begin(self, job):
        torch.rand(1)
        return super().begin(job)


class Kept(AllGather):
    """Remembers a round in the exchange."""

    def begin(self, job):
        self.last = job
        return super().begin(job)


class Partial(AllGather):
    """Does not give a rule what it asks for."""

    def begin(self, job):
        return super().begin(replace(job, combine=None))


class Ownerless(ScatterReduce):
    """Forgets what the second encoding lost."""

    def begin(self, job):
        return super().begin(replace(job, owner_memory=None))


class Cheap(SparseReduce):
    """Says that it sends a fifth less than it does."""

    def num_bytes(self, size, workers_per_node, message):
        return 0.8 * super().num_bytes(size, workers_per_node, message)


class Everywhere(HierarchicalReduce):
    """Counts messages to workers of the same node."""

    def num_bytes(self, size, workers_per_node, message):
        return (size - 1) * message


class Rooted(AllGather):
    """Has rank 0 send everything to all, and says that all workers do the same."""

    one_step = False

    def steps(self, size, workers_per_node):
        return (size > 1) + size.bit_length() - 1  # down a tree

    def num_bytes(self, size, workers_per_node, message):
        return (size - 1).bit_length() * size * message

    def check(self, codec):
        require(codec.traits.fixed_size, "a fixed size is needed")

    def begin(self, job):
        comm, message = job.comm, pack(job.dense, job.encode(job.tensors, job.keys, job.masked))
        received = [torch.empty_like(message) for _ in range(comm.size)] if comm.rank == 0 else []
        yield comm.exchange({0: message} if comm.rank else {}, dict(enumerate(received[1:], start=1)))
        last = comm.broadcast(torch.cat([message, *received[1:]]) if comm.rank == 0 else message.repeat(comm.size))
        return lambda totals, dense: job.decode_messages(last.wait().split(len(message)), totals, dense)


class Picky(AllGather):
    """Takes no codec."""

    def check(self, codec):
        raise ValueError(f"{codec} is refused")


@pytest.mark.parametrize(
    ("exchange", "message"),
    [
        (Dear(), r"all_gather, Identity\(\), 1 workers: 0 bytes leave a node, `num_bytes` says 360000"),
        (Long(), r"1 workers: 0 messages follow one another, `steps` says 2"),
        (Slow(), "sends something after `begin`, in spite of `one_step`"),
        (Late(), "sends something after `begin`, in spite of `one_step`"),
        (Reading(), ", where the caller overwrites its tensors: rank 0 has a result that is not finite"),
        (Deaf(), "dense vectors differ from their mean by"),
        (Reversed(), "the result is not 1/W"),
        (OwnFirst(), "rank 1 has other bits than rank 0"),
        (Adding(), "rank 0 has a result that is not finite, of finite tensors and `totals` of NaN"),
        (Sum(), "dense vectors differ from their mean by"),
        (Unscaled(), ", under a loss scale: the result is another one"),
        (Amnesic(), "what is delivered and what memory keeps differ from the sum of all tensors by"),
        (Trusting(), "does not learn of inf"),
        (Silent(), "and no worker learns that they were sent"),
        (Boastful(), "is told that .* elements were sent, and memory keeps them"),
        (Tossing(), "touched the global random state"),
        (Kept(), r"an object without fields, got \['last'\]"),
        (Partial(), "a rule does not get every worker's message"),
        (Ownerless(), "what is delivered and what memory keeps differ"),
        (Cheap(), r"sparse_reduce, TopK\(ratio=0.1\), 2 workers: .* bytes leave a node, `num_bytes` says"),
        (
            Everywhere(),
            r"hierarchical, Identity\(\), 4 workers, 2 a node: 360000 bytes leave a node, `num_bytes` says 1080000",
        ),
        (Rooted(), r"3 workers: workers send to \[2, 1, 1\] peers, so `is_uniform` must be False"),
        (Picky(), "`check` refuses all of Identity"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_broken_exchanges_are_found(exchange, message):
    with pytest.raises(AssertionError, match=message):
        check_exchange(
            exchange,
            codecs=[tw.codec.Identity(), tw.TopK(0.1), tw.QSGD(bits=4)],
            sizes=[1, 2, 3],
            nodes=[(4, 2)],
        )


# ---- rules ----

RULES = [
    MedianNorm(),
    CenteredClipping(),
    CenteredClipping(tau=math.inf),
    Median(),
    TrimmedMean(faulty=0),
    TrimmedMean(faulty=2),
    GeometricMedian(),
    Krum(faulty=2),
    Krum(faulty=4, selected=7),
    Bucketing(MedianNorm()),
    Bucketing(Krum(faulty=1), s=3),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_keep_the_contract(rule):
    check_rule(rule)


@dataclass(frozen=True, repr=False)
class Plain(Rule):
    """A right rule, the mean in rank order. Those below break one rule each."""

    def combine(self, messages):
        total = torch.zeros_like(messages.rows[0])
        for row in messages.rows:
            total += row / len(messages.rows)
        return Combined(total)


class Double(Plain):
    """Returns float64."""

    def combine(self, messages):
        return Combined(messages.rows.double().mean(0))


class Column(Plain):
    """Returns a matrix."""

    def combine(self, messages):
        return Combined(super().combine(messages).result[None])


class InPlace(Plain):
    """Centers the rows."""

    def combine(self, messages):
        messages.rows.sub_(messages.rows.mean(0))
        return super().combine(messages)


class Drifting(Plain):
    """Moves the last result."""

    has_center = True

    def combine(self, messages):
        result = super().combine(messages).result
        return Combined(messages.center.add_(result))


class Remembering(Plain):
    """Adds its last result."""

    def combine(self, messages):
        result = super().combine(messages).result
        before = vars(self).get("before", {}).get(len(result))
        vars(self).setdefault("before", {})[len(result)] = result
        return Combined(result if before is None else result + before)


class Random(Plain):
    """Draws from the global random numbers."""

    def combine(self, messages):
        return Combined(messages.rows[torch.randint(len(messages.rows), ())].clone())


class Directions(Plain):
    """The mean of rows of norm 1, and the norm of zeros is 0."""

    def combine(self, messages):
        return Combined((messages.rows / messages.rows.norm(dim=1, keepdim=True)).mean(0))


class Squared(Plain):
    """Weights by squares in float32, which overflow."""

    def combine(self, messages):
        weights = messages.rows.square().sum(1)
        return super().combine(replace(messages, rows=messages.rows * (weights / weights.max().clamp(min=1))[:, None]))


class Unordered(Plain):
    """Norms are added in an order that the number of threads decides."""

    def combine(self, messages):
        norm = torch.stack([row.square().sum() for row in messages.rows]).clamp(1e-3, 1e6)
        return super().combine(replace(messages, rows=messages.rows / norm[:, None]))


class Expecting(Plain):
    """Takes its number of workers for granted."""

    def combine(self, messages):
        rows = messages.rows[: 8 - 2 * messages.left_out]
        return (
            super().combine(replace(messages, rows=rows))
            if len(rows)
            else Combined(torch.full_like(messages.rows[0], math.nan))
        )


class Halved(Plain):
    """Says what was dropped, and not of what."""

    def combine(self, messages):
        return Combined(super().combine(messages).result, None, messages.rows.double().norm(dim=1))


class Swapped(Plain):
    """Says that more was dropped than there was."""

    def combine(self, messages):
        norms = messages.rows.double().norm(dim=1)
        return Combined(super().combine(messages).result, norms, norms + 1)


class Narrow(Plain):
    """Gives norms in float32."""

    def combine(self, messages):
        norms = messages.rows.double().norm(dim=1)
        return Combined(super().combine(messages).result, norms.float(), norms)


def test_a_rule_from_scratch_keeps_the_contract():
    check_rule(Plain(), named=False)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Double(), r"the result of finite rows must be a vector, torch.float32 of shape \(40,\), got torch.float64"),
        (Column(), r"must be a vector, torch.float32 of shape \(40,\), got torch.float32 of shape \(1, 40\)"),
        (InPlace(), "combine changed the rows"),
        (Drifting(), "combine changed the last result"),
        (Remembering(), "the same messages give other bits later"),
        (Random(), "touched the global random state"),
        (Directions(), "the result of rows of zeros must be finite, got 40 elements that are not"),
        (Squared(), "the result of rows of which one is huge must be finite"),
        (Unordered(), "other bits with 3 threads"),
        (Expecting(), "4 workers and 4 left out: the result of finite rows must be finite"),
        (Halved(), "norms come with what was dropped"),
        (Swapped(), "dropped must be from 0 to the norms"),
        (Narrow(), r"norms must be a vector, torch.float64 of shape \(8,\), got torch.float32"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_broken_rules_are_found(rule, message):
    with pytest.raises(AssertionError, match=message):
        check_rule(rule, named=False)


# ---- clips ----

CLIPS = [
    ClipByNorm(1.0),
    ClipByNorm(1e-6),
    ClipByNorm(1e6),
    ClipByValue(1e-6),
    ClipByValue(1.0),
    ClipValueByGlobalNorm(),
    ClipValueByGlobalNorm(1e-3),
]


@pytest.mark.parametrize("clip", CLIPS, ids=repr)
def test_clips_keep_the_contract(clip):
    check_clip(clip)


class Wide(ClipByNorm):
    """Returns float64."""

    def apply(self, gradient, num_workers, norm=None):
        return super().apply(gradient, num_workers, norm).double()


class Same(ClipByNorm):
    """Returns a small gradient itself."""

    def apply(self, gradient, num_workers, norm=None):
        is_small = gradient.norm() < self.max_norm / 2
        return gradient.float() if is_small else super().apply(gradient, num_workers, norm)


class Clamping(ClipByValue):
    """Clips in place."""

    def apply(self, gradient, num_workers, norm=None):
        return gradient.clamp_(-self.max_value, self.max_value).to(torch.float32, copy=True)


class Taming(ClipByValue):
    """Makes infinities finite."""

    def apply(self, gradient, num_workers, norm=None):
        return gradient.float().clamp(-self.max_value, self.max_value)


class Overflowing(ClipByNorm):
    """Squares overflow in float32."""

    def apply(self, gradient, num_workers, norm=None):
        return gradient.float() * (self.max_norm / gradient.float().square().sum().sqrt()).clamp(max=1.0)


class Dividing(ClipByNorm):
    """Divides by a norm that may be zero."""

    def apply(self, gradient, num_workers, norm=None):
        own = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return (gradient.double() / own * own.clamp(max=self.max_norm)).float()


class Normalising(ClipByNorm):
    """Enlarges small gradients."""

    def apply(self, gradient, num_workers, norm=None):
        return (gradient.double() * (self.max_norm / (_norm64(gradient) + 1e-30))).float()


class Halving(ClipByNorm):
    """Halves, and bounds nothing."""

    def apply(self, gradient, num_workers, norm=None):
        return gradient.float() / 2


class Flipping(ClipByNorm):
    """Changes the sign."""

    def apply(self, gradient, num_workers, norm=None):
        return -super().apply(gradient, num_workers, norm)


class Noisy(ClipByValue):
    """Draws from the global random numbers."""

    def apply(self, gradient, num_workers, norm=None):
        return super().apply(gradient, num_workers, norm) * torch.rand(())


def _norm64(x):
    return torch.linalg.vector_norm(x, dtype=torch.float64)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (Wide(1.0), "the result must be torch.float32 of shape .*, got torch.float64 of shape"),
        (Same(1.0), "the result must be a new tensor"),
        (Clamping(1.0), "apply changed the gradient"),
        (Taming(1.0), "the element inf became 1.0"),
        (Overflowing(1.0), "a huge gradient became zero"),
        (Dividing(1.0), "a finite gradient has a result that is not finite"),
        (Normalising(1.0), "the norm grew from"),
        (Halving(1.0), "gradients of 1e20 and of 1e30 must have the same norm"),
        (Flipping(1.0), "does not point where the gradient does"),
        (Noisy(1.0), "the same gradient has other bits the second time"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_broken_clips_are_found(clip: Clip, message):
    with pytest.raises(AssertionError, match=message):
        check_clip(clip, named=False)
