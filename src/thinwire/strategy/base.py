"""Strategies at work: what `attach` returns. `strategy.py` has the configuration.

`Attachment` is what all of them offer. `AveragerAttachment` is the base of those with an averager, which works on the
parameters of one model. It
    owns its communicator, unless the user gave one;
    attaches to its parameters and detaches again; a parameter belongs to one strategy at most (`attached.py`);
    counts bytes (`ledger`) and time (`seconds`);
    averages each shard of a sharded model with the same shard of the other replicas (`model/shards.py`);
    tells schedules the epoch;
    saves its state with the worker's identity, and refuses another worker's state;
    continues the states of all workers on another number of workers;
    handles steps that are not finite (`nonfinite.py`).

A derived class defines:
    `call`                       the name of the strategy, for messages
    `__init__`, `attach`         check what one worker can check alone; then connect within `self._attaching()`
    `_state`                     the averager's state
    `_record`, `_loaded`         the state that it saves, and what follows when that is restored
    `_averaged`                  the averager's states, with the tensors of each
    `_share`                     what a worker that joins an elastic run gets, and how it takes that over
    `_ready`                     wait until the communicator is free for the caller
    `_finish`, `_abandon`        end what is in flight: with the other workers; without them after an error, also of `_finish`
    `self._transaction`          for elastic runs: `attempt()` around the messages of a round, then `end(success)`; the averager
                                 commits if that returns True. A strategy without them says so by `has_common_steps`
    `self._on_detach(undo)`      called for each hook that it sets, with a function that removes the hook

Methods that make lasting tensors leave `torch.inference_mode`, in which users evaluate: training could not write into them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..algorithm import require, required
from ..average.base import Averager, NamedTensors
from ..comm import CommunicationError, Communicator, Layout, Ledger, ProcessGroupCommunicator, check, laid_out
from ..comm.handle import nothing
from ..membership import State, load_shared, redistribute, require_names, rewind, shared_part
from ..options import require_integer
from .advice import Advisor
from .attached import AVERAGED, BESIDE, require_free
from .identity import check_identity, describe_tensors, key_of
from .model.ddp import refuse_ddp
from .model.models import NamedParameters, check_model, check_one_device
from .model.optimizer_step import Arguments, refuse_in_backward
from .model.shards import Replica
from .nonfinite import NonfiniteSteps
from .strategy import Averaging, Runtime
from .told import told_to_others
from .transaction import Transaction

if TYPE_CHECKING:
    from typing_extensions import Self  # of `typing` from Python 3.11 on


class Attachment(ABC):
    """A strategy at work on one model; also a context manager, which detaches at its end."""

    _nonfinite: NonfiniteSteps
    """Counts the steps that were not finite; a derived class sets it."""

    @property
    @abstractmethod
    def ledger(self) -> Ledger:
        """The bytes that this worker sent and received, and what dense collectives would have sent."""

    @property
    @abstractmethod
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far, by phase."""

    @property
    def blocked_seconds(self) -> float:
        """Wall-clock seconds so far that the training has waited for other workers.

        Averagers wait in the phase "wait". Where that is beside the training, the strategy times a phase "blocked".
        """
        seconds = self.seconds
        return seconds.get("blocked", seconds.get("wait", 0.0))

    @property
    def num_skipped(self) -> int:
        """Number of steps that this handle has skipped because they were not finite. It is no part of `state_dict`."""
        return self._nonfinite.num_skipped

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This worker's state: tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    @abstractmethod
    def detach(self) -> None:
        """Stop averaging. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy of the model, such as a moving average or a file, takes no part: None is in the place of the strategy.

        A copied DDP, whose hooks hold the strategy, averages densely.
        """
        return type(None), ()


class _ForwardHook:
    """Calls a function before each forward pass; in a copy of the model, such as a moving average or a file, it calls none."""

    def __init__(self, call: Callable[[], None]):
        self._call = call

    def __call__(self, module: nn.Module, args: object) -> None:
        self._call()

    def __reduce__(self) -> tuple[type, tuple[Callable[[], None]]]:
        return type(self), (nothing,)


