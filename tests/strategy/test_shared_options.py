"""Every option that workers must share is compared when they attach, and a new one cannot be forgotten."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import torch
from helpers.sharded import sharded
from helpers.spawn import device_mesh, spawn
from torch import nn

import thinwire as tw

MIX = tw.Mix(tw.Ring())


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def tensors(model):
    return [(name, p.detach()) for name, p in model.named_parameters()]


CALLS = {
    tw.compress_gradients: lambda m, averager=tw.Mean(), **options: tw.compress_gradients(m, averager, **options),
    tw.gossip_parameters: lambda m, averager=MIX, **options: tw.gossip_parameters(
        m, optimizer_of(m), averager, **options
    ),
    tw.gossip_asynchronously: lambda m, averager=None, **options: tw.gossip_asynchronously(
        m, optimizer_of(m), averager, **options
    ),
    tw.local_updates: lambda m, averager=MIX, every=4, **options: tw.local_updates(
        m, optimizer_of(m), averager, every, **options
    ),
    tw.consensus: lambda m, averager=MIX, rounds=2, **options: tw.consensus(tensors(m), averager, rounds, **options),
}
COMMON = {
    "averager": ({"averager": tw.Mix(tw.Ring())}, {"averager": tw.Mix(tw.Complete())}),
    "seed": ({"seed": 0}, {"seed": 1}),
    "on_nonfinite": ({"on_nonfinite": "skip"}, {"on_nonfinite": "apply"}),
    "max_nonfinite": ({"max_nonfinite": 100}, {"max_nonfinite": 1}),
}
DIFFERING = {
    tw.compress_gradients: {
        "averager": ({"averager": tw.Mean()}, {"averager": tw.PowerSGD()}),
        "bucket_bytes": ({"bucket_bytes": 8}, {"bucket_bytes": 100}),
    },
    tw.gossip_parameters: {
        "overlap": ({"overlap": False}, {"overlap": True}),
        "staleness": ({"overlap": True, "staleness": 1}, {"overlap": True, "staleness": 2}),
        "order": ({"order": "combine_then_adapt"}, {"order": "adapt_then_combine"}),
    },
    tw.gossip_asynchronously: {
        "averager": ({"averager": tw.Pairwise()}, {"averager": tw.Pairwise(tw.topology.BipartiteLinear())}),
    },
    tw.local_updates: {
        "every": ({"every": 4}, {"every": 5}),
        "fragments": ({"fragments": 1}, {"fragments": 2}),
        "delay": ({"delay": 0}, {"delay": 1}),
        "alpha": ({"alpha": 0.0}, {"alpha": 0.5}),
        "weights": ({"averager": tw.Mean()}, {"averager": tw.Mean(), "weights": tw.strategy.InverseNorm()}),
        "quorum": ({"averager": tw.Mean()}, {"averager": tw.Mean(), "quorum": tw.strategy.Quorum()}),
        "pull": ({"pull": None}, {"pull": 0.5}),
        "state_every": ({"state_every": {}}, {"state_every": {"momentum_buffer": 3}}),
    },
    tw.consensus: {
        "rounds": ({"rounds": 2}, {"rounds": 3}),
        "every": ({"every": 1}, {"every": 2}),
    },
    tw.compress_shards: {
        "gradients": ({"gradients": tw.QSGD(bits=4)}, {"gradients": None}),
        "parameters": ({"parameters": tw.QSGD(bits=8)}, {"parameters": tw.QSGD(bits=4)}),
    },
}
STRATEGY_OF = {
    tw.compress_gradients: tw.Gradients,
    tw.gossip_parameters: tw.Gossip,
    tw.gossip_asynchronously: tw.Asynchronous,
    tw.local_updates: tw.Local,
    tw.compress_shards: tw.Shards,
}
OPTIONS = {call: {field.name for field in fields(strategy)} for call, strategy in STRATEGY_OF.items()}
for call in OPTIONS.keys() - {tw.gossip_asynchronously}:  # which draws no random numbers
    OPTIONS[call].add("seed")
OPTIONS[tw.local_updates].remove("outer")  # the optimizers that it makes are compared
OPTIONS[tw.consensus] = {*inspect.signature(tw.consensus).parameters} - {"tensors", "comm", "on_record"}
PAIRS = {call: {name: (DIFFERING[call] | COMMON | DIFFERING[call])[name] for name in sorted(names)}
         for call, names in OPTIONS.items()}  # fmt: skip  # a KeyError here is an option that is in neither list


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_workers_with_another_option_fail_together(call):
    def worker(comm, name, options):
        with pytest.raises(ValueError, match=f"workers disagree(.|\n)*{re.escape(name)}: .*on rank 0; .*on rank 1"):
            CALLS[call](nn.Linear(3, 2), comm=comm, **options[comm.rank])

    for name, options in PAIRS[call].items():
        tw.LocalWorld(2, timeout_seconds=60).run(worker, name, options)


def shards(comm, name):
    model = sharded(device_mesh(2))
    tw.compress_shards(model, **PAIRS[tw.compress_shards][name][comm.rank])
    with pytest.raises(ValueError, match=f"workers disagree(.|\n)*{name}: .*on rank 0; .*on rank 1"):
        model(torch.ones(1, 16)).sum().backward()


@pytest.mark.parametrize("name", ["on_nonfinite", "gradients"])
def test_shards_with_another_option_fail_together(name):
    spawn(2, shards, name)


def test_defaults_equal_the_same_values_given():
    def worker(comm):
        options = {"on_nonfinite": "skip", "seed": 0} if comm.rank else {}
        with tw.compress_gradients(nn.Linear(3, 2), tw.Mean(), comm=comm, **options):
            return True

    assert tw.LocalWorld(2).run(worker) == [True, True]
