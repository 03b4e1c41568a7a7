"""All figures of a report, each with a caption that describes the runs, or with the reason why it cannot be drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .bar_figures import iteration_times, scaling, step_times
from .consensus import FLOOR, TARGET, best_of_each, error_lines, experiment
from .groups import Group, what_was_run
from .line_figures import ALONG_BYTES, ALONG_SECONDS, ALONG_VIRTUAL_SECONDS, along_epochs, levels, lines
from .mean_curve import Row
from .metrics import Metric, metric
from .style import styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class CaptionedFigure(NamedTuple):
    """A figure with its title and caption.

    Args:
        name: the name of its files.
        title: the heading.
        figure: the figure; None if no run has the data for it.
        caption: the runs, the quantities and their units.
        needs: the data that a run must have for it.
    """

    name: str
    title: str
    figure: Figure | None
    caption: str
    needs: str = ""


def captioned_figures(
    groups: Sequence[Group], main: Metric | None, consensus: Mapping[Path, Sequence[Row]]
) -> list[CaptionedFigure]:
    """Draw all figures of a report; a figure without data has `figure` None.

    Args:
        groups: runs, grouped by method.
        main: the metric for the comparison of methods; None if no run has one.
        consensus: rows of each consensus experiment, by its file.
    """
    with styled():
        return [*(_of_runs(groups, main) if groups else ()), *_of_consensus(consensus)]


def _of_runs(groups: Sequence[Group], main: Metric | None) -> Iterator[CaptionedFigure]:
    compared = _of_one_size(groups)
    epochs, said = along_epochs(compared), f"{_lines_sentence(compared)} {_run_sentence(compared, len(groups))}"
    if main is None:
        yield CaptionedFigure("metric-epochs", "Test metric", None, "", "a metric on a test set")
    else:
        better = {True: "Higher is better. ", False: "Lower is better. ", None: ""}[main.higher_is_better]
        for name, title, axis, about, needs in (
            ("metric-epochs", f"against {epochs.label}", epochs, "", main.key),
            ("metric-bytes", "against bytes sent", ALONG_BYTES, BYTES, "bytes_sent above 0"),
            ("metric-seconds", "against time", ALONG_SECONDS, SECONDS, "seconds"),
            ("metric-virtual-seconds", "against virtual time", ALONG_VIRTUAL_SECONDS, VIRTUAL, "virtual_seconds"),
        ):
            figure = lines(compared, axis, main)
            yield CaptionedFigure(
                name, f"{main.label[:1].upper()}{main.label[1:]} {title}", figure, f"{better}{about}{said}", needs
            )
    for name, key, title, about in CURVES:
        yield CaptionedFigure(name, title, lines(compared, epochs, metric(key), log_y=True), f"{about} {said}", key)
    if any("workers" in row for group in compared for run in group.runs for row in run.rows):
        figure = lines(compared, epochs, Metric("workers", "workers"))
        yield CaptionedFigure("workers", "Workers of elastic runs", figure, f"{WORKERS} {said}")
    caption, about = f"{LEVELS} {_run_sentence(compared)}", _run_sentence(groups)
    yield CaptionedFigure("levels", "Adaptive levels", levels(compared), caption, "levels")
    title, needs = "Where a step's time goes", "seconds by phase"
    yield CaptionedFigure("step-time", title, step_times(groups), f"{STEP_TIME} {about}", needs)
    needs = "its methods on more than one number of workers"
    yield CaptionedFigure("scaling", "Scaling with workers", scaling(groups), f"{SCALING} {about}", needs)
    title, caption = "Time per iteration by workers", f"{ITERATION}{MEASURED}{about}"
    yield CaptionedFigure("iteration-time", title, iteration_times(groups, "seconds"), caption, needs)
    title, caption = "Virtual time per iteration by workers", f"{ITERATION}{VIRTUAL}{about}"
    figure = iteration_times(groups, "virtual_seconds")
    needs = "virtual_seconds on more than one number of workers"
    yield CaptionedFigure("virtual-iteration-time", title, figure, caption, needs)


BYTES = "Bytes are those handed to the network, in MB (10⁶ bytes), mean over the workers. "
VIRTUAL = "Virtual seconds are those that the steps would take on the network that --network describes. "
SECONDS = "Seconds are those measured on the machine of the run, tests and checkpoints included. "
CURVES = (
    ("loss", "loss", "Training loss", "Mean over the workers' batches since the row before; logarithmic."),
    (
        *("consensus-distance", "consensus_distance", "Consensus distance"),
        "Root mean square over the workers of their models' distance to the mean model; logarithmic.",
    ),
    (
        *("variance", "variance", "Quantization variance"),
        "Relative variance |Q(g) - g|² / |g|² of the codec Q on rank 0's own gradient g; logarithmic.",
    ),
)
WORKERS = "Number of workers in the round of each row; workers come, go and die within a run."
LEVELS = (
    "Levels to which gradients, in units of their bucket's norm, are rounded, as they adapt; a line a level and seed. "
    "Logarithmic on either side of zero."
)
STEP_TIME = (
    "Mean milliseconds of a step on rank 0, by phase, over the whole run. Where bytes travel beside the backward pass, phases "
    "overlap, and a step takes less than its bar is long."
)
SCALING = (
    "Examples a second of all workers together: the median over the rows of a run; mean and standard deviation over seeds. "
    "Ideal is in proportion to the workers, from the fastest method on the fewest."
)
ITERATION = (
    "Milliseconds from one step to the next: the median over the intervals between two rows of a run; mean and standard "
    "deviation over seeds. A method that scales stays flat. "
)
MEASURED = "As measured on the machine of the run; a test between two rows counts. "


def _of_consensus(consensus: Mapping[Path, Sequence[Row]]) -> Iterator[CaptionedFigure]:
    for number, (path, rows) in enumerate(consensus.items()):
        runs = best_of_each(rows, TARGET)
        suffix = "" if len(consensus) == 1 else f"-{number + 1}"
        about = (
            f"Averaging alone: squared distance to the mean over that at the start; errors below {FLOOR:g} are drawn there. "
            f"The dotted line is at {TARGET:g}; of each averager it is the step size that reaches it for the fewest bits. "
            f"What was run: {experiment(rows)}; from {path.name}."
        )
        for x in ("bits", "rounds"):
            figure = error_lines(runs, x, TARGET)
            unit = " Mbit are 10⁶ bits." if x == "bits" else ""
            yield CaptionedFigure(f"consensus-{x}{suffix}", f"Consensus: error against {x}", figure, about + unit)


def _of_one_size(groups: Sequence[Group]) -> list[Group]:
    """The groups of the most frequent number of workers, and those of methods that have no run with it."""
    sizes = [group.runs[0].config.get("workers", 0) if "workers" in group.words else 0 for group in groups]
    # Lines on different numbers of workers cannot be compared; `scaling` shows those that are left out here.
    usual = max(sizes, key=lambda size: (sizes.count(size), size))
    methods = [group.without("workers") for group in groups]
    there = {method.label for method, size in zip(methods, sizes, strict=True) if size == usual}
    kept = [i for i, size in enumerate(sizes) if size == usual or methods[i].label not in there]
    alike = all(sizes[i] == usual for i in kept)
    return [methods[i] if alike else groups[i] for i in kept]


def _run_sentence(groups: Sequence[Group], num_groups: int = 0) -> str:
    runs = [run for group in groups for run in group.runs]
    unfinished = [group.label for group in groups if not group.finished]
    note = f" Not finished: {'; '.join(unfinished)}." if unfinished else ""
    more = " Other numbers of workers: in the table, and under scaling." if num_groups > len(groups) else ""
    return f"What was run: {what_was_run(runs)}.{note}{more}"


def _lines_sentence(groups: Sequence[Group]) -> str:
    sizes = sorted({len(group.runs) for group in groups})
    if sizes[-1] == 1:
        return "A line is one run."
    counts = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"A line is the mean over {counts} seeds, its band one standard deviation to either side."
