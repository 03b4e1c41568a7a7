"""The strategy for gradients: average them while the backward pass still runs.

`compress_gradients` attaches an averager to a model that is wrapped in `DistributedDataParallel`, through its
communication hook, or to a plain module, through buckets and hooks of our own (`buckets.py`). Either way

    1. a bucket of gradients is ready: `averager.step` compensates, encodes and sends it, in the autograd thread;
    2. a finishing thread waits for the bytes, decodes them into the gradients and completes the bucket's future; on CPUs
       it begins when all buckets are on the wire, for until then the cores are better used to get them there;
    3. the last bucket of the backward pass ends the round: memory commits if all of it was finite;
    4. backward returns, and `param.grad` holds the mean of all workers.

The round's order of buckets is the same on all workers, and so is the order of their collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..algorithm import require
from ..average.base import Averager, NamedTensors
from ..average.gossip_base import Gossip
from ..codec import Codec
from ..comm import Communicator, Handle, Ledger, ProcessGroupCommunicator
from .buckets import GradientBuckets
from .dgc_sgd import check_optimizer, guard_optimizers
from .mean_model import holding_mean


class GradientAverager:
    """Runs the rounds of an averager over a module's gradients, one bucket at a time.

    It is the state of the `(state, hook)` pair, and makes its communicator when the first bucket arrives, so that it can
    be built before the process group.
    """

    def __init__(
        self,
        module: nn.Module,
        averager: Averager,
        comm: Communicator | None = None,
        scaler: Any = None,
        seed: int = 0,
        ignored: Sequence[str] = (),
        group: Any = None,
    ):
        require(
            isinstance(averager, Averager) and not isinstance(averager, Gossip),
            f"{averager} moves tensors towards their neighbours', which suits parameters; gradients need an averager "
            "that gives all workers one mean, such as Mean or PowerSGD",
        )
        self.averager, self.scaler, self.seed = averager, scaler, seed
        self.parameters = [
            (name, p) for name, p in module.named_parameters() if p.requires_grad and name not in ignored
        ]
        require(bool(self.parameters), "the model has no parameter that requires a gradient; there is nothing to average")
        self.names = {id(p): name for name, p in self.parameters}
        self.comm, self._owns_comm, self._group = comm, comm is None, group
        self.state: Any = None
        self._saved: dict[str, Any] | None = None
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="thinwire-finish")
        self._held: list[tuple[NamedTensors, torch.futures.Future, Tensor]] = []
        self._finishing: list[Future] = []
        self._scale = 1.0
        self._round_is_open = self._broken = False
        self._all_sent = threading.Event()
        self._guard: Any = None

    def start(self) -> None:
        """Make the communicator and the averager's state, once; all workers must come here."""
        if self.state is not None:
            return
        if self.comm is None:
            self.comm = ProcessGroupCommunicator(self._group)
        self.state = self.averager.init(self.parameters, self.comm, self.seed)
        if self._saved is not None:
            self.state.load_state_dict(self._saved)
        if self.averager.has_momentum:
            self._guard = guard_optimizers([p for _, p in self.parameters])

    def set_epoch(self, epoch: int) -> None:
        """Tell schedules which epoch it is; see `GradientCompression.set_epoch`."""
        require(isinstance(epoch, int) and epoch >= 0, f"epoch must be an integer, 0 or more, got {epoch!r}")
        self.start()
        self.comm.check_agreement({"epoch": epoch})
        self.averager.set_epoch(self.state, epoch)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise a ValueError if averager and optimizer both apply momentum."""
        if self.averager.has_momentum:
            check_optimizer(optimizer, [p for _, p in self.parameters])

    def launch(self, tensors: NamedTensors, buffer: Tensor, first: bool, last: bool) -> torch.futures.Future:
        """Begin to average a bucket; the future completes with `buffer` when `tensors` hold the mean.

        Called during backward only: when it ends, it waits for the round and raises what went wrong.
        """
        self.start()
        if first:
            self._open_round()
        future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._held.append((tensors, future, buffer))
        if last or not self.averager.whole_model:
            self._step(last)
        return future

    def _open_round(self) -> None:
        if self._round_is_open:  # an error broke off the last backward pass
            self._all_sent.set()
            wait(self._finishing)
            self.averager.discard(self.state)
        self._held, self._finishing, self._round_is_open, self._broken = [], [], True, False
        self._all_sent = threading.Event()
        self._scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _step(self, last: bool) -> None:
        held, self._held = self._held, []
        tensors = [pair for bucket, _, _ in held for pair in bucket]
        handle = self.averager.step(self.state, tensors, self.comm, self._scale)
        self._finishing.append(self._finisher.submit(self._finish, handle, held, last))
        if last:
            self._all_sent.set()

    def _finish(self, handle: Handle, held: list, last: bool) -> None:
        """In the finishing thread: decode a step; after the last one, commit."""
        device = held[0][2].device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            elif self.averager.sends_at_once(self.state):
                self._all_sent.wait()
            handle.wait()
            if last and not self._broken:
                self.averager.commit(self.state)
                self._round_is_open = False
        except BaseException:
            self._broken = True  # the next round discards this one
            raise
        finally:  # DDP must not wait for ever; `_end_backward` raises the error
            for _, future, buffer in held:
                future.set_result(buffer)

    def _end_backward(self) -> None:
        with self.state.clock("blocked"):
            for task in self._finishing:
                task.result()

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, keyed by parameter name; workers differ, so each saves its own."""
        self.start()
        return self.state.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.state is None:
            self._saved = saved
        else:
            self.state.load_state_dict(saved)

    def close(self) -> None:
        """Stop the threads."""
        if self._guard is not None:
            self._guard.remove()
        self._all_sent.set()
        self._finisher.shutdown()
        if self._owns_comm and self.comm is not None:
            self.comm.close()


