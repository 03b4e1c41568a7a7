"""A part of someone's own that breaks its contract is one line that names the part, and no run that goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

import thinwire as tw
from thinwire import debug
from thinwire.algorithm import Algorithm
from thinwire.average import Rule
from thinwire.average.base import Averager, AveragerState
from thinwire.average.mean.exchange import EXCHANGES
from thinwire.average.mean.exchange.all_gather import AllGather
from thinwire.average.mean.exchange.base import pack
from thinwire.average.robust.base import Combined
from thinwire.comm import Handle
from thinwire.comm.handle import nothing
from thinwire.topology import Topology
from thinwire.topology.base import Neighbours

part = dataclass(frozen=True, repr=False)


class OwnCast(tw.codec.Codec):
    """float16 of one's own."""

    traits = tw.codec.Traits(unbiased=True)  # else a warning asks for a memory

    def encode_segments(self, segments, keys, residuals):
        return tw.Cast("float16").encode_segments(segments, keys, residuals)

    def decode_add_segments(self, payload, outs, weight, keys):
        tw.Cast("float16").decode_add_segments(payload, outs, weight, keys)

    def segments_nbytes(self, numels):
        return 2 * sum(numels)


@part
class NoPayload(OwnCast):
    def encode_segments(self, segments, keys, residuals):
        super().encode_segments(segments, keys, residuals)


@part
class FloatPayload(OwnCast):
    def encode_segments(self, segments, keys, residuals):
        return super().encode_segments(segments, keys, residuals).view(torch.float16)


@part
class TwoDimensions(OwnCast):
    def encode_segments(self, segments, keys, residuals):
        return super().encode_segments(segments, keys, residuals).view(-1, 2)


@part
class OddBytes(OwnCast):
    traits = tw.codec.Traits(sum_dtype=torch.float16)

    def encode_segments(self, segments, keys, residuals):
        payload = super().encode_segments(segments, keys, residuals)
        return torch.cat([payload, payload.new_zeros(3)])

    def segments_nbytes(self, numels):
        return super().segments_nbytes(numels) + 3


class OwnFeedback(tw.memory.Memory):
    """Error feedback of one's own."""

    def init(self, tensors, dense=()):
        return tw.ErrorFeedback().init(tensors, dense)

    def compensate(self, state, name, gradient, scale=1.0):
        return tw.ErrorFeedback().compensate(state, name, gradient, scale)

    def commit(self, state):
        tw.ErrorFeedback().commit(state)


@part
class NoBuffer(OwnFeedback):
    def compensate(self, state, name, gradient, scale=1.0):
        super().compensate(state, name, gradient, scale)


@part
class ShortBuffer(OwnFeedback):
    def compensate(self, state, name, gradient, scale=1.0):
        return super().compensate(state, name, gradient, scale)[:-1]


@part
class DoubleBuffer(OwnFeedback):
    def compensate(self, state, name, gradient, scale=1.0):
        return super().compensate(state, name, gradient, scale).double()


@part
class ShortResult(Rule):
    def combine(self, messages):
        return Combined(messages.rows[0, :-1])


@part
class DoubleResult(Rule):
    def combine(self, messages):
        return Combined(messages.rows.double().mean(0))


@part
class BareResult(Rule):
    def combine(self, messages):
        return messages.rows.mean(0)


class YieldsMessage(AllGather):
    """Yields what it should send."""

    word = "yields_message"

    def begin(self, job):
        yield pack(job.dense, job.encode(job.tensors, job.keys, job.masked))


class TellsNothing(AllGather):
    """Does not say whether the result is finite."""

    word = "tells_nothing"

    def begin(self, job):
        message = pack(job.dense, job.encode(job.tensors, job.keys, job.masked))
        messages = yield job.comm.all_gather(message)

        def finish(totals, dense_total):
            job.decode_messages(messages, totals, dense_total)

        return finish


class OwnMean(Averager):
    """Dense, of one's own."""

    def init(self, tensors, comm, seed=0):
        return AveragerState()

    def step(self, state, tensors, comm, scale=1.0):
        return Handle(nothing)

    def commit(self, state):
        return True


@part
class NoHandle(OwnMean):
    def step(self, state, tensors, comm, scale=1.0):
        pass


@part
class NoVerdict(OwnMean):
    def commit(self, state):
        pass


@part
class BareNeighbours(Topology):
    def _neighbours(self, rank, step, size):
        return {(rank + 1) % size: 0.5}, {(rank - 1) % size: 0.5}, 0.5


@part
class Growing(Topology):
    def _neighbours(self, rank, step, size):
        return Neighbours({(rank + 1) % size: 0.7}, {(rank - 1) % size: 0.7}, 0.5)


@part
class NoOptimizer(Algorithm):
    def __call__(self, anchors):
        return None


