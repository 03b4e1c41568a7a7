"""Who takes part in an elastic round, and whose state is the newest; nothing that comes from the network is believed."""

from __future__ import annotations

import pytest

from thinwire.comm.elastic import lighthouse
from thinwire.comm.elastic.claims import Claim, choose, differing, members_of, place_of, read_claim
from thinwire.comm.elastic.history import History
from thinwire.comm.members import Diverged, Version


def claim(number, committed=0, regroupings=0, rank=-1, **others):
    values = {
        "id": f"id{number}",
        "store": "10.0.0.1:1",
        "history": "h",
        "settings": "s",
        "connection": "",
        "nonce": "n",
    }
    return Claim(**values | {"number": number, "version": Version(committed, regroupings), "rank": rank} | others)


def numbers(claims):
    return [c.number for c in claims]


def test_committed_rounds_count_before_regroupings():
    """A worker that stopped at round 2 after many regroupings, and others that began again at their checkpoint of round 127."""
    stopped, others = claim(0, 2, 9, rank=0), [claim(n, 127, 0) for n in (1, 2)]
    members = members_of([stopped, *others])
    assert members.version == (127, 0) and members.source == 1 and members.healed == (0,)
    missed = members_of([claim(0, 127, 3), claim(1, 127, 4)])  # at the same round, one has missed a regrouping
    assert missed.source == 1 and missed.healed == (0,)


def test_a_checkpoint_with_more_rounds_does_not_outrank_most_workers_of_a_run_that_goes_on():
    """Two went on from round 100 and are at 110; a third one, which was away, has a checkpoint of round 120."""
    members = members_of([claim(0, 110, rank=0), claim(1, 110, rank=1), claim(2, 120)])
    assert members.version == (110, 0) and members.healed == (2,) and members.sources == (0, 1)
    fresh = members_of([claim(0, rank=0), claim(1, rank=1), claim(2, 120)])  # those two have committed nothing
    assert fresh.version == (120, 0) and fresh.healed == (0, 1)


def test_of_two_histories_with_as_many_rounds_one_is_healed():
    members = members_of([claim(0, 5, history="a"), claim(1, 5, history="b"), claim(2, 5, history="a")])
    assert members.source == 0 and members.healed == (1,)


def test_the_first_round_begins_with_the_first_workers_state_and_a_source_is_one_that_can_save_it():
    assert members_of([claim(3), claim(5)])[3:] == (0, (1,), (0,))
    assert members_of([claim(3, 7, can_heal=False), claim(5, 7), claim(6)])[3:] == (1, (2,), (1,))


def test_a_minority_whose_state_differs_is_healed_and_without_a_majority_nobody_is():
    claims = [claim(n, 5, rank=n, digest=digest) for n, digest in enumerate("aba")]
    members = members_of(claims)
    assert members.healed == (1,) and members.sources == (0, 2) and members.before == (0, None, 2)
    assert differing(claims, members) == [1]
    joins = members_of([*claims[::2], claim(3, 2)])  # it is behind, and says nothing of its state
    assert joins.healed == (2,) and differing([*claims[::2], claim(3, 2)], joins) == []
    for others in (claims[:2], [*claims, claim(3, 5, rank=3, digest="c")], [*claims, claim(3, 5, rank=3, digest="b")]):
        with pytest.raises(Diverged, match="after round 5 the workers differ .* .worker 0: a, worker 1: b"):
            members_of(others)


def test_committed_rounds_that_healing_would_lose_are_counted():
    together = History()
    for _ in range(5):
        together.commit("one")
    alone, others = (History(together.committed, together.digests) for _ in range(2))
    alone.commit("two")
    others.commit("three")
    others.commit("three")
    assert alone.num_lost_in(others) == 1 and together.num_lost_in(others) == 0
    for _ in range(22):
        alone.commit("two")
    assert others.num_lost_in(alone) == 2 and alone.num_lost_in(together) == 23
    resumed = History(3)  # from a checkpoint, whose rounds may be the same
    for _ in range(4):
        resumed.commit("four")
    assert resumed.num_lost_in(alone) == 4 and alone.num_lost_in(resumed) == alone.committed - 3
    long = History()
    for _ in range(3000):
        long.commit("five")
    assert History(2, ["x", "y"]).num_lost_in(long) == 0 and len(long.digests) == 1000


