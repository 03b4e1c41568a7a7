"""The exchanges of local updates where workers come and go: all workers of a round keep their results, or none does.

A round of the elastic communicator holds the exchanges that begin at one step. It ends when the first of them is to be
merged, or when the next exchange begins. Then all workers vote. If one has died meanwhile, the others go back to what they
sent, and send it again at once, to those that are left.

A worker that is healed has the record of another one, so what it does next follows from the record. It may be healed while
the others send again (`is_joining`). Then it has no changes, and takes part at the end of its next step, which is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...average.base import Averager
from ...comm import CommunicationError
from ..model.shards import Replica
from ..transaction import Transaction, remember
from .fragments import Fragment


@dataclass(eq=False)
class ElasticExchanges:
    """The exchanges of one worker; see the module's text.

    Attributes:
        averager: of the strategy.
        fragments: of the model.
        transaction: begins and ends rounds.
        shards: the processes that hold the other shards of the model.
        send: exchanges the changes of a fragment, in any thread.
    """

    averager: Averager
    fragments: Sequence[Fragment]
    transaction: Transaction
    shards: Replica
    send: Callable[[Fragment], None]

    @property
    def is_joining(self) -> bool:
        """Whether the others exchange what this worker, which was healed, has not sent yet."""
        return any(fragment.is_sent and fragment.undo is None for fragment in self.fragments)

    def keep(self, fragment: Fragment) -> None:
        """Remember what a round that is given up goes back to. Call it before each exchange."""
        tensors: list[Tensor] = [*fragment.changes, *fragment.pulled]
        if not self.averager.traits.gives_one_mean:  # gossip moves the anchors themselves
            tensors += [anchor.detach() for _, anchor in fragment.anchors]
        go_back, statistics = remember(fragment.state, tensors), copy.deepcopy(fragment.statistics)

        def undo() -> None:
            go_back()
            fragment.statistics = statistics

        fragment.undo = undo

    def exchange(self, fragment: Fragment) -> bool:
        """Exchange the changes, in any thread; returns whether all messages came."""
        try:
            self.send(fragment)
        except CommunicationError:
            return False
        return True

    def end(self, again: bool = True) -> bool:
        """Commit the exchanges under way; False if this worker was healed instead, and must look at its record anew.

        Args:
            again: whether to send again until a round is committed; otherwise drop what was given up.
        """
        sent = [fragment for fragment in self.fragments if fragment.is_sent]
        while sent:
            if self.transaction.begin():
                return False
            # A list, because every flight must have ended before the vote.
            if self.transaction.end(all([self._has_arrived(fragment) for fragment in sent])):
                for fragment in sent:
                    fragment.finite = self.shards.commit(self.averager, fragment.state)
                    fragment.is_sent, fragment.undo = False, None
                return True
            for fragment in sent:
                assert fragment.undo is not None
                fragment.undo()
                fragment.is_sent, fragment.undo = again, None
            sent = sent if again else []
        return True

    def settle(self) -> None:
        """Commit the exchanges under way, whatever happens."""
        while not self.end():
            pass

    def _has_arrived(self, fragment: Fragment) -> bool:
        # Nothing is on its way, such as without a delay, or after a round that was given up.
        if fragment.flight is None:
            self.keep(fragment)
            return self.exchange(fragment)
        has_all, fragment.flight = fragment.flight.wait(), None
        return has_all
