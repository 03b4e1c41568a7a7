"""Adaptive levels in `Mean`: when they change, from what, that all workers agree, and what they gain."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.gradients import fingerprint, make_model, train
from helpers.spawn import spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.codec.adaptive.level_search import amq
from thinwire.codec.adaptive.level_sets import equidistant, exponential_levels
from thinwire.codec.adaptive.statistics import BucketStatistics, bucket_statistics, mixture, pooled
from thinwire.membership import load_shared, redistribute, shared_part

WHEN = {"bucket_size": 64, "update_steps": (2, 3), "update_every": 5}
CODECS = [
    tw.ALQ(**WHEN),
    tw.ALQ(**WHEN, norm="max", weighting="norm2", num_buckets=3),
    tw.ALQ(**WHEN, distribution="pooled", zero=True),
    tw.ALQ(**WHEN, search="gradient", symmetric=False),
    tw.AMQ(**WHEN),
    tw.AMQ(**WHEN, distribution="pooled", zero=True),
    tw.chain(tw.TopK(0.3), tw.ALQ(**WHEN)),
    tw.chain(tw.ALQ(**WHEN), tw.codec.Huffman()),
    tw.chain(tw.TopK(0.3), tw.AMQ(**WHEN), tw.codec.Huffman()),
]
AVERAGERS = [
    *(tw.Mean(codec) for codec in CODECS),
    tw.Mean(CODECS[0], tw.ErrorFeedback(), granularity="bucket", min_ndim=0),
    tw.Mean(CODECS[0], granularity="model"),
    tw.Mean(CODECS[0], tw.ErrorFeedback(), exchange="scatter_reduce"),
    tw.Mean(CODECS[6], tw.ErrorFeedback(), exchange="scatter_reduce"),
    tw.Mean(CODECS[4], exchange="hierarchical", workers_per_node=2),
]
every_averager = pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
SHAPES = {"conv.weight": (8, 3, 3, 3), "conv.bias": (8,), "fc.weight": (10, 40), "scale": ()}
UPDATES = [2, 3, 5, 10]


def gradients(rank, step, scale=1.0):
    """Other numbers on each worker, of other shapes of distribution in each step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    power = 1 + 2 * (step % 2)
    return [(n, scale * torch.randn(s, generator=generator) ** power / (rank + 1)) for n, s in SHAPES.items()]


def levels_of(codec):
    """Those of the part that quantizes."""
    codec = getattr(codec, "values", codec)
    return getattr(codec, "codec", codec).levels


def run(comm, averager, steps=11, scale=1.0, resume_at=None, apart=False):
    """Results and levels of every round; at `resume_at` everything goes through a file."""
    state, results, levels = averager.init(gradients(comm.rank, 0), comm, seed=5), [], []
    for step in range(steps):
        if step == resume_at:
            torch.save(state.state_dict(), file := io.BytesIO())
            file.seek(0)
            state = averager.init(gradients(comm.rank, 0), comm, seed=5)
            state.load_state_dict(torch.load(file, weights_only=True))
        tensors = gradients(comm.rank, step, scale)
        handles = [averager.step(state, part, comm, scale) for part in (([t] for t in tensors) if apart else [tensors])]
        for handle in handles:
            handle.wait()
        levels.append(levels_of(averager.current_codec(state)))
        assert averager.commit(state)
        results.append(torch.cat([t.reshape(-1) for _, t in tensors]))
    return torch.stack(results), levels


