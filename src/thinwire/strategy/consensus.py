"""Averaging alone: how fast an averager brings fixed tensors to their mean, and for how many bits.

    1. measure     the true mean, once, and each worker's distance to it
    2. average     one round of the averager
    3. measure     again, and record it with what the round has sent

Measuring costs messages of its own. The communicator's ledger counts them, for they are real; the records do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithm import require
from ..average.base import Averager, NamedTensors, handle_of
from ..comm import Communicator
from ..options import require_integer


class ConsensusRecord(NamedTuple):
    """What all workers have sent after so many rounds, and how far they are from agreement.

    Attributes:
        round: rounds done; 0 is the start.
        bits_sent: bits that all workers together have sent to average, and nothing else.
        messages: messages that all workers together have sent to average.
        squared_error: `1/W sum_i |z_i - mean|^2`, over all elements, z_i being worker i's estimate of the mean.
    """

    round: int
    bits_sent: int
    messages: int
    squared_error: float


def consensus(
    tensors: NamedTensors,
    averager: Averager,
    rounds: int,
    comm: Communicator,
    seed: int = 0,
    every: int = 1,
    on_record: Callable[[ConsensusRecord], None] | None = None,
) -> list[ConsensusRecord]:
    """Average `tensors` for some rounds, and record the distance to the true mean against bits and messages.

    All workers call it, and all get the same records. Works with any averager, `Mean` included.

    Args:
        tensors: named start values of this worker, the same names and shapes on all; afterwards they hold the result
            (under push-sum divided by its weight).
        averager: how to agree.
        rounds: how many rounds.
        comm: the communicator.
        seed: of the averager's random numbers.
        every: record each so many rounds, and the last one; higher => less time spent measuring.
        on_record: called on every worker with each record, such as to show progress.

    Returns:
        The records, from round 0 on.

    Raises:
        ValueError: rounds or every out of range, or what the averager's `init` refuses.

    Example:
        >>> import torch, thinwire as tw
        >>> def worker(comm):
        ...     x = torch.tensor([float(comm.rank)])
        ...     return tw.consensus([("x", x)], tw.Mix(tw.Exponential()), 2, comm)
        >>> for record in tw.LocalWorld(4).run(worker)[0]:
        ...     print(*record)
        0 0 0 1.25
        1 128 4 0.5
        2 256 8 0.0
    """
    require(
        isinstance(averager, Averager), f"consensus: averager must have rounds, such as Mix(Ring()), got {averager!r}"
    )
    require_integer("consensus: rounds", rounds, 0)
    require_integer("consensus: every", every, 1)
    comm.check_agreement({"averager": averager, "rounds": rounds, "seed": seed, "every": every})
    state = averager.init(tensors, comm, seed)
    averager.check_names([name for name, _ in tensors], comm.rank)
    mean = comm.all_reduce(_flat(tensors)).wait() / comm.size
    records, sent = [], torch.zeros(2, dtype=torch.float64, device="cpu")
    for round in range(rounds + 1):
        if round > 0:
            sent += _one_round(state, tensors, averager, comm)
        if round % every == 0 or round == rounds:
            records.append(_measure(round, sent, _flat(tensors) * averager.debias_factor(state) - mean, comm))
            if on_record is not None:
                on_record(records[-1])
    for _, t in tensors:
        t.mul_(averager.debias_factor(state))
    return records


def _one_round(state: object, tensors: NamedTensors, averager: Averager, comm: Communicator) -> Tensor:
    """Average once; returns the bits and messages that this worker has sent for it."""
    before = comm.ledger.snapshot()
    handle_of(averager, averager.step(state, tensors, comm)).wait()
    averager.commit(state)
    traffic = comm.ledger.since(before)
    return torch.tensor([8 * traffic.bytes_sent, traffic.messages], dtype=torch.float64, device="cpu")


def _measure(round: int, sent: Tensor, difference: Tensor, comm: Communicator) -> ConsensusRecord:
    """Put together what all workers have sent and how far they are; float64 counts exactly up to 2^53."""
    own = torch.cat([sent.to(difference.device), difference.square().sum().view(1)])
    bits, messages, error = torch.stack(comm.all_gather(own).wait()).sum(0).tolist()
    return ConsensusRecord(round, int(bits), int(messages), error / comm.size)


def _flat(tensors: NamedTensors) -> Tensor:
    return torch.cat([t.detach().reshape(-1).to(torch.float64) for _, t in tensors])
