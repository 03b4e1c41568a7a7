"""Who takes part in a round: the rules of a Lighthouse, and callers that lie."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest
from helpers.keys import keys_of

from thinwire.comm import Lighthouse
from thinwire.comm.elastic import quorums
from thinwire.comm.elastic.claims import Claim
from thinwire.comm.elastic.quorums import OK, QUORUM, WAIT, QuorumClient, Quorums
from thinwire.comm.members import Version
from thinwire.comm.tls.connections import Listener, Refused

BEAT = 3.0


class Scene:
    """Quorums at a time that the test sets; nobody waits."""

    def __init__(self, monkeypatch, min_workers=2, join_seconds=60.0, restart_seconds=0.0):
        monkeypatch.setattr(quorums, "WAIT_SECONDS", 0.0)
        monkeypatch.setattr(quorums, "RESTART_SECONDS", restart_seconds)
        monkeypatch.setattr(quorums, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.now = 100.0
        self.quorums = Quorums(min_workers, join_seconds, BEAT)

    def beat(self, *ids):
        for id in ids:
            assert self.quorums.answer([b"beat", id.encode()]) == [OK]

    def ask(self, id, nonce=b"1", claim='["10.0.0.1:1", {}]'):
        """The workers of the quorum; None while there is none."""
        what, *answer = self.quorums.answer([b"ask", id.encode(), nonce, claim.encode()])
        assert what in (QUORUM, WAIT)
        if what == WAIT:
            return None
        return "".join(worker for worker, _ in json.loads(answer[0]))


def test_a_quorum_waits_for_all_that_live_and_gives_all_the_same_answer(monkeypatch):
    scene = Scene(monkeypatch)
    scene.beat("a", "b", "c")
    assert scene.ask("c") is None and scene.ask("a") is None
    assert scene.ask("b") == "abc"
    assert scene.ask("a") == scene.ask("c") == "abc"  # the same question, again


def test_workers_of_the_last_quorum_wait_for_nobody(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.ask("a") is None and scene.ask("b") == "ab"
    scene.beat("a", "b", "c")  # c loads its data
    assert scene.ask("a", b"2") is None
    assert scene.ask("b", b"2") == "ab"
    assert scene.ask("c", b"1") is None and scene.ask("a", b"3") is None
    assert scene.ask("b", b"3") == "abc"
    assert scene.ask("a", b"3") == "abc" == scene.ask("c", b"1")


def test_new_workers_begin_no_run_before_a_new_lighthouse_has_heard_of_the_old_ones(monkeypatch):
    """Or before one has that knew nobody for long. Two new workers reach it first."""
    scene = Scene(monkeypatch, restart_seconds=1.5)
    scene.now += 100.0
    for nonce in (b"1", b"2"):
        assert scene.ask("a", nonce) is None and scene.ask("b", nonce) is None
        scene.now += 1.0
        scene.beat("old")  # it is in a long round
        assert scene.ask("a", nonce) is None
        scene.now += 0.5
        assert scene.ask("b", nonce) is None and scene.ask("old", nonce) == "abold"
        for id in ("a", "b", "old"):
            assert scene.quorums.answer([b"leave", id.encode()]) == [OK]


def test_a_worker_without_heartbeats_is_left_out(monkeypatch):
    scene = Scene(monkeypatch)
    scene.beat("a", "b", "c")
    assert [scene.ask(id) for id in "abc"][-1] == "abc"
    assert scene.ask("a", b"2") is None and scene.ask("b", b"2") is None  # c may still come
    scene.now += BEAT
    assert scene.ask("a", b"2") is None  # b's last question is as old
    assert scene.ask("b", b"2") == "ab"


def test_nobody_waits_for_a_worker_that_has_left(monkeypatch):
    """They waited until they had missed its heartbeats for three seconds."""
    scene = Scene(monkeypatch)
    scene.beat("a", "b", "c")
    assert [scene.ask(id) for id in "abc"][-1] == "abc"
    assert scene.ask("c", b"2") is None and scene.ask("a", b"2") is None
    assert scene.quorums.answer([b"leave", b"c"]) == [OK]
    assert scene.ask("b", b"2") == "ab"


def test_there_are_never_two_quorums_at_once(monkeypatch):
    scene = Scene(monkeypatch, join_seconds=5.0)
    scene.beat(*"abcd")
    assert scene.ask("a") is None and scene.ask("b") is None
    for _ in range(10):
        scene.now += 1.0
        scene.beat("c", "d")
        assert scene.ask("a") is None and scene.ask("b") is None  # half of those that live
    assert scene.ask("c") == "abc"  # the first one asked long ago


def test_fewer_than_the_minimum_wait_but_those_of_the_last_quorum(monkeypatch):
    scene = Scene(monkeypatch, min_workers=3, join_seconds=1.0)
    assert scene.ask("a") is None
    scene.now += 2
    assert scene.ask("a") is None and scene.ask("b") is None
    assert scene.ask("c") == "abc"


def test_a_question_of_a_worker_that_died_is_forgotten(monkeypatch):
    scene = Scene(monkeypatch)
    assert scene.ask("dead") is None
    scene.now += BEAT
    assert scene.ask("a") is None and scene.ask("b") == "ab"


@pytest.mark.parametrize(
    "question",
    [
        [b"ask", b"a", b"1"],
        [b"ask", b"a", b"1", b"x" * 5000],
        [b"kill", b"a"],
        [b"beat"],
        [b"ask", b"\xff", b"", b""],
        [b"beat", b"x" * 1000],
    ],
)
def test_what_is_no_question_is_an_error(question):
    with pytest.raises(ValueError):
        Quorums(2, 60.0, BEAT).answer(question)


def test_the_memory_for_workers_that_only_send_heartbeats_is_bounded(monkeypatch):
    scene = Scene(monkeypatch)
    scene.beat(*map(str, range(quorums.MAX_WORKERS)))
    with pytest.raises(Refused, match="there are 1024 workers already"):
        scene.beat("one more")
    scene.now += BEAT
    scene.beat("one more")
    assert len(scene.quorums._beats) == 1


def test_a_claim_that_cannot_be_read_is_none_of_the_others_trouble(tmp_path):
    """One of three workers sends rubbish for its claim; the others hear of each other all the same."""
    credentials = keys_of(tmp_path, "a", "b", "c")
    place = Lighthouse(2, "127.0.0.1", credentials=credentials[0])
    assert place.address.startswith("https://127.0.0.1:")
    found = {}

    def worker(number):
        client = QuorumClient(place.address, credentials[number], 10)
        if number == 2:
            client._client.ask(b"ask", b"2", b"nonce", b"[" * 2000, seconds=5)
            return
        own = Claim(str(number), "10.0.0.1:1", number, Version(), "", "", "", -1, "n")
        found[number] = client.quorum(own, 20.0)

    for number in range(3):
        QuorumClient(place.address, credentials[number], 10).heartbeat(str(number), 5.0)
    threads = [threading.Thread(target=worker, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    place.close()
    for number in range(2):
        data = {id: data for id, _, data in found[number]}
        assert data["2"] is None and data["0"]["number"] == 0 and data["1"]["number"] == 1


@pytest.mark.parametrize(
    "answer", [[QUORUM, b"[" * 100_000], [QUORUM], [QUORUM, b"{}", b"{}"]], ids=["deep", "none", "two"]
)
def test_a_lighthouse_that_lies_has_not_answered(answer):
    listener = Listener("127.0.0.1", 0, None, lambda question: answer)
    client = QuorumClient(f"http://127.0.0.1:{listener.port}", None, 10)
    with pytest.raises(ConnectionError, match="the Lighthouse gave an answer that is none"):
        client.quorum(Claim("a", "10.0.0.1:1", 0, Version(), "", "", "", -1, "n"), 20.0)
    listener.close()


def test_credentials_belong_to_both_or_to_none(tmp_path):
    (ours,) = keys_of(tmp_path, "a")
    with pytest.raises(ValueError, match="the Lighthouse at http://host:1 knows no credentials"):
        QuorumClient("http://host:1", ours, 1.0)
    with pytest.raises(ValueError, match="the Lighthouse at https://host:1 needs credentials; see thinwire keys"):
        QuorumClient("https://host:1", None, 1.0)


def test_a_lighthouse_that_has_credentials_under_an_address_without_is_told_at_once(tmp_path):
    """The worker waited for a quorum in vain, or 30 seconds for the Lighthouse."""
    (ours,) = keys_of(tmp_path, "a")
    secure, plain = Lighthouse(2, "127.0.0.1", credentials=ours), Lighthouse(2, "127.0.0.1")
    with pytest.raises(ValueError, match=r"the Lighthouse at http://127\.0\.0\.1:\d+ needs credentials"):
        QuorumClient(secure.address.replace("https", "http"), None, 30.0)
    with pytest.raises(Refused, match=r"127\.0\.0\.1:\d+ does not speak TLS, so it knows no credentials"):
        QuorumClient(plain.address.replace("http", "https"), ours, 30.0)
    QuorumClient(plain.address, None, 30.0)
    plain.close()
    secure.close()
