"""What `Local` does with a `Quorum`: rounds that merge what has come; workers take unequal numbers of steps.

    1. measure    g_i = anchor - parameters, from the version of the anchor that this worker went on from
    2. send       encoded, to all workers; the worker trains on until its round is committed, for `delay` steps at most
    3. merge      all rounds up to the one that has its change, in order (`commit_protocol.py`): the same shares in rank order,
                  with the same weights, so that anchors have the same bits on all workers at each version
    4. go on      parameters <- anchor + what they changed since the send

A worker's anchor stays where its change was measured from until it merges. Rounds that others commit meanwhile wait, encoded.

Where a sampler assigns blocks of data (`Leases`), a share of the first fragment says from how many blocks it was made. Every
worker sees the same rounds in the same order, so all assign the same blocks to the same workers, and nobody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ... import kernels
from ...average.robust.base import Messages
from ...average.robust.median_norm import MedianNorm, weighted
from ...average.robust.record import RuleState
from ...clock import Clock
from ...comm import Communicator
from ...membership import State, nested, shared
from .commit_protocol import CommitProtocol, CommittedRound
from .fragments import Fragment, offset
from .quorum import Quorum, StepTimer, steps_of

if TYPE_CHECKING:
    from .local import Local

Merge = Callable[[Sequence[int], Sequence[float]], kernels.flags.Flag]
"""Given numbers of shares and their weights, sets a fragment's changes; returns whether they are finite."""


@dataclass
class Committed(State):
    """What all rounds so far have merged; the same on all workers that have merged as many.

    Attributes:
        rounds: committed rounds of all fragments.
        tokens: those that the merged changes were made from, added up over fragments.
        dropped_tokens: those of changes that came too late.
        num_merged: merged changes.
        num_late: those of them that missed a round.
        late_rounds: how many rounds these missed, added up.
        num_dropped: changes that came too late.
        clipped: norms of what clipping dropped of the merged changes, added up.
        rule: who was wrong for how long, and is set aside.
    """

    rounds: int = shared(default=0)
    tokens: int = shared(default=0)
    dropped_tokens: int = shared(default=0)
    num_merged: int = shared(default=0)
    num_late: int = shared(default=0)
    late_rounds: int = shared(default=0)
    num_dropped: int = shared(default=0)
    clipped: float = shared(default=0.0)
    rule: RuleState = nested(default_factory=lambda: RuleState({}))


class Part(NamedTuple):
    """A worker's part of a committed round.

    Args:
        blocks: of data that it was made from.
        wanted: how many the worker wants to have assigned after it.
        is_merged: whether it counts; else it came too late, or was not finite, or its worker is set aside.
    """

    blocks: int
    wanted: int
    is_merged: bool


class Leases(Protocol):
    """Assigns blocks of data to the workers; all of them call it with the same rounds in the same order."""

    def claim_share(self) -> int:
        """How many blocks the changes since this worker's last share are made from."""

    def committed(self, parts: Mapping[int, Part], gone: Sequence[int]) -> None:
        """A round: the parts of its workers, by rank, and the workers that are gone since the one before."""

    def all_met(self, members: Sequence[int], wanted: int) -> None:
        """All that was sent is committed or dropped. These workers go on, and want so many blocks at first."""


