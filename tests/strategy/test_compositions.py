"""Strategies of parts that are drawn at random: each is refused in one line, or keeps what every strategy promises."""

from __future__ import annotations

import copy

import torch
from helpers.averagers import GOSSIP
from helpers.codecs import CODECS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thinwire as tw
from thinwire.average import ClipByNorm, ClipValueByGlobalNorm, Dion, Krum, Median
from thinwire.memory import DIANA, EF21, LocalMomentum, LoCo, SignDescent
from thinwire.schedule import GeometricWarmup

STEPS, SAVED = 5, 2

CHANGING = [tw.Fitted(tw.QSGD(bits=4), measure_steps=(1, 3)), tw.TopK(GeometricWarmup(0.1, num=2, unit="step"))]
MOMENTUM = [tw.MomentumCorrection(), tw.MomentumCorrection(masking=False), LocalMomentum()]
MEAN = {
    "codec": st.sampled_from([*CODECS, *CHANGING]),
    "memory": st.sampled_from(
        [tw.ErrorFeedback(), LoCo(reset_every=2), EF21(), DIANA(), SignDescent(tw.ErrorFeedback()), *MOMENTUM]
    ),
    "granularity": st.sampled_from(["layer", "model", "bucket"]),
    "exchange": st.sampled_from(["all_gather", "all_reduce", "scatter_reduce", "sparse_reduce", "hierarchical"]),
    "min_ndim": st.integers(0, 2),
    "workers_per_node": st.just(2),
    "clip": st.sampled_from([ClipByNorm(0.5), ClipValueByGlobalNorm()]),
    "divide_by": st.just("senders"),
    "rule": st.sampled_from([Median(), Krum()]),
}
LOCAL = {
    "every": st.integers(1, 3),
    "outer": st.just(tw.OuterSGD()),
    "fragments": st.integers(2, 3),
    "delay": st.just(1),
    "alpha": st.just(0.5),
    "pull": st.just(1.0),
}
GOSSIP_OPTIONS = {"overlap": st.booleans(), "staleness": st.integers(0, 1), "order": st.just("adapt_then_combine")}


class Refused(Exception):
    """The parts do not go together."""


def built(kind, *parts, **options):
    try:
        return kind(*parts, **options)
    except ValueError as error:
        assert "\n" not in str(error)
        raise Refused from error


def some(options):
    return st.fixed_dictionaries({}, optional=options)


@st.composite
def strategies(draw):
    means = st.one_of(
        some(MEAN).map(lambda options: built(tw.Mean, **options)),
        st.sampled_from([tw.PowerSGD(rank=1), tw.PowerSGD(rank=2, memory=None), Dion(rank=2)]),
    )
    means = st.one_of(
        means, st.tuples(means, means).map(lambda two: built(tw.ByName, {"*weight": two[0], "*": two[1]}))
    )
    match draw(st.sampled_from(["gradients", "local", "gossip"])):
        case "gradients":
            return built(tw.Gradients, draw(means), bucket_bytes=draw(st.sampled_from([None, 1, 300])))
        case "local":
            averager = draw(st.one_of(means, st.sampled_from(GOSSIP)))
            return built(tw.Local, averager, **{"every": 2} | draw(some(LOCAL)))
        case "gossip":
            return built(tw.Gossip, draw(st.sampled_from([tw.Mean(), *GOSSIP])), **draw(some(GOSSIP_OPTIONS)))


class Model(nn.Sequential):
    """Layers of several shapes, a scalar, and a layer that is not trained."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(3, 4), nn.Linear(4, 1, bias=False), nn.Linear(4, 7), nn.Conv1d(1, 2, 3), nn.Linear(10, 5)
        )
        self.scale = nn.Parameter(torch.ones(()))
        self[1].requires_grad_(False)

    def forward(self, x):
        first, still, second, convolution, last = self
        inside = torch.tanh(first(x)) * self.scale
        return last(convolution(second(inside + still(inside))[:, None]).flatten(1))


def loss_of(model, step, rank):
    data = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(data).square().sum()


def trained(comm, strategy, momentum, saved=None, begin=Model, loss=loss_of):
    """The model after all steps; what was saved on the way; and the bytes that were sent and received."""
    model = begin()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=momentum)
    with tw.attach(model, optimizer, strategy, comm=comm) as handle:
        parts = model, optimizer, handle
        if saved is not None:
            for part, state in zip(parts, copy.deepcopy(saved[comm.rank]), strict=True):
                part.load_state_dict(state)
        for step in range(0 if saved is None else SAVED, STEPS):
            if step == SAVED:
                on_the_way = copy.deepcopy([part.state_dict() for part in parts])
            optimizer.zero_grad()
            loss(model, step, comm.rank).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()], on_the_way, (comm.ledger.bytes_sent, comm.ledger.bytes_received)


@settings(max_examples=100)
@given(parts=st.data(), workers=st.sampled_from([1, 2, 4]), momentum=st.sampled_from([0.0, 0.9]))
def test_random_compositions_keep_replicas_equal_and_go_on_from_saved_state_and_count_all_bytes(
    parts, workers, momentum
):
    try:
        strategy = parts.draw(strategies())
    except Refused:
        return
    assert tw.parse(repr(strategy)) == strategy
    try:
        whole = tw.LocalWorld(workers).run(trained, strategy, momentum)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    models = [model for model, _, _ in whole]
    assert all(p.isfinite().all() for model in models for p in model)
    if isinstance(strategy, tw.Gradients):
        assert all(torch.equal(p, q) for model in models[1:] for p, q in zip(models[0], model, strict=True))
    sent, received = zip(*(traffic for _, _, traffic in whole), strict=True)
    assert sum(sent) == sum(received)
    again = tw.LocalWorld(workers).run(trained, strategy, momentum, [saved for _, saved, _ in whole])
    assert all(
        torch.equal(p, q)
        for model, (other, _, _) in zip(models, again, strict=True)
        for p, q in zip(model, other, strict=True)
    )
