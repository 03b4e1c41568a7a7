"""Runs, their groups and their table, against NumPy; and runs that are broken."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from helpers.report_runs import STEPS, write_run
from rich.console import Console

from thinwire.lab.report import accuracy_against_bytes, read_run, summary_table, write_report
from thinwire.lab.report.groups import differing, grouped, what_was_run
from thinwire.lab.report.mean_curve import curve
from thinwire.lab.report.metrics import main_metric, metric, on_test_sets
from thinwire.lab.report.runs import Run, find
from thinwire.lab.report.tables import as_csv, as_markdown, comparison
from thinwire.lab.train import RunConfig
from thinwire.lab.train.folder.run_folder import check_same_run

SPARSE = "Gradients(Mean(TopK(ratio=0.01), ErrorFeedback()))"
ACCURACIES = {"Gradients(Mean())": (0.91, 0.93, 0.98), SPARSE: (0.90, 0.95)}
SENT = {"Gradients(Mean())": 4e8, SPARSE: 1e7}
HUGE = pytest.param(10**400, id="huge")  # no float can hold it


@pytest.fixture
def runs(tmp_path) -> Path:
    """Two methods; three seeds of one, two of the other."""
    for strategy, accuracies in ACCURACIES.items():
        for seed, accuracy in enumerate(accuracies):
            name = f"{strategy[10:18]}-{seed}"
            write_run(tmp_path / "runs" / name, accuracy, SENT[strategy], strategy=strategy, seed=seed, name=name)
    return tmp_path / "runs"


def table_of(*paths, **options):
    found = find(paths)
    return comparison(grouped(found.runs, **options), main_metric(found.runs, None))


@pytest.mark.parametrize("differs", [{"workers": 2}, {"epochs": 3}, {"max_steps": 7}, {}])
def test_nothing_is_best_among_runs_of_other_sizes(tmp_path, differs):
    write_run(tmp_path / "a", 0.9, 4e8, strategy="Gradients(Mean())", name="a")
    write_run(tmp_path / "b", 0.8, 1e7, strategy=SPARSE, name="b", **differs)
    text = as_markdown(table_of(tmp_path))
    assert ("**" in text) == (not differs)
    words = {"workers": "2 workers", "epochs": "epochs=3", "max_steps": "max_steps=7"}
    assert all(words[key] in text for key in differs), text


def test_links_that_lead_in_a_circle_are_followed_once(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a" / "run")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    walked, walk = [], os.walk
    monkeypatch.setattr(
        os, "walk", lambda *given, **options: (walked.append(at) or at for at in walk(*given, **options))
    )
    assert [found.folder for found in find([tmp_path]).runs] == [run]
    assert len(walked) < 6


def test_a_terminal_of_80_columns_shows_all_of_the_table_of_a_few_runs(runs):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table(find([runs]).runs[:1], "one run"))
    text = console.export_text()
    for shown in ("one run", "accuracy", "vs fp32", "vs bf16", "seconds ↓", "4.00"):
        assert shown in text
    assert "…" not in text


def test_means_and_deviations_over_seeds(runs):
    table = table_of(runs)
    records = list(csv.DictReader(io.StringIO(as_csv(table))))
    assert [record["method"] for record in records] == ["Gradients(Mean())", SPARSE]  # the best first
    for record in records:
        accuracies = 100 * np.array(ACCURACIES[record["method"]])
        sent = SENT[record["method"]]
        expected = {
            "test_accuracy_percent_mean": accuracies.mean(),
            "test_accuracy_percent_std": accuracies.std(ddof=1),
            "test_loss_mean": 1 - accuracies.mean() / 100,
            "megabytes_sent_per_worker_mean": sent / 1e6,
            "compression_vs_fp32_mean": 8e8 / sent,
            "compression_vs_bf16_mean": 4e8 / sent,
            "seconds_mean": 4.0,
            "seconds_std": 0.0,
        }
        assert {key: float(record[key]) for key in expected} == pytest.approx(expected)
        assert int(record["runs"]) == len(accuracies)


def test_markdown_says_which_way_is_better_and_what_is_best(runs):
    head, _, dense, sparse = as_markdown(table_of(runs)).splitlines()
    assert "test accuracy (%) ↑" in head and "test loss ↓" in head and "MB per worker ↓" in head
    assert dense.startswith("| `Gradients(Mean())` | 3 | **94.00 ± 3.61** | 400 |")
    assert sparse.startswith(f"| `{SPARSE}` | 2 | 92.50 ± 3.54 | **10.0** | **80.0** |")


def test_one_run_has_no_deviation(tmp_path):
    write_run(tmp_path / "a", 0.9)
    (line,) = table_of(tmp_path).lines
    assert line.cells[0][:3] == (pytest.approx(90), None, "90.00") and not line.cells[0].is_best


def test_curves_are_means_at_the_steps_that_all_seeds_share(runs):
    members = [run for run in find([runs]).runs if run.label == "Gradients(Mean())"]
    members[0].rows.pop(1)
    found = curve(members, itemgetter("seconds"), "test_accuracy", 100.0)
    share = np.array([step for step in STEPS if step != 20]) / STEPS[-1]
    each = 100 * np.outer(ACCURACIES["Gradients(Mean())"], share)
    np.testing.assert_allclose(found.x, [1, 3, 4])
    np.testing.assert_allclose(found.y, each.mean(axis=0))
    np.testing.assert_allclose(found.std, each.std(axis=0, ddof=1))


def test_groups_are_what_differs_but_for_the_seed(tmp_path):
    fast = {"learning_rate": 0.1, "schedule": {"shape": "cosine"}}
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", seed=seed, name=f"a{seed}", output=str(seed))
        write_run(tmp_path / f"b{seed}", seed=seed, optimizer=fast)
        write_run(tmp_path / f"c{seed}", seed=seed, workers=1)
    runs = find([tmp_path]).runs
    assert set(differing(runs)) == {"optimizer.learning_rate", "workers"}
    labels = {group.label: len(group.runs) for group in grouped(runs)}
    assert labels == {
        "4 workers, learning_rate=0.05": 2,
        "4 workers, learning_rate=0.1": 2,
        "1 worker, learning_rate=0.05": 2,
    }
    assert {group.label: len(group.runs) for group in grouped(runs, ["workers"])} == {"4 workers": 4, "1 worker": 2}
    said = what_was_run(runs)
    for words in ("recipe digits", "1 and 4 workers", "40 steps (4 epochs)", "test_fraction=0.3", "seeds 0 and 1"):
        assert words in said


def test_what_follows_from_the_strategy_is_not_in_the_name(tmp_path):
    write_run(tmp_path / "a", strategy="Gradients(dgc())", optimizer={"momentum": 0.0})
    for seed in (0, 1):
        write_run(tmp_path / f"b{seed}", optimizer={"momentum": 0.9}, seed=seed)
    runs = find([tmp_path]).runs
    assert {g.label: len(g.runs) for g in grouped(runs)} == {"Gradients(dgc())": 1, "Gradients(Mean())": 2}
    assert {g.label: len(g.runs) for g in grouped(runs, names={"Gradients(Mean())": "dense"})} == {
        "Gradients(dgc())": 1,
        "dense": 2,
    }


def test_the_metric_is_what_the_summaries_name(tmp_path):
    folder = write_run(tmp_path / "a", measured={"test_perplexity": 20.0})
    assert main_metric(find([tmp_path]).runs, None).key == "test_accuracy"
    summary = json.loads((folder / "summary.json").read_text()) | {"metric": "test_perplexity"}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert main_metric(find([tmp_path]).runs, None).key == "test_perplexity"
    assert main_metric(find([tmp_path]).runs, "test_loss").key == "test_loss"


def test_runs_of_several_tasks_are_compared_by_the_metric_of_most(tmp_path):
    for name, metric_of_task in (("a", "early"), ("b", "late"), ("c", "late")):
        folder = write_run(tmp_path / name, measured={f"test_{metric_of_task}": 1.0})
        summary = json.loads((folder / "summary.json").read_text()) | {"metric": f"test_{metric_of_task}"}
        (folder / "summary.json").write_text(json.dumps(summary))
    assert main_metric(find([tmp_path]).runs, None).key == "test_late"


def test_levels_are_no_metric_to_compare_by():
    runs = [Run("diverged", {}, [{"step": 1, "levels": [[0.0, 1.0]], "loss": None}])]
    assert main_metric(runs, "loss").key == "loss"
    with pytest.raises(ValueError, match="no run has the metric 'levels'"):
        main_metric(runs, "levels")


def test_a_field_that_an_older_run_does_not_have_sets_it_apart(tmp_path):
    write_run(tmp_path / "old")
    write_run(tmp_path / "new", clip=None)
    assert {group.label for group in grouped(find([tmp_path]).runs)} == {"clip=not set", "clip=None"}


def test_unknown_fields_and_names_are_one_line(tmp_path):
    write_run(tmp_path / "a")
    runs = find([tmp_path]).runs
    with pytest.raises(ValueError, match="no run has a field 'learning_rat' to group by.*optimizer.learning_rate"):
        grouped(runs, ["learning_rat"])
    with pytest.raises(ValueError, match=r"nothing is called 'Mix\(\)'; there are: Gradients\(Mean\(\)\)"):
        grouped(runs, names={"Mix()": "gossip"})
    with pytest.raises(ValueError, match="no run has the metric 'test_bleu'.*test_accuracy, test_loss"):
        main_metric(runs, "test_bleu")


def test_metrics_of_every_kind_know_their_direction(tmp_path):
    more = {"test_top5_accuracy": 0.99, "test_perplexity": 20.0, "test_bleu": 30.0, "mean_model_test_perplexity": 21.0}
    write_run(tmp_path / "a", measured=more | {"test_odd": 1.0})
    found = [(m.key, m.higher_is_better) for m in on_test_sets(find([tmp_path]).runs)]
    assert found == [
        ("test_accuracy", True),
        ("test_bleu", True),
        ("test_top5_accuracy", True),
        ("test_perplexity", False),
        ("test_loss", False),
        ("test_odd", None),
        ("mean_model_test_perplexity", False),
    ]
    assert metric("test_bleu").best([1, 3]) == 3 and metric("test_loss").best([1, 3]) == 1


def test_the_summaries_say_which_direction_of_an_own_metric_is_better(tmp_path):
    for seed, error in ((1, 3.0), (2, 1.0)):
        folder = tmp_path / str(seed)
        write_run(folder, seed=seed, measured={"test_error": error})
        path = folder / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metric": "test_error", "lower_is_better": True}))
    main = main_metric(find([tmp_path]).runs, None)
    assert main.arrow == " ↓" and main.best([3.0, 1.0]) == 1.0
    assert main_metric(find([tmp_path]).runs, "test_error") == main and metric("test_error").higher_is_better is None


def test_a_run_that_diverged_leaves_no_mean(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1)
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    summary["final"]["test_loss"] = None
    (tmp_path / "b" / "summary.json").write_text(json.dumps(summary))
    table = table_of(tmp_path)
    at = [m.key for m in table.columns].index("test_loss")
    assert table.lines[0].cells[at].text == "diverged in 1 of 2" and table.lines[0].cells[at].mean is None


def test_a_single_worker_sends_nothing(tmp_path):
    write_run(tmp_path / "a", sent=0.0, workers=1)
    assert not {m.key for m in table_of(tmp_path).columns} & {"bytes_sent_per_worker", "compression_vs_fp32"}


@pytest.fixture
def broken(tmp_path) -> Path:
    """One good run, and one of each kind of damage."""
    for name in ("good", "no-summary", "half-line", "empty", "no-config", "bad-config", "no-metrics", "bad-summary"):
        write_run(tmp_path / "runs" / "below" / name, seed=len(name))
    below = tmp_path / "runs" / "below"
    (below / "no-summary" / "summary.json").unlink()
    metrics = below / "half-line" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-30])
    (below / "half-line" / "summary.json").unlink()
    (below / "empty" / "metrics.jsonl").write_text("")
    (below / "no-config" / "config.json").unlink()
    (below / "bad-config" / "config.json").write_text("[1, 2")
    (below / "no-metrics" / "metrics.jsonl").unlink()
    (below / "bad-summary" / "summary.json").write_text("{")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_broken_runs_are_named_and_the_others_read(broken, tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    found = find([broken, broken / "notes", broken / "gone", tmp_path / "other.json"])
    said = {problem.path.name: problem.text for problem in found.problems}
    assert said == {
        "no-summary": "not finished: its last row is of step 40",
        "half-line": "line 4 of metrics.jsonl cannot be read; not finished: its last row is of step 30",
        "empty": "metrics.jsonl is empty; left out",
        "no-config": "config.json is missing; left out",
        "bad-config": "config.json cannot be read; left out",
        "no-metrics": "metrics.jsonl is missing; left out",
        "bad-summary": "summary.json cannot be read; not finished: its last row is of step 40",
        "notes": "holds no run",
        "gone": "does not exist",
        "other.json": "is neither a run's folder nor what thinwire consensus --json writes; left out",
    }
    assert sorted(run.folder.name for run in found.runs) == ["bad-summary", "good", "half-line", "no-summary"]
    (line,) = comparison(grouped(found.runs), main_metric(found.runs, None)).lines
    assert line.num_runs == 1  # unfinished runs are no part of a mean


def test_a_run_with_an_empty_configuration_is_named(tmp_path):
    write_run(tmp_path / "good")
    (write_run(tmp_path / "bad") / "config.json").write_text("{}")
    (problem,) = find([tmp_path]).problems
    assert problem.text == "config.json does not hold what a run writes: it is empty; left out"


@pytest.mark.parametrize("workers", ["x", None, 0, -3, 1.5, True, [1, 2], {"a": 1}, HUGE])
def test_a_run_whose_number_of_workers_cannot_be_is_left_out(workers, tmp_path):
    """Figures compare it, divide by it, and draw it on a logarithmic axis."""
    write_run(tmp_path / "good")
    write_run(tmp_path / "bad", workers=workers)
    found = find([tmp_path])
    (problem,), (run,) = found.problems, found.runs
    said = "config.json does not hold what a run writes: workers must be an integer"
    assert problem.text.startswith(said) and problem.text.endswith("; left out")
    assert (problem.path.name, run.folder.name) == ("bad", "good")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", math.nan),
        ("seconds", math.inf),
        pytest.param("step", 10**400, id="step-huge"),
        pytest.param("bytes_sent", 10**400, id="bytes_sent-huge"),
        ("levels", ["x"]),
        ("levels", [math.nan]),
    ],
)
def test_a_row_of_what_is_no_number_is_left_out(key, value, tmp_path):
    """JSON has no NaN, and a float cannot hold every integer; what training writes is null."""
    folder = write_run(tmp_path / "run")
    kept = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(kept + json.dumps({"step": 50} | {key: value}) + "\n")
    found = find([tmp_path])
    (problem,), (run,) = found.problems, found.runs
    assert problem.text == "line 5 of metrics.jsonl cannot be read"
    assert [row["step"] for row in run.rows] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("averager", 5),
        ("round", None),
        ("bits_sent", "many"),
        ("squared_error", "small"),
        ("squared_error", 0.0),
        ("step_size", "large"),
        ("shape", 4),
        ("bits_sent", 0),
    ],
)
def test_a_consensus_file_with_a_value_that_cannot_be_is_named(key, value, tmp_path):
    """Figures divide by the error at the start, and their axis of bits is logarithmic."""
    row = {"averager": "Mix()", "round": 0, "bits_sent": 0, "squared_error": 2.0, "step_size": None, "shape": [4, 4]}
    rows = [row, row | {"round": 1, "bits_sent": 64, "squared_error": None}]
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(rows))
    bad.write_text(json.dumps([row | {key: value} for row in rows]))
    found = find([good, bad])
    assert found.consensus == {good: rows}
    assert found.problems == [(bad, "is neither a run's folder nor what thinwire consensus --json writes; left out")]


def test_files_that_begin_with_a_byte_order_mark_are_read(tmp_path):
    folder = write_run(tmp_path / "run")
    for name in ("config.json", "summary.json"):
        (folder / name).write_text((folder / name).read_text(), encoding="utf-8-sig")
    found = find([tmp_path])
    assert found.problems == [] and found.runs[0].finished


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    write_run(tmp_path / "a")
    (write_run(tmp_path / "b") / "config.json").unlink()
    found = find([tmp_path, tmp_path / "a", tmp_path / "b"])
    assert (len(found.runs), len(found.problems)) == (1, 1)


def test_a_seed_that_counts_twice_is_named(tmp_path):
    for name, seed in (("a", 1), ("b", 2), ("c", 2), ("d", 2)):
        write_run(tmp_path / "runs" / name, seed=seed, name=name)
    (tmp_path / "runs" / "d" / "summary.json").unlink()  # an unfinished run is in no mean
    report = write_report([tmp_path / "runs"], tmp_path / "report")
    said = {problem.path.name: problem.text for problem in report.problems}
    assert f"the seed of {tmp_path / 'runs' / 'b'}; both count" in said.pop("c")
    assert said.keys() == {"d"} and said["d"].startswith("not finished")


def test_brackets_in_a_title_are_shown(runs):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(summary_table(find([runs]).runs[:1], "[red] runs [/b]"))
    assert "[red] runs [/b]" in console.export_text()


def test_no_run_at_all_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=f"no run to report on: {tmp_path} holds no run"):
        find([tmp_path])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", "{", r"summary.json is damaged \(Expecting property name"),
        ("summary.json", "[]", r"summary.json is damaged \(expected a JSON object, got list"),
        (
            "summary.json",
            '{"strategy": "Gradients(Mean())", "final": {}, "seconds": "many"}',
            "summary.json is damaged: it does not hold",
        ),
        ("metrics.jsonl", '{"step": 1}\nhalf', "metrics.jsonl is damaged: line 2 of metrics.jsonl cannot be read"),
        (
            "metrics.jsonl",
            '{"step": 1, "loss": "low"}',
            "metrics.jsonl is damaged: line 1 of metrics.jsonl cannot be read",
        ),
    ],
)
def test_a_damaged_file_is_named(name, text, message, tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path / "run")


def test_a_report_goes_on_without_a_summary_that_has_no_numbers(tmp_path):
    write_run(tmp_path / "whole")
    write_run(tmp_path / "odd", seed=1)
    (tmp_path / "odd" / "summary.json").write_text('{"final": 3, "bytes_sent_per_worker": "x"}')
    found = find([tmp_path])
    (problem,) = found.problems
    assert "summary.json does not hold what a run writes" in problem.text
    assert comparison(grouped(found.runs), main_metric(found.runs, None)).lines


def test_a_damaged_config_is_named_where_a_run_goes_on(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "config.json").write_text("{half")
    with pytest.raises(ValueError, match=r"run/config.json is damaged \(Expecting property name"):
        check_same_run(RunConfig("digits", output=tmp_path, name="run", resume=True), folder)


def test_dollars_in_a_configuration_are_no_mathematics(tmp_path):
    """An unbalanced brace between dollars made matplotlib fail, and with it the whole report."""
    for number, folder in enumerate(("data$\\frac{$", "data$x^$")):
        write_run(tmp_path / "runs" / str(number), data={"folder": folder})
    report = write_report([tmp_path / "runs"], tmp_path / "report")
    assert "\\frac{" in report.page.read_text()
    runs = [read_run(tmp_path / "runs" / str(number), f"cost $\\frac{{$ {number}") for number in range(2)]
    accuracy_against_bytes(runs, tmp_path / "figure.svg")
    assert "\\frac{" in (tmp_path / "figure.svg").read_text()
