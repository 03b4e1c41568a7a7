"""The position of a worker in the run, and what is due after its round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ....algorithm import require
from ....comm.elastic.claims import MAX_ROUNDS

DUE = ("row_is_due", "test_is_due", "save_is_due")


@dataclass
class RunState:
    """The position of a worker in the run. In an elastic run, a worker that joins gets it from a live one.

    Attributes:
        done: number of committed steps.
        row: the last row of metrics.
        aborted, healings: of an elastic run, from its start.
        row_is_due, test_is_due, save_is_due: what to do after the round. With local updates a round has many steps.
    """

    done: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    aborted: int = 0
    healings: int = 0
    row_is_due: bool = False
    test_is_due: bool = False
    save_is_due: bool = False

    def load(self, sent: dict[str, Any]) -> None:
        """Load the fields of another worker's state. It may leave out the row.

        Raises:
            ValueError: the state is impossible; nothing is loaded then.
        """
        # It comes from the network, so nothing is believed before all of it is checked.
        counts = [sent["done"], sent["aborted"], sent["healings"]]
        require(
            all(type(count) is int and 0 <= count <= MAX_ROUNDS for count in counts)
            and all(type(sent[name]) is bool for name in DUE)
            and isinstance(sent.get("row", {}), dict),
            f"impossible position in the run: step {sent['done']!r}, {counts[1]!r} rounds given up, {counts[2]!r} healings",
        )
        vars(self).update({name: value for name, value in sent.items() if name in vars(self)})
