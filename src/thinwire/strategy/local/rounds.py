"""The rounds of `Local`: workers train alone for H steps, and then average what they changed.

Every worker keeps an *anchor*: its parameters after the last round, in float32 (float64 for float64 parameters). The model is
divided into *fragments* (`fragments.py`), one by default. A fragment is exchanged every H steps of the optimizer, inside the
step's hook:

    1. measure    the pseudo-gradient g_i = anchor - parameters, the changes since the last round
    2. average    g_i becomes the mean of all workers, with the averager's codec and memory
    3. step       the outer optimizer applies it to the anchor; by default anchor <- anchor - g, which is plain averaging
    4. merge      parameters <- alpha parameters + (1 - alpha) anchor; by default alpha = 0

With a delay of tau steps, phase 2 runs in a thread while the training goes on, and phases 3 and 4 come tau steps later. One
exchange is in flight at a time: the next one waits in its own thread, and the training waits only for what it merges. A round
is merged at the same step on all workers, so the result does not depend on the network's speed. Where workers come and go,
`elastic.py` says when an exchange is committed.

A gossip averager has no mean that all workers know. Phase 2 is left out: each worker's outer optimizer applies its own
pseudo-gradient, and then the anchors gossip one round, which is what flies. Where the outer optimizer is linear (SGD, with or
without momentum), the mean of the anchors over workers follows the same equation either way. With `pull`, pseudo-gradients and
anchors are mixed with those of neighbours, and the outer optimizer applies

    mixed g + pull (anchor - mixed anchor)

Push-sum. The anchor is the biased x, and the parameters restart from z = x/w. Changes of z are applied to x unweighted, so
the mean of x moves by the mean of all changes, whatever the weights are.

Steps that are not finite. By default an inner step with an infinite or NaN gradient is skipped on its worker
(`own_gradients.py`). A round is a transaction besides. If a change is infinite or NaN on any worker, the mean is so on all
of them: all go back to the anchor, and memory and outer optimizer keep their state. Under gossip only that worker gives up its
changes, and gossips its anchor. Either way it warns. So it is where the outer step leaves an anchor that float16 parameters
cannot hold (above 65,504): anchor and outer optimizer go back. Memory does not, because the mean was finite and is delivered.

Buffers (running statistics) are equal at the start, then local; `synchronize` averages those of floating point.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ... import kernels
from ...algorithm import require, required
from ...average.base import Averager, NamedTensors, handle_of
from ...clock import Clock
from ...comm import CommunicationError, Communicator
from ...kernels.checks import described
from ...membership import check_state, load_shared, load_tensors, shared_part
from ...streams import WorkStream
from ..flight import Flight
from ..gradients.dgc_sgd import check_optimizer
from ..model.joined import average_exactly
from ..model.models import unexpanded, values_of
from ..model.optimizer_step import ScalerWatch
from ..own_model import OwnModelAttachment
from ..strategy import Runtime
from .asynchronous import AsynchronousRounds, Committed, Leases
from .elastic import ElasticExchanges
from .fragments import Fragment, make_fragments
from .optimizer_states import average_states
from .outer_sgd import OuterSGD
from .quorum import Quorum
from .state import LATE, LocalState, loaded_outer, named_outer

if TYPE_CHECKING:
    from .local import Local

STEPS_AHEAD = 2
"""A worker that was healed leaves out more steps than the others have taken: theirs under way, and one as its first is slow."""
PLAIN_AVERAGING = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)


class LocalUpdates(OwnModelAttachment):
    """What `Local` attaches: the rounds of one model."""

    call = "Local"
    takes_all = True
    averager: Averager
    strategy: Local
    _record: LocalState
    _asynchronous: AsynchronousRounds | None

    def __init__(self, strategy: Local, model: nn.Module, optimizer: Optimizer | None, runtime: Runtime):
        super().__init__(strategy, model, optimizer, runtime)
        require(
            not self._shards or strategy.weights is None,
            f"{self.call}: weights compare the norms of whole changes, and this model is sharded; leave weights out",
        )
        self._clock, self._asynchronous, self._is_broken_off = Clock(), None, False
        # Whose `every` and `delay` count; with a quorum they follow the worker's speed.
        self._pace: Local | AsynchronousRounds = strategy

    def attach(self) -> None:
        """Connect the workers, and follow the optimizer's steps."""
        strategy = self.strategy
        with self._attaching() as comm:
            self._follow(comm)
            self._anchors = [(name, _anchor_of(p)) for name, p in self._live.tensors()]
            device = self._anchors[0][1].device
            self._work, self._clock.device = WorkStream(device, self), device
            outer = strategy.outer or PLAIN_AVERAGING
            outer = outer if strategy.quorum is None else strategy.quorum.stale.outer(outer, comm.size)
            made = outer([anchor for _, anchor in self._anchors])
            require(
                isinstance(made, (Optimizer, LRScheduler)),
                f"{self.call}: outer must return an optimizer of torch.optim, and {strategy.outer!r} returned "
                f"{described(made)}",
            )
            self._scheduler = made if isinstance(made, LRScheduler) else None
            self._outer: Optimizer = made.optimizer if isinstance(made, LRScheduler) else made
            # Compared here, because a function that makes it is another object on each worker.
            comm.check_agreement({"outer optimizer": repr(self._outer)})
            if self.averager.traits.has_momentum:
                check_optimizer(self._outer, [anchor for _, anchor in self._anchors])
            self._fragments = make_fragments(
                self._anchors, strategy.fragments, strategy.every, strategy.pull is not None
            )
            self._record = LocalState(dict(self._anchors), self._outer, self._scheduler, self._fragments)
            for fragment in self._fragments:
                fragment.state = check_state(self.averager.init(fragment.tensors, comm, self._seed), self.averager)
                fragment.state.clock.device = device
            self.averager.check_names([name for name, _ in self._anchors], comm.rank)
            if strategy.quorum is not None:
                self._begin_asynchronous(strategy.quorum, comm)
            self._begin_rounds(self.averager)
            self._elastic: ElasticExchanges | None = None
            if comm.is_elastic:
                self._elastic = ElasticExchanges(
                    self.averager, self._fragments, self._transaction, self._shards, self._send
                )
            self._watch = ScalerWatch(self._scaler, self._optimizer, self._end_of_step)
            self._on_detach(self._watch.remove)

    def _begin_asynchronous(self, quorum: Quorum, comm: Communicator) -> None:
        require(
            not self._shards, f"{self.call}: a quorum needs whole models, and this one is sharded; leave quorum out"
        )
        require(
            (quorum.workers or 1) <= comm.size,
            f"{self.call}: a quorum of {quorum.workers} workers cannot come of {comm.size}; choose a lower one",
        )
        self._asynchronous = self._pace = rounds = AsynchronousRounds(
            self.strategy, quorum, self._fragments, comm, self._clock, self._apply
        )
        self._record.committed = rounds.committed
        self._on_drop(rounds.protocol.close, False)

    @property
    def committed(self) -> Committed:
        """With a quorum: rounds, tokens and late changes so far, as far as this worker has merged them."""
        return required(self._record.committed, f"{self.call}: only a quorum counts what is committed")

    @property
    def committed_tokens(self) -> int:
        """With a quorum: T, the tokens whose changes of the first fragment are merged, which learning rates should follow."""
        return self._fragments[0].committed_tokens

    def on_commit(self, call: Callable[[int], None]) -> None:
        """With a quorum: call this with T after each merged round of the first fragment, the same on all workers."""
        rounds = required(self._asynchronous, f"{self.call}: only a quorum commits rounds; leave on_commit() out")
        rounds.on_commit = call

    def count_tokens(self, number: int) -> None:
        """With a quorum: say before `optimizer.step()` how many tokens (or samples) it is made from; by default 1."""
        rounds = required(self._asynchronous, f"{self.call}: only a quorum counts tokens; leave count_tokens() out")
        rounds.count_tokens(number)

    def state_dict(self) -> dict[str, Any]:
        """As in `AveragerAttachment`; with a quorum, only right after `synchronize`. Not in the middle of an elastic round."""
        self._require_met("state_dict()")
        self._require_decided(any(fragment.is_sent for fragment in self._fragments))
        return super().state_dict()

    @torch.no_grad()
    def begin_round(self) -> None:
        """As in `AveragerAttachment`. Exchanges that are due, and had no round when the last step ended, begin.

        A worker that joins leaves out the steps that the others have taken by then.
        """
        healed = self._transaction.begin()
        if self._elastic is None or self._elastic.is_joining:
            return
        if healed and self._heals_late:
            record, offsets = self._record, sorted(fragment.offset for fragment in self._fragments)
            # At most up to the step before the next exchange, in which it takes part.
            last = next((offset for offset in offsets if offset > record.step), self._pace.every + offsets[0]) - 1
            ahead = STEPS_AHEAD if self._transaction.missed else 0  # so that the others need not wait for it
            missed = min(self._transaction.missed + ahead, last - record.step)
            record.num_steps += missed
            record.step = (record.step + missed) % self._pace.every
            self.comm.num_skipped = missed
        self._end_step()

    @torch.no_grad()
    def settle(self) -> None:
        """As in `AveragerAttachment`. In elastic rounds all workers call it together: it ends the round in flight."""
        if self._elastic is not None:
            self._elastic.settle()
        super().settle()

    @property
    def seconds(self) -> dict[str, float]:
        """Wall-clock seconds so far by phase: measure, outer, and those of the averager.

        With a delay also "blocked": what the training waited for messages that were not there when they were to be merged.
        """
        total: Counter[str] = Counter()
        for clock in (self._clock, *(fragment.state.clock for fragment in self._fragments)):
            total.update(clock.seconds)
        return dict(total)

    @property
    def phases_in_step(self) -> tuple[str, ...]:
        """With a delay, a thread does the averager's part."""
        waits_apart = self.strategy.delay or self._asynchronous is not None
        return ("measure", "outer", *(("blocked",) if waits_apart else super().phases_in_step))

    @torch.inference_mode(False)
    @torch.no_grad()
    def synchronize(self) -> None:
        """Leave the same parameters and floating-point buffers on all workers. All call it, for example at the end.

        It merges what is in flight. Fragments that have moved since their last round get a round of their own, without delay.
        Under gossip the exact mean of the anchors follows, dense: 2 (W-1)/W 4n bytes per worker. A new period begins.
        """
        self.exchange_now()
        if self._asynchronous is not None:
            while self._asynchronous.drain():
                pass
            for fragment in self._fragments:
                self._restart(fragment, alpha=0.0)
            self._asynchronous.all_met()
            self._asynchronous.resume()
            return
        if not self.averager.traits.gives_one_mean:
            average_exactly([anchor for _, anchor in self._anchors], self.comm)
            # All estimates x/w become the mean. The sum of x stays, because the weights w sum to W.
            for fragment in self._fragments:
                for _, anchor in fragment.anchors:
                    anchor.div_(self.averager.debias_factor(fragment.state))
                self._restart(fragment, alpha=0.0)
        buffers = [values_of(b) for b in self._model.buffers()]
        average_exactly([unexpanded(b) for b in buffers if b.is_floating_point()], self.comm)

    @torch.inference_mode(False)
    @torch.no_grad()
    def exchange_now(self) -> None:
        """The first part of `synchronize`: all changes so far are merged. With a quorum, a worker may call it alone.

        A worker without data does: it may get blocks of others then, see `ElasticSampler`. A new period begins.
        """
        self._shards.reshard()
        self._require_own_model("synchronize()")
        self._live.check()
        self.settle()
        self._merge_all()
        self._find_moved()
        for fragment in self._fragments:
            if fragment.has_moved:
                self._begin(fragment, delay=0)
                self.settle()
                self._merge(fragment, alpha=0.0)
        self._record.step = 0
        for fragment in self._fragments:
            fragment.began = self._record.num_steps  # else one at the end of a period would be due at once

    @torch.inference_mode(False)
    @torch.no_grad()
    def drain(self) -> bool:
        """With a quorum: this worker has no data left. Wait for the next rounds of the others, and merge them.

        Returns:
            False once all workers have called it, or `synchronize`. Then call `synchronize`; this worker takes no step before.
        """
        rounds = required(self._asynchronous, f"{self.call}: only a quorum drains; call synchronize() alone")
        self.exchange_now()
        return rounds.drain()

    def assign_blocks(self, leases: Leases) -> None:
        """With a quorum: let this assign blocks of data to the workers, as `ElasticSampler` does. All workers call it."""
        rounds = required(self._asynchronous, f"{self.call}: only a quorum assigns blocks; leave assign_blocks() out")
        rounds.assign_blocks(leases)

    # ---- what the base asks for ----

    def _require_met(self, what: str) -> None:
        require(
            self._asynchronous is None or self._asynchronous.is_synchronized,
            f"{self.call}: with a quorum, workers are at different versions; call synchronize() on all of them, then {what}",
        )

    def _before_look(self, what: str, comm: Communicator | None) -> Communicator:
        self._require_met(what)
        return super()._before_look(what, comm)

    @property
    def _weight(self) -> float:
        """Under push-sum the weight of the first fragment, which those of others soon equal."""
        return 1.0 / self.averager.debias_factor(self._fragments[0].state)

    def _ready(self) -> None:
        for fragment in self._fragments:
            fragment.settle()

    @torch.no_grad()
    def _finish(self) -> None:
        """Merge what is in flight; the parameters stay local."""
        self._require_own_model("detach()")
        if self._elastic is not None:
            self._elastic.end(again=False)
        self._merge_all()
        if self._asynchronous is not None:
            self._asynchronous.protocol.leave()

    def _abandon(self, error: BaseException) -> None:
        """Rounds in flight end in their own threads; with a quorum, the others go on without this worker."""
        if self._asynchronous is not None:
            self._asynchronous.protocol.close(wait=False)

    # ---- one step of the inner optimizer ----

    @torch.no_grad()
    def _after_step(self) -> None:
        self._watch.stepped()
        if self._elastic is not None and self._elastic.is_joining:
            self._restart_all()
            self._elastic.settle()
            self._end_step()
            return
        self.comm.stepped()
        step = self._record.step + 1
        self._record.num_steps += 1
        self._average_optimizer_state()
        for fragment in self._fragments:
            fragment.has_moved = True
            fragment.steps_to_merge -= fragment.in_flight
        if self._asynchronous is not None:
            self._asynchronous.stepped(step)
        self._record.step = step % self._pace.every
        self._end_step()
        if self._asynchronous is not None:
            if self._record.step == 0:
                self._asynchronous.begin_period()
            self._asynchronous.resume()

    def _end_step(self) -> None:
        """Merge and begin what is due. That follows from the record alone, as a worker may be healed meanwhile."""
        merging = [f for f in self._fragments if f.in_flight and f.steps_to_merge == 0]
        beginning = [f for f in self._fragments if self._is_due(f)]
        must_end = beginning or any(fragment.is_sent for fragment in merging)
        if self._elastic is not None and must_end and not self._elastic.end():
            # It was healed, so what is due follows from another record now.
            self._end_step()
            return
        for fragment in merging:
            self._merge(fragment, self.strategy.alpha)
        if self._pace.delay and not self.comm.in_round:
            return  # the next elastic round begins them
        for fragment in beginning:
            if fragment.in_flight:  # it was sent in a longer period
                self._merge(fragment, self.strategy.alpha)
            self._begin(fragment, self._pace.delay)
            if self._pace.delay == 0 and self._elastic is None:
                self._merge(fragment, self.strategy.alpha)
        # Without a delay, what has just begun is exchanged, voted on and merged in the same step.
        if beginning and self._pace.delay == 0 and self._elastic is not None:
            self._end_step()

    def _is_due(self, fragment: Fragment) -> bool:
        return fragment.offset % self._pace.every == self._record.step and fragment.began != self._record.num_steps

    def _average_optimizer_state(self) -> None:
        """Average those states of the inner optimizer whose period ends with this step."""
        due = [key for key, every in self.strategy.state_every.items() if self._record.num_steps % every == 0]
        if not due:
            return
        self._ready()  # rounds in flight use the communicator
        with self._transaction.attempt():  # these states are each worker's own, so it keeps them
            if self.comm.in_round:
                average_states(self._optimizer, self.parameters, due, self.comm)

    # ---- a round, in the four phases of the module's text ----

    def _begin(self, fragment: Fragment, delay: int) -> None:
        """Phases 1 and 2; with a delay, phase 2 goes on in a thread."""
        require(
            not self._is_broken_off,
            f"{self.call}: an error such as Ctrl-C broke off the last round, which other workers may have ended; detach() on "
            "all workers, and attach again",
        )
        with self._clock("measure"):
            self._measure(fragment)
        if not self.averager.traits.gives_one_mean:
            self._apply_own_changes(fragment)
        fragment.has_moved, fragment.began, fragment.steps_to_merge = False, self._record.num_steps, delay
        if self._asynchronous is not None:
            is_finite = kernels.flags.read(kernels.all_finite(fragment.changes))
            self._asynchronous.send(fragment, self._parts(fragment), is_finite)
            if not is_finite:
                self._warn()
            return
        exchange = self._exchange
        if self._elastic is not None:
            fragment.is_sent, exchange = True, self._elastic.exchange
            if delay:
                self._elastic.keep(fragment)
        elif delay == 0:
            self._ready()
            # Now no round of another fragment uses the communicator.
            try:
                fragment.finite = exchange(fragment)
            except BaseException as error:
                fragment.has_moved = True
                # The others come again to the next round where this one failed on all.
                self._is_broken_off = not isinstance(error, (CommunicationError, ValueError))
                raise
        if delay == 0:
            return
        with self._work.after_caller():
            pass  # so that the work stream waits for what was measured
        fragment.flight = Flight(lambda: exchange(fragment), self._work, self.comm.round_thread)

    def _measure(self, fragment: Fragment) -> None:
        """The pseudo-gradient: from the estimate where this period began to where it ended."""
        factor = self.averager.debias_factor(fragment.state)
        for (_, anchor), gradient, p in zip(fragment.anchors, fragment.changes, self._parts(fragment), strict=True):
            torch.mul(anchor, factor, out=gradient)
            gradient.sub_(p if fragment.has_moved else gradient)  # a healed worker's have rounding alone
        for copied, (_, anchor) in zip(fragment.pulled, fragment.anchors, strict=False):
            copied.copy_(anchor)

    def _apply_own_changes(self, fragment: Fragment) -> None:
        """Under gossip: give up changes that are not finite, and apply the others, unless `pull` mixes them first."""
        fragment.rejected = not self._shards.all(kernels.flags.read(kernels.all_finite(fragment.changes)))
        if not fragment.rejected and self.strategy.pull is None:
            fragment.rejected = not self._apply(fragment)
        if fragment.rejected:
            self._warn()
            for gradient in fragment.changes:
                gradient.zero_()

    def _exchange(self, fragment: Fragment) -> bool:
        """Phase 2, in this or another thread; returns whether the result is finite."""
        self._send(fragment)
        return self._shards.commit(self.averager, fragment.state)

    def _send(self, fragment: Fragment) -> None:
        comm, before = self.comm, self.comm.ledger.bytes_sent
        if self.strategy.weights is not None:
            is_finite = self.strategy.weights.scale(fragment.changes, fragment.statistics, comm)
            fragment.rejected = not is_finite
        tensors = fragment.named_changes() if self.averager.traits.gives_one_mean else fragment.tensors
        with comm.ledger.counted_by_steps():
            handle_of(self.averager, self.averager.step(fragment.state, tensors, comm)).wait()
        comm.ledger.record_round(comm.ledger.bytes_sent - before)

    def _merge(self, fragment: Fragment, alpha: float) -> None:
        """Phases 3 and 4."""
        if self._asynchronous is not None:
            if not self._asynchronous.merge(fragment, self._parts(fragment)):
                self._warn()
            return
        if fragment.flight is not None:
            with self._clock("blocked"):
                fragment.finite, fragment.flight = fragment.flight.wait(), None
        finite, fragment.finite = bool(fragment.finite), None
        if self.averager.traits.gives_one_mean or self.strategy.pull is not None:
            finite = finite and self._apply(fragment)
            if not finite:
                self._warn()
        # Changes that are given up may not stay in a share of the parameters.
        self._restart(fragment, alpha if finite and not fragment.rejected else 0.0)
        # Alike on all workers, also where one has given up its changes: `synchronize` has a round of what has moved.
        fragment.rejected, fragment.has_moved = False, alpha != 0
        if self._scheduler is not None and fragment is self._fragments[-1]:  # once a period
            self._scheduler.step()

    def _merge_all(self) -> None:
        for fragment in self._fragments:
            if fragment.in_flight:
                self._merge(fragment, self.strategy.alpha)

    def _apply(self, fragment: Fragment) -> bool:
        """The outer optimizer's step on the anchors of one fragment; undone and False if parameters cannot hold them."""
        with self._clock("outer"):
            for copied, (_, anchor), gradient in zip(fragment.pulled, fragment.anchors, fragment.changes, strict=False):
                gradient.add_(anchor - copied, alpha=self.strategy.pull or 0.0)
            anchors = [anchor for _, anchor in fragment.anchors]
            # bfloat16 has the range of float32, so only float16 and less need copies
            is_narrow = any(torch.finfo(p.dtype).max < 1e38 for p in self._parts(fragment))
            before = self._kept(anchors) if is_narrow else []
            for anchor, gradient in zip(anchors, fragment.changes, strict=True):
                anchor.grad = gradient
            self._outer.step()
            for anchor in anchors:
                anchor.grad = None  # the next step is another fragment's
            if not is_narrow or self._fits(fragment):
                return True
            for anchor, (value, state) in zip(anchors, before, strict=True):
                anchor.copy_(value)
                self._outer.state[anchor] = state
            return False

    def _kept(self, anchors: list[nn.Parameter]) -> list[tuple[Tensor, Any]]:
        """Copies of anchors and of what the outer optimizer remembers of each."""
        return [(anchor.clone(), copy.deepcopy(self._outer.state.get(anchor, {}))) for anchor in anchors]

    def _fits(self, fragment: Fragment) -> bool:
        """Whether what `_restart` writes is finite; on all shards of a model alike."""
        pairs = zip(self._starts(fragment), self._parts(fragment), strict=True)
        written = [start.to(p.dtype) for start, p in pairs]
        return self._shards.all(kernels.flags.read(kernels.all_finite(written)))

    def _warn(self) -> None:
        warnings.warn(f"rank {self.comm.rank}: changes were not finite and are given up", RuntimeWarning, stacklevel=2)

    # ---- state: saved, restored, handed to a worker that joins ----

    def _identity(self) -> dict[str, Any]:
        """With the outer optimizer, because the saved one brings its learning rate and momentum along."""
        outer = self.strategy.outer or PLAIN_AVERAGING
        # A function that makes it has no notation.
        text = repr(outer) if isinstance(outer, OuterSGD) else type(self._outer).__name__
        return super()._identity() | {"outer optimizer": text}

    @torch.no_grad()
    def _loaded(self, redistributed: bool) -> None:
        if not redistributed:
            return
        # Alike on all workers.
        if self.comm.rank == 0 and any(fragment.has_moved for fragment in self._fragments):
            text = f"{self.call}: what workers changed since their last rounds belongs to no worker now, and is lost"
            warnings.warn(f"{text}; call synchronize() before saving to keep it", RuntimeWarning, stacklevel=1)
        self._restart_all()

    def _restart_all(self) -> None:
        """Go on from the anchors. Changes since the last rounds, and rounds of gossip in flight, were each worker's own."""
        for fragment in self._fragments:
            fragment.rejected = False
            if not self.averager.traits.gives_one_mean:
                fragment.finite, fragment.steps_to_merge = None, 0
            self._restart(fragment, alpha=0.0)
            if fragment.is_sent:
                self._measure(fragment)  # no changes

    def _averaged(self) -> list[tuple[Any, NamedTensors]]:
        return [(fragment.state, fragment.tensors) for fragment in self._fragments]

    def _share(self) -> None:
        """The anchors stand for the parameters: what a live worker has changed since its last round is its own.

        Anchors and outer optimizer do not change within a round, so they may come while the others train.
        """
        record, is_common = self._record, self.averager.traits.gives_one_mean

        def load_anchors(part: dict[str, Any]) -> None:
            load_tensors(record.anchor, part["anchor"], "anchors")
            loaded_outer(record, record.outer, part["outer"])
            self._restart_all()

        def inner() -> dict[str, Any]:
            return {"optimizer": self._optimizer.state_dict(), "buffers": dict(self._model.named_buffers())}

        def load_inner(part: dict[str, Any]) -> None:
            self._optimizer.load_state_dict(part["optimizer"])
            load_tensors(dict(self._model.named_buffers()), part["buffers"], "buffers")

        weighs_own = self.strategy.weights is not None  # each worker by statistics of its own norms
        self._share_part(
            "position",
            lambda: shared_part(record, LATE),
            lambda part: load_shared(record, part, LATE),
            is_common and not weighs_own,
        )
        self._share_part(
            "anchors",
            lambda: {"anchor": dict(record.anchor), "outer": named_outer(record, record.outer)},
            torch.no_grad()(load_anchors),
            is_common,
            self._heals_late,
        )
        self._share_part("inner", inner, load_inner, is_common=False, is_late=self._heals_late)

    @property
    def _heals_late(self) -> bool:
        """Whether workers need nothing of a joiner until their exchange, so that they train on while its state travels."""
        return self.averager.traits.gives_one_mean and not self.strategy.delay and not self.strategy.state_every

    def _find_moved(self) -> None:
        """Look for fragments that a program has changed since their last round, without a step, on any worker."""
        unmoved = [fragment for fragment in self._fragments if not fragment.has_moved]
        if self._elastic is not None or self._asynchronous is not None or not unmoved:
            return
        is_as_restarted = all(
            torch.equal(start.to(p.dtype), p)
            for fragment in unmoved
            for start, p in zip(self._starts(fragment), self._parts(fragment), strict=True)
        )
        is_as_restarted = self.comm.all_true(self._shards.all(is_as_restarted))
        for fragment in unmoved:
            fragment.has_moved = not is_as_restarted

    def _starts(self, fragment: Fragment) -> Iterator[Tensor]:
        """Where the parameters of a fragment begin its next period."""
        factor = self.averager.debias_factor(fragment.state)
        return (anchor.detach() * factor for _, anchor in fragment.anchors)

    def _restart(self, fragment: Fragment, alpha: float) -> None:
        for start, p in zip(self._starts(fragment), self._parts(fragment), strict=True):
            # `lerp` would keep a NaN of the parameters even at alpha 0.
            p.copy_(start if alpha == 0 else torch.lerp(start, p.to(start.dtype), alpha))
        fragment.has_moved = alpha != 0

    def _parts(self, fragment: Fragment) -> list[Tensor]:
        """The parameters of a fragment, as they are now."""
        return [values_of(self.parameters[place][1]) for place in fragment.places]


def _anchor_of(p: Tensor) -> nn.Parameter:
    """A copy in float32 at least, so that small outer steps are not lost."""
    wide = torch.promote_types(p.dtype, torch.float32)
    return nn.Parameter(p.to(wide, copy=True, memory_format=torch.contiguous_format))
