"""Tests of which address a worker has, listens at and dials, where a host has several or none."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from thinwire.comm import addresses
from thinwire.comm.addresses import own_address, own_addresses_of
from thinwire.comm.sockets import dial_small
from thinwire.comm.tls.connections import Client, Listener, listening_socket

NOWHERE = "255.255.255.255"  # no socket connects with it


def resolve(monkeypatch, *found):
    """Let every name stand for these addresses: pairs of address and port."""
    family = {host: socket.AF_INET6 if ":" in host else socket.AF_INET for host, _ in found}
    rows = [(family[host], 0, 0, "", (host, port)) for host, port in found]
    real = socket.getaddrinfo

    def getaddrinfo(host, port, family=0, type=0, proto=0, flags=0):
        if host != "node0":
            return real(host, port, family, type, proto, flags)
        return [(family, type, 0, "", (address, known or port)) for family, _, _, _, (address, known) in rows]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_the_own_address_reaches_any_address_of_the_place_where_workers_meet(monkeypatch):
    """It was the loopback if the first one had no route."""
    resolve(monkeypatch, (NOWHERE, 0), ("127.0.0.1", 0))
    monkeypatch.setattr(socket, "gethostname", lambda: NOWHERE)
    monkeypatch.setattr(addresses, "_interface_addresses", lambda name: [])
    found = []
    connect = socket.socket.connect

    class Recording(socket.socket):
        def connect(self, address):
            connect(self, address)
            found.append(address[0])

    monkeypatch.setattr(socket, "socket", Recording)
    assert own_address(meeting="node0") == (socket.AF_INET, "127.0.0.1")
    assert found == ["127.0.0.1"]


def test_an_interface_has_ipv6_addresses_too(monkeypatch, tmp_path):
    """One with no IPv4 address was refused."""
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe800000000000000000000000000001 02 40 20 80 ether9\n"
        "fd770000000000000000000000000001 02 40 00 80 ether9\n"
        "fd770000000000000000000000000002 03 40 00 80 ether8\n"
    )
    monkeypatch.setattr(addresses, "IPV6_TABLE", table)
    assert own_address("ether9") == (socket.AF_INET6, "fd77::1")
    with pytest.raises(ValueError, match="interface 'ether7' does not exist here, or has no address"):
        own_address("ether7")


def test_of_the_addresses_of_an_interface_the_one_that_reaches_the_others_is_taken(monkeypatch):
    both = [(socket.AF_INET, "10.7.1.2"), (socket.AF_INET6, "2001:db8::7")]
    monkeypatch.setattr(addresses, "_interface_addresses", lambda name: both)
    monkeypatch.setattr(addresses, "_reaching", {"a": both[0], "b": both[1], "c": ("", "192.0.2.9"), "d": None}.get)
    here = {"e": ["2001:db8::7", "10.7.1.2"], "f": ["2001:db8::7"]}  # worker 0, where the others come
    monkeypatch.setattr(addresses, "own_addresses_of", lambda host: here.get(host, []))
    taken = {host: own_address("ether9", host)[1] for host in "abcdef"}
    assert [host for host in taken if taken[host] == both[1][1]] == ["b", "f"]
    assert {*taken.values()} == {"10.7.1.2", "2001:db8::7"}


def test_an_address_for_one_link_alone_is_refused(monkeypatch):
    """Workers told each other such addresses, which nobody can dial without the name of an own interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(addresses, "_reaching", lambda host: (socket.AF_INET6, "fe80::1"))
    with pytest.raises(ValueError, match="fe80::1 reaches fe80::2%eth0, and is an IPv6 address for one link alone"):
        own_address(meeting="fe80::2%eth0")


@pytest.mark.parametrize(
    ("found", "here", "is_at_one"),
    [
        (["127.0.0.1"], ["127.0.0.1"], False),  # Debian gives a machine's own name the loopback
        (["192.0.2.1"], [], False),  # an address that is translated on the way
    ],
)
def test_a_listener_is_reached_by_others_whatever_its_name_means(found, here, is_at_one, monkeypatch):
    resolve(monkeypatch, *((address, 0) for address in found))
    assert own_addresses_of("node0") == here
    with listening_socket("node0", 0) as listener:
        assert (listener.getsockname()[0] in here) == is_at_one
        for own in socket.getaddrinfo("localhost", listener.getsockname()[1], type=socket.SOCK_STREAM):
            socket.create_connection(own[4][:2], 10).close()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_listener_for_this_machine_alone_is_at_the_loopback(name):
    with listening_socket(name, 0) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_dead_address_leaves_time_for_one_that_answers(monkeypatch):
    """A client spent its whole limit on the first address of a name."""
    with ExitStack() as stack:
        dead = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        stack.enter_context(
            socket.create_connection(dead.getsockname())
        )  # its queue is full, so that it hears no other
        listener = Listener("127.0.0.1", 0, None, lambda question: [b"answer"])
        stack.callback(listener.close)
        resolve(monkeypatch, dead.getsockname(), ("127.0.0.1", listener.port))
        with pytest.raises(TimeoutError):
            dial_small(*dead.getsockname(), 0.1)
        client = Client("node0", 1, None)
        stack.callback(client.close)
        client.connect(2.0)
        assert client.ask(b"question", seconds=10.0) == [b"answer"]
