"""`thinwire relay`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ...algorithm import able_to
from .options import parsed


@dataclass(frozen=True)
class RelayOptions:
    """Forward between machines of a run that can only dial out; they name it with --relay.

    Start it on a machine that all of them reach. With credentials, what it forwards is encrypted between the workers. It keeps
    nothing. Ctrl-C ends it.
    """

    bind: str = "0.0.0.0:29600"
    """Address and TCP port to listen at; an IPv6 address stands in brackets."""


def relay_command(options: list[str]) -> None:
    """Forward until Ctrl-C."""
    asked = parsed(RelayOptions, options, "thinwire relay")
    from ...comm.addresses import parse_address
    from ...comm.tls.relay import Relay

    host, port = parse_address(asked.bind)
    with able_to(f"listen at {asked.bind}", "choose another --bind"):
        relay = Relay(host, port)
    with relay:
        print(f"thinwire: the relay listens at {relay.address[0]}:{relay.address[1]}", file=sys.stderr, flush=True)
        relay.wait()
