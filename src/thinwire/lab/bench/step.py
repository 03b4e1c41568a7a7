"""`thinwire bench step`: the time of a training step over this network, compared with its computation alone.

Each method trains a multilayer perceptron data-parallel. Measured steps alternate with steps of the same model without any
communication, on all workers at once, so both run under the same conditions. Each worker takes the median over steps. The
result is the median of the slowest worker, because all others wait for it.

    python benchmarks/netlab.py --hosts 2 --rate 1gbit -- thinwire bench step    one worker per host
    torchrun --nproc-per-node 4 --no-python thinwire bench step                  under any launcher that sets RANK
    thinwire bench step --workers 2                                              starts its own, over the loopback
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ...algorithm import require
from ...allocator import keep_freed_memory
from ...average import Averager
from ...comm import Communicator, ProcessGroupCommunicator
from ...comm.ledger import ring_all_reduce_bytes
from ...strategy import compress_gradients
from . import timeline
from .rows import as_parsed, check_writable, print_table, write_json

DEFAULT_AVERAGERS = (
    "Mean(QSGD(bits=4))",
    "Mean(chain(TopK(ratio=0.01), QSGD(bits=4)), ErrorFeedback())",
)
NUM_INPUTS, NUM_CLASSES = 512, 10


@dataclass(frozen=True)
class StepBench:
    """Measure the training step of a 22-million-parameter MLP: DDP's own float32 and float16, and averagers."""

    averagers: tuple[str, ...] = DEFAULT_AVERAGERS
    """Averagers in Python's notation."""
    baselines: bool = True
    """Also measure DDP's own all-reduce in float32, and with its float16 hook."""
    workers: int = 2
    """Number of processes to start, unless a launcher (RANK in the environment) has started them."""
    steps: int = 20
    """Measured steps of each method; more => steadier medians."""
    warmup: int = 3
    """Warm-up steps of each method; DDP arranges its buckets in the first two."""
    hidden: int = 2048
    """Width of the hidden layers."""
    layers: int = 6
    """Number of hidden layers."""
    batch_size: int = 64
    """Examples per worker and step; larger => more computation for the same bytes."""
    ddp: bool = False
    """Attach averagers to a model in DDP, which copies every gradient into its buckets, instead of the module itself."""
    bucket_megabytes: float | None = None
    """Bucket size in MiB, for all methods; by default DDP's own (25), and that of `compress_gradients` (10) for modules.
    Smaller => sending starts earlier, with more messages."""
    threads: int = 1
    """Threads that PyTorch may use in each worker."""
    rate: str | None = None
    """Value of the column `rate`; by default NETLAB_RATE of the environment, or "loopback"."""
    json: Path | None = None
    """Write the rows to this file."""
    timeline: Path | None = None
    """Draw one step of each method on rank 0, thread by thread, to this file (.svg or .png)."""

    def __post_init__(self):
        for name in ("workers", "steps", "hidden", "layers", "batch_size", "threads"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.warmup >= 0, f"warmup must be at least 0, got {self.warmup}")
        megabytes = self.bucket_megabytes
        require(megabytes is None or megabytes > 0, f"bucket_megabytes must be positive, got {megabytes}")
        require(bool(self.averagers) or self.baselines, "nothing to measure: give --averagers or --baselines")

    def run(self) -> list[dict[str, Any]]:
        """Measure; rank 0 prints the table, writes the files and returns the rows, the others return none."""
        for text in self.averagers:
            as_parsed(text, Averager)
        if self.timeline:
            timeline.check_kind(self.timeline)
        for path in (self.json, self.timeline):
            check_writable(path)
        if "RANK" in os.environ:
            return run_worker(self, "env://")
        with tempfile.TemporaryDirectory() as folder:
            start = (self, self.workers, f"file://{folder}/rendezvous")
            torch.multiprocessing.spawn(_spawned, args=start, nprocs=self.workers)
            return []


def _spawned(rank: int, bench: StepBench, workers: int, rendezvous: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    run_worker(bench, rendezvous)


def run_worker(bench: StepBench, rendezvous: str) -> list[dict[str, Any]]:
    """The work of one worker: measure every method, and report on rank 0."""
    torch.set_num_threads(bench.threads)
    keep_freed_memory()
    with joined(rendezvous) as comm:
        rows = [_row(bench, comm, method) for method in _methods(bench)]
        return _report(bench, rows) if comm.rank == 0 else []


@contextmanager
def joined(rendezvous: str = "env://") -> Iterator[Communicator]:
    """Join the workers that the launcher's environment names, over Gloo."""
    rank, size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    try:
        with ProcessGroupCommunicator() as comm:
            yield comm
            dist.barrier()  # no worker exits while others wait for its messages
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Method:
    """A data-parallel method: whether it uses DDP, the averager to attach, and the bytes of DDP's own all-reduce."""

    name: str
    ddp: bool
    attach: Callable[[nn.Module], Any]
    bytes_per_element: int = 0  # of DDP's own all-reduce; the ledger counts those of averagers

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[Any]:
        """Context in which this method trains `model`; yields the handle of an attached averager, or None."""
        handle = self.attach(model)
        try:
            yield handle
        finally:
            if handle is not None:
                handle.detach()


def _compress_to_fp16(model: nn.Module) -> None:
    assert isinstance(model, DistributedDataParallel), "the method's `ddp` is set"
    model.register_comm_hook(None, fp16_compress_hook)


def _methods(bench: StepBench) -> list[Method]:
    baselines = [
        Method("DDP fp32", True, lambda ddp: None, 4),
        Method("DDP fp16 hook", True, _compress_to_fp16, 2),
    ]
    size: dict[str, Any] = {}
    if bench.bucket_megabytes is not None:
        size["bucket_bytes"] = int(bench.bucket_megabytes * 2**20)
    averagers = [as_parsed(text, Averager) for text in bench.averagers]
    ours = [Method(repr(a), bench.ddp, partial(compress_gradients, averager=a, **size)) for a in averagers]
    return (baselines if bench.baselines else []) + ours


def mlp(hidden: int, layers: int) -> nn.Sequential:
    """512 - hidden x layers - 10, with ReLU; 22 million parameters for 2048 x 6. The same on every worker."""
    torch.manual_seed(0)
    widths = [NUM_INPUTS, *[hidden] * layers]
    parts = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(hidden, NUM_CLASSES))


