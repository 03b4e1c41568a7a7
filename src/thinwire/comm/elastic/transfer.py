"""How a worker gets the state of others: chunks from several sources at once, each held to its hash.

    1. manifests    every source says what its state consists of. What more than half of those that answer say is believed;
                    the others are named, and no sources any more. Where machines compute differently, no such majority is
                    needed. Sections that differ between workers come from one source. The chunks of small sections come along
    2. chunks       all connections to all sources take the next missing chunk, so a fast source serves more than a slow one.
                    What is held already is not asked for again: chunks that came before a cut, or that equal one's own

A source that sends a wrong chunk is named and not asked again. Where no part of a chunk comes for `SILENT_SECONDS`, it is left
to the other connections, and this one is made anew: after a cut, packets on an old one may wait for long. Each time a source
gets twice as many seconds, until it has had the time limit without a success. Later sections come from the other sources.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from ... import debug
from ...messages import log
from ..addresses import parse_address
from ..exit import until_exit
from ..handle import CommunicationError, reason_of
from ..tls.connections import UNREAD_SECONDS, Client, Record, Refused
from ..tls.credentials import Credentials
from ..tls.relay import relay_of
from .snapshot import FAILED, OK, WAIT, Manifest, root_of

STREAMS = 4
"""Connections to each source: one alone is slow where the round trip is long."""
GRACE_SECONDS = 1.0
"""How long to wait for the other sources, once more than half say the same."""
SILENT_SECONDS = 5.0
PAUSE_SECONDS = 0.05


class Source(NamedTuple):
    """A worker that serves its state.

    Args:
        number: of the worker.
        address: of its listener, "host:port".
    """

    number: int
    address: str


class Transfer:
    """Gets the state of one round; see the module's text.

    Args:
        number: of this worker.
        key: name of the round.
        sources: all say the same, if nobody is wrong.
        differing: names of the sections that differ between workers.
        credentials: of this worker.
        limit_seconds: how long a source may be silent.
        held: chunks of each section that this worker has, by their hashes; it adds those that come, and drops those that
            the sources do not have any more.
        tick: is called now and then while this worker waits.
        record: counts questions and answers.
        may_differ: without a majority, what most sources say is believed, of equally many what the first one says.

    Attributes:
        sources: those that are believed.
    """

    def __init__(
        self,
        number: int,
        key: str,
        sources: Sequence[Source],
        differing: Collection[str],
        credentials: Credentials | None,
        limit_seconds: float,
        held: dict[str, dict[bytes, Tensor]],
        tick: Callable[[], None],
        record: Record,
        may_differ: bool,
    ):
        self._number, self._key, self._differing, self.sources = number, key.encode(), differing, [*sources]
        self._limit_seconds, self._held, self._tick, self._may_differ = limit_seconds, held, tick, may_differ
        self._clients = {s: Client(*parse_address(s.address), credentials, record) for s in sources}
        self._manifests: dict[Source, dict[str, Manifest]] = {}
        self._small: dict[bytes, Tensor] = {}  # chunks that came with manifests, by their hashes
        self._silent = set[Source]()  # they have failed since their last answer

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()

    # ---- manifests ----

    def agree(self, names: Sequence[str]) -> dict[str, Manifest]:
        """The manifests of these sections, but for those that the sources lack. Sources that do not say the same are left out.

        Raises:
            CommunicationError: no source answers.
            ValueError: they differ, and no majority says the same.
        """
        reasons, deadline = dict[Source, str](), time.monotonic() + self._limit_seconds
        self._manifests = {}
        answers: SimpleQueue[tuple[Source, dict[str, Manifest] | str]] = SimpleQueue()
        for source in self.sources:
            threading.Thread(
                target=lambda source=source: answers.put((source, self._asked(source, names, deadline))),
                name="thinwire-healing",
                daemon=True,
            ).start()
        end = deadline
        while len(self._manifests) + len(reasons) < len(self.sources) and time.monotonic() < end:
            self._tick()
            with contextlib.suppress(Empty):
                source, answer = answers.get(timeout=4 * PAUSE_SECONDS)
                if isinstance(answer, str):
                    reasons[source] = answer
                else:
                    self._manifests[source] = answer
                most = max(Counter(map(self._root, self._manifests.values())).values(), default=0)
                if 2 * most > len(self.sources):
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        return self._believed(reasons)

    def _asked(self, source: Source, names: Sequence[str], deadline: float) -> dict[str, Manifest] | str:
        """What a source says of its state, or why it says nothing."""
        try:
            while True:
                what, *values = self._ask(source, b"manifests", *(name.encode() for name in names))
                if what == OK:
                    # Where a manifest that is believed has this hash, this is the chunk, whoever sent it.
                    for chunk in values[len(names) :]:
                        self._small[hashlib.sha256(chunk).digest()] = _tensor(chunk)
                    manifests = zip(names, values[: len(names)], strict=True)
                    return {name: Manifest.parsed(data) for name, data in manifests if data}
                if what != WAIT or time.monotonic() > deadline:
                    return "it cannot save its state" if what == FAILED else "it has left the round"
                time.sleep(PAUSE_SECONDS)
        except (OSError, ValueError) as error:
            return reason_of(error)

    def _root(self, manifests: dict[str, Manifest]) -> str:
        return root_of(manifests, manifests.keys() - self._differing)

    def _believed(self, reasons: dict[Source, str]) -> dict[str, Manifest]:
        if not self._manifests:
            said = "; ".join(f"worker {source.number}: {reason}" for source, reason in sorted(reasons.items()))
            raise CommunicationError(f"no source answers ({said})" if said else "no source answers")
        roots = {source: self._root(manifests) for source, manifests in self._manifests.items()}
        # In the order of the sources, not of their answers.
        (root, most), *_ = Counter(roots[source] for source in self.sources if source in roots).most_common()
        if 2 * most <= len(roots) and not self._may_differ:
            said = "; ".join(f"worker {source.number}: {root[:12]}" for source, root in sorted(roots.items()))
            raise ValueError(
                f"the sources have different states, and no majority says which is right ({said}); if machines compute "
                "differently, set check_every to 0"
            )
        for source in (source for source, other in roots.items() if other != root and not self._may_differ):
            log.warning(
                "worker %d announced another state than %d others; worker %d takes nothing from it",
                *(source.number, most, self._number),
            )
        self.sources = [source for source in self.sources if roots.get(source) == root]
        return self._manifests[self.sources[0]]

    def steps(self) -> int:
        """How many steps a source has taken since the round began; 0 if none says so."""
        for source in self._best_first():
            try:
                what, *values = self._ask(source, b"steps", seconds=SILENT_SECONDS)
                if what == OK:
                    return max(0, int(values[0]))
            except (OSError, ValueError):
                continue
        return 0

    # ---- chunks ----

    def section(self, name: str) -> Tensor:
        """A section of the state, (n,) uint8.

        Raises:
            CommunicationError: the sources are gone.
            ValueError: none sends what it has announced.
        """
        error: Exception = CommunicationError("no source is left")
        order = self._best_first()
        heard = [source for source in order if source not in self._silent]
        groups = [heard, order] if 0 < len(heard) < len(order) else [order]
        for sources in [[source] for source in order] if name in self._differing else groups:
            try:
                return self._fetched(name, sources, self._manifests[sources[0]][name])
            except (CommunicationError, ValueError) as failure:
                error = failure
        raise error

    def _best_first(self) -> list[Source]:
        return sorted(self.sources, key=lambda source: source in self._silent)

    def _fetched(self, name: str, sources: Sequence[Source], manifest: Manifest) -> Tensor:
        section = debug.empty(manifest.num_bytes, dtype=torch.uint8, device="cpu")
        fetch = _Fetch(section, manifest, self._held.get(name, {}) | self._small)
        self._held[name] = fetch.held
        threads = [
            threading.Thread(target=self._pull, args=(fetch, source, name), name="thinwire-healing", daemon=True)
            for source in sources
            for _ in range(min(STREAMS, len(fetch.missing)))
        ]
        for thread in threads:
            thread.start()
        while not fetch.wait(4 * PAUSE_SECONDS) and any(thread.is_alive() for thread in threads):
            self._tick()
        if not fetch.wait(0):
            if not any(source in self.sources for source in sources):
                raise ValueError(f"no source sends the chunks of {name!r} that it has announced")
            raise CommunicationError(f"{name!r} is not whole: {fetch.reason}")
        return section

    def _pull(self, fetch: _Fetch, source: Source, name: str) -> None:
        """Get chunks from one source, over one connection, until there are no more or the source fails."""
        since, seconds = time.monotonic(), SILENT_SECONDS
        while (number := fetch.next()) is not None:
            try:
                if source not in self.sources:
                    raise Refused(f"worker {source.number} sent a wrong chunk")
                what, *values = self._ask(source, b"chunk", name.encode(), str(number).encode(), seconds=seconds)
            except (OSError, ValueError) as error:  # a ValueError while this worker's credentials are replaced
                fetch.put_back(number, f"worker {source.number}: {reason_of(error)}")
                self._silent.add(source)
                # A cut refuses nothing: where nobody listens, the process has ended, unless it is a relay that starts again.
                at_relay = relay_of(parse_address(source.address)[0]) is not None
                has_ended = isinstance(error, ConnectionRefusedError) and not at_relay
                if has_ended or isinstance(error, Refused) or time.monotonic() > since + self._limit_seconds:
                    return
                time.sleep(4 * PAUSE_SECONDS)
                seconds *= 2
                continue
            if what != OK:
                fetch.put_back(number, f"worker {source.number} has left the round")
                return
            if len(values) != 1 or not fetch.take(number, values[0]):
                fetch.put_back(number, f"worker {source.number} sent a wrong chunk")
                if source in self.sources:
                    self.sources.remove(source)
                    log.warning(
                        "worker %d sent a wrong chunk %d of %r; worker %d takes nothing more from it",
                        *(source.number, number, name, self._number),
                    )
                return
            # The limit holds from the last chunk on, however long the whole transfer takes.
            since = time.monotonic()
            self._silent.discard(source)

    def _ask(self, source: Source, what: bytes, *rest: bytes, seconds: float = math.inf) -> list[bytes]:
        # A chunk may take long on a slow line: its bytes show that the source lives, which waits as long for it to be read.
        silent = min(seconds, self._limit_seconds)
        return self._clients[source].ask(what, self._key, *rest, seconds=silent, whole_seconds=UNREAD_SECONDS)


class _Fetch:
    """A section under way: which chunks are missing, and which are being asked for."""

    def __init__(self, section: Tensor, manifest: Manifest, held: dict[bytes, Tensor]):
        # Views of the section, which take no memory of their own, and of no other section, so that older ones are freed.
        self._section, self._manifest, self.held = section, manifest, dict[bytes, Tensor]()
        self._changed, self.missing, self.reason = threading.Condition(), deque[int](), "no source is left"
        for number in range(manifest.num_chunks):
            place, have = manifest.place(number), held.get(manifest.hash(number))
            if have is None:
                self.missing.append(number)
            else:
                section[place] = have
                self.held[manifest.hash(number)] = section[place]
        self._num_missing = len(self.missing)

    def wait(self, seconds: float) -> bool:
        """Wait until all chunks are there; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_missing == 0, seconds)

    def next(self) -> int | None:
        """A chunk to ask for; None when all are there."""
        with self._changed:
            # A chunk that another connection asks for may come back, if its source fails.
            self._changed.wait_for(lambda: self.missing or not self._num_missing)
            return self.missing.popleft() if self._num_missing else None

    def put_back(self, number: int, reason: str) -> None:
        """Let another connection ask for a chunk."""
        with self._changed:
            self.missing.appendleft(number)
            self.reason = reason
            self._changed.notify_all()

    def take(self, number: int, chunk: bytes) -> bool:
        """Put a chunk in its place; whether it is the right one."""
        place, hash = self._manifest.place(number), self._manifest.hash(number)
        if hashlib.sha256(chunk).digest() != hash:
            return False
        with until_exit():
            self._section[place] = _tensor(chunk)
        with self._changed:
            self.held[hash] = self._section[place]
            self._num_missing -= 1
            self._changed.notify_all()
        return True


def _tensor(chunk: bytes) -> Tensor:
    return torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
