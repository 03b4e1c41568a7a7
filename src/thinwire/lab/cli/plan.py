"""`thinwire plan`."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...algorithm import require
from ...suggestion import named
from .options import parsed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...plan import Method, Network, Prediction

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_MOST_PARAMETERS = 10**15
_MOST_WORKERS = 10_000  # which take a minute; the time grows with their number
_NUM_CLASSES = 10  # of a recipe's model; its data is not read, and the last layer is small


@dataclass(frozen=True)
class PlanOptions:
    """Predict the training step of each method on a network, the fastest first: thinwire plan --workers 16 --rate 1gbit

    The model is a number of parameters, a RECIPE whose name comes first, or --model.
    """

    workers: int = 16
    """Number of workers."""
    per_node: int = 1
    """Consecutive ranks that share a node and its network card."""
    rate: str = "1gbit"
    """Rate between nodes, in bits per second."""
    latency: str = "0.1ms"
    """Latency of one message between nodes."""
    inner_rate: str = "80gbit"
    """Rate inside a node."""
    inner_latency: str = "10us"
    """Latency of one message inside a node."""
    cores: float | None = None
    """Cores of a node, shared by two threads of each of its workers; by default each thread has its own."""
    parameters: str = "100M"
    """Number of parameters, such as 25M or 1.5B."""
    model: str | None = None
    """A function that returns the model, as module:function, instead of a number of parameters. The module may be a file of the
    current folder."""
    optimizer: str | None = None
    """Show what was measured of the accuracy with this optimizer: sgd, adam (or adamw) or muon; by default, with any."""
    compute: float = 0.25
    """Seconds of computation in one step, without a network."""
    strategies: tuple[str, ...] = ()
    """Strategies to compare with the methods, in Python's notation, such as "Gradients(Mean(QSGD(bits=2)))"."""
    measure: bool = False
    """Measure the codecs on this machine first. Under torchrun also the links; with --model also the computation, if its module
    has a function `inputs` that returns the model's arguments, or its only one."""
    json: Path | None = None
    """Write the predictions to this file; thinwire.parse(row["strategy"]) rebuilds a row's strategy."""
    figure: Path | None = None
    """Draw the step by bandwidth to this file (.png, .svg or .pdf), and by number of workers to NAME-workers beside it."""


def plan_command(options: list[str]) -> None:
    """Predict the step of each method, and print a table."""
    recipe = options[0] if options and not options[0].startswith("-") else None
    asked = parsed(PlanOptions, options[recipe is not None :], "thinwire plan [RECIPE]")
    require(
        recipe is None or asked.model is None,
        f"the recipe {recipe} has a model of its own; leave out the recipe or --model",
    )
    counted = asked.parameters == PlanOptions.parameters or (recipe is None and asked.model is None)
    require(counted, f"the model has as many parameters as it has; leave out --parameters {asked.parameters}")
    from ...plan import Speeds, Workload, methods, predict
    from ..bench.rows import check_writable, write_json
    from ..report.plan_figures import draw_by_rate, draw_by_workers

    check_writable(asked.json, figure=asked.figure)
    network, speeds, compute, own = _network(asked), Speeds(), asked.compute, _own_methods(asked.strategies)
    build = _recipe_model(recipe) if recipe is not None else _own_model(asked.model)
    model = parse_count(asked.parameters) if build is None else _parameters(build)
    if asked.measure:
        from ..bench.plan import measured_compute, measured_network, measured_speeds

        network, speeds = measured_network(network), measured_speeds(Workload.of(model, compute).numel, own)
        inputs = _inputs(asked.model)
        if build is not None and inputs is not None:
            compute = measured_compute(build(), inputs)
    if os.environ.get("RANK", "0") != "0":  # the others were needed for the measurement only
        return
    workload = Workload.of(model, compute)
    candidates = [*methods(network.workers_per_node), *own]
    predictions = predict(model, compute, network, speeds, candidates, asked.optimizer)
    _print(predictions, workload.numel, compute, network)
    write_json(asked.json, [asdict(p) for p in predictions])
    if asked.figure is not None:
        beside = asked.figure.with_stem(f"{asked.figure.stem}-workers")
        draw_by_rate(asked.figure, workload, network, speeds, candidates)
        draw_by_workers(beside, workload, network, speeds, candidates)
        print(f"  {asked.figure}, {beside}")


