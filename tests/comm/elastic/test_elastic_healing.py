"""State travels from several workers, in chunks held to their hashes; a failure in it is the round's, not a process's."""

from __future__ import annotations

import io
import json
import pickle
import threading
import time
from collections import Counter
from functools import reduce
from types import SimpleNamespace

import pytest
import torch
from helpers.calls import num_calls
from helpers.program import wait_until

from thinwire.comm import CommunicationError, ElasticCommunicator, Lighthouse
from thinwire.comm.elastic import transfer
from thinwire.comm.elastic.claims import Claim
from thinwire.comm.elastic.healing import ROUNDS, TRIES, Healing
from thinwire.comm.elastic.history import History
from thinwire.comm.elastic.snapshot import CHUNK_BYTES, GONE, MAX_KEYS, Manifest, Snapshots
from thinwire.comm.elastic.state_bytes import MAX_DEPTH, packed, unpacked
from thinwire.comm.elastic.transfer import STREAMS, Transfer
from thinwire.comm.members import LeftOut, LostRounds, Members, Shared, Version
from thinwire.comm.tls import relay
from thinwire.comm.tls.connections import Listener, send_frame

CHUNKS = 12  # and one of the description, and a last one of padding


@pytest.fixture(autouse=True)
def closed_listeners(monkeypatch):
    made, begin = [], Listener.__init__

    def noted(listener, *arguments, **options):
        begin(listener, *arguments, **options)
        made.append(listener)

    monkeypatch.setattr(Listener, "__init__", noted)
    yield
    for listener in made:
        listener.close()


def after(rounds, place="one"):
    history = History()
    for _ in range(rounds):
        history.commit(place)
    return history


