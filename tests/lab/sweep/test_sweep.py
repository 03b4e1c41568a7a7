"""A sweep's file: which runs it asks for, which of them are the same, and what is said of mistakes in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.lab.files import load_json_object
from thinwire.lab.overrides import overridden
from thinwire.lab.recipes import recipes
from thinwire.lab.sweep import identity, read_sweep, status_of
from thinwire.lab.sweep.file import has_begun, where_it_runs
from thinwire.lab.sweep.identity import OF_CONSENSUS
from thinwire.lab.train import RunConfig
from thinwire.lab.train.folder.run_folder import FREE
from thinwire.notation import parse

GRID = """
recipe = "digits"
[fixed]
workers = 2
optimizer.learning_rate = 0.1
[grid]
strategy = ["Gradients(Mean())", "Gradients(Mean(QSGD(bits=4)))"]
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
    both = (
        [("Gradients(Mean())", 1), ("Gradients(Mean())", 2), ("Gradients(Mean())", 3)],
        [("Gradients(Mean(QSGD(bits=4)))", seed) for seed in (1, 2, 3)],
    )
    assert [(run.config.strategy, run.config.seed) for run in runs] == [*both[0], *both[1]]
    assert {run.config.optimizer.learning_rate for run in runs} == {0.1}
    assert {run.config.workers for run in runs} == {2}


def test_a_policy_by_parameter_name_is_an_averager_like_any_other(sweep_of):
    text = "Gradients(ByName({'0.*': Mean(), '*': Mean(QSGD(bits=4))}))"
    (run,) = sweep_of(f'recipe = "digits"\n[fixed]\nstrategy = "{text}"\n').runs
    assert run.config.strategy == text
    with pytest.raises(ValueError, match=r"did you mean 'Mean'\? \(at column 26"):
        sweep_of('recipe = "digits"\n[fixed]\nstrategy = "Gradients(ByName({\'0.*\': Maen()}))"\n')


def test_tables_of_a_list_each_with_the_whole_grid(sweep_of):
    rows = """
        [[list]]
        strategy = "Gradients(Mean(TopK(0.01), ErrorFeedback()))"
        optimizer = { learning_rate = 0.2, momentum = 0.5 }
        [[list]]
        strategy = "Gradients(Mean(QSGD(bits=2)))"
        "optimizer.learning_rate" = 0.3
        [grid]
        seed = [1, 2]
    """
    runs = sweep_of('recipe = "digits"\n' + rows).runs
    found = [
        (r.config.strategy[15:19], r.config.optimizer.learning_rate, r.config.optimizer.momentum, r.config.seed)
        for r in runs
    ]
    assert found == [("TopK", 0.2, 0.5, 1), ("TopK", 0.2, 0.5, 2), ("QSGD", 0.3, 0.9, 1), ("QSGD", 0.3, 0.9, 2)]


def test_several_grids_one_after_the_other(sweep_of):
    grids = """
        [[grid]]
        strategy = ["Gradients(Mean())"]
        [[grid]]
        strategy = ["Gradients(Mean(QSGD(bits=2)))", "Gradients(Mean(QSGD(bits=4)))"]
        seed = [1, 2]
    """
    runs = sweep_of('recipe = "digits"\n' + grids).runs
    both = [(f"Gradients(Mean(QSGD(bits={bits})))", seed) for bits in (2, 4) for seed in (1, 2)]
    assert [(run.config.strategy, run.config.seed) for run in runs] == [("Gradients(Mean())", 0), *both]


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
    run = sweep_of(
        f'recipe = "digits"\noutput = "{tmp_path}/here"\ngrid.strategy = ["Gradients(Mean(TopK(0.01)))"]'
    ).runs[0]
    assert run.folder == tmp_path / "here" / f"gradients-mean-topk-0.01-{run.identity[:8]}"


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


def test_parts_of_a_strategy_are_values_like_others(sweep_of):
    text = """recipe = "digits"
[fixed]
strategy = "Local(Mean(TopK(0.5), ErrorFeedback()), every=2)"
[[list]]
strategy.averager.memory = "ErrorFeedback(decay=0.9)"
[grid]
strategy.averager.codec.ratio = [0.01, 0.001]
"""
    runs = sweep_of(text).runs
    wanted = [f"Local(Mean(TopK({ratio}), ErrorFeedback(decay=0.9)), every=2)" for ratio in (0.01, 0.001)]
    assert [run.config.parsed_strategy() for run in runs] == [parse(strategy) for strategy in wanted]
    whole = sweep_of(f'recipe = "digits"\n[grid]\nstrategy = {wanted}').runs
    assert [run.identity for run in runs] == [run.identity for run in whole]
    assert "ratio0.001" in runs[1].folder.name
    with pytest.raises(
        ValueError, match=r"grid.toml: unknown field 'strategy.averager.codec.ratoi'; TopK has ratio, sample"
    ):
        sweep_of(text.replace("ratio =", "ratoi ="))