class Training:
    """A model, its data and its optimizer; calling it makes one step."""

    def __init__(self, model: nn.Module, batch_size: int, rank: int):
        generator = torch.Generator().manual_seed(rank)
        self.model = model
        self.inputs = torch.randn(batch_size, NUM_INPUTS, generator=generator)
        self.targets = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with record_function("forward"):
            loss = self._loss(self.model(self.inputs))
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            self.optimizer.step()

    def _loss(self, outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, self.targets)


def _row(bench: StepBench, comm: Communicator, method: Method) -> dict[str, Any]:
    alone = Training(mlp(bench.hidden, bench.layers), bench.batch_size, comm.rank)
    model: nn.Module = mlp(bench.hidden, bench.layers)
    if method.ddp:
        model = DistributedDataParallel(model, bucket_cap_mb=bench.bucket_megabytes, gradient_as_bucket_view=True)
    with method.on(model) as handle:
        step = Training(model, bench.batch_size, comm.rank)
        _alternate(comm, alone, step, bench.warmup)
        before = (handle.ledger.snapshot(), handle.seconds) if handle else None
        compute_seconds, step_seconds, compute_cpu_seconds, cpu_seconds = _alternate(comm, alone, step, bench.steps)
        if before is not None:
            sent = handle.ledger.since(before[0]).bytes_sent // bench.steps
            phases = {phase: (s - before[1].get(phase, 0.0)) / bench.steps for phase, s in handle.seconds.items()}
        else:
            numel = sum(p.numel() for p in model.parameters())
            sent = ring_all_reduce_bytes(comm.size, method.bytes_per_element * numel)  # the algorithm of Gloo and NCCL
            phases = {}
        spans = _record(comm, step) if bench.timeline else []
    return {
        "rate": bench.rate or os.environ.get("NETLAB_RATE", "loopback"),
        "workers": comm.size,
        "method": method.name,
        "step_seconds": step_seconds,
        "compute_seconds": compute_seconds,
        "bytes_sent_per_step": sent,
        "cpu_seconds": cpu_seconds,
        "compute_cpu_seconds": compute_cpu_seconds,
        "phase_seconds": phases,
        "spans": spans,
    }


def _alternate(comm: Communicator, alone: Training, step: Training, times: int) -> tuple[float, ...]:
    """Medians of the slowest worker: seconds of computation alone and of the step; then both in processor time."""
    wall: dict[Training, list[float]] = {alone: [], step: []}
    processor: dict[Training, list[float]] = {alone: [], step: []}
    for _ in range(times):
        for training in (alone, step):
            comm.barrier()
            start, processor_start = time.perf_counter(), time.process_time()
            training()
            wall[training].append(time.perf_counter() - start)
            processor[training].append(time.process_time() - processor_start)
    columns = [wall[alone], wall[step], processor[alone], processor[step]]
    medians = [median(column) if column else 0.0 for column in columns]
    return tuple(max(column) for column in zip(*comm.gather_objects(medians), strict=True))


def _record(comm: Communicator, step: Training) -> list:
    comm.barrier()
    if comm.rank == 0:
        return timeline.record(step)
    step()
    return []


def _report(bench: StepBench, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    spans = {row["method"]: row.pop("spans") for row in rows}
    _print(rows)
    write_json(bench.json, rows)
    if bench.timeline:
        timeline.draw(spans, bench.timeline)
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    lines = [
        [
            row["method"],
            f"{row['step_seconds']:.3f}",
            f"{row['compute_seconds']:.3f}",
            f"{row['step_seconds'] / row['compute_seconds']:.2f}",
            f"{row['cpu_seconds']:.3f}",
            f"{row['bytes_sent_per_step'] / 1e6:.3f}",
        ]
        for row in rows
    ]
    print_table(
        f"Training step, {rows[0]['workers']} workers, {rows[0]['rate']}",
        ["method", "step\ns", "compute\nalone s", "ratio", "core busy\ns", "MB sent\na step"],
        lines,
        "Medians of the slowest worker. Ratio: the step to its computation alone; 1 = communication is free. "
        "Core busy: processor time of a worker in a step, all its threads.",
    )
