"""What a run is doing now, from its folder: for the terminal, and for a page that refreshes itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...algorithm import able_to, require
from ..files import check_summary, load_json_object
from .exporters import prometheus
from .runs import read_object, read_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_CALLERS, SILENT_SECONDS = 32, 10.0
MAX_ROWS = 400  # that are drawn; longer runs show every n-th row
BARS = "▁▂▃▄▅▆▇█"
PHASES = ("data", "compute", "encode", "wait", "decode")


def snapshot(folder: Path) -> dict[str, Any]:
    """The state of a run: plain values, as the page gets them.

    Args:
        folder: of the run; it may be under way, finished or dead.

    Returns:
        `name`, `strategy`, `recipe`, `workers`, `finished`, `is_damaged` (its summary), `age_seconds` since the last row,
        `rows` (thinned), and `now`: the last row, with the test metrics of the last row that had them, `megabytes_per_second`
        sent by a worker and `waiting`, the share of the last row's time that was spent on waiting for bytes.

    Raises:
        ValueError: the folder holds no run.
    """
    config = folder / "config.json"
    require(
        config.exists(), f"{folder} holds no run: config.json is missing; give the folder of a run, such as runs/NAME"
    )
    known, rows = load_json_object(config), read_rows(folder / "metrics.jsonl", [])
    summary = folder / "summary.json"
    has_summary = summary.exists()  # asked first: the run may write it at this moment
    finished = has_summary and bool(read_object(summary, check_summary, []))
    now: dict[str, Any] = {}
    for row in rows:
        # Most rows have no test, so the last one stays visible.
        now |= {key: value for key, value in row.items() if key.startswith(("test_", "mean_model_"))}
    now |= rows[-1] if rows else {}
    if len(rows) > 1:
        now |= _rates(*rows[-2:])
    return {
        "name": folder.resolve().name,
        "strategy": str(known.get("strategy", "")),
        "recipe": str(known.get("recipe", "")),
        "workers": now.get("workers", known.get("workers")),
        "finished": finished,
        "is_damaged": has_summary and not finished,
        # Before the first row, the configuration is the newest file.
        "age_seconds": max(0.0, time.time() - _changed(folder / "metrics.jsonl", config)),
        "now": now,
        # The step is rounded up, so that at most MAX_ROWS are left.
        "rows": rows[:: -(-len(rows) // MAX_ROWS) or 1],
    }


def _changed(*paths: Path) -> float:
    return next(path.stat().st_mtime for path in paths if path.exists())


def _rates(before: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    if any(row.get(key) is None for row in (before, last) for key in ("seconds", "bytes_sent")):
        return {}
    seconds, sent = (last[key] - before[key] for key in ("seconds", "bytes_sent"))
    if seconds <= 0:
        return {}
    return {"megabytes_per_second": sent / 1e6 / seconds, "waiting": (last.get("wait_seconds") or 0.0) / seconds}


def state_of(seen: dict[str, Any]) -> str:
    """Whether the run is finished, its summary damaged, or it is running, or has written nothing for long.

    Example:
        >>> state_of({"finished": False, "is_damaged": False, "age_seconds": 7200.0})
        'no row for 2 h'
    """
    if seen["finished"]:
        return "finished"
    if seen["is_damaged"]:
        return "summary.json is damaged"
    age = seen["age_seconds"]
    if age < 60:
        return "running"
    return f"no row for {age / 3600:.0f} h" if age >= 3600 else f"no row for {age / 60:.0f} min"


def figures(seen: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of the moment by name, those that the run has.

    Example:
        >>> figures({"now": {"step": 3, "loss": 0.25, "bytes_sent": 2_000_000, "dense_fp32_bytes": 8_000_000}})
        [('step', '3'), ('loss', '0.25'), ('sent by a worker', '2 MB'), ('fewer than fp32', '4 times')]
    """
    now = seen["now"]
    names = {key for key, _, _ in _FIGURES}
    own = [(key, key.replace("_", " "), _number) for key in now if key.startswith("test_") and key not in names]
    place = next(i for i, (key, _, _) in enumerate(_FIGURES) if key == "learning_rate")
    listed = [*_FIGURES[:place], *own, *_FIGURES[place:]]  # with metrics of the data set that are not known here
    known = [(words, now[key], form) for key, words, form in listed if now.get(key) is not None]
    shown = [(words, form(value)) for words, value, form in known]
    if now.get("bytes_sent") and now.get("dense_fp32_bytes"):
        place = next(i for i, (words, _) in enumerate(shown) if words == "sent by a worker")
        shown.insert(place + 1, ("fewer than fp32", f"{now['dense_fp32_bytes'] / now['bytes_sent']:.3g} times"))
    return shown


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("step", "step", _number),
    ("epoch", "epoch", _number),
    ("loss", "loss", _number),
    ("accuracy", "accuracy", _percent),
    ("perplexity", "perplexity", _number),
    ("test_loss", "test loss", _number),
    ("test_accuracy", "test accuracy", _percent),
    ("test_perplexity", "test perplexity", _number),
    ("mean_model_test_accuracy", "test accuracy, mean model", _percent),
    ("learning_rate", "learning rate", _number),
    ("examples_per_second", "examples a second", _number),
    ("bytes_sent", "sent by a worker", lambda value: f"{value / 1e6:,.3g} MB"),
    ("megabytes_per_second", "rate", lambda value: f"{value:.3g} MB/s"),
    ("waiting", "time spent on waiting", _percent),
    ("consensus_distance", "consensus distance", _number),
    ("skipped_steps", "skipped steps", _number),
    ("workers", "workers", _number),
    ("committed", "rounds committed", _number),
    ("aborted", "rounds given up", _number),
    ("staleness", "staleness of changes (rounds)", _number),
    ("dropped_changes", "changes dropped", _number),
    ("healings", "workers healed", _number),
)


