"""Shows a sweep: a table of its runs, live on a terminal, and the failures."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..output import WhileOpen
from .file import PlannedRun, Sweep, in_words
from .status import Status, log_tail, status_of

Statuses = Mapping[str, Status]

STYLES = {"finished": "green", "running": "bold", "stopped": "yellow", "failed": "red", "waiting": "dim"}
URGENT = ("failed", "running", "stopped", "waiting", "finished")  # order of importance on a small screen
REFRESH_SECONDS = 1.0
TAIL_LINES = 8
FRAME_LINES = 7  # lines of a table that are not runs
FRAME_COLUMNS = 18  # columns of a table that are neither name nor detail
MIN_NAME = 20


def statuses_of(runs: Sequence[PlannedRun]) -> dict[str, Status]:
    """The state of each run, by the name of its folder."""
    return {run.folder.name: status_of(run) for run in runs}


def counted(statuses: Statuses) -> str:
    """The number of runs in each state.

    Example:
        >>> counted({"a": Status("finished"), "b": Status("waiting"), "c": Status("waiting")})
        '3 runs: 1 finished, 2 waiting'
        >>> counted({"a": Status("finished")})
        '1 run: 1 finished'
    """
    numbers = Counter[str](status.state for status in statuses.values())
    runs = f"{len(statuses)} run{'s' * (len(statuses) != 1)}"
    return f"{runs}: " + ", ".join(f"{numbers[state]} {state}" for state in STYLES if numbers[state])


def status_table(sweep: Sweep, statuses: Statuses, screen: ConsoleDimensions | None = None) -> Table:
    """A row for each run: its folder, its state, and its progress, result or error.

    Args:
        sweep: has title and order.
        statuses: by the name of the run's folder.
        screen: size that the table must fit into: it then shortens names, gives each run one line, and only counts the
            runs that do not fit.
    """
    title = f"{sweep.output}: {counted(statuses)}"
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
    names = list(statuses)
    width = max(map(len, names))
    if screen is not None:
        table.min_width = min(len(title), screen.width)
        detail = min(screen.width // 2, max(len(status.detail) for status in statuses.values()))
        width = max(MIN_NAME, screen.width - FRAME_COLUMNS - detail)
        num_shown = max(1, screen.height - FRAME_LINES)
        by_urgency = sorted(names, key=lambda name: URGENT.index(statuses[name].state))
        names = [name for name in names if name in by_urgency[:num_shown]]
        if len(names) < len(statuses):
            table.caption, table.caption_justify = f"and {len(statuses) - len(names)} more", "left"
    for column in ("run", "state"):
        table.add_column(column, overflow="fold", min_width=8)
    table.add_column("", overflow="fold" if screen is None else "ellipsis")
    for name in names:
        status = statuses[name]
        said = Text(status.detail, no_wrap=screen is not None)
        table.add_row(_shortened(name, width), f"[{STYLES[status.state]}]{status.state}", said)
    return table


def _shortened(name: str, width: int) -> str:
    """Without its middle, where it is too long: runs differ at both ends."""
    if len(name) <= width:
        return name
    tail = width // 2
    return f"{name[: width - tail - 1]}…{name[-tail:]}"


def plan_table(sweep: Sweep) -> Table:
    """What would run: the same table, with what varies."""
    statuses = {run.folder.name: replace(status_of(run), detail=in_words(run.varied)) for run in sweep.runs}
    return status_table(sweep, statuses)


def watch(sweep: Sweep) -> None:
    """Print the table of states: once, or on a terminal again and again until all runs have ended, or Ctrl-C."""
    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width.
        Console(width=140).print(status_table(sweep, statuses_of(sweep.runs)))
        return
    with LiveTable(sweep, console) as table, contextlib.suppress(KeyboardInterrupt):
        while table.may_change:
            time.sleep(REFRESH_SECONDS)
            table.refresh()


class LiveTable:
    """A table of states that is redrawn in place during a sweep."""

    def __init__(self, sweep: Sweep, console: Console):
        self._sweep, self._live = sweep, Live(console=console, auto_refresh=False)
        self._drawn = -math.inf
        self.may_change = True

    def __enter__(self) -> LiveTable:
        self._live.__enter__()
        self.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.update(status_table(self._sweep, statuses_of(self._sweep.runs)))  # all of it stays on the terminal
        self._live.__exit__(kind, error, trace)

    def refresh(self, ended: Sequence[PlannedRun] = ()) -> None:
        """Read the states of all runs again, unless it did so just before."""
        if time.monotonic() - self._drawn < REFRESH_SECONDS:
            return
        statuses = statuses_of(self._sweep.runs)
        self._live.update(status_table(self._sweep, statuses, self._live.console.size), refresh=True)
        self._drawn = time.monotonic()
        self.may_change = any(status.state not in ("finished", "failed") for status in statuses.values())


def print_ended(runs: Sequence[PlannedRun]) -> None:
    """Print a line for each run that has ended, where there is no terminal."""
    for run in runs:
        status = status_of(run)
        print(f"  {status.state:8}  {run.folder.name}  {status.detail}", file=WhileOpen(), flush=True)


def show_failures(sweep: Sweep) -> int:
    """Print the last lines of each failed run's log; returns how many there are."""
    console = Console(highlight=False, soft_wrap=True)
    failed = [run for run in sweep.runs if status_of(run).state == "failed"]
    for run in failed:
        console.print(f"\n[red]failed[/]: {run.folder.name}; the end of {escape(str(run.records / 'log.txt'))}:")
        for line in log_tail(run, TAIL_LINES):
            console.print(f"  {escape(line)}")
    return len(failed)
