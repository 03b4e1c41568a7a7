"""A sweep's file: which runs it asks for, which of them are the same, and what is said of mistakes in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from thinwire.lab.recipes import recipes
from thinwire.lab.sweep import identity, read_sweep, status_of
from thinwire.lab.sweep.file import has_begun, where_it_runs
from thinwire.lab.sweep.identity import OF_CONSENSUS
from thinwire.lab.sweep.overrides import overridden
from thinwire.lab.train import RunConfig
from thinwire.lab.train.run_folder import FREE

GRID = """
recipe = "digits"
[fixed]
workers = 2
optimizer.learning_rate = 0.1
[grid]
averager = ["Mean()", "Mean(QSGD(bits=4))"]
seed = [1, 2, 3]
"""


@pytest.fixture
def sweep_of(tmp_path):
    """Reads a sweep from text."""

    def read(text: str):
        file = tmp_path / "grid.toml"
        file.write_text(text)
        return read_sweep(file)

    return read


def test_the_product_of_all_lists_in_their_order(sweep_of):
    runs = sweep_of(GRID).runs
    both = [("Mean()", 1), ("Mean()", 2), ("Mean()", 3)], [("Mean(QSGD(bits=4))", seed) for seed in (1, 2, 3)]
    assert [(run.config.averager, run.config.seed) for run in runs] == [*both[0], *both[1]]
    assert {run.config.optimizer.learning_rate for run in runs} == {0.1}
    assert {run.config.workers for run in runs} == {2}


def test_a_policy_by_parameter_name_is_an_averager_like_any_other(sweep_of):
    text = "ByName({'0.*': Mean(), '*': Mean(QSGD(bits=4))})"
    (run,) = sweep_of(f'recipe = "digits"\n[fixed]\naverager = "{text}"\n').runs
    assert run.config.averager == text
    with pytest.raises(ValueError, match=r"did you mean 'Mean'\? \(at column 16"):
        sweep_of('recipe = "digits"\n[fixed]\naverager = "ByName({\'0.*\': Maen()})"\n')


def test_tables_of_a_list_each_with_the_whole_grid(sweep_of):
    rows = """
        [[list]]
        averager = "Mean(TopK(0.01), ErrorFeedback())"
        optimizer = { learning_rate = 0.2, momentum = 0.5 }
        [[list]]
        averager = "Mean(QSGD(bits=2))"
        "optimizer.learning_rate" = 0.3
        [grid]
        seed = [1, 2]
    """
    runs = sweep_of('recipe = "digits"\n' + rows).runs
    found = [
        (r.config.averager[5:9], r.config.optimizer.learning_rate, r.config.optimizer.momentum, r.config.seed)
        for r in runs
    ]
    assert found == [("TopK", 0.2, 0.5, 1), ("TopK", 0.2, 0.5, 2), ("QSGD", 0.3, 0.9, 1), ("QSGD", 0.3, 0.9, 2)]


def test_several_grids_one_after_the_other(sweep_of):
    grids = """
        [[grid]]
        averager = ["Mean()"]
        [[grid]]
        averager = ["Mean(QSGD(bits=2))", "Mean(QSGD(bits=4))"]
        seed = [1, 2]
    """
    runs = sweep_of('recipe = "digits"\n' + grids).runs
    both = [("Mean(QSGD(bits=2))", 1), ("Mean(QSGD(bits=2))", 2), ("Mean(QSGD(bits=4))", 1), ("Mean(QSGD(bits=4))", 2)]
    assert [(run.config.averager, run.config.seed) for run in runs] == [("Mean()", 0), *both]


def test_all_ways_to_write_a_path_mean_the_same(sweep_of):
    ways = [
        'optimizer.schedule.shape = "linear"',
        '"optimizer.schedule.shape" = "linear"',
        '[fixed.optimizer.schedule]\nshape = "linear"',
    ]
    runs = [sweep_of(f'recipe = "digits"\n[fixed]\n{way}').runs[0] for way in ways]
    assert {run.config.optimizer.schedule.shape for run in runs} == {"linear"}
    assert len({run.identity for run in runs}) == 1


def test_without_grid_and_list_one_run(sweep_of):
    (run,) = sweep_of('recipe = "digits"').runs
    assert run.config == recipes()["digits"].config and run.folder.name.startswith("digits-")


def test_where_runs_go(sweep_of, tmp_path):
    assert sweep_of('recipe = "digits"').output == Path("runs/grid")
    run = sweep_of(f'recipe = "digits"\noutput = "{tmp_path}/here"\ngrid.averager = ["Mean(TopK(0.01))"]').runs[0]
    assert run.folder == tmp_path / "here" / f"mean-topk-0.01-{run.identity[:8]}"


def test_a_recipe_is_a_value_like_others(sweep_of):
    (run,) = sweep_of('[grid]\nrecipe = ["digits"]').runs
    assert run.config == recipes()["digits"].config and run.folder.name == f"digits-{run.identity[:8]}"
    for twice in (
        'recipe = "digits"\n[grid]\nrecipe = ["digits"]',
        '[fixed]\nrecipe = "digits"\n[[list]]\nrecipe = "digits"',
    ):
        with pytest.raises(ValueError, match="recipe is given twice"):
            sweep_of(twice)
    with pytest.raises(ValueError, match="did you mean 'digits'.* \\(in the run recipe = \"digit\"\\)"):
        sweep_of('[grid]\nrecipe = ["digit"]')


def test_consensus_one_averager_and_one_step_size_a_run(sweep_of):
    text = """
        command = "consensus"
        fixed.shape = [8, 4]
        [grid]
        averager = ["Choco()", "PowerGossip()"]
        step_sizes = [0.1, 1]
    """
    runs = sweep_of(text).runs
    assert [run.config.averager + run.config.step_sizes for run in runs] == [
        *(("Choco()", 0.1), ("Choco()", 1.0), ("PowerGossip()", 0.1), ("PowerGossip()", 1.0))
    ]
    assert runs[0].config.shape == (8, 4)


# ---- which runs are the same ----


@pytest.mark.parametrize(
    "changes, same",
    [
        ({}, True),
        (
            {"threads": 2, "port": 12345, "log_every": 1, "output": Path("/elsewhere"), "name": "x", "overwrite": True},
            True,
        ),
        ({"averager": "Mean( TopK( 0.01 ) )"}, True),
        ({"averager": "Mean(TopK(ratio=0.02))"}, False),
        ({"seed": 1}, False),
        ({"workers": 3}, False),
        ({"epochs": 29}, False),
        ({"max_steps": 5}, False),
    ],
)
def test_identity_is_what_determines_the_result(changes, same):
    first = RunConfig("digits", "Mean(TopK(0.01))")
    other = replace(first, **changes)
    stored = json.loads(json.dumps(first.as_dict()))  # as config.json gives it back
    assert (identity(stored) == identity(other.as_dict())) is same


def test_every_nested_value_counts():
    first = RunConfig("digits")
    for path, value in (("optimizer.momentum", 0.5), ("optimizer.schedule.shape", "linear"), ("model.width", 16)):
        assert identity(overridden(first, {path: value}).as_dict()) != identity(first.as_dict())


def test_what_does_not_count_exists():
    known = {name.split(".")[0] for name in RunConfig("digits").as_dict()} | {"json", "figure", "processes"}
    assert {name.split(".")[0] for name in (*FREE, *OF_CONSENSUS)} <= known


def test_fields_within_fields_may_not_count_either():
    loaders = {"data": {"kind": "ImageFolder", "num_loaders": 4, "test_size": 224}}
    assert identity(loaders) == identity({"data": loaders["data"] | {"num_loaders": 0}})
    assert identity(loaders) != identity({"data": loaders["data"] | {"test_size": 128}})


# ---- values at field paths, whatever the dataclasses are ----


@dataclass(frozen=True)
class Round:
    radius: float = 1.0


@dataclass(frozen=True)
class Square:
    side: int = 2
    colours: tuple[str, ...] = ()
    kind_of_edge: Literal["sharp", "soft"] = "sharp"


@dataclass(frozen=True)
class Thing:
    form: Round | Square = field(default_factory=lambda: Round(3.0))
    limit: int | None = None
    where: Path = Path(".")
    flag: bool = False
    pair: tuple[int, float] = (1, 2.0)

    def __post_init__(self):
        if self.limit == 13:
            raise ValueError("limit must not be 13")


@pytest.mark.parametrize(
    "values, wanted",
    [
        ({"form.radius": 2}, Thing(form=Round(2.0))),
        ({"form.kind": "Round"}, Thing(form=Round(3.0))),
        ({"form.kind": "Square", "form.side": 5}, Thing(form=Square(5))),
        ({"form.side": 5, "form.kind": "Square"}, Thing(form=Square(5))),
        ({"form.kind": "Square", "form.colours": ["red", "blue"]}, Thing(form=Square(colours=("red", "blue")))),
        ({"form.kind": "Square", "form.colours": "red"}, Thing(form=Square(colours=("red",)))),
        (
            {"limit": 3, "where": "a/b", "flag": True, "pair": [4, 5]},
            Thing(limit=3, where=Path("a/b"), flag=True, pair=(4, 5.0)),
        ),
        ({"limit": "none"}, Thing()),
    ],
)
def test_values_become_what_the_fields_are(values, wanted):
    assert overridden(replace(Thing(), limit=None), values) == wanted


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"from.radius": 2}, "unknown field 'from'; did you mean 'form'?"),
        ({"form.kind": "Square", "form.size": 2}, "unknown field 'form.size'; did you mean 'form.side'"),
        ({"form.kind": "Squaer"}, "unknown form.kind 'Squaer'; did you mean 'Square'?"),
        ({"form": "Square"}, "form must be a table; choose with .kind one of Round, Square, got 'Square'"),
        (
            {"form.kind": "Square", "form.kind_of_edge": "soff"},
            "one of 'sharp', 'soft', got 'soff'; did you mean 'soft'?",
        ),
        ({"limit": "many"}, "limit must be a whole number or 'none', got 'many'"),
        ({"limit": 1.5}, "limit must be a whole number or 'none', got 1.5"),
        ({"limit": True}, "limit must be a whole number or 'none', got True"),
        ({"limit": 13}, "limit must not be 13"),
        ({"flag": 1}, "flag must be true or false, got 1"),
        ({"pair": [1]}, "pair must be a list of 2 values, got [1]"),
        ({"pair": ["a", 1]}, "pair[0] must be a whole number, got 'a'"),
        ({"flag.deep": 1}, "flag has no fields; it is False"),
    ],
)
def test_wrong_values_get_one_line(values, complaint):
    with pytest.raises(ValueError) as caught:
        overridden(Thing(), values)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


# ---- mistakes in the file ----


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("recipe = 'digit'", "unknown recipe 'digit'; did you mean 'digits'?"),
        ("[grid]\nseed = [1]", "which recipe?"),
        ("recipe = 'digits'\ncommand = 'consensus'", "not both"),
        ("command = 'consensu'", "unknown command 'consensu'; did you mean 'consensus'?"),
        ("recipe = 'digits'\n[gird]\nseed = [1]", "unknown entry 'gird'; did you mean 'grid'?"),
        ("recipe = 'digits'\nfixed = 3", "fixed must be a table, [fixed], got 3"),
        ("recipe = 'digits'\ngrid = 3", "grid must be a table, [grid], or several, [[grid]], got 3"),
        ("recipe = 'digits'\n[list]\nseed = 3", "list must be a list of tables, [[list]]"),
        ("recipe = 'digits'\n[fixed]\nsede = 1", "unknown field 'sede'; did you mean 'seed'?"),
        ("recipe = 'digits'\n[fixed]\nepochs = 'ten'", "epochs must be a whole number, got 'ten'"),
        ("recipe = 'digits'\n[grid]\nepochs = [1, 0]", "epochs must be 1 or more, got 0 (in the run epochs = 0)"),
        ("recipe = 'digits'\n[grid]\nseed = 1", "grid.seed must be a list of values, got 1"),
        ("recipe = 'digits'\n[grid]\nseed = []", "grid.seed is an empty list"),
        ("recipe = 'digits'\n[fixed]\nseed = 1\n[grid]\nseed = [1]", "seed is given twice"),
        ("recipe = 'digits'\n[fixed]\nname = 'x'", "name is set by the sweep"),
        ("recipe = 'digits'\n[fixed]\noutput = 'x'", "write output = ... at the top of the file"),
        (
            "recipe = 'digits'\n[grid]\naverager = ['Mean(TopKK(0.1))']",
            "averager: unknown name 'TopKK'; did you mean 'TopK'?",
        ),
        ("recipe = 'digits'\n[grid]\naverager = ['TopK(0.1)']", "did you mean 'Mean(TopK(0.1))'?"),
        ("recipe = 'digits'\n[grid]\nthreads = [1, 2]", "threads = 1 and threads = 2 are the same run"),
        ("recipe = 'digits'\n[grid]\nseed = [1, 1]", "seed = 1 and seed = 1 are the same run"),
        ("recipe = digits\n", "(at line 1, column 10)"),
        ("command = 'consensus'\nfixed.averager = ['Mix()', 'Choco()']", "one of each in a run"),
        ("command = 'consensus'\nfixed.averager = 'TopK(0.1)'", "is no averager"),
    ],
)
def test_a_mistake_in_the_file_gets_one_line_that_names_it(text, complaint, sweep_of):
    with pytest.raises(ValueError) as caught:
        sweep_of(text)
    message = str(caught.value)
    assert "grid.toml: " in message and complaint in message and "\n" not in message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*none.toml: No such file"):
        read_sweep(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "file", sorted(Path(__file__).parents[3].glob("examples/sweeps/*.toml")), ids=lambda file: file.stem
)
def test_every_example_can_be_read(file):
    assert len(read_sweep(file).runs) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'recipe = "digits"\n[fixed]\nclip_norm = 1.0\n[grid]\naverager = ["Mean()", "dgc(ratio=0.01)"]\n',
            "clip_norm 1.0 would clip gradients that .* has accumulated already.*in the run averager = .*dgc",
        ),
        (
            'recipe = "digits"\naverager = "Mix(Torus())"\n'.replace("averager", "[fixed]\nworkers = 5\naverager"),
            "Torus.*5",
        ),
        ('recipe = "digits"\n[fixed]\naverager = "dgc(ratio=0.01)"\n', "momentum"),
        ('command = "consensus"\n[fixed]\nworkers = 5\naverager = ["Mix(Hypercube())"]\n', "Hypercube.*5"),
    ],
)
def test_what_training_would_find_minutes_later_is_found_at_once(sweep_of, text, message):
    with pytest.raises(ValueError, match=message):
        sweep_of(text)


def test_the_status_is_found_from_another_folder(sweep_of, tmp_path, monkeypatch):
    """The sweep was started in the folder above its file's."""
    project = tmp_path / "project"
    (project / "sweeps").mkdir(parents=True)
    file = project / "sweeps" / "grid.toml"
    file.write_text(GRID)
    monkeypatch.chdir(project)
    started = read_sweep(Path("sweeps/grid.toml"))
    assert not has_begun(started)
    started.runs[2].records.mkdir(parents=True)
    (started.runs[2].records / "ended.json").write_text('{"code": 1}')
    (project / "elsewhere").mkdir()
    for folder in (project, project / "sweeps", project / "elsewhere", tmp_path):
        monkeypatch.chdir(folder)
        found = where_it_runs(read_sweep(file))
        states = [status_of(run).state for run in found.runs]
        assert states == ["waiting", "waiting", "failed", "waiting", "waiting", "waiting"], folder