def parse_count(text: str) -> int:
    """The number in a text such as "100M".

    Example:
        >>> parse_count("1.5B")
        1500000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower())
    number = 0.0 if match is None else float(match[1]) * _COUNTS[match[2]]
    if not 0.5 < number <= _MOST_PARAMETERS:
        raise ValueError(f"cannot read the number of parameters {text!r}; write it such as 25M, at most 1000000B")
    return round(number)


def _network(asked: PlanOptions) -> Network:
    from ...plan import Link, Network

    fits = asked.workers <= _MOST_WORKERS
    require(fits, f"a plan has at most {_MOST_WORKERS:,} workers, got {asked.workers:,}; methods scale on from there")
    inner = Link.of(asked.inner_rate, asked.inner_latency)
    return Network(
        asked.workers, asked.per_node, outer=Link.of(asked.rate, asked.latency), inner=inner, cores=asked.cores
    )


def _own_methods(notations: Sequence[str]) -> list[Method]:
    """A method of each strategy, of whose accuracy and memory nothing is known."""
    from ...attaching import strategy_of
    from ...plan import Method
    from ...strategy import Averaging

    found: dict[str, Method] = {}
    for text in notations:
        strategy = strategy_of(text)
        require(
            isinstance(strategy, Averaging),
            f"--strategies: a plan predicts strategies that have an averager, got {text!r}",
        )
        assert isinstance(strategy, Averaging)
        found[repr(strategy)] = Method(repr(strategy), strategy, state_floats=None)
    return list(found.values())


def _recipe_model(name: str) -> Callable[[], nn.Module]:
    from ..recipes import recipes

    config = named(recipes(), name, "recipe", "thinwire train --list").config
    return lambda: config.model.build(_NUM_CLASSES)


def _own_model(notation: str | None) -> Callable[[], nn.Module] | None:
    """What makes the model of `package.module:function`; None for None."""
    if notation is None:
        return None
    module, colon, function = notation.partition(":")
    if not colon:
        raise ValueError(f"--model is written package.module:function, got {notation!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, which the installed command does not
    try:
        build: Callable[[], nn.Module] = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import --model {notation}: {error}") from None
    require(callable(build), f"--model {notation} must be a function that returns the model, got {build!r:.100}")
    try:
        inspect.signature(build).bind()
    except (TypeError, ValueError) as error:
        raise ValueError(f"--model {notation} must be a function without arguments: {error}") from None
    return lambda: _module(build(), notation)


def _module(built: Any, notation: str) -> nn.Module:
    from torch import nn

    require(isinstance(built, nn.Module), f"--model {notation} must return the model, an nn.Module, got {built!r:.100}")
    module: nn.Module = built
    return module


def _inputs(notation: str | None) -> Callable[[], Any] | None:
    """The function `inputs` of the module that makes the model, if it has one."""
    return None if notation is None else getattr(import_module(notation.partition(":")[0]), "inputs", None)


def _parameters(build: Callable[[], nn.Module]) -> list[Tensor]:
    """The parameters of a model that are trained, without values."""
    import torch

    with torch.device("meta"):
        return [p for p in build().parameters() if p.requires_grad]


def _print(predictions: list[Prediction], numel: int, compute: float, network: Network) -> None:
    from ..bench.rows import print_table

    rows = sorted(predictions, key=lambda p: not p.is_near)  # else the fastest first, as they are
    lines = [
        [
            p.method,
            f"{p.step_seconds:.3g}",
            _decimal(p.bytes_out / 1e6),
            f"{p.speedup_over_fp32:.1f}",
            f"{p.speedup_over_bf16:.1f}",
            "" if p.memory_bytes is None else _decimal(p.memory_bytes / 1e6),
            p.accuracy,
        ]
        for p in rows
    ]
    outer = f"{8 * network.outer.bytes_per_second / 1e6:.4g} Mb/s and {1e3 * network.outer.latency_seconds:.3g} ms"
    nodes = f" on {network.nodes} node{'s' * (network.nodes > 1)}" if network.workers_per_node > 1 else ""
    print_table(
        f"{_decimal(numel / 1e6)} million parameters, {network.workers} workers{nodes}, {outer} between them, "
        f"{compute:.3g} s of computation",
        ["method", "step,\ns", "MB\nout", "times\nfp32\nspeed", "times\nbf16\nspeed", "MB\nkept", "accuracy"],
        lines,
        f"Predicted, not measured; methods within 2 % of dense training first. {verdict(predictions)}",
        num_texts=1,
    )
    print('What to type: tw.attach(model, optimizer, "..."), or thinwire train RECIPE --strategy "..."')
    short = [p for p in rows if p.method != p.strategy]  # the others were typed
    width = max(len(p.method) for p in short)
    for p in short:
        print(f"  {p.method:{width}}  {p.strategy}")


def _decimal(value: float) -> str:
    """Three digits or more, never an exponent.

    Example:
        >>> [_decimal(value) for value in (0.00505, 2.34567, 51950.1)]
        ['0.00505', '2.35', '51,950']
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def recommended(predictions: list[Prediction]) -> Prediction:
    """Dense where nothing near it is `WORTH` times as fast, as it changes nothing; else the fastest near dense."""
    from ...plan.methods import BF16, DDP
    from ..report.plan_figures import WORTH

    # Predictions begin with the fastest, and always have both dense methods.
    near = [p for p in predictions if p.is_near or p.method in (DDP, BF16)]
    dense = {p.method: p for p in near if p.method in (DDP, BF16)}
    for name in (DDP, BF16):
        if dense[name].step_seconds <= WORTH * near[0].step_seconds:
            return dense[name]
    return near[0]


def verdict(predictions: list[Prediction]) -> str:
    """Which method to take, and which is the fastest."""
    from ...plan.methods import BF16, DDP
    from ..report.plan_figures import WORTH

    taken, fastest = recommended(predictions), predictions[0]
    text = f"{taken.method} is {taken.speedup_over_fp32:.1f} times as fast as {DDP}"
    if taken.method in (DDP, BF16):
        text = f"Dense wins: nothing near it is {100 * WORTH - 100:.0f} % faster than {taken.method}"
    if WORTH * fastest.step_seconds < taken.step_seconds:
        return f"{text}; {fastest.method} is {fastest.speedup_over_fp32:.1f} times as fast, but read about its accuracy first."
    return f"{text}."