@every_averager
def test_workers_agree_and_levels_change_when_they_should(averager):
    everyone = tw.LocalWorld(4 if "hierarchical" in repr(averager) else 2).run(run, averager)
    first, levels = everyone[0]
    for results, others in everyone[1:]:
        assert torch.equal(results, first)
        assert others == levels
    changes = [step for step in range(1, 11) if levels[step] != levels[step - 1]]
    # The mean square of coordinates is 1 / bucket_size under the L2 norm, so that pooled moments hardly ever change.
    assert changes == UPDATES if "pooled" not in repr(averager) else changes[0] == 2 and set(changes) <= set(UPDATES)
    for found in levels:
        assert (found[0], found[-1]) == (-1, 1)
        assert all(a < b for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("averager", [*AVERAGERS[1:4], AVERAGERS[8], AVERAGERS[-1]], ids=repr)
def test_a_resumed_run_continues_with_the_same_bits(averager):
    """Resumed between sampling and update, and between updates."""
    whole, *resumed = (tw.LocalWorld(2).run(run, averager, 6, 1.0, at) for at in (None, 2, 4))
    for again in resumed:
        for (results, levels), (others, other_levels) in zip(whole, again, strict=True):
            assert torch.equal(results, others)
            assert levels == other_levels


@pytest.mark.parametrize("codec", CODECS[1:8:2], ids=repr)
def test_levels_depend_on_the_gradients_alone(codec):
    """Not on how tensors are put into buckets, nor on the loss scale (a power of two, so exactly)."""
    averager = tw.Mean(codec)
    levels, apart, scaled = (
        tw.LocalWorld(2).run(run, averager, 4, *options)[0][1] for options in ((), (1.0, None, True), (1024.0,))
    )
    assert levels == apart == scaled


@pytest.mark.parametrize("codec", CODECS[:6], ids=repr)
def test_levels_follow_from_the_definition(codec):
    """The first update from the statistics of all buckets of all workers in the round before it."""
    levels = tw.LocalWorld(3).run(run, tw.Mean(codec), 3)[0][1][2]
    encoded = [t for rank in range(3) for _, t in gradients(rank, 1) if t.ndim >= 2]
    stats = BucketStatistics.concatenate([bucket_statistics(t, 64, codec.norm) for t in encoded])
    dist = mixture(stats, codec.num_buckets, codec.weighting) if codec.distribution == "mixture" else pooled(stats)
    start = exponential_levels(3, zero=codec.zero)
    if isinstance(codec, tw.AMQ):
        expected = exponential_levels(3, amq(0.5, dist, 3, codec.zero), codec.zero)
    else:
        expected = codec._search(start, dist)
        starts = [start, equidistant(8 - codec.zero), exponential_levels(3, amq(0.5, dist, 3), codec.zero)]
        least = min(dist.quantization_variance(levels).item() for levels in starts)
        assert dist.quantization_variance(expected).item() <= least * (1 + 1e-6)
    # Moments are added up in another order, and statistics of few buckets leave Psi flat.
    torch.testing.assert_close(torch.tensor(levels, dtype=torch.float64), expected, rtol=1e-5, atol=1e-5)


def test_rank_0_decides_where_processors_differ(monkeypatch):
    """As if `exp` were another one on each worker."""
    codec = CODECS[0]
    learn, calls = tw.ALQ.learn, itertools.count()

    def inexact(self, state, statistics):
        learned = learn(self, state, statistics)
        learned[3] -= 1e-5 * next(calls)
        learned[4] = -learned[3]
        return learned

    monkeypatch.setattr(tw.ALQ, "learn", inexact)
    everyone = tw.LocalWorld(4).run(run, tw.Mean(codec))
    assert all(torch.equal(results, everyone[0][0]) and levels == everyone[0][1] for results, levels in everyone)


@pytest.mark.parametrize(("codec", "value"), [*zip(CODECS, [0.0, math.inf, math.nan] * 3, strict=True)], ids=repr)
def test_nothing_to_learn_from(codec, value):
    """Zero gradients, and such as are not finite, leave the levels; the next update is made."""

    def worker(comm):
        averager = tw.Mean(codec, min_ndim=0)
        state, levels = averager.init(gradients(comm.rank, 0), comm), []
        for step in range(4):
            tensors = gradients(comm.rank, step)
            if step == 1:
                tensors = [(n, torch.full_like(t, value)) for n, t in tensors]
            averager.step(state, tensors, comm).wait()
            averager.commit(state)
            levels.append(levels_of(averager.current_codec(state)))
        return levels

    (levels, others) = tw.LocalWorld(2).run(worker)
    assert levels == others
    assert levels[0] == levels[2] != levels[3]


def test_a_point_mass_keeps_levels_apart():
    """Constant gradients: float32 cannot tell optimal levels apart, so the present ones stay."""
    codec = tw.ALQ(bits=8, bucket_size=64)
    state = codec.init_state()
    codec.observe(state, [torch.ones(6400)], [tw.codec.Key()])
    learned = codec.learn(state, [codec.statistics(state)])
    codec.update(state, learned, 1)
    assert codec.at(state).levels[0] == -1


def test_a_sample_counts_once_where_workers_join_before_the_update_and_is_kept_by_other_numbers_of_workers():
    averager, step = tw.Mean(CODECS[0]), 2  # the first update begins this round

    def measure(comm):
        state = averager.init(gradients(comm.rank, 0), comm)
        for earlier in range(step):
            averager.step(state, gradients(comm.rank, earlier), comm).wait()
            averager.commit(state)
        return state

    def statistics(comm, change):
        fresh = averager.init(gradients(comm.rank, 0), comm)
        change(comm, fresh)
        return averager.codec.statistics(fresh.codec, step)

    live = tw.LocalWorld(2).run(measure)
    found = [averager.codec.statistics(state.codec, step) for state in live]
    assert found[0].any() and not torch.equal(*found)
    saved = [state.state_dict() for state in live]
    for joined in tw.LocalWorld(2).run(statistics, lambda comm, fresh: load_shared(fresh, shared_part(live[0]))):
        assert not joined.any()
    for kept in tw.LocalWorld(3).run(statistics, lambda comm, fresh: redistribute(fresh, saved, comm.rank, 3)):
        assert torch.equal(kept, found[0])


def test_an_abandoned_round_changes_nothing():
    """Its update is undone, and made again by the round that is committed."""

    def worker(comm, breaks):
        averager = tw.Mean(CODECS[0])
        state = averager.init(gradients(comm.rank, 0), comm)
        for step in range(4):
            for _ in range(1 + breaks):
                averager.step(state, gradients(comm.rank, step), comm).wait()
                averager.discard(state)
            averager.step(state, gradients(comm.rank, step), comm).wait()
            averager.commit(state)
        return levels_of(averager.current_codec(state)), comm.ledger.as_dict()["collectives"]["broadcast"]["calls"]

    broken, plain = (tw.LocalWorld(2).run(worker, breaks) for breaks in (True, False))
    assert [levels for levels, _ in broken] == [levels for levels, _ in plain]
    num_updates = len([step for step in UPDATES if step < 4])
    assert [more - calls for (_, more), (_, calls) in zip(broken, plain, strict=True)] == [num_updates] * 2


def test_an_update_costs_what_it_says():
    """All-gather of 32 bytes for each component of the mixture (pooled: 32 in all), and a broadcast of 8 a number."""

    def worker(comm, codec):
        averager = tw.Mean(codec)
        state, sent = averager.init(gradients(comm.rank, 0), comm), []
        for step in range(4):
            before = comm.ledger.bytes_sent
            averager.step(state, gradients(comm.rank, step), comm).wait()
            averager.commit(state)
            sent.append(comm.ledger.bytes_sent - before)
        return sent

    for codec, nbytes in ((tw.ALQ(**WHEN, num_buckets=9), 9 * 32), (tw.AMQ(**WHEN, distribution="pooled"), 32)):
        sent = tw.LocalWorld(3).run(worker, codec)
        numbers = 8 if isinstance(codec, tw.ALQ) else 1
        assert sent[0][2] - sent[0][1] == 2 * nbytes + 2 * 8 * numbers  # the root of three sends to both
        assert sent[0][0] == sent[0][1]


# ---- in training ----

TRAINED = tw.Mean(tw.ALQ(bits=4, bucket_size=128, update_steps=(2, 4), update_every=3), tw.ErrorFeedback())


def ddp_worker(comm, options):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(make_model(), **options)
    handle = tw.compress_gradients(ddp, TRAINED, seed=3)
    train(ddp, comm.rank, parameters=ddp.module)
    result = fingerprint(ddp.module), handle.codec.levels
    handle.detach()
    return result


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.002}], ids=["one bucket", "many buckets"])
def test_ddp_in_processes_and_a_plain_module_in_threads_train_alike(options):
    def plain_worker(comm):
        model = make_model(seed=comm.rank)
        handle = tw.compress_gradients(model, TRAINED, comm=comm, seed=3, bucket_bytes=1000)
        start = handle.codec.levels
        train(model, comm.rank)
        assert handle.codec.levels != start
        result = fingerprint(model), handle.codec.levels
        handle.detach()
        return result

    results = spawn(2, ddp_worker, options) + tw.LocalWorld(2).run(plain_worker)
    assert len(set(results)) == 1


