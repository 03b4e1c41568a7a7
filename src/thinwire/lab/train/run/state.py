"""The position of a worker in the run, and what is due after its round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ....algorithm import require
from ....comm.elastic.claims import MAX_NUMBER, MAX_ROUNDS
from ..step.steps import START, Position

DUE = ("row_is_due", "test_is_due", "save_is_due")


@dataclass
class RunState:
    """The position of a worker in the run. In an elastic run, a worker that joins gets it from a live one.

    Attributes:
        done: number of committed steps.
        origin: where the current number of workers began.
        size: number of workers.
        row: the last row of metrics.
        aborted, healings: of an elastic run, from its start.
        row_is_due, test_is_due, save_is_due: what to do after the round. With local updates a round has many steps.
    """

    done: int = 0
    origin: Position = START
    size: int = 1
    row: dict[str, Any] = field(default_factory=dict)
    aborted: int = 0
    healings: int = 0
    row_is_due: bool = False
    test_is_due: bool = False
    save_is_due: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for `load`."""
        return vars(self) | {"origin": list(self.origin)}

    def load(self, sent: dict[str, Any]) -> None:
        """Load the state that another worker sent. It may leave out the row.

        Raises:
            ValueError: the state is impossible; nothing is loaded then.
        """
        counts = [sent["done"], sent["aborted"], sent["healings"], *sent["origin"]]
        require(
            all(type(count) is int and 0 <= count <= MAX_ROUNDS for count in counts)
            and len(sent["origin"]) == len(START)
            and all(type(sent[name]) is bool for name in DUE)
            and type(sent["size"]) is int
            and 1 <= sent["size"] <= MAX_NUMBER
            and isinstance(sent.get("row", {}), dict)
            and sent["origin"][0] <= sent["done"],
            f"impossible position in the run: step {sent['done']!r} of {sent['size']!r} workers, from {sent['origin']!r}",
        )
        known = {name: value for name, value in sent.items() if name in vars(self)}
        vars(self).update(known | {"origin": Position(*sent["origin"])})
