"""`Fitted` in averagers: what it measures, chooses and sends, on all workers alike, and how it follows the line."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.average.mean.line_meter import LineMeter, SentMessage
from thinwire.codec import Key
from thinwire.codec.adaptive.base import LineMeasurement
from thinwire.codec.compose.per_layer import PerLayer
from thinwire.membership import load_shared, redistribute, shared_part
from thinwire.testing import check_averager

SHAPES = {"embedding": (50, 40), "attention": (30, 30), "bias": (30,), "mlp": (64, 33), "head": (20, 50)}
SCALES = {"embedding": 0.01, "attention": 1.0, "bias": 1.0, "mlp": 0.1, "head": 3.0}
QUANTIZERS = tuple(tw.QSGD(bits=bits, bucket_size=64) for bits in (2, 3, 4, 8))
SPARSE = tuple(tw.chain(tw.TopK(ratio), tw.QSGD(bits=4)) for ratio in (0.02, 0.2))
ANY = (*QUANTIZERS, *SPARSE, tw.codec.Identity())
EF = tw.ErrorFeedback()


def gradients(rank, step):
    """Layers of different sizes and tails, as those of a network are."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for i, (name, shape) in enumerate(SHAPES.items()):
        x = torch.randn(shape, generator=generator)
        found.append((name, SCALES[name] * x.sign() * x.abs() ** (1 + 2 * (i % 3))))
    return found


def rounds(averager, comm, num, start=0, state=None):
    """The state after some rounds, their results, and the bytes that each has sent."""
    state = averager.init(gradients(comm.rank, 0), comm, seed=3) if state is None else state
    results, num_bytes = [], []
    for step in range(start, start + num):
        tensors, before = gradients(comm.rank, step), comm.ledger.bytes_sent
        averager.step(state, tensors, comm).wait()
        averager.commit(state)
        results.append(torch.cat([t.reshape(-1) for _, t in tensors]))
        num_bytes.append(comm.ledger.bytes_sent - before)
    return state, results, num_bytes


@pytest.mark.parametrize(
    "averager",
    [
        tw.Mean(tw.Fitted(4, candidates=QUANTIZERS, measure_steps=(1, 4))),
        tw.Mean(tw.Fitted(3.0, candidates=ANY, measure_steps=(1, 3)), EF),
        tw.Mean(tw.Fitted(tw.QSGD(bits=3), candidates=ANY, measure_steps=(2,)), EF, exchange="scatter_reduce"),
        tw.Mean(tw.Fitted(3.0, candidates=ANY, measure_steps=(1, 3)), tw.MomentumCorrection(0.9)),
        tw.Mean(tw.Fitted(error_of=tw.QSGD(bits=4), candidates=ANY, measure_steps=(1, 3)), EF, min_ndim=0),
        tw.ByName({"w*": tw.Mean(tw.Fitted(3.0, candidates=QUANTIZERS, measure_steps=(1, 3))), "*": tw.Mean()}),
    ],
    ids=["unbiased", "biased", "scatter_reduce", "momentum", "error_of", "by name"],
)
def test_averagers_with_it_keep_the_contract(averager):
    check_averager(averager)


def test_nodes_share_one_choice():
    fitted = tw.Fitted(3.0, candidates=ANY, measure_steps=(1, 3))
    check_averager(tw.Mean(fitted, EF, exchange="hierarchical", workers_per_node=2), sizes=(2, 4))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("uniform", [tw.QSGD(bits=3, bucket_size=64), SPARSE[1]], ids=repr)
