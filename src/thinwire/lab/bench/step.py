"""`thinwire bench step`: the time of a training step over this network, compared with its computation alone.

Each method trains a multilayer perceptron data-parallel: gradients, gossip or local updates, as the strategy says.
Turns of its steps alternate with as many steps of the same model without any communication, on all workers at once, so
both run under the same conditions. A turn is one step, or the steps from one round of local updates to the next. With overlap,
an untimed step comes before it, and a round that is in flight at its end is waited for, untimed too, so that no message flies
during the computation alone. Each worker takes the median over turns. The result is the median of the slowest worker, because
all others wait for it. `floor.py` says what the step needs at least.

    python benchmarks/netlab.py --hosts 2 --line 1gbit -- thinwire bench step    one worker per host
    torchrun --nproc-per-node 4 --no-python thinwire bench step                  under any launcher that sets RANK
    thinwire bench step --workers 2                                              starts its own, over the loopback
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ...algorithm import require
from ...allocator import keep_freed_memory
from ...comm import Communicator
from ...comm.ledger import ring_all_reduce_bytes
from ...comm.transport import Transport, connect
from ...kernels import set_threads
from ...kernels.parallel import MOST_THREADS
from ...options import require_integer, require_number
from . import timeline
from .floor import Floor, Machine, passes_of
from .methods import SyntheticTraining, TimedMethod, mlp, of_strategy
from .parts import check_device
from .processor import seconds_by_thread
from .rows import check_writable, print_rows, write_json
from .workers import CPU, in_workers, joined

DEFAULT_STRATEGIES = (
    "Gradients(Mean(QSGD(bits=4)))",
    "Gradients(Mean(chain(TopK(ratio=0.01), QSGD(bits=4)), ErrorFeedback()))",
)
COLUMNS = (
    ("method", "method", ""),
    ("step\ns", "step_seconds", ".3f"),
    ("compute\nalone s", "compute_seconds", ".3f"),
    ("ratio", "ratio", ".2f"),
    ("core\nbusy s", "cpu_seconds", ".3f"),
    ("MB\nsent", "megabytes", ".3f"),
    ("line\ns", "line_seconds", ".3f"),
    ("memory\npasses", "memory_passes", ".1f"),
    ("memory\ns", "memory_seconds", ".3f"),
    ("floor\ns", "floor_seconds", ".3f"),
)
CAPTION = (
    "Medians of the slowest worker. Ratio: the step to its computation alone; 1 = communication is free. "
    "Core busy: processor time of a worker in a step, all its threads. Floor: the least time of a step, from its "
    "computation, its bytes over the line and its passes over memory, each a read or a write of the model."
)


@dataclass(frozen=True)
class StepBench:
    """Measure the training step of a 22-million-parameter MLP: DDP's own float32 and float16, and strategies."""

    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    """Strategies in Python's notation, as for `thinwire train`, such as "Gossip(Mix(), overlap=True)"."""
    baselines: bool = True
    """Also measure DDP's own all-reduce in float32, and with its float16 hook."""
    workers: int = 2
    """Number of processes to start, unless a launcher (RANK in the environment) has started them."""
    steps: int = 20
    """Measured steps of each method, at least one turn; more => steadier medians."""
    warmup: int = 3
    """Warm-up steps of each method; DDP arranges its buckets in the first two."""
    hidden: int = 2048
    """Width of the hidden layers."""
    layers: int = 6
    """Number of hidden layers."""
    batch_size: int = 64
    """Examples per worker and step; larger => more computation for the same bytes."""
    ddp: bool = False
    """Attach strategies of gradients to a model in DDP, which copies every gradient into its buckets, instead of the module
    itself."""
    bucket_megabytes: float | None = None
    """Bucket size of gradients in MiB, for all methods; by default DDP's own (25), and that of the strategy (10) for
    modules. Smaller => sending starts earlier, with more messages."""
    threads: int = 1
    """Threads that PyTorch and the C++ kernels may use in each worker."""
    device: str = "cpu"
    """Where to train: "cpu", or "cuda" for the GPUs of each machine, which its workers share if they are more. Messages go over
    NCCL if every worker has a GPU of its own."""
    rate: str | None = None
    """Value of the column `rate`; by default NETLAB_LINE of the environment, or "loopback"."""
    json: Path | None = None
    """Write the rows to this file."""
    transport: Transport = "auto"
    """What carries the strategies' messages; DDP's own go over Gloo or NCCL. "tcp" are connections of our own, which "auto"
    takes between machines."""
    timeline: Path | None = None
    """Draw one step of each method on rank 0, thread by thread, to this file (.svg or .png)."""

    def __post_init__(self):
        for name in ("workers", "steps", "hidden", "layers", "batch_size"):
            require_integer(name, getattr(self, name), 1)
        require_integer("threads", self.threads, 1, MOST_THREADS)
        require_integer("warmup", self.warmup, 0)
        require_number("bucket_megabytes", self.bucket_megabytes, above=0, or_none=True)
        require(bool(self.strategies) or self.baselines, "nothing to measure: give --strategies or --baselines")
        check_device(self.device)
        require(
            self.timeline is None or self.device == "cpu",
            "a timeline shows the threads of workers on CPUs; leave it out with device 'cuda'",
        )

    def run(self) -> list[dict[str, Any]]:
        """Measure; rank 0 prints the table, writes the files and returns the rows, the others return none."""
        _methods(self)  # refuses wrong strategies before workers start
        check_writable(self.json, figure=self.timeline)
        # DDP uses `torch._dynamo`; the fork server imports it once for all workers.
        rows: list[dict[str, Any]] | None = in_workers(run_worker, self, self.workers, [__name__, "torch._dynamo"])
        return rows or []


