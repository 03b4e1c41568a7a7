"""CHOCO and DeepSqueeze at their default step size, by the definitions in matrix form; all workers in one encoding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import thinwire as tw
from thinwire.average.gossip.fitted_step import MEMORY, step_for
from thinwire.topology.speed import difference_rates, rounds_to_reach_all

Record = Callable[[int, Tensor], None]


def fitted(
    kind: type,
    codec: tw.codec.Codec,
    x: Tensor,
    rounds: int,
    record: Record,
    topology: tw.topology.Topology | None = None,
) -> float:
    """Gossip for some rounds, calling `record` with the round and the values (W, ...); the last step size."""
    graph, size = topology or tw.Ring(), len(x)
    p = torch.from_numpy(graph.matrix(0, size))
    span, rates = rounds_to_reach_all(graph, size), difference_rates(graph, size)
    memory, gap, shares, step_size = (
        torch.zeros_like(x),
        torch.zeros_like(x, dtype=torch.float64),
        None,
        torch.tensor(0.0),
    )
    for step in range(rounds):
        y = x - memory if kind is tw.Choco else x + memory
        keys = [tw.codec.Key(0, rank, step) for rank in range(size)]
        c = torch.stack(codec.decode(codec.encode(list(y), keys), [y[0].shape] * size, keys))
        flat, decoded = y.flatten(1).double(), c.flatten(1).double()
        product, squares = (flat * decoded).sum(1), (decoded * decoded).sum(1)
        factor = torch.where(squares > 0, product / squares, 1.0).clamp(min=0.0).float()
        c = c * factor.view(-1, *[1] * (c.ndim - 1))
        total = (flat * flat).sum(1)
        share = torch.where(total > 0, factor * product / total, 1.0).clamp(0.0, 1.0).float()
        shares = share if shares is None else MEMORY * shares + (1.0 - MEMORY) * share
        if step % span == 0:
            proposed = shares.min()
        memory = memory + c if kind is tw.Choco else y - c
        change = torch.einsum("ij,j...->i...", p, c.double()) - c
        gap = gap + change if kind is tw.Choco else change
        x = x + (step_size * gap).float()
        if step % span == span - 1:
            step_size = step_for(proposed, *rates)
        record(step + 1, x)
    return step_size.item()
