"""Workers that come, go and die within one run."""

from __future__ import annotations

import json
import signal

import pytest
from helpers.elastic import worker
from helpers.program import Program, wait_until

import thinwire as tw
from thinwire.comm import LocalWorld


def test_four_workers_become_two_and_then_six(tmp_path, monkeypatch):
    """Rank 0 is killed in a round, another while the rest regroup; these go on, and four join: all end with the same bits."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    lighthouse = tw.comm.Lighthouse(2, "127.0.0.1")
    averager = "Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback(), exchange='scatter_reduce')"

    def start(number, *dies):
        return Program(worker, lighthouse.address, number, averager, 6, 20, *dies, folder=tmp_path)

    survivors = [start(2), start(3)]  # before the others, whose state would heal them if they came late
    wait_until(lambda: survivors[0].stdout.split() == ["2"], "a round of the first two")
    victims = [start(0, 4, "round"), start(1, 3, "regroup")]
    assert [victim.wait(60) for victim in victims] == [-signal.SIGKILL] * 2
    wait_until(lambda: survivors[0].stdout.split()[-1:] == ["2"], "a round of the two that are left")
    joined = [start(number) for number in (0, 1, 4, 5)]  # the dead come back, and two others with them
    assert [program.wait(90) for program in (*survivors, *joined)] == [0] * 6, [p.stderr for p in (*survivors, *joined)]
    facts = [json.loads(program.stdout.splitlines()[-1]) for program in (*survivors, *joined)]
    assert len({fact["model"] for fact in facts}) == 1
    for fact in facts[:2]:
        assert fact["healings"] == 0, fact  # they have kept their memory
        assert fact["aborted"] >= 2 and fact["slowest"] < 10, fact
        for victim in (0, 1):  # one that joined again and fell behind at once has lost nothing
            assert any(number == victim and norm > 0 for _, number, norm, _ in fact["losses"]), fact
        assert 2 in fact["sizes"] and fact["sizes"][-1] == 6, fact
    assert [fact["healings"] for fact in facts[2:]] == [1] * 4
    lighthouse.close()


def test_only_an_elastic_communicator_has_rounds():
    def worker(comm):
        assert not comm.is_elastic and comm.in_round
        with pytest.raises(NotImplementedError, match="one round, which never ends"):
            comm.form_round()

    LocalWorld(1).run(worker)
