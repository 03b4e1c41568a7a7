"""What each worker says of itself when it asks for a round, and who takes part in that round.

The Lighthouse gives all workers that ask the same list of claims. So each worker decides alone, and all decide alike:

    1. numbers      of two workers with one number, the one that takes part already stays
    2. settings     workers whose configuration differs from that of the others are refused
    3. connections  of two workers that cannot reach each other, one is left out

Claims come from the network: one that cannot be true is dropped, and its worker takes no part.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..addresses import is_contact
from ..members import Diverged, Members, Version
from ..tls.relay import relay_of

MAX_ROUNDS = 1 << 48
"""No run has more rounds: a round a microsecond would take 9 years."""
MAX_NUMBER = 1_000_000
MAX_TEXT = 200


class Claim(NamedTuple):
    """What a worker says of itself.

    Args:
        id: of the process; the Lighthouse knows it by this name.
        store: address of its store, "host:port"; the host may be one at a relay, `relay.host_at`.
        number: of the worker.
        version: of its state.
        history: digest of the rounds that it has committed.
        settings: digest of its configuration.
        connection: name of its live connections, "" for none.
        rank: in the last round, -1 if there was none.
        nonce: a new one for each question.
        failures: tries to connect that failed, in a row.
        unreachable: numbers of workers that it could not reach, several times.
        can_heal: whether its state could be saved when it was asked last.
        digest: of what it has in common with the others; "" in most rounds, which do not compare it.
        state_ports: where each of its processes serves its state, at the host of its store.
    """

    id: str
    store: str
    number: int
    version: Version
    history: str
    settings: str
    connection: str
    rank: int
    nonce: str
    failures: int = 0
    unreachable: tuple[int, ...] = ()
    can_heal: bool = True
    digest: str = ""
    state_ports: tuple[int, ...] = (0,)

    def data(self) -> dict[Any, object]:
        """The claim as plain values, without id and store, which travel apart."""
        return {name: value for name, value in self._asdict().items() if name in FIELDS}


FIELDS = {*Claim._fields} - {"id", "store"}


def read_claim(id: str, store: str, data: Any) -> Claim | None:
    """The claim that came from the network; None if it cannot be true.

    Example:
        >>> own = Claim("a", "10.0.0.1:1", 3, Version(7, 1), "ab", "cd", "", -1, "ef")
        >>> read_claim("a", "10.0.0.1:1", own.data()) == own
        True
        >>> read_claim("a", "10.0.0.1:1", own.data() | {"version": [2**63, 0]}) is None
        True
    """
    host, _, port = store.rpartition(":")
    if not isinstance(data, dict) or set(data) != FIELDS:
        return None
    # `relay_of` has checked the host of a worker at a relay, so only the port is left.
    if len(host) > MAX_TEXT or not is_contact("0.0.0.0" if relay_of(host) else host, port):
        return None
    version, unreachable = data["version"], data["unreachable"]
    counts = [(data["number"], 0, MAX_NUMBER), (data["rank"], -1, MAX_NUMBER), (data["failures"], 0, MAX_ROUNDS)]
    lists = (version, unreachable, data["state_ports"])
    # Before `unreachable` and the ports are read one by one, their number is bounded.
    if not all(isinstance(one, (list, tuple)) and len(one) <= MAX_TEXT for one in lists) or len(version) != 2:
        return None
    counts += [(port, 0, (1 << 16) - 1) for port in data["state_ports"]]
    counts += [(count, 0, MAX_ROUNDS) for count in version] + [(number, 0, MAX_NUMBER) for number in unreachable]
    texts = [data[name] for name in ("history", "settings", "connection", "nonce", "digest")]
    # `type` and not `isinstance`, which takes True for 1.
    if not all(type(count) is int and low <= count <= high for count, low, high in counts):
        return None
    # Digests and names are ASCII; other text, such as half a surrogate pair, need not have an encoding.
    is_text = all(isinstance(text, str) and text.isascii() and len(text) <= MAX_TEXT for text in texts)
    if not is_text or type(data["can_heal"]) is not bool:
        return None
    values = data | {"version": Version(*version), "unreachable": tuple(unreachable)}
    values["state_ports"] = tuple(data["state_ports"])
    return Claim(id=id, store=store, **values)


def at_relay(claims: Iterable[Claim], relay: tuple[str, int] | None) -> list[Claim]:
    """The claims of workers that listen, or that take connections at the run's relay: no other place is asked for them.

    Example:
        >>> from thinwire.comm.tls.relay import host_at
        >>> ours, other = (Claim("a", f"{host_at((h, 1))}:1", 3, Version(7, 1), "", "", "", -1, "") for h in "ab")
        >>> at_relay([ours, other], ("a", 1)) == [ours], at_relay([ours, other], None)
        (True, [])
    """
    return [claim for claim in claims if relay_of(claim.store.rpartition(":")[0]) in (None, relay)]


class Choice(NamedTuple):
    """Who takes part, in the order of their numbers; and of the others the claim of a worker that stands against it."""

    members: tuple[Claim, ...]
    taken: dict[str, Claim]
    differing: dict[str, Claim]
    unreached: dict[str, Claim]


def choose(claims: Iterable[Claim]) -> Choice:
    """Decide who takes part in the round; see the module's text."""
    holders: dict[int, Claim] = {}
    # The first claim of a number holds it: that of a worker in the last round, then the one with most rounds.
    for claim in sorted(claims, key=lambda c: (c.rank < 0, -c.version.committed, c.id)):
        holders.setdefault(claim.number, claim)
    taken = {claim.id: holders[claim.number] for claim in claims if holders[claim.number] is not claim}
    groups: dict[str, list[Claim]] = {}
    for _, claim in sorted(holders.items()):
        groups.setdefault(claim.settings, []).append(claim)
    alike = max(groups.values(), key=_weight, default=[])
    differing = {claim.id: alike[0] for group in groups.values() if group is not alike for claim in group}
    members, unreached = _connectable(alike)
    return Choice(tuple(members), taken, differing, unreached)


