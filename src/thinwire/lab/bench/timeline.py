"""A timeline of one training step: the phases of every thread.

The averagers mark their phases with `torch.profiler.record_function` as `thinwire::encode` and so on (see `clock.py`),
the benchmark marks forward, backward and optimizer. Here the profiler records one step, and matplotlib draws it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PREFIX = "thinwire::"
COLORS = {
    "forward": "#b0bec5",
    "backward": "#90a4ae",
    "optimizer": "#607d8b",
    "compensate": "#8e24aa",
    "encode": "#1e88e5",
    "exchange": "#f4511e",
    "wait": "#ffcc80",
    "decode": "#43a047",
    "blocked": "#fff3e0",
}


class Span(NamedTuple):
    """One phase on one thread; times in milliseconds since the step began."""

    name: str
    thread: int
    start_ms: float
    end_ms: float


def record(step: Callable[[], None]) -> list[Span]:
    """Run `step` under PyTorch's profiler and return its marked phases, in order of time."""
    from torch._C._profiler import _ExperimentalConfig  # the only way to record other threads than the caller's
    from torch.profiler import ProfilerActivity, profile

    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return spans_of(json.loads(path.read_text()))


def spans_of(trace: dict) -> list[Span]:
    """The marked phases in a Chrome trace, whose times are in microseconds."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].removeprefix(PREFIX) in COLORS]
    events.sort(key=lambda e: e["ts"])
    return [
        Span(
            e["name"].removeprefix(PREFIX),
            e["tid"],
            (e["ts"] - events[0]["ts"]) / 1e3,
            (e["ts"] - events[0]["ts"] + e["dur"]) / 1e3,
        )
        for e in events
    ]


def draw(steps: dict[str, list[Span]], path: Path) -> None:
    """Draw one panel per method and one lane per thread, on a common time axis."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.0 + 1.9 * len(steps)), layout="constrained")
    panels = figure.subplots(len(steps), sharex=True, squeeze=False)[:, 0]
    for axes, (method, spans) in zip(panels, steps.items(), strict=True):
        _draw_step(axes, method, spans)
    panels[-1].set_xlabel("milliseconds since the step began")
    figure.legend(
        handles=[Patch(color=c, label=name) for name, c in COLORS.items()],
        loc="outside lower center",
        ncols=9,
        columnspacing=1.0,
        handlelength=1.5,
    )
    figure.savefig(path)


def _draw_step(axes, method: str, spans: list[Span]) -> None:
    threads = list(dict.fromkeys(span.thread for span in spans))  # the training thread is the first
    for name, color in COLORS.items():
        chosen = [span for span in spans if span.name == name]
        # Phases of an averager that run within backward are drawn over it, a little narrower.
        height = 0.8 if name in ("forward", "backward", "optimizer") else 0.55
        axes.barh(
            [threads.index(span.thread) for span in chosen],
            [span.end_ms - span.start_ms for span in chosen],
            left=[span.start_ms for span in chosen],
            height=height, color=color, edgecolor="white", linewidth=0.4,
        )  # fmt: skip
    axes.set_yticks(range(len(threads)), ["training thread", *[f"thread {i}" for i in range(1, len(threads))]])
    axes.invert_yaxis()
    axes.set_title(f"{method}: {max(span.end_ms for span in spans):.0f} ms", fontsize=9, loc="left")
