"""Addresses of this machine and of others."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct


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
    if not (type(port) is int or (isinstance(port, str) and port.isdecimal() and len(port) <= 5)):
        return False
    try:
        ipaddress.ip_address(host.strip("[]") if isinstance(host, str) else "")
    except ValueError:
        return False
    return 0 <= int(port) < 1 << 16


def own_address(interface: str | None = None, meeting: str | None = None) -> tuple[socket.AddressFamily, str]:
    """The address at which other workers reach this machine.

    It is that of the interface; else the one that reaches the host where workers meet; else, as in Gloo, the one that the
    machine's own name resolves to.

    Args:
        interface: its name; None takes GLOO_SOCKET_IFNAME.
        meeting: the host; None takes MASTER_ADDR.

    Raises:
        ValueError: the interface was named as an argument and has no address.
    """
    name = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name and (found := _interface_address(name)):
        return found
    if interface:
        raise ValueError(
            f"interface {interface!r} does not exist here, or has no IPv4 address; `ip address` lists them"
        )
    master = meeting or os.environ.get("MASTER_ADDR") or socket.gethostname()
    with contextlib.suppress(OSError):
        # Any port will do, because nothing is sent.
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return family, probe.getsockname()[0]
    return socket.AF_INET, "127.0.0.1"


def _interface_address(interface: str) -> tuple[socket.AddressFamily, str] | None:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            SIOCGIFADDR = 0x8915
            # The kernel's names of interfaces have at most 15 characters.
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.AF_INET, socket.inet_ntoa(answer[20:24])
    except (ImportError, OSError):
        return None  # not Linux, no such interface, or one without an IPv4 address