class GradientCompression:
    """What `compress_gradients` returns: the averager at work on one model."""

    def __init__(
        self,
        model: nn.Module,
        rounds: GradientAverager,
        ddp: DistributedDataParallel | None,
        buckets: GradientBuckets | None,
    ):
        self._model, self._rounds, self._ddp, self._buckets = model, rounds, ddp, buckets

    @property
    def ledger(self) -> Ledger:
        """Every byte that this worker sent and received, with the dense sizes beside them."""
        return self._rounds.comm.ledger

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far by phase: compensate, encode, exchange, wait, decode.

        Waiting and decoding run beside the backward pass; `blocked` is what it had to wait for when it was done.
        """
        return dict(self._rounds.state.clock.seconds)

    @property
    def averager(self) -> Averager:
        """The averager at work."""
        return self._rounds.averager

    @property
    def codec(self) -> Codec | None:
        """The codec of the coming round; `handle.codec.levels` are the levels that ALQ or AMQ has found so far."""
        return self._rounds.averager.current_codec(self._rounds.state)

    @contextmanager
    def average_model(self, comm: Communicator | None = None) -> Iterator[None]:
        """Context in which buffers (running statistics) hold the mean of all workers'; parameters are equal anyway.

        All workers enter it together.

        Args:
            comm: what the exact mean travels over; by default the averager's own, whose ledger then counts it.
        """
        with holding_mean([], 1.0, list(self._model.buffers()), comm or self._rounds.comm):
            yield

    def no_sync(self) -> AbstractContextManager:
        """Context in which backward only accumulates; the first backward after it averages the sum."""
        return self._ddp.no_sync() if self._ddp is not None else self._buckets.no_sync()

    def set_epoch(self, epoch: int) -> None:
        """Tell schedules that count epochs, such as `GeometricWarmup`, which epoch begins. All workers call it.

        Raises:
            ValueError: on all workers together, if they name different epochs.
            CommunicationError: if one of them does not call it.
        """
        self._rounds.set_epoch(epoch)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make sure that momentum is applied once: by the averager, as `tw.dgc` does, or by the optimizer.

        Every step of an optimizer over these parameters is checked anyway; this finds out before the first.

        Raises:
            ValueError: both do.
        """
        self._rounds.check_optimizer(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """This worker's state (memory, step), keyed by parameter name. Workers differ, so each saves its own."""
        return self._rounds.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, for the same averager and model."""
        self._rounds.load_state_dict(saved)

    def detach(self) -> None:
        """Stop averaging and end the threads. A plain module is left as it was; gradients then stay local.

        DDP keeps a hook for life, so a detached DDP model raises in its next backward: wrap the module anew.
        """
        if self._buckets is not None:
            self._buckets.remove()
        self._rounds.close()


def compress_gradients(
    model: nn.Module,
    averager: Averager,
    *,
    comm: Communicator | None = None,
    scaler: Any = None,
    seed: int = 0,
    bucket_bytes: int = 10 * 2**20,
) -> GradientCompression:
    """Average the gradients of `model` over all workers with `averager`, during every backward pass.

    One line is added to an ordinary training loop; when `loss.backward()` returns, `param.grad` holds the averaged
    gradient on every worker, bit for bit the same. A model in `DistributedDataParallel` keeps its buckets, and `no_sync`,
    `find_unused_parameters`, `static_graph` and `gradient_as_bucket_view` mean what they do there. A plain module gets
    buckets of our own; its parameters and buffers are first made equal to rank 0's; parameters that got no gradient
    count as zero and receive the average like all others. Frozen parameters take no part.

    Args:
        model: a `DistributedDataParallel` model without another communication hook, or any module.
        averager: such as `Mean(TopK(0.01), ErrorFeedback())`.
        comm: how to communicate; by default a process group of its own over DDP's workers, or over all.
        scaler: the `torch.amp.GradScaler` in use, so that memory is kept in unscaled units.
        seed: seed of the codec's random numbers; the same on all workers.
        bucket_bytes: size of the buckets of a plain module, in gradients before encoding; smaller => sending starts
            earlier, at more messages.

    Returns:
        A handle with `ledger`, `seconds`, `no_sync`, `set_epoch`, `check_optimizer`, `state_dict`, `load_state_dict`
        and `detach`.

    Raises:
        ValueError: on all workers together, where averagers, tensor shapes or their order differ between them.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(2, 1, bias=False)
        ...     handle = tw.compress_gradients(model, tw.Mean(tw.QSGD(bits=8)), comm=comm)
        ...     model(torch.full((1, 2), float(comm.rank))).sum().backward()
        ...     handle.detach()
        ...     return model.weight.grad.tolist()
        >>> tw.LocalWorld(2).run(worker)
        [[[0.5, 0.5]], [[0.5, 0.5]]]
    """
    if isinstance(model, DistributedDataParallel):
        ignored, group = model.parameters_to_ignore, model.process_group
        rounds = GradientAverager(model.module, averager, comm, scaler, seed, ignored, group)
        rounds.start()
        model.register_comm_hook(rounds, _ddp_hook)
        return GradientCompression(model, rounds, model, None)
    rounds = GradientAverager(model, averager, comm, scaler, seed)
    rounds.start()
    make_equal(model, rounds.comm)
    return GradientCompression(model, rounds, None, GradientBuckets(rounds.parameters, rounds.launch, bucket_bytes))


def gradient_hook(
    model: nn.Module, averager: Averager, *, scaler: Any = None, seed: int = 0
) -> tuple[GradientAverager, Callable[[GradientAverager, Any], torch.futures.Future[Tensor]]]:
    """The same as a plain `(state, hook)` pair, for trainers that wrap the model in DDP themselves.

    Lightning takes it as `DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)`; after Accelerate's `prepare` it is
    `model.register_comm_hook(state, hook)`. It may be built before the process group: the communicator is made, and
    the workers' configurations are compared, when the first bucket arrives.

    Args:
        model: the module itself, before it is wrapped.
        averager, scaler, seed: as in `compress_gradients`.

    Returns:
        The state (with `state_dict`, `load_state_dict`, `close`), and the hook.
    """
    return GradientAverager(model, averager, None, scaler, seed), _ddp_hook


def make_equal(module: nn.Module, comm: Communicator) -> None:
    """Give every worker rank 0's parameters and buffers."""
    with torch.no_grad():
        for handle in [comm.broadcast(t.detach()) for t in [*module.parameters(), *module.buffers()]]:
            handle.wait()


def updated_by(optimizer: torch.optim.Optimizer, module: nn.Module) -> NamedTensors:
    """The trainable parameters of the module, by name, that the optimizer updates.

    Raises:
        ValueError: there are none.
    """
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) in updated]
    require(bool(named), "the optimizer has no trainable parameter of the model; there is nothing to average")
    return named


def _ddp_hook(state, bucket):  # DDP reads the annotations and cannot read postponed ones
    """The hook that DDP calls with each bucket as soon as its gradients are there."""
    named = [(state.names[id(p)], g) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)]
    return state.launch(named, bucket.buffer(), first=bucket.index() == 0, last=bucket.is_last())