def _weight(group: list[Claim]) -> tuple[int, int, Version, int]:
    """Those that take part already count most, so that a joiner never outweighs a run."""
    taking_part = sum(claim.rank >= 0 for claim in group)
    return taking_part, len(group), max(claim.version for claim in group), -group[0].number


def _connectable(claims: list[Claim]) -> tuple[list[Claim], dict[str, Claim]]:
    """Leave out the worker that lacks most connections; repeat until all that are left reach each other."""
    left, unreached = list(claims), dict[str, Claim]()
    while True:
        broken = {claim.id: [o for o in left if _lack_connection(claim, o)] for claim in left}
        # All workers must leave out the same one, so ties go by rounds and by number.
        worst = max(left, key=lambda c: (len(broken[c.id]), -c.version.committed, c.number), default=None)
        if worst is None or not broken[worst.id]:
            return left, unreached
        unreached[worst.id] = broken[worst.id][0]
        left.remove(worst)


def _lack_connection(one: Claim, other: Claim) -> bool:
    return one is not other and (other.number in one.unreachable or one.number in other.unreachable)


def place_of(members: Sequence[Claim]) -> str:
    """A name for the connections of this round's workers, which no other round has."""
    return hashlib.sha256("".join(f"{c.id} {c.nonce}\n" for c in members).encode()).hexdigest()[:24]


def members_of(claims: Sequence[Claim]) -> Members:
    """Who has the newest state, and who is healed from whom. Before the first round, all begin with the first worker's.

    The state with the most committed rounds is the newest. But if more than half of the workers take part already, it is one of
    theirs: a checkpoint with rounds that they do not know does not end their run.

    Where workers say what their state is, that of more than half of those with as many rounds is right.

    Raises:
        Diverged: there is no such majority.
    """
    going_on = [c for c in claims if c.rank >= 0 and c.version.committed]
    latest = max(going_on if 2 * len(going_on) > len(claims) else claims, key=lambda c: (c.version, c.can_heal))
    is_first = latest.version == Version()
    newest = [c for c in claims if not is_first and (c.version, c.history) == (latest.version, latest.history)]
    known = _majority(newest)
    # If none of them can save its state, one is named all the same, and healing fails with a reason.
    sources = [c for c in known if c.can_heal] or known[:1] if not is_first else [claims[0]]
    healed = tuple(r for r, c in enumerate(claims) if c not in known and c not in sources)
    # A healed worker has lost its memory, so averagers treat it as a new one.
    before = tuple(c.rank if c in known and c.rank >= 0 else None for c in claims)
    numbers, ranks = tuple(claim.number for claim in claims), tuple(map(claims.index, sources))
    return Members(numbers, before, latest.version, ranks[0] if healed else None, healed, ranks)


def differing(claims: Sequence[Claim], members: Members) -> list[int]:
    """The numbers of the healed workers whose state differs from that of others with as many rounds."""
    right = claims[members.sources[0]]
    healed = (claims[rank] for rank in members.healed)
    return [c.number for c in healed if c.digest and (c.version, c.history) == (right.version, right.history)]


def _majority(newest: list[Claim]) -> list[Claim]:
    digests = Counter(claim.digest for claim in newest if claim.digest)
    if len(digests) < 2:
        return newest
    (right, most), *_ = digests.most_common()
    if 2 * most <= digests.total():
        said = ", ".join(f"worker {claim.number}: {claim.digest[:12]}" for claim in newest if claim.digest)
        raise Diverged(
            f"after round {newest[0].version.committed} the workers differ in what they should have in common, and no "
            f"majority says which is right ({said}). Go on from the last checkpoint; if machines compute differently, set "
            "check_every to 0"
        )
    return [claim for claim in newest if claim.digest == right]