# ---- what it gains ----


def learned(codec, workers):
    """The pure codec after an update from these gradients, a list of tensors for each worker."""
    part, statistics = codec.traits.adaptive, []
    for rank, tensors in enumerate(workers):
        state = part.init_state()
        part.observe(state, tensors, [tw.codec.Key(0, rank << 32 | i) for i in range(len(tensors))])
        statistics.append(part.statistics(state))
    state = part.init_state()
    part.update(state, part.learn(state, statistics), 1)
    return part.at(state)


def squared_errors(codec, tensors, times):
    """Of `times` encodings, each with random numbers of its own."""
    residuals = [torch.empty_like(t) for t in tensors]
    for step in range(times):
        codec.encode(tensors, [tw.codec.Key(0, i, step) for i in range(len(tensors))], residuals)
        yield sum(r.double().square().sum().item() for r in residuals)


def rounding_variance(x, levels, bucket_size, norm):
    """Of given numbers: the exact mean error `sum (h-r)(r-l) norm^2`, its variance by rounding, and its terms."""
    levels = torch.tensor(levels, dtype=torch.float64)
    rows = x.double().view(-1, bucket_size)
    norms = (rows.norm(dim=1) if norm == "l2" else rows.abs().amax(dim=1)).unsqueeze(1)
    r = rows / norms
    j = (torch.bucketize(r, levels, right=True) - 1).clamp(0, levels.numel() - 2)
    below, above = r - levels[j], levels[j + 1] - r
    mean, width = below * above, below + above
    # The squared error is above^2 with probability below / width, else below^2.
    second = (above**4 * below + below**4 * above) / width
    return (mean * norms**2).sum().item(), ((second - mean**2) * norms**4).sum().item(), (mean * norms**2)


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("codec", [tw.ALQ, tw.AMQ])
def test_the_measured_error_is_psi(codec, norm):
    """Within 5 standard errors (chance under 1e-6): of rounding, given the numbers; and of Psi, on normal ones."""
    size, times = 512, 50
    x = torch.randn(400 * size, generator=torch.Generator().manual_seed(3)) * 0.01
    adaptive = codec(bucket_size=size, norm=norm, weighting="norm2", num_buckets=400)
    pure = learned(adaptive, [[x]])
    measured = sum(squared_errors(pure, [x], times)) / times
    expected, variance, parts = rounding_variance(x, pure.levels, size, norm)
    assert abs(measured - expected) <= 5 * math.sqrt(variance / times)

    stats = bucket_statistics(x, size, norm)
    psi = mixture(stats, 400, "norm2").quantization_variance(torch.tensor(pure.levels, dtype=torch.float64)).item()
    predicted = psi * (stats.norms**2 * stats.counts).sum().item()
    assert abs(expected - predicted) <= 5 * math.sqrt(x.numel()) * parts.std().item()