def run_worker(bench: StepBench) -> list[dict[str, Any]]:
    """The work of one worker: measure every method, and report on rank 0."""
    torch.set_num_threads(bench.threads)
    set_threads(bench.threads)
    keep_freed_memory()
    device = _own_device(bench)
    with joined(device=device, transport=bench.transport) as comm:
        machine = Machine.measured(comm, sum(p.numel() for p in mlp(bench.hidden, bench.layers).parameters()), device)
        rows = [_row(bench, comm, machine, method, device) for method in _methods(bench)]
        return _report(bench, rows) if comm.rank == 0 else []


def _own_device(bench: StepBench) -> torch.device:
    """The device of this worker, which becomes the current one if it is a GPU."""
    if bench.device == "cpu":
        return CPU
    from ..train.device import local_gpu

    device = local_gpu()
    torch.cuda.set_device(device)
    return device


def _methods(bench: StepBench) -> list[TimedMethod]:
    """What is measured, in the order of the rows.

    Raises:
        ValueError: a text is no strategy that can be measured.
    """
    megabytes = bench.bucket_megabytes
    size = None if megabytes is None else int(megabytes * 2**20)
    ours = [of_strategy(text, bench.ddp, size) for text in bench.strategies]
    baselines = [
        TimedMethod("DDP fp32", True, lambda training, comm: None, 4),
        TimedMethod("DDP fp16 hook", True, _compress_to_fp16, 2),
    ]
    return baselines * bench.baselines + ours


def _compress_to_fp16(training: SyntheticTraining, comm: Communicator) -> None:
    assert isinstance(training.model, DistributedDataParallel), "the method's `ddp` is set"
    training.model.register_comm_hook(None, fp16_compress_hook)


def _row(
    bench: StepBench, comm: Communicator, machine: Machine, method: TimedMethod, device: torch.device
) -> dict[str, Any]:
    alone = SyntheticTraining(mlp(bench.hidden, bench.layers).to(device), bench.batch_size, comm.rank)
    model: nn.Module = mlp(bench.hidden, bench.layers).to(device)
    if method.ddp:
        model = DistributedDataParallel(model, bucket_cap_mb=bench.bucket_megabytes, gradient_as_bucket_view=True)
    step = SyntheticTraining(model, bench.batch_size, comm.rank)
    # What the method sends is over a communicator of its own, which counts nothing else.
    with connect(bench.transport, device=device) as own, method.attach(step, own) or nullcontext() as strategy:
        turns = Turns(comm, method, alone, step, strategy.settle if strategy else lambda: None, device)
        turns.run(bench.warmup)
        if strategy is not None:
            before, seconds = strategy.ledger.snapshot(), strategy.seconds
            times, steps = turns.run(bench.steps)
            traffic = strategy.ledger.since(before)
            sent, got = traffic.bytes_sent / steps, traffic.bytes_received / steps
            phases = {phase: (s - seconds.get(phase, 0.0)) / steps for phase, s in strategy.seconds.items()}
            (state,) = strategy.state_dict().values()
            passes = passes_of(model, {**state, "change": None}, method.rhythm.every)  # a round in flight is no memory
        else:
            times, _ = turns.run(bench.steps)
            numel = sum(p.numel() for p in model.parameters())
            sent = got = ring_all_reduce_bytes(comm.size, method.bytes_per_element * numel)  # as Gloo and NCCL do it
            phases, passes = {}, passes_of(model, None)
        spans = _record(comm, turns) if bench.timeline else []
    floor = Floor.of(machine, times.compute_seconds, max(sent, got), passes, method.is_concurrent)
    return {
        "rate": bench.rate or os.environ.get("NETLAB_LINE", "loopback"),
        "workers": comm.size,
        "device": device.type,
        "method": method.name,
        **asdict(times),
        "bytes_sent_per_step": round(sent),
        **asdict(floor),
        "phase_seconds": phases,
        "spans": spans,
    }


