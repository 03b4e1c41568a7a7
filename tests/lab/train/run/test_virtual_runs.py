"""Virtual seconds of training runs over real processes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.interruptions import NEVER, Requests
from helpers.spawn import spawn

from thinwire.lab.train import RunConfig
from thinwire.lab.train.models import DigitsNet
from thinwire.lab.train.run import loop
from thinwire.lab.train.run.interrupt import Interrupted

CONFIG = RunConfig(
    *("digits", "Gradients(Mean(exchange='all_reduce'))"),
    workers=2,
    batch_size=16,
    max_steps=4,
    log_every=2,
    model=DigitsNet(width=4),
    network="1mbit,1ms",
    compute=0.3,
)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_all(comm, folder):
    """Run the same twice, once with a stop after two steps; and overlapped gossip."""
    votes = iter([0, 15, 0, 0])
    once = Requests(lambda comm: next(votes))
    folders = [folder / name for name in ("whole", "parts", "gossip")]
    for made in folders:
        made.mkdir(exist_ok=True)
    loop.run(CONFIG, folders[0], comm, NEVER)
    with pytest.raises(Interrupted):
        loop.run(CONFIG, folders[1], comm, once)
    loop.run(CONFIG, folders[1], comm, once)
    loop.run(replace(CONFIG, strategy="Gossip(Mix(Ring()), overlap=True)"), folders[2], comm, NEVER)


def test_virtual_seconds_are_those_of_the_network_repeat_and_survive_a_resume(tmp_path):
    spawn(2, run_all, tmp_path)
    whole, parts, gossip = (rows_of(tmp_path / name) for name in ("whole", "parts", "gossip"))
    num_parameters = sum(p.numel() for p in CONFIG.model.build(10).parameters())
    wire = 4 * num_parameters / 125_000 + 0.002  # one bucket, at the end of backward
    assert 0.05 < wire < 0.3, "overlapped gossip can hide it"
    expected = [2 * (0.3 + wire), 4 * (0.3 + wire)]
    assert [row["virtual_seconds"] for row in whole] == pytest.approx(expected, rel=0.01)
    assert [row["virtual_seconds"] for row in parts] == pytest.approx([row["virtual_seconds"] for row in whole])
    assert gossip[-1]["virtual_seconds"] == pytest.approx(4 * 0.3, rel=0.01)  # and the last round is saved in flight
    assert (
        json.loads((tmp_path / "whole" / "summary.json").read_text())["virtual_seconds"] == whole[-1]["virtual_seconds"]
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"network": "1gbit"}, "RATE,LATENCY"),
        ({"network": "fast,1ms"}, "rate"),
        ({"per_node": 3}, "must divide"),
        ({"network": None}, "belong to a network"),
        ({"compute": -1.0}, "compute must be at least 0 and finite, or None, got -1.0 seconds"),
    ],
)
def test_mistakes_are_named(changes, expected):
    with pytest.raises(ValueError, match=expected):
        replace(CONFIG, **changes)


def test_workers_of_unequal_numbers_of_steps_have_no_virtual_seconds():
    with pytest.raises(ValueError, match="unequal numbers of steps"):
        replace(CONFIG, strategy="Asynchronous()").parsed_strategy()