def as_rich(seen: dict[str, Any]) -> RenderableType:
    """The view of the terminal: the numbers of the moment, and the curve of the loss."""
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for words, value in figures(seen):
        grid.add_row(words, value)
    losses = [row["loss"] for row in seen["rows"] if isinstance(row.get("loss"), (int, float))]
    if len(losses) > 1:
        grid.add_row("loss over steps", sparkline(losses, 60))
    last = seen["now"]
    spent = {phase: last.get(f"{phase}_seconds") or 0.0 for phase in PHASES}
    total = sum(spent.values())
    if total > 0:
        shares = (f"{phase} {seconds / total:.0%}" for phase, seconds in spent.items())
        grid.add_row("phases of rank 0", ", ".join(shares))
    return Panel(grid, title=escape(f"{seen['name']}: {state_of(seen)}"), subtitle=escape(seen["strategy"]))


def sparkline(values: list[float], width: int) -> str:
    """A curve of block characters, the means of at most `width` runs of values.

    Example:
        >>> sparkline([3.0, 2.0, 1.0, 0.0], 4)
        '█▆▃▁'
    """
    step = -(-len(values) // width)
    means = [sum(part) / len(part) for i in range(0, len(values), step) if (part := values[i : i + step])]
    low, high = min(means), max(means)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for value in means)


class _Server(ThreadingHTTPServer):
    """Answers `MAX_CALLERS` at a time: it may run beside the training, which needs threads and descriptors too."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._places = threading.Semaphore(MAX_CALLERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the caller has hung up, or does not read."""


def server(folder: Path, address: str, port: int) -> ThreadingHTTPServer:
    """An HTTP server with the page at `/`, its data at `/run.json`, and Prometheus' metrics at `/metrics`.

    Args:
        folder: of the run.
        address, port: where it listens; port 0 takes a free one.

    Raises:
        ValueError: it cannot listen there.
    """
    page = Path(__file__).with_name("watch.html").read_bytes()

    def as_json() -> bytes:
        seen = snapshot(folder)
        return json.dumps(seen | {"state": state_of(seen), "figures": figures(seen)}).encode()

    answers: dict[str, tuple[str, Callable[[], bytes]]] = {
        "/": ("text/html; charset=utf-8", lambda: page),
        "/run.json": ("application/json", as_json),
        "/metrics": ("text/plain; version=0.0.4; charset=utf-8", lambda: prometheus(snapshot(folder))),
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = SILENT_SECONDS

        def do_GET(self) -> None:
            kind, make = answers.get(self.path.partition("?")[0], (None, None))
            if make is None:
                self.send_error(404)
                return
            try:
                # The run's folder may be moved or half written at this moment; the page asks again.
                body = make()
            except (ValueError, OSError, ModuleNotFoundError) as error:
                self.send_error(503, " ".join(str(error).split()))
                return
            self.send_response(200)
            self.send_header("Content-Type", str(kind))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the page asks every two seconds."""

    with able_to(f"listen at {address}:{port}", "give another port"):
        return _Server((address, port), Handler)