def digits_network():
    def block(before, after):
        return nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()

    torch.manual_seed(0)
    layers = [*block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64), nn.Flatten(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers)


@cache
def digits_gradients(steps, num_workers=4):
    """Gradients of all weights of a small convolutional network in training, at each of `steps` on each worker."""
    from sklearn.datasets import load_digits

    net, digits, generator = digits_network(), load_digits(), torch.Generator().manual_seed(1)
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    parameters, found = list(net.parameters()), []
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for step in range(max(steps) + 1):
        workers = []
        for _ in range(num_workers):
            batch = torch.randint(0, len(labels), (32,), generator=generator)
            loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
            workers.append(torch.autograd.grad(loss, parameters))
        if step in steps:
            found.append([[g for g in gradients if g.ndim > 1] for gradients in workers])
        for p, *of_workers in zip(parameters, *workers, strict=True):
            p.grad = torch.stack(of_workers).mean(0)
        optimizer.step()
    return found


@pytest.mark.parametrize("bucket_size", [512, 8192])
def test_on_real_gradients_alq_beats_amq_beats_fixed_levels(bucket_size):
    """Relative squared error at 3 bits on gradients five steps after the update, which the levels have not seen.

    A finding, not a theorem: a bucket of real gradients is not exactly normal. The order holds with 5 % to spare.
    """
    seen, unseen = digits_gradients((20, 25))
    options = {"bucket_size": bucket_size, "norm": "l2"}
    codecs = {
        "ALQ": learned(tw.ALQ(**options), seen),
        "AMQ": learned(tw.AMQ(**options), seen),
        "NUQSGD": tw.NUQSGD(bits=3, **options),
        "QSGD": tw.QSGD(bits=3, **options),
        "exponential": tw.codec.Quantize(tuple(exponential_levels(3).tolist()), **options),
        "uniform": tw.codec.Quantize(tuple(equidistant(8).tolist()), **options),
    }
    total = sum(t.double().square().sum().item() for tensors in unseen for t in tensors)
    error = {
        name: sum(sum(squared_errors(codec, tensors, 10)) / 10 for tensors in unseen) / total
        for name, codec in codecs.items()
    }
    fixed = min(error[name] for name in ("NUQSGD", "QSGD", "exponential", "uniform"))
    print({name: round(value, 3) for name, value in error.items()})
    assert error["ALQ"] <= error["AMQ"] <= 0.3 * fixed


