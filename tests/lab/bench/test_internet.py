"""benchmarks/internet.py: a stopped run ends with the same bits, no two processes train one run, and files merge."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import internet
import pytest
import torch
from internet import METHODS, Run, Text, path_of, rows_of, train

SIZES = (
    "--workers 2 --layers 1 --width 16 --context 8 --batch 1 --steps 30 --test-windows 4 --test-every 14 "
    "--part 7 --save-minutes 0"
)


def options(folder: Path, *more: str) -> argparse.Namespace:
    return internet.options_of([str(folder), *SIZES.split(), "--seeds", "0", "1", *more])


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(*(torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).byte() for n in (5000, 500)))


@pytest.fixture
def stop_before(monkeypatch):
    """A function that lets runs stop before a step; its list has the workers' states after the last part."""
    one_part, states = internet.one_part, []

    def stop_before(step: int | None) -> list[Any]:
        def part(run, steps, *rest):
            if steps.start == step:
                raise KeyboardInterrupt
            row, states[:] = one_part(run, steps, *rest)
            return row, list(states)

        monkeypatch.setattr(internet, "one_part", part)
        return states

    return stop_before


@pytest.mark.parametrize("method", ["Streaming DiLoCo", "MuLoCo", "DeMo"])
def test_a_stopped_run_ends_with_the_same_bits(method, text, tmp_path, stop_before):
    """It stops after 21 steps, where Streaming DiLoCo has a round in flight, and while it writes a row."""
    run = Run(method, METHODS[method].rates[1], 30, 5)
    whole, cut = options(tmp_path / "whole", "--part", "30"), options(tmp_path / "cut")
    states = stop_before(None)
    assert train(run, text, whole, inf)
    expected = tensors_of(states)

    stop_before(21)
    with pytest.raises(KeyboardInterrupt):
        train(run, text, cut, inf)
    with path_of(run, cut).open("a") as file:
        file.write('{"step": 28, "lo')
    assert rows_of(run, cut) == []

    stop_before(None)
    assert train(run, text, cut, inf) and not train(run, text, cut, inf)
    tensors = tensors_of(states)
    assert len(tensors) == len(expected) > 20 and all(map(torch.equal, tensors, expected))
    rows, (row,) = rows_of(run, cut), rows_of(run, whole)
    assert [row["step"] for row in rows] == [7, 14, 21, 28, 30]
    assert [row["step"] for row in rows if "loss" in row] == [14, 28, 30]
    assert [rows[-1][key] for key in ("loss", "bytes_sent")] == [row["loss"], row["bytes_sent"]]
    assert row["bytes_sent"] > 0
    assert [path.suffix for path in path_of(run, cut).parent.iterdir()] == [".jsonl"]


def tensors_of(state: Any) -> list[torch.Tensor]:
    """All tensors of nested dictionaries and lists, in their order."""
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [t for one in inner for t in tensors_of(one)]


def test_a_run_does_not_go_on_with_other_settings(text, tmp_path, stop_before):
    run, study = Run("DDP", 1e-3, 30, 0), options(tmp_path)
    stop_before(7)
    with pytest.raises(KeyboardInterrupt):
        train(run, text, study, inf)
    study.test_windows = 8
    with pytest.raises(
        ValueError, match=r"DDP-rate0.001-steps30-seed0.state was begun with test_windows=4, now 8; remove"
    ):
        train(run, text, study, inf)


# ---- the table ----

HEADER = {"parameters": 4400, "text_checksum": 1}


