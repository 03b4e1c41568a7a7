"""What the ledger counts of an all-reduce is what is sent for it."""

from __future__ import annotations

import pytest
import torch

from thinwire.comm.handle import nothing
from thinwire.comm.numbered import Numbers
from thinwire.comm.reduction import combine, summing
from thinwire.comm.sums import HOST_BYTES, Route, Sums


class AtOnce:
    """Runs later steps at the call."""

    @staticmethod
    def follow(call, step=0):
        return call()


def counted(route, numel, reduction, root) -> tuple[int, int, int]:
    """Messages sent, and bytes sent and received, of a sum whose messages go nowhere."""
    sends, receives = [], []

    def post(sent, received):
        sends.extend(message.memory.numel() for message in sent)
        receives.extend(message.memory.numel() for message in received)
        return nothing

    sums = Sums(route, post, Numbers(route.size), AtOnce)
    sums.start(torch.zeros(numel, dtype=torch.float16), reduction, root)()
    return len(sends), sum(sends), sum(receives)


def largest(terms, out):
    combine(torch.maximum, terms, out)


@pytest.mark.parametrize("hosts", ["a", "ab", "aa", "abc", "aabb", "abab", "aab", "aabbcc", "abcde"])
def test_a_route_counts_what_is_sent(hosts):
    """In swaps, shards, by hosts and towards a root; in pieces, and of fewer elements than workers."""
    size = len(hosts)
    routes = [Route(rank, hosts) for rank in range(size)]
    for numel in (0, 1, 2, 3, 7, HOST_BYTES // 2 + 1, 3_000_001):
        for reduction, root in ((summing, None), (summing, size - 1), (largest, None)):
            told = [route.traffic(torch.empty(numel, dtype=torch.half), reduction, root) for route in routes]
            assert told == [counted(route, numel, reduction, root) for route in routes]
            _, sent, received = map(sum, zip(*told, strict=True))
            assert sent == received and (root is not None or sent == 2 * (size - 1) * 2 * numel)


@pytest.mark.parametrize(("shard_bytes", "messages"), [(100, 2), (101, 1)])
def test_two_near_workers_send_halves_of_a_large_tensor(shard_bytes, messages):
    route = Route(0, "ab")
    route.shard_bytes = shard_bytes
    assert route.traffic(torch.empty(50, dtype=torch.half)) == counted(route, 50, summing, None) == (messages, 100, 100)
