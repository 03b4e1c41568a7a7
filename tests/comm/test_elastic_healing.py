"""A failure in healing is the round's, not the process's."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from thinwire.comm import CommunicationError
from thinwire.comm.handle import Handle
from thinwire.comm.healing import TRIES, Healing
from thinwire.comm.history import History
from thinwire.comm.members import LeftOut, LostRounds, Members, Version
from thinwire.comm.state_bytes import packed, unpacked


class Peers:
    """In place of a communicator: rank 1, healed by rank 0, which sends what the test says."""

    rank, size = 1, 2

    def __init__(self, sent: bytes, announced: int | None = None):
        self.sent, self.announced, self.exchanges = sent, len(sent) if announced is None else announced, 0

    def all_gather(self, own):
        return Handle(lambda: [torch.tensor([self.announced]), own])

    def exchange(self, sends, receives):
        self.exchanges += 1
        receives[0].copy_(torch.frombuffer(bytearray(self.sent), dtype=torch.uint8))
        return Handle(lambda: receives)


def state_of(history, **parts):
    state = {"strategy": {"x": torch.ones(3)}, "shared": {}}
    rounds = {"committed": history.committed, "digests": history.digests}
    return packed(state | {"rounds": rounds} | parts).numpy().tobytes()


def after(rounds, place="one"):
    history = History()
    for _ in range(rounds):
        history.commit(place)
    return history


def heal(healing, peers, own, version, loaded):
    members = Members((4, 7), (0, None), version, 0, (1,))
    return healing.heal(peers, members, own, lambda: {"x": torch.zeros(3)}, loaded.append)


def test_a_state_is_loaded_with_its_history():
    loaded = []
    history = heal(Healing(), Peers(state_of(after(5))), History(), Version(5), loaded)
    assert history.committed == 5 and history.digests == after(5).digests and loaded[0]["x"].tolist() == [1.0] * 3


@pytest.mark.parametrize("announced", [2**62, 1 << 40, 0, -1, -(2**63)])
def test_a_size_that_cannot_be_is_refused_before_memory_is_taken_and_left_out_after_some_tries(announced):
    healing, peers = Healing(), Peers(b"", announced)
    for _ in range(TRIES - 1):
        with pytest.raises(CommunicationError, match=f"worker 4 announced a state of {announced} bytes, expected 1 to"):
            heal(healing, peers, History(), Version(5), [])
    with pytest.raises(LeftOut, match=f"worker 7 is left out of the run: it could not be healed in {TRIES} tries"):
        heal(healing, peers, History(), Version(5), [])
    assert peers.exchanges == 0


class Harm:
    """What unpickling would call."""

    def __reduce__(self):
        return (print, ("harm",))


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage",
        pickle.dumps(Harm()),
        pickle.dumps({"strategy": Harm(), "shared": {}, "rounds": {"committed": 5, "digests": ["x"]}}),
        state_of(after(4)),
        state_of(after(5), rounds={"committed": 2**63, "digests": ["x"]}),
        state_of(after(5), rounds=None),
    ],
)
def test_a_state_that_cannot_be_gives_up_the_round_and_is_not_unpickled(sent, capsys):
    loaded = []
    with pytest.raises(CommunicationError, match="worker 7 could not be healed"):
        heal(Healing(), Peers(sent), History(), Version(5), loaded)
    assert not loaded and capsys.readouterr().out == ""


def test_what_is_loaded_in_part_is_no_state_of_the_run():
    """It had its own rounds; the next try starts from none, and succeeds."""

    def fails(state):
        raise RuntimeError("no memory for 'x'")

    healing, own, peers = Healing(), after(3), Peers(state_of(after(5)))
    members = Members((4, 7), (0, None), Version(5), 0, (1,))
    with pytest.raises(CommunicationError, match="worker 7 could not be healed: no memory for 'x'"):
        healing.heal(peers, members, own, dict, fails)
    assert own.version == (0, 0)
    assert heal(healing, peers, own, Version(5), []).committed == 5


def test_a_worker_that_cannot_save_its_state_heals_nobody_any_more():
    def fails():
        raise MemoryError("no memory")

    peers, healing = Peers(b"", 100), Healing()
    peers.rank = 0
    with pytest.raises(CommunicationError, match="worker 4 cannot save its state: no memory"):
        healing.heal(peers, Members((4, 7), (0, None), Version(5), 0, (1,)), after(5), fails, lambda state: None)
    assert not healing.can_heal


def test_committed_rounds_are_not_lost_without_an_error(caplog):
    """The one round whose vote was in doubt is given up with a warning; more is an error, and nothing is loaded."""
    theirs, own, loaded = after(2), after(2), []
    for _ in range(5):
        theirs.commit("two")
    own.commit("three")
    assert heal(Healing(), Peers(state_of(theirs)), own, Version(7), loaded).committed == 7
    assert "worker 7 gives up a round that the others have not committed" in caplog.text
    own = after(2)
    for _ in range(3):
        own.commit("three")
    with pytest.raises(LostRounds, match="worker 7 has committed 3 rounds since round 2 that the newest state"):
        heal(Healing(), Peers(state_of(theirs)), own, Version(7), loaded)
    assert len(loaded) == 1 and own.committed == 5


STATE = {
    "tensors": [
        torch.arange(7, dtype=torch.int16),
        torch.randn(2, 3).bfloat16(),
        torch.tensor(True),
        torch.zeros(0, 4),
    ],
    3: {"betas": (0.9, -0.0), "limit": float("inf"), "none": None, "big": 2**80, "text": "\u00e9"},
    (1, "a"): torch.randn(5, 4).t(),
}


def test_a_state_keeps_its_bits_and_its_shape():
    read = unpacked(packed(STATE))
    assert read.keys() == STATE.keys() and read[3] == STATE[3] and str(read[3]["betas"]) == "(0.9, -0.0)"
    for ours, theirs in zip((*STATE["tensors"], STATE[1, "a"]), (*read["tensors"], read[1, "a"]), strict=True):
        assert theirs.dtype == ours.dtype and torch.equal(theirs, ours)
    for thing in (Harm(), {"x": {1, 2}}, print, torch.zeros(2).to_sparse()):
        with pytest.raises(TypeError, match="a state has"):
            packed([thing])


def test_bytes_that_are_no_state_are_a_value_error_and_take_no_memory():
    """Each byte of a small one is changed, and it is cut at each place; then lies about shapes and places."""
    good = packed({"x": torch.ones(3), "rounds": [1, ("a", None)]})
    generator = torch.Generator().manual_seed(0)
    for place in range(len(good)):
        damaged = good.clone()
        damaged[place] = int(torch.randint(256, (1,), generator=generator))
        for payload in (damaged, good[:place]):
            try:
                unpacked(payload)
            except ValueError:
                pass
    lies = (
        *(["tensor", "float32", shape, 0] for shape in ([2**40], [2**62, 4], [-1], [1.0], "a", None, [[]])),
        *(["tensor", "float32", [1], place] for place in (-16, 8, 2**60, None, "0")),
        *(
            ["tensor", "object", [1], 0],
            ["tensor"],
            ["dict", ["a"]],
            ["dict", [["list"], 1]],
            ["call", "print"],
            {"a": 1},
            [],
        ),
    )
    for lie in lies:
        text = json.dumps(lie).encode()
        with pytest.raises(ValueError):
            unpacked(torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + bytes(64)), dtype=torch.uint8))
    deep = b"[" * 100_000
    for text in (deep, b'["list",' * 500 + b"1" + b"]" * 500):
        with pytest.raises(ValueError):
            unpacked(torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8))
