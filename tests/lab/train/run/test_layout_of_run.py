"""`thinwire train --measure-lines`: the layout is measured once, kept with the run, and used again by --resume."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.command import thinwire

from thinwire.comm import Layout, LocalWorld
from thinwire.lab.recipes import recipes
from thinwire.lab.train.run.layout import LAYOUT_FILE, layout_of_run
from thinwire.lab.train.shared_errors import SharedError

RUN = ["digits", "--workers", 2, "--epochs", 1, "--name", "laid-out", "--measure-lines"]
OPTIONS = [
    "--strategy",
    "Gradients(Mean(TopK(0.1), ErrorFeedback(), exchange='scatter_reduce'))",
    "--checkpoint-every",
    2,
]


def test_a_resumed_run_keeps_its_layout_and_its_memory(tmp_path):
    first = thinwire("train", *RUN, *OPTIONS, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("thinwire: the measurement sends at most") == 1
    folder = tmp_path / "runs" / "laid-out"
    kept = json.loads((folder / LAYOUT_FILE).read_text())
    assert sorted(kept["order"]) == [0, 1]
    # Another order than the measured one: only a run that reads the file can load the states of these ranks.
    other = Layout((1, 0))
    (folder / LAYOUT_FILE).write_text(json.dumps({"order": other.order, "workers_per_node": 1, "shares": []}))
    (folder / "summary.json").unlink()
    again = thinwire("train", *RUN, *OPTIONS, "--resume", cwd=tmp_path)
    assert again.returncode != 0 and "cannot load the state" in again.stderr
    (folder / LAYOUT_FILE).write_text(json.dumps(kept))
    again = thinwire("train", *RUN, *OPTIONS, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "measurement" not in again.stderr and json.loads((folder / LAYOUT_FILE).read_text()) == kept


@pytest.mark.parametrize(
    "text", ['{"order"', '{"order": [1, 0]}', '{"order": [1, 1], "workers_per_node": 1, "shares": []}']
)
def test_a_damaged_layout_is_one_error_on_all_workers(tmp_path, text):
    (tmp_path / LAYOUT_FILE).write_text(text)
    config = replace(recipes()["digits"].config, resume=True)

    def error(comm):
        with pytest.raises(SharedError, match=r"worker 0: .*layout\.json is damaged \(.*; restore the file"):
            layout_of_run(config, tmp_path, comm)
        return True

    assert LocalWorld(2).run(error) == [True, True]


@pytest.mark.parametrize("field", [{"network": "1gbit,1ms"}, {"transport": "mpi"}, {"elastic": True}])
def test_what_has_no_lines_to_measure_is_refused(field):
    config = recipes()["digits"].config
    with pytest.raises(ValueError, match="measure_lines"):
        type(config)(**{f: getattr(config, f) for f in config.__dataclass_fields__} | field | {"measure_lines": True})
