"""Strategies as data: notation, equality, one door, options that are checked once and compared between workers."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from helpers.gradients import make_model
from helpers.spawn import run_threads, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.comm import ProcessGroupCommunicator
from thinwire.strategy import Averaging, Rhythm

SPARSE = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback())
STRATEGIES = {
    "Gradients(Mean(TopK(ratio=0.1), ErrorFeedback()))": tw.Gradients(SPARSE),
    "Gradients(Mean(), on_nonfinite='raise', bucket_bytes=1000)": tw.Gradients(
        tw.Mean(), bucket_bytes=1000, on_nonfinite="raise"
    ),
    "Gossip(PushSum(), overlap=True, staleness=1)": tw.Gossip(tw.PushSum(tw.Exponential()), overlap=True, staleness=1),
    "Gossip(Mix(), order='adapt_then_combine')": tw.Gossip(tw.Mix(), order="adapt_then_combine"),
    "Asynchronous()": tw.Asynchronous(),
    "Asynchronous(max_nonfinite=3)": tw.Asynchronous(tw.Pairwise(), max_nonfinite=3),
    "Local(Mean(QSGD(bits=4)), every=4, outer=OuterSGD(momentum=0.5))": tw.Local(
        tw.Mean(tw.QSGD(bits=4)), every=4, outer=tw.OuterSGD(0.7, 0.5)
    ),
    "Local(Mean(), every=9, fragments=(('a.*', 'b.*'), '*'), delay=2, alpha=0.5, state_every={'exp_avg': 3})": tw.Local(
        tw.Mean(), 9, fragments=[["a.*", "b.*"], "*"], delay=2, alpha=0.5, state_every={"exp_avg": 3}
    ),
    "Local(Mean(), every=2, weights=InverseNorm(outlier=2.0))": tw.Local(
        tw.Mean(), 2, weights=tw.strategy.InverseNorm(2.0)
    ),
    "Shards()": tw.Shards(),
    "Shards(gradients=None, parameters=Cast())": tw.Shards(None, tw.Cast()),
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("text", STRATEGIES)
def test_a_strategy_is_data(text):
    strategy = STRATEGIES[text]
    assert repr(strategy) == text and tw.parse(text) == strategy and hash(tw.parse(text)) == hash(strategy)
    assert pickle.loads(pickle.dumps(strategy)) == copy.deepcopy(strategy) == strategy
    with pytest.raises(FrozenInstanceError):
        setattr(strategy, fields(strategy)[0].name, None)


METHODS = {
    "diloco(every=5)": tw.Local(tw.Mean(), 5, tw.OuterSGD()),
    "streaming_diloco(format=None)": tw.Local(tw.Mean(), 100, tw.OuterSGD(), fragments=4, delay=5, alpha=0.5),
    "no_loco(lr=0.5)": tw.Local(tw.Mix(tw.topology.RandomPairs()), 50, tw.OuterSGD(0.5, 0.5, nesterov=False), pull=1.4),
    "dion(8)": tw.Gradients(tw.average.Dion(8)),
    "demo()": tw.strategy.demo(),
}


@pytest.mark.parametrize("text", METHODS)
def test_methods_are_strategies_in_the_notation(text):
    strategy = tw.parse(text)
    assert strategy == METHODS[text] and tw.parse(repr(strategy)) == strategy


MISTAKES = {
    "Gradients(Mix())": r"^Gradients: Mix\(\) moves tensors towards .* such as Mean or PowerSGD",
    "Gradients(Pairwise())": "gradients need an averager",
    "Gradients(TernGrad())": r"^Gradients: TernGrad\(\) is a codec; write Mean\(TernGrad\(\), ErrorFeedback\(\)\)",
    "Gradients(Mean(), bucket_bytes=0)": "Gradients: bucket_bytes must be an integer, 1 or more, got 0",
    "Gradients(Mean(), on_nonfinite='stop')": "Gradients: on_nonfinite must be one of skip, raise, apply, got 'stop'",
    "Gossip(Pairwise())": r"must be one that has rounds, .*Pairwise\(\) goes into Asynchronous\(\)",
    "Gossip(TopK(0.1))": r"is a codec; write Choco\(Ring\(\), TopK\(ratio=0.1\)\)",
    "Gossip(PowerSGD())": "suits gradients, see Gradients",
    "Gossip(Mean(TopK(0.01), ErrorFeedback()))": "suits gradients, see Gradients",
    "Gossip(Mean(), overlap=True)": "overlap needs an averager that adds to them",
    "Gossip(Mix(), order='both')": "Gossip: order must be one of",
    "Gossip(Mix(), staleness=1)": "staleness=1 needs overlap=True",
    "Gossip(Mix(), overlap=True, staleness=-1)": "Gossip: staleness must be an integer, 0 or more, got -1",
    "Gossip(Mix(), overlap=True, order='adapt_then_combine')": "staleness must be 1 or more",
    "Gossip(Mix(), max_nonfinite=0)": "Gossip: max_nonfinite must be an integer, 1 or more, got 0",
    "Asynchronous(Mix())": r"Asynchronous: averager must be Pairwise\(...\), got Mix\(\)",
    "Local(Mean(), every=0)": "Local: every must be an integer, 1 or more, got 0",
    "Local(Mean(), every=True)": "Local: every must be of type int, got True",
    "Local(Mean(), 4, 0.7)": r"Local: outer must be an outer optimizer such as OuterSGD\(lr=0.7\), got 0.7",
    "Local(Mean(), 4, delay=4)": "Local: delay must be below every=4",
    "Local(Mean(), 4, alpha=1.0)": "Local: alpha must be at least 0 and below 1, got 1.0",
    "Local(Mean(), 4, pull=0.1)": "Local: pull mixes changes and anchors with those of neighbours",
    "Local(Mix(), 4, weights=InverseNorm())": "Local: weights are for averagers with one mean",
    "Local(Mean(), 4, fragments=0)": "Local: fragments must be an integer, 1 or more, got 0",
    "Local(Mean(), 4, state_every={'exp_avg': 0})": r"Local: state_every\['exp_avg'\] must be an integer",
    "Shards(TopK(0.1))": "Shards: gradients=TopK.* is biased",
    "Shards(parameters=8)": "Shards: parameters must be a codec",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_options_are_checked_where_they_are_written(text):
    with pytest.raises(ValueError, match=MISTAKES[text]):
        tw.parse(text)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("Mean(QSGD(bits=4))", r"Gradients\(Mean\(QSGD\(bits=4\)\)\)"),
        (tw.Choco(), r"Gossip\(Choco\(\)\)"),
        ("Pairwise()", r"Asynchronous\(Pairwise\(\)\)"),
        ("TopK(0.01)", r"Gradients\(Mean\(TopK\(0.01\), ErrorFeedback\(\)\)\)"),
        (tw.QSGD(bits=4), r"Gradients\(Mean\(QSGD\(bits=4\)\)\)"),
        (tw.Ring(), r"Gossip\(Mix\(Ring\(\)\)\)"),
        (" dgc(0.01) ", r"Gradients\(dgc\(0.01\)\)"),
    ],
)
def test_the_door_proposes_a_strategy_that_can_be_pasted(value, meant):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f'^strategy: .* is an? [a-z]+; write "{meant}"$') as error:
        tw.attach(model, sgd(model), value)
    assert isinstance(tw.parse(str(error.value).split('"')[1]), tw.strategy.Strategy)


def trained(comm, attach, steps=5):
    model = nn.Linear(6, 4)
    with torch.no_grad():
        for p in model.parameters():  # threads share the global generator
            p.normal_(generator=torch.Generator().manual_seed(p.ndim))
    optimizer = sgd(model)
    with attach(model, optimizer, comm):
        for step in range(steps):
            optimizer.zero_grad()
            inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            model(inputs).square().sum().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


CALLS = {
    "Gradients(Mean(TopK(0.2), ErrorFeedback()), bucket_bytes=50)": lambda m, o, c: tw.compress_gradients(
        m, tw.Mean(tw.TopK(0.2), tw.ErrorFeedback()), comm=c, bucket_bytes=50, seed=3
    ),
    "Gossip(PushSum(Exponential()), overlap=True)": lambda m, o, c: tw.gossip_parameters(
        m, o, tw.PushSum(), comm=c, overlap=True, seed=3
    ),
    "Local(Mean(QSGD(bits=4)), 2, OuterSGD(), delay=1)": lambda m, o, c: tw.local_updates(
        m, o, tw.Mean(tw.QSGD(bits=4)), 2, tw.OuterSGD(), comm=c, delay=1, seed=3
    ),
}


@pytest.mark.parametrize("text", CALLS)
def test_a_call_of_its_own_and_the_door_give_the_same_bits(text):
    through_door = run_threads(2, trained, lambda m, o, c: tw.attach(m, o, text, comm=c, seed=3))
    for ours, theirs in zip(through_door, run_threads(2, trained, CALLS[text]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("Gradients(Mean())", "Local(Mean(), every=2)", r"\n  strategy: 'Gradients' on rank 0; 'Local' on rank 1"),
        ("Local(Mean(), 2)", "Local(Mean(), 2, OuterSGD())", "outer optimizer: .* on rank 0; .* on rank 1"),
    ],
)
def test_workers_compare_their_strategies_and_the_outer_optimizers_that_these_make(one, other, message):
    def worker(comm):
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=message):
            tw.attach(model, sgd(model), (one, other)[comm.rank], comm=comm)

    run_threads(2, worker)


def ddp_worker(comm):
    ddp = DistributedDataParallel(make_model())
    with pytest.raises(ValueError, match="bucket_bytes=17 is for plain modules, .* give it bucket_cap_mb"):
        tw.compress_gradients(ddp, SPARSE, comm=comm, bucket_bytes=17)
    with pytest.raises(ValueError, match="on_nonfinite: 'skip' on rank 0; 'raise' on rank 1"):
        tw.attach(ddp, sgd(ddp), tw.Gradients(SPARSE, on_nonfinite=("skip", "raise")[comm.rank]), comm=comm)
    groups = [torch.distributed.new_group([rank]) for rank in range(2)]
    with ProcessGroupCommunicator(groups[comm.rank]) as alone:
        for text in ("Gradients(Mean())", "Local(Mean(), every=2)"):
            message = rf"connects ranks \[0, 1\], and comm ranks \[{comm.rank}\]; .* give a comm of all its ranks"
            with pytest.raises(ValueError, match=message):
                tw.attach(ddp, sgd(ddp), text, comm=alone)


def test_a_model_in_ddp_has_buckets_of_its_own_and_compares_options():
    spawn(2, ddp_worker)


def own_model_worker(comm, text, in_ddp):
    """Tensors after steps whose workers take unequal numbers of passes, and after detaching; then the gradient of a pass."""
    torch.manual_seed(comm.rank)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = DistributedDataParallel(plain, find_unused_parameters=True) if in_ddp else plain
    plain.register_buffer("scales", torch.ones(1).expand(4))  # later, because DDP cannot write to it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(comm.rank)
    with tw.attach(model, optimizer, text, seed=3):
        for step in range(6):
            optimizer.zero_grad()
            for _ in range(1 + 2 * ((comm.rank + step) % 2)):  # a collective of DDP would find no partner
                model(torch.randn(5, 3, generator=data)).square().mean().backward()
            optimizer.step()
        trained = [t.clone() for t in plain.state_dict().values()]
    ended = [t.clone() for t in plain.state_dict().values()]
    model.zero_grad()
    model(torch.full((5, 3), 1.0 + comm.rank)).sum().backward()
    return trained, ended, [p.grad for p in plain.parameters()]


@pytest.mark.parametrize(
    "text",
    ["Local(Mean(QSGD(bits=4)), every=4, outer=OuterSGD(0.7))", "Gossip(Mix())", "Gossip(PushSum(), overlap=True)"],
)
def test_ddp_sends_nothing_under_own_models_and_ends_with_their_mean(text):
    (first, second), without = (spawn(2, own_model_worker, text, in_ddp) for in_ddp in (True, False))
    for (ours, *_), (theirs, *_) in zip((first, second), without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    # DDP averages again, and takes models to be equal. A plain module stays this worker's own.
    for mine, yours in zip(first[1:], second[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))
    for mean, *own in zip(first[1], without[0][1], without[1][1], strict=True):
        torch.testing.assert_close(mean, (own[0] + own[1]) / 2 if mean.is_floating_point() else own[0])
    assert not torch.equal(without[0][2][0], without[1][2][0])


def test_the_door_checks_momentum_before_it_attaches():
    def worker(comm):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(ValueError, match="SGD has momentum 0.9 of its own"):
            tw.attach(model, optimizer, "Gradients(dgc(0.1))", comm=comm)
        tw.attach(model, optimizer, "Gradients(Mean())", comm=comm).detach()

    run_threads(1, worker)


def test_what_a_strategy_does_not_need_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Gossip: averaging follows the steps of an optimizer; give the model's"):
        tw.attach(model, None, "Gossip(Mix())")
    with pytest.raises(ValueError, match="Asynchronous: replicas are of sharded models"):
        tw.attach(model, sgd(model), tw.Asynchronous(), replicas=object())
    with pytest.raises(ValueError, match="Shards: it communicates over the model's mesh"):
        tw.attach(model, None, tw.Shards(), replicas=object())


def test_rhythms():
    expected = {
        "Gradients(Mean())": Rhythm(in_backward=True),
        "Gossip(Mix())": Rhythm(),
        "Gossip(Mix(), overlap=True)": Rhythm(every=1, delay=1),
        "Gossip(Mix(), overlap=True, staleness=2)": Rhythm(every=3, delay=3),
        "Gossip(Mix(), overlap=True, staleness=2, order='adapt_then_combine')": Rhythm(every=2, delay=2),
        "streaming_diloco(40)": Rhythm(every=40, fragments=4, delay=5),
        "Local(Mean(), 4, fragments=['a', '*'])": Rhythm(every=4, fragments=2),
        "no_loco(30)": Rhythm(every=30, copies=2),
    }
    assert {text: tw.parse(text).rhythm for text in expected} == expected
    assert all(isinstance(tw.parse(text), Averaging) for text in expected)
