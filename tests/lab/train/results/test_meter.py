"""What a row of metrics says after a run has been stopped in the middle of one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thinwire.comm import Ledger, LocalWorld
from thinwire.lab.train.results import meter
from thinwire.lab.train.results.meter import Meter
from thinwire.lab.train.step.virtual import VirtualTime


def begin(encode: float) -> tuple[Meter, dict]:
    """A meter, and the seconds of its strategy."""
    handle = SimpleNamespace(
        seconds={"encode": encode}, ledger=Ledger(1), num_skipped=2, models_differ=False, phases_in_step=("encode",)
    )
    return meter_of(handle), handle.seconds


def meter_of(handle, others: Ledger | None = None) -> Meter:
    data = SimpleNamespace(
        num_sums=4,
        checked_sums=lambda scores, labels: torch.ones(4),
        metrics=lambda sums: {"sum": sums[0].item()},
    )
    return Meter(data, handle, VirtualTime(), others)


@pytest.fixture
def now(monkeypatch):
    """The time of the meters, in seconds."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now.time)
    return now


def test_a_row_goes_on_where_it_was_saved(now):
    """Ten examples in five seconds, a stop, an hour, and ten in five more: 2 examples a second."""

    def run(comm):
        first, seconds = begin(7.0)
        now.time += 5
        seconds["encode"] += 1.5
        first.add(torch.zeros(10, 2), torch.zeros(10))
        saved = first.state_dict()
        now.time += 3600
        second, seconds = begin(0.0)
        second.load_state_dict(saved)
        now.time += 5
        seconds["encode"] += 0.5
        second.add(torch.zeros(10, 2), torch.zeros(10))
        row = second.row(comm)
        now.time += 1
        seconds["encode"] += 4.0
        return row, second.row(comm)["encode_seconds"]

    ((row, later),) = LocalWorld(1).run(run)
    assert row["examples_per_second"] == pytest.approx(2.0) and row["seconds"] == pytest.approx(10.0)
    assert row["sum"] == 2.0 and row["encode_seconds"] == pytest.approx(2.0) and later == pytest.approx(4.0)
    assert row["skipped_steps"] == 4, "two before the stop and two after it"


def test_a_continued_row_also_has_what_the_row_before_it_has(now):
    """Ten examples in five seconds, a row, and ten in fifteen more: one a second, and the row's values beside them."""

    def run(comm):
        own, seconds = begin(7.0)
        rows = []
        for took in (5, 15):
            now.time += took
            seconds["encode"] += 1.5
            own.add(torch.zeros(10, 2), torch.zeros(10))
            if rows:
                own.continue_row()
            rows.append(own.row(comm))
        return rows

    ((first, both),) = LocalWorld(1).run(run)
    assert (first["sum"], first["encode_seconds"]) == (1.0, 1.5) and first["examples_per_second"] == pytest.approx(2.0)
    assert (both["sum"], both["encode_seconds"]) == (2.0, 3.0) and both["examples_per_second"] == pytest.approx(1.0)


def test_a_row_has_all_bytes_that_rows_and_tests_have_sent_before_it_also_before_a_stop():
    """Of three workers, each sends to two others: 100 bytes before the stop, and 10 after it, beside the rows themselves."""

    def worker(comm):
        handle = SimpleNamespace(seconds={}, ledger=Ledger(3), num_skipped=0, models_differ=False, phases_in_step=())
        first = meter_of(handle, comm.ledger)
        comm.all_gather(torch.zeros(100, dtype=torch.uint8)).wait()
        saved = first.state_dict()
        comm.barrier()  # of the restart, which does not count
        second = meter_of(handle, comm.ledger)
        second.load_state_dict(saved)
        comm.all_gather(torch.zeros(10, dtype=torch.uint8)).wait()
        rows = [second.row(comm)["other_bytes_sent"] for _ in range(2)]
        return rows

    row_bytes = 2 * 2 / 3 * (4 + 6) * 8  # an all-reduce of 2 (W-1)/W times the sums, four counts, examples and skips
    for rows in LocalWorld(3).run(worker):
        assert rows[0] == 220 and rows[1] == pytest.approx(220 + row_bytes, abs=1)
