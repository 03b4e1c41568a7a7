"""Fields that follow a schedule: every worker uses the same value in the same round, and the value that is due."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.spawn import WORLDS

import thinwire as tw

ROUNDS, EVERY = 6, 2

CASES = {
    "QSGD levels": lambda value: tw.QSGD(levels=value, bucket_size=64),
    "QSGD bits": lambda value: tw.QSGD(bits=value, bucket_size=64),
    "NUQSGD bits": lambda value: tw.NUQSGD(bits=value, bucket_size=64),
    "TopK ratio": lambda value: tw.TopK(value),
    "values of a chain": lambda value: tw.chain(tw.TopK(0.3), tw.QSGD(levels=value)),
    "Huffman's symbols": lambda value: tw.chain(tw.TopK(0.3), tw.QSGD(bits=value), tw.codec.Huffman()),
    "equal tiles": lambda value: tw.chain(tw.codec.Tiles(8, divisors=True), tw.codec.BlockwiseTopK(value, block=40)),
}
VALUES = {
    "QSGD levels": (255, 15, 4),
    "TopK ratio": (0.5, 0.1, 0.02),
    "values of a chain": (100, 7, 1),
    "equal tiles": (0.5, 0.1, 0.02),
}


def values_of(name):
    return VALUES.get(name, (8, 4, 2))


def rounds(comm, codec, unit="step"):
    """(what was agreed, the codec of the round, bytes sent) for each round, from fresh numbers each time."""
    averager, seen = tw.Mean(codec), []
    state = averager.init([("x", torch.zeros(40, 25))], comm)
    for step in range(ROUNDS):
        if unit == "epoch":
            averager.set_epoch(state, step)
        x = torch.randn(40, 25, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        before, current = comm.ledger.bytes_sent, averager.current_codec(state)
        averager.step(state, [("x", x)], comm).wait()
        averager.commit(state)
        seen.append((x, current, comm.ledger.bytes_sent - before))
    return seen


@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_what_its_values_are_in_their_rounds(name, unit):
    """Round by round the same bits and bytes as with the value itself, on all workers."""
    build, values = CASES[name], values_of(name)
    scheduled = tw.LocalWorld(3).run(rounds, build(tw.schedule.Values(values, every=EVERY, unit=unit)), unit)
    constant = {value: tw.LocalWorld(3).run(rounds, build(value), unit) for value in values}
    for step in range(ROUNDS):
        value = values[step // EVERY]
        for rank in range(3):
            x, codec, sent = scheduled[rank][step]
            assert codec == build(value)
            assert torch.equal(x, scheduled[0][step][0])
            assert torch.equal(x, constant[value][rank][step][0]) and sent == constant[value][rank][step][2]
    # and the values differ in what they send
    assert scheduled[0][0][2] > scheduled[0][EVERY][2] > scheduled[0][2 * EVERY][2]


@pytest.mark.parametrize("name", ["QSGD levels", "NUQSGD bits"])
def test_processes_agree_too(name):
    codec = CASES[name](tw.schedule.Values(values_of(name), every=EVERY, unit="step"))
    threads, processes = (WORLDS[world](2, rounds, codec) for world in ("threads", "processes"))
    for ours, theirs in zip(threads[0] + threads[1], processes[0] + processes[1], strict=True):
        assert torch.equal(ours[0], theirs[0]) and ours[1:] == theirs[1:]


@pytest.mark.parametrize("name", CASES)
def test_notation(name):
    codec = CASES[name](tw.schedule.Values(values_of(name), every=3))
    assert tw.parse(repr(codec)) == codec


def test_workers_with_different_schedules_fail_together():
    def worker(comm):
        averager = tw.Mean(tw.QSGD(levels=tw.schedule.Values((255, 15 + comm.rank))))
        with pytest.raises(ValueError, match=r"averager.*levels=Values"):
            averager.init([("x", torch.zeros(3, 3))], comm)

    tw.LocalWorld(2, timeout_seconds=60).run(worker)


@dataclass(frozen=True, repr=False)
class Second(tw.schedule.Schedule):
    """One value in the first round, and another one in all others; it does not say which it takes."""

    first: int
    second: int
    unit: str = "step"

    def at(self, progress):
        return self.second if progress.step else self.first


@pytest.mark.parametrize(
    ("build", "values", "message"),
    [
        (lambda value: tw.QSGD(levels=value), (255, 0), "must be an integer from 1 to 32767, got 0"),
        (lambda value: tw.QSGD(bits=value), (8, 9), "must be an integer from 1 to 8, got 9"),
        (lambda value: tw.NUQSGD(bits=value), (8, 1), "must be an integer from 2 to 8, got 1"),
        (lambda value: tw.QSGD(bits=value), (8, 1), "one bit has no room for a zero level"),
        (lambda value: tw.NUQSGD(bits=value, multiplier=0.1), (4, 8), r"as float32, got \[-0.0, -0.0\] at number 47"),
        (tw.TopK, (0.5, 2), "must be above 0 and at most 1, got 2"),
    ],
)
def test_a_value_out_of_range_is_refused_at_once_or_when_its_round_comes(build, values, message):
    with pytest.raises(ValueError, match=message):
        build(tw.schedule.Values(values, unit="step"))
    codec = build(Second(*values))
    with pytest.raises(ValueError, match=message):
        tw.LocalWorld(2).run(rounds, codec)


@dataclass(frozen=True, repr=False)
class LargeAndSmall(tw.codec.Codec):
    """One codec for segments of 100 elements or more, and another one for those of fewer."""

    codecs: tuple[tw.codec.Codec, ...]

    def encode_segments(self, segments, keys, residuals):
        parts = [(self.of(s.numel()), [s], [key]) for s, key in zip(segments, keys, strict=True)]
        return torch.cat([codec.encode_segments(*part, None) for codec, *part in parts])

    def decode_add_segments(self, payload, outs, weight, keys):
        parts = payload.split([self.segments_nbytes([out.numel()]) for out in outs])
        for out, part in zip(outs, parts, strict=True):
            self.of(out.numel()).decode_add_segments(part, [out], weight, keys)

    def segments_nbytes(self, numels):
        return sum(self.of(n).segments_nbytes([n]) for n in numels)

    def of(self, numel):
        return self.codecs[numel < 100]


def test_schedules_of_codecs_in_a_tuple_are_followed():
    values, small = (0.5, 0.1, 0.02), tw.QSGD(bits=4)
    codec = LargeAndSmall((tw.TopK(tw.schedule.Values(values, every=EVERY, unit="step")), small))
    assert not codec.is_constant
    for step, (_, current, _) in enumerate(tw.LocalWorld(2).run(rounds, codec)[0]):
        assert current == LargeAndSmall((tw.TopK(values[step // EVERY]), small))
    constant = LargeAndSmall((tw.TopK(0.5), small))
    assert constant.is_constant and tw.schedule.resolve(constant, tw.schedule.Progress()) is constant


@dataclass(frozen=True, repr=False)
class Unitless(tw.schedule.Schedule):
    """Does not say what it counts."""

    def at(self, progress):
        return 0.5 if progress.step else 0.25


def test_a_schedule_counts_steps_unless_it_says_otherwise():
    assert not Unitless().follows_epochs

    def worker(comm):
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(
            model, optimizer, tw.Gradients(tw.Mean(tw.TopK(Unitless()), tw.ErrorFeedback())), comm=comm
        ) as handle:
            model(torch.ones(1, 8)).sum().backward()
            return handle.codec

    assert tw.LocalWorld(1).run(worker) == [tw.TopK(0.5)]


def test_codecs_in_a_tuple_are_parts():
    codec = LargeAndSmall((tw.codec.Threshold(0.5), tw.QSGD(bits=4)))
    assert codec.parts() == (tw.codec.Threshold(0.5), tw.QSGD(bits=4))
    assert codec.under_scale(4.0) == LargeAndSmall((tw.codec.Threshold(2.0), tw.QSGD(bits=4)))
