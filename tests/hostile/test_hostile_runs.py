"""Elastic runs under attack: they go on, and end with the bits of a run that nobody has disturbed."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from helpers.elastic import serve, undisturbed, worker
from helpers.keys import keys_of
from helpers.listeners import Attacker, answers, listening, resident_bytes
from helpers.program import Program, wait_until

from thinwire.comm.elastic.quorums import QuorumClient
from thinwire.comm.tls import keys

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads Linux's list of sockets")
SIZE, ROUNDS, AVERAGER = 3, 30, "Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback())"


class Run:
    """A Lighthouse and workers in processes of their own, with credentials or without. The last worker comes when told to."""

    def __init__(self, folder, credentials, rounds=ROUNDS, min_workers=SIZE):
        self._folder, self._rounds, self._min_workers = folder, rounds, min_workers
        self._keys = [None] * SIZE if credentials is None else [one.folder for one in credentials]
        self.place = Program(serve, 0, min_workers, self._keys[0], folder=folder)
        self.place.wait_until(lambda: self.place.stdout.endswith("\n"), "a Lighthouse")
        self.port = int(self.place.stdout)
        self.address = f"{'http' if credentials is None else 'https'}://127.0.0.1:{self.port}"
        self.workers: list[Program] = []

    def start(self, *numbers, **options):
        for number in numbers:
            others = (SIZE, self._rounds, None, "round", self._min_workers, self._keys[number])
            environment = {"MASTER_ADDR": "127.0.0.1"}
            self.workers.append(
                Program(
                    partial(worker, **options),
                    self.address,
                    number,
                    AVERAGER,
                    *others,
                    folder=self._folder,
                    **environment,
                )
            )

    @property
    def pids(self):
        return [self.place.pid, *(one.pid for one in self.workers)]

    def models(self):
        """The digest of each worker's model, once all have ended."""
        codes = [one.wait(400) for one in self.workers]
        assert codes == [0] * SIZE, [one.stderr for one in self.workers]
        return [json.loads(one.stdout.splitlines()[-1])["model"] for one in self.workers]

    def end(self):
        for program in (self.place, *self.workers):
            program.kill()


@pytest.fixture
def runs(tmp_path):
    """Makes runs, and ends them after the test."""
    made = []

    def make(credentials, **options):
        made.append(Run(tmp_path, credentials, **options))
        return made[-1]

    yield make
    for run in made:
        run.end()


def test_no_listener_of_a_run_with_credentials_answers_others(runs, tmp_path):
    """Every socket on which its processes listen, from start to end, is found and attacked."""
    credentials = keys_of(tmp_path / "ours", "a", "b", "c")
    of_another_run = keys_of(tmp_path / "theirs", "a")[0]
    run = runs(credentials)
    attacker, go_on = Attacker(of_another_run), tmp_path / "go-on"
    options = {"goes_on": str(go_on), "timeout_seconds": 400}
    run.start(0, 1, **options)
    wait_until(lambda: all(listening(one.pid) for one in run.workers), "two workers that wait for a third")
    before = resident_bytes([run.place.pid])
    attacker.attack(run.pids)
    assert len(attacker.ports) >= 3  # the Lighthouse, two stores
    run.start(2, **options)
    wait_until(lambda: all(one.stdout.split() == ["3"] for one in run.workers), "a round of all")
    attacker.attack(run.pids)
    assert len(attacker.ports) >= 1 + 2 * SIZE  # the Lighthouse, each worker's store, and its connections of the round
    go_on.touch()
    while any(one.returncode is None for one in run.workers):
        attacker.attack(run.pids)
        time.sleep(0.05)  # the cores are the workers'
    assert set(run.models()) == {undisturbed(AVERAGER, SIZE, ROUNDS)}
    assert resident_bytes([run.place.pid]) - before < 60_000_000
    attacker.check()


def test_no_listener_answers_others_while_a_worker_is_healed(runs, tmp_path):
    """Two workers train, a third one gets their state, and all end with the same bits."""
    attacker = Attacker(keys_of(tmp_path / "theirs", "a")[0])
    run = runs(keys_of(tmp_path / "ours", "a", "b", "c"), min_workers=2)
    run.start(0, 1)
    wait_until(lambda: all(one.stdout.split()[-1:] == ["2"] for one in run.workers), "rounds of two")
    run.start(2)
    while any(one.returncode is None for one in run.workers):
        attacker.attack(run.pids)
        time.sleep(0.05)  # the cores are the workers'
    assert len(set(run.models())) == 1
    assert json.loads(run.workers[2].stdout.splitlines()[-1])["healings"] >= 1
    attacker.check()


def test_a_worker_whose_certificate_is_revoked_leaves_and_the_others_go_on(runs, tmp_path):
    credentials = keys_of(tmp_path / "ours", "a", "b", "c")
    run = runs(credentials, rounds=10**6, min_workers=2)
    run.start(0, 1, 2)
    wait_until(lambda: all(one.stdout.split()[-1:] == ["3"] for one in run.workers), "rounds of all")
    keys.Issuer(tmp_path / "ours" / "a").revoke("c")
    third = run.workers[2]
    assert third.wait(400) == 1
    assert "refuses this worker: its certificate was revoked" in third.stderr
    wait_until(lambda: all(one.stdout.split()[-1] == "2" for one in run.workers[:2]), "rounds of two")
    assert [one.returncode for one in run.workers[:2]] == [None, None]


def test_without_credentials_what_can_be_refused_is(runs):
    """Rubbish for a claim, and a count of 2^63: the Lighthouse hears both, and lives on after a question that is none."""
    run = runs(None)
    run.start(0, 1)
    wait_until(lambda: all(listening(one.pid) for one in run.workers), "two workers that wait for a third")
    ended = threading.Event()

    def lie(number):
        client = QuorumClient(f"http://127.0.0.1:{run.port}", None, 10)._client
        claim = json.dumps(["127.0.0.1:1", {"version": [2**63, 0], "pickle": "\x80\x04."} if number else None])
        while not ended.is_set():
            with contextlib.suppress(OSError):
                client.ask(b"ask", f"liar {number}".encode(), secrets.token_bytes(16), claim.encode(), seconds=3)

    liars = [threading.Thread(target=lie, args=(number,), daemon=True) for number in range(2)]
    for liar in liars:
        liar.start()
    run.start(2)
    wait_until(lambda: run.workers[2].stdout or run.workers[2].returncode is not None, "a round")
    for path in (f"/replica/worker_{number:06d}/kill" for number in range(3)):
        answers(run.port, f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n".encode())
    assert set(run.models()) == {undisturbed(AVERAGER, SIZE, ROUNDS)}
    ended.set()
    for liar in liars:
        liar.join(20)
