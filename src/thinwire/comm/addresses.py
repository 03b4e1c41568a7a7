"""Addresses of this machine and of others."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path

IPV6_TABLE, GLOBAL = Path("/proc/net/if_inet6"), "00"
"""Linux's table of IPv6 addresses, and the scope of those that are for more than the link or the machine."""


def parse_address(text: str) -> tuple[str, int]:
    """Read HOST:PORT; an IPv6 address stands in brackets.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_address("relay.example.org:29600"), parse_address("[::1]:80")
        (('relay.example.org', 29600), ('::1', 80))
    """
    host, _, port = text.rpartition(":")
    # `isdigit` alone takes superscripts too, which `int` refuses.
    if not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"expected HOST:PORT, such as worker.example.org:29500, got {text!r}")
    return host.strip("[]"), int(port)


def address_text(host: str, port: int) -> str:
    """What `parse_address` reads.

    Example:
        >>> address_text("relay.example.org", 29600), address_text("::1", 80)
        ('relay.example.org:29600', '[::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_contact(host: object, port: object) -> bool:
    """Whether these can be the address and port of a worker; a name would have to be looked up, which takes time.

    Example:
        >>> is_contact("10.0.0.1", "29500"), is_contact("::1", 0), is_contact("a.example.org", 1), is_contact("::1", 70_000)
        (True, True, False, False)
    """
    if not (type(port) is int or (isinstance(port, str) and re.fullmatch("[0-9]{1,5}", port))):
        return False
    try:
        ipaddress.ip_address(host.strip("[]") if isinstance(host, str) else "")
    except ValueError:
        return False
    return 0 <= int(port) < 1 << 16


def own_address(interface: str | None = None, meeting: str | None = None) -> tuple[socket.AddressFamily, str]:
    """The address at which other workers reach this machine.

    It is that of the interface; else the one that reaches the host where workers meet; else, as in Gloo, the one that the
    machine's own name resolves to. Of an interface's IPv4 and IPv6, it is the one that reaches that host, else IPv4.

    Args:
        interface: its name; None takes GLOO_SOCKET_IFNAME.
        meeting: the host; None takes MASTER_ADDR.

    Raises:
        ValueError: the interface was named as an argument and has no address; or the address is for one link alone.
    """
    name = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    master = meeting or os.environ.get("MASTER_ADDR")
    if name and (found := _interface_addresses(name)):
        return _that_meets(found, master) if master and len(found) > 1 else found[0]
    if interface:
        raise ValueError(f"interface {interface!r} does not exist here, or has no address; `ip address` lists them")
    family, address = _reaching(master or socket.gethostname()) or (socket.AF_INET, "127.0.0.1")
    if ":" in address and ipaddress.ip_address(address).is_link_local:
        raise ValueError(
            f"{address} reaches {master}, and is an IPv6 address for one link alone, which other machines cannot dial as it "
            "stands; let workers meet at an address that does not begin with fe80, or at a name of one"
        )
    return family, address


def _that_meets(own: list[tuple[socket.AddressFamily, str]], host: str) -> tuple[socket.AddressFamily, str]:
    """Of an interface's addresses, IPv4 first, the one to tell others who meet at a host."""
    with contextlib.suppress(OSError):
        here = own_addresses_of(host)
        # Where the others meet at this machine, its name may stand for both: then IPv4, as Gloo takes it.
        if named := [one for one in own if one[1] in here]:
            return named[0]
    reaching = _reaching(host)
    return reaching if reaching in own else own[0]


def _reaching(host: str) -> tuple[socket.AddressFamily, str] | None:
    """The address of this machine that reaches a host; None if the host is unknown, or no route leads there."""
    with contextlib.suppress(OSError):
        # Any port will do, because nothing is sent.
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return family, probe.getsockname()[0]
    return None


def _interface_addresses(interface: str) -> list[tuple[socket.AddressFamily, str]]:
    """The first IPv4 address of an interface, and its IPv6 addresses for more than the link; none where it is not Linux."""
    found: list[tuple[socket.AddressFamily, str]] = []
    with contextlib.suppress(ImportError, OSError):  # no such interface, or one without an IPv4 address
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            SIOCGIFADDR = 0x8915
            # The kernel's names of interfaces have at most 15 characters.
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append((socket.AF_INET, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):  # no IPv6
        for line in IPV6_TABLE.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if (name, scope) == (interface, GLOBAL):
                found.append((socket.AF_INET6, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found


def own_addresses_of(host: str) -> list[str]:
    """The addresses of a host that are this machine's: all, some or none of those that its name resolves to.

    Raises:
        OSError: the name does not resolve.

    Example:
        >>> own_addresses_of("127.0.0.1"), own_addresses_of("192.0.2.1")
        (['127.0.0.1'], [])
    """
    found = []
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            found.append(str(address[0]))
    return list(dict.fromkeys(found))


def listening_address(host: str, here: list[str], is_local: bool) -> str | None:
    """The one address at which to listen, so that others reach a host; None if it has several here, or none.

    Args:
        host: address or name of this machine.
        here: its addresses, see `own_addresses_of`.
        is_local: whether all others are on this machine too. For those elsewhere, a name that means the loopback is no address;
            on Debian a machine's own name does.

    Example:
        >>> listening_address("node0", ["10.0.0.1"], False), listening_address("node0", ["127.0.1.1"], False)
        ('10.0.0.1', None)
    """
    if host in here or (is_local and here):
        return here[0]
    reached = [address for address in here if not ipaddress.ip_address(address).is_loopback]
    return reached[0] if len(reached) == 1 else None
