"""Workers that come and go: rounds over connections of our own.

Each worker asks the Lighthouse for a round, and tells the others what it is and has (`claims.py`). Workers of the round connect
anew whenever the workers change. A round is a transaction:

    1. form     who takes part, and who is behind. Workers that differ in number or configuration are refused, and raise an
                error; the others go on without them. While the Lighthouse does not answer, they ask again,
                after closing their connections: others may have had an answer, and wait for them in a round
    2. heal     workers that are up to date offer their state to those that are not (`healing.py`). Failures give up the round
                alone. What a worker does not need to begin the round comes while the others train
    3. open     rank and size are those of the round; after a change of workers, all wait until all have regrouped
    4. exchange the operations of `Communicator`. After a failure all others in the round fail at once
    5. close    all workers vote in an all-gather; the round is committed if every worker had success

The vote itself may fail on some workers, if one dies in the middle of it. Then some commit, and those that do not are one
round behind: the next `form` heals them, so that no half of a round lasts. `open` is such a vote too: each worker counts the
times that it has regrouped, and one that has missed one is healed. The state with the most committed rounds is the newest,
also where workers begin from checkpoints on disks of their own. A worker that healing would make lose more than the one
round in doubt raises an error instead.

Sharded models. A worker may be several processes, each with a shard (`replica.py`). The first one asks for rounds, and each
of them connects with those of other workers that hold the same shard. All processes of a worker open a round, and commit it,
or none does: each votes with its own connections, and then they tell each other what came of it. A worker whose processes do
not agree is one that missed the vote, and is healed.

Comparing. After the first round, and every `check_every` rounds, each worker also says the hash of what all have in common. A
worker that differs from more than half of them is named and healed. Where there is no such majority, all raise an error.

Detection. A process that dies is noticed at once, because its connections close. One that is silent is noticed after
`timeout_seconds`, or sooner once it is known how long rounds take (`patience.py`). A worker without progress for so long sends
no more heartbeats either, and the Lighthouse leaves it out `HEARTBEAT_SECONDS` later. If a quorum names a worker that has died
before it connected, the others try again after `CONNECT_SECONDS`. Two workers that cannot reach each other in `TRIES` tries
tell the others, and one of them is left out.

GPUs. Tensors on a GPU go through main memory. This has not been run on a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...algorithm import require
from ...messages import log
from ...options import require_integer, require_number
from ..base import Communicator, Start
from ..channel import Channel
from ..handle import CommunicationError, Wait, nothing
from ..issuer import Issuer
from ..members import LeftOut, Loss, LostRounds, Members, RoundCounts, Shared
from ..notice import said_if_late
from ..process_group import ProcessGroupCommunicator
from ..tls.credentials import Credentials
from .claims import MAX_NUMBER, MAX_ROUNDS, Claim, differing, members_of, place_of
from .forming import Forming
from .groups import Groups
from .healing import Healing
from .history import UNKNOWN, History
from .patience import Patience
from .replica import Processes

Result = TypeVar("Result")
REPLICA_SECONDS = 300.0
"""How long a process waits for another one of its worker, beyond what a quorum may take."""


class ElasticCommunicator(Communicator):
    """A communicator whose workers may come, go and die.

    Until its first round it connects one worker, itself. So strategies attach without waiting for anybody.

    Args:
        lighthouse: address of the Lighthouse, such as "http://host:29510".
        number: this worker's own number, 0..1000000; different on all workers. Ranks follow the order of the numbers.
        min_workers: fewer do not begin a round.
        timeout_seconds: how long a worker may be silent in a round before the round is given up.
        quorum_seconds: how long to wait for other workers, or for the Lighthouse, before an error.
        is_late: whether it joins a run that goes on, so that the others do not wait for its first round, however long it loads
            data before. Otherwise workers that start together begin together.
        check_every: every so many rounds, and after the first, workers compare a hash of what they have in common (SHA-256);
            0 never does, and a worker that joins others of different states gets that of one. Lower => a worker whose numbers
            differ is found sooner.
        replica: where the model is sharded, the mesh of the processes that together are this worker, which `fully_shard` got:
            all of them make one, and take part in rounds together. None: this process alone.
        credentials: of this worker. With them the Lighthouse has some too ("https://..."), and all connections are encrypted.
        listens: whether others can dial this worker. If not, they reach it through the relay.
        relay: HOST:PORT of a `Relay`, the same on all workers, which carries what goes between two workers that cannot reach
            each other, and to the stores and states of those behind NAT; it also tells who is. It needs credentials.

    Attributes:
        members: the workers of the last round that was opened; None before the first.
        counts: what became of the rounds so far.
        note: a number that travels with this worker's vote.
        notes: the notes of all workers in the last vote, (W,) float64.

    Raises:
        ValueError: a value out of range, the extension of our own connections was not built, the processes of `replica` have
            different numbers, or the Lighthouse and this worker do not have credentials of one run. When a round forms: the
            number is taken, the configuration differs from that of the others, or healing would lose rounds that it has
            committed (`LostRounds`), or the workers' states differ and no majority says which is right (`Diverged`).
        LeftOut: when a round forms: this worker and another one do not reach each other, it cannot open sockets, or it could
            not be healed. At any time: another process of `replica` has ended.
        CommunicationError: the Lighthouse does not answer.

    Example:
        >>> import torch, thinwire as tw
        >>> lighthouse = tw.comm.Lighthouse(min_workers=1, host="127.0.0.1")
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with ElasticCommunicator(lighthouse.address, number=3, min_workers=1) as comm:
        ...     with tw.attach(model, optimizer, tw.Gradients(tw.Mean()), comm=comm):
        ...         for _ in range(2):
        ...             model(torch.ones(2)).backward()
        ...             optimizer.step()
        >>> comm.members.numbers, comm.counts.committed
        ((3,), 2)
        >>> lighthouse.close()
    """

    is_elastic = True

    def __init__(
        self,
        lighthouse: str,
        number: int = 0,
        min_workers: int = 2,
        timeout_seconds: float = 10.0,
        quorum_seconds: float = 120.0,
        is_late: bool = False,
        credentials: Credentials | None = None,
        check_every: int = 100,
        replica: dist.DeviceMesh | None = None,
        listens: bool = True,
        relay: str | None = None,
    ):
        call = "ElasticCommunicator"
        require_integer(f"{call}: number", number, 0, MAX_NUMBER)
        require_integer(f"{call}: min_workers", min_workers, 1)
        require_number(f"{call}: timeout_seconds", timeout_seconds, above=0)
        require_number(f"{call}: quorum_seconds", quorum_seconds, above=0)
        require_integer(f"{call}: check_every", check_every, 0)
        require(
            listens or relay is not None,
            f"worker {number}: one that takes no connections needs a relay, which takes them for it",
        )
        require(
            relay is None or (credentials is not None and replica is None),
            f"worker {number}: a relay is for workers of one process with credentials",
        )
        # It connects one worker until its first round, so that strategies attach without the others.
        super().__init__(0, 1)
        self.in_round = self._is_opening = False
        self.replica, others = replica, None
        if replica is not None:
            # The other processes wait in `gather` while process 0 waits for a quorum.
            others = ProcessGroupCommunicator(replica, REPLICA_SECONDS + quorum_seconds)
        self._processes = Processes(number, others)
        self.number, self.members, self.counts = number, None, RoundCounts()
        self.note, self.notes = 0.0, torch.zeros(0, dtype=torch.float64, device="cpu")
        self._norms: dict[int, float] = {}
        self._claims: dict[int, int] = {}
        self._claim: Callable[[], int] = lambda: 0
        self._ended: Callable[[Mapping[int, int] | None], object] | None = None
        self._timeout, self._quorum_seconds = timedelta(seconds=timeout_seconds), quorum_seconds
        self._error: Exception | None = None
        self._issuer = Issuer()
        self._history, self._known_place = History(), ""
        self._patience, self._check_every = Patience(timeout_seconds), check_every
        self._groups = Groups(self._timeout, credentials, listens, relay)
        self._forming = Forming(
            *(number, lighthouse, min_workers, quorum_seconds, self._groups, self._processes),
            *(credentials, listens, relay),
        )
        self._asker = self._forming.asker
        # All workers must compare in the same rounds.
        self._forming.settings["check_every"] = repr(check_every)
        self._healing = Healing(
            *(number, self._forming.host, credentials),
            *(partial(self._asker.expect, timeout_seconds), self._record_healing),
            *(self._processes.rank, replica),
            may_differ=not check_every,
        )
        self._claims_of_round: tuple[Claim, ...] = ()
        if not is_late:
            self._asker.expect(timeout_seconds)  # the others wait for those that send heartbeats

    members: Members | None

    def watch(self, claim: Callable[[], int], ended: Callable[[Mapping[int, int] | None], None]) -> Callable[[], None]:
        """Let the end of each round be known, such as to a sampler, until the function that is returned is called.

        Args:
            claim: returns a number that travels with this worker's vote.
            ended: receives the numbers of all workers of a committed round, by worker; None if a round was given up.
        """
        require(self._ended is None, f"worker {self.number}: one sampler serves a strategy; make no second one")
        before, self._claim, self._ended = self._claim, claim, ended

        def end() -> None:
            self._claim, self._ended = before, None

        return end

    def share(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        is_common: bool = True,
        is_late: bool = False,
    ) -> Callable[[], None]:
        return self._healing.share(name, Shared(save, load, is_common, is_late))

    # ---- rounds ----

    def check_agreement(self, what: dict[str, Any]) -> None:
        """As in `Communicator`. What is checked before the first round is compared whenever a round forms."""
        if self.members is None:
            # A key may be checked several times; each check keeps an entry of its own.
            settings = self._forming.settings
            for key, value in what.items():
                settings[str(key) if str(key) not in settings else f"{key} ({len(settings)})"] = repr(value)
        super().check_agreement(what)

    def form_round(self) -> Members | None:
        require(not self._closed, f"worker {self.number}: a round on a communicator that was closed. Close it last.")
        # No operation of an earlier round is being started from here on.
        self._issuer.drain(self._timeout.total_seconds())
        self._groups.limit = self._timeout
        deadline = time.monotonic() + self._quorum_seconds
        # Hashing a large state takes time, so most rounds do without. Machines that compute differently do so from the first.
        committed = self._history.committed
        is_due = self._check_every and committed and (committed == 1 or committed % self._check_every == 0)
        digest = self._healing.digest() if is_due else ""
        # Each late notice takes a thread; a round of workers that are connected already is soon there.
        notice = contextlib.nullcontext() if self._forming.place else said_if_late(self._forming.awaited())
        with self._left_out_closes():
            with notice:
                self._claims_of_round = claims = self._connected_claims(deadline, digest)
            # The ledger compares with dense collectives of as many workers.
            self.ledger.size = self.size
            members = members_of(claims)
            self._require_known(members)
        for number in differing(claims, members):
            log.warning(
                "after round %d worker %d differs from the others in what all have in common; it is healed. If this recurs, "
                "its machine computes differently: set check_every to 0",
                *(members.version.committed, number),
            )
        # The same workers on the same connections need no vote to begin.
        self._is_opening = not (self._known_place == self._forming.place and not members.healed)
        return members if self._is_opening else None

    def _connected_claims(self, deadline: float, digest: str) -> tuple[Claim, ...]:
        """Those of the workers of the next round, after connecting with them."""
        while True:
            self._error = None
            claims = self._forming.claims(
                max(deadline - time.monotonic(), 0.1),
                self._history,
                -1 if self.members is None else self.members.numbers.index(self.number),
                self._healing.can_heal,
                digest,
                self._healing.port,
            )
            try:
                self.rank, self.size = self._forming.connect(claims), len(claims)
                self.route = self._groups.route
                return claims
            except CommunicationError as error:  # a worker died meanwhile, or the Lighthouse restarts
                if time.monotonic() > deadline:
                    raise
                self._error = error
                self._give_up()

    def _require_known(self, members: Members) -> None:
        """Begin no run anew where a worker has given up its rounds for a state that nobody has any more."""
        lost = self._history.num_forgotten
        # Version 0 means that nobody is left with the state that this worker was loading.
        if lost and not members.version.committed:
            raise LostRounds(
                f"worker {self.number} had committed {lost} rounds, and was taking over a newer state when the last worker "
                "that had it left: go on from the last checkpoint"
            )

    def heal(self, members: Members) -> None:
        if members.source is None:
            return
        key, claims = place_of(self._claims_of_round), self._claims_of_round
        if self.rank in members.sources:
            self._healing.offer(key, self._history)
        elif self.rank in members.healed:
            with self._left_out_closes():
                self._healing.begin(key, claims, members, self._history, self._timeout.total_seconds())

    def finish_healing(self) -> int:
        if not self._healing.is_under_way:
            return 0
        with self._left_out_closes():
            done, failed = None, None
            try:
                done = self._healing.finish()
            except CommunicationError as error:
                failed = error
            # Its other processes wait for the result here, so a failure is told before it is raised.
            steps = self._processes.gather(None if done is None else done[1])
        if done is None or None in steps:
            self._history.forget()
            raise failed or CommunicationError(f"worker {self.number}: another of its processes could not be healed")
        regroupings, self._history, missed = self._history.regroupings, done[0], int(steps[0])
        self._history.regroupings, self.counts.committed = regroupings, self._history.committed
        self.counts.healings += self._history.committed > 0
        return missed if self._history.committed else 0  # those that start together begin together

    def stepped(self) -> None:
        self._healing.snapshots.steps += 1
        self.num_skipped = 0

    @contextlib.contextmanager
    def _left_out_closes(self) -> Iterator[None]:
        """Context in which this worker may learn that the others go on without it."""
        try:
            yield
        except (LeftOut, ValueError):  # `LostRounds` and `Diverged` are ValueErrors
            self._give_up()
            self._asker.close()
            raise

    def _record_healing(self, bytes_sent: int, bytes_received: int) -> None:
        with self._lock:
            self.ledger.record("healing", 1 if bytes_sent else 0, bytes_sent, bytes_received)

    def progressed(self) -> None:
        self._asker.expect(self._patience.seconds)

    def open_round(self, members: Members | None) -> None:
        if members is not None:
            self.all_gather(torch.ones(1, dtype=torch.float32, device="cpu")).wait()  # all have regrouped
            if not self._all_open(True):
                raise CommunicationError(f"worker {self.number}: another of its processes has not regrouped")
            # A worker that missed this vote keeps the lower count, and is healed in the next round.
            self._history.regroupings = members.version.regroupings + 1
            last = () if self.members is None else self.members.numbers
            healed = {members.numbers[rank] for rank in members.healed} - {self.number}
            self.counts.losses += [
                Loss(self.counts.committed, number, self._norms.pop(number, None))
                for number in last
                if number not in members.numbers or number in healed
            ]
            self.members, self._known_place = members, self._forming.place
            self._patience.forget()
        self._patience.resume()
        self._groups.limit = timedelta(seconds=self._patience.seconds)
        self._asker.expect(self._patience.seconds)
        self.in_round = True

    def _all_open(self, flag: bool) -> bool:
        """Whether all processes of this worker have regrouped: then all of them open the round."""
        self._is_opening = False
        with self._left_out_closes():
            return all(self._processes.gather(flag))

    def close_round(self, success: bool, norm: float = 0.0) -> bool:
        if self._is_opening:
            # The worker's other processes wait for this answer, and must not open the round either.
            self._all_open(False)
        # This worker's processes compare their votes only if they have opened the round.
        was_open, self.in_round = self.in_round, False
        try:
            committed = success and self._vote(norm)
        except CommunicationError as error:
            self._error, committed = error, False
        if was_open:
            with self._left_out_closes():
                committed = all(self._processes.gather(committed))
        self._healing.snapshots.drop()
        self._healing.end()
        if committed:
            self._history.commit(self._forming.place)
            self.counts.committed = self._history.committed
            self._patience.committed()
            self.progressed()
        else:
            self._give_up()
            self.counts.aborted += 1
        if self._ended is not None:
            self._ended(self._claims if committed else None)
        return committed

    def _give_up(self) -> None:
        """Let the others, who may still wait for this worker, fail at once; the next quorum connects all of them anew."""
        self._healing.snapshots.drop()  # so that a worker that is being healed learns it
        self._groups.hang_up()
        self._forming.give_up()
        self._asker.expect(self._patience.seconds)

    def _vote(self, norm: float) -> bool:
        assert self.members is not None
        vote = torch.tensor([1.0, norm, self._claim(), self.note], dtype=torch.float64, device="cpu")
        successes, norms, claims, self.notes = torch.stack(self.all_gather(vote).wait()).unbind(1)
        self._norms = dict(zip(self.members.numbers, norms.tolist(), strict=True))
        self._claims = dict(zip(self.members.numbers, map(int, claims.tolist()), strict=True))
        return bool((successes == 1.0).all())

    def state_dict(self) -> dict[str, Any]:
        """Which rounds the present state is made of, for a checkpoint: their number, and digests of the last ones."""
        return {"rounds": self._history.committed, "digests": list(self._history.digests)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Say that this worker's state is that of a checkpoint. Call it before the first round.

        Each worker may have a checkpoint of its own. The workers of the newest one heal the others.

        Args:
            saved: what `state_dict` returned; without "digests", the rounds are taken to be those of the others.

        Raises:
            ValueError: this cannot be, or a round has begun.
        """
        rounds, digests = saved["rounds"], saved.get("digests", [UNKNOWN])
        require(
            type(rounds) is int
            and 0 <= rounds <= MAX_ROUNDS
            and isinstance(digests, list)
            and bool(digests)
            and all(isinstance(digest, str) for digest in digests),
            f"worker {self.number}: a checkpoint of {rounds} rounds cannot be",
        )
        require(self.members is None, f"worker {self.number}: load a checkpoint before the first round")
        self._history, self.counts.committed = History(rounds, digests), rounds

    def between_rounds(self, do: Callable[[], Result]) -> Result | None:
        """Return `do()`, which calls operations between two rounds; None if a worker died meanwhile.

        All workers of the last round call it together, where `in_round` is False or the run ends. The ledger does not count
        these operations.

        Args:
            do: work that changes nothing that workers must have in common, such as adding up metrics.
        """
        counted = self.ledger.state_dict()
        self._groups.limit = self._timeout
        self._asker.expect(self._timeout.total_seconds())
        try:
            return do()
        except CommunicationError as error:
            self._error = self._error or error
            self._give_up()
            return None
        finally:
            self.ledger.load_state_dict(counted)
            self._patience.resume()  # no part of a round
            self._asker.expect(self._patience.seconds)

    def _close(self) -> None:
        # It does not wait: an operation may hang until its time limit, and the connections close below.
        self._issuer.close()
        self._asker.close()
        self._groups.close()
        self._forming.close()
        self._healing.close()
        self._processes.close()

    def _abandon(self) -> None:
        self._give_up()
        self._close()

    # ---- operations on the process group of the round ----

    def _issue(self, tensors: list[Tensor], start: Start) -> Wait:
        if self.size == 1:
            return start()
        if self._error is not None:
            raise CommunicationError(f"rank {self.rank}: the round has failed: {self._error}")
        device = tensors[0].device if tensors else torch.device("cpu")
        return partial(self._complete, self._issuer.issue(device, partial(self._begun, start)))

    def _begun(self, start: Start) -> Wait:
        if self._error is not None:
            raise CommunicationError(f"the round has failed: {self._error}")
        return start()

    def _complete(self, wait: Wait) -> None:
        try:
            self._asker.expect(self._groups.limit.total_seconds())
            wait()
            self._asker.expect(self._groups.limit.total_seconds())
        except Exception as error:
            # Only the first failure closes the connections; later ones follow from it.
            if self._error is None:
                self._error = error
                self._groups.hang_up()
            raise

    def _start_all_reduce(self, tensor: Tensor) -> Wait:
        return self._groups.all_reduce(tensor) if self.size > 1 and tensor.numel() else nothing

    def _start_broadcast(self, tensor: Tensor, root: int) -> Wait:
        return self._groups.broadcast(tensor, root) if self.size > 1 and tensor.numel() else nothing

    def _start_exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Wait:
        return self._groups.exchange(sends, receives) if sends or receives else nothing

    def _open_channel(self, peers: list[int], max_bytes: int) -> Channel:
        raise ValueError(
            "an elastic communicator has no channels; averagers without rounds need a fixed number of workers"
        )
