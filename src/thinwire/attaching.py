"""`attach`: sets a strategy to work on a model and its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .algorithm import require
from .average import Averager, Mean, Pairwise
from .average.base import averager_of_part
from .comm import Communicator, Group, Layout
from .notation import parse
from .plan.layout import measured_layout
from .strategy import Attachment, Gradients, Strategy
from .strategy.advice import log_choice
from .strategy.gradients.gradients import default_averager, num_workers
from .strategy.model.ddp import wrapped_ddp
from .strategy.told import told_to_others
from .topology import Topology

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # `default` is in `typing` from Python 3.13 on

    A = TypeVar("A", bound=Attachment, default=Attachment)  # a strategy as text does not tell the type of its handle


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: Strategy[A] | str | None = None,
    *,
    comm: Communicator | None = None,
    replicas: Group | None = None,
    scaler: Any = None,
    seed: int = 0,
    layout: Layout | Literal["measured"] | None = None,
) -> A:
    """Set a strategy to work on a model and its optimizer. All workers call it together.

    Add one line to an ordinary training loop. No module is wrapped that was not wrapped before, so `model.state_dict()` keeps
    its keys. Errors about the configuration come on all workers together, and name what differs and on which rank.

    Args:
        model: a plain module, one in `DistributedDataParallel`, or one under `fully_shard`. Where each worker has a model of
            its own, DDP averages nothing until the strategy is detached, which leaves the mean of all workers.
        optimizer: any `torch.optim` optimizer over parameters of the model, with or without a closure, or what Accelerate's
            `prepare` returned. None suits strategies of gradients and shards.
        strategy: such as `Gradients(Mean(QSGD(bits=4)))`, or its notation as text. None takes this one, 8 bits under Muon, or
            dense gradients for one worker, and says so; docs/first-lines.md has what they reached on small tasks.
        comm: how to communicate; by default a process group of its own over all workers, or over DDP's. Strategies that
            share one wait for each other's rounds, and so do collectives of your own. Call those outside of the backward
            pass, in which rounds of gradients are under way.
        replicas: which workers hold replicas, as a process group or one dimension of a mesh; None for all. A model under
            `fully_shard(model, mesh=mesh["shard"])` needs `replicas=mesh["replicate"]`; see "Sharded models" in the guide.
        scaler: the `torch.amp.GradScaler` in use: memory stays in unscaled units, and a worker whose step it skips takes part
            in the round all the same.
        seed: of the random numbers of codecs and averagers; the same on all workers.
        layout: how workers lie on the lines, of the communicator that is made here. "measured" measures the lines first, which
            takes about ten seconds. The handle's `comm.layout` then has it: a run that goes on from saved state gives this one,
            because states belong to its ranks. None: the ranks of the process group, each with an equal part of the work.

    Returns:
        The strategy at work: a handle with `ledger`, `seconds`, `state_dict`, `load_state_dict`, `detach` and what the strategy
        adds; also a context manager, which detaches at its end.

    Raises:
        ValueError: the strategy is none, or does not suit the model: a parameter takes part in another strategy, the model is
            on the meta device, parameters share memory, or it is sharded without `replicas`; or an elastic communicator that
            carries another strategy. On all workers together, where strategies, seeds, tensors or the layouts of shards
            differ.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     with tw.attach(model, optimizer, "Local(Mean(), every=30, outer=OuterSGD())", comm=comm) as handle:
        ...         return handle.strategy == tw.diloco()
        >>> tw.LocalWorld(1).run(worker)
        [True]
    """
    require(
        layout is None or layout == "measured" or isinstance(layout, Layout),
        f'layout must be a Layout, "measured" or None, got {layout!r}',
    )
    options: dict[str, Any] = {"comm": comm, "replicas": replicas, "scaler": scaler, "seed": seed}
    options["layout"] = measured_layout if layout == "measured" else layout
    if strategy is not None:
        ddp = wrapped_ddp(model)
        # A part may be registered, or a package installed, on some workers alone.
        with told_to_others(comm, replicas if ddp is None else ddp.process_group):
            chosen = strategy_of(strategy)
        return chosen.attach(model, optimizer, **options)
    default = Gradients(default_averager(num_workers(model, comm, replicas), optimizer))
    handle = default.attach(model, optimizer, **options)
    log_choice(default, handle.comm, optimizer)
    return handle  # type: ignore[return-value]  # without a strategy, A is its default, `Attachment`


def strategy_of(value: Strategy[A] | str) -> Strategy[A]:
    """The strategy itself, or the one whose notation a text is.

    Raises:
        ValueError: the text cannot be read, or it is no strategy; the message has one to paste, in quotes.

    Example:
        >>> strategy_of("TopK(0.01)")
        Traceback (most recent call last):
        ValueError: strategy: TopK(0.01) is a codec; write "Gradients(Mean(TopK(0.01), ErrorFeedback()))"
    """
    read = parse(value) if isinstance(value, str) else value
    text = value.strip() if isinstance(value, str) else repr(value)
    if not isinstance(read, Strategy):
        raise ValueError(f"strategy: {_meant(read, text)}")
    return read


def _meant(value: Any, text: str) -> str:
    """What a value is that is no strategy, and what to write in its place."""
    if isinstance(value, torch.optim.Optimizer):
        return (
            f"{type(value).__name__} is an optimizer; it comes before the strategy: attach(model, optimizer, strategy)"
        )
    part = averager_of_part(value, text)
    if part is not None:
        name = "Gossip" if isinstance(value, Topology) else "Gradients"
        return f'{text} is a {part[0]}; write "{name}({part[1]})"'
    if not isinstance(value, (Averager, Pairwise)):
        return f'expected a strategy such as "Gradients(Mean())", got {text}'
    name = "Asynchronous" if not value.traits.has_rounds else "Gradients" if value.traits.gives_one_mean else "Gossip"
    lacks_memory = isinstance(value, Mean) and value.cautions
    return f'{text} is an averager; write "{name}({text[:-1] + ", ErrorFeedback())" if lacks_memory else text})"'
