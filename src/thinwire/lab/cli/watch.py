"""`thinwire watch`."""

from __future__ import annotations

import threading
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...algorithm import require
from .options import parsed, show, shown_as


@dataclass(frozen=True)
class WatchOptions:
    """Show what a run is doing, as in: thinwire watch runs/NAME

    Reads the run's folder, so it works beside a run, after it, and on any machine that sees the folder. Ctrl-C ends it.
    """

    run: Annotated[Path, shown_as("RUN")]
    """Folder of the run, such as runs/digits."""
    once: bool = False
    """Whether to print the view once and end; else it is refreshed until the run has finished."""
    serve: str | None = None
    """[ADDRESS:]PORT of a live page at /, its data at /run.json and Prometheus' metrics at /metrics. Without an address it
    listens on the loopback: the page asks nobody for a password."""
    otlp: bool = False
    """Whether to send the numbers to an OpenTelemetry collector too, that of OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __post_init__(self):
        require(self.serve is None or not self.otlp, "--serve answers Prometheus, and --otlp sends; start one for each")
        require(self.serve is None or not self.once, "--serve goes on until Ctrl-C; leave out --once")


def watch_command(options: list[str]) -> None:
    """Show a run in the terminal, or serve its page."""
    asked = parsed(WatchOptions, options, "thinwire watch")
    from ..report.exporters import OpenTelemetry
    from ..report.watch import as_rich, snapshot

    seen = snapshot(asked.run)  # refuses a folder that is no run, before it is served
    if asked.serve is not None:
        served(asked.run, *place(asked.serve, "--serve")).join()  # until Ctrl-C
    with closing(OpenTelemetry()) if asked.otlp else nullcontext() as collector:
        if collector is not None:
            collector.set(seen)
        if asked.once:
            show(as_rich(seen))
            return
        from rich.live import Live

        with Live(as_rich(seen), auto_refresh=False) as live:
            while not seen["finished"]:
                time.sleep(1)
                seen = snapshot(asked.run)
                live.update(as_rich(seen), refresh=True)
                if collector is not None:
                    collector.set(seen)


def served(folder: Path, address: str, port: int) -> threading.Thread:
    """Serve a run's page in a thread that ends with the process, and print where; port 0 takes a free one."""
    from ..report.watch import server

    serving = server(folder, address, port)
    print(f"  http://{address}:{serving.server_address[1]}", flush=True)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    return thread


def place(text: str, option: str) -> tuple[str, int]:
    """Where to listen, from [ADDRESS:]PORT.

    Example:
        >>> place(":9100", "--serve")
        ('127.0.0.1', 9100)
    """
    address, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{option} takes [ADDRESS:]PORT, such as 9100 or 0.0.0.0:9100, got {text!r}")
    return address or "127.0.0.1", int(port)
