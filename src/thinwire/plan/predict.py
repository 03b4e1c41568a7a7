"""What each method would take: records the averagers' programs once, and simulates them on a network."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isqrt
from statistics import fmean

import torch

from ..algorithm import require
from ..average import Averager
from ..strategy import AveragerAttachment, Averaging, Rhythm
from ..topology import Hierarchical, Topology
from ..topology.measured import shares
from .averagers import has_leaders, is_circulant, is_uniform, planned, rounds_of, settings_of, topology_of, uses_nodes
from .methods import BF16, DDP, OPTIMIZERS, Method, methods
from .network import Network
from .record import Program, record
from .simulate import Bucket, simulate
from .speeds import Speeds

FORWARD_SHARE = 1 / 3  # of the computation: backward has twice the multiplications
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20  # those of DistributedDataParallel


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        shapes: of the parameters, in the order of the model.
        compute_seconds: forward, backward and optimizer of one step, without a network.
    """

    shapes: tuple[torch.Size, ...]
    compute_seconds: float

    def __post_init__(self) -> None:
        require(len(self.shapes) > 0, "a plan needs a model of at least one parameter")
        is_time = 0 <= self.compute_seconds < math.inf
        require(is_time, f"compute must be 0 seconds or more, and finite, got {self.compute_seconds}")

    @classmethod
    def of(cls, model: int | Iterable[torch.Tensor], compute_seconds: float) -> Workload:
        """The workload of a number of parameters, or of the parameters themselves."""
        shapes = tensors_of(model) if isinstance(model, int) else tuple(p.shape for p in model)
        return cls(shapes, compute_seconds)

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(shape.numel() for shape in self.shapes)


@dataclass(frozen=True)
class Prediction:
    """What one method would take.

    Attributes:
        method: its name.
        strategy: its notation.
        step_seconds: of one step, with its computation.
        bytes_out: what a node sends to other nodes in one step, the one that sends most; with one worker on a node, what a
            worker sends.
        speedup_over_fp32: the step of DDP in float32, divided by this one.
        speedup_over_bf16: the step of DDP in bfloat16, divided by this one.
        memory_bytes: what a worker keeps besides the model; None if the method does not say.
        accuracy: what was measured of the accuracy, and on what.
        page: the page of the documentation that it is from.
        is_near: whether that is within 2 % of dense training.
    """

    method: str
    strategy: str
    step_seconds: float
    bytes_out: float
    speedup_over_fp32: float
    speedup_over_bf16: float
    memory_bytes: float | None
    accuracy: str
    page: str
    is_near: bool


