"""Shows the progress of a run: a live bar on a terminal, ten lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich import progress
from rich.console import Console, RenderableType
from rich.table import Column
from rich.text import Text

from ....messages import log
from ...output import WhileOpen


class TwoLines(progress.Progress):
    """A bar, and the metrics below it; one line for both would be wider than 80 columns."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, then the metrics of its task."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(f"  {task.fields['metrics']}", overflow="fold")


class Terminal:
    """Shows rows of metrics on stdout, while it is open. Errors and warnings go to stderr.

    Args:
        title: text before the bar.
        num_steps: number of steps of the whole run.
        metric: the metric to show beside the loss.
        done: number of steps before a resume.
        skip_limit: how many skipped steps in a row end the run, for a warning at the first one; None warns of none.
    """

    def __init__(
        self, title: str, num_steps: int, metric: str = "accuracy", done: int = 0, skip_limit: int | None = None
    ):
        self._metric, self._skip_limit = metric, skip_limit
        self._title, self._num_steps, self._tenths_shown = title, num_steps, 10 * done // num_steps
        self._console = Console(file=WhileOpen().as_text, highlight=False, markup=False)
        self._bar = TwoLines(
            progress.TextColumn(
                "{task.description}",
                style="bold",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", max_width=48),
            ),
            progress.BarColumn(bar_width=20),
            progress.TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=num_steps, completed=done, metrics="")
        if done:
            self._console.print(f"{title}: goes on after step {done}/{num_steps}", soft_wrap=True)
        self._bar.start()

    def row(self, values: dict[str, float]) -> None:
        """Show a row of metrics, and warn once of skipped steps."""
        if self._skip_limit is not None and (skips := values["skipped_steps"]):
            were = "was" if skips == 1 else "were"
            log.warning(
                f"by step {values['step']}, {_updates(skips)} {were} skipped because a gradient was infinite or NaN; "
                f"metrics.jsonl counts them in skipped_steps, and {self._skip_limit} in a row end the run"
            )
            self._skip_limit = None
        self.show(int(values["step"]), _in_words(values, self._metric))

    def info(self, values: dict[str, float]) -> None:
        """Show nothing: only rows are shown."""

    def show(self, step: int, metrics: str) -> None:
        """Show the number of steps and the metrics."""
        self._bar.update(self._task, completed=step, metrics=metrics)
        tenths = 10 * step // self._num_steps
        if not self._console.is_terminal and tenths > self._tenths_shown:
            self._tenths_shown = tenths
            # One line of a log, however narrow the terminal.
            self._console.print(f"{self._title}: step {step}/{self._num_steps}, {metrics}", soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        self._bar.stop()


def _in_words(values: dict[str, float], metric: str) -> str:
    shown = [
        f"{name.replace('_', ' ')} {_number(name, values[name])}"
        for name in (metric, f"test_{metric}")
        if name in values
    ]
    # A lone worker sends nothing.
    sent = [f"{values['bytes_sent'] / 1e6:.2f} MB sent"] if values["bytes_sent"] else []
    skipped = [f"{_updates(values['skipped_steps'])} skipped"] if values.get("skipped_steps") else []
    speed = f"{values['examples_per_second']:,.0f} examples/s"
    return ", ".join([f"loss {values['loss']:.3f}", *shown, *sent, speed, *skipped])


def _number(name: str, value: float) -> str:
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _updates(number: float) -> str:
    return "1 update" if number == 1 else f"{number:.0f} updates"