def state(seed=0):
    return {"x": torch.randn(CHUNKS * CHUNK_BYTES // 4, generator=torch.Generator().manual_seed(seed))}


class Worker:
    """One that serves its state over a listener of its own; `change` may alter what it answers to a question."""

    def __init__(self, number, served=None, change=lambda question, answer: answer, history=None, **parts):
        self.number, self.chunks, self.snapshots = number, 0, Snapshots()
        self.history = history or after(5)
        sections = {ROUNDS: packed({"committed": self.history.committed, "digests": self.history.digests})}
        self.sections = sections | {"x": packed(served or state())} | parts
        self.change = change
        self.listener = Listener("127.0.0.1", 0, None, self.answer)

    def answer(self, question):
        answer = self.change(question, self.snapshots.answer(question))
        self.chunks += question[0] == b"chunk" and question[2] == b"x" and answer[0] == b"ok"
        return answer

    def claim(self):
        values = (Version(self.history.committed), "h", "s", "", 0, str(self.number))
        return Claim(f"id{self.number}", "127.0.0.1:1", self.number, *values, state_ports=(self.listener.port,))


class Healed:
    """Worker 7, which these workers heal."""

    def __init__(self, *workers, load=None, is_common=True, own=None, seconds=30.0, is_late=False, **options):
        self.workers, self.loaded, self.seconds, self.tries = workers, [], seconds, 0
        self.healing = Healing(7, "127.0.0.1", None, **options)
        own = {"x": torch.zeros(3)} if own is None else own
        self.healing.shared["x"] = Shared(lambda: own, load or self.loaded.append, is_common, is_late)

    def heal(self, history=None, version=None):
        self.tries += 1
        key, sources = f"round {self.tries}", tuple(range(len(self.workers)))
        for worker in self.workers:
            worker.snapshots.offer(key, worker.sections)
        claims = tuple(worker.claim() for worker in self.workers)
        version = version or self.workers[0].history.version
        numbers = (*(worker.number for worker in self.workers), 7)
        members = Members(numbers, (None,) * len(numbers), version, 0, (len(self.workers),), sources)
        self.healing.begin(key, claims, members, history or History(), self.seconds)
        return self.healing.finish()[0]


def flipped(question, answer):
    return (
        answer
        if question[0] != b"chunk" or question[2] != b"x"
        else [answer[0], bytes([answer[1][0] ^ 1]) + answer[1][1:]]
    )


def test_chunks_come_from_several_workers_at_once_and_with_them_the_history():
    asked = [threading.Event(), threading.Event()]

    def after_the_other(own):
        def change(question, answer):
            if question[0] == b"chunk" and question[2] == b"x":
                asked[own].set()
                assert asked[1 - own].wait(60)
            return answer

        return change

    workers = [Worker(number, change=after_the_other(number)) for number in range(2)]
    healed = Healed(*workers)
    history = healed.heal()
    assert history.committed == 5 and history.digests == after(5).digests
    assert torch.equal(healed.loaded[0]["x"], state()["x"])
    assert min(worker.chunks for worker in workers) > 0 and sum(worker.chunks for worker in workers) == CHUNKS + 2


def test_a_source_counts_as_many_bytes_as_the_worker_that_it_heals():
    source, healed = Counter(), Counter()

    def counting(counts):
        return lambda sent, received: counts.update(sent=sent, received=received)

    source_healing = Healing(1, "127.0.0.1", None, record=counting(source))
    source_healing.shared["x"] = Shared(state, lambda loaded: None, is_common=True)
    source_healing.offer("round", after(5))
    own = Healing(7, "127.0.0.1", None, record=counting(healed))
    own.shared["x"] = Shared(lambda: {"x": torch.zeros(3)}, lambda loaded: None, is_common=True)
    claim = Worker(1).claim()._replace(state_ports=(source_healing.port,))
    own.begin("round", (claim,), Members((1, 7), (None,) * 2, after(5).version, 0, (1,), (0,)), History(), 30.0)
    own.finish()
    # The source counts an answer once it has been sent, and may do so after it was read.
    wait_until(lambda: healed["received"] == source["sent"], "equal numbers of bytes", 20)
    assert healed["received"] > CHUNKS * CHUNK_BYTES and healed["sent"] == source["received"] > 0


@pytest.mark.parametrize("lie", ["chunk", "manifest", "state"])
def test_a_source_that_lies_is_named_and_nothing_of_it_is_taken(lie, caplog):
    """It sends other bytes than it has announced; or announces another state, which is one of three."""
    served = state(1) if lie != "chunk" else state()
    liar = Worker(1, served, flipped if lie == "chunk" else lambda question, answer: answer)
    if lie == "manifest":
        truth = packed(state())
        liar.sections["x"] = torch.cat([truth, torch.zeros(CHUNK_BYTES, dtype=torch.uint8)])
    asked = threading.Event()

    def after_the_liar(question, answer):
        assert lie != "chunk" or question[0] != b"chunk" or question[2] != b"x" or asked.wait(60)
        return answer

    def noted(question, answer, change=liar.change):
        if question[0] == b"chunk" and question[2] == b"x":
            asked.set()
        return change(question, answer)

    liar.change = noted
    healed = Healed(Worker(0, change=after_the_liar), liar, Worker(2, change=after_the_liar))
    healed.heal()
    assert torch.equal(healed.loaded[0]["x"], state()["x"])
    line = "worker 1 sent a wrong chunk" if lie == "chunk" else "worker 1 announced another state than 2 others"
    assert line in caplog.text and "worker 0" not in caplog.text and "worker 2" not in caplog.text


@pytest.mark.parametrize(
    ("workers", "line"),
    [
        (((0, None), (1, state(1))), "no majority says which is right .worker 0: .*; worker 1: "),
        (((0, None, flipped),), "no source sends the chunks of 'x' that it has announced"),
    ],
)
def test_a_worker_whose_sources_are_not_to_be_believed_is_left_out_after_some_tries(workers, line):
    healed = Healed(*(Worker(*worker) for worker in workers))
    for error in [CommunicationError] * (TRIES - 1) + [LeftOut]:
        with pytest.raises(error, match=line):
            healed.heal()


@pytest.mark.parametrize(("seeds", "believed"), [((3, 4), 3), ((3, 4, 4), 4)])
def test_where_machines_compute_differently_the_most_or_else_the_first_are_believed(seeds, believed, caplog):
    workers = [Worker(number, state(seed)) for number, seed in enumerate(seeds)]
    healed = Healed(*workers, may_differ=True)
    healed.heal()
    assert torch.equal(healed.loaded[0]["x"], state(believed)["x"])
    assert not any(worker.chunks for worker, seed in zip(workers, seeds, strict=True) if seed != believed)
    assert not caplog.records


def test_what_differs_between_workers_comes_from_one_of_them():
    workers = [Worker(0, state(3)), Worker(1, state(4))]
    healed = Healed(*workers, is_common=False)
    healed.heal()
    assert torch.equal(healed.loaded[0]["x"], state(3)["x"]) and workers[1].chunks == 0


def test_credentials_that_cannot_be_read_for_a_moment_cost_no_chunk(monkeypatch):
    """The thread ended with the chunk, and the others waited for it without end."""
    ask, failed = Transfer._ask, []

    def unreadable(self, source, what, *rest, **limits):
        if what == b"chunk" and not failed:
            failed.append(rest)
            raise ValueError("the keys cannot be used")
        return ask(self, source, what, *rest, **limits)

    monkeypatch.setattr(Transfer, "_ask", unreadable)
    healed = Healed(Worker(0))
    healed.heal()
    assert failed and torch.equal(healed.loaded[0]["x"], state()["x"])


def test_a_transfer_goes_on_after_a_cut():
    """All connections of the source are cut after a few chunks; then its round ends, and the next one goes on from there."""

    def cut(question, answer):
        if question[0] == b"chunk" and worker.chunks == 3 and not done:
            done.append("cut")
            raise ValueError("cut")
        if question[0] == b"chunk" and worker.chunks == 7 and len(done) == 1:
            done.append("gone")
            worker.snapshots.drop()
        return [GONE] if len(done) == 2 and healed.tries == 1 else answer

    done = []
    worker = Worker(0, change=cut)
    healed = Healed(worker)
    with pytest.raises(CommunicationError, match="'x' is not whole: worker 0 has left the round"):
        healed.heal()
    came = worker.chunks
    assert 3 < came < CHUNKS + 2 and not healed.loaded
    healed.heal()
    assert worker.chunks == CHUNKS + 2 and torch.equal(healed.loaded[0]["x"], state()["x"])


def test_nobody_waits_for_a_source_that_has_died(monkeypatch):
    """It dies with chunks on their way, and the other one gives up the round; so does the worker that is healed."""
    died, refused = threading.Event(), list[int]()

    def dial(host, port, seconds, dial=relay.dial):
        try:
            return dial(host, port, seconds)
        except ConnectionRefusedError:
            refused.append(port)
            raise

    def dies(question, answer):
        if question[0] == b"chunk" and question[2] == b"x":
            dead.listener.close()
            died.set()
            raise ValueError("died")
        return answer

    def leaves(question, answer):
        if question[0] == b"chunk" and question[2] == b"x":
            assert died.wait(60)
            return [GONE]
        return answer

    monkeypatch.setattr(relay, "dial", dial)
    dead = Worker(0, change=dies)
    with pytest.raises(CommunicationError, match="'x' is not whole"):
        Healed(dead, Worker(1, change=leaves), seconds=60.0).heal()
    assert 0 < len(refused) <= STREAMS  # once for each connection


@pytest.mark.parametrize("what", [b"chunk", b"steps"])
def test_others_answer_for_a_source_that_falls_silent(monkeypatch, what):
    """As one whose line is cut: it is asked, and does not answer while the worker is healed."""
    monkeypatch.setattr(transfer, "SILENT_SECONDS", 0.3)
    is_healed, asked, in_time = threading.Event(), threading.Event(), []

    def concerns(question):
        return question[0] == what and (what == b"steps" or question[2] == b"x")

    def falls_silent(question, answer):
        if concerns(question):
            asked.set()
            in_time.append(is_healed.wait(100))
        return answer

    def after_the_other(question, answer):
        assert not concerns(question) or asked.wait(100)
        return answer

    healed = Healed(Worker(0, change=falls_silent), Worker(1, change=after_the_other), seconds=1000.0, is_late=True)
    healed.heal()
    is_healed.set()
    assert torch.equal(healed.loaded[0]["x"], state()["x"])
    assert asked.is_set() and all(in_time)


def test_a_chunk_on_a_slow_line_may_take_longer_than_a_source_may_be_silent():
    def slowly(connection, answer):
        frame = io.BytesIO()
        send_frame(SimpleNamespace(sendall=frame.write), *answer)
        body, num_parts = frame.getvalue(), 8 if len(frame.getvalue()) > CHUNK_BYTES else 1
        for part in range(num_parts):
            connection.sendall(body[part * len(body) // num_parts : (part + 1) * len(body) // num_parts])
            time.sleep(0.5 * (num_parts > 1))

    worker = Worker(0, {"x": torch.ones(CHUNK_BYTES // 4)})
    worker.listener._send = slowly
    healed = Healed(worker, seconds=3.0)
    healed.heal()
    assert torch.equal(healed.loaded[0]["x"], torch.ones(CHUNK_BYTES // 4))


def test_over_tries_that_fail_a_worker_holds_one_state_of_the_others():
    """The state of the others changes from try to try, and the first chunks of it never do."""

    def fail(state):
        raise CommunicationError("a worker died")

    worker = Worker(0)
    healed = Healed(worker, load=fail)
    for seed in range(1, 6):
        changed = state(seed)
        changed["x"][: CHUNK_BYTES // 4] = 0
        worker.sections["x"] = packed(changed)
        with pytest.raises(CommunicationError, match="a worker died"):
            healed.heal()
    held = healed.healing._held["x"].values()
    memory = {chunk.untyped_storage().data_ptr(): chunk.untyped_storage().nbytes() for chunk in held}
    assert sum(memory.values()) == len(worker.sections["x"])


def test_what_a_worker_has_already_does_not_travel():
    own, other = state(), state()
    other["x"][5 * CHUNK_BYTES // 4] += 1.0
    worker = Worker(0, other)
    healed = Healed(worker, own=own)
    healed.heal()
    assert worker.chunks == 1 and torch.equal(healed.loaded[0]["x"], other["x"])


def test_a_small_state_comes_in_one_question_to_each_source():
    """Each section took a round trip, and one more how far the others had come, which wait where nothing comes late."""
    asked = []

    def noted(question, answer):
        asked.append(question[0])
        return answer

    healed = Healed(Worker(0, {"x": torch.ones(3)}, noted), Worker(1, {"x": torch.ones(3)}, noted))
    assert healed.heal().digests == after(5).digests
    assert torch.equal(healed.loaded[0]["x"], torch.ones(3)) and asked == [b"manifests"] * 2


def test_a_small_chunk_that_nobody_has_announced_is_not_taken():
    def swapped(question, answer):
        return answer[:3] + [bytes(len(chunk)) for chunk in answer[3:]] if question[0] == b"manifests" else answer

    healed = Healed(Worker(0, {"x": torch.ones(3)}, swapped))
    healed.heal()
    assert torch.equal(healed.loaded[0]["x"], torch.ones(3))


def test_a_state_that_is_too_large_is_refused_before_memory_is_taken_and_its_worker_left_out_after_some_tries():
    large, short = (Manifest((1 << 27) + 16, 16, bytes(32 * number)) for number in (129, 8))
    announced = [short]

    def announce(question, answer):
        if question[0] != b"manifests":
            return answer
        told = dict(zip(question[2:], answer[1:], strict=False)) | {b"x": announced[0].data()}
        return [answer[0], *(told.get(name, b"") for name in question[2:])]

    worker = Worker(0, change=announce)
    healed = Healed(worker)
    with pytest.raises(CommunicationError, match="no source answers .worker 0: a manifest of 134217744 bytes has 256"):
        healed.heal()
    announced[0] = large
    for _ in range(TRIES - 1):
        with pytest.raises(CommunicationError, match=r"worker 0 announced a state of 1342\d+ bytes, expected at most"):
            healed.heal()
    with pytest.raises(LeftOut, match=f"worker 7 is left out of the run: it could not be healed in {TRIES} tries"):
        healed.heal()
    assert worker.chunks == 0


class Harm:
    """What unpickling would call."""

    def __reduce__(self):
        return (print, ("harm",))


def as_bytes(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    "parts",
    [
        {"x": as_bytes(len(b"garbage ").to_bytes(8, "little") + b"garbage " + bytes(16))},
        {"x": as_bytes((16).to_bytes(8, "little") + pickle.dumps(Harm()) + bytes(64))},
        {ROUNDS: packed({"committed": 4, "digests": ["x"]})},
        {ROUNDS: packed({"committed": 2**63, "digests": ["x"]})},
        {ROUNDS: packed({"committed": 5, "digests": [1]})},
        {ROUNDS: packed(None)},
    ],
)
def test_a_state_that_cannot_be_gives_up_the_round_and_is_not_unpickled(parts, capsys):
    healed = Healed(Worker(0, **parts))
    with pytest.raises(CommunicationError, match="worker 7 could not be healed"):
        healed.heal()
    assert not healed.loaded and capsys.readouterr().out == ""


def test_what_is_loaded_in_part_is_no_state_of_the_run():
    """It had its own rounds; the next try starts from none, and succeeds."""

    def fails(state):
        raise RuntimeError("no memory for 'x'")

    own, healed = after(3), Healed(Worker(0), load=fails)
    with pytest.raises(CommunicationError, match="worker 7 could not be healed: no memory for 'x'"):
        healed.heal(own)
    assert own.version == (0, 0)
    healed.healing.shared["x"] = Shared(dict, healed.loaded.append)
    assert healed.heal(own).committed == 5


def test_a_worker_that_cannot_save_its_state_heals_nobody_and_another_one_does():
    def fails():
        raise MemoryError("no memory")

    healing, other = Healing(0, "127.0.0.1", None), Worker(1)
    healing.shared["x"] = Shared(fails, lambda state: None)
    healing.offer("round 1", after(5))
    assert not healing.can_heal

    class Ill(Worker):
        def answer(self, question):
            return healing.snapshots.answer(question)

    healed = Healed(Ill(0), other)
    healed.heal()
    assert torch.equal(healed.loaded[0]["x"], state()["x"])


def test_committed_rounds_are_not_lost_without_an_error(caplog):
    """The one round whose vote was in doubt is given up with a warning; more is an error, and nothing is loaded."""
    theirs, own = after(2), after(2)
    for _ in range(5):
        theirs.commit("two")
    own.commit("three")
    healed = Healed(Worker(0, history=theirs))
    assert healed.heal(own).committed == 7
    assert "worker 7 gives up a round that the others have not committed" in caplog.text
    own = after(2)
    for _ in range(3):
        own.commit("three")
    with pytest.raises(LostRounds, match="worker 7 has committed 3 rounds since round 2 that the newest state"):
        healed.heal(own)
    assert len(healed.loaded) == 1 and own.committed == 5


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
    deep = reduce(lambda inner, _: [inner], range(MAX_DEPTH), 0)
    assert unpacked(packed(deep)) == deep
    for thing in (Harm(), {"x": {1, 2}}, print, torch.zeros(2).to_sparse(), deep):
        with pytest.raises(TypeError, match="a state has"):
            packed([thing])


def test_the_work_of_packing_grows_with_the_number_of_tensors_and_not_with_its_square():
    calls = [num_calls(lambda n=n: packed({str(i): torch.ones(3) for i in range(n)})) for n in (100, 200)]
    assert calls[1] < 2.2 * calls[0], calls


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
            ["list", *[["tensor", "float32", [16], 0]] * 2],  # the same bytes twice would take any amount of memory
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


def test_a_round_that_has_ended_is_known_however_many_rounds_without_a_joiner_follow():
    snapshots = Snapshots()
    snapshots.offer("round", {"x": packed(state())})
    assert snapshots.answer([b"steps", b"round"]) == [b"ok", b"0"]
    for _ in range(2 * MAX_KEYS):
        snapshots.drop()
    assert snapshots.answer([b"steps", b"round"]) == [GONE]


def test_a_short_question_has_no_endless_answer():
    """Each name was answered, however often it came: a question of 64 KB had an answer of gigabytes, all in memory."""
    snapshots = Snapshots()
    snapshots.offer("round", {"x": packed(state())})
    assert len(snapshots.answer([b"manifests", b"round", b"x"])) == 2
    with pytest.raises(ValueError, match="3 names, and some of them twice"):
        snapshots.answer([b"manifests", b"round", b"x", b"y", b"x"])
    for rest in ([b"y", b"0"], [b"x", b"%d" % Manifest.of(packed(state())).num_chunks], [b"x", b"-1"]):
        with pytest.raises(ValueError, match=f"no chunk {int(rest[1])} of '{rest[0].decode()}'"):
            snapshots.answer([b"chunk", b"round", *rest])
    with pytest.raises(ValueError, match="unknown question b'state'"):
        snapshots.answer([b"state", b"round"])


def test_a_worker_whose_sources_die_while_it_takes_over_their_state_begins_no_run_anew(monkeypatch):
    """It had committed rounds. Its own state is replaced in part, and nobody is left with a whole one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = Lighthouse(1, "127.0.0.1")
    with ElasticCommunicator(place.address, 0, min_workers=1) as comm:
        comm.load_state_dict({"rounds": 5})
        comm._history.forget()
        with pytest.raises(LostRounds, match="worker 0 had committed 5 rounds, .* go on from the last checkpoint"):
            comm.form_round()
    place.close()
