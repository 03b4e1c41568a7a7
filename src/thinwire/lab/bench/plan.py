"""What `thinwire plan --measure` measures on the machines at hand."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import isqrt
from statistics import median
from typing import Any

import torch
from torch import nn

from ...average import Averager
from ...codec import Codec
from ...comm import LocalWorld
from ...comm.local_world import LocalCommunicator
from ...memory import ErrorFeedback
from ...plan import Method, Network, Speeds, methods
from ...plan.averagers import multiplies, parts_of, topology_of
from ...plan.measure import Effort, measure_lines
from ...plan.predict import tensors_of
from ...plan.sized import MEMORY, after_warm_ups
from ...plan.speeds import CopyShare
from .codecs import measure
from .workers import joined

BUCKET = 25 * 2**20 // 4
"""Elements of a bucket of DistributedDataParallel."""
REPETITIONS = 5


def measured_speeds(numel: int, others: Sequence[Method] = ()) -> Speeds:
    """The codecs and averagers of low rank of all methods on this machine, and error feedback, on one bucket of random numbers.

    Args:
        numel: elements of the model. A small one is a bucket of its own, and each call then costs more per element.
        others: methods besides those of a plan.
    """
    numel = min(numel, BUCKET)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    # 2 per node => hierarchical methods too
    found = [method.strategy.averager for method in [*methods(2), *others]]
    averagers = [after_warm_ups(averager) for averager in found if isinstance(averager, Averager)]
    parts = [part for averager in averagers for part in parts_of(averager).values()]
    codecs = {repr(part): part for part in parts if isinstance(part, Codec)}
    shares, copies = dict(Speeds().shares), []
    for name, codec in codecs.items():
        given = _square(x) if codec.traits.needs_shape else x
        copy_seconds, encode_seconds, decode_seconds, _ = measure(codec, given, REPETITIONS)
        copies.append(copy_seconds)
        shares[name] = CopyShare(copy_seconds / encode_seconds, copy_seconds / decode_seconds)
    shares[MEMORY] = _of_memory(x, median(copies))
    low_rank = {repr(averager): averager for averager in filter(multiplies, averagers)}
    for name, averager in low_rank.items():
        with suppress(ValueError):  # a topology of another number of workers
            shares[name] = measure_low_rank(averager, numel, REPETITIONS)
    return Speeds(4 * numel / median(copies), shares)


def _square(x: torch.Tensor) -> torch.Tensor:
    """The largest square matrix of elements of a vector; whole tiles where there is one."""
    side = isqrt(x.numel())
    side -= side % 64 if side >= 64 else 0
    return x[: side * side].view(side, side)


def _of_memory(x: torch.Tensor, copy_seconds: float) -> CopyShare:
    memory, seconds = ErrorFeedback(), []
    state = memory.init([("x", x)])
    for _ in range(1 + REPETITIONS):
        start = time.perf_counter()
        memory.compensate(state, "x", x)
        seconds.append(time.perf_counter() - start)
    return CopyShare(copy_seconds / median(seconds[1:]), 1.0)


def measure_low_rank(averager: Averager, numel: int, repetitions: int) -> CopyShare:
    """How fast `step` is, and what follows it, in processor time of the calling thread.

    A gossip averager has its neighbours among four workers.
    """
    size = 1 if topology_of(averager) is None else 4
    return LocalWorld(size).run(_steps, averager, numel, repetitions)[0]


def _steps(comm: LocalCommunicator, averager: Averager, numel: int, repetitions: int) -> CopyShare:
    generator = torch.Generator().manual_seed(comm.rank)
    tensors = [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(tensors_of(numel))]
    source, target = torch.randn(numel, generator=generator), torch.empty(numel)
    state, rows = averager.init(tensors, comm), []
    for _ in range(2 + repetitions):  # the first ones allocate memory
        times = [time.thread_time()]
        target.copy_(source)
        times.append(time.thread_time())
        handle = averager.step(state, tensors, comm)
        times.append(time.thread_time())
        handle.wait()
        averager.commit(state)
        times.append(time.thread_time())
        rows.append([after - before for before, after in pairwise(times)])
    copy, step, wait = (median(column) for column in zip(*rows[2:], strict=True))
    return CopyShare(copy / step, copy / wait)


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
