"""The page that translates the originals' command lines: its commands are read and checked, its options exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers.command import python
from helpers.pages import blocks

import thinwire as tw
from thinwire.lab.cli import train as train_module
from thinwire.lab.cli.originals import SWEEP, TRAIN, written_here
from thinwire.lab.cli.sweep import sweep_command
from thinwire.lab.cli.train import train_command
from thinwire.lab.overrides import overridden
from thinwire.lab.recipes import recipes
from thinwire.lab.train.run.check import check_without_data

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "originals.md").read_text(encoding="utf-8")
BLOCKS = blocks(ROOT / "docs" / "originals.md")
COMMANDS = [line for block in BLOCKS if block.language == "sh" for line in block.code.splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the files of the page and the examples."""
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        if block.file:
            Path(block.file).write_text(block.code)
    shutil.copytree(ROOT / "examples" / "sweeps", "examples/sweeps")
    return tmp_path


@pytest.fixture
def configured(folder, monkeypatch):
    """Reads a command of `thinwire train` into its configuration, checked without its data."""

    def read(command: str):
        found = []

        class Read(Exception):
            pass

        def capture(config, *others):
            found.append(config)
            raise Read

        monkeypatch.setattr(train_module, "trained", capture)
        with pytest.raises(Read):
            train_command(shlex.split(command)[2:])
        check_without_data(found[0])
        return found[0]

    return read


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("thinwire train")])
def test_a_command_of_the_page_makes_a_run(configured, command):
    config = configured(command)
    assert config.recipe == shlex.split(command)[2]


def test_three_files_of_deep_gradient_compression_compose(configured):
    in_files, in_options = (configured(line) for line in COMMANDS if "resnet20-dgc" in line)
    wanted = tw.dgc(0.001, warmup_epochs=5, values="float16", masking=False)
    assert in_files.parsed_strategy() == in_options.parsed_strategy() == tw.Gradients(wanted)
    assert (in_options.epochs, in_options.suffix) == (500, ".e500")


def test_both_commands_of_overlap_sgp_are_the_same_run(configured):
    first, second = (configured(line) for line in COMMANDS if "sgp" in line)
    free = ("recipe", "name", "resume", "log_every", "suffix")
    one, other = ({k: v for k, v in c.as_dict().items() if k not in free} for c in (first, second))
    assert one == other


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("thinwire sweep")])
def test_a_sweep_of_the_page_is_written(folder, capsys, command):
    sweep_command(shlex.split(command)[2:])
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "sbatch"
    text = Path(words[1]).read_text()
    pack = 3 if "--pack" in command else 1
    assert "#SBATCH --partition=p100\n" in text and f"\npack={pack} " in text
    assert f"#SBATCH --array=0-{27 // pack - 1}%1\n" in text


def test_every_command_is_run():
    assert len(COMMANDS) == 10 and all(
        line.split()[:2] in (["thinwire", "train"], ["thinwire", "sweep"]) for line in COMMANDS
    )


def test_the_python_of_the_page_logs_between_rows(folder):
    (code,) = (block.code for block in BLOCKS if block.language == "python")
    Path("experiment.py").write_text(code)
    done = python(str(folder / "experiment.py"), cwd=folder)
    assert done.returncode == 0, done.stderr
    (info,) = folder.glob("runs/*/info.jsonl")
    assert [json.loads(line)["step"] for line in info.read_text().splitlines()] == [2]
    assert "difference_rank1_share" in info.with_name("metrics.jsonl").read_text()


# ---- options ----

EXISTING = [
    *(
        "digits",
        "cifar10-resnet20-dgc",
        "imagenet-resnet50-topk",
        "imagenet-resnet50-threshold",
        "imagenet-resnet50-qsgd",
    ),
    *("imagenet-resnet50-sgp", "cifar10-resnet32-alq", "cifar10-resnet20-powergossip", "cifar10-resnet20-moniqua"),
    "cifar10-resnet20-choco-topk",
]


def named_options(text: str) -> set[str]:
    """Field paths of the options in a text; `, .more` continues the path before."""
    words = re.findall(r"--[a-z][\w.-]*", text)
    return {word[2:].rstrip(".").replace("-", "_") for word in words}


def has(config, path: str) -> bool:
    try:
        overridden(config, {path: object()})
    except ValueError as error:
        return "unknown field" not in str(error) and "has no fields" not in str(error)
    except TypeError:
        return True
    return True


@pytest.mark.parametrize("name", TRAIN)
def test_what_an_option_is_here_exists(name):
    configs = [recipes()[recipe].config for recipe in EXISTING]
    for path in named_options(TRAIN[name]) - {"config", "no_resume", "list"}:
        assert any(has(config, path) for config in configs), path


@pytest.mark.parametrize(
    "recipe, words, here",
    [
        ("cifar10-resnet20-dgc", ["--configs", "configs/dgc/wm5.py"], "--config FILE"),
        ("cifar10-resnet20-dgc", ["--configs.train.optimizer.lr", "0.1"], "--optimizer.learning-rate"),
        ("imagenet-resnet50-topk", ["--compress=layerwise"], "--strategy.averager.granularity"),
        ("imagenet-resnet50-topk", ["-K", "0.3"], "--strategy.averager.codec.ratio"),
        ("imagenet-resnet50-topk", ["--no-bn-wd"], "--optimizer.undecayed norms"),
        ("imagenet-resnet50-sgp", ["--lr", "0.1"], "--optimizer.learning-rate"),
        ("imagenet-resnet50-sgp", ["--graph_type", "0"], '"BipartiteExponential()" (1)'),
        ("imagenet-resnet50-sgp", ["--resume", "True"], "--no-resume is its opposite"),
        ("cifar10-resnet32-alq", ["--nuq_bits", "3"], "--strategy.averager.codec.codec.bits"),
    ],
)
def test_an_option_of_an_original_is_told_its_name_here(recipe, words, here, capsys):
    with pytest.raises(ValueError) as caught:
        train_command([recipe, *words])
    message = str(caught.value)
    assert message.startswith("unknown option ") and f"; here: {TRAIN[key_of(words)]}; see thinwire train" in message
    assert here in message


def key_of(words: list[str]) -> str:
    name = words[-1] if words[-1] == "True" else words[0].partition("=")[0].lstrip("-")
    return name.replace("-", "_").removeprefix("configs.").removeprefix("train.")


def test_an_option_of_grid_run_is_told_its_name_here(folder):
    with pytest.raises(ValueError, match=re.escape(f"; here: {SWEEP['cluster_args']}; see")):
        sweep_command(["examples/sweeps/digits.toml", "--cluster_args", "38,1,p100"])


def test_other_options_are_left_to_the_search_for_near_names():
    assert written_here("--averagr", TRAIN) == "" == written_here("--lr", SWEEP)