@pytest.mark.parametrize("distribution", ["mixture", "pooled"])
def test_under_the_l2_norm_amq_learns_its_start(distribution):
    """The moments of a bucket are 1/d there, whatever its coordinates are: normal, heavy-tailed, or of two spreads."""
    codec = tw.AMQ(bucket_size=2048, distribution=distribution)
    start = codec.init_state().learned.item()
    for x in unlike_gradients():
        assert learned(codec, [[x]]).levels[-2] == pytest.approx(start, rel=0.03)
    under_max = [learned(replace(codec, norm="max"), [[x]]).levels[-2] for x in unlike_gradients()]
    assert max(under_max) > 1.2 * min(under_max)


def test_a_tail_costs_alq_more_than_it_predicts():
    """In buckets of two spreads, few coordinates beyond the last interior level make most of its error, which exceeds AMQ's."""
    size = 2048
    *_, x = unlike_gradients()
    total = x.double().square().sum().item()
    alq, amq = (learned(kind(bucket_size=size, weighting="norm2"), [[x]]) for kind in (tw.ALQ, tw.AMQ))
    error, _, parts = rounding_variance(x, alq.levels, size, "l2")
    stats = bucket_statistics(x, size, "l2")
    psi = mixture(stats, 400, "norm2").quantization_variance(torch.tensor(alq.levels, dtype=torch.float64)).item()
    beyond = (x.view(-1, size) / x.view(-1, size).norm(dim=1, keepdim=True)).abs() > alq.levels[-2]
    assert error / total > 2 * psi * size and error > rounding_variance(x, amq.levels, size, "l2")[0]
    assert beyond.double().mean() < 0.05 and parts[beyond].sum() > 0.5 * parts.sum()


