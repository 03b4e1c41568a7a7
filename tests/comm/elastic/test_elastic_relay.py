"""Elastic runs whose workers cannot be dialled: others reach them through a relay."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.elastic import serve, worker
from helpers.keys import keys_of
from helpers.ports import free_port
from helpers.program import Program

from thinwire.comm import CommunicationError, ElasticCommunicator, notice
from thinwire.comm.elastic import forming
from thinwire.comm.elastic.claims import Claim
from thinwire.comm.elastic.forming import Forming
from thinwire.comm.members import LeftOut, Version
from thinwire.comm.tcp import is_available
from thinwire.comm.tls.connections import Client, Listener, Refused
from thinwire.comm.tls.relay import Relay, host_at, own_address_at

AVERAGER = "Mean(QSGD(bits=4), ErrorFeedback())"


@pytest.fixture
def server():
    with Relay("127.0.0.1") as server:
        yield server


def test_a_listener_at_a_relay_answers_several_callers_at_once(server, tmp_path):
    ours, theirs = keys_of(tmp_path, "ours", "theirs")
    host = host_at(server.address)
    listener = Listener(host, 0, ours, lambda question: [b"heard", *question])
    clients = [Client(host, listener.port, theirs) for _ in range(5)]
    for client in clients:
        client.connect(20.0)
    assert [c.ask(b"%d" % n, seconds=20.0) for n, c in enumerate(clients)] == [[b"heard", b"%d" % n] for n in range(5)]
    (stranger,) = keys_of(tmp_path / "elsewhere", "stranger")
    with pytest.raises(Refused, match=r"^who waits at the relay 127\.0\.0\.1:\d+ is refused: "):
        Client(host, listener.port, stranger).connect(20.0)
    listener.close()
    with pytest.raises(OSError):
        clients[0].ask(b"more", seconds=1.0)


@pytest.mark.skipif(not is_available(), reason="the extension was not built")
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's list of sockets")
@pytest.mark.parametrize("first_listens", [True, False])
def test_workers_that_nobody_can_dial_train_and_one_dies_and_is_healed(server, tmp_path, first_listens):
    """The first worker's store is where a round meets, so both cases count."""
    folders = [str(one.folder) for one in keys_of(tmp_path / "keys", "a", "b", "c")]
    place = Program(serve, 0, 2, folders[0], folder=tmp_path)
    programs = [place]

    def start(number):
        options = {"relay": f"127.0.0.1:{server.address[1]}", "listens": first_listens and number == 0}
        options["timeout_seconds"] = 10  # through a relay, nothing sooner tells that a worker is dead
        dies_among = 3 if len(programs) == 3 else None  # the third, at once: ten rounds later the others would end
        options["dies_after"] = 3
        arguments = (f"https://127.0.0.1:{int(place.stdout)}", number, AVERAGER, 3, 10, dies_among, "round", 2)
        program = Program(
            partial(worker, **options), *arguments, folders[number], folder=tmp_path, MASTER_ADDR="127.0.0.1"
        )
        programs.append(program)
        return program

    try:
        place.wait_until(lambda: place.stdout.endswith("\n"), "a Lighthouse")
        first, second, third = map(start, range(3))
        assert third.wait(400) == -signal.SIGKILL and "3\n" in third.stdout, third.stderr
        first.wait_until(lambda: first.stdout.endswith("2\n"), "two workers")
        again = start(2)
        ended = [first, second, again]
        assert [one.wait(400) for one in ended] == [0, 0, 0], [one.stderr for one in ended]
        saw = [json.loads(one.stdout.splitlines()[-1]) for one in ended]
    finally:
        for program in programs:
            program.kill()
    assert len({one["model"] for one in saw}) == 1
    assert saw[0]["sizes"][-3:] == [3, 2, 3] and saw[2]["healings"] == 1
    assert [one["listeners"] > 0 for one in saw] == [first_listens, False, False]


def test_what_cannot_be_is_refused(tmp_path):
    (credentials,) = keys_of(tmp_path, "a")
    with pytest.raises(ValueError, match="worker 3: one that takes no connections needs a relay"):
        ElasticCommunicator("https://127.0.0.1:1", 3, credentials=credentials, listens=False)
    with pytest.raises(ValueError, match="worker 3: a relay is for workers of one process with credentials"):
        ElasticCommunicator("http://127.0.0.1:1", 3, relay="127.0.0.1:1")


def test_workers_wait_for_a_relay_that_starts_after_them(tmp_path, caplog, monkeypatch):
    """They ended at once."""
    monkeypatch.setattr(notice, "NOTICE_SECONDS", 0.1)
    caplog.set_level(logging.INFO, "thinwire")
    port = free_port()
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        late = pool.submit(lambda: time.sleep(0.5) or stack.enter_context(Relay("127.0.0.1", port)))
        assert own_address_at(("127.0.0.1", port), 30.0) == "127.0.0.1"
        late.result()
    (credentials,) = keys_of(tmp_path, "a")
    with pytest.raises(CommunicationError):
        ElasticCommunicator(
            "https://127.0.0.1:1", 3, quorum_seconds=1.0, credentials=credentials, relay=f"127.0.0.1:{port}"
        )
    assert f"worker 3 waits for the relay at 127.0.0.1:{port}" in caplog.text


@pytest.mark.parametrize("listens", [True, False])
def test_a_relay_that_does_not_run_is_named_at_the_start(tmp_path, listens):
    (credentials,) = keys_of(tmp_path, "a")
    with socket.socket() as bound:  # so that nobody else listens there
        bound.bind(("127.0.0.1", 0))
        relay = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(CommunicationError, match=f"worker 3: the relay at {relay}: Connection refused"):
            ElasticCommunicator(
                "https://127.0.0.1:1", 3, quorum_seconds=1.0, credentials=credentials, listens=listens, relay=relay
            )


def test_a_worker_that_is_left_out_of_a_run_with_a_relay_is_told_of_the_relay(server, monkeypatch):
    """It was told of a firewall, where the relay had ended."""
    relay = f"127.0.0.1:{server.address[1]}"
    own = Forming(3, "https://127.0.0.1:1", 2, 1.0, None, SimpleNamespace(rank=1, size=2), relay=relay)
    choice = SimpleNamespace(taken={}, differing={}, unreached={own._id: SimpleNamespace(number=1)})
    monkeypatch.setattr(own, "_asked", lambda claim, deadline: [])
    monkeypatch.setattr(forming, "choose", lambda claims: choice)
    with pytest.raises(
        LeftOut, match=f"3 tries; see whether the relay at {relay} runs, and both reach it, and whether "
    ):
        own._chosen(lambda: None, 0.0)


def test_a_worker_whose_own_claim_is_not_among_the_answers_takes_no_part(server, monkeypatch):
    relay = f"127.0.0.1:{server.address[1]}"
    own = Forming(3, "https://127.0.0.1:1", 2, 1.0, None, SimpleNamespace(rank=1, size=2), relay=relay)
    others = [Claim(f"id{n}", "127.0.0.1:1", n, Version(), "h", "s", "", -1, "n") for n in (2, 3)]
    monkeypatch.setattr(own, "_asked", lambda claim, deadline: others)
    with pytest.raises(
        ValueError, match="^worker 3 takes no part: the Lighthouse at https://127.0.0.1:1 answers without"
    ):
        own._chosen(lambda: None, 0.0)