class AsynchronousRounds:
    """Sends and merges the changes of one worker; see the module's text. All workers construct it together.

    Args:
        strategy: with a quorum.
        fragments: of the model, with the averager's states.
        comm: connects the workers.
        clock: times how long the training waits.
        apply: takes the outer step of a fragment, and returns whether its result was finite.

    Attributes:
        every, delay: H and tau of this worker in its present period.
        committed: see `Committed`.
        on_commit: called with T after each merged round of the first fragment.
        leases: the blocks of data of the workers, if a sampler assigns them.
        is_synchronized: whether all workers have the same state.
    """

    def __init__(
        self,
        strategy: Local,
        quorum: Quorum,
        fragments: Sequence[Fragment],
        comm: Communicator,
        clock: Clock,
        apply: Callable[[Fragment], bool],
    ):
        self._strategy, self._quorum, self._averager, self._comm = strategy, quorum, strategy.averager, comm
        messages = strategy.averager.traits.lone_messages
        assert messages is not None, "the strategy has checked it"
        self._messages = messages
        self.on_commit: Callable[[int], None] = lambda tokens: None
        self.leases: Leases | None = None
        self._fragments, self._clock, self._apply, self._timer = fragments, clock, apply, StepTimer()
        self._step_tokens, self._is_first_period = 0, True
        self.every, self.delay, self.is_synchronized, self.committed = strategy.every, strategy.delay, True, Committed()
        self._has_drained, self._most_ahead = False, steps_ahead(strategy.every, strategy.delay)
        most = max(self._messages.nbytes(fragment.named_changes()) for fragment in fragments)
        self.protocol = CommitProtocol(quorum, len(fragments), comm, most)

    # ---- steps of the inner optimizer ----

    def count_tokens(self, number: int) -> None:
        """This step is made from so many tokens."""
        self._step_tokens += number

    def stepped(self, step: int) -> None:
        """Step `step` of a period has ended."""
        self.protocol.check()
        self._timer.stepped()
        self.is_synchronized = False
        if self._is_first_period and self._quorum.follow_speed:
            self._choose_period(step)
            if len(self._timer.durations).bit_count() == 1:  # 1, 2, 4, ... steps are measured
                self.protocol.tell_speed()
        for fragment in self._fragments:
            fragment.tokens += self._step_tokens or 1
            share = fragment.pending_share
            # A round that was committed before the delay is over is merged in this step.
            if share is not None and self.protocol.is_ready(fragment.index, share):
                fragment.steps_to_merge = 0
        self._step_tokens = 0

    def resume(self) -> None:
        """The next step begins."""
        self._timer.resume()

    def begin_period(self) -> None:
        """Choose how many steps this worker takes between two rounds, by its speed."""
        self._is_first_period = False
        self._choose_period(0)

    def _choose_period(self, step: int) -> None:
        """Set H and tau of this worker, in a period of which `step` steps are done."""
        self.protocol.speeds[self._comm.rank] = speed = self._timer.speed
        if self._quorum.follow_speed:
            every = steps_of(self._strategy.every, speed, [*self.protocol.speeds.values()])
            self.every = max(every, step)  # a period in which more steps are done ends at once
            # Rounded up: with a delay of 0 a slow worker waited for each round (docs/negative-results.md).
            self.delay = -(-self._strategy.delay * every // self._strategy.every)
        self.protocol.delay_seconds = self.delay * self._timer.step_seconds
        for fragment in self._fragments:
            if fragment.offset >= step or step == 0:  # else it was sent in this period
                fragment.offset = max(offset(fragment.index, len(self._fragments), self.every), step)

    # ---- rounds ----

    def send(self, fragment: Fragment, parts: Sequence[Tensor], is_finite: bool) -> None:
        """Phase 2: send the measured changes of a fragment, whose parameters are `parts`."""
        tokens, fragment.tokens = fragment.tokens if is_finite else 0, 0
        # A change that is not finite is sent without a message, so that its round does not wait for this worker.
        message = torch.empty(0, dtype=torch.uint8, device="cpu")
        if is_finite:
            with self._comm.ledger.counted_by_steps():
                message = self._messages.make(fragment.state, fragment.named_changes(), self._comm)
        fragment.sent = [p.clone() for p in parts] if is_finite else []
        blocks = (0, 0)
        if self.leases and fragment.index == 0:
            blocks = self.leases.claim_share(), steps_ahead(self.every, self.delay)
        fragment.pending_share, num_bytes = self.protocol.send(fragment.index, fragment.base, tokens, blocks, message)
        self._comm.ledger.record_round(num_bytes)

    def merge(self, fragment: Fragment, parts: Sequence[Tensor]) -> bool:
        """Phases 3 and 4: wait for the round of this worker's change, and move its parameters to the new anchor.

        Args:
            fragment: what is merged.
            parts: its parameters; those that were not finite restart at the anchor.

        Returns:
            Whether all was finite.
        """
        share, fragment.pending_share = fragment.pending_share, None
        assert share is not None
        with self._clock("blocked"):
            self.protocol.wait_for(fragment.index, share)
        rounds = self.protocol.take(fragment.index)
        # A list, because rounds are merged also after one that was not finite.
        is_finite = all([self._commit(fragment, one) for one in rounds])
        anchors, sent = [anchor for _, anchor in fragment.anchors], fragment.sent or parts
        for anchor, p, before in zip(anchors, parts, sent, strict=True):
            p.copy_(anchor if before is p else anchor + (p.to(anchor.dtype) - before.to(anchor.dtype)))
        fragment.sent = []
        return is_finite

    def drain(self) -> bool:
        """Merge the next rounds of others; returns False once all workers call it, and all rounds are merged."""
        if self._has_drained:
            return False
        with self._clock("blocked"):
            rounds = self.protocol.drain()
        for fragment, new in zip(self._fragments, rounds, strict=True):
            for one in new:
                self._commit(fragment, one)
        self._has_drained = not any(rounds)
        return not self._has_drained

    def all_met(self) -> None:
        """All workers have drained, and begin anew."""
        self.is_synchronized, self._has_drained = True, False
        for fragment in self._fragments:
            fragment.tokens = 0
        if self.leases:
            self.leases.all_met(self.protocol.members_at_end, self._most_ahead)

    def assign_blocks(self, leases: Leases) -> None:
        """Let this assign blocks of data from now on."""
        self.leases = leases
        leases.all_met(range(self._comm.size), self._most_ahead)

    def _commit(self, fragment: Fragment, one: CommittedRound) -> bool:
        """Merge the changes of one round, and end the round of this worker's own."""
        stale, shares = self._quorum.stale, one.shares
        late = [max(0, one.version - 1 - share.base) for share in shares]
        tokens = [share.tokens for share in shares]
        weights = self._quorum.weights(tokens, late)
        counted, merge = [i for i, weight in enumerate(weights) if weight > 0], self._added(fragment, one)
        # `MedianNorm` does not clip fewer than three.
        if self._quorum.rule is not None and len(counted) > 2:
            workers = {i: shares[i].worker for i in counted}
            counted, merge = self._clipped(fragment, workers, merge, self._quorum.rule)
            # Shares that the rule left out count as having no tokens.
            weights = self._quorum.weights([n * (i in counted) for i, n in enumerate(tokens)], late)
        is_finite = True
        for group in [[i] for i in counted] if stale.steps_by_change else [counted] if counted else []:
            # Weights add up to 1 over a round, and a step for each change divides by their number itself.
            factor = len(counted) if stale.steps_by_change else 1
            finite = merge(group, [factor * weights[i] for i in group])
            is_finite = is_finite and kernels.flags.read(finite) and self._apply(fragment)
        for share, weight, staleness in zip(shares, weights, late, strict=True):
            self._count(share.tokens, weight, staleness)
            fragment.committed_tokens += share.tokens if weight > 0 else 0
            if share.worker == self._comm.rank and share.tokens:
                self._averager.commit(fragment.state) if weight > 0 else self._averager.discard(fragment.state)
        self.committed.rounds += 1
        fragment.base = one.version
        if fragment.index == 0:
            if self.leases:
                # A worker gets no more blocks than a period needs, whatever it asks for.
                parts = {
                    share.worker: Part(share.blocks, min(share.wanted, self._most_ahead), weight > 0)
                    for share, weight in zip(shares, weights, strict=True)
                }
                self.leases.committed(parts, one.gone)
            self.on_commit(fragment.committed_tokens)
        return is_finite

    def _added(self, fragment: Fragment, one: CommittedRound) -> Merge:
        """Sets the fragment's changes to a weighted sum of some shares."""
        messages, device = [share.message for share in one.shares], fragment.changes[0].device
        return lambda group, weights: self._messages.merge(
            fragment.state, [messages[i].to(device) for i in group], weights, fragment.named_changes(), self._comm
        )

    def _clipped(
        self, fragment: Fragment, workers: Mapping[int, int], add: Merge, rule: MedianNorm
    ) -> tuple[list[int], Merge]:
        """Clip changes to their median norm, and leave out those that are not finite or of workers that are set aside.

        Args:
            fragment: whose changes they are.
            workers: the worker of each share, by the share's place in the round.
            add: as `_added` made it.
            rule: clips them.

        Returns:
            The places of the shares that are left, and what merges them.
        """
        known, rows, not_finite = self.committed.rule, dict[int, Tensor](), list[int]()
        numels = [t.numel() for t in fragment.changes]
        if not known.wrong_rounds:
            known.regroup(None, self._comm.size)
        for i, worker in workers.items():
            if not kernels.flags.read(add([i], [1.0])):
                not_finite.append(worker)
            elif worker not in known.set_aside:
                rows[i] = torch.cat([t.float().flatten() for t in fragment.changes])
        if not rows:
            return [], add
        counted, stacked = list(rows), torch.stack(list(rows.values()))
        factors, norms, dropped = rule.factors(Messages(stacked, numels))
        known.judgement = known.judged([workers[i] for i in counted], not_finite, norms, dropped)
        known.commit(rule)
        self.committed.clipped += dropped.sum().item()

        def merge(group: Sequence[int], weights: Sequence[float]) -> kernels.flags.Flag:
            own = [counted.index(i) for i in group]
            scaled = factors[own] * torch.tensor(weights, dtype=torch.float64, device=factors.device)[:, None]
            summed = weighted(Messages(stacked[own], numels), scaled)
            for target, part in zip(fragment.changes, summed.split(numels), strict=True):
                target.copy_(part.view_as(target))
            return kernels.all_finite(fragment.changes)

        return counted, merge

    def _count(self, tokens: int, weight: float, staleness: int) -> None:
        committed = self.committed
        if weight > 0:
            committed.tokens += tokens
            committed.num_merged += 1
            committed.num_late += staleness > 0
            committed.late_rounds += staleness
        elif tokens:
            committed.dropped_tokens += tokens
            committed.num_dropped += 1


def steps_ahead(every: int, delay: int) -> int:
    """Blocks that are assigned to a worker before its next round: a quarter more than it takes, for it may get faster.

    Example:
        >>> steps_ahead(30, 3)
        41
    """
    return -(-5 * every // 4) + delay