@dataclass(frozen=True)
class Times:
    """Of a step, and of its computation alone: seconds, and seconds in processor time. Those of the slowest worker.

    `thread_seconds` is the processor time of a step by thread, on the worker whose step takes longest.
    """

    step_seconds: float
    compute_seconds: float
    cpu_seconds: float
    compute_cpu_seconds: float
    thread_seconds: dict[str, float]


@dataclass(frozen=True)
class Turns:
    """Alternates turns of computation alone with turns of a method."""

    comm: Communicator
    method: TimedMethod
    alone: Callable[[], None]
    step: Callable[[], None]
    settle: Callable[[], None]
    device: torch.device = CPU

    def run(self, steps: int) -> tuple[Times, int]:
        """At least so many timed steps of each; returns their times, and the steps of the method with the untimed ones."""
        turns = -(-steps // self.method.rhythm.every)
        measured: list[list[float]] = []
        threads: list[dict[str, float]] = []
        for _ in range(turns):
            alone, _ = self._timed(self.alone)
            self.begin()
            # With overlap a round is in flight here, and a barrier would hide part of it.
            step, by_thread = self._timed(self.step, barrier=not self.method.is_late)
            measured.append(step + alone)
            threads.append(by_thread)
            self.settle()
        every = self.method.rhythm.every
        # With warmup=0 there are no turns.
        medians = [median(column) / every for column in zip(*measured, strict=True)] or [0.0] * 4
        names = {name for turn in threads for name in turn}
        by_thread = {name: median(turn.get(name, 0.0) for turn in threads) / every for name in sorted(names)}
        workers = self.comm.gather_objects((medians, by_thread))
        seconds, cpu, compute, compute_cpu = (max(c) for c in zip(*(m for m, _ in workers), strict=True))
        slowest = max(workers, key=lambda worker: worker[0][0])[1]
        return Times(seconds, compute, cpu, compute_cpu, slowest), turns * (every + self.method.is_late)

    def begin(self) -> None:
        """With overlap, the untimed step, whose round is in flight at its end."""
        if self.method.is_late:
            self.comm.barrier()
            self.step()

    def _timed(self, training: Callable[[], None], barrier: bool = True) -> tuple[list[float], dict[str, float]]:
        """Seconds of a turn, its seconds in processor time, and these by thread."""
        self._settle()
        if barrier:
            self.comm.barrier()
        by_thread = seconds_by_thread()
        start, processor_start = time.perf_counter(), time.process_time()
        for _ in range(self.method.rhythm.every):
            training()
        self._settle()
        took = [time.perf_counter() - start, time.process_time() - processor_start]
        return took, by_thread()

    def _settle(self) -> None:
        """Wait for the GPU, if the step runs on one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _record(comm: Communicator, turns: Turns) -> list[timeline.Span]:
    turns.begin()
    comm.barrier()
    if comm.rank == 0:
        return timeline.record(turns.step)
    turns.step()
    return []


def _report(bench: StepBench, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    spans = {row["method"]: row.pop("spans") for row in rows}
    title = f"Training step, {rows[0]['workers']} workers, {rows[0]['device']}, {rows[0]['rate']}"
    shown = []
    for row in rows:
        ratio, megabytes = row["step_seconds"] / row["compute_seconds"], row["bytes_sent_per_step"] / 1e6
        shown.append(row | {"ratio": ratio, "megabytes": megabytes})
    print_rows(title, COLUMNS, shown, CAPTION)
    write_json(bench.json, rows)
    if bench.timeline:
        timeline.draw(spans, bench.timeline)
    return rows
