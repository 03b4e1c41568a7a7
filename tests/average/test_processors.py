"""What workers have in common gets the same bits on processors with and without AVX."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from helpers.codecs import CODECS
from torch import nn
from unlike import WITHOUT_AVX

import thinwire as tw
from thinwire.comm import LocalWorld
from thinwire.strategy.local.staleness import DelayedNesterov

WORKERS = 3  # a weight of 1/2 would be exact
SHAPES = ((40, 50), (37,), (60, 70))
KEYS = [tw.codec.Key(stream=i) for i in range(len(SHAPES))]
OWN = ("SVD", "LowRank")  # codecs whose messages depend on the sender's processor
DECODED = [
    tw.codec.SVD(16),
    *(tw.codec.LowRank(rank, values) for rank, values in ((1, tw.Cast()), (16, tw.QSGD(bits=4)))),
]
AVERAGERS = [
    *(tw.Mean(codec, min_ndim=0) for codec in CODECS if not any(name in repr(codec) for name in OWN)),
    tw.PowerSGD(rank=1),
    tw.PowerSGD(rank=7),
    tw.average.Dion(rank=8),
    tw.PowerGossip(rank=2),
    tw.Mean(exchange="all_gather"),
    tw.Mean(tw.Cast(), exchange="scatter_reduce"),
    tw.Mean(tw.TopK(0.1), exchange="sparse_reduce"),
    tw.Mean(tw.QSGD(bits=4), exchange="hierarchical", workers_per_node=1),
    *(tw.Mean(tw.codec.NaturalCompression(), m) for m in (tw.ErrorFeedback(), tw.memory.DIANA(0.3), tw.memory.EF21())),
    tw.Mean(rule=tw.average.CenteredClipping(), exchange="all_gather"),
    tw.Mean(rule=tw.average.GeometricMedian(), exchange="all_gather"),
]
OUTER = [
    tw.OuterSGD(),
    tw.OuterSGD(nesterov=False),
    tw.OuterSGD(momentum=0.0),
    DelayedNesterov(period=3).outer(tw.OuterSGD(), WORKERS),
]


def tensors(worker: int, step: int) -> list[torch.Tensor]:
    """Values of many bits, which do not depend on the processor, as normal ones from `torch.randn` do."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return [torch.randint(-9999, 9999, shape, generator=generator) / 7777 for shape in SHAPES]


def rounds(comm: tw.comm.Communicator, averager: tw.average.Averager) -> list[torch.Tensor]:
    """What three rounds leave in the tensors."""
    names = [f"t{i}" for i in range(len(SHAPES))]
    state, results = averager.init(list(zip(names, tensors(comm.rank, 0), strict=True)), comm), list[torch.Tensor]()
    for step in range(3):
        mine = tensors(comm.rank, step)
        averager.step(state, list(zip(names, mine, strict=True)), comm).wait()
        averager.commit(state)
        results += mine
    return results


def messages() -> list[torch.Tensor]:
    return [codec.encode(tensors(0, 0)[-1]) for codec in DECODED]


def outer_steps(outer: tw.strategy.Outer) -> list[torch.Tensor]:
    anchors = [nn.Parameter(t) for t in tensors(0, 0)]
    optimizer = outer(anchors)
    for step in range(6):
        for anchor, gradient in zip(anchors, tensors(1, step), strict=True):
            anchor.grad = gradient
        optimizer.step()
    return [anchor.detach() for anchor in anchors]


def everything(payloads: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    world = LocalWorld(WORKERS)
    found = {repr(averager): world.run(rounds, averager)[0] for averager in AVERAGERS}
    found |= {
        repr(c): [c.decode(payload, torch.Size(SHAPES[-1]))] for c, payload in zip(DECODED, payloads, strict=True)
    }
    return found | {f"outer {i}": outer_steps(outer) for i, outer in enumerate(OUTER)}


def test_results_do_not_depend_on_the_processor(tmp_path):
    path, payloads = tmp_path / "results", messages()
    torch.save(payloads, path)
    program = (
        f"import torch, test_processors; path = {str(path)!r}; "
        "torch.save(test_processors.everything(torch.load(path)), path)"
    )
    variables = WITHOUT_AVX | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=os.environ | variables, check=True, timeout=120)
    mine, theirs = everything(payloads), torch.load(path)
    assert len(mine) == len(AVERAGERS) + len(DECODED) + len(OUTER)
    differing = [name for name, xs in mine.items() if not all(map(torch.equal, xs, theirs[name]))]
    assert not differing
