"""The ledger: every byte that crosses the wire, by collective and by direction.

Counts are per worker and of payload: what this worker sends to others and receives from them. Its own copy is not
counted, nor are the headers of TCP. With W workers and a message of n bytes,

    collective    sent by this worker        received          what happens
    all_reduce    2 (W-1)/W n                the same          worker r adds up part r; its sum goes to all; see `sums.py`
    all_gather    (W-1) n                    what others hold  everyone sends straight to everyone
      variable    (W-1) (8 + n)              the same          sizes first, as int64
    all_to_all    what goes to others        what comes        straight
    exchange      what goes to peers         what comes        straight
    reduce        n (root: (W-1)/W n)        (W-1)/W n         as all_reduce; then the root receives (W-1)/W n more
    reduce_scatter  the parts of others      (W-1) n           straight; n is the size of the own part
    send          n + 1                      1                 straight; a byte says that there is a message, and
    receive       1                          n + 1             a byte that its receiver is ready
    broadcast     n per child in the tree    n, but the root 0 binomial tree over ranks counted from the root
    barrier       (W-1)                      (W-1)             an all_gather of one byte
    channel       9 + n per message          the same          straight; sending and receiving are calls of their own

`TcpCommunicator` alone has those from reduce to receive. A test holds the others, over it and over Gloo, worker by worker, to
the operating system's counters: beyond these counts, Gloo adds at most 144 bytes to a message, and TCP its
headers. A tensor is cut into whole elements, so that the row of all_reduce is a mean over workers; the ledger has what each
one sends: bytes, and messages of each step and piece. Over our own connections, to a chunk of a message (256 KiB; 64 KiB from a
round trip of 3 ms on, 14 KiB from 15 ms on) it adds 32 bytes, and 32 to acknowledge 512 KiB (128 KiB from 3 ms on). What is
sent again, because a connection was lost or a chunk is late, is not in the ledger: `TcpCommunicator.counts` has it. Channels
are on the same connections: 32 bytes to a chunk, 32 to acknowledge the end of each message, and 32 to each peer four times in
the time limit.
NCCL and MPI choose among algorithms of their own: for them the rows of all_reduce, all_gather and broadcast are the
least that any algorithm without reduction in the network sends, in as many messages as over other backends, while exchange
and all_to_all are exact. NCCL's all_gather sends slots of one size, a multiple of 16 bytes, where that pads all messages by
an eighth and 16 bytes each at most; padding counts as sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass
class Traffic:
    """What one kind of collective has cost this worker."""

    calls: int = 0
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class _BySteps(threading.local):
    """The ledgers for which this thread runs a round of counted steps."""

    ledgers: tuple[Ledger, ...] = ()


_by_steps = _BySteps()


@dataclass
class Ledger:
    """Bytes and messages of one worker, by collective, beside what dense averaging would have cost.

    Args:
        size: number of workers, W.
        dense_numel: elements that were averaged, by whatever means, for the comparison with dense averaging.
        num_steps: optimizer steps, where each worker has a model of its own.
        step_numel: elements that dense training would have averaged in these steps; `dense_numel` has none of their rounds.
        peak_bytes_sent: the most that one round of that strategy sent.

    Example:
        >>> ledger = Ledger(size=4)
        >>> ledger.record("all_gather", messages=3, bytes_sent=300, bytes_received=300)
        >>> ledger.count_averaged(1000)
        >>> ledger.bytes_sent, ledger.dense_fp32_bytes, ledger.dense_bf16_bytes
        (300, 6000, 3000)
    """

    size: int
    dense_numel: int = 0
    collectives: dict[str, Traffic] = field(default_factory=dict)
    num_steps: int = 0
    step_numel: int = 0
    peak_bytes_sent: int = 0

    def record(self, collective: str, messages: int, bytes_sent: int, bytes_received: int) -> None:
        """Adds one call of `collective`; `messages` counts those that this worker sends."""
        traffic = self.collectives.setdefault(collective, Traffic())
        traffic.calls += 1
        traffic.messages += messages
        traffic.bytes_sent += bytes_sent
        traffic.bytes_received += bytes_received

    def add_received(self, collective: str, num_bytes: int) -> None:
        """Adds what a call that is recorded already turned out to receive, where its size was not known before."""
        self.collectives[collective].bytes_received += num_bytes

    def count_step(self, numel: int) -> None:
        """Notes an optimizer step on so many elements, in which dense training would have averaged them."""
        self.num_steps += 1
        self.step_numel += numel

    def count_averaged(self, numel: int) -> None:
        """Notes that so many elements are averaged, unless the steps of this round are counted; averagers call it in `step`."""
        if not any(ledger is self for ledger in _by_steps.ledgers):
            self.dense_numel += numel

    @contextmanager
    def counted_by_steps(self) -> Iterator[None]:
        """Context for a round of which the steps are counted: what this thread averages is no part of `dense_numel`."""
        before = _by_steps.ledgers
        _by_steps.ledgers = (*before, self)
        try:
            yield
        finally:
            _by_steps.ledgers = before

    def record_round(self, num_bytes: int) -> None:
        """Notes that one round sent `num_bytes`, for `peak_bytes_sent`; they are recorded by collective already."""
        self.peak_bytes_sent = max(self.peak_bytes_sent, num_bytes)

    @property
    def mean_bytes_sent(self) -> float:
        """Bytes sent in a mean optimizer step; 0.0 where no steps are counted."""
        return self.bytes_sent / self.num_steps if self.num_steps else 0.0

    @property
    def messages(self) -> int:
        """Messages that this worker has sent."""
        return self._total("messages")

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent to others."""
        return self._total("bytes_sent")

    @property
    def bytes_received(self) -> int:
        """Bytes that this worker has received from others."""
        return self._total("bytes_received")

    def _total(self, name: str) -> int:
        # A list, because another thread may record a new collective meanwhile.
        return sum(getattr(traffic, name) for traffic in list(self.collectives.values()))

    @property
    def dense_fp32_bytes(self) -> int:
        """Bytes that ring all-reduces of the same elements in float32 send per worker: 2 (W-1)/W 4n.

        Where each worker has a model of its own, those of the gradients of all steps, also of steps that send nothing.
        """
        return ring_all_reduce_bytes(self.size, 4 * (self.step_numel + self.dense_numel))

    @property
    def dense_bf16_bytes(self) -> int:
        """The same in bfloat16: 2 (W-1)/W 2n."""
        return ring_all_reduce_bytes(self.size, 2 * (self.step_numel + self.dense_numel))

    def snapshot(self) -> Ledger:
        """A copy that later calls leave alone."""
        # A list, because another thread may record a new collective meanwhile.
        return replace(self, collectives={name: replace(traffic) for name, traffic in list(self.collectives.items())})

    def since(self, snapshot: Ledger) -> Ledger:
        """What was added after `snapshot` was taken of this ledger; the peak is that of all rounds."""
        added = {
            name: traffic - snapshot.collectives.get(name, Traffic())
            for name, traffic in self.snapshot().collectives.items()
        }
        added = {name: traffic for name, traffic in added.items() if traffic.calls}
        return Ledger(
            self.size,
            self.dense_numel - snapshot.dense_numel,
            added,
            self.num_steps - snapshot.num_steps,
            self.step_numel - snapshot.step_numel,
            self.peak_bytes_sent,
        )

    def state_dict(self) -> dict[str, Any]:
        """All counts as plain values, to be restored."""
        return asdict(self.snapshot())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned: counts go on from there."""
        self.dense_numel, self.step_numel = saved["dense_numel"], saved["step_numel"]
        self.num_steps, self.peak_bytes_sent = saved["num_steps"], saved["peak_bytes_sent"]
        self.collectives = {name: Traffic(**traffic) for name, traffic in saved["collectives"].items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "messages": self.messages,
            "mean_bytes_sent": self.mean_bytes_sent,
            "peak_bytes_sent": self.peak_bytes_sent,
            "dense_fp32_bytes": self.dense_fp32_bytes,
            "dense_bf16_bytes": self.dense_bf16_bytes,
            "collectives": {name: asdict(traffic) for name, traffic in self.collectives.items()},
        }


def ring_all_reduce_bytes(size: int, num_bytes: int) -> int:
    """Bytes that each of `size` workers sends, and receives, in a ring all-reduce of `num_bytes`: 2 (W-1)/W n.

    Example:
        >>> ring_all_reduce_bytes(4, 1000)
        1500
    """
    return 2 * (size - 1) * num_bytes // size


def broadcast_tree(size: int, rank: int, root: int) -> tuple[list[int], list[int]]:
    """From whom `rank` gets the message in a binomial tree, nobody for the root, and to whom it passes it on, in this order.

    In round i, worker v < 2^i sends to v + 2^i, where workers are counted from the root.

    Example:
        >>> [broadcast_tree(size=4, rank=rank, root=0) for rank in range(4)]
        [([], [1, 2]), ([0], [3]), ([0], []), ([1], [])]
    """
    virtual_rank = (rank - root) % size
    steps = [1 << i for i in range(size.bit_length())]
    children = [virtual_rank + step for step in steps if virtual_rank < step and virtual_rank + step < size]
    parent = [virtual_rank - max(step for step in steps if step <= virtual_rank)] if virtual_rank else []
    return [(v + root) % size for v in parent], [(v + root) % size for v in children]
