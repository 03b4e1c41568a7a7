"""`thinwire plan` as its users meet it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.command import TORCHRUN, python

import thinwire as tw
from thinwire.lab.cli import main
from thinwire.lab.cli.plan import parse_count

ROOT = Path(__file__).parents[3]
SMALL = ["plan", "--workers", "4", "--per-node", "2", "--rate", "100mbit", "--parameters", "1M", "--compute", "0.05"]


def test_the_table_and_the_file_have_every_method(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main([*SMALL, "--json", str(file)]) == 0
    printed, rows = capsys.readouterr().out, json.loads(file.read_text())
    assert "Predicted, not measured" in printed and "4 workers on 2 nodes" in printed
    assert re.search(r" times +times *\n.* fp32 +bf16 .*\n.* speed +speed ", printed)
    steps = [row["step_seconds"] for row in rows]
    assert steps == sorted(steps) and min(steps) > 0
    for row in rows:
        assert repr(tw.parse(row["strategy"])) == row["strategy"] and f"  {row['strategy']}\n" in printed
    shown = [line.split("  ")[1] for line in printed.partition("What to type")[2].splitlines()[1:]]
    near = {row["method"]: row["is_near"] for row in rows}
    assert [near[name] for name in shown] == sorted(near.values(), reverse=True)
    names = {row["method"] for row in rows}
    assert {"DDP, float32", "4 bits, hierarchical", "PowerSGD, rank 4", "gossip, Mix"} <= names
    assert all(row["accuracy"] and row["page"] for row in rows)


def test_the_guide_shows_what_its_command_prints(capsys):
    guide = (ROOT / "docs" / "guide" / "choose.md").read_text()
    command = re.search(r"^thinwire (plan .+)$", guide, re.MULTILINE)
    table = re.search(r"^```text\n(.+?)^```$", guide, re.MULTILINE | re.DOTALL)
    assert main(command[1].split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert table[1].splitlines() == printed


def test_dense_wins_where_it_does(capsys):
    fast = ["--rate", "100gbit", "--latency", "2us", "--compute", "5"]
    assert main(["plan", "--workers", "2", "--parameters", "1M", *fast]) == 0
    assert "Dense wins: nothing near it is 2 % faster than DDP, float32" in " ".join(capsys.readouterr().out.split())


def test_accuracies_are_those_of_the_optimizer(capsys):
    slow = ["--workers", "4", "--rate", "100mbit", "--parameters", "20M"]
    assert main(["plan", *slow, "--optimizer", "adam"]) == 0
    adam = capsys.readouterr().out
    assert main(["plan", *slow, "--optimizer", "AdamW"]) == 0 and capsys.readouterr().out == adam
    assert main(["plan", *slow]) == 0
    any_of_them = capsys.readouterr().out
    assert "2.4 times" in adam and "SGD, not Adam" not in adam
    assert re.search(r"DDP, bfloat16 .* not measured under adam, only under sgd", adam)
    assert re.search(r"4 bits, scatter_reduce .* not measured alone; encodes twice", adam)  # true with any optimizer
    assert re.search(r"4 bits, all_gather is [3-4]\.\d times as fast", " ".join(adam.split()))  # the fastest near dense
    assert main(["plan", *slow, "--optimizer", "muon"]) == 0
    muon = " ".join(capsys.readouterr().out.split())
    assert re.search(r"MuLoCo, every 30 is 3[2-4]\.\d times as fast as DDP, float32", muon)
    # The default under Muon.
    assert re.search(r"8 bits, scatter_reduce +\S+ +\S+ +3\.\d .{,30} loss \+0\.2 % to dense", muon)
    assert re.search(r"4 bits, all_gather .{,60} loss \+4 % to dense", muon)
    assert "SGD, not Adam" in " ".join(any_of_them.split())
    assert main(["plan", "--optimizer", "lion"]) == 2
    assert "lion" in capsys.readouterr().err


def test_a_recipe_and_a_function_give_the_model(tmp_path, capsys, monkeypatch):
    assert main(["plan", "digits", "--workers", "2"]) == 0
    assert "million parameters, 2 workers" in capsys.readouterr().out
    (tmp_path / "mine.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(100, 50)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plan", "--model", "mine:net", "--workers", "2"]) == 0
    assert "0.00505 million parameters" in capsys.readouterr().out


def test_the_module_of_the_model_may_be_a_file_of_the_current_folder(tmp_path):
    text = (
        "import torch\n\ndef net():\n    return torch.nn.Linear(30, 7)\n\ndef inputs():\n    return torch.ones(8, 30)\n"
    )
    (tmp_path / "of_this_folder.py").write_text(text)
    command = Path(sys.executable).with_name("thinwire")  # which puts its own folder first, not the current one
    options = ["--model", "of_this_folder:net", "--workers", "2", "--measure"]
    run = python(command, "plan", *options, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "0.000217 million parameters" in run.stdout


def test_figures_show_the_methods_that_win_somewhere(tmp_path, capsys):
    file, own = tmp_path / "plan.svg", ["--strategies", "Gossip(Mix(Star()))"]
    assert main(["plan", "--workers", "2", "--parameters", "10M", *own, "--figure", str(file)]) == 0
    by_rate, by_workers = file.read_text(), (tmp_path / "plan-workers.svg").read_text()
    assert (
        "bandwidth between nodes, Mb/s" in by_rate and by_rate.count("DDP, float32") == 2
    )  # the legend, and where it wins
    assert "workers" in by_workers and "predicted step, seconds" in by_workers


def test_links_are_measured_between_the_workers_of_a_launcher(tmp_path):
    file = tmp_path / "plan.json"
    options = ["--parameters", "10k", "--compute", "0.01", "--measure", "--json", file]
    run = python(*TORCHRUN, "--nproc-per-node", 2, "-m", "thinwire", "plan", *options, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("2 workers on 1 node,") == 1  # rank 0 alone prints
    assert min(row["step_seconds"] for row in json.loads(file.read_text())) >= 0.01


def test_measured_codecs_and_computation_replace_the_tables(tmp_path, capsys, monkeypatch):
    (tmp_path / "measured.py").write_text(
        "import torch\n\ndef net():\n    return torch.nn.Linear(300, 300)\n\ndef inputs():\n    return (torch.ones(8, 300),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "plan.json"
    assert main(["plan", "--model", "measured:net", "--measure", "--compute", "100", "--json", str(file)]) == 0
    assert max(row["step_seconds"] for row in json.loads(file.read_text())) < 50  # not the 100 s of --compute


def test_strategies_of_ones_own_are_compared_with_the_methods(tmp_path, capsys):
    """Of 8 bits an element over 4 workers, an all-gather sends 3 (1 + 4/512) bytes; nobody counted its memory."""
    file = tmp_path / "plan.json"
    own = ["Gradients(Mean(QSGD(bits=8), exchange='all_gather'))", "Gossip(Mix(Star()))"]
    options = ["--workers", "4", "--parameters", "4194304", "--rate", "100mbit", "--compute", "0.01"]
    assert main(["plan", *options, "--strategies", *own, "--json", str(file)]) == 0
    printed, rows = capsys.readouterr().out, {row["strategy"]: row for row in json.loads(file.read_text())}
    first, second = (rows[text] for text in own)
    assert first["bytes_out"] == 3 * 4194304 * (1 + 4 / 512) and first["step_seconds"] > first["bytes_out"] / 12.5e6
    assert second["bytes_out"] == 3 * 4 * 4194304  # of the star's center
    assert first["memory_bytes"] is second["memory_bytes"] is None
    assert first["accuracy"] == "not measured" and not first["is_near"]
    assert "Gossip(Mix(Star()))" in printed and "DDP, float32" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategies", "Gradients(Mean(QSGD(bits=99)))"], "QSGD: bits must be an integer from 1 to 8, got 99"),
        (["--strategies", "Asynchronous()"], "a plan predicts strategies whose averager has rounds"),
        (["--strategies", "Shards()"], "a plan predicts strategies that have an averager, got 'Shards()'"),
        (["--rate", "fast"], "cannot read the rate"),
        (["--parameters", "many"], "cannot read the number of parameters"),
        (["--parameters", "99999999999999B"], "cannot read the number of parameters"),
        (["--workers", "1000000"], "a plan has at most 10,000 workers, got 1,000,000"),
        (["--rate", "1e400gbit"], "cannot read the number in '1e400gbit'"),
        (["--compute", "inf"], "compute must be 0 seconds or more, and finite, got inf"),
        (["--model", "math:pi"], "--model math:pi must be a function that returns the model, got 3.14"),
        (
            ["--model", "json:dumps"],
            "--model json:dumps must be a function without arguments: missing a required argument: 'obj'",
        ),
        (
            ["--model", "fractions:Fraction"],
            "--model fractions:Fraction must return the model, an nn.Module, got Fraction",
        ),
        (["--workers", "6", "--per-node", "4"], "cannot be nodes of 4"),
        (["--model", "nowhere"], "package.module:function"),
        (["--model", "nowhere:net"], "cannot import"),
        (["nothing"], "unknown recipe"),
        (["digits", "--parameters", "5M"], "leave out --parameters 5M"),
        (["digits", "--model", "nowhere:net"], "has a model of its own"),
    ],
)
def test_mistakes_are_one_line(options, message, capsys):
    recipe = [o for o in options[:1] if not o.startswith("-")]
    assert main(["plan", *recipe, *options[len(recipe) :]]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_counts():
    assert [parse_count(text) for text in ("12", "25M", "1.5B", "3k")] == [12, 25_000_000, 1_500_000_000, 3000]
