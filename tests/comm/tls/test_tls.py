"""Listeners over TLS, and the store on one, against callers that do not belong to the run, lie, or change what is sent."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import ssl
import struct
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.keys import keys_of
from helpers.program import wait_until
from helpers.threads import failing_once

from thinwire.comm import CommunicationError, sockets
from thinwire.comm.elastic import meeting
from thinwire.comm.elastic.groups import Groups
from thinwire.comm.elastic.meeting import met
from thinwire.comm.store import connected_store, gathering, listening_store
from thinwire.comm.tls import connections
from thinwire.comm.tls import store as tls_store
from thinwire.comm.tls.connections import ACCEPTED, Client, Listener, Refused, connect_tls, read_frame, send_frame
from thinwire.comm.tls.store import MAX_TABLE_BYTES

SOON = timedelta(seconds=20)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return keys_of(tmp_path_factory.mktemp("keys"), "first", "second")


@pytest.fixture(scope="module")
def of_another_run(tmp_path_factory):
    return keys_of(tmp_path_factory.mktemp("other"), "first", "second")[1]


@pytest.fixture
def listener(credentials):
    made = Listener("127.0.0.1", 0, credentials[0], lambda question: [b"to", *question])
    yield made
    made.close()


def said_to(port, words=b"", seconds=60.0):
    """What a plain socket gets to read after it has sent these words, and no more."""
    with socket.create_connection(("127.0.0.1", port), seconds) as connection:
        connection.sendall(words)
        got = b""
        with contextlib.suppress(ConnectionError):
            with contextlib.suppress(OSError):  # it has hung up
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(4096):
                got += part
        return got


def test_others_get_no_more_than_a_handshake(listener, of_another_run, caplog):
    """Plain HTTP, random bytes, TLS without a certificate, with one of another run, and an older TLS."""
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "thinwire"):
        for words in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x40\x00",
            bytes(5000),
            b"POST /replica/ID/kill HTTP/1.1\r\n\r\n",
        ):
            answer = said_to(listener.port, words)
            assert len(answer) <= 7 and answer[:1] in (b"", b"\x15"), answer  # an alert of TLS, if anything
        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(Refused, match="refuses this worker: certificate required"):
            connect_tls("127.0.0.1", listener.port, nobody, 60)
        theirs = of_another_run.context(server=False)
        with pytest.raises(Refused, match="is refused: its certificate is of another run"):
            connect_tls("127.0.0.1", listener.port, theirs, 60)
        theirs.verify_mode = ssl.CERT_NONE
        with pytest.raises(Refused, match="refuses this worker: its certificate is of another run"):
            connect_tls("127.0.0.1", listener.port, theirs, 60)
        nobody.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(Refused, match="protocol version"):
            connect_tls("127.0.0.1", listener.port, nobody, 60)
        wait_until(lambda: "closed a connection from 127.0.0.1:" in caplog.text, "a line")
        num_lines = len(caplog.messages)
    assert num_lines <= 1 + (time.monotonic() - began)  # one a second


def test_a_worker_of_another_run_is_no_listener_for_us(credentials, of_another_run, caplog):
    theirs = Listener("127.0.0.1", 0, of_another_run, list)
    with pytest.raises(Refused, match="is refused: its certificate is of another run"):
        connect_tls("127.0.0.1", theirs.port, credentials[1].context(server=False), 60)
    said = "it refuses this worker: its certificate is of another run"
    wait_until(lambda: said in caplog.text, "the listener says who has refused it")
    with pytest.raises(
        dist.DistNetworkError, match="the store at .* does not answer: .* its certificate is of another run"
    ):
        connected_store("127.0.0.1", theirs.port, SOON, credentials[1])
    theirs.close()


@pytest.mark.parametrize("slow_seconds", [0.0, 30.0])
@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="the system does not let programs choose")
def test_both_ends_of_a_line_with_a_long_round_trip_choose_their_congestion_control(
    listener, credentials, slow_seconds, monkeypatch
):
    def chosen(end):
        return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    monkeypatch.setattr(sockets, "STEADY", b"reno")  # which every kernel has
    monkeypatch.setattr(sockets, "SLOW_SECONDS", slow_seconds)
    with (
        socket.socket() as other,
        connect_tls("127.0.0.1", listener.port, credentials[1].context(server=False), 5) as own,
    ):
        (heard,) = listener._open
        expected = b"reno" if slow_seconds == 0 else chosen(other)
        assert (chosen(own), chosen(heard)) == (expected, expected)
        assert chosen(other) != b"reno"


def test_an_answer_that_comes_byte_by_byte_must_be_whole_in_time():
    """The limit held for each part that came, so such a listener kept its caller waiting for as long as it liked."""
    is_over = threading.Event()
    at_last = threading.Timer(30, is_over.set)

    def drip():
        caller, _ = door.accept()
        with caller, contextlib.suppress(OSError):
            caller.sendall(ACCEPTED + struct.pack("!I", 1000))
            while not is_over.wait(0.1):
                caller.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as door:
        dripping = threading.Thread(target=drip)
        dripping.start()
        at_last.start()
        client, began = Client("127.0.0.1", door.getsockname()[1], None), time.monotonic()
        with pytest.raises(TimeoutError):
            client.ask(b"what", seconds=1.0)
        took = time.monotonic() - began
        at_last.cancel()
        is_over.set()
        dripping.join()
    assert 0.9 < took < 20


def test_a_flood_of_connections_takes_little_memory_and_keeps_nobody_out(listener, credentials):
    """Silent ones, from the same address even; the oldest have to go."""
    silent = []
    before = threading.active_count()
    for _ in range(4 * connections.MAX_HANDSHAKES):
        silent.append(socket.create_connection(("127.0.0.1", listener.port), 20))
    assert silent[3 * connections.MAX_HANDSHAKES - 1].recv(1) == b""
    most = before + connections.MAX_HANDSHAKES + 2
    wait_until(lambda: threading.active_count() <= most, "the oldest are sent away")
    connection = connect_tls("127.0.0.1", listener.port, credentials[1].context(server=False), 20)
    send_frame(connection, b"hello")
    assert read_frame(connection) == [b"to", b"hello"]
    for one in silent:
        one.close()
    wait_until(lambda: not listener._greeting, "all are gone")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_callers_that_ask_nothing_leave_descriptors_to_others(monkeypatch, caplog):
    """Without credentials everybody is accepted. Hundreds of silent callers took a worker's descriptors: it left its run."""
    monkeypatch.setattr(connections, "_idle", {})
    monkeypatch.setattr(connections, "max_descriptors", lambda: 40)
    one, other = (Listener("127.0.0.1", 0, None, lambda question: [b"to", *question]) for _ in range(2))
    client = Client("127.0.0.1", one.port, None)
    client.connect(20)
    (before,) = client._idle

    def has_ended(caller):
        with contextlib.suppress(BlockingIOError):
            return caller.recv(2) == b""
        return False

    with caplog.at_level(logging.WARNING, "thinwire"), contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20, ("127.0.0.2", 0)))
            for port in [one.port, other.port] * 7
        ]
        for caller in silent:
            caller.setblocking(False)
        wait_until(lambda: sum(map(has_ended, silent)) == 5, "10 of 15 are left")
        assert client.ask(b"hello", seconds=20) == [b"to", b"hello"] and client._idle == [before]
    assert "from 127.0.0.2" in caplog.text and "from 127.0.0.1" not in caplog.text
    one.close()
    other.close()