def write(study: argparse.Namespace, run: Run, loss: float, bytes_sent: int, header: dict[str, Any] = HEADER) -> None:
    """A finished run of two rows."""
    rows = [{"step": step, "loss": loss + 1 - step / run.steps, "bytes_sent": bytes_sent * step // run.steps}
            | {"seconds": 240.0, "core_seconds": 90.0} for step in (run.steps // 2, run.steps)]  # fmt: skip
    path = path_of(run, study)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [asdict(run) | header, *rows]))


def test_the_table_of_merged_files(tmp_path):
    """Two machines have trained a seed each, and the files of the second are copied to the first."""
    here, there = (options(tmp_path / name, "--only", "DDP", "SparseLoCo", "DeMo") for name in ("here", "there"))
    num_parameters = internet.num_parameters(here)
    for method, losses in {"DDP": (3.0, 2.0, 4.0), "SparseLoCo": (3.0, 4.0, float("nan"))}.items():
        for run, loss in zip(internet.searches(method, here), losses, strict=True):
            assert (run.steps, run.seed) == (6, 0)
            write(here, run, loss, 100)
    dense, sparse = 30 * 8 * num_parameters, 30 * num_parameters // 2
    write(here, Run("DDP", 1e-3, 30, 0), 2.0, dense)
    write(there, Run("DDP", 1e-3, 30, 1), 2.2, dense)
    write(here, Run("SparseLoCo", 3e-3, 30, 0), 2.1, sparse)
    before = internet.table(here)
    assert before[2].startswith(
        "| DDP | 0.001 | 0.001: 2.000, 0.003: 3.000, 0.01: 4.000 | 2.000 (1) | +0.0% | 8 | 1 | 1.5 |"
    )
    shutil.copytree(there.folder, here.folder, dirs_exist_ok=True)
    rows = internet.table(here)
    assert rows[2].endswith("| 2.100 ± 0.141 (2) | +0.0% | 8 | 1 | 1.5 |")
    assert rows[3].endswith("0.01: nan | 2.100 (1) | +5.0% | 0.5 | 16 | 1.5 |")  # of the one seed that both have
    assert rows[4] == "| DeMo |  |  | not run yet |  |  |  |  |"
    assert "3 of 6 runs are finished, and 6 of 9 short ones. They took 0.23 core-hours" in rows[-1]

    internet.draw(here, tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    assert "SparseLoCo" in drawn and "DeMo" not in drawn
    write(here, Run("SparseLoCo", 3e-3, 30, 1), 2.1, sparse, HEADER | {"text_checksum": 2})
    with pytest.raises(ValueError, match="SparseLoCo and DDP cannot be compared: text_checksum=2 and 1"):
        internet.table(here)


def test_text_is_held_out_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(internet.sysconfig, "get_path", lambda _: str(tmp_path / "python"))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    for folder in ("python", "torch", "python/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        for i in range(100):
            (tmp_path / folder / f"{i}.py").write_text(f"{folder} {i}\n")
    text = Text.read(None, torch.device("cpu"))
    learn, test = (set(bytes(part.tolist()).decode().splitlines()) for part in (text.learn, text.test))
    assert learn | test == {f"{folder} {i}" for folder in ("python", "torch") for i in range(100)}
    assert not learn & test and len(learn) > 5 * len(test) > 0
    assert Text.read(None, torch.device("cpu")).header() == text.header()


def test_a_page_keeps_its_table_where_only_runs_of_another_size_are_finished(tmp_path, capsys):
    here, page = options(tmp_path, "--only", "DDP", "--table", "--docs", str(tmp_path)), tmp_path / "internet.md"
    page.write_text("<!-- comparison: begin -->\nold\n<!-- comparison: end -->\n")
    write(options(tmp_path, "--steps", "60"), Run("DDP", 1e-3, 60, 0), 2.0, 100)
    sizes = "--layers 1 --width 16 --context 8 --workers 2 --batch 1 --steps 60 --device cpu"
    with pytest.raises(ValueError, match=f"{page} stays as it is; {tmp_path} has runs of other sizes: {sizes}$"):
        internet.study(here)
    assert "\nold\n" in page.read_text()
    here.docs = None
    internet.study(here)
    printed = capsys.readouterr()
    assert "not run yet" in printed.out and printed.err.count("\n") == 1 and sizes in printed.err
