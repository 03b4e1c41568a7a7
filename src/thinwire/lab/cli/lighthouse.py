"""`thinwire lighthouse`."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from ...algorithm import able_to
from .options import parsed


@dataclass(frozen=True)
class LighthouseOptions:
    """Name the workers of each round of an elastic run; they name it with --lighthouse.

    Start it on a machine that stays, at an address that all workers reach. Without credentials it hears everybody, so close it
    to strangers. If it ends, start it again at the same address. Ctrl-C ends it.
    """

    bind: str = "127.0.0.1:29510"
    """Address and TCP port to listen at; an IPv6 address stands in brackets."""
    min_workers: int = 2
    """Fewer do not begin a round."""
    credentials: Path | None = None
    """Folder of `thinwire keys`: only workers of the run are heard, and what they say is encrypted. Without it, that of
    THINWIRE_CREDENTIALS, if it is set."""


def lighthouse_command(options: list[str]) -> None:
    """Serve until Ctrl-C."""
    asked = parsed(LighthouseOptions, options, "thinwire lighthouse")
    from ...comm import Credentials, Lighthouse
    from ...comm.addresses import parse_address

    host, port = parse_address(asked.bind)
    credentials = Credentials.from_environment() if asked.credentials is None else Credentials(asked.credentials)
    with able_to(f"listen at {asked.bind}", "choose another --bind"):
        lighthouse = Lighthouse(asked.min_workers, host, port, credentials=credentials)
    print(f"thinwire: the Lighthouse is at {lighthouse.address}", file=sys.stderr, flush=True)
    threading.Event().wait()