def test_parts_of_the_averager_of_a_consensus_experiment(sweep_of):
    text = 'command = "consensus"\n[fixed]\naverager = "Choco(Ring(), QSGD(bits=4))"\ngrid.averager.codec.bits = [2, 8]'
    runs = sweep_of(text.replace("grid.averager", "[grid]\naverager")).runs
    assert [parse(run.config.averager[0]).codec.bits for run in runs] == [2, 8]


# ---- which runs are the same ----


@pytest.mark.parametrize(
    "changes, same",
    [
        ({}, True),
        (
            {"threads": 2, "port": 12345, "log_every": 1, "output": Path("/elsewhere"), "name": "x", "overwrite": True},
            True,
        ),
        ({"strategy": "Gradients( Mean( TopK( 0.01 ) ) )"}, True),
        ({"strategy": "Gradients(Mean(TopK(ratio=0.02)))"}, False),
        ({"seed": 1}, False),
        ({"workers": 3}, False),
        ({"epochs": 29}, False),
        ({"max_steps": 5}, False),
    ],
)
def test_identity_is_what_determines_the_result(changes, same):
    first = RunConfig("digits", "Gradients(Mean(TopK(0.01)))")
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


# ---- mistakes in the file ----


def test_a_quoted_path_stands_beside_a_list_of_strategies(sweep_of):
    """TOML forbids the dotted key: `strategy` is a list in the same table."""
    both = "strategy = ['Local(Mean(), every=2)', 'Local(Mean(Cast()), every=2)']\n"
    runs = sweep_of(f"recipe = 'digits'\n[grid]\n{both}'strategy.every' = [4, 8]\n").runs
    made = [repr(parse(run.config.strategy)) for run in runs]
    assert made == [f"Local(Mean({codec}), every={every})" for codec in ("", "Cast()") for every in (4, 8)]


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
        ("recipe = 'digits'\ngrid = [3]", "grid must be a table, [grid], or several, [[grid]], got 3"),
        ("recipe = 'digits'\n[list]\nseed = 3", "list must be a list of tables, [[list]]"),
        ("recipe = 'digits'\n[fixed]\nsede = 1", "unknown field 'sede'; did you mean 'seed'?"),
        ("recipe = 'digits'\n[fixed]\nepochs = 'ten'", "epochs must be a whole number, got 'ten'"),
        (
            "recipe = 'digits'\n[grid]\nepochs = [1, 0]",
            "epochs must be an integer, 1 or more, got 0 (in the run epochs = 0)",
        ),
        ("recipe = 'digits'\n[grid]\nseed = 1", "grid.seed must be a list of values, got 1"),
        ("recipe = 'digits'\n[grid]\nseed = []", "grid.seed is an empty list"),
        ("recipe = 'digits'\n[fixed]\nseed = 1\n[grid]\nseed = [1]", "seed is given twice, under [fixed]"),
        (
            "recipe = 'digits'\n[grid]\nstrategy = ['Local(Mean())']\nstrategy.every = [4, 8]",
            'is a field of what another key of the table sets, write it in quotes, such as "strategy.every" = 4',
        ),
        ("recipe = 'digits'\n[fixed]\nname = 'x'", "name is set by the sweep"),
        ("recipe = 'digits'\n[fixed]\noutput = 'x'", "write output = ... at the top of the file"),
        (
            "recipe = 'digits'\n[grid]\nstrategy = ['Gradients(Mean(TopKK(0.1)))']",
            "strategy: unknown name 'TopKK'; did you mean 'TopK'?",
        ),
        (
            "recipe = 'digits'\n[grid]\nstrategy = ['TopK(0.1)']",
            'toml: strategy: TopK(0.1) is a codec; write "Gradients(Mean(',
        ),
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


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID, encoding="utf-8-sig")
    assert read_sweep(tmp_path / "grid.toml").runs
    (tmp_path / "config.json").write_text('{"seed": 1}', encoding="utf-8-sig")
    assert load_json_object(tmp_path / "config.json") == {"seed": 1}


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
            'recipe = "digits"\n[fixed]\nclip_norm = 1.0\n'
            '[grid]\nstrategy = ["Gradients(Mean())", "Gradients(dgc(ratio=0.01))"]\n',
            "clip_norm 1.0 would clip gradients that .* has accumulated already.*in the run strategy = .*dgc",
        ),
        (
            'recipe = "digits"\n[fixed]\nworkers = 5\nstrategy = "Gossip(Mix(Torus()))"\n',
            "Torus.*5",
        ),
        ('recipe = "digits"\n[fixed]\nstrategy = "Gradients(dgc(ratio=0.01))"\n', "momentum"),
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
