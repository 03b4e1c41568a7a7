"""What `thinwire plan --measure` measures on the machines at hand."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from ...average import Averager
from ...codec import Codec
from ...plan import Method, Network, Speeds, methods
from ...plan.averagers import parts_of
from ...plan.measure import Effort, measure_lines
from ...plan.speeds import CopyShare
from .codecs import measure
from .workers import joined

BUCKET = 25 * 2**20 // 4
"""Elements of a bucket of DistributedDataParallel."""
REPETITIONS = 5


def measured_speeds(numel: int, others: Sequence[Method] = ()) -> Speeds:
    """The codecs of all methods on this machine, on one bucket of random numbers.

    Args:
        numel: elements of the model. A small one is a bucket of its own, and each call then costs more per element.
        others: methods besides those of a plan.
    """
    numel = min(numel, BUCKET)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    # 2 per node => hierarchical methods too
    averagers = [method.strategy.averager for method in [*methods(2), *others]]
    parts = [part for averager in averagers if isinstance(averager, Averager) for part in parts_of(averager).values()]
    codecs = {repr(part): part for part in parts if isinstance(part, Codec)}
    shares, copies = dict(Speeds().shares), []
    for name, codec in codecs.items():
        copy_seconds, encode_seconds, decode_seconds, _ = measure(codec, x, REPETITIONS)
        copies.append(copy_seconds)
        shares[name] = CopyShare(copy_seconds / encode_seconds, copy_seconds / decode_seconds)
    return Speeds(4 * numel / median(copies), shares)


def measured_network(network: Network) -> Network:
    """The same network with links as measured between the workers of a launcher; unchanged without one."""
    if "RANK" not in os.environ:
        return network
    per_node, effort = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), Effort()
    with joined() as comm:
        network = replace(network, workers=comm.size, workers_per_node=per_node)
        if comm.size == 1:
            return network
        if comm.rank == 0:
            print(f"the measurement {effort.announced(comm.size)}", file=sys.stderr, flush=True)
        return measure_lines(comm, effort).on_network(network)


def measured_compute(model: nn.Module, inputs: Callable[[], tuple[Any, ...] | torch.Tensor]) -> float:
    """Median seconds of forward and backward of the mean square of the model's output.

    Args:
        model: with parameters.
        inputs: returns the arguments of the model, or its only one, a tensor.
    """
    seconds = []
    for _ in range(1 + REPETITIONS):
        given = inputs()
        arguments = (given,) if isinstance(given, torch.Tensor) else given
        start = time.perf_counter()
        model(*arguments).float().square().mean().backward()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])  # the first call allocates the gradients