def test_a_joiner_of_another_configuration_never_outweighs_a_run():
    run, joiners = [claim(0, 3, rank=0), claim(1, 3, rank=1)], [claim(n, 900, settings="t") for n in (2, 3, 4)]
    for together in (run + joiners, joiners + run):
        found = choose(together)
        assert numbers(found.members) == [0, 1]
        assert {i: other.number for i, other in found.differing.items()} == {"id2": 0, "id3": 0, "id4": 0}
    assert numbers(choose([claim(0, settings="t"), claim(1), claim(2)]).members) == [1, 2]  # at the start, most decide


def test_of_two_workers_with_one_number_the_one_that_takes_part_stays():
    old, new = claim(1, 3, rank=1, id="z"), claim(1, 9, id="a")
    found = choose([claim(0, 3, rank=0), new, old])
    assert found.members[1] is old and found.taken == {"a": old}


@pytest.mark.parametrize("reports", [{0: (2,)}, {2: (0,)}, {0: (2,), 2: (0,)}])
def test_of_two_workers_that_do_not_reach_each_other_one_is_left_out(reports):
    found = choose([claim(n, 3, unreachable=reports.get(n, ())) for n in range(4)])
    assert numbers(found.members) == [0, 1, 3] and found.unreached["id2"].number == 0


def test_a_worker_that_nobody_reaches_is_left_out_alone():
    found = choose([claim(n, 3, unreachable=() if n == 0 else (0,)) for n in range(4)])
    assert numbers(found.members) == [1, 2, 3]
    found = choose([claim(n, 3, unreachable=(1, 2, 3) if n == 0 else ()) for n in range(4)])
    assert numbers(found.members) == [1, 2, 3]


def test_a_place_depends_on_every_question():
    claims = [claim(0), claim(1)]
    assert place_of(claims) == place_of(list(claims)) != place_of([claims[0], claims[1]._replace(nonce="other")])


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": [2**63, 0]},
        {"version": [2**60, 0]},
        {"version": [-1, 0]},
        {"version": [1.0, 0]},
        {"version": [True, 0]},
        {"version": [1]},
        {"version": "12"},
        {"number": -1},
        {"number": 2**40},
        {"number": None},
        {"rank": -2},
        {"failures": -1},
        {"unreachable": ["0"]},
        {"unreachable": 5},
        {"unreachable": list(range(1000))},
        {"history": "x" * 10_000},
        {"settings": None},
        {"can_heal": 1},
        {"digest": 7},
        {"nonce": "\ud800"},
        {"state_ports": [1 << 16]},
        {"state_ports": 5},
        {"more": 1},
    ],
)
def test_a_claim_that_cannot_be_true_is_dropped(wrong):
    data = claim(3, 7).data()
    assert read_claim("a", "10.0.0.1:1", data) is not None
    assert read_claim("a", "10.0.0.1:1", data | wrong) is None
    assert read_claim("a", "nowhere", data) is None and read_claim("a", "h" * 1000 + ":1", data) is None
    assert read_claim("a", "10.0.0.1:1", None) is None


def test_a_worker_whose_claim_is_dropped_is_named_in_one_line_whatever_its_name(caplog):
    assert lighthouse._claims([("a\nthinwire: all is well", "", None)]) == []
    (line,) = caplog.messages
    assert "\n" not in line and "takes no part" in line


@pytest.mark.parametrize(
    "store",
    ["10.0.0.1:70000", "a\0b:1", "a..b:1", "slow.example.org:1", "10.0.0.1", ":1", "1" * 300, "10.0.0.1:\u0663"],
)
def test_a_worker_says_an_address_that_need_not_be_looked_up(store):
    assert read_claim("a", store, claim(3).data()) is None
    assert read_claim("a", "[::1]:1", claim(3).data()) is not None
