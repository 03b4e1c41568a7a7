"""How a run finds its keys and the place where it meets, and what it says without keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.keys import keys_of

from thinwire.comm import Lighthouse
from thinwire.comm.tls import keys
from thinwire.lab.train.config import RunConfig
from thinwire.lab.train.shared_errors import SharedError
from thinwire.lab.train.start import connect, launch, spawn
from thinwire.lab.train.start.connect import meeting_store, warn_if_open
from thinwire.lab.train.start.environment import Environment
from thinwire.lab.train.start.lighthouse import communicator, lighthouse_of

CONFIG = RunConfig("digits")


@pytest.mark.parametrize(
    ("host", "is_said"), [("192.0.2.7", True), ("2001:db8::1", True), ("127.0.0.1", False), ("::1", False)]
)
def test_a_run_without_keys_that_leaves_the_loopback_says_so_in_one_line(host, is_said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(connect, "own_address", lambda: (None, host))
    warn_if_open(None, is_first=True)
    said = capsys.readouterr().err
    assert said.count("\n") == is_said and ("are not encrypted" in said) == is_said
    warn_if_open(None, is_first=False)
    warn_if_open(keys_of(tmp_path, "a")[0], is_first=True)
    assert capsys.readouterr().err == ""


def test_keys_come_from_the_environment_and_say_where_an_elastic_run_meets(tmp_path, monkeypatch):
    (ours,) = keys_of(tmp_path, "a")
    assert launch._with_credentials(CONFIG).credentials is None
    monkeypatch.setenv("THINWIRE_CREDENTIALS", ours.folder)
    assert launch._with_credentials(CONFIG).credentials == Path(ours.folder)
    assert launch._with_credentials(CONFIG).lighthouse is None
    Path(ours.folder, "address").write_text("a.example.org:29500\n")
    first, second = (replace(CONFIG, elastic=True, first_worker=number) for number in (0, 1))
    assert launch._with_credentials(first).lighthouse is None  # it starts the Lighthouse
    assert launch._with_credentials(second).lighthouse == "https://a.example.org:29500"
    named = replace(second, lighthouse="https://other:1")
    assert launch._with_credentials(named).lighthouse == "https://other:1"
    with pytest.raises(
        ValueError, match="lighthouse must be an address such as http://node1:29510 without credentials"
    ):
        with lighthouse_of(replace(named, credentials=None), "127.0.0.1"):
            pass
    with pytest.raises(
        ValueError, match="lighthouse must be an address such as https://node1:29510, got 'http://other:1'"
    ):
        with lighthouse_of(replace(second, lighthouse="http://other:1", credentials=Path(ours.folder)), "127.0.0.1"):
            pass


def test_a_worker_without_the_keys_of_the_lighthouse_is_a_mistake_in_the_command(tmp_path, monkeypatch):
    """One that all workers of the command raise, so that one line tells it, without a traceback."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ((ours,), (other,)) = (keys_of(tmp_path / run, "a") for run in ("ours", "theirs"))
    place = Lighthouse(2, "127.0.0.1", credentials=ours)
    config = replace(CONFIG, elastic=True)
    with pytest.raises(SharedError, match="the Lighthouse at http://.* needs credentials"):
        communicator(config, place.address.replace("https", "http"), 1)
    with pytest.raises(SharedError, match="no connection with the Lighthouse .*: its certificate is of another run"):
        communicator(replace(config, credentials=Path(other.folder)), place.address, 1)
    place.close()


def test_torchruns_own_store_is_refused_with_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    environment = Environment("torchrun", 0, 2, 0, 1, "127.0.0.1", 29500)
    # One that all workers raise, so that rank 0 tells it for all.
    with pytest.raises(SharedError, match="torchrun's own store answers everybody; with credentials, start each"):
        meeting_store(environment, keys_of(tmp_path, "a")[0])


def test_a_port_that_is_taken_is_one_line(tmp_path):
    (ours,) = keys_of(tmp_path, "a")
    taken = connect.loopback_store(0, ours)
    environment = Environment("srun", 0, 2, 0, 1, "127.0.0.1", taken.port)
    with pytest.raises(
        ValueError, match=f"cannot listen at 127.0.0.1:{taken.port}: .*; choose others with MASTER_ADDR"
    ):
        meeting_store(environment, ours)
    Path(ours.folder, "address").write_text(f"127.0.0.1:{taken.port}\n")
    with pytest.raises(ValueError, match=f"the Lighthouse cannot listen at 127.0.0.1:{taken.port}: "):
        with lighthouse_of(replace(CONFIG, elastic=True, credentials=Path(ours.folder)), *ours.address):
            pass
    taken.close()


def test_a_worker_whose_certificate_has_expired_is_not_started_again(tmp_path, monkeypatch):
    """One line says so; the worker itself could not tell, because the store of its launcher needs the certificate too."""
    (ours,) = keys_of(tmp_path, "a")
    process = SimpleNamespace(start=lambda: None, pid=None)
    monkeypatch.setattr(spawn, "worker_context", lambda names: SimpleNamespace(Process=lambda target, args: process))

    def expire_and_restart(workers, folder, requests, store, limit_seconds, restart, first_worker):
        key, request = keys.new_request("late")
        Path(ours.folder, "certificate.pem").write_bytes(keys.Issuer(ours.folder).sign(request, days=-1e-3))
        Path(ours.folder, "key.pem").write_bytes(key)
        restart(0)

    monkeypatch.setattr(spawn, "Watch", expire_and_restart)
    config = replace(CONFIG, elastic=True, workers=1, credentials=Path(ours.folder))
    with pytest.raises(ValueError, match="its certificate has expired; renew it"):
        spawn.spawn(config, tmp_path)
