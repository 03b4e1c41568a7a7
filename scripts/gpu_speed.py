"""Measure on a GPU for `scripts/gpu.py`: the overhead of a training step, or the speed of codecs.

python scripts/gpu_speed.py overhead|speed FOLDER      writes FOLDER/overhead.rows.json; for overhead also a timeline
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import thinwire as tw
from thinwire.codec import Codec, Key
from thinwire.lab.bench.codecs import DEFAULT_CODECS, measure
from thinwire.lab.bench.parts import seconds_of
from thinwire.strategy.gradients.rounds import GradientRounds

IS_DRY = os.environ.get("THINWIRE_DRY_RUN") == "1"
DEVICE = torch.device("cpu") if IS_DRY else torch.device("cuda", 0)
WIDTH, LAYERS, STEPS = (64, 2, 2) if IS_DRY else (4096, 6, 30)
PAYLOADS = 8
MOST_SECONDS = 180  # of `speed`, after which codecs are left out
SLOWEST = 1.0  # seconds to encode; a codec without a kernel may take minutes
SUMS = ("QSGD(bits=4)", "SignNorm()", "TopK(ratio=0.01)", "NUQSGD(bits=4)", "RandomK(ratio=0.1)")


def wait() -> None:
    """Wait for the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(step: Callable[[], None]) -> float:
    """Of one step with the wait for its end: the median, after three to warm up."""
    for _ in range(3):
        step()
    times = []
    for _ in range(STEPS):
        wait()
        began = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def training_step(attach: Callable[[DistributedDataParallel], object]) -> Callable[[], None]:
    """A step of an MLP in DDP, on one worker."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    x = torch.randn(64, WIDTH, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()

    return step


def overhead(folder: Path) -> list[str]:
    """A step with `Mean(QSGD(bits=4))` beside plain DDP, on one worker, so that nothing is sent."""
    if DEVICE.type == "cuda":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain = milliseconds(training_step(lambda ddp: None))
    handles: list[Any] = []
    step = training_step(lambda ddp: handles.append(tw.compress_gradients(ddp, tw.Mean(tw.QSGD(bits=4)))))
    ours = milliseconds(step)
    (handle,) = handles
    before = handle.seconds
    for _ in range(STEPS):
        step()
    phases = {name: 1e3 * (now - before.get(name, 0.0)) / STEPS for name, now in handle.seconds.items()}
    with patch.object(GradientRounds, "_waits_late", lambda rounds: True):
        late = milliseconds(step)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE.type == "cuda")
    with profile(activities=activities) as profiler:
        step()
        wait()
    profiler.export_chrome_trace(str(folder / "timeline.json"))
    by_time = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15)
    (folder / "timeline.txt").write_text(by_time)
    numel = LAYERS * (WIDTH * WIDTH + WIDTH)
    return [
        f"{numel / 1e6:.1f} million parameters: DDP {plain:.2f} ms, Mean(QSGD(bits=4)) {ours:.2f} ms, "
        f"overhead {ours - plain:.2f} ms; timeline in {(folder / 'timeline.json').name}",
        f"{late:.2f} ms where decoding begins when the last bucket is sent, as in main memory, and no two threads need Python",
        "in phases, side by side: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in phases.items()),
    ]


def speed(keep: Callable[[list[str]], None]) -> list[str]:
    """Every codec's speed as a share of a copy of the same GB, which no cache holds; what has an aim comes first."""
    x = torch.randn(1000 if IS_DRY else 250_000_000, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    repetitions = 2 if IS_DRY else 15
    rows = [f"{'codec':48} {'encode':>7} {'decode':>7}  of a copy, {4 * x.numel() / 1e6:g} MB"]
    began = time.monotonic()
    for text in [*SUMS, *(text for text in DEFAULT_CODECS[:: 8 if IS_DRY else 1] if text not in SUMS)]:
        estimate = seconds_to_encode(tw.parse(text), x)
        if estimate > SLOWEST or time.monotonic() > began + MOST_SECONDS:
            rows.append(f"{text:48} left out: encoding takes about {estimate:.3g} s")
            continue
        copy, encode, decode, _ = measure(tw.parse(text), x, repetitions)
        row = f"{text:48} {copy / encode:7.3f} {copy / decode:7.3f}  copy {8 * x.numel() / copy / 1e9:.0f} GB/s"
        if text in SUMS:
            share, seconds = sum_of_payloads(tw.parse(text), x, copy / (8 * x.numel()), repetitions)
            row += (
                f"; sum of {PAYLOADS} payloads {share:.3f} of what copying as many bytes takes, {1e3 * seconds:.2f} ms"
            )
        rows.append(row)
        keep(rows)
    return rows


def seconds_to_encode(codec: Codec, x: torch.Tensor) -> float:
    """Estimated from a thousandth of the data, or a hundredth where that is fast, after a first call that compiles."""
    for share in (1000, 100):
        part = x[: x.numel() // share]
        codec.encode(part, Key())
        seconds = seconds_of(lambda part=part: codec.encode(part, Key()), x.device)
        if seconds > SLOWEST / 10:
            break
    return share * seconds


def sum_of_payloads(codec: Codec, x: torch.Tensor, byte_seconds: float, repetitions: int) -> tuple[float, float]:
    """How near the sum comes to the least time, that for reading all payloads and writing the result; and its seconds."""
    payloads, out = [codec.encode(x, Key()) for _ in range(PAYLOADS)], torch.zeros_like(x)

    def add_up() -> None:
        codec.decode_sum(payloads, out, 1 / PAYLOADS, Key())

    add_up()
    seconds = median(seconds_of(add_up, x.device) for _ in range(repetitions))
    return byte_seconds * (sum(p.numel() for p in payloads) + 4 * x.numel()) / seconds, seconds


def main(what: str, folder: Path) -> None:
    def keep(rows: list[str]) -> None:
        (folder / f"{what}.rows.json").write_text(json.dumps(rows))

    keep(overhead(folder) if what == "overhead" else speed(keep))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
