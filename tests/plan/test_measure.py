"""The measurement of lines against lines of a known rate and round trip, and its record."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.busy import always
from helpers.spawn import WORLDS, spawn

import thinwire as tw
from thinwire.comm import Communicator
from thinwire.comm.local_world import LocalCommunicator
from thinwire.plan import Effort, Lines, Link, Network, measure, measure_lines
from thinwire.plan.measure import measure_together, segments, tournament

QUICK = Effort(seconds=0.3, pair_bytes=200_000, round_trips=6)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_in_a_tournament_each_pair_meets_once_and_nobody_has_two_peers(size):
    met = [tuple(sorted(pair)) for pairs in tournament(size) for pair in pairs.items()]
    assert sorted(met) == sorted(2 * [(i, j) for j in range(size) for i in range(j)])
    assert all(pairs[pairs[rank]] == rank for pairs in tournament(size) for rank in pairs)


def measured(comm):
    before = comm.ledger.bytes_sent
    lines = measure_lines(comm, QUICK)
    return lines, comm.ledger.bytes_sent - before


@pytest.mark.parametrize("world", WORLDS)
def test_all_workers_get_the_same_record_and_send_no_more_than_announced(world):
    (lines, *others), sent = zip(*WORLDS[world](3, measured), strict=True)
    assert lines.size == 3 and others == [lines, lines]
    for i, j in lines.pairs():
        assert lines.bytes_per_second[i][j] > 0 and lines.jitter_seconds[i][j] >= 0
        assert lines.round_trip_seconds[i][j] == lines.round_trip_seconds[j][i] > 0
        assert abs(lines.clock_seconds[i][j]) < 1.0  # one machine has one clock
    assert [lines.bytes_per_second[i][i] for i in range(3)] == [0.0] * 3
    small = 100_000  # round trips, and what workers tell each other
    assert max(sent) <= 2 * QUICK.pair_bytes + 24 * QUICK.together_bytes + small


class Delayed(LocalCommunicator):
    """A communicator whose worker 2 gets its messages late: 5 ms, and what its 1 MB/s take."""

    def _start_exchange(self, sends, receives):
        take = super()._start_exchange(sends, receives)
        if self.rank != 2 or not receives:
            return take

        def late():
            came = take()  # first: a sleep while nothing has come would delay nothing
            time.sleep(0.005 + sum(t.numel() for t in receives.values()) / 1e6)
            return came

        return late


def test_a_slow_direction_is_seen_in_its_direction_alone():
    def worker(comm):
        return measure_lines(Delayed(comm.rank, comm.size, comm._mail, 1), Effort(seconds=4, pair_bytes=200_000))

    def wrong():
        nonlocal lines
        lines = tw.LocalWorld(3).run(worker)[0]
        assert lines.into(2) < 1.1e6
        return set() if lines.out(2) > 1.5e6 else {"out"}

    lines = None
    assert not always(wrong)
    assert lines.into(2) == max(lines.bytes_per_second[0][2], lines.bytes_per_second[1][2])
    assert lines.round_trip_seconds[0][2] > 0.005 and lines.round_trip_seconds[1][2] > 0.005


@pytest.mark.parametrize("megabits, trip", [(1, 0.1), (20, 0.001), (20, 0.1), (200, 0.1), (1000, 0.001)])
def test_messages_grow_until_the_window_is_open(monkeypatch, megabits, trip):
    """In each round trip a line carries a window, which grows by a third up to what the line holds, and stays for the next."""
    line, window, spent = megabits * 1e6 / 8, 15_000.0, []

    def both_ways(comm, peer, num_bytes):
        nonlocal window
        seconds, left = trip / 2, num_bytes
        while left > 0:
            part = min(left, window, line * trip)
            seconds += max(part / line, trip if part < left else 0)
            window, left = min(4 / 3 * window, line * trip), left - part
        spent.append(seconds)
        return seconds

    monkeypatch.setattr(measure, "_both_ways", both_ways)
    monkeypatch.setattr(measure, "_swap", lambda comm, peer, value: (value, value))
    rate, _ = measure._rate(None, 1, Effort().pair_bytes, max(10 / 24, measure.MESSAGE_TRIPS * trip), trip / 2)
    assert rate > 0.8 * line
    assert sum(spent) < max(5, 100 * trip)


def sent_segments(comm):
    before = segments()
    peer = 1 - comm.rank
    got = torch.empty(10_000_000, dtype=torch.uint8)
    comm.exchange({peer: torch.zeros_like(got)}, {peer: got}).wait()
    return segments()[0] - before[0]


def test_the_kernel_counts_what_a_backend_sends():
    for sent in spawn(2, sent_segments):
        assert 10_000_000 / 65536 / 2 < sent < 10_000_000 / 500


def test_links_of_a_network_follow_from_the_lines():
    fast, slow = 1e9, 1e7
    rates = [[0 if i == j else fast if i // 2 == j // 2 else slow for j in range(4)] for i in range(4)]
    trips = [[0 if i == j else 1e-4 if i // 2 == j // 2 else 0.02 for j in range(4)] for i in range(4)]
    network = Lines.of_rates(rates, trips).on_network(Network(4, workers_per_node=2))
    assert network.inner == Link(fast, 5e-5) and network.outer == Link(slow, 0.01)
    assert Lines.of_rates(rates, trips).on_network(Network(4)).outer == Link(slow)


def test_a_record_of_other_sizes_is_refused():
    with pytest.raises(ValueError, match="loss must be 2 x 2"):
        Lines(((0, 1), (1, 0)), ((0, 0), (0, 0)), ((0, 1), (1, 0)), ((0,),), ((0, 0), (0, 0)), Link(1.0))
    with pytest.raises(ValueError, match="at least two workers"):
        tw.LocalWorld(1).run(measure_lines)


class Slow(LocalCommunicator):
    """A communicator whose messages come 60 ms late."""

    _start_gather_variable = Communicator._start_gather_variable  # in two steps, as over lines

    def _start_exchange(self, sends, receives):
        take, due = super()._start_exchange(sends, receives), time.monotonic() + 0.06

        def late():
            came = take()
            time.sleep(max(0.0, due - time.monotonic()))
            return came

        return late


@pytest.mark.parametrize("size", [2, 3])
def test_the_latency_of_a_step_is_no_cost_of_an_operation(size):
    """Two workers add up in one step, and more in two, so an all-reduce would not tell them apart."""

    def worker(comm):
        return measure_together(Slow(comm.rank, comm.size, comm._mail, 1), 6, 1000, typical=min)

    def wrong():
        link = tw.LocalWorld(size).run(worker)[0]
        fits = {"latency": 0.05 < link.latency_seconds < 0.08, "operation": link.operation_seconds < 0.02}
        return {name for name, is_right in fits.items() if not is_right}

    assert not always(wrong)
