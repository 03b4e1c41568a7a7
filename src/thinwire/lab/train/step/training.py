"""The state of a training run, and one step: forward, backward, clip, optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ....algorithm import require
from ....comm import Communicator, Layout, laid_out
from ....comm.tcp import TcpCommunicator
from ....comm.transport import connect
from ....membership import mean_of
from ....plan import TracedCommunicator
from ....strategy import AveragerAttachment
from ..config import RunConfig
from ..data import Batch, Dataset
from ..models import apply
from ..models.base import within_memory
from ..optimize import DGCSGD, set_learning_rate
from .virtual import VirtualTime

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Training:
    """A worker's model, optimizer and strategy, and the rest of the state that steps change.

    Args:
        config: of the run.
        model: the module; checkpoints use its keys.
        forward: the same module, compiled if the configuration says so.
        optimizer: a `torch.optim` optimizer.
        scaler: the loss scaler; enabled only for fp16.
        strategy: at work on the model.
        own_comm: its communicator, where `prepare` has opened it.
        carried: the state of a recurrent model after the last batch; None at the start of an epoch.
        virtual: the clock of the modelled network.
        in_order: whether the data are, so that a recurrent model carries its state from batch to batch.

    Attributes:
        multiples: the learning rate of each parameter group, in that of the configuration.
    """

    config: RunConfig
    model: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    strategy: AveragerAttachment
    own_comm: Communicator | None = None
    carried: Any = None
    virtual: VirtualTime = field(default_factory=VirtualTime)
    in_order: bool = False

    def __post_init__(self) -> None:
        rate = self.config.optimizer.learning_rate
        self.multiples = [group["lr"] / rate for group in self.optimizer.param_groups]

    def detach(self) -> None:
        """Detach the strategy, and close the communicator that was opened for it."""
        self.strategy.detach()
        if self.own_comm is not None:
            self.own_comm.close()

    def step(self, batches: list[Batch], weight: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """One step on these batches of this worker, its loss times `weight`; returns the scores and labels of each.

        If the strategy skips the step because a gradient was not finite, buffers such as running statistics and the recurrent
        state that are not finite return to their values before the step. Otherwise one bad batch would spoil them for good.
        """
        num_skipped, carried = self.strategy.num_skipped, self.carried
        buffers = [(b, b.clone()) for b in self.model.buffers() if b.is_floating_point()]
        # A test in between has set it to evaluation mode.
        self.model.train()
        self.optimizer.zero_grad()
        answers = []
        weight *= self.config.optimizer.loss_factor(self.learning_rate) / len(batches)
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            # Only the last backward pass of a step averages gradients.
            with nullcontext() if last else self.strategy.no_sync():
                answers.append(self._backward(batch.to(self.device), weight))
        if self.config.clip_norm is not None:
            # The limit is for the true gradient, not for that of the scaled loss.
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.scaler.step(self.optimizer)  # gossip averages parameters in here
        self.scaler.update()
        if self.strategy.num_skipped > num_skipped:
            for buffer, before in buffers:
                if not buffer.isfinite().all():
                    buffer.copy_(before)
            parts = [part for part in tree_leaves(self.carried) if isinstance(part, Tensor)]
            self.carried = self.carried if all(part.isfinite().all() for part in parts) else carried
        return answers

    def _backward(self, batch: Batch, weight: float) -> tuple[Tensor, Tensor]:
        with self._autocast():
            scores, state = apply(self.forward, batch.inputs, self.carried)
            self.carried = state if self.in_order else None
            loss = self.config.loss(scores, batch.labels)
        self.virtual.pass_forward()
        self.scaler.scale(loss * weight).backward()  # gradients are averaged in here
        return scores.detach(), batch.labels

    def _autocast(self) -> torch.autocast | nullcontext:
        dtype = DTYPES.get(self.config.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step, to be multiplied by each group's multiple."""
        return float(self.optimizer.param_groups[0]["lr"]) / self.multiples[0]

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        set_learning_rate(self.optimizer, value, self.multiples)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    # ---- what a checkpoint holds ----

    def shared_state(self) -> dict[str, Any]:
        """The part that is equal on all workers. Within `average_model`, and if models differ, it holds the mean model."""
        model = {"model": self.model.state_dict()}
        return model if self.strategy.models_differ else model | {"optimizer": self.optimizer.state_dict()}

    def own_state(self) -> dict[str, Any]:
        """The part that differs between workers."""
        averager = self.strategy.state_dict()
        model = self.model.state_dict()
        own = {
            "averager": averager,
            "scaler": self.scaler.state_dict(),
            "carried": self.carried,
            "random": random_state(),
        }
        if self.strategy.models_differ:
            return own | {"model": model, "optimizer": self.optimizer.state_dict()}
        return own | {"buffers": {name: model[name] for name, _ in self.model.named_buffers() if name in model}}

    def redistribute(self, shared: dict[str, Any], owns: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The own part of worker `rank` of `size`, from the shared part and the own parts of all workers before.

        Own memory of averagers is redistributed, so that late gradients keep their weight. Where models differ, all workers go
        on from the mean model, with the mean of the optimizers' states. Running statistics become their mean. A recurrent
        model starts afresh, and workers that there were not before keep the random state that they have.

        Args:
            shared: the result of `shared_state`.
            owns: the results of `own_state` on all workers, in rank order.
            rank: of this worker.
            size: the new number of workers.
        """
        own = owns[rank % len(owns)]
        averager = {key: state for one in owns for key, state in one["averager"].items()}
        random = own["random"] if rank < len(owns) else random_state()
        redistributed = own | {"averager": averager, "carried": None, "random": random}
        if self.strategy.models_differ:
            return redistributed | {"model": shared["model"], "optimizer": mean_of([one["optimizer"] for one in owns])}
        return redistributed | {"buffers": mean_of([one["buffers"] for one in owns])}

    def load_state(self, shared: dict[str, Any], own: dict[str, Any], among: tuple[int, int] = (0, 1)) -> None:
        """Restore the results of `shared_state` and `own_state`, in place.

        Args:
            shared, own: the results.
            among: in elastic runs, as in `AveragerAttachment.load_state_dict`.

        Raises:
            ValueError, RuntimeError, KeyError: they belong to another model, optimizer or averager.
        """
        whole = own if self.strategy.models_differ else shared
        self.model.load_state_dict(whole["model"] | own.get("buffers", {}))
        self.optimizer.load_state_dict(whole["optimizer"])
        self.scaler.load_state_dict(own["scaler"])
        self.strategy.load_state_dict(own["averager"], among)
        self.carried = moved(own["carried"], self.device)
        set_random_state(own["random"])


def random_state() -> dict[str, Tensor]:
    """The state of PyTorch's global generators. A run uses no other global generator."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {"cpu": torch.get_rng_state()} | cuda


def set_random_state(saved: dict[str, Tensor]) -> None:
    """Restore the result of `random_state`; the GPU's part only if there is a GPU."""
    torch.set_rng_state(saved["cpu"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])


def moved(state: Any, device: torch.device) -> Any:
    """Move a recurrent model's state (a tensor, a tuple of such, or None) to a device.

    Raises:
        TypeError: it is something else.

    Example:
        >>> moved((torch.ones(1), None), torch.device("cpu"))
        (tensor([1.]), None)
    """
    if isinstance(state, tuple):
        return tuple(moved(part, device) for part in state)
    if not (state is None or isinstance(state, Tensor)):
        raise TypeError(f"the state of a recurrent model is a tensor, tensors or None, got {type(state).__name__}")
    return state if state is None else state.to(device)


def prepare(
    config: RunConfig,
    data: Dataset,
    device: torch.device,
    comm: Communicator | None = None,
    meeting: Communicator | None = None,
    layout: Layout | None = None,
) -> Training:
    """Build model, optimizer and strategy; the seed makes the model equal on all workers, which call this together.

    Args:
        config, data, device: of the run.
        comm: connects the workers for averaging; None opens a communicator, with the run's time limit.
        meeting: connects the workers for all else; over our own connections, they meet over it to open the communicator.
        layout: of the communicator that is opened; None for the launcher's ranks.

    Raises:
        ValueError: strategy, model and optimizer do not fit together.
    """
    model, optimizer = built(config, data, device)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    check_optimizer(config)
    virtual = VirtualTime.of(config, model, device)  # its hooks run before those of the averager
    own_comm = _communicator(config, device, meeting, layout) if comm is None else None
    in_use = scaler if scaler.is_enabled() else None
    try:
        strategy = config.parsed_strategy().attach(
            model, optimizer, comm=comm or own_comm, scaler=in_use, seed=config.seed
        )
    except BaseException:
        if own_comm is not None:
            own_comm.close()
        raise
    # A compiled module is a module, although `torch.compile` promises only a callable.
    compiled = cast(nn.Module, torch.compile(model)) if config.compile else model
    return Training(
        config, model, compiled, optimizer, scaler, strategy, own_comm, virtual=virtual, in_order=data.in_order
    )


def built(
    config: RunConfig, data: Dataset, device: torch.device | str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with the seed's weights, and its optimizer.

    Raises:
        ValueError: they are none, or no parameter is trained.
    """
    torch.manual_seed(config.seed)
    with within_memory(config.model):
        model = config.model.build(data.num_classes)
    name = type(config.model).__name__
    require(isinstance(model, nn.Module), f"{name}.build must return an nn.Module, got {model!r:.100}")
    require(any(p.requires_grad for p in model.parameters()), f"the model of {name} has no parameter that is trained")
    optimizer, name = config.optimizer.build(model.to(device)), type(config.optimizer).__name__
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    require(is_optimizer, f"{name}.build must return a torch.optim.Optimizer, got {optimizer!r:.100}")
    return model, optimizer


def _communicator(
    config: RunConfig, device: torch.device, meeting: Communicator | None, layout: Layout | None
) -> Communicator:
    """Another one beside the meeting, with the run's time limit; one that counts virtual seconds if there is a network."""
    comm: Communicator
    if isinstance(meeting, TcpCommunicator):
        comm = meeting.another()
    else:
        comm = connect(config.transport, timeout_seconds=config.timeout, device=device)
    comm = comm if layout is None else laid_out(comm, layout)
    network = config.parsed_network()
    return comm if network is None else TracedCommunicator(comm, network, measures=config.compute is None)


def check_optimizer(config: RunConfig) -> None:
    """Check that clipping and momentum are left to the averager where it accumulates gradients (momentum), and only there.

    Raises:
        ValueError: `clip_norm` would clip what is accumulated; or the optimizer leaves momentum to an averager without it, and
            training would have no momentum at all.
    """
    averager, optimizer = config.parsed_strategy().averager, config.optimizer
    has_momentum = averager.traits.has_momentum
    require(
        config.clip_norm is None or not has_momentum,
        f"clip_norm {config.clip_norm} would clip gradients that {averager!r} has accumulated already; "
        "leave it out and clip there: Mean(..., clip=ClipByNorm(...))",
    )
    require(
        has_momentum or not (isinstance(optimizer, DGCSGD) and optimizer.momentum),
        f"DGCSGD leaves momentum to the averager, and {averager!r} has none; choose --optimizer.kind SGD, or for no momentum "
        "--optimizer.momentum 0",
    )
