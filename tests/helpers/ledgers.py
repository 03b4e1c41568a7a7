"""What the ledger counts of a round."""

from __future__ import annotations

import thinwire as tw
from thinwire.average.base import Averager, NamedTensors


def ledger_of_round(comm: tw.comm.Communicator, averager: Averager, tensors: NamedTensors) -> tw.comm.Ledger:
    """The ledger of the first round, without what `init` sends."""
    state = averager.init(tensors, comm)
    before = comm.ledger.snapshot()
    averager.step(state, tensors, comm).wait()
    return comm.ledger.since(before)