class AveragerAttachment(Attachment):
    """An averager that works on one model; see the module's text.

    Args:
        strategy: the configuration.
        model: the model.
        parameters: the parameters that take part, with their names.
        runtime: without a communicator, a new process group of the replicas, or of all workers, which `detach` closes.

    Attributes:
        is_detached: whether `detach` was called.

    Raises:
        ValueError: the model is on the meta device, its parameters share memory, or it is sharded without `replicas`.
    """

    call: ClassVar[str]
    _record: State
    _ignored: Collection[str] = ()
    """Names of trainable parameters that take no part because the user said so."""

    def __init__(
        self,
        strategy: Averaging[Attachment],
        model: nn.Module,
        parameters: NamedParameters,
        runtime: Runtime,
    ):
        comm, replicas = runtime.comm, runtime.replicas
        check_model(self.call, model)
        check_one_device(self.call, parameters)
        require(comm is None or replicas is None, f"{self.call}: comm and replicas both say which workers; give one")
        require(
            comm is None or runtime.layout is None,
            f"{self.call}: layout is for the communicator that is made here; give comm=laid_out(comm, layout) instead of both",
        )
        self._shards, self._replicas = Replica(self.call, model), replicas
        if comm is None and replicas is None:
            self._shards.require_replicas()
        self._shards.require_sharded_root()
        self._shards.require_same_copies(strategy.averager)
        self.strategy, self.averager, self.parameters = strategy, strategy.averager, parameters
        self._model, self._comm, self._owns_comm, self._seed = model, comm, comm is None, runtime.seed
        self._layout, self._scaler = runtime.layout, runtime.scaler
        self._nonfinite = NonfiniteSteps(self.call, strategy.on_nonfinite, strategy.max_nonfinite)
        self._state: Any = None
        self._undo = ExitStack()
        self.is_detached = False
        if comm is not None and comm.is_elastic:
            self._require_elastic()

    # ---- what users see ----

    @property
    def comm(self) -> Communicator:
        """The communicator of this strategy."""
        return required(self._comm, f"{self.call}: not connected yet; the first backward pass connects the workers")

    @property
    def ledger(self) -> Ledger:
        """The bytes that this worker sent and received, and what a dense all-reduce would have sent."""
        return self.comm.ledger

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far, by phase."""
        return dict(self._state.clock.seconds)

    def diagnostics(self) -> dict[str, float]:
        """What the averager found out or chose in the last rounds, by name: see its `diagnostics`.

        With several states, as under fragments, the names of each come behind its number: "2/bits".
        """
        self._ready()
        found = [self.averager.diagnostics(state) for state, _ in self._averaged()]
        if len(found) == 1:
            return found[0]
        return {f"{i}/{name}": value for i, one in enumerate(found) for name, value in one.items()}

    @property
    def phases_in_step(self) -> tuple[str, ...]:
        """Which phases of `seconds` lie within the time of a training step, not beside it."""
        return ("compensate", "encode", "exchange", "wait", "decode")

    @property
    def models_differ(self) -> bool:
        """Whether each worker has a model of its own."""
        return self.strategy.models_differ

    def set_epoch(self, epoch: int) -> None:
        """Tell schedules such as `GeometricWarmup` which epoch begins. All workers call it; with a quorum each when it likes.

        Raises:
            ValueError: on all workers, if their epochs differ.
            CommunicationError: a worker does not call it.
        """
        require_integer("epoch", epoch, 0)
        self._ready()
        # Elastic workers are made equal instead, and those with a quorum are at different steps.
        if not self.comm.is_elastic and not self.strategy.counts_commits:
            self.comm.check_agreement({"epoch": epoch})
        self._advisor.epoch_begins()
        for state, _ in self._averaged():
            self.averager.set_epoch(state, epoch)

    def on_all_shards(self, names: Iterable[str]) -> set[str]:
        """Those of the names that all workers of this replica passed, which call it together."""
        return self._shards.common(names)

    def settle(self) -> None:
        """Wait until nothing of this worker is in flight. Changes no parameters."""
        self._ready()

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context of a backward pass after which another one of the same step follows; gradients only add up."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, under a key with its rank. Workers differ, and each saves and loads its own state.

        Save it in a file for each worker, or with `torch.distributed.checkpoint`, which keeps one value for each key.

        Returns:
            `{"rank3": {"identity": ..., ...}}`: tensors by parameter name, and plain values.
        """
        self._ready()
        return {key_of(self.comm.rank): {"identity": self._identity()} | self._record.state_dict()}

    @torch.inference_mode(False)
    def load_state_dict(self, saved: dict[str, Any], among: tuple[int, int] = (0, 1)) -> None:
        """Restore what this worker's `state_dict` returned, or go on from the states of more or fewer workers.

        Then `saved` holds the states of all of them, as in `{**state_of_rank_0, **state_of_rank_1, ...}`. What workers
        had each for themselves is redistributed; see `thinwire.membership`. Where models differ between workers, give
        every worker the mean model.

        A worker of an elastic run loads before its first round, and does not know how many there will be. It loads what it
        returned itself, on any number of workers.

        Args:
            saved: what `state_dict` returned.
            among: in elastic runs, this worker's place among those that load the same `saved` and share what is in it, and
                their number.

        Raises:
            ValueError: a state is missing, or of another worker or another configuration.
        """
        self._ready()
        is_elastic = self.comm.is_elastic
        entries = check_identity(self.call, saved, self._identity(), is_elastic)
        owners = [(entry["identity"]["rank"], entry["identity"]["world_size"]) for entry in entries]
        states = [{name: value for name, value in entry.items() if name != "identity"} for entry in entries]
        as_many = owners[0][1] == self.comm.size
        if is_elastic:
            redistribute(self._record, states, *among, owners)
        elif as_many:
            # As many workers as before go on bit for bit, each from its own state.
            rewind(self._record, states[0])
        else:
            redistribute(self._record, states, self.comm.rank, self.comm.size)
        self._loaded(redistributed=is_elastic or not as_many)

    @torch.inference_mode(False)
    def detach(self) -> None:
        """Stop averaging, remove all hooks, and close the communicator if the strategy owns it.

        Calling it again does nothing. While an exception propagates, as in a `finally`, it waits for no other worker.
        """
        if self.is_detached:
            return
        self.is_detached = True  # first, so that an error below does not detach twice
        error = sys.exc_info()[1]
        try:
            if error is None:
                self._finish()
        except BaseException as failed:  # such as Ctrl-C while it waits
            error = failed
            raise
        finally:
            if error is not None:
                self._undo.callback(self._abandon, error)  # the first of them to be called
            AVERAGED.release(self)
            self._undo.close()
            self._shards.close(waits=error is None)
            if self._owns_comm and self._comm is not None:
                self._comm.close() if error is None else self._comm.abandon()

    # ---- what a derived class defines ----

    @abstractmethod
    def attach(self) -> None:
        """Connect the workers, and set the hooks."""

    @abstractmethod
    def average_model(self, comm: Communicator | None = None) -> AbstractContextManager[None]:
        """Context in which parameters and buffers hold their means over all workers, which enter it together.

        Args:
            comm: how to average; by default the strategy's communicator, whose ledger then counts it.
        """

    def _loaded(self, redistributed: bool) -> None:
        """Called once `_record` is loaded; it may be from another number of workers."""

    @abstractmethod
    def _averaged(self) -> list[tuple[Any, NamedTensors]]:
        """The averager's states, with the tensors of each."""

    def _share(self) -> None:
        """Let a worker that joins get the model and what workers share; own memory starts at zero.

        Buffers, such as running statistics, are each worker's own between two means.
        """
        record, model, is_common = self._record, self._model, self.averager.traits.gives_one_mean
        self._share_part("averager", lambda: shared_part(record), lambda part: load_shared(record, part), is_common)
        buffers = {name for name, _ in model.named_buffers()}

        def saved(are_buffers: bool) -> dict[str, Any]:
            return {name: value for name, value in model.state_dict().items() if (name in buffers) == are_buffers}

        def load(are_buffers: bool, part: dict[str, Any]) -> None:
            require_names(saved(are_buffers), part, "model")
            # Not strict, because parameters and buffers come apart; the names were checked above.
            model.load_state_dict(part, strict=False)

        self._share_part("parameters", partial(saved, False), partial(load, False), is_common)
        self._share_part("buffers", partial(saved, True), partial(load, True), is_common=False)

    def _ready(self) -> None:
        """Wait until no round of this strategy is under way."""

    @abstractmethod
    def _finish(self) -> None:
        """End what is in flight, with the other workers."""

    @abstractmethod
    def _abandon(self, error: BaseException) -> None:
        """Abort what is in flight because of `error`, without waiting for other workers."""

    def before_step(self, optimizer: Optimizer, arguments: Arguments) -> Arguments:
        """Called by the hook of `attached.py` before each step of an optimizer over these parameters."""
        if self._comm is not None:
            check.own_process(self._comm)
        refuse_in_backward(self.call, optimizer)
        if self._advisor.before_step(optimizer):
            refuse_ddp(self.call, self._model)  # a part may have been wrapped since
            self._warn_of_others(optimizer)
        self._shards.reshard()
        return self._before_optimizer_step(optimizer, arguments)

    def require_in_place(self, stepped: Collection[int]) -> None:
        """Raise a ValueError if an optimizer steps on parameters that the model has got since it was attached.

        Args:
            stepped: the `id`s of the optimizer's parameters, of which none is attached.
        """
        for name, p in self._model.named_parameters():
            if id(p) in stepped and p.requires_grad and name not in self._ignored and id(p) not in BESIDE:
                is_new = all(name != attached for attached, _ in self.parameters)
                raise ValueError(
                    f"{self.call}: parameter {name!r} was {'added or unfrozen' if is_new else 'replaced'} after {self.call} "
                    "attached, as by fully_shard, parallelize_module or a new layer, so that nothing averages the new one; "
                    f"shard the model first, then attach, or detach(), and call {self.call} again"
                )

    @abstractmethod
    def _before_optimizer_step(self, optimizer: Optimizer, arguments: Arguments) -> Arguments:
        """Run before each step of any optimizer over these parameters; return the step's arguments."""

    def _warn_of_others(self, optimizer: Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        others = sum(p.requires_grad and AVERAGED.of(id(p)) is None for p in held)
        if others and self.comm.size > 1:
            self._advisor.say_once(
                f"{self.call}: {others} of the {len(held)} parameters of {type(optimizer).__name__} are attached to no "
                "strategy, and unless something else averages them, each worker has its own; attach the module that holds all"
            )

    # ---- what a derived class uses ----

    def begin_round(self) -> None:
        """On an elastic communicator: agree on the workers of the next round, unless one is open.

        The model's forward pass does it too, in training mode. Call it before to learn rank and size, such as for the
        choice of a batch.

        Raises:
            CommunicationError: not enough workers came in time.
        """
        self._transaction.begin()

    def _begin_rounds(self, averager: Averager) -> None:
        """Make the transactions, once all that they need is there; begin each with the model's forward pass."""
        self._transaction = Transaction(averager, self.comm, self._averaged)
        if self.comm.is_elastic:
            self._share()
            # Before FSDP gathers parameters: a worker that is healed gets others.
            hook = self._model.register_forward_pre_hook(_ForwardHook(self._before_forward), prepend=True)
            self._on_detach(hook.remove)

    def _require_elastic(self) -> None:
        require(
            self.strategy.has_common_steps,
            f"{self.call}: {self.strategy} needs a fixed number of workers; leave the elastic communicator out",
        )
        self._shards.require_mesh(self.comm.replica)

    def _before_forward(self) -> None:
        if self._model.training and torch.is_grad_enabled():
            if not self.comm.in_round:  # the round may heal this worker, which writes into its shards
                self._shards.reshard()
            self.begin_round()

    @contextmanager
    def _attaching(self, group: Any = None) -> Iterator[Communicator]:
        """Context for attaching: connect and compare options before, register the parameters after, detach on an error.

        Args:
            group: the process group of the workers, if no communicator was given; None for all workers.
        """
        group = group or self._replicas
        with told_to_others(self._comm, group):
            self._take_over()
            AVERAGED.require_unattached(self.call, self.parameters)
        if self._comm is not None and self._comm.is_elastic:
            require_free(self.call, self._comm)
        try:
            if self._comm is None:
                self._comm = ProcessGroupCommunicator(group, device=self.parameters[0][1].device)
            options = {"seed": self._seed, "has layout": self._layout is not None}
            self._comm.check_agreement(self.strategy.options() | options | self._in_common(self._comm))
            if self._layout is not None:
                layout = self._layout if isinstance(self._layout, Layout) else self._layout(self._comm)
                self._comm = laid_out(self._comm, layout)
            self._shards.connect(self._comm)
            self._shards.check_agreement(self.strategy.options() | options)
            yield self._comm
            AVERAGED.register(self)
            self._advisor = Advisor(self.strategy, self._comm.rank)
        except BaseException:
            self.detach()
            raise

    def _in_common(self, comm: Communicator) -> dict[str, Any]:
        """What all workers must have alike beside their options; they compare it as they attach."""
        return {}

    def _take_over(self) -> None:
        """Detach strategies of these parameters whose communicator was closed, such as that of a world that has ended."""
        for strategy in {AVERAGED.of(id(p)) for _, p in self.parameters}:
            if strategy is not None and strategy.comm.is_closed:
                try:
                    raise CommunicationError(f"rank {strategy.comm.rank}: its communicator was closed")
                except CommunicationError:
                    strategy.detach()  # after an error, it waits for nobody

    def _share_part(self, *args: Any, **kwargs: Any) -> None:
        """`Communicator.share`, until the strategy detaches."""
        self._on_detach(self.comm.share(*args, **kwargs))

    def _on_detach(self, undo: Callable[[], Any]) -> None:
        """Call `undo` when the strategy detaches, in reverse order of registration."""
        self._undo.callback(undo)

    def _identity(self) -> dict[str, Any]:
        return {
            "strategy": self.call,
            "rank": self.comm.rank,
            "world_size": self.comm.size,
            "averager": repr(self.averager),
            "tensors": describe_tensors(self.parameters),
        }
