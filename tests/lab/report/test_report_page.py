"""Figures and the page: what is drawn from which data, labels that do not overlap, and a page that needs nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from io import StringIO
from itertools import combinations
from pathlib import Path

import pytest
from helpers.command import thinwire
from helpers.report_runs import write_run

from thinwire import __version__
from thinwire.lab.cli import main
from thinwire.lab.files import read_json
from thinwire.lab.report import write, write_report
from thinwire.lab.report.bar_figures import by_workers, iteration_time, speed, step_time
from thinwire.lab.report.captioned_figures import captioned_figures
from thinwire.lab.report.consensus import best_of_each, experiment
from thinwire.lab.report.groups import grouped
from thinwire.lab.report.legend import add_legend
from thinwire.lab.report.metrics import main_metric, metric
from thinwire.lab.report.runs import find
from thinwire.lab.report.style import logarithmic, new_figure, save, styled

SPARSE = "Gradients(Mean(chain(TopK(ratio=0.005), QSGD(bits=4)), ErrorFeedback()))"
RUN_FIGURES = {"metric-epochs", "metric-bytes", "metric-seconds", "loss", "step-time"}
WATCHED = {
    "consensus_distance": lambda step: 2.0 / step,
    "variance": 0.3,
    "levels": lambda step: [-1.0, -0.5 / step, 0.5 / step, 1.0],
    "data_seconds": 0.03,
}


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    """Runs that measured all there is, on one and four workers, a broken one, and an experiment of consensus."""
    folder = tmp_path_factory.mktemp("everything")
    for seed in (0, 1):
        for workers in (1, 4):
            for strategy, sent in (("Gradients(Mean())", 4e8), (SPARSE, 1e6)):
                name = f"{strategy[15:20]}{workers}-{seed}"
                measured = WATCHED | {"rate": 1000.0 * workers + seed}
                config = {"strategy": strategy, "workers": workers, "seed": seed}
                write_run(folder / "runs" / name, 0.9 + 0.01 * seed, sent * (workers > 1), measured, **config)
    write_run(folder / "runs" / "broken <b>", strategy=SPARSE, seed=7)
    (folder / "runs" / "broken <b>" / "summary.json").unlink()
    rows = [
        {
            "averager": f"Choco(step_size={g})",
            "step_size": g,
            "round": k,
            "bits_sent": 1e6 * k,
            "squared_error": rate**k,
        }
        for g, rate in ((0.5, 0.5), (1.0, 0.1))
        for k in range(8)
    ]
    rows += [
        {"averager": "Mix()", "step_size": None, "round": k, "bits_sent": 3e7 * k, "squared_error": 0.2**k}
        for k in range(8)
    ]
    (folder / "consensus.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def report(everything, tmp_path_factory) -> Path:
    """Everything, reported on by the command; `printed` is what it printed."""
    out = tmp_path_factory.mktemp("report")
    runs = [str(everything / "runs"), str(everything / "consensus.json")]
    with redirect_stdout(StringIO()) as printed:
        code = main(["report", *runs, "--out", str(out), "--names", "Gradients(Mean())=dense", "--title", "All & more"])
    assert code == 0
    (out / "printed").write_text(printed.getvalue())
    return out


class Page(HTMLParser):
    """The elements of a page, and whether they are nested as they should be."""

    VOID = {"meta", "path", "use", "rect", "line", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.open, self.elements, self.captions, self.words = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if "figcaption" in self.open:
            self.captions.append(data)


def test_the_page_is_whole_and_needs_nothing_else(report):
    text = (report / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    tags = [tag for tag, _ in page.elements]
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(tags)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href"):
                assert value.startswith("#"), (tag, name, value)
    fetched = re.findall(r"url\(([^)]*)\)|@import", text)
    assert all(target.startswith("#") for target in fetched)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in fetched} <= set(ids)
    assert ("viewport" in text) and ("@media print" in text) and ("prefers-color-scheme" in text)


def test_every_figure_has_a_caption_that_says_what_was_run(report):
    page = Page((report / "report.html").read_text())
    tags = [tag for tag, _ in page.elements]
    assert tags.count("figure") == tags.count("figcaption") == tags.count("svg") == 12
    captions = " ".join(page.captions)
    assert captions.count("recipe digits") == 10 and captions.count("seeds 0 and 1") == 10
    assert "consensus.json" in captions and "MB (10⁶ bytes)" in captions
    words = " ".join(page.words)
    assert (
        "All & more" in words
        and f"Made by thinwire {__version__}." in words
        and "8 finished runs of 4 methods, 1 unfinished" in words
    )
    assert "broken <b>" in words and "not finished: its last row is of step 40" in words


def test_every_figure_comes_in_three_formats_with_text_in_it(report):
    names = {path.stem for path in (report / "figures").iterdir()}
    more = {
        "consensus-distance",
        "variance",
        "levels",
        "scaling",
        "iteration-time",
        "consensus-bits",
        "consensus-rounds",
    }
    assert names == RUN_FIGURES | more
    for name in names:
        svg = (report / "figures" / f"{name}.svg").read_text()
        assert len(re.findall(r"<text\b", svg)) >= 4, name
        assert (report / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert (report / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    svg = (report / "figures" / "metric-bytes.svg").read_text()
    assert "sent by each worker (MB, log scale)" in svg and "test accuracy (%)" in svg and "ErrorFeedback())" in svg


def test_the_same_report_has_the_same_bytes(report, everything, tmp_path, monkeypatch):
    """Of the pictures the page has the SVG; of the files that it does not have one is drawn, for each takes a second."""
    runs, made_by = [everything / "runs", everything / "consensus.json"], f"thinwire {__version__}"

    def save_compared(figure, path):
        if path.suffix == ".svg" or path.name == "loss.pdf":
            save(figure, path)

    monkeypatch.setattr(write, "save", save_compared)
    write_report(runs, tmp_path, title="All & more", made_by=made_by, names={"Gradients(Mean())": "dense"})
    for name in ("report.html", "table.csv", "figures/loss.svg", "figures/loss.pdf"):
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes(), name


def drawn(folder: Path) -> set[str]:
    found = find([folder])
    drawings = captioned_figures(grouped(found.runs), main_metric(found.runs, None), found.consensus)
    assert all(drawing.needs for drawing in drawings if drawing.figure is None)
    return {drawing.name for drawing in drawings if drawing.figure is not None}


def test_what_was_not_measured_is_left_out(tmp_path):
    write_run(tmp_path / "a")
    assert drawn(tmp_path) == RUN_FIGURES
    rows = [{"step": step, "loss": 1.0 / step} for step in (1, 2)]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert drawn(tmp_path) == {"loss"}


@pytest.mark.parametrize("key", ["consensus_distance", "variance", "levels"])
def test_what_was_measured_is_drawn(key, tmp_path):
    write_run(tmp_path / "a", measured={key: WATCHED[key]})
    assert drawn(tmp_path) == RUN_FIGURES | {key.replace("_", "-")}


def test_a_loss_that_diverged_ends_its_line(tmp_path):
    write_run(tmp_path / "a", measured={"loss": lambda step: 1.0 if step < 25 else None})
    found = find([tmp_path])
    (loss,) = [d for d in captioned_figures(grouped(found.runs), None, {}) if d.name == "loss"]
    (line,) = [line for line in loss.figure.axes[0].lines if len(line.get_xdata()) > 1]
    assert list(line.get_xdata()) == [1, 2]


def test_runs_that_this_user_may_not_read_are_problems_of_the_report(tmp_path, monkeypatch, capsys):
    """One that could not be listed was left out without a word, and one that could only be listed was a traceback."""
    for name in ("listed", "locked", "open", "unread"):
        write_run(tmp_path / name)
    (tmp_path / "unread" / "metrics.jsonl").unlink()
    (tmp_path / "unread" / "metrics.jsonl").mkdir()  # reading it fails for root too; it was said to be missing

    def denying(real, *names):
        def call(path, *arguments, **options):
            if {*names} & {*Path(path).parts}:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        return call

    monkeypatch.setattr(os, "scandir", denying(os.scandir, "locked"))
    monkeypatch.setattr(os, "stat", denying(os.stat, "listed"))
    monkeypatch.setattr("thinwire.lab.report.runs.read_json", denying(read_json, "listed"))
    found = find([tmp_path])
    assert [run.folder.name for run in found.runs] == ["open"]
    for path in (tmp_path / "locked", tmp_path / "listed" / "config.json"):
        assert (path, "cannot be read (Permission denied); left out") in found.problems
    assert (tmp_path / "unread", "metrics.jsonl cannot be read; left out") in found.problems
    # Named itself, it is one line.
    assert main(["watch", str(tmp_path / "listed"), "--once"]) == 2
    assert capsys.readouterr().err == (
        f"thinwire: cannot use {tmp_path / 'listed' / 'config.json'}: Permission denied; give another, or ask its owner\n"
    )


def test_a_folder_whose_name_is_no_utf8_is_in_the_report(tmp_path, capsys):
    name = os.fsdecode(b"caf\xe9")
    runs = [write_run(tmp_path / "runs" / name / text, data={"folder": text}) for text in ("a", name)]
    for run in runs:
        keep_only(run, "loss")
    (runs[0] / "summary.json").unlink()
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "caf?" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert main(["watch", "a" * 5000]) == main(["report", "a" * 5000]) == 2
    said = capsys.readouterr().err
    assert said.count(": File name too long; give another, or ask its owner") == said.count("\n") == 2


def keep_only(run: Path, *keys: str) -> None:
    """Remove all other values from a run's rows, so that few figures are drawn."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: row[key] for key in ("step", *keys)} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def test_an_unfinished_method_is_drawn_and_said_to_be_so(tmp_path):
    finished, unfinished = write_run(tmp_path / "a"), write_run(tmp_path / "b", strategy=SPARSE)
    (unfinished / "summary.json").unlink()
    for run in (finished, unfinished):
        keep_only(run, "loss")
    write_report([tmp_path], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"Not finished: {SPARSE}." in page
    assert f"| `{SPARSE}` | 0 | – |" in (tmp_path / "out" / "table.md").read_text()


def test_a_figure_that_is_no_longer_drawn_is_removed(tmp_path):
    keep_only(write_run(tmp_path / "runs" / "a", measured={"variance": 0.1}), "variance")
    write_report([tmp_path / "runs"], tmp_path / "out")
    assert (tmp_path / "out" / "figures" / "variance.svg").exists()
    keep_only(write_run(tmp_path / "other" / "a"))
    write_report([tmp_path / "other"], tmp_path / "out")
    assert not (tmp_path / "out" / "figures" / "variance.svg").exists()


def test_phases_of_a_step_and_speeds_are_means(everything):
    runs = find([everything / "runs"]).runs
    dense = [run for run in runs if run.label == "Gradients(Mean())"]
    # Four rows of so many seconds each, over 40 steps.
    expected = {
        "data_seconds": 3.0,
        "compute_seconds": 5.0,
        "encode_seconds": 2.0,
        "wait_seconds": 2.0,
        "decode_seconds": 1.0,
    }
    assert step_time(dense) == pytest.approx(expected)
    assert [(s.workers, s.mean, s.std) for s in by_workers(dense, speed)] == [
        (1, pytest.approx(1000.5), pytest.approx(0.5**0.5)),
        (4, pytest.approx(4000.5), pytest.approx(0.5**0.5)),
    ]


def test_the_time_of_an_iteration_is_that_between_two_rows(tmp_path):
    """Steps of 100 ms, but for a test in one interval; on the network 5 ms for each worker."""
    for workers in (2, 4):
        measured = {
            "seconds": lambda step: step / 10 + 30.0 * (step > 20),
            "virtual_seconds": lambda step, workers=workers: 0.005 * workers * step,
        }
        write_run(tmp_path / str(workers), **{"measured": measured, "workers": workers})
    runs = find([tmp_path]).runs
    expected = [(2, pytest.approx(100), 0.0), (4, pytest.approx(100), 0.0)]
    assert by_workers(runs, iteration_time) == expected
    assert [p.mean for p in by_workers(runs, partial(iteration_time, key="virtual_seconds"))] == [
        pytest.approx(10),
        pytest.approx(20),
    ]
    assert {"iteration-time", "virtual-iteration-time"} <= drawn(tmp_path)
    row = runs[0].rows[-1]
    tested = replace(runs[0], rows=[*runs[0].rows, {**row, "seconds": row["seconds"] + 9.0}])  # no step after that row
    assert iteration_time(tested) == iteration_time(runs[0])


def test_the_best_step_size_of_an_averager_stands_for_it(everything):
    rows = json.loads((everything / "consensus.json").read_text())
    chosen = best_of_each(rows, 1e-4)
    assert list(chosen) == ["Choco(), step size 1", "Mix()"]
    assert chosen["Choco(), step size 1"][-1]["squared_error"] == pytest.approx(1e-7)


def test_each_setting_of_a_consensus_sweep_has_its_own_best_step_size(everything):
    rows = json.loads((everything / "consensus.json").read_text())
    swept = [row | {"workers": workers, "seed": 3} for workers in (4, 8) for row in rows]
    assert list(best_of_each(swept, 1e-4)) == [
        *("Choco(), 4 workers, step size 1", "Mix(), 4 workers"),
        *("Choco(), 8 workers, step size 1", "Mix(), 8 workers"),
    ]
    assert experiment(swept) == "7 rounds, 4 workers and 8 workers, seed 3"


LABELS = [
    "Gradients(Mean())",
    SPARSE,
    "Gossip(Choco(Ring(), TopK(ratio=0.1)))",
    SPARSE.replace("0.005", "0.0005") + ", 16 workers",
]


@pytest.mark.parametrize("num_lines", [1, 3, 9])
def test_the_legend_is_whole_and_outside_the_axes(num_lines):
    with styled():
        figure = new_figure(layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel("x")
        axes.set_ylabel("y")
        for i in range(num_lines):
            axes.plot([0.5, i + 1], [50, 90 + i], label=f"{LABELS[i % 4]} {i}")
        add_legend(axes, 3.0)
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        boxes = [text.get_window_extent(renderer) for text in figure.legends[0].get_texts()]
        inner = axes.get_tightbbox(renderer)
    assert len(boxes) == num_lines
    page = figure.bbox
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.x1 and box.y1 <= page.y1
        assert not box.overlaps(inner)
    for a, b in combinations(boxes, 2):
        assert not a.overlaps(b)
    assert inner.x0 >= 0 and inner.y0 >= 0
    assert axes.get_window_extent(renderer).height > 1.8 * figure.dpi, "the axes keep their size"


def test_a_figure_must_have_a_known_format(tmp_path):
    with pytest.raises(ValueError, match="must end in .pdf, .png, .svg"):
        save(new_figure(), tmp_path / "a.jpg")


def test_the_axis_shows_the_end_of_the_curves(tmp_path):
    write_run(tmp_path / "a", 0.99, measured={"test_accuracy": lambda step: 0.1 if step == 10 else 0.97 + step / 4000})
    found = find([tmp_path])
    by_epochs = captioned_figures(grouped(found.runs), metric("test_accuracy"), {})[0].figure.axes[0]
    assert 70 < by_epochs.get_ylim()[0] < 97


# ---- the command ----


def test_the_command_reports(report):
    printed = (report / "printed").read_text()
    for words in ("All & more", "dense, 4 workers", "accuracy", "(%) ↑", "not finished", str(report / "report.html")):
        assert words in printed
    assert "dense" in (report / "figures" / "metric-epochs.svg").read_text()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], "runs come first"),
        (["--out", "x"], "runs come first"),
        (["--out", "x", "RUNS"], "runs come first"),
        (["nowhere"], "no run to report on: nowhere does not exist"),
        (["RUNS", "--metric", "test_bleu"], "no run has the metric 'test_bleu'"),
        (["RUNS", "--group", "workerz"], "no run has a field 'workerz'"),
        (["RUNS", "--names", "dense"], "LABEL=NAME, got 'dense'"),
        (["RUNS", "--names", "Mix()=gossip"], "nothing is called 'Mix()'"),
        (["RUNS", "--outt", "x"], "did you mean '--out'"),
        (["RUNS", "--out", "/proc/nowhere"], "cannot write to '/proc/nowhere'"),
    ],
)
def test_a_mistake_is_one_line(arguments, expected, everything, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(str(everything / "runs") if a == "RUNS" else a for a in arguments)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("thinwire: ") and complaint.count("\n") == 1 and expected in complaint


def test_what_training_writes_is_what_a_report_reads_in_a_locale_without_arrows_too(tmp_path):
    """Its tables ended it: "'ascii' codec can't encode character"."""
    options = ("--workers", 1, "--max-steps", 6, "--log-every", 2)
    done = thinwire("train", "digits", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert find([tmp_path / "runs"]).problems == []
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "report", "runs", "--out", "out"],
        cwd=tmp_path,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "(%) ↑" in table and "| `Gradients(Mean())` | 1 |" in table
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"metric-epochs.svg", "loss.svg", "step-time.svg"} <= names
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1e-12, 3.0, "10⁻¹² 10⁻¹⁰ 10⁻⁸ 10⁻⁶ 10⁻⁴ 10⁻² 1"),
        (0.02, 300.0, "0.1 1 10 100"),
        (3e-4, 0.02, "3×10⁻⁴ 10⁻³ 3×10⁻³ 10⁻²"),
    ],
)
def test_ticks_of_an_axis_have_one_form(low, high, labels):
    """There was 0.01 beside 10⁻⁴."""
    axes = new_figure().add_subplot()
    axes.set_ylim(low, high)
    logarithmic(axes, "y")
    ticks = [axes.yaxis.get_major_formatter()(at, 0) for at in axes.yaxis.get_majorticklocs() if low <= at <= high]
    assert " ".join(ticks) == labels


@pytest.mark.parametrize("suffix", [".pdf", ".png", ".svg"])
def test_a_figure_on_a_full_disk_is_one_line(suffix, tmp_path):
    """Matplotlib's writer of PDF raised "'Stream' object has no attribute 'pos'"."""
    path = tmp_path / f"loss{suffix}"
    path.symlink_to("/dev/full")
    with styled():
        figure = new_figure()
        figure.subplots().plot([1, 2])
    with pytest.raises(
        ValueError, match=f"cannot write {path}: No space left on device; choose another file, or free some"
    ):
        save(figure, path)
