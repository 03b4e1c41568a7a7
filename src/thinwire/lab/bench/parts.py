"""Parts of a step other than coding: the kernel of Deep Gradient Compression, and an update of adaptive levels.

They are measured like codecs: each repetition first copies the same number of floats, and medians are compared.

    copy_ratio = median copy seconds / median seconds        1 = as fast as copying the gradient; None where nothing
                                                             of the gradient is touched
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import require
from ...codec import ALQ, Key

RATIO, MOMENTUM = 0.001, 0.9  # of Deep Gradient Compression
NUM_BUCKETS, BUCKET_SIZE, BITS = 350, 8192, 3


def measure_parts(x: Tensor, repetitions: int) -> list[dict[str, Any]]:
    """One row for each part: `part`, `milliseconds`, `copy_ratio`."""
    return [
        _dgc_row(x, repetitions, nesterov=False),
        _dgc_row(x, repetitions, nesterov=True),
        _levels_row(repetitions),
    ]


def _dgc_row(x: Tensor, repetitions: int, nesterov: bool) -> dict[str, Any]:
    """New momentum and velocity in buffers of their own, and the exact top-k of the velocity."""
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(x.numel(), generator=generator).to(x.device) for _ in range(2))
    new_u, new_v, count = torch.empty_like(x), torch.empty_like(x), max(1, int(RATIO * x.numel()))
    source, target = x.clone(), torch.empty_like(x)  # of the copy, so that neither profits from cached data

    buffers = kernels.momentum.Buffers([x], [u], [v], [new_u], [new_v])
    rule = kernels.momentum.Momentum(MOMENTUM, nesterov=nesterov)

    def step() -> None:
        kernels.momentum.correct_topk(buffers, rule, [count])

    copies, steps = [], []
    for act in (step, lambda: target.copy_(source)):  # no page is touched for the first time during the timing
        act()
    for _ in range(repetitions):
        copies.append(seconds_of(lambda: target.copy_(source), x.device))
        steps.append(seconds_of(step, x.device))
    name = f"DGC: momentum, velocity, top-k at {RATIO}{', Nesterov' if nesterov else ''}"
    return {"part": name, "milliseconds": 1e3 * median(steps), "copy_ratio": median(copies) / median(steps)}


def _levels_row(repetitions: int) -> dict[str, Any]:
    """What a worker computes when levels are due: all but sampling and the exchange of the statistics."""
    codec = ALQ(bits=BITS, bucket_size=BUCKET_SIZE, num_buckets=NUM_BUCKETS)
    x = torch.randn(NUM_BUCKETS * BUCKET_SIZE, generator=torch.Generator().manual_seed(2))
    state = codec.init_state()
    codec.observe(state, [x], [Key()])
    codec.learn(state, [codec.statistics(state)])
    seconds = [
        seconds_of(lambda: codec.learn(state, [codec.statistics(state)]), torch.device("cpu"))
        for _ in range(repetitions)
    ]
    name = f"ALQ: one update of {BITS}-bit levels over {NUM_BUCKETS} buckets"
    return {"part": name, "milliseconds": 1e3 * median(seconds), "copy_ratio": None}


def check_device(name: str) -> None:
    """Check before a measurement that there is such a device.

    Raises:
        ValueError: an unknown name, or a GPU that PyTorch does not see.
    """
    require(name in ("cpu", "cuda"), f"device must be 'cpu' or 'cuda', got {name!r}")
    require(
        name == "cpu" or torch.cuda.is_available(),
        "device 'cuda' needs a GPU, and PyTorch sees none; leave the option out to measure on the CPU",
    )


SLEEP_CYCLES = 20_000_000  # about 10 ms


def seconds_of(act: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `act` takes; on a GPU, seconds of its kernels and of the gaps between them, by events.

    The GPU sleeps first, while the host starts all kernels, so that no gap is the host's.
    """
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        began.record()
        act()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1000
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