def test_the_choice_loses_less_than_one_setting_at_no_more_bytes(size, uniform):
    averager = tw.Mean(tw.Fitted(uniform, candidates=ANY, weighting="squared", measure_steps=(1,)), EF)

    def errors(codec):
        """The squared error of one encoding of all workers' gradients, in float64, by encoding and decoding."""
        total = 0.0
        for rank in range(size):
            xs = [x for _, x in gradients(rank, 0) if x.ndim > 1]
            keys = [Key.of(state.seed, name, rank, 0) for name, x in gradients(rank, 0) if x.ndim > 1]
            decoded = codec.decode(codec.encode(xs, keys), [x.shape for x in xs])
            total += sum(float((x.double() - y.double()).square().sum()) for x, y in zip(xs, decoded, strict=True))
        return total

    state, _, _ = tw.LocalWorld(size).run(lambda comm: rounds(averager, comm, 2))[0]
    chosen, xs = averager.current_codec(state), [x for _, x in gradients(0, 0) if x.ndim > 1]
    assert len(set(chosen.codecs)) > 1
    assert chosen.nbytes([x.shape for x in xs]) <= uniform.nbytes([x.shape for x in xs])
    assert errors(chosen) < 0.9 * errors(uniform)
    # What was measured in the first round, where memory is empty, is what one finds by hand.
    norms = sum(float(x.double().square().sum()) for r in range(size) for _, x in gradients(r, 0) if x.ndim > 1)
    assert averager.diagnostics(state)["error"] == pytest.approx(errors(chosen) / norms, rel=1e-5)


