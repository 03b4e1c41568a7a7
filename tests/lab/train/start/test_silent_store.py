"""The process that holds the store is stopped: PyTorch's client would wait for its answer without a limit."""

import os
import signal
from datetime import timedelta

import pytest
from helpers.program import programs, wait_until

from thinwire.comm import CommunicationError, store
from thinwire.comm.store import connected_store, gathering, listening_store
from thinwire.lab.train.start import connect
from thinwire.lab.train.start.environment import Environment

SOON = timedelta(seconds=60)


def hold() -> None:
    """Hold a store, and print its port."""
    held = listening_store("127.0.0.1", 0, SOON)
    print(held.port, flush=True)
    signal.pause()


@pytest.fixture
def holder(tmp_path):
    with programs(hold, [()], tmp_path) as (program,):
        wait_until(lambda: program.stdout.endswith("\n"), "the store")
        yield program


@pytest.mark.parametrize("step", ["connect", "join", "greet", "gather"])
def test_a_store_whose_process_is_stopped_is_waited_for_within_a_limit(step, holder, monkeypatch):
    monkeypatch.setattr(store, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(connect, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(connect, "SECONDS", 0.0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = int(holder.stdout)
    place = Environment("srun", 1, 2, 0, 1, "127.0.0.1", port)
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    ours = None if step in ("connect", "join") else connected_store("127.0.0.1", port, SOON)
    os.kill(holder.pid, signal.SIGSTOP)
    with pytest.raises(
        CommunicationError, match=r"the store has not answered for 0\.[345] seconds: this worker is cut off"
    ):
        {
            "connect": lambda: connected_store("127.0.0.1", port, timedelta(seconds=0.1)),
            "join": lambda: connect.meeting_store(place, seconds=0.2),
            "greet": lambda: connect.fresh(ours, 1, 2),
            "gather": lambda: gathering(ours, 1, 2, 0.1)("here"),
        }[step]()