def predict(
    model: int | Iterable[torch.Tensor],
    compute_seconds: float,
    network: Network,
    speeds: Speeds | None = None,
    candidates: Sequence[Method] | None = None,
    optimizer: str | None = None,
) -> list[Prediction]:
    """Predict a training step of each method, the fastest first.

    A topology that varies in time counts with the mean over its period, of its last phase; so does `PowerGossip`, whose rounds
    send one side of each matrix and then the other.

    Args:
        model: the number of parameters, or the parameters themselves, such as `model.parameters()`.
        compute_seconds: forward, backward and optimizer of one step on one worker.
        network: workers, nodes and links.
        speeds: of the codecs; by default those of `thinwire.plan.speeds`.
        candidates: what to compare, by default `methods()`; dense float32 and bfloat16 are always predicted.
        optimizer: whose accuracies are shown: "sgd", "adam" or "muon", in any case; "adamw" is "adam" too. None takes those
            that were measured, by any.

    Raises:
        ValueError: fewer than two workers, no parameters, negative times, an unknown optimizer, or a candidate with the name of
            another one or of a dense method.

    Example:
        >>> from thinwire.plan import Link, Network
        >>> slow = Network(4, outer=Link.of("100mbit", "0.5ms"))
        >>> ranking = predict(1_000_000, 0.05, slow)
        >>> ranking[0].speedup_over_fp32 > 5
        True
    """
    under = None if optimizer is None else optimizer.lower().replace("adamw", "adam")
    require(under in (None, *OPTIMIZERS), f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    require(network.workers >= 2, f"a plan needs at least two workers, got {network.workers}")
    workload, speeds = Workload.of(model, compute_seconds), speeds or Speeds()
    known = methods(network.workers_per_node)
    asked = known if candidates is None else list(candidates)
    # Speedups are relative to these two, whatever was asked for.
    baselines = [m for m in known if m.name in (DDP, BF16)]
    chosen: dict[str, Method] = {}
    for method in (*asked, *baselines):
        require(
            chosen.setdefault(method.name, method) == method, f"two methods have the name {method.name!r}; rename one"
        )
    with _uncollected():
        steps = {name: predict_method(method, workload, network, speeds) for name, method in chosen.items()}
    made = [
        Prediction(
            method=name,
            strategy=repr(method.strategy),
            step_seconds=steps[name][0],
            bytes_out=steps[name][1],
            speedup_over_fp32=steps[DDP][0] / steps[name][0],
            speedup_over_bf16=steps[BF16][0] / steps[name][0],
            memory_bytes=None if method.state_floats is None else 4 * method.state_floats * workload.numel,
            accuracy=method.under(under).text,
            page=method.under(under).page,
            is_near=method.under(under).is_near,
        )
        for name, method in chosen.items()
    ]
    return sorted(made, key=lambda prediction: prediction.step_seconds)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: a thousand workers have millions of messages, and it would look at all of them in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def predict_method(method: Method, workload: Workload, network: Network, speeds: Speeds) -> tuple[float, float]:
    """Seconds of a step, and the bytes that a node sends to other nodes in it.

    A codec that follows the line takes the most bytes that make the step no longer than it allows.
    """
    strategy = method.strategy
    require(
        isinstance(strategy, Averaging) and isinstance(strategy.averager, Averager),
        f"a plan predicts strategies whose averager has rounds, such as Gradients(Mean()), got {strategy!r}",
    )
    require(
        not strategy.counts_commits,
        f"a plan predicts workers that wait for each other, got {strategy!r}; leave the quorum out",
    )
    assert isinstance(strategy.averager, Averager)  # for the type checker
    averagers, wait_share = settings_of(strategy.averager)
    found = (math.inf, math.inf)
    for averager in averagers:
        found = min(found, _predicted(replace(strategy, averager=averager), workload, network, speeds))
        if found[0] <= workload.compute_seconds * (1 + wait_share):
            break
    return found


def _predicted(
    strategy: Averaging[AveragerAttachment], workload: Workload, network: Network, speeds: Speeds
) -> tuple[float, float]:
    rhythm, compute = strategy.rhythm, workload.compute_seconds
    if rhythm.in_backward:
        forward = FORWARD_SHARE * compute
        return _round(strategy, workload.shapes, forward, compute - forward, network, speeds)
    # Nothing is sent in backward, so a round is simulated alone; `exposed_seconds` says what compute cannot hide.
    fragment = tuple(_part(shape, rhythm.fragments) for shape in workload.shapes)
    seconds, num_bytes = _round(strategy, fragment, 0.0, 0.0, network, speeds)
    exposed = exposed_seconds(rhythm, seconds, compute)
    return compute + exposed / rhythm.every, rhythm.fragments * num_bytes / rhythm.every


def _round(
    strategy: Averaging[AveragerAttachment],
    shapes: tuple[torch.Size, ...],
    forward: float,
    backward: float,
    network: Network,
    speeds: Speeds,
) -> tuple[float, float]:
    """Seconds of a round with so much computation before it and beside it, and the bytes that a node sends to others.

    Both are means over the period of a topology, or of the averager.
    """
    owned = shares(network.uplinks) if len(network.uplinks) == network.workers else ()
    is_even = not network.uplinks
    rounds = programs_of(strategy, shapes, network.workers, network.workers_per_node, is_even, owned)
    seconds = [
        simulate(
            network,
            [Bucket(backward * numel / sum(n for n, _ in buckets), programs) for numel, programs in buckets],
            forward,
            speeds.seconds,
            fold=all(len(programs) == network.workers_per_node for _, programs in buckets),
        )
        for buckets in rounds
    ]
    num_bytes = _most_bytes_out(network, [programs for buckets in rounds for _, programs in buckets])
    return fmean(seconds), num_bytes / len(rounds)


def _part(shape: torch.Size, num_parts: int) -> torch.Size:
    """One of so many equal parts of a tensor, by rows."""
    return torch.Size([-(-rows // num_parts) for rows in shape[:1]] + list(shape[1:]))


def _most_bytes_out(network: Network, calls: Sequence[Sequence[Program]]) -> float:
    """What the node that sends most sends to other nodes, of those whose programs are known."""
    per_node = network.workers_per_node
    of_nodes = [
        sum(
            program.bytes_out(network, node)
            for programs in calls
            for program in programs[node * per_node : (node + 1) * per_node]
        )
        for node in range(len(calls[0]) // per_node)
    ]
    return max(of_nodes)


def exposed_seconds(rhythm: Rhythm, fragment_seconds: float, compute_seconds: float) -> float:
    """What the training waits for in a period: what each fragment's exchange takes beyond the steps that hide it.

    One fragment is in flight at a time, so that the steps between two fragments are the most that can hide one.

    Example:
        >>> rhythm = Rhythm(every=40, fragments=4, delay=5)
        >>> exposed_seconds(rhythm, 5.0, 1.0), exposed_seconds(rhythm, 6.0, 1.0)
        (0.0, 4.0)
    """
    hidden = min(rhythm.delay, rhythm.every / rhythm.fragments) * compute_seconds
    return rhythm.fragments * max(0.0, fragment_seconds - hidden)


@lru_cache(maxsize=512)  # figures ask for the same programs at many rates
def programs_of(
    strategy: Averaging[AveragerAttachment],
    shapes: tuple[torch.Size, ...],
    workers: int,
    workers_per_node: int,
    is_even: bool = True,
    owned: tuple[float, ...] = (),
) -> list[list[tuple[int, tuple[Program, ...]]]]:
    """For each round of a period, the topology's or the averager's, the calls of `step` in it.

    Of each call: its elements, and the programs of node 0, or of all ranks if nodes differ.

    Args:
        strategy: has an averager.
        shapes: of the parameters.
        workers, workers_per_node: as of the network.
        is_even: whether all lines are alike.
        owned: the shares of owners; empty if they are equal.
    """
    averager, rhythm = strategy.averager, strategy.rhythm
    assert isinstance(averager, Averager), "one without rounds has no program"
    calls = [shapes * rhythm.copies] if averager.traits.whole_model or not rhythm.in_backward else ddp_buckets(shapes)
    # Equal buckets, as of repeated layers, are recorded once.
    made = {call: _node(averager, call, workers, workers_per_node, is_even, owned) for call in set(calls)}
    numels = {call: sum(shape.numel() for shape in call) for call in made}
    return [[(numels[call], made[call][i]) for call in calls] for i in range(len(made[calls[0]]))]


def _node(
    averager: Averager,
    shapes: Sequence[torch.Size],
    workers: int,
    workers_per_node: int,
    is_even: bool,
    owned: tuple[float, ...],
) -> list[tuple[Program, ...]]:
    """For each round of a period the programs of node 0; of all ranks if nodes differ.

    Where nodes do not matter, all workers do the same with peers as far away.
    """
    averager = planned(averager, workers)
    are_alike = is_even and is_uniform(averager) and is_circulant(averager, workers, workers_per_node)
    ranks, topology = range(workers_per_node if are_alike else workers), topology_of(averager)
    if topology is not None and not isinstance(topology, Hierarchical):
        return _gossiping(averager, topology, shapes, ranks, workers)
    traits = averager.traits
    if are_alike and traits.gives_one_mean and traits.period == 1 and not uses_nodes(averager):
        (first,) = record(averager, shapes, [0], workers, workers_per_node)
        if not first.sums_by_hosts:
            return [tuple(first.shifted(rank, workers) for rank in ranks)]
    if are_alike and has_leaders(averager):
        leader, *members = record(averager, shapes, range(min(2, workers_per_node)), workers, workers_per_node)
        return [(leader, *members * (workers_per_node - 1))]
    rounds = rounds_of(averager, workers)
    return [tuple(record(averager, shapes, ranks, workers, workers_per_node, owned, round)) for round in rounds]


def _gossiping(
    averager: Averager, topology: Topology, shapes: Sequence[torch.Size], ranks: Sequence[int], workers: int
) -> list[tuple[Program, ...]]:
    """For each round of the period the programs of these ranks.

    Workers with as many neighbours of the same weights do the same, each with its own; so one of them is recorded.
    """
    known: dict[tuple[int, tuple[tuple[float | None, ...], ...]], tuple[Program, list[int]]] = {}

    def program(rank: int, round: int) -> Program:
        near = topology.neighbours(rank, round, workers)
        peers = [*near.sends, *(peer for peer in near.receives if peer not in near.sends)]
        weights = tuple((near.sends.get(peer), near.receives.get(peer)) for peer in peers)
        kind = round % averager.traits.period, weights
        if kind not in known:
            known[kind] = record(averager, shapes, [rank], workers, round=round)[0], peers
        first, others = known[kind]
        return first.renamed(dict(zip(others, peers, strict=True)).__getitem__)

    return [tuple(program(rank, round) for rank in ranks) for round in rounds_of(averager, workers)]


def ddp_buckets(shapes: Sequence[torch.Size]) -> list[tuple[torch.Size, ...]]:
    """The buckets of DistributedDataParallel, in the order of backward: last parameters first, 1 MiB, then 25 MiB.

    Example:
        >>> [len(bucket) for bucket in ddp_buckets([torch.Size([1024, 1024])] * 8)]
        [1, 7]
    """
    buckets: list[tuple[torch.Size, ...]] = []
    current: list[torch.Size] = []
    limit = _FIRST_BUCKET_BYTES
    for shape in reversed(shapes):
        current.append(shape)
        if 4 * sum(s.numel() for s in current) >= limit:
            buckets.append(tuple(current))
            current, limit = [], _BUCKET_BYTES
    return [*buckets, tuple(current)] if current else buckets


def tensors_of(num_parameters: int) -> tuple[torch.Size, ...]:
    """Shapes of a model of so many parameters: square matrices of 2048, one or two more matrices, and a vector.

    Dimensions of 64 and more are multiples of 64, as in most models, but for the vector's.

    Example:
        >>> tensors_of(10)
        (torch.Size([3, 3]), torch.Size([1]))
    """
    require(num_parameters >= 1, f"a plan needs at least one parameter, got {num_parameters}")
    side = min(2048, isqrt(num_parameters))
    columns = side if side < 64 else side - side % 64
    whole, rest = divmod(num_parameters, columns * columns)
    rows, left = divmod(rest, columns)
    others = [torch.Size([n, columns]) for n in (rows - rows % 64, rows % 64) if n]
    return (*[torch.Size([columns, columns])] * whole, *others, *[torch.Size([left])] * bool(left))
