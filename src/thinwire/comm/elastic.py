"""Workers that come and go: rounds on torchft's Lighthouse, Manager and process groups (`pip install thinwire[elastic]`).

Each worker has a Manager of torchft, which agrees with the others on a *quorum* through the Lighthouse, and a process group
of torchft's (Gloo), which is connected anew whenever the quorum changes. A round is a transaction:

    1. form     a quorum; workers tell each other how many rounds they have committed. Workers that are behind are *healed*.
                While the Lighthouse does not answer, they ask again
    2. heal     the first worker that is up to date sends its shared state to those that are not
    3. open     rank and size are those of the round; after a change of workers, all wait until all have regrouped
    4. exchange the operations of `Communicator`. After a failure all others in the round fail at once
    5. close    all workers vote in an all-gather; the round is committed if every worker had success

The vote itself may fail on some workers, if one dies in the middle of it. Then some commit, and those that do not are one
round behind: the next `form` heals them, so that no half of a round lasts. `open` is such a vote too: each worker counts the
times that it has regrouped, and one that has missed one is healed. torchft's own `should_commit` asks only within a
replica, which is one worker here.

Detection. A process that dies is noticed at once, because its connections close. One that is silent is noticed after
`timeout_seconds`. The Lighthouse leaves out workers whose heartbeat is missing for `HEARTBEAT_SECONDS`. If a quorum names a
worker that has died before it connected, the others try again after `CONNECT_SECONDS`.

Healing runs over the process group, and as tensors and plain values only (`weights_only`), not over torchft's HTTP transport,
which listens on all interfaces and unpickles what it gets.

GPUs. Tensors on a GPU go through main memory, as Gloo needs it, or with `backend="nccl"` over a second process group. Votes,
sizes, and healing go over Gloo in both cases. An operation over NCCL ends on the GPU after its `wait()`, so before the vote the
worker waits for its GPU, and asks whether all operations had success. Neither path has been run on a GPU.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import debug
from ..algorithm import require
from ..streams import refuse_capture
from .base import Communicator, Start
from .channel import Channel
from .connect import own_address
from .elastic_groups import Groups
from .handle import CommunicationError, reason_of
from .lighthouse import torchft
from .members import Loss, Members, RoundCounts, Shared
from .side_streams import SideStreams
from .store import listening_store

Result = TypeVar("Result")
RESTART_SECONDS = 1.0
"""After which a Lighthouse that restarts has heard of all workers: they send heartbeats every 0.1 seconds."""
NOTE_LENGTH = 8
"""Numbers that a worker may add to its vote."""


class ElasticCommunicator(Communicator):
    """A communicator whose workers may come, go and die.

    Until its first round it connects one worker, itself. So strategies attach without waiting for anybody.

    Args:
        lighthouse: address of the Lighthouse, such as "http://host:29510".
        number: this worker's own number; different on all workers. Ranks follow the order of the numbers.
        min_workers: fewer do not begin a round.
        timeout_seconds: how long a worker may be silent in a round before the round is given up.
        quorum_seconds: how long to wait for other workers, or for the Lighthouse, before an error.
        backend: of tensors on a GPU. "nccl" needs a GPU of its own for every worker, and notices a dead one only after
            `timeout_seconds`.

    Attributes:
        members: the workers of the last round that was opened; None before the first.
        counts: what became of the rounds so far.
        note: numbers that travel with this worker's vote, at most `NOTE_LENGTH`.
        notes: the notes of all workers in the last vote, (W, NOTE_LENGTH) float64.

    Raises:
        ValueError: torchft is not installed, or there is no GPU for NCCL.
        CommunicationError: the Lighthouse does not answer.
    """

    is_elastic = True

    def __init__(
        self,
        lighthouse: str,
        number: int = 0,
        min_workers: int = 2,
        timeout_seconds: float = 10.0,
        quorum_seconds: float = 120.0,
        backend: Literal["gloo", "nccl"] = "gloo",
    ):
        require(
            backend == "gloo" or (torch.cuda.is_available() and dist.is_nccl_available()),
            f"worker {number}: backend 'nccl' needs a GPU, and PyTorch finds none; choose 'gloo'",
        )
        super().__init__(0, 1)
        self.in_round = False
        self.number, self.members, self.counts = number, None, RoundCounts()
        self.note: list[float] = []
        self.notes = torch.zeros(0, NOTE_LENGTH, dtype=torch.float64)
        self._norms: dict[int, float] = {}
        self._shared: dict[str, Shared] = {}
        self._timeout, self._quorum_seconds = timedelta(seconds=timeout_seconds), quorum_seconds
        self._no_quorum = (
            f"no quorum of {min_workers} workers within {quorum_seconds:g} seconds; see whether enough workers run, and "
            f"whether they reach the Lighthouse at {lighthouse}"
        )
        self._error: Exception | None = None
        self._sent_before = 0
        self._issuer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="thinwire-comm")
        self._streams = SideStreams(self._issuer)
        ft = torchft()
        self._groups = Groups(ft.nccl_group(self._timeout) if backend == "nccl" else None, self._timeout)
        host = own_address()[1]
        self._store = listening_store(host, 0, timedelta(seconds=quorum_seconds))
        self._process_group = ft.reconfigurable_group(self._timeout, self._connected, self._groups.nccl)
        try:
            self._manager, self._quorums = ft.manager(
                pg=self._process_group,
                min_replica_size=min_workers,
                timeout=self._timeout,
                quorum_timeout=timedelta(seconds=quorum_seconds),
                connect_timeout=timedelta(seconds=min(quorum_seconds, 30.0)),
                store=(host, self._store.port),
                lighthouse_addr=lighthouse,
                quorum_retries=1_000_000,  # within `quorum_timeout`: the Lighthouse may restart
                replica_id=f"worker_{number:06d}",
            )
        except Exception as error:
            raise CommunicationError(
                f"worker {number}: the Lighthouse at {lighthouse} does not answer ({error}); start one, or check --lighthouse"
            ) from error

    members: Members | None

    def share(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Let a worker that joins get more state from a live one, such as the optimizer's beside `compress_gradients`.

        Args:
            name: of the state, the same on all workers.
            save: returns tensors and plain values; called on a live worker.
            load: restores them; called on the worker that joins.
        """
        self._shared[name] = Shared(save, load)

    # ---- rounds ----

    def form_round(self) -> Members | None:
        self._drain()
        deadline = time.monotonic() + self._quorum_seconds
        while True:
            self._agree_on_quorum(max(deadline - time.monotonic(), 0.1))
            try:
                return self._connect()
            except CommunicationError as error:  # a worker died meanwhile, or the Lighthouse restarts
                if time.monotonic() > deadline:
                    raise
                self._error = error
                self._give_up()

    def _agree_on_quorum(self, seconds: float) -> None:
        self._error, self._groups.gloo = None, None
        try:
            self._manager.start_quorum(timeout=timedelta(seconds=seconds))
        except Exception as error:
            reason = reason_of(error).partition(", details: ")[0][:300]
            raise CommunicationError(f"worker {self.number}: {self._no_quorum} ({reason})") from error

    def _connect(self) -> Members | None:
        """Take rank and size from the quorum; after a change, tell each other who is there."""
        failed = self._manager.errored()
        if failed is not None:
            reason = reason_of(failed.original_exception)
            raise CommunicationError(f"worker {self.number}: cannot connect to the other workers: {reason}")
        rank, size = self._manager.participating_rank(), self._manager.num_participants()
        group = self._process_group.parent
        assert rank is not None and group is not None, "a quorum gives every worker a rank"
        is_new = self._connections != self._known_connections
        self._groups.gloo, self.rank, self.size = group, rank, size
        self.ledger.size = size
        if self._quorums.is_partial:
            time.sleep(RESTART_SECONDS)
            raise CommunicationError(
                f"worker {self.number}: the Lighthouse has restarted, and knows {size} workers so far"
            )
        if not is_new:
            return None
        return self._introduce()

    def _introduce(self) -> Members:
        """Tell each other numbers, versions and former ranks."""
        last = self.members
        own_rank = last.numbers.index(self.number) if last is not None else -1
        told = [row.tolist() for row in self.all_gather(torch.tensor([self.number, *self._version, own_rank])).wait()]
        versions: list[tuple[int, int]] = [(row[1], row[2]) for row in told]
        latest = max(versions)
        # Before the first round, nobody has anything that the others lack: all begin with the first worker's state.
        known = [version == latest > (0, 0) for version in versions]
        source = known.index(True) if any(known) else 0
        healed = tuple(r for r, is_known in enumerate(known) if not is_known and r != source)
        before = tuple(row[3] if is_known and row[3] >= 0 else None for row, is_known in zip(told, known, strict=True))
        return Members(tuple(row[0] for row in told), before, latest, source if healed else None, healed)

    def heal(self, members: Members, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        if members.source is None:
            return
        payload = torch.empty(0, dtype=torch.uint8)
        if self.rank == members.source:
            buffer = io.BytesIO()
            extra = {name: shared.save() for name, shared in self._shared.items()}
            torch.save({"strategy": save(), "shared": extra, "committed": self.counts.committed}, buffer)
            payload = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        size = int(self.all_gather(torch.tensor([payload.numel()])).wait()[members.source])
        if self.rank == members.source:
            self.exchange(dict.fromkeys(members.healed, payload), {}).wait()
        elif self.rank in members.healed:
            received = self.exchange({}, {members.source: debug.empty(size, dtype=torch.uint8)}).wait()
            state = torch.load(io.BytesIO(received[members.source].numpy().tobytes()), weights_only=True)
            load(state["strategy"])
            for name, shared in self._shared.items():
                if name in state["shared"]:
                    shared.load(state["shared"][name])
            self.counts.healings += state["committed"] > 0
            self.counts.committed = state["committed"]

    def open_round(self, members: Members | None) -> None:
        if members is not None:
            self.all_gather(torch.ones(1)).wait()  # all have regrouped
            self._version = (members.version[0] + 1, members.version[1])
            last = () if self.members is None else self.members.numbers
            fell_behind = {members.numbers[rank] for rank in members.healed}
            for number in last:
                if number not in members.numbers or (number in fell_behind and number != self.number):
                    loss = Loss(self.counts.committed, number, self._norms.pop(number, None), self._in_flight)
                    self.counts.losses.append(loss)
            self.members, self._known_connections = members, self._connections
        self._in_flight, self._sent_before = 0, self.ledger.bytes_sent
        self.in_round = True

    def close_round(self, success: bool, norm: float = 0.0) -> bool:
        self.in_round = False
        try:
            committed = success and self._has_arrived() and self._vote(norm)
        except CommunicationError as error:
            self._error, committed = error, False
        if committed and self._manager.should_commit():
            self.counts.committed += 1
            self._version = (self._version[0], self._version[1] + 1)
            return True
        self._give_up()
        self.counts.aborted += 1
        self._in_flight = self.ledger.bytes_sent - self._sent_before
        return False

    def _give_up(self) -> None:
        """Let the others, who may still wait for this worker, fail at once; the next quorum connects all of them anew."""
        self._groups.hang_up(self.rank, self.size)
        self._quorums.disconnected()
        self._manager.report_error(self._error or RuntimeError("the round was given up"))
        self._manager.should_commit()

    def _has_arrived(self) -> bool:
        """Whether all operations on the GPU had success; over Gloo, `wait` has said so."""
        error = self._process_group.errored()
        self._error = self._error or error
        return error is None

    def _vote(self, norm: float) -> bool:
        assert self.members is not None
        vote = torch.zeros(2 + NOTE_LENGTH, dtype=torch.float64)
        vote[0], vote[1] = 1.0, norm
        vote[2 : 2 + len(self.note)] = torch.tensor(self.note, dtype=torch.float64)
        votes = torch.stack(self.all_gather(vote).wait())
        self.notes = votes[:, 2:]
        self._norms = dict(zip(self.members.numbers, votes[:, 1].tolist(), strict=True))
        return bool((votes[:, 0] == 1.0).all())

    def resume(self, rounds: int) -> None:
        """Say that this worker's state is that of a checkpoint after so many rounds. Call it before the first round.

        The workers of the newest checkpoint heal the others, and keep their own memory. Workers of a run that goes on have
        newer state than any checkpoint.
        """
        self._version, self.counts.committed = (0, rounds), rounds

    def between_rounds(self, do: Callable[[], Result]) -> Result | None:
        """Return `do()`, which calls operations between two rounds; None if a worker died meanwhile.

        All workers of the last round call it together. The ledger does not count these operations.

        Args:
            do: work that changes nothing that workers must have in common, such as adding up metrics.
        """
        counted = self.ledger.state_dict()
        try:
            return do()
        except CommunicationError as error:
            self._error = self._error or error
            self._give_up()
            return None
        finally:
            self.ledger.load_state_dict(counted)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._issuer.shutdown(wait=False, cancel_futures=True)
        self._manager.shutdown(wait=False)

    # ---- operations on the process group of the round ----

    _connections = 0
    _known_connections = -1
    _version = (0, 0)
    _in_flight = 0

    def _connected(self) -> None:
        """Torchft has connected the process group anew."""
        self._connections += 1

    def _drain(self) -> None:
        """Wait until no operation of an earlier round is being started."""
        with contextlib.suppress(Exception):
            self._issuer.submit(lambda: None).result(self._timeout.total_seconds())

    def _issue(self, tensors: list[Tensor], start: Start) -> Callable[[], Any]:
        if self.size == 1:
            return start()
        if self._error is not None:
            raise CommunicationError(f"rank {self.rank}: the round has failed: {self._error}")
        device = tensors[0].device if tensors else torch.device("cpu")
        refuse_capture(device)
        start = partial(self._begun, start)
        if device.type == "cpu":
            issued = self._issuer.submit(start)
            return partial(self._complete, lambda: issued.result()())
        if self._groups.nccl is None:
            return partial(self._complete, self._streams.issue_copied(device, start))
        return partial(self._complete, self._streams.issue_queued(device, tensors, start))

    def _begun(self, start: Start) -> Callable[[], Any]:
        if self._error is not None:
            raise CommunicationError(f"the round has failed: {self._error}")
        return start()

    def _complete(self, wait: Callable[[], Any]) -> None:
        try:
            wait()
        except Exception as error:
            if self._error is None:
                self._error = error
                self._groups.hang_up(self.rank, self.size)
            raise

    def _start_all_reduce(self, tensor: Tensor) -> Callable[[], Any]:
        return self._groups.all_reduce(tensor) if self.size > 1 and tensor.numel() else _nothing

    def _start_all_gather(self, gathered: list[Tensor]) -> Callable[[], Any]:
        return self._gather_by_exchange(gathered)

    def _start_broadcast(self, tensor: Tensor, root: int) -> Callable[[], Any]:
        return self._groups.broadcast(tensor, root) if self.size > 1 and tensor.numel() else _nothing

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], Any]:
        return self._groups.exchange(sends, receives)

    def _open_channel(self, peers: list[int], max_bytes: int) -> Channel:
        raise ValueError(
            "an elastic communicator has no channels; averagers without rounds need a fixed number of workers"
        )


def _nothing() -> None:
    """Wait for nothing."""