def test_each_caller_too_many_sends_another_one_away(listener, monkeypatch):
    """Also while the threads of those that were sent away have not ended yet."""
    monkeypatch.setattr(listener, "_talk", lambda raw, address: None)
    callers = [
        socket.create_connection(("127.0.0.1", listener.port), 10) for _ in range(connections.MAX_HANDSHAKES + 5)
    ]
    assert [caller.recv(1) for caller in callers[:5]] == [b""] * 5
    callers[5].setblocking(False)
    with pytest.raises(BlockingIOError):
        callers[5].recv(1)
    for caller in callers:
        caller.close()


def test_a_listener_that_can_start_no_thread_for_a_moment_goes_on_to_listen(listener, credentials, monkeypatch, caplog):
    start = failing_once(monkeypatch, "thinwire-tls")
    with (
        caplog.at_level(logging.WARNING, "thinwire"),
        socket.create_connection(("127.0.0.1", listener.port), 10) as one,
    ):
        assert one.recv(1) == b""
        wait_until(lambda: "closed a connection from 127.0.0.1:" in caplog.text, "the line about the caller")
    assert not start
    connect_tls("127.0.0.1", listener.port, credentials[1].context(server=False), 60).close()


class Between:
    """A line between a client and a listener that changes what goes over it.

    Args:
        port: of the listener.
        changed: is given each chunk that the client sends, and its number; returns what goes on; after less, the
            line is cut.
    """

    def __init__(self, port, changed):
        self.sent = b""
        self._port, self._changed = port, changed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        client = self._listener.accept()[0]
        server = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(target=self._carry_back, args=(server, client), daemon=True).start()
        number = 0
        with contextlib.suppress(OSError):
            while chunk := client.recv(1 << 16):
                self.sent += chunk
                goes_on = self._changed(chunk, number)
                server.sendall(goes_on)
                if len(goes_on) < len(chunk):
                    break
                number += 1
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _carry_back(self, server, client):
        with contextlib.suppress(OSError):
            while chunk := server.recv(1 << 16):
                client.sendall(chunk)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def altered(chunk, number):
    return chunk[:-1] + bytes([chunk[-1] ^ 1]) if number >= 2 else chunk