def test_errors_are_measured_with_memory():
    """The second measurement is of gradient and residual together."""
    top = tw.TopK(0.2)
    averager = tw.Mean(tw.Fitted(2.5, candidates=(top, *ANY), measure_steps=(1, 2)), EF)

    def worker(comm):
        state, _, _ = rounds(averager, comm, 1)
        encoded = {name: g + state.memory.residual[name].view(g.shape) for name, g in gradients(0, 1) if g.ndim > 1}
        state, _, _ = rounds(averager, comm, 2, start=1, state=state)
        return state.codec.errors, encoded

    errors, encoded = tw.LocalWorld(1).run(worker)[0]
    plain = dict(gradients(0, 1))
    for name, x in encoded.items():
        dropped = float((x.double() - top.decode(top.encode(x), x.shape)).square().sum())
        assert not torch.equal(x, plain[name])
        assert errors[name][0] == pytest.approx(dropped, rel=1e-5)
        assert errors[name][-1] == pytest.approx(float(x.double().square().sum()), rel=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("exchange", ["all_gather", "scatter_reduce"])
def test_the_ledger_counts_what_the_formula_says(size, exchange):
    averager = tw.Mean(tw.Fitted(3.0, candidates=ANY, measure_steps=(1,)), EF, exchange=exchange, min_ndim=0)
    layers = len(SHAPES)

    def worker(comm):
        state, _, num_bytes = rounds(averager, comm, 3)
        codec = averager.current_codec(state)
        numels = [math.prod(shape) for shape in SHAPES.values()]
        if exchange == "all_gather":
            expected = (size - 1) * codec.nbytes(numels)
        else:
            shards = [codec.nbytes([n // size + (r < n % size) for n in numels]) for r in range(size)]
            expected = sum(shards) - shards[comm.rank] + (size - 1) * shards[comm.rank]
        return num_bytes, expected, state.codec.budget

    message = 8 * layers * (len(ANY) + 1)
    for rank, (num_bytes, expected, budget) in enumerate(tw.LocalWorld(size).run(worker)):
        assert num_bytes[2] == expected
        assert budget == 3 / 8 * sum(map(math.prod, SHAPES.values()))
        children = sum(1 for bit in range(size.bit_length()) if rank < 1 << bit and rank + (1 << bit) < size)
        agreeing = (size - 1) * (24 + message) + children * (24 + 8 * layers + message)
        assert num_bytes[1] == expected + agreeing


def test_all_workers_choose_alike_when_workers_come_and_go():
    averager = tw.Mean(tw.Fitted(3.0, candidates=ANY, measure_steps=(2, 5)), EF)
    world = tw.LocalWorld(4)
    before = [state for state, _, _ in world.run(lambda comm: rounds(averager, comm, 3))]
    choice = before[0].codec.choice
    assert all(state.codec.choice == choice for state in before)
    assert len(set(choice.values())) > 1

    def go_on(comm):
        state = averager.init(gradients(comm.rank, 0), comm, seed=3)
        if comm.rank < 2:
            redistribute(state, [s.state_dict() for s in before], comm.rank, comm.size)
        else:
            load_shared(state, shared_part(before[0]))
        assert state.codec.choice == choice
        return rounds(averager, comm, 4, start=3, state=state)

    for size in (2, 3):
        after = tw.LocalWorld(size).run(go_on)
        state, results, _ = after[0]
        assert state.codec.last_update == 5
        for other, theirs, _ in after[1:]:
            assert other.codec.choice == state.codec.choice
            assert all(map(torch.equal, results, theirs))


def test_a_gradient_that_is_not_finite_changes_no_choice():
    averager = tw.Mean(tw.Fitted(3.0, candidates=ANY, measure_steps=(1, 2)), EF)

    def worker(comm):
        state, _, _ = rounds(averager, comm, 1)
        choices = []
        for bad in (True, False):
            tensors = gradients(comm.rank, 1)
            if bad and comm.rank == 1:
                tensors[0][1][3, 3] = math.nan
            averager.step(state, tensors, comm).wait()
            committed = averager.commit(state)
            assert committed != bad
            choices.append(dict(state.codec.choice))
        return choices

    for choices in tw.LocalWorld(2).run(worker):
        assert choices[0] == choices[1]
        assert len(set(choices[0].values())) > 1


def test_a_bound_on_the_error_takes_fewer_bytes():
    uniform = tw.QSGD(bits=4, bucket_size=64)
    averager = tw.Mean(tw.Fitted(error_of=uniform, candidates=ANY, weighting="squared", measure_steps=(1,)), EF)
    state, _, _ = tw.LocalWorld(2).run(lambda comm: rounds(averager, comm, 2))[0]
    errors, choice = state.codec.matrix(), list(state.codec.choice.values())
    found = errors[np.arange(len(choice)), choice].sum()
    assert found <= errors[:, ANY.index(uniform)].sum()
    numels = state.codec.numels
    assert averager.codec.nbytes_at(state.codec) < 0.9 * uniform.nbytes(numels)


@pytest.mark.parametrize("uniform", [tw.QSGD(bits=2, bucket_size=64), tw.QSGD(bits=3, bucket_size=64)], ids=repr)
def test_relative_errors_do_not_depend_on_the_scale_of_a_layer(uniform):
    """As for Adam, which divides by it: layers that are scaled get what they got before, where the squared error would move."""

    def chosen(weighting, scale):
        fitted = tw.Fitted(uniform, candidates=ANY, weighting=weighting)
        xs = {name: x * scale.get(name, 1.0) for name, x in gradients(0, 0)}
        state = fitted.init_state({name: x.shape for name, x in xs.items()})
        fitted.observe(state, list(xs.values()), [Key.of(0, name, 0, 0) for name in xs])
        fitted.update(state, fitted.learn(state, [fitted.statistics(state, 1)]), 1)
        return state

    scale = {"embedding": 2.0**10, "head": 2.0**-10}
    plain, scaled = chosen("relative", {}), chosen("relative", scale)
    assert plain.choice == scaled.choice
    assert chosen("squared", {}).choice != chosen("squared", scale).choice
    errors, choice = scaled.matrix(), list(scaled.choice.values())
    relative = errors[:, :-1] / errors[:, -1:] * np.array(scaled.numels)[:, None]
    assert relative[np.arange(len(choice)), choice].sum() <= relative[:, ANY.index(uniform)].sum()


@pytest.mark.parametrize("candidates", [QUANTIZERS, ANY], ids=["quantizers", "any"])
@pytest.mark.parametrize("bits", [2.6, 3.3, 5.0])
def test_no_choice_loses_less(candidates, bits):
    """Against all choices: the sum of relative errors, each times the elements of its layer."""
    fitted, xs = tw.Fitted(bits, candidates=candidates), dict(gradients(0, 0))
    state = fitted.init_state({name: x.shape for name, x in xs.items()})
    fitted.observe(state, list(xs.values()), [Key.of(0, name, 0, 0) for name in xs])
    fitted.update(state, fitted.learn(state, [fitted.statistics(state, 1)]), 1)
    errors, rows = state.matrix(), np.arange(len(xs))
    costs = np.array(state.numels)[:, None] * errors[:, :-1] / errors[:, -1:]
    num_bytes = np.array([[codec.nbytes(x.shape) for codec in fitted.codecs] for x in xs.values()])
    every = np.array(list(itertools.product(range(len(fitted.codecs)), repeat=len(xs))))
    fitting = every[num_bytes[rows, every].sum(1) <= state.budget]
    assert costs[rows, list(state.choice.values())].sum() == pytest.approx(costs[rows, fitting].sum(1).min(), rel=1e-9)


# ---- the codec of one round ----


def test_a_codec_for_each_layer_is_its_parts_by_hand():
    codecs = (tw.QSGD(bits=3), SPARSE[0], tw.QSGD(bits=5), tw.codec.Identity(), tw.QSGD(bits=3))
    codec, xs = PerLayer(codecs), [x for _, x in gradients(0, 0)]
    keys, residuals = [Key(1, i, 2) for i in range(5)], [torch.empty_like(x) for x in xs]
    payload = codec.encode(xs, keys, residuals)
    by_hand = [part.encode(x, key) for part, x, key in zip(codecs, xs, keys, strict=True)]
    both = codecs[0].encode([xs[0], xs[4]], [keys[0], keys[4]])
    assert torch.equal(payload, torch.cat([both, by_hand[2], by_hand[1], by_hand[3]]))  # quantizers share one call
    decoded = codec.decode(payload, [x.shape for x in xs])
    for part, x, sent, got, residual in zip(codecs, xs, by_hand, decoded, residuals, strict=True):
        assert torch.equal(got, part.decode(sent, x.shape))
        assert torch.equal(residual, x - got)
    summed = [torch.empty_like(x) for x in xs]
    codec.decode_sum([payload, payload], summed, 0.5)
    assert all(map(torch.allclose, summed, decoded))
    kept = codec.support(payload, [x.shape for x in xs])
    assert kept.counts == [SPARSE[0].sparsifier.count(x.numel()) if i == 1 else x.numel() for i, x in enumerate(xs)]
    assert codec.pick([3, 1]) == PerLayer((codecs[3], codecs[1]))
    with pytest.raises(ValueError, match="expected 5 segments, got 1"):
        codec.encode(xs[0])


LOW = tuple(tw.codec.LowRank(rank, tw.QSGD(bits=6)) for rank in (1, 2))


@pytest.mark.parametrize("exchange", ["all_gather", "scatter_reduce"])
def test_matrices_of_low_rank_get_a_codec_of_low_rank(exchange):
    """One layer is of rank 2 and one is noise; a convolution and a vector are there too. All workers hold the same bits."""

    def worker(comm):
        noise = torch.Generator().manual_seed(comm.rank)
        low = torch.randn(40, 2, generator=noise) @ torch.randn(2, 60, generator=noise)
        xs = {
            "low": low,
            "noise": torch.randn(40, 60, generator=noise),
            "kernel": torch.randn(8, 3, 3, 3, generator=noise),
        }
        xs["bias"] = torch.ones(30)
        codec = tw.Fitted(2.0, candidates=(*QUANTIZERS, *LOW), measure_steps=(1,))
        averager = tw.Mean(codec, EF, exchange=exchange, min_ndim=0)
        state = averager.init(list(xs.items()), comm)
        for _ in range(3):
            given = {name: x.clone() for name, x in xs.items()}
            averager.step(state, list(given.items()), comm).wait()
            averager.commit(state)
        chosen = {name: codec.codecs[choice] for name, choice in state.codec.choice.items()}
        return chosen, given, codec.nbytes_at(state.codec), sum(x.numel() for x in xs.values())

    results = tw.LocalWorld(2).run(worker)
    for chosen, given, nbytes, numel in results:
        assert chosen == results[0][0] and nbytes <= 2.0 / 8 * numel
        assert chosen["low"] == LOW[1] and chosen["noise"] in QUANTIZERS
        assert all(torch.equal(x, results[0][1][name]) for name, x in given.items())


def test_a_budget_of_the_line_has_fast_candidates_unless_others_are_given():
    assert not any(isinstance(codec, tw.codec.LowRank) for codec in tw.Fitted("line").codecs)
    assert any(isinstance(codec, tw.codec.LowRank) for codec in tw.Fitted(2.0).codecs)
    assert tw.Fitted("line", candidates=(*QUANTIZERS, *LOW)).codecs == (*QUANTIZERS, *LOW)


def test_segments_of_low_rank_keep_their_shapes_beside_others():
    codecs, xs = (LOW[0], tw.QSGD(bits=3), LOW[0]), [torch.randn(6, 10), torch.randn(4, 5), torch.randn(3, 2, 7)]
    codec, keys, residuals = PerLayer(codecs), [Key(1, i, 2) for i in range(3)], [torch.empty_like(x) for x in xs]
    assert codec.traits.needs_shape
    payload = codec.encode(xs, keys, residuals)
    shapes = [x.shape for x in xs]
    assert payload.numel() == codec.nbytes(shapes) == LOW[0].nbytes([shapes[0], shapes[2]]) + codecs[1].nbytes(20)
    for part, x, key, got, residual in zip(codecs, xs, keys, codec.decode(payload, shapes), residuals, strict=True):
        torch.testing.assert_close(got, part.decode(part.encode(x, key), x.shape))
        assert torch.equal(residual, x - got)


# ---- the line ----


class Line:
    """A simulated run. The network carries what is sent after a first layer until computation ends, and then is waited for."""

    def __init__(self, fitted, numels, seconds=0.3, overlap=0.6):
        self.fitted, self.state = fitted, fitted.init_state({str(i): torch.Size([n]) for i, n in enumerate(numels)})
        self.seconds, self.overlap, self.step = seconds, overlap, 0
        norms = torch.linspace(1, 2, len(fitted.codecs) + 1, dtype=torch.float64).flip(0)
        for row in self.state.errors.values():
            row.copy_(norms)

    def run(self, rate, updates, late=(0.0, 0.0), latency=0.0, decoding=0.0):
        """The share of a step that waits, before each of some updates; the messages of each worker seem so much later.

        A worker looks at its messages one after the other when it has computed, and decodes each of them.
        """
        shares = []
        for _ in range(updates):
            num_bytes, free = self.fitted.nbytes_at(self.state), self.overlap * self.seconds
            carried, sent = num_bytes / rate, self.seconds - free
            rows = []
            for seconds in late:
                meter, waited, now, carried_at = LineMeter(), 0.0, self.seconds, 0.0
                meter.add_latency(latency)
                meter.begin_round(waited=0.0, now=0.0)
                for i in range(4):  # layers are sent one after the other
                    begun = sent + i * free / 4
                    carried_at = max(begun, carried_at) + carried / 4
                    arrived = max(now, carried_at + latency + seconds)
                    waited += arrived - now
                    meter.add(SentMessage(begun, arrived, num_bytes // 4))
                    now = arrived + decoding
                meter.commit()
                meter.begin_round(waited)
                rows.append(self.fitted.statistics(self.state, 1, meter.take(self.fitted.wait_share, now)))
            shares.append((waited - max(late)) / (self.seconds + waited))
            self.step += self.fitted.follow_every
            self.fitted.update(self.state, self.fitted.learn(self.state, rows), self.step)
        return shares


LINE = tw.Fitted("line", candidates=tuple(tw.QSGD(bits=b) for b in range(2, 9)), measure_every=10**6, measure_steps=())
MANY = (200_000,) * 30


def test_it_follows_a_line_that_changes_within_ten_steps():
    line = Line(LINE, MANY)
    fast = sum(MANY) / 0.3 / 0.6 * 0.75  # carries 6 bits an element beside a step
    line.run(fast, 60)
    before = line.fitted.diagnostics(line.state)["bits"]
    assert 5.5 < before < 8.1
    slower = line.run(fast / 2.5, 20)
    assert slower[0] > 0.3
    assert max(slower[10 // LINE.follow_every :]) < 0.15
    assert 2 <= line.fitted.diagnostics(line.state)["bits"] < 0.6 * before
    line.run(fast, 60)
    assert line.fitted.diagnostics(line.state)["bits"] == pytest.approx(before, rel=0.05)


def test_the_budget_stays_within_limits():
    line = Line(replace(LINE, limits=(3.0, 5.0)), MANY)
    line.run(1e12, 60)
    assert line.fitted.diagnostics(line.state)["budget_bits"] == pytest.approx(5)
    line.run(1e3, 20)
    assert line.fitted.diagnostics(line.state)["budget_bits"] == pytest.approx(3)


def test_waiting_for_a_slow_worker_is_not_waiting_for_the_line():
    line = Line(LINE, MANY)
    line.run(1e12, 5)
    before = line.state.budget
    line.run(1e12, 10, late=(0.0, 0.5))
    assert line.state.budget >= before


def test_waiting_in_a_round_that_was_abandoned_does_not_count():
    found = []
    for abandoned in (False, True):
        meter, waited = LineMeter(), 0.0
        meter.begin_round(waited, now=0.0)
        if abandoned:
            waited += 5.0
            meter.add(SentMessage(0.5, 5.5, 100))
            meter.discard(waited)
            meter.begin_round(waited)
        meter.add(SentMessage(6.0, 8.0, 100))
        meter.commit()
        meter.begin_round(waited + 1.0)
        found.append(meter.take(0.1, now=8.0))
    assert found[0] == found[1]


def test_waiting_between_two_messages_does_not_make_the_second_late():
    """Two messages, each sent when the one before is there: without waiting both would be sent at 1.0."""
    meter = LineMeter()
    meter.begin_round(waited=0.0, now=0.0)
    meter.add(SentMessage(1.0, 2.0, 100, waited=0.0))
    meter.add(SentMessage(2.0, 3.0, 100, waited=1.0))
    meter.commit()
    meter.begin_round(waited=2.0)
    assert tuple(meter.take(wait_share=0.1, now=3.0)) == pytest.approx((100.0, 0.3 / 200, 2.0 / 0.3))


def test_what_even_a_short_message_takes_costs_no_fidelity():
    """Half a step's time for a round trip, which nothing hides."""
    line = Line(LINE, MANY)
    carried = sum(MANY) * 6 / 8  # 6 bits an element beside a step
    shares = line.run(carried / 0.18, 40, latency=0.15)
    assert 5.5 < line.fitted.diagnostics(line.state)["bits"] < 8.1
    assert max(shares[-5:]) < 0.15 / 0.45 + 0.1


@pytest.mark.parametrize("bits", [2.0, 3.0, 6.0])
def test_it_finds_what_the_line_carries_though_messages_are_there_before_they_are_looked_at(bits):
    """Decoding takes four times as long as a step may wait, and so messages seem slow."""
    line = Line(replace(LINE, limits=(0.5, 8.0)), MANY)
    line.state.budget = sum(MANY) * bits / 8
    shares = line.run(1e12, 12, decoding=0.015)
    assert shares == [0.0] * 12
    assert line.fitted.diagnostics(line.state)["budget_bits"] == pytest.approx(8)


@pytest.mark.parametrize(("factor", "changes"), [(1.01, False), (1.5, True), (0.5, True)])
def test_a_budget_that_hardly_changes_leaves_the_choice(factor, changes):
    state = Line(LINE, MANY).state
    state.budget, state.rate = float(LINE.nbytes_at(state)), 1e6
    before = state.budget, dict(state.choice)
    line = LineMeasurement(1e6, factor / 1e6, waited=1.0)
    LINE.update(state, LINE.learn(state, [LINE.statistics(state, 1, line)]), 1)
    assert ((state.budget, state.choice) != before) == changes


def test_workers_agree_on_what_the_line_carries():
    fitted = tw.Fitted("line", candidates=ANY, measure_steps=(1,), follow_every=1, limits=(1.0, 8.0))
    averager = tw.Mean(fitted, EF)
    found = tw.LocalWorld(3).run(lambda comm: rounds(averager, comm, 6))
    state, results, _ = found[0]
    assert state.codec.last_update == 5
    for other, theirs, _ in found[1:]:
        assert (other.codec.choice, other.codec.budget) == (state.codec.choice, state.codec.budget)
        assert all(map(torch.equal, results, theirs))
    assert 1 <= averager.diagnostics(state)["budget_bits"] <= 8


# ---- strategies ----


@pytest.mark.parametrize(
    "strategy",
    [
        "Gradients(Mean({}, ErrorFeedback()))",
        "Local(Mean({}, ErrorFeedback(), exchange='scatter_reduce'), every=2)",
        "Local(Mean({}, ErrorFeedback()), every=2, fragments=2, delay=1, alpha=0.5)",
    ],
)
def test_strategies_train_with_it_and_show_its_choice(strategy):
    text = strategy.format("Fitted(QSGD(bits=2), measure_steps=(1, 3))")

    def worker(comm):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.ReLU(), torch.nn.Linear(60, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        handle = tw.attach(model, optimizer, text, comm=comm)
        generator = torch.Generator().manual_seed(comm.rank)
        for _ in range(12):
            x = torch.randn(16, 20, generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
        if "Local" in text:
            handle.synchronize()
        found = handle.diagnostics()
        handle.detach()
        return found, torch.cat([p.detach().flatten() for p in model.parameters()])

    results = tw.LocalWorld(3).run(worker)
    for found, parameters in results:
        assert found == results[0][0] and torch.equal(parameters, results[0][1])
    bits = {name: value for name, value in results[0][0].items() if name.endswith("/bits") or name == "bits"}
    assert bits.keys() == ({"0/bits", "1/bits"} if "fragments" in text else {"bits"})
    assert all(0 < value < 3 for value in bits.values())
    assert any(name.endswith("error") for name in results[0][0])


@pytest.mark.parametrize(
    "strategy",
    [
        "Gradients(ByName({{'0*': Mean({}, ErrorFeedback()), '*': Mean()}}))",
        "Local(Mean({}, ErrorFeedback()), every=2, fragments=2, delay=1, alpha=0.5)",
    ],
    ids=["by name", "fragments"],
)
@pytest.mark.filterwarnings("ignore:Local. what workers changed since their last rounds belongs to no worker")
def test_strategies_go_on_with_their_choice_also_on_other_workers(strategy):
    text = strategy.format("Fitted(QSGD(bits=2), measure_steps=(1, 3, 5))")
    torch.manual_seed(0)  # not in the threads, which share one generator
    initial = torch.nn.Sequential(torch.nn.Linear(20, 60), torch.nn.ReLU(), torch.nn.Linear(60, 4))

    def worker(comm, saved, first, last):
        model = copy.deepcopy(initial)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        handle = tw.attach(model, optimizer, text, comm=comm)
        if saved:
            model.load_state_dict(saved[comm.rank][0])
            handle.load_state_dict({key: value for _, states, _ in saved for key, value in states.items()})
        chosen = handle.diagnostics()
        for step in range(first, last):
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + comm.rank))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
        state = copy.deepcopy(handle.state_dict())
        found = copy.deepcopy(model.state_dict()), state, handle.diagnostics()
        handle.detach()
        return found, chosen

    def run(size, *args):
        return tw.LocalWorld(size).run(lambda comm: worker(comm, *args))

    whole = [found for found, _ in run(3, None, 0, 16)]
    half = [found for found, _ in run(3, None, 0, 8)]
    resumed = run(3, half, 8, 16)
    for (model, _, facts), (found, chosen), before in zip(whole, resumed, half, strict=True):
        assert chosen == before[2]
        assert found[2] == facts
        assert all(map(torch.equal, found[0].values(), model.values()))
    fewer = run(2, half, 8, 16)
    assert all(chosen == half[0][2] and found[2] == fewer[0][0][2] for found, chosen in fewer)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Mean(Fitted(3.0))", "biased candidates, and nothing would keep what they lose; add a memory"),
        ("Mean(Fitted(3.0, 'quantizers'), granularity='bucket')", "use granularity='layer', got 'bucket'"),
        ("Mean(Fitted(3.0), ErrorFeedback(), exchange='all_reduce')", "cannot be added on the wire"),
        ("Mean(Fitted(3.0), ErrorFeedback(), exchange='sparse_reduce')", "use TopK"),
        ("Mean(Fitted(3.0, 'quantizers'), rule=Krum(faulty=1))", "use a codec such as QSGD"),
        (
            "chain(TopK(0.1), Fitted(3.0, 'quantizers'))",
            "gives each layer a codec of its own, which is not possible here",
        ),
        ("chain(Fitted(3.0, 'sparse'), Huffman())", "has no symbols of up to 8 bits to code"),
        ("Choco(Ring(), Fitted(3.0))", "gossip asks neighbours only"),
        ("Shards(gradients=Fitted(3.0, 'quantizers'))", "learns from gradients, which is not possible here"),
        ("Fitted()", "give either budget or error_of"),
        ("Fitted(3.0, error_of=QSGD(bits=4))", "give either budget or error_of"),
        ("Fitted('lines')", "or 'line', got 'lines'"),
        ("Fitted(3.0, 'dense')", "candidates must be one of 'low_rank', 'sparse', 'quantizers', or codecs"),
        ("Fitted(3.0, (RandomK(0.1, shared=True),))", "with one key on all workers"),
        ("Fitted(3.0, (Threshold(1.0),))", "vary in size"),
        ("Fitted(Fitted(3.0))", "learns from gradients"),
        ("Fitted(0.01)", "give a larger budget or a smaller candidate"),
        ("Fitted('line', limits=(8.0, 2.0))", "limits must be the fewest and the most bits"),
        ("Fitted(3.0, measure_every=0)", "measure_every must be an integer, 1 or more, got 0"),
        (
            "Fitted(3.0, measure_steps=(0, 5))",
            "each of measure_steps must be an integer, 1 or more, got 0; round 0 has no",
        ),
        ("Fitted(3.0, weighting='norm')", "weighting must be one of relative, squared, got 'norm'"),
        ("Fitted(3.0, wait_share=1.5)", "wait_share must be above 0 and below 1, got 1.5"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_built(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as caught:
        tw.parse(text)
    assert "\n" not in str(caught.value)


def test_a_budget_that_nothing_fits_is_told_in_whole_bytes():
    """It said that 13 bytes, 12.75 of them, are less than 13."""
    with pytest.raises(ValueError, match=r"3 bits an element is 12 bytes, and the smallest candidate, .*, takes 13"):
        tw.Fitted(3.0).init_state({"w": torch.Size([2, 17])})


@pytest.mark.parametrize("averager", [
    tw.Mean(tw.Fitted(4, candidates=QUANTIZERS, measure_steps=(1,))),
    tw.Mean(tw.Fitted(error_of=tw.QSGD(bits=4, bucket_size=64), candidates=QUANTIZERS, measure_steps=(1,))),
], ids=repr)  # fmt: skip
def test_a_layer_without_a_gradient_counts_nothing(averager):
    """It gets the fewest bits. Before, its weight was infinite, and the choice of candidates never ended."""
    layers = [("unused", torch.zeros(64, 64)), *gradients(0, 0)]

    def worker(comm):
        state = averager.init(layers, comm)
        for _ in range(2):
            averager.step(state, [(name, x.clone()) for name, x in layers], comm).wait()
            averager.commit(state)
        return averager.diagnostics(state)

    (found,) = tw.LocalWorld(1).run(worker)
    assert all(math.isfinite(value) for value in found.values())
    assert found["bits/unused"] == min(value for name, value in found.items() if name.startswith("bits/"))
    assert found["bits/head"] > found["bits/unused"]


@pytest.mark.parametrize("budget", [4, "line", tw.QSGD(bits=4)])
def test_layers_without_elements_take_part_in_a_round(budget):
    def worker(comm):
        averager = tw.Mean(tw.Fitted(budget), tw.ErrorFeedback())
        tensors = [("a", torch.zeros(0, 4)), ("b", torch.zeros(3, 0))]
        state = averager.init(tensors, comm)
        for _ in range(3):
            averager.step(state, tensors, comm).wait()
            assert averager.commit(state)
        return averager.diagnostics(state)

    assert tw.LocalWorld(2).run(worker) == [{"bits/a": 0.0, "bits/b": 0.0}] * 2
