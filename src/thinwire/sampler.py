"""Who trains on which part of the data, when workers come and go: every block of an epoch is committed once.

A *block* is a part of the data that one worker takes at once, such as a batch. All workers assign the blocks in one seeded
order, with the same global batch in every step, whatever the number of workers. An assignment is a *lease* (block, worker)
until its round ends. All workers know all leases. The vote that commits a round says from how many blocks each part is made:

    committed    the blocks of workers whose part is in the round are done
    given back   those of workers that died, or were healed, are assigned again first. So are those of a round that is given up,
                 unless workers keep what they did in it (`Local`, `Gossip`)

With a delay or fragments of `Local`, several rounds merge what one step has changed. The first that ends after the step commits
its blocks; what later ones had to merge is lost if the worker dies before.

With a quorum workers have no common steps. Each has leases for the steps until its next round, and takes them when it likes.
A committed round says from how many blocks each change was made; then the leases of its workers are filled up:

    committed    the blocks of changes that were merged are done
    given back   those of changes that were dropped, and the leases of workers that are gone

No lease goes beyond the epoch. A worker that has no block left waits for the others (`synchronize`). What was given back
meanwhile is assigned anew then, in the same epoch.

The state of the sampler is shared: a worker that joins gets it from a live one, and a checkpoint holds it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from .algorithm import require, required
from .comm import ElasticCommunicator
from .kernels import mix_key
from .options import require_integer

if TYPE_CHECKING:
    from .strategy.base import AveragerAttachment
    from .strategy.local.asynchronous import Part
    from .strategy.local.rounds import LocalUpdates

ORDER_STREAM = zlib.crc32(b"order of blocks")
MAX_BLOCKS = 1 << 40


class Block(NamedTuple):
    """A part of the data.

    Args:
        epoch: number of the pass over the data, from 0.
        number: 0 .. num_blocks - 1.
    """

    epoch: int
    number: int


class ElasticSampler:
    """Assigns the blocks of an epoch to the workers of a strategy; see the module's text.

    All workers construct it together, and call `take` once before each step, after `begin_round` where workers come and go.
    With a quorum `take` may return no block: then call `synchronize` of the strategy, and take again.

    Args:
        num_blocks: in an epoch.
        handle: the strategy at work, on a fixed number of workers or an elastic communicator.
        per_step: blocks of a step over all workers, the constant global batch. A worker that joins takes over that of the
            others. None for one of each worker, where their number is fixed, and with a quorum. The attribute may be changed
            before a step, alike on all workers.
        seed: of the order, the same on all workers; every epoch has an order of its own.

    Attributes:
        weight: what to multiply the mean loss over the blocks of the last `take` by. With gradients `n_r W / per_step`, so that
            the mean over workers is that over all blocks of the step; where workers have models of their own, 1. It is 0 for a
            worker whose blocks count for another one: there are fewer blocks than workers, or it joins `Local` while the others
            exchange what they have done.
        last_committed: the blocks of the last round that was committed, by the number (elastic) or rank of their workers. Empty
            after this worker was healed, until the next one.

    Raises:
        ValueError: a number out of range, no `per_step` where workers come and go, one with a quorum, or a strategy without
            rounds (`Asynchronous`).

    Example:
        >>> import thinwire as tw
        >>> def worker(comm):
        ...     model = torch.nn.Linear(1, 1)
        ...     handle = tw.compress_gradients(model, tw.Mean(), comm=comm)
        ...     sampler = ElasticSampler(5, handle, per_step=3)
        ...     return [[block.number for block in sampler.take()] for _ in range(2)]
        >>> tw.LocalWorld(2).run(worker)
        [[[3, 0], [4, 0]], [[2], [1]]]
    """

    def __init__(self, num_blocks: int, handle: AveragerAttachment, per_step: int | None = None, seed: int = 0):
        comm = handle.comm
        require_integer("ElasticSampler: num_blocks", num_blocks, 1, MAX_BLOCKS)
        require_integer("ElasticSampler: per_step", per_step, 1, or_none=True)
        strategy, has_quorum = handle.strategy, handle.strategy.counts_commits
        require(
            strategy.has_common_steps or has_quorum,
            f"ElasticSampler: workers of {strategy} have neither steps nor rounds in common; give each worker data of its own",
        )
        require(
            per_step is None or not has_quorum,
            f"ElasticSampler: with a quorum each worker takes one block at a time, so per_step={per_step} means nothing; "
            "leave it out",
        )
        self._elastic = comm if isinstance(comm, ElasticCommunicator) else None
        require(
            per_step is not None or self._elastic is None,
            "ElasticSampler: workers come and go, so per_step=None does not say how many blocks a step has; give their number, "
            "such as that of the workers at the start",
        )
        self.num_blocks, self.per_step, self.seed, self.weight = num_blocks, per_step or comm.size, seed, 1.0
        self.last_committed: dict[int, list[Block]] = {}
        self._handle, self._comm = handle, comm
        self._keeps, self._sends_again = handle.models_differ, strategy.sends_again
        self._is_passive = False
        self._next, self._num_own = 0, 0
        # With a quorum: no place from `_last` on is assigned; how many of its own blocks this worker has sent; how often all
        # have met; and how many blocks each wants.
        self._last, self._num_claimed, self._num_meetings, self._wanted = 0, 0, 0, dict[int, int]()
        self._returned: list[int] = []
        self._leases: dict[int, list[int]] = {}
        self._order: tuple[int, list[int]] = (-1, [])
        comm.check_agreement({"sampler": (num_blocks, seed)})
        if self._elastic is not None:
            handle._on_detach(self._elastic.share("sampler", self._position, self._join))
            handle._on_detach(self._elastic.watch(self.claim, self.round_ended))
        self._rounds = cast("LocalUpdates", handle) if has_quorum else None
        if self._rounds is not None:
            self._rounds.assign_blocks(self)

    @property
    def epoch(self) -> int:
        """How many epochs are committed as a whole; with a quorum, and all workers have met since."""
        if self._rounds is not None:
            return self._last // self.num_blocks - 1
        under_way = [place for lease in self._leases.values() for place in lease]
        return min([self._next, *self._returned, *under_way]) // self.num_blocks

    @property
    def num_assigned(self) -> int:
        """Blocks assigned since the start, without those that were given back; with a quorum, those committed."""
        under_way = sum(map(len, self._leases.values())) if self._rounds else 0
        return self._next - len(self._returned) - under_way

    def upcoming(self, epoch: int) -> list[Block]:
        """This worker's blocks of the next steps in an epoch, if the workers stay the same and nothing is given back."""
        if self._rounds is not None:
            return [self._block(place) for place in self._leases.get(self._comm.rank, [])[self._num_own :]]
        places = range(self._next + self._comm.rank, (epoch + 1) * self.num_blocks, self.per_step)
        return [self._block(place) for place in places] if self.per_step == self._comm.size else []

    def take(self) -> list[Block]:
        """This worker's blocks of the next step: at least one, see `weight`. With a quorum one, or none until all have met."""
        if self._rounds is not None:
            return self._take_leased(self._rounds)
        comm = self._comm
        require(
            self._elastic is None or not self._handle.is_detached,
            "ElasticSampler: its strategy was detached; make another one with the strategy at work, and let it load this one's "
            "state_dict()",
        )
        self._end_step()
        if self._is_passive:
            self.weight = 0.0
            return [self._block(next(place for lease in self._leases.values() for place in lease))]
        numbers: Sequence[int] = range(comm.size)
        if self._elastic is not None:
            numbers = required(
                self._elastic.members if self._elastic.in_round else None,
                "ElasticSampler: call begin_round() of the strategy before take(), so that the workers of the step are known",
            ).numbers
        for _ in range(comm.num_skipped):
            self._lease(numbers)  # steps that the others took before this worker joined
        comm.num_skipped = 0
        places = self._lease(numbers)
        own = places[comm.rank :: comm.size]
        self._num_own += len(own)
        self.weight = float(bool(own)) if self._keeps else len(own) * comm.size / self.per_step
        # A worker without a block of its own takes part in the step all the same, with weight 0.
        return [self._block(place) for place in own or places[:1]]

    def _lease(self, numbers: Sequence[int]) -> list[int]:
        """Assign the places of a step to workers: those that were given back, then new ones."""
        again, self._returned = self._returned[: self.per_step], self._returned[self.per_step :]
        first, self._next = self._next, self._next + self.per_step - len(again)
        places = [*again, *range(first, self._next)]
        for i, place in enumerate(places):
            self._leases.setdefault(numbers[i % len(numbers)], []).append(place)
        return places

    def claim(self) -> int:
        """How many blocks this worker's part of the present round is made from."""
        return self._num_own

    def round_ended(self, claims: Mapping[int, int] | None) -> None:
        """Commit or give back leases, alike on all workers.

        Args:
            claims: of each worker of the round, by number; None if the round was given up.
        """
        if claims is None and self._keeps:
            return
        self.last_committed, leases = {}, self._leases
        self._leases, self._num_own, self._is_passive = {}, 0, False
        for number, lease in leases.items():
            count = min(len(lease), (claims or {}).get(number, 0))
            committed = lease[len(lease) - count :]  # a worker that was healed has none of its earlier ones
            self._returned += lease[: len(lease) - count]
            if committed:
                self.last_committed[number] = [self._block(place) for place in committed]
        self._returned.sort()

    # ---- with a quorum ----

    def _take_leased(self, rounds: LocalUpdates) -> list[Block]:
        """The next block of this worker's lease. If it has none, it exchanges what it has done, which may bring some."""
        rank = self._comm.rank
        if self._num_own == len(self._leases.get(rank, [])) and self._num_own:
            rounds.exchange_now()
        left = self._leases.get(rank, [])[self._num_own :][:1]
        self._num_own += len(left)
        return [self._block(place) for place in left]

    def claim_share(self) -> int:
        """How many blocks this worker has taken since its last share."""
        number, self._num_claimed = self._num_own - self._num_claimed, self._num_own
        return number

    def committed(self, parts: Mapping[int, Part], gone: Sequence[int]) -> None:
        """Commit or give back what the changes of a round were made from, and fill the leases of its workers up.

        Args:
            parts: of the round, by rank.
            gone: ranks of workers that are gone since the round before.
        """
        self.last_committed = {}
        for rank, part in parts.items():
            lease = self._leases.get(rank, [])
            done, self._leases[rank] = lease[: part.blocks], lease[part.blocks :]
            if rank == self._comm.rank:
                self._num_own, self._num_claimed = self._num_own - len(done), self._num_claimed - len(done)
            if part.is_merged:
                self.last_committed[rank] = [self._block(place) for place in done]
            else:
                self._returned += done
        for rank in gone:
            self._returned += self._leases.pop(rank, [])
        self._returned.sort()
        self._wanted |= {rank: part.wanted for rank, part in parts.items()}
        # What a worker gave back is for others: if its changes are always dropped, it would have it again for ever.
        merged = {rank for rank, part in parts.items() if part.is_merged}
        self._fill({rank: part.wanted for rank, part in parts.items() if rank not in gone}, merged)

    def all_met(self, members: Sequence[int], wanted: int) -> None:
        """All workers have ended their leases, or were interrupted: assign anew.

        Args:
            members: ranks of the workers that go on.
            wanted: blocks for each that has not said how many it wants.
        """
        # All workers sort, because they must assign the same blocks and may know the leases in another order.
        self._returned = sorted(place for places in (self._returned, *self._leases.values()) for place in places)
        self._leases, self._num_own, self._num_claimed = {}, 0, 0
        self._last = (min([self._next, *self._returned]) // self.num_blocks + 1) * self.num_blocks
        # Else a last block would always go to the same worker, which may be set aside.
        first = self._num_meetings % len(members)
        self._num_meetings += 1
        self._fill({rank: self._wanted.get(rank, wanted) for rank in (*members[first:], *members[:first])}, members)

    def _fill(self, wanted: Mapping[int, int], again: Collection[int]) -> None:
        """Assign places in turn until each worker has as many as it wants. Those in `again` may get what was given back."""
        waiting = deque(rank for rank, number in wanted.items() if len(self._leases.setdefault(rank, [])) < number)
        while waiting:
            rank = waiting.popleft()
            if rank in again and self._returned:
                place = self._returned.pop(0)
            elif self._next < self._last:
                place, self._next = self._next, self._next + 1
            else:
                continue
            self._leases[rank].append(place)
            if len(self._leases[rank]) < wanted[rank]:
                waiting.append(rank)

    # ---- saved, and handed to a worker that joins ----

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, alike on all workers but for how many of the leases are this worker's: plain values."""
        self._end_step()
        return self._position() | {"own": self._num_own}

    def _position(self) -> dict[str, Any]:
        """What is alike on all workers."""
        leases = {str(number): list(lease) for number, lease in self._leases.items()}
        return {"next": self._next, "returned": list(self._returned), "leases": leases, "per_step": self.per_step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint, with any number of workers. With as many, each keeps the leases of its open round.

        Raises:
            ValueError: an impossible position.
        """
        self._join(saved)
        self._is_passive = False
        if self._keeps and self._elastic is not None:
            self._num_own = saved["own"]
        else:
            self.round_ended({})
        if self._rounds is not None:
            self._rounds.assign_blocks(self)

    def _join(self, saved: dict[str, Any]) -> None:
        """Take over the position of a live worker. This worker has no part in what the others have done so far."""
        leases = {int(number): list(lease) for number, lease in saved["leases"].items()}
        places = [*saved["returned"], *(place for lease in leases.values() for place in lease)]
        require(
            all(isinstance(n, int) and 0 <= n <= MAX_BLOCKS for n in (saved["next"], saved["per_step"], *places))
            and saved["per_step"] >= 1
            and len(set(places)) == len(places)
            and all(place < saved["next"] for place in places),
            f"ElasticSampler: an impossible position in the data: {saved}",
        )
        self._next, self._returned, self._leases = saved["next"], sorted(saved["returned"]), leases
        self.last_committed = {}
        self.per_step, self._num_own = saved["per_step"], 0
        self._is_passive = self._sends_again and any(leases.values())  # the others exchange now, and assign no more

    def _end_step(self) -> None:
        """On a fixed number of workers without a quorum, every step is committed."""
        if self._elastic is None and self._rounds is None:
            self.round_ended({number: len(lease) for number, lease in self._leases.items()})

    def _block(self, place: int) -> Block:
        epoch, position = divmod(place, self.num_blocks)
        if self._order[0] != epoch:
            generator = torch.Generator("cpu").manual_seed(mix_key(self.seed, ORDER_STREAM, epoch))
            self._order = (epoch, torch.randperm(self.num_blocks, generator=generator, device="cpu").tolist())
        return Block(epoch, self._order[1][position])