def twice(chunk, number):
    return chunk + chunk if number >= 2 else chunk


def cut(chunk, number):
    return chunk[: len(chunk) // 2] if number == 2 else chunk


@pytest.mark.parametrize("change", [altered, twice, cut], ids=["altered", "replayed", "truncated"])
def test_records_that_were_changed_on_the_way_never_arrive(change, credentials):
    heard = []
    listener = Listener("127.0.0.1", 0, credentials[0], lambda question: heard.append(question) or [b"done"])
    line = Between(listener.port, change)
    connection = connect_tls("127.0.0.1", line.port, credentials[1].context(server=False), 60)
    with pytest.raises(OSError):
        for number in range(3):
            send_frame(connection, b"word", str(number).encode())
            read_frame(connection)
    # A record that came twice is refused the second time; one that was altered or cut, the first.
    assert heard == ([[b"word", b"0"]] if change is twice else [])
    listener.close()


def test_a_recorded_conversation_is_of_no_use_to_others(credentials):
    heard = []
    listener = Listener("127.0.0.1", 0, credentials[0], lambda question: heard.append(question) or [b"done"])
    line = Between(listener.port, lambda chunk, number: chunk)
    with connect_tls("127.0.0.1", line.port, credentials[1].context(server=False), 60) as connection:
        send_frame(connection, b"once")
        assert read_frame(connection) == [b"done"]
    answer = said_to(listener.port, line.sent)
    assert ACCEPTED not in answer or len(answer) > 100  # a handshake with new keys, which the recording cannot finish
    assert heard == [[b"once"]]
    listener.close()


LIES = {
    "a frame of 2^32 bytes": b"\xff\xff\xff\xff",
    "a field of 2^32 bytes": struct.pack("!II", 8, 2**32 - 1) + b"four",
    "half a length": struct.pack("!I", 2) + b"ab",
    "a million fields": struct.pack("!I", 4 << 20) + bytes(4 << 20),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_lies_is_dropped_and_named_and_the_others_go_on(lie, credentials, caplog):
    store = listening_store("127.0.0.1", 0, SOON, credentials[0])
    connection = connect_tls("127.0.0.1", store.port, credentials[1].context(server=False), 60)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with caplog.at_level(logging.WARNING, "thinwire"), contextlib.suppress(ConnectionResetError):
        connection.sendall(LIES[lie])
        assert connection.recv(1) == b""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes
    wait_until(lambda: any("closed a connection from second at 127.0.0.1:" in m for m in caplog.messages), "its name")
    theirs = connected_store("127.0.0.1", store.port, SOON, credentials[1])
    theirs.set("key", "value")
    assert store.get("key") == b"value"
    store.close()


@pytest.mark.parametrize(
    "question", [[], [b"?", b"x"], [b"add", b"word", b"one"], [b"delete"], [b"wait", b"soon"], [b"wait", b"9" * 400]]
)
def test_a_question_that_has_no_answer_ends_the_connection(question, credentials):
    store = listening_store("127.0.0.1", 0, SOON, credentials[0])
    store.set("word", "no number")
    connection = connect_tls("127.0.0.1", store.port, credentials[1].context(server=False), 60)
    send_frame(connection, *question)
    with pytest.raises(OSError):
        read_frame(connection)
    assert store.get("word") == b"no number"
    store.close()


def test_a_store_holds_so_many_bytes(credentials, monkeypatch):
    monkeypatch.setattr("thinwire.comm.tls.store.MAX_TABLE_BYTES", 1000)
    store = listening_store("127.0.0.1", 0, SOON, credentials[0])
    theirs = connected_store("127.0.0.1", store.port, SOON, credentials[1])
    theirs.set("a", "x" * 900)
    with pytest.raises(dist.DistStoreError, match="the store is full"):
        theirs.set("b", "x" * 200)
    theirs.set("a", "x" * 100)
    theirs.set("b", "x" * 200)
    assert theirs.delete_key("b") and not theirs.delete_key("b")
    theirs.set("c", "x" * 800)
    assert MAX_TABLE_BYTES == 1 << 26
    store.close()


def test_what_nobody_reads_takes_bounded_memory(credentials, caplog, monkeypatch):
    """Callers that ask for long answers, and do not read them; the next one is refused until they have gone."""
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 10 << 20)
    listener = Listener("127.0.0.1", 0, credentials[0], lambda question: [bytes(3 << 20)] * len(question))
    context = credentials[1].context(server=False)
    silent = []
    with caplog.at_level(logging.WARNING, "thinwire"):
        for _ in range(2):
            silent.append(connect_tls("127.0.0.1", listener.port, context, 10))
            silent[-1].settimeout(None)
            send_frame(silent[-1], b"long", b"and longer")  # its answer does not fit into what the system keeps
        refused = "second at 127.0.0.1"
        wait_until(lambda: any(refused in m and "until somebody reads them" in m for m in caplog.messages), "a refusal")
    assert listener._num_unread == 6 << 20
    for one in silent:
        one.close()
    wait_until(lambda: listener._num_unread == 0, "it has gone")
    with connect_tls("127.0.0.1", listener.port, context, 10) as reader:
        send_frame(reader, b"long")
        assert len(read_frame(reader)[0]) == 3 << 20
    listener.close()


def test_both_sides_count_all_bytes_that_go_over_the_socket():
    """Against the bytes that a socket between them carries; before the first question there is one that accepts the client."""
    asked, answered, carried = [], [], {}
    listener = Listener(
        "127.0.0.1", 0, None, lambda question: [bytes(300_000), *question], record=lambda *n: answered.append(n)
    )
    door = socket.create_server(("127.0.0.1", 0))

    def carry(source, target, name):
        while data := source.recv(1 << 16):
            carried[name] = carried.get(name, 0) + len(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    client = Client("127.0.0.1", door.getsockname()[1], None, record=lambda *n: asked.append(n))
    threading.Thread(target=lambda: client.connect(20.0), daemon=True).start()
    outer, inner = door.accept()[0], socket.create_connection(("127.0.0.1", listener.port))
    threads = [
        threading.Thread(target=carry, args=args, daemon=True)
        for args in ((outer, inner, "questions"), (inner, outer, "answers"))
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: client._idle, "a connection", 20)
    for question in ([b"one"], [], [b"", b"another", bytes(5000)]):
        assert client.ask(*question, seconds=20) == [bytes(300_000), *question]
    client.close()
    for thread in threads:
        thread.join(20)
    sent, received = (sum(numbers) for numbers in zip(*asked, strict=True))
    assert carried == {"questions": sent, "answers": received + len(ACCEPTED)}
    assert sorted(answered) == sorted((received, sent) for sent, received in asked)
    listener.close()


def test_an_answer_that_nobody_reads_is_not_counted_as_sent():
    counted = []
    listener = Listener(
        "127.0.0.1", 0, None, lambda question: [bytes(1 << 25)], record=lambda *n: counted.append(n)
    )  # more than the system keeps
    with connect_tls("127.0.0.1", listener.port, None, 10) as connection:
        send_frame(connection, b"long")
        wait_until(lambda: listener._num_unread, "the answer is under way", 10)
    wait_until(lambda: not listener._num_unread, "the caller has gone", 10)
    assert counted == [(0, 12)]
    listener.close()


def test_a_long_question_is_for_stores_only(credentials, listener):
    with connect_tls("127.0.0.1", listener.port, credentials[1].context(server=False), 60) as connection:
        with contextlib.suppress(OSError):
            send_frame(connection, bytes(connections.MAX_QUESTION_BYTES))
        with pytest.raises(OSError):
            read_frame(connection)


def test_the_store_does_what_pytorchs_does(credentials):
    """The same calls on both, directly and with a prefix, by the worker that listens and by another one."""
    ours = listening_store("127.0.0.1", 0, SOON, credentials[0])
    theirs = connected_store("127.0.0.1", ours.port, SOON, credentials[1])
    plain = listening_store("127.0.0.1", 0, SOON)
    for store in (plain, ours, theirs, dist.PrefixStore("before", theirs)):
        assert store.add("count", 2) == 2 and store.add("count", -5) == -3
        store.set("text", "words")
        store.set("none", "")
        assert store.get("text") == b"words" and store.get("none") == b"" and store.check(["text", "none"])
        assert store.multi_get(["none", "text"]) == [b"", b"words"] and store.multi_get([]) == []
        assert not store.check(["text", "other"])
        assert store.delete_key("text") and not store.check(["text"]) and store.delete_key("count")
        with pytest.raises(dist.DistStoreError):
            store.wait(["text"], timedelta(seconds=0.2))
        assert store.compare_set("set", "", "one") == b"one" and store.compare_set("set", "two", "three") == b"one"
        assert store.compare_set("set", "one", "two") == b"two" and store.compare_set("no", "one", "two") == b"one"
        assert store.delete_key("set") and store.num_keys() >= 1
    waits = threading.Thread(target=lambda: waited.append(theirs.get("late")))
    waited = []
    waits.start()
    time.sleep(0.1)
    theirs.set("early", "from the same client, while it waits")
    ours.set("late", "came")
    waits.join(10)
    assert waited == [b"came"] and ours.get("early")
    with pytest.raises(dist.DistStoreError, match="wait timeout after 0.1 seconds, keys: never"):
        theirs.wait(["never"], timedelta(seconds=0.1))
    ours.close()
    with pytest.raises(dist.DistNetworkError, match=r"the store at 127\.0\.0\.1:\d+ does not answer"):
        theirs.get("early")


def test_keys_that_are_there_take_one_question_however_many(credentials, monkeypatch):
    """Each took two round trips: one to wait for it, and one for its value."""
    ours = listening_store("127.0.0.1", 0, SOON, credentials[0])
    theirs = connected_store("127.0.0.1", ours.port, SOON, credentials[1])
    ours.set("at/one", "1")
    ours.set("at/two", "2")
    asked, ask = [], theirs._client.ask
    monkeypatch.setattr(
        theirs._client, "ask", lambda *question, **options: asked.append(1) or ask(*question, **options)
    )
    assert dist.PrefixStore("at", theirs).multi_get(["one", "two"]) == [b"1", b"2"]
    assert theirs.get("at/one") == b"1" and len(asked) == 2
    theirs.close()
    ours.close()


def test_a_key_that_comes_later_takes_one_question(credentials, monkeypatch):
    """It took three: its value, then to wait for it, then its value again."""
    ours = listening_store("127.0.0.1", 0, SOON, credentials[0])
    theirs = connected_store("127.0.0.1", ours.port, SOON, credentials[1])
    asked, ask = [], theirs._client.ask
    monkeypatch.setattr(
        theirs._client, "ask", lambda *question, **options: asked.append(1) or ask(*question, **options)
    )
    threading.Timer(0.2, ours.set, ("late", "came")).start()
    assert theirs.get("late") == b"came" and len(asked) == 1
    theirs.close()
    ours.close()


def test_a_meeting_asks_a_store_that_has_fallen_silent_no_further_question(credentials, monkeypatch):
    """It asked who was missing, and so waited twice for a store that did not answer."""
    ours = listening_store("127.0.0.1", 0, SOON, credentials[0])
    theirs = connected_store("127.0.0.1", ours.port, SOON, credentials[1])
    asked, ask = [], theirs._client.ask

    def silent_from_the_third_on(what, *rest, **options):
        asked.append(what)
        if len(asked) > 2:
            raise TimeoutError("timed out")
        return ask(what, *rest, **options)

    monkeypatch.setattr(theirs._client, "ask", silent_from_the_third_on)
    with pytest.raises(CommunicationError, match="rank 1: the store failed: .* does not answer: timed out"):
        gathering(dist.PrefixStore("round", theirs), 1, 2, 5.0)("here")
    assert asked == [b"add", b"compare", b"get"]
    theirs.close()
    ours.close()


def test_workers_that_meet_in_one_for_a_round_connect_with_it_once_and_leave_no_connection(credentials, monkeypatch):
    """Each round with other workers made two connections, one after the other, and left both; a store takes some thousands."""
    ours = listening_store("127.0.0.1", 0, SOON, credentials[0])
    place, before, made = f"127.0.0.1:{ours.port}", set(tls_store._open), []
    monkeypatch.setattr(meeting, "OwnStore", lambda *args: made.append(connected_store(*args)) or made[-1])
    rounds = Groups(SOON, credentials[1])
    with met(place, "round", 0, 1, SOON, credentials[1]) as store:
        rounds.connect(store, 0, 1, SOON)
    rounds.close()
    assert len(made) == 1 and tls_store._open == before
    ours.close()


def test_gloo_meets_in_it(credentials):
    store = listening_store("127.0.0.1", 0, SOON, credentials[0])
    found = []

    def worker(rank):
        own = store if rank == 0 else connected_store("127.0.0.1", store.port, SOON, credentials[1])
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", own), rank, 2, SOON)
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        found.append(tensor.tolist())

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [[2.0, 2.0]] * 2
    store.close()