def gradients(codec, memory=None, **options):
    return tw.Gradients(tw.Mean(codec, memory, min_ndim=0, **options))


EXPECTED = [
    (gradients(NoPayload()), r"NoPayload\(\): a payload is a vector of uint8, got NoneType"),
    (gradients(FloatPayload()), r"FloatPayload\(\): a payload is .*, got torch.float16 of shape \(8,\)"),
    (gradients(TwoDimensions()), r"TwoDimensions\(\): a payload is .*, got torch.uint8 of shape \(8, 2\)"),
    (tw.Gossip(tw.Choco(tw.Ring(), NoPayload())), r"NoPayload\(\): a payload is a vector of uint8, got NoneType"),
    (
        gradients(OddBytes(), exchange="all_reduce"),
        r"OddBytes\(\): a payload of 19 bytes .* torch.float16, its sum_dtype",
    ),
    (gradients(tw.TopK(0.5), NoBuffer()), r"NoBuffer\(\): compensate must .* 2 elements for 'bias', got NoneType"),
    (
        gradients(tw.TopK(0.5), ShortBuffer()),
        r"ShortBuffer\(\): compensate .* 2 elements .*, got torch.float32 of shape \(1,\)",
    ),
    (gradients(tw.TopK(0.5), DoubleBuffer()), r"DoubleBuffer\(\): compensate .*, got torch.float64 of shape \(2,\)"),
    (
        gradients(tw.Cast(), rule=ShortResult()),
        r"ShortResult\(\): combine must .* 8 elements .*, got torch.float32 of shape \(7,\)",
    ),
    (
        gradients(tw.Cast(), rule=DoubleResult()),
        r"DoubleResult\(\): combine must .*, got torch.float64 of shape \(8,\)",
    ),
    (gradients(tw.Cast(), rule=BareResult()), r"BareResult\(\): combine must return Combined\(result\) .*, got Tensor"),
    (tw.Local(NoHandle(), every=1), r"NoHandle\(\): step must return a Handle, got None"),
    (tw.Gradients(NoVerdict()), r"NoVerdict\(\): commit must return whether all results were finite, got NoneType"),
    (
        tw.Local(NoVerdict(), every=1),
        r"NoVerdict\(\): commit must return whether all results were finite, got NoneType",
    ),
    (
        tw.Gossip(tw.Mix(BareNeighbours())),
        r"BareNeighbours\(\): _neighbours returns Neighbours, got \(.*\) for rank 0 of 2",
    ),
    (tw.Gossip(tw.PushSum(Growing())), r"Growing.* the weights of rank 0 of 2 workers add up to 1.2, not to 1"),
    (
        tw.Local(tw.Mean(), every=1, outer=NoOptimizer()),
        r"outer must return an optimizer .* NoOptimizer\(\) returned NoneType",
    ),
]


def train(comm, strategy):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = tw.attach(model, optimizer, strategy, comm=comm)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    attachment.detach()


@pytest.mark.parametrize(
    ("strategy", "expected"), EXPECTED, ids=lambda value: None if isinstance(value, str) else repr(value)
)
def test_a_mistake_names_its_part(strategy, expected):
    with pytest.raises(ValueError, match=expected) as raised:
        tw.LocalWorld(2).run(train, strategy)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (YieldsMessage(), r"rank \d: YieldsMessage.begin must yield the handle of each collective, got torch.uint8"),
        (TellsNothing(), r"rank \d: TellsNothing.finish\(.*\) must return whether .* is finite, got NoneType"),
    ],
    ids=["yields_message", "tells_nothing"],
)
def test_a_mistake_names_its_exchange(exchange, expected, monkeypatch):
    monkeypatch.setitem(EXCHANGES, exchange.word, exchange)
    with pytest.raises(ValueError, match=expected):
        tw.LocalWorld(2).run(train, gradients(tw.Cast(), exchange=exchange.word))


def test_debug_mode_compares_a_payload_with_its_announced_size(monkeypatch):
    """Without it the first worker that notices is another one, which knows of two sizes and no codec."""
    alone = threading.local()

    @part
    class LongerOnOne(OwnCast):
        def encode_segments(self, segments, keys, residuals):
            payload = super().encode_segments(segments, keys, residuals)
            return torch.cat([payload, payload.new_zeros(4)]) if alone.rank == 1 else payload

    def ranked(comm, strategy):
        alone.rank = comm.rank
        train(comm, strategy)

    monkeypatch.setattr(debug, "enabled", True)
    expected = (
        r"rank 1: LongerOnOne\(\): a payload for 8 elements has 16 bytes, got 20; nbytes says the one, and encode made"
    )
    with pytest.raises(ValueError, match=expected):
        tw.LocalWorld(2).run(ranked, gradients(LongerOnOne(), exchange="all_gather"))
