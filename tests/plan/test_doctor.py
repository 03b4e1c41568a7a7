"""Each finding where a host or a line has the fault, and none where they have not."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest

from thinwire.plan import Lines
from thinwire.plan.doctor import Finding, Host, Interface, findings, limits

VERSIONS = {"thinwire": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "kernel": "6.18"}
MB, GB = 1e6, 10**9


def host(rank: int, **fields) -> Host:
    ok = Host(
        name=f"node{rank}",
        versions=VERSIONS,
        interfaces=(Interface("lo", ("127.0.0.1",), 65536), Interface("eth0", (f"10.0.0.{rank}",), 1500)),
        address=f"10.0.0.{rank}",
        peers=tuple(f"10.0.0.{peer}" for peer in range(3) if peer != rank),
        congestion="cubic",
        available=("cubic", "bbr"),
        send_buffer_bytes=4 * 10**6,
        receive_buffer_bytes=6 * 10**6,
        path_mtu=1500,
        max_files=1024,
        cores=4,
        load=2.0,
        memory_bytes=16 * GB,
        free_bytes=8 * GB,
        compiler="/usr/bin/c++",
    )
    return replace(ok, **fields)


HOSTS = [host(rank) for rank in range(3)]


def square(value, changes=()):
    rows = [[0.0 if i == j else value for j in range(3)] for i in range(3)]
    for i, j, changed in changes:
        rows[i][j] = changed
    return tuple(map(tuple, rows))


def lines(**changed) -> Lines:
    fast = Lines.of_rates(square(100 * MB), square(5e-4))
    return replace(fast, **{"loss": square(1e-4)} | changed)


def test_nothing_is_wrong_where_nothing_is():
    assert findings(HOSTS) == [] and findings(HOSTS, lines()) == []


BAD_HOSTS = {
    "files": ({"max_files": 128}, "at most 128 open files, and 3 workers need 386", "ulimit -n"),
    "mtu": (
        {"interfaces": (Interface("eth0", ("10.0.0.1",), 1280),)},
        "the MTU of eth0 is 1280, and 1500 on the other hosts",
        "ip link set dev eth0 mtu 1500",
    ),
    "path": ({"path_mtu": 1400}, "packets of more than 1400 bytes do not get through", "mtu 1400"),
    "down": (
        {"interfaces": (Interface("eth0", ("10.0.0.1",), 1500, is_up=False),)},
        "eth0 is down",
        "ip link set dev eth0 up",
    ),
    "torch": ({"versions": VERSIONS | {"torch": "2.9.0"}}, "torch 2.9.0, and 2.13.0 on other hosts", "torch 2.13.0"),
    "python": ({"versions": VERSIONS | {"python": "3.12.1"}}, "python 3.12.1, and 3.11.7", "install python"),
    "kernels": ({"missing": ("thinwire.kernels._native",)}, "not built: thinwire.kernels._native", "install thinwire"),
    "compiler": ({"missing": ("x",), "compiler": None}, "not built", "install a C++17 compiler"),
    "load": ({"load": 9.0}, "9 processes want 4 cores", "stop other programs"),
    "memory": ({"free_bytes": GB}, "1.0 of 16.0 GB of memory are free", "smaller batch"),
    "port": ({"taken": (29500,)}, "another program listens on port 29500", "MASTER_PORT"),
    "loopback": ({"address": "127.0.0.1"}, "its address is 127.0.0.1, which other hosts cannot reach", "lo, eth0"),
    "gloo": ({"gloo_interface": "eth7"}, "GLOO_SOCKET_IFNAME names eth7, which is none of lo, eth0", "one of these"),
    "nat": (
        {"address": "192.168.1.2", "interfaces": (Interface("eth0", ("192.168.1.2",), 1500),)},
        "behind NAT: its address is 192.168.1.2, and the others see 10.0.0.1",
        "--relay HOST:PORT; for Gloo and NCCL a VPN",
    ),
}


@pytest.mark.parametrize("name", BAD_HOSTS)
def test_a_bad_host_is_named_with_what_is_wrong_and_the_remedy(name):
    fields, what, remedy = BAD_HOSTS[name]
    found = findings([HOSTS[0], host(1, **fields), HOSTS[2]])
    assert [f.ranks for f in found] == [(1,)]
    assert what in found[0].what and remedy in found[0].remedy


BAD_LINES = {
    "uplink": (
        {"bytes_per_second": square(100 * MB, [(1, 0, MB), (1, 2, MB)])},
        "sends 8 Mb/s, and the others 800 Mb/s",
        "uses its line",
    ),
    "downlink": (
        {"bytes_per_second": square(100 * MB, [(0, 1, MB), (2, 1, MB)])},
        "receives 8 Mb/s, and the others 800 Mb/s",
        "uses its line",
    ),
    "loss": ({"loss": square(1e-4, [(1, 2, 0.03)])}, "sends 3 % of its packets to rank 2 again", "cable"),
    "clock": (
        {"clock_seconds": square(0.0, [(1, 0, -90.0), (1, 2, -90.0), (0, 1, 90.0), (2, 1, 90.0)])},
        "its clock is 90 s ahead",
        "NTP",
    ),
    "jitter": ({"jitter_seconds": square(1e-4, [(1, 2, 0.05)])}, "its round trips vary by 50 ms", "few rounds"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(name):
    changed, what, remedy = BAD_LINES[name]
    found = [f for f in findings(HOSTS, lines(**changed)) if f.ranks == (1,)]
    assert len(found) == 1 and what in found[0].what and remedy in found[0].remedy


def test_slow_lines_are_named_where_all_are_slow():
    found = findings(HOSTS, lines(bytes_per_second=square(8000.0, [])))
    assert ["sends less than 1 Mb/s", "receives less than 1 Mb/s"] == [f.what for f in found]
    assert {f.ranks for f in found} == {(0, 1, 2)} and all("fewer bytes" in f.remedy for f in found)


def test_two_clocks_that_differ_are_one_finding():
    ahead = Lines.of_rates([[0, MB], [MB, 0]])
    ahead = replace(ahead, clock_seconds=((0.0, 5.0), (-5.0, 0.0)))
    pair = [host(0, peers=("10.0.0.1",)), host(1, peers=("10.0.0.0",))]
    assert [f.what for f in findings(pair, ahead)] == ["its clock is 5 s ahead of the others"]


def test_long_lines_ask_for_bbr_and_for_large_buffers():
    far = lines(round_trip_seconds=square(0.1))
    found = {f.what: f for f in findings(HOSTS, far)}
    cubic = found["TCP's congestion control is cubic, which slows down at each lost packet of a 100 ms line"]
    assert cubic.ranks == (0, 1, 2)
    of_system = "for Gloo and NCCL, sysctl -w net.ipv4.tcp_congestion_control=bbr"
    assert cubic.remedy == f"--transport tcp, whose connections choose theirs; {of_system}"
    send = next(f for what, f in found.items() if what.startswith("one connection may send 4 MB ahead, and"))
    assert int(re.search(r"(\d+)'", send.remedy)[1]) >= 2 * 100 * MB * 0.1
    without = findings([host(rank, available=("cubic", "reno")) for rank in range(3)], far)
    assert any("modprobe tcp_bbr" in f.remedy for f in without)
    good = [host(rank, congestion="bbr", send_buffer_bytes=1 << 26, receive_buffer_bytes=1 << 26) for rank in range(3)]
    assert findings(good, far) == []


def test_hosts_with_the_same_fault_are_one_finding():
    both = [host(rank, max_files=64) for rank in range(3)]
    assert findings(both) == [
        Finding((0, 1, 2), "at most 64 open files, and 3 workers need 386", "ulimit -n 65536 before the run")
    ]


def test_facts_survive_json():
    for fields in ({}, {"gpus": ("A",), "speeds": {"flops": 1e9}}):
        assert Host.of(json.loads(json.dumps(asdict(host(1, **fields))))) == host(1, **fields)


def test_time_limits_follow_from_the_slowest_line_and_the_longest_round_trip():
    def timeout(rates, trips, num_bytes):
        return limits(Lines.of_rates(square(*rates), square(*trips)), num_bytes)[0].seconds

    assert timeout((100 * MB,), (1e-3,), 4 * MB) == 30.0  # at least
    slow = timeout((100 * MB, [(2, 0, MB)]), (1e-3,), 30 * MB)
    assert slow == pytest.approx(4 * (4 / 3 * 30) + 0.1, abs=10)
    assert timeout((100 * MB,), (0.1, [(0, 1, 2.0), (1, 0, 2.0)]), MB) == pytest.approx(200, abs=10)
    names = [limit.name for limit in limits(lines(), 1.0)]
    assert names[0] == "--timeout" and len(names) == len(set(names))
