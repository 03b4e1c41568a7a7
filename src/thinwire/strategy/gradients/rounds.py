"""The rounds of an averager over gradients, one bucket at a time, while the backward pass still runs.

    1. a bucket of gradients is ready: `averager.step` compensates, encodes and sends it, in the autograd thread;
    2. a finishing thread waits for the bytes, decodes them into the gradients and completes the bucket's future; on CPUs
       it begins when all buckets are sent, for until then the cores are better used to send them. On GPUs both run on a
       stream of their own (`thinwire.streams`), which backward's stream waits for at the end of the round only;
    3. the last bucket of the backward pass ends the round: memory commits if all of it was finite;
    4. backward returns, and `param.grad` holds the mean of all workers.

The order of buckets in a round is the same on all workers, and so is the order of their collectives.

On an elastic communicator a round begins with the forward pass. A failure on the way does not reach the caller: the round is
given up on all workers at the end of backward, memory stays as it was, and no optimizer updates these parameters.

A backward pass that an error breaks off leaves its round open. The next round first finishes what was sent, and discards
it. What was sent is decoded into the gradients of that pass, so the next one needs new tensors:
`zero_grad(set_to_none=True)`. Other workers, which have had no error, wait for the rest of the buckets. They get NaN, and so
skip the step too. Where no other round follows, nothing waits for it: the finishing thread is a daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from ... import debug
from ...algorithm import require
from ...average.base import Averager, NamedTensors, handle_of
from ...comm import Communicator, Handle
from ...streams import WorkStream, has_streams, note_stream, refuse_capture, wait_for_streams
from ..model.optimizer_step import without_autocast
from ..model.shards import Replica
from ..nonfinite import Looks, NonfiniteSteps, first_culprit, first_of, look_at
from ..transaction import Transaction

_OVER: WeakKeyDictionary[Communicator, WeakSet[GradientRounds]] = WeakKeyDictionary()
Bucket = tuple[NamedTensors, "torch.futures.Future[Tensor]", Tensor]


class GradientRounds:
    """The rounds of one worker; see the module's text.

    Args:
        averager, state: how to agree, and its state.
        comm: connects the workers.
        scaler: the loss scaler in use, if there is one.
        nonfinite: what follows from rounds that are not finite.
        shards: the workers that hold the other shards of the model; a round is finite if it is so on all of them.
        transaction: begins and ends rounds where workers come and go.
        order: the place of each parameter, by name, for buckets that differ between workers: all are then sent at once, in
            this order, when the last one is ready. None sends each bucket when it is ready.
    """

    def __init__(
        self,
        averager: Averager,
        state: Any,
        comm: Communicator,
        scaler: Any,
        nonfinite: NonfiniteSteps,
        shards: Replica,
        transaction: Transaction,
        order: Mapping[str, int] | None,
    ):
        self._averager, self._state, self._comm, self._scaler, self._order = averager, state, comm, scaler, order
        self._nonfinite, self._shards, self._transaction = nonfinite, shards, transaction
        _OVER.setdefault(comm, WeakSet()).add(self)
        self._graph_task = -1
        self._finisher = comm.background("thinwire-finish")
        self._work = WorkStream(torch.device("cpu"))  # until the first bucket tells the device
        self._device = torch.device("cpu")
        self._held: list[Bucket] = []
        self._streams: set[Any] = set()  # on which the gradients of those held are complete
        self._kept: list[Bucket] = []  # until the training's stream waits for the work on them
        self._earlier: list[Bucket] = []  # of passes that errors broke off
        self._finishing: list[Handle] = []
        self._late: list[Callable[[], None]] = []  # what is finished when all buckets are sent
        self._scale = 1.0
        self._is_open = self._is_broken = self._is_abandoned = False
        self._is_finite = True
        self._has_all = False
        self._looks: Looks = []  # at this worker's own gradients, if the next round that is not finite is an error
        self._num_launched = 0
        self.rest: Callable[[int], list[NamedTensors]] = lambda launched: []
        """The buckets of a round behind its first ones, filled with NaN; DDP refuses another pass after an error itself."""
        self.compare_models: Callable[[], None] = lambda: None
        """In debug mode: called by all workers at the beginning of each round."""
        self.skips = False
        """Whether the gradients of the last round must not be applied."""

    @without_autocast
    def launch(self, tensors: NamedTensors, buffer: Tensor, first: bool, last: bool) -> torch.futures.Future[Tensor]:
        """Begin to average a bucket; the future completes with `buffer` when `tensors` hold the mean.

        When the backward pass ends, it waits for the round and raises what went wrong. Outside of one, as where DDP's `join`
        takes part for a worker without inputs left, the last bucket does.
        """
        if first:
            self._earlier += self._kept
        if self._earlier:  # an error broke off the last backward pass
            self._require_new(tensors)
        if first:
            self._open(buffer.device)
        if self._nonfinite.is_last_chance:
            self._looks += look_at(tensors)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        self._held.append((tensors, future, buffer))
        note_stream(self._streams, buffer.device)
        self._num_launched += 1
        if last or not (self._averager.traits.whole_model or self._order is not None):
            self._step(last)
        if last and torch._C._current_graph_task_id() == -1:
            self._end_backward()
        elif last:
            # Not queued with the first bucket, whose backward pass may be a part's, inside of another one.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return future

    def close(self) -> None:
        """End the finishing thread; a round that an error left open is given up."""
        if self._is_open:
            self.abandon()
        self._finisher.close()
        # After an error the thread may be waiting for a worker that does not answer.
        if not self._is_abandoned:
            self._finisher.join()

    def abandon(self) -> None:
        """Give up the round that is open, without waiting for other workers."""
        self._is_abandoned = True
        # The finishing thread still completes the futures of what was launched.
        self._finish_late()

    def _require_new(self, tensors: NamedTensors) -> None:
        """That these gradients are not those of a pass which was broken off: its averages may be written into them."""
        sent = {t.data_ptr() for bucket, _, _ in self._earlier for _, t in bucket if t.numel()}
        used = next((name for name, t in tensors if t.data_ptr() in sent), None)
        require(
            used is None,
            f"rank {self._comm.rank}: an error broke off the last backward pass, and its averages may still be written into "
            f"the gradient of {used!r}; call zero_grad(set_to_none=True) after the error",
        )

    def _open(self, device: torch.device) -> None:
        refuse_capture(device)
        if self._is_open or self._kept:  # an error broke off the last backward pass
            rest = self._send_rest() if self._is_open else []
            self._finish_late()
            with self._work.continued():
                for handle in [*self._finishing, *rest]:
                    with suppress(Exception):  # `_end_backward` has raised it, if it came to that
                        handle.wait()
            self._work.join()
            self._kept.clear()
            if self._is_open:
                self._averager.discard(self._state)
            if rest and self._nonfinite.record(False, warn=False) == "raise":  # as on the others
                self._is_open = False
                raise self._nonfinite.error(first_culprit(first_of(self._looks), self._comm, self._shards))
        self._graph_task = torch._C._current_graph_task_id()
        self._require_order()
        self._comm.round_thread.drain()  # rounds of other strategies, which count in the same ledger
        if debug.enabled and not self._comm.is_elastic:  # elastic workers compare digests themselves
            self.compare_models()
        healed = self._transaction.begin()
        if device != self._device:
            self._work, self._device, self._state.clock.device = WorkStream(device, self), device, device
        self._held, self._finishing, self._num_launched = [], [], 0
        self._streams.clear()
        self._is_open, self._is_finite, self._has_all = True, True, False
        self._is_broken = healed  # then these gradients are those of other parameters
        self._looks, self.skips = [], False
        # A scaler changes its scale between two passes, so it is read once a round.
        self._scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def _send_rest(self) -> list[Handle]:
        """Send the buckets that an error left out of a round, of which others were sent; in an elastic round none."""
        if self._comm.is_elastic or self._averager.traits.whole_model:
            return []
        with self._work.after_caller():
            return [
                self._averager.step(self._state, tensors, self._comm, self._scale)
                for tensors in self.rest(self._num_launched)
            ]

    def _require_order(self) -> None:
        """Raise a ValueError if another strategy averages gradients of this backward pass over the same communicator, and one
        of them goes on sending in its finishing thread: the order of their messages could differ between workers."""
        others = [r for r in _OVER[self._comm] if r is not self and r._graph_task == self._graph_task != -1]
        for rounds in [self, *others] if others else []:
            require(
                not rounds._averager.sends_while_waiting(rounds._state),
                f"two strategies average gradients of one backward pass over one communicator, and {rounds._averager} sends "
                "several messages one after the other; leave comm out, so that each strategy has a communicator of its own",
            )

    def _step(self, last: bool) -> None:
        held, self._held = self._held, []
        wait_for_streams(self._streams, self._device)
        self._streams.clear()
        self._kept += held
        tensors = [pair for bucket, _, _ in held for pair in bucket]
        order = self._order
        if order is not None:
            tensors.sort(key=lambda pair: order[pair[0]])
        handle: Any = None  # of any class, from someone's own averager
        if not (self._comm.is_elastic and self._is_broken):  # nothing more is sent in a round that has failed
            with self._transaction.attempt(), self._work.after_caller():
                step = self._averager.step(self._state, tensors, self._comm, self._scale)
                handle = handle_of(self._averager, step)
        if handle is None:
            self._is_broken = True
            for _, future, buffer in held:
                future.set_result(buffer)
            if last:
                self._finish_late()
            return
        self._late.append(partial(self._finish, handle, held, last))
        if last or not (self._averager.sends_at_once(self._state) and self._waits_late()):
            self._finish_late()

    def _finish_late(self) -> None:
        late, self._late = self._late, []
        self._finishing += [self._finisher.submit(finish) for finish in late]

    def _finish(self, handle: Handle, held: list[Bucket], last: bool) -> None:
        """In the finishing thread: decode a step; after the last one, commit."""
        with self._work.continued():  # a future of a GPU completes with what is queued on the current stream
            try:
                if self._is_abandoned:  # nothing waits for other workers any more
                    return
                handle.wait()
                if last and self._comm.is_elastic:
                    self._has_all = not self._is_broken
                elif last and not self._is_broken:
                    self._is_finite = self._shards.commit(self._averager, self._state)
                    self._is_open = False
            except BaseException:
                self._is_broken = True  # the next round discards this one
                raise
            finally:  # DDP must not wait for ever; `_end_backward` raises the error
                for _, future, buffer in held:
                    future.set_result(buffer)

    def _waits_late(self) -> bool:
        """Whether waiting begins when all buckets are sent: to spare CPUs, or to keep the order of collectives."""
        return not has_streams(self._device) or self._averager.sends_while_waiting(self._state)

    def _end_backward(self) -> None:
        with self._state.clock("blocked"):
            try:
                for task in self._finishing:
                    self._take(task)
            finally:
                self._work.join()
                self._kept.clear()
                self._earlier.clear()
        if self._comm.is_elastic:
            self._vote()
            if self._is_open:
                self._is_open, self.skips = False, True
                return
        if self._is_open:
            return
        action = self._nonfinite.record(self._is_finite, warn=self._scaler is None)
        self.skips = action == "skip"
        if action == "raise":  # on all workers, at the same point
            raise self._nonfinite.error(first_culprit(first_of(self._looks), self._comm, self._shards))

    def _take(self, task: Handle) -> None:
        """Wait for a task; a worker that has died breaks an elastic round only."""
        has_arrived = False
        with self._transaction.attempt():
            task.wait()
            has_arrived = True
        self._is_broken |= not has_arrived

    def _vote(self) -> None:
        """Commit the round if all workers have it; else go back to where it began."""
        if self._transaction.end(self._has_all and not self._is_broken):
            self._is_finite, self._is_open = self._shards.commit(self._averager, self._state), False
        else:
            self._averager.discard(self._state)