def unlike_gradients(numel=64 * 2048):
    """Normal numbers, their cubes, and numbers of two spreads in each bucket, as of two layers."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(8))
    spread = torch.where(torch.arange(numel) % 2048 < 64, 8.0, 1.0)
    return x, x**3, x * spread


@pytest.mark.parametrize("codec", [tw.ALQ(), tw.AMQ()], ids=repr)
def test_the_start_bears_the_rounds_before_the_first_update(codec):
    """Less error than gradient, an encoding; with the published start it is over a hundred times the gradient's square."""
    (workers,) = digits_gradients((0,))
    total = sum(t.double().square().sum().item() for tensors in workers for t in tensors)
    published = tw.codec.Quantize(tuple(exponential_levels(3).tolist()), codec.bucket_size, codec.norm)
    error, of_published = (
        sum(sum(squared_errors(pure, tensors, 5)) / 5 for tensors in workers) / total for pure in (codec, published)
    )
    assert error < 1 and of_published > 100


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("zero", [False, True])
def test_the_start_is_the_best_multiplier_for_normal_numbers(bits, norm, zero):
    """No p within three hundredths of it has 2 % less error, so that `prior` describes such buckets."""
    codec = tw.AMQ(bits=bits, bucket_size=1024, norm=norm, zero=zero)
    start = codec.init_state().learned.item()
    assert torch.equal(tw.ALQ(bits=bits, bucket_size=1024, norm=norm, zero=zero).init_state().learned,
                       exponential_levels(bits, start, zero))  # fmt: skip
    x = torch.randn(200 * 1024, generator=torch.Generator().manual_seed(5))

    def error(p):
        return rounding_variance(x, exponential_levels(bits, p, zero).tolist(), 1024, norm)[0]

    assert error(start) <= 1.02 * min(error(start + i / 100) for i in range(-3, 4) if 0 < start + i / 100 < 1)


def test_only_the_rounds_before_an_update_are_sampled():
    assert [step for step in range(25_000) if tw.ALQ().observes(step)] == [99, 1999, 9999, 19999]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tw.ALQ(bits=1), "bits must be an integer from 2 to 8, got 1"),
        (lambda: tw.ALQ(bits=tw.schedule.Values((4, 3))), "fitted for one number of bits"),
        (lambda: tw.ALQ(norm="l1"), "ALQ: norm must be"),
        (lambda: tw.ALQ(distribution="normal"), "distribution must be one of mixture, pooled, got 'normal'"),
        (lambda: tw.AMQ(weighting="none"), "AMQ: weighting must be one of"),
        (lambda: tw.ALQ(search="newton"), "search must be one of coordinate, gradient"),
        (lambda: tw.AMQ(num_buckets=0), "num_buckets must be an integer, 1 or more"),
        (lambda: tw.ALQ(update_steps=(0, 5)), "the first round has no gradients to learn from"),
        (lambda: tw.ALQ(update_every=0), "update_every must be positive"),
        (lambda: tw.AMQ(multiplier=1.0), "multiplier must be above 0 and below 1, or None"),
        (lambda: tw.AMQ(bits=8, multiplier=0.1), "ascending"),
        (lambda: tw.Mean(tw.ALQ(), exchange="all_reduce"), "cannot be added on the wire"),
        (lambda: tw.Choco(tw.Ring(), tw.ALQ()), "gossip asks neighbours only"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_state_of_other_levels_is_refused():
    def worker(comm):
        tensors = gradients(comm.rank, 0)
        saved = tw.Mean(tw.ALQ(bits=3)).init(tensors, comm).state_dict()
        with pytest.raises(ValueError, match=r"saved state of 'learned' has 8 elements, expected 16"):
            tw.Mean(tw.ALQ(bits=4)).init(tensors, comm).load_state_dict(saved)
        with pytest.raises(ValueError, match="only one of the saved state and this averager has codec"):
            tw.Mean(tw.QSGD(bits=4)).init(tensors, comm).load_state_dict(saved)

    tw.LocalWorld(1).run(worker)
