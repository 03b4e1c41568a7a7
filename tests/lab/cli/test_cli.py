"""The command line as its users meet it, in programs that start quickly; test_interrupt.py has a command of a shell."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
import socket
import urllib.request
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from helpers.command import TORCHRUN, python, started, thinwire
from helpers.program import below, wait_until, workers_of

import thinwire as tw
from thinwire import notation
from thinwire.average.mean import exchange
from thinwire.average.mean.exchange import EXCHANGES, known_words
from thinwire.average.mean.exchange.all_gather import AllGather
from thinwire.lab.cli import main
from thinwire.lab.cli.options import fail, parsed
from thinwire.lab.train import RunConfig
from thinwire.lab.train.shared_errors import SharedError
from thinwire.notation import known_names

SPARSE = "Gradients(Mean(chain(TopK(0.01), QSGD(bits=4)), ErrorFeedback()))"


LONG = ("train", "digits", "--workers", "2", "--epochs", "1000", "--log-every", "1", "--name", "long")
SHORT = ("train", "digits", "--max-steps", 12, "--log-every", 4)


def train(cwd, *arguments):
    return thinwire(*SHORT, "--workers", 2, *arguments, cwd=cwd)


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """One finished run, and what it printed."""
    cwd = tmp_path_factory.mktemp("run")
    done = train(cwd, "--strategy", SPARSE, "--name", "first")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (cwd / "printed").write_text(done.stdout)
    return cwd


def test_a_run_has_finished_though_nobody_reads_its_table(finished, monkeypatch):
    """As in `thinwire train ... | head -1`: its exit code was 1, as of a worker that failed."""
    monkeypatch.setattr("thinwire.lab.cli.train.trained", lambda *_: finished / "runs" / "first")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(["train", "digits"]) == 0


def test_a_checkpoint_is_evaluated(finished, capsys, monkeypatch):
    """The same numbers as at the end of the run, up to the order of float32 sums in batches of another size."""
    monkeypatch.chdir(finished)
    (checkpoint,) = (finished / "runs" / "first" / "checkpoints").glob("step-000012")
    assert main(["train", "digits", "--evaluate", str(checkpoint), "--test-batch-size", "97"]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    final = summary_of(finished / "runs" / "first")["final"]
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(
        {name: value for name, value in final.items() if name.startswith("test_")}, rel=1e-4
    )
    assert main(["train", "digits", "--evaluate", str(finished)]) == 2
    assert "is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("checkpoint.json", b"{}", "it has no config with a recipe; restore it"),
        ("checkpoint.json", b'{"config": {"seed": 1}}', "it has no config with a recipe; restore it"),
        ("checkpoint.json", b'{"config": {"recipe": "digits", "epochs": "x"}}', "checkpoint.json: .*epochs"),
        ("shared.pt", b"PK", r"shared.pt is missing, truncated or damaged \(BadZipFile: File is not a zip file\)"),
        ("shared.pt", {"step": 1}, r"shared.pt is missing, truncated or damaged \(it has no model\)"),
        ("shared.pt", {"model": {"wrong": torch.ones(1)}}, "shared.pt is not of this model"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(file, content, complaint, finished, tmp_path, capsys):
    (checkpoint,) = (finished / "runs" / "first" / "checkpoints").glob("step-000012")
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / file).write_bytes(content) if isinstance(content, bytes) else torch.save(content, copy / file)
    assert main(["train", "digits", "--evaluate", str(copy)]) == 2
    said = capsys.readouterr().err
    assert re.search(complaint, said) and said.startswith("thinwire: ") and said.count("\n") == 1


def test_a_run_leaves_its_records(finished):
    folder = finished / "runs" / "first"
    summary = summary_of(folder)
    assert summary["recipe"] == "digits" and summary["workers"] == 2 and summary["seed"] == 0
    assert summary["strategy"] == "Gradients(Mean(chain(TopK(ratio=0.01), QSGD(bits=4)), ErrorFeedback()))"
    assert 0 <= summary["final"]["test_accuracy"] <= 1
    assert summary["compression_vs_fp32"] == pytest.approx(
        summary["dense_fp32_bytes"] / summary["bytes_sent_per_worker"]
    )
    assert summary["dense_bf16_bytes"] == summary["dense_fp32_bytes"] / 2
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with open(folder / "metrics.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [int(row["step"]) for row in table] == [4, 8, 12]
    for key in ("loss", "accuracy", "learning_rate", "bytes_sent", "bytes_received", "messages"):
        assert key in rows[-1], key
    assert json.loads((folder / "config.json").read_text())["strategy"] == summary["strategy"]
    assert list((folder / "tensorboard").iterdir())
    assert list((folder / "checkpoints").iterdir())


def test_the_checkpoint_loads_with_weights_only(finished):
    files = [f for f in (finished / "runs" / "first" / "checkpoints").rglob("*") if f.is_file() and f.suffix == ".pt"]
    assert files
    for file in files:
        torch.load(file, weights_only=True)


def test_what_is_printed(finished):
    printed = (finished / "printed").read_text()
    for word in ("step 12/12", "loss", "accuracy", "MB sent", "examples/s", "test accuracy", "runs/first"):
        assert word in printed, word


def test_the_same_seed_gives_the_same_run_also_under_torchrun_and_another_does_not(finished):
    options = (*SHORT, "--strategy", SPARSE)
    launcher = [*TORCHRUN, "--nproc-per-node", 2, "-m", "thinwire"]
    again = python(*launcher, *options, "--name", "again", cwd=finished, GLOO_SOCKET_IFNAME="lo")
    assert again.returncode == 0, again.stderr
    other = train(finished, "--strategy", SPARSE, "--name", "other", "--seed", 1)
    assert other.returncode == 0, other.stderr
    first, again, other = (summary_of(finished / "runs" / name) for name in ("first", "again", "other"))
    assert first["final"] == again["final"] != other["final"]
    assert first["bytes_sent_per_worker"] == again["bytes_sent_per_worker"]


def test_a_taken_name_is_refused(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    assert main(["train", "digits", "--name", "first"]) == 2
    said = capsys.readouterr().err
    assert "first" in said and "overwrite" in said
    assert summary_of(finished / "runs" / "first")["strategy"] != "Gradients(Mean())"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--strategy", "Gradients(Mean(TopK(0)))"], "ratio must be above 0"),
        (["--strategy", "Gradients(Mean(TopK(2)))"], "at most 1, got 2"),
        (["--strategy", "Gradients(Mean(QSGD(bits=9)))"], "from 1 to 8, got 9"),
        (["--strategy", "Gradients(Mean(TopKK(0.01)))"], "did you mean 'TopK'"),
        (["--strategy", "TopK(0.01)"], 'write "Gradients(Mean(TopK(0.01), ErrorFeedback()))"'),
        (["--strategy", "Gradients(QSGD(bits=4))"], "write Mean(QSGD(bits=4))"),
        (
            ["--strategy", "Shards()"],
            "strategy must average gradients or parameters, such as Gradients(Mean()), got Shards()",
        ),
        (["--strategy", "Mean()"], 'Mean() is an averager; write "Gradients(Mean())"'),
        (["--strategy", "Mean(TopK(0.01))"], 'write "Gradients(Mean(TopK(0.01), ErrorFeedback()))"'),
        (["--averager", "Mean(QSGD(bits=4))"], """here: --strategy "Gradients(Mean(QSGD(bits=4)))", or"""),
        (["--codec", "QSGD(bits=4)"], """here: --strategy "Gradients(Mean(QSGD(bits=4)))", or"""),
        (["--model", "resnet"], "unknown option '--model'; here: the recipe, such as cifar10-resnet20-dgc"),
        (["--configs", "x.toml"], "unknown option '--configs'; here: --config FILE, once for each file"),
        (["--method", "topk"], "unknown option '--method'; here: --strategy.averager.codec"),
        (["--flavour", "topk"], "unknown option '--flavour'; see thinwire train digits --help"),
        (["--network", "alexnet"], "got 'alexnet'; the recipe chooses the model: thinwire train --list"),
        (["--no-listen"], "several workers that take no connections need a relay; leave --no-listen out"),
        (["--elastic", "--relay", "127.0.0.1:1"], "with a relay needs credentials; add --credentials FOLDER"),
        (["--workers", "0"], "workers must be an integer, 1 or more, got 0"),
        (["--threads", "1000000000000"], "threads must be an integer from 1 to 1024, got 1000000000000; see"),
        (["--workers", "two"], "--workers must be a whole number, got 'two'; see thinwire train digits --help"),
        (["--clip-norm", "much"], "--clip-norm must be a number, got 'much'; see"),
        (["--precision", "fp8"], "--precision must be one of 'fp32', 'bf16', 'fp16', got 'fp8'; see"),
        (["--output"], "--output needs a value; see"),
        (["--optimizer.momentum", "2"], "thinwire: optimizer.momentum must be at least 0 and below 1, got 2.0; see"),
        (["--optimizer.kind", "adma"], "unknown optimizer.kind 'adma'; did you mean 'Adam'?"),
        (["--optimizer.kind"], "--optimizer.kind needs a kind, such as --optimizer.kind Adam"),
        (["--optimizer.kind", "Adam", "--optimizer.momentum", "0"], "unknown option '--optimizer.momentum'; did"),
        (["--wrokers", "2"], "did you mean '--workers'"),
        (["--epochs", "0"], "epochs must be an integer, 1 or more"),
        (["--output", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_a_mistake_gets_one_clear_line(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("thinwire: ") and said.count("\n") == 1
    assert expected in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["train", "digit"], "unknown recipe 'digit'; did you mean 'digits'? See thinwire train --list"),
        (["train", "wikitext2"], "known ones: wikitext2-"),
        (["train", "zzzz"], "is like it; see thinwire train --list"),
        (["train", "--list", "--nope"], "--list takes nothing else, got '--nope'; see thinwire train --help"),
        (["topology", "Zork()"], "; see thinwire list (at column 1"),
        (["topology", "Ring()", "--workers", "1000000"], "at most 2,048 workers, got 1,000,000"),
        (["list", "codec"], "unknown kind 'codec'; did you mean 'codecs'? See thinwire list --help"),
        (["list", "codecs", "memories"], "takes one kind, got 'codecs memories'; see thinwire list --help"),
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["train", "digits", "--zzzzqq", "3"], "unknown option '--zzzzqq'; see thinwire train digits --help"),
        (["demo", "--workers", "1"], "workers must be an integer, 2 or more, got 1"),
        (["keys", "token"], "keys token needs FOLDER (the folder that `thinwire keys new` made) and HOST:PORT (at"),
        (
            ["plan", "--workers", "2", "digits"],
            "'digits' belongs to no option; a word without an option comes before them",
        ),
        (["plan", "--core", "2"], "unknown option '--core'; did you mean '--cores'? See thinwire plan --help"),
        (["bench", "codec"], "did you mean 'codecs'"),
        (["bench", "codecs", "--codecs", "QSGD(bits=9)"], "from 1 to 8, got 9"),
    ],
)
def test_a_misspelt_word_says_what_was_meant(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and expected in said and len(said) < 300


def test_a_configuration_that_is_no_text_is_said_without_words_of_python(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_bytes(b"\x80")
    assert main(["train", "digits", "--config", str(path)]) == 2
    assert (
        capsys.readouterr().err == f"thinwire: {path} is not a text file in UTF-8; restore the file, or name another\n"
    )


def test_a_topology_drawn_on_a_full_disk_is_one_line(tmp_path, capsys):
    """Matplotlib's writer of PDF ended in a traceback of zlib."""
    path = tmp_path / "ring.pdf"
    path.symlink_to("/dev/full")
    assert main(["topology", "Ring()", "--workers", "4", "--output", str(path)]) == 2
    assert capsys.readouterr().err == f"thinwire: cannot write {path}: No space left on device; choose another file\n"


def test_the_list_has_each_name_of_the_notation_once(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = sorted(line.split()[0] for line in lines if line.startswith(" "))
    assert listed == sorted([*known_names(), *known_words()])
    assert main(["list", "memories"]) == 0
    memories = capsys.readouterr().out.splitlines()
    assert memories[0] == "memories:" and {"ErrorFeedback", "EF21"} <= {line.split()[0] for line in memories[1:]}


def test_the_list_has_exchanges_of_ones_own(capsys, monkeypatch):
    class Star(AllGather):
        """By way of rank 0. And so on."""

        word = "star"

    monkeypatch.setitem(EXCHANGES, "star", Star())
    assert main(["list", "exchanges"]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:]]
    assert ["star", "By way of rank 0."] in listed and {word for word, _ in listed} == {*known_words()}


def test_the_list_leaves_out_what_cannot_be_loaded_and_says_why(capsys, caplog, monkeypatch):
    """One broken package was an error instead of the list."""
    words = {"thinwire.algorithms": "Broken", "thinwire.exchanges": "broken"}
    made = {group: EntryPoint(word, "no_such_module:It", group) for group, word in words.items()}
    for module in (notation, exchange.words):
        monkeypatch.setattr(module, "declared", lambda group: {words[group]: made[group]})
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert "  TopK " in printed and "  all_gather " in printed and "roken" not in printed
    assert [record.getMessage() for record in caplog.records] == [
        f"the entry point {word} = 'no_such_module:It' cannot be used: ModuleNotFoundError: No module named 'no_such_module'"
        for word in words.values()
    ]


def test_a_port_in_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option, complaint in (
            (["--port", str(port)], f"port {port} cannot be used"),
            (["--metrics", f":{port}"], f"cannot listen at 127.0.0.1:{port}: Address already in use"),
        ):
            assert main(["train", "digits", *option]) == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and complaint in said
    assert list((tmp_path / "runs").iterdir()) == []  # a run that never began leaves no folder


@pytest.mark.parametrize("command", ["train digits", "plan", "report", "watch", "lighthouse"])
def test_the_help_of_an_option_breaks_no_line_that_has_room(command, monkeypatch, capsys):
    """A line of the source that was indented went on a line of its own."""
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    lines = [line.rstrip("│ ") for line in capsys.readouterr().out.splitlines()]
    (column,) = (line.index("show this help") for line in lines if "show this help" in line)
    # Of each two lines, the second has nothing but help, and the first has help beside the option or alone.
    two = [(a, b) for a, b in itertools.pairwise(lines) if not b[1:column].strip() and a[column - 2 : column] == "  "]
    pairs = [(a, b[column:]) for a, b in two if b[column:]]
    width = max(len(line) for line, _ in pairs)
    broken = [(line, after) for line, after in pairs if len(f"{line} {after.split()[0]}") < width]
    assert not broken


HELP = [["--help"], ["train", "--list"], ["train", "digits", "--help"], ["bench", "step", "--help"]]


@pytest.mark.parametrize("arguments", HELP)
def test_help_comes_on_stdout(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == 0 and said.err == "" and len(said.out) > 40


@pytest.mark.parametrize("command", ["train digits", "plan", "doctor", "watch", "keys new", "bench step", "consensus"])
def test_help_shows_an_optional_value_as_any_other(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert "(default: None)" in said and "{None}" not in said


def test_the_word_none_gives_an_optional_option_no_value():
    given = RunConfig("digits", clip_norm=1.0, max_steps=5, name="first", credentials=Path("keys"))
    options = ["--clip-norm", "None", "--max-steps", "None", "--name", "None", "--credentials", "None"]
    assert parsed(RunConfig, options, "thinwire train digits", given) == RunConfig("digits")
    options = ["--clip-norm", "2", "--max-steps", "7", "--name", "none", "--credentials", "others"]
    changed = RunConfig("digits", clip_norm=2.0, max_steps=7, name="none", credentials=Path("others"))
    assert parsed(RunConfig, options, "thinwire train digits", given) == changed


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the kernel's table of processes is Linux's")
@pytest.mark.parametrize(
    "who, number, code, expected",
    [("parent", signal.SIGINT, 130, "stopped"), ("worker", signal.SIGKILL, 1, "SIGKILL, as the kernel does")],
)
def test_whoever_ends_the_run_everyone_stops_at_once(who, number, code, expected, tmp_path):
    metrics = tmp_path / "runs" / "long" / "metrics.jsonl"
    with started(["-m", "thinwire", *LONG, "--metrics", "0"], tmp_path) as process:
        process.wait_until(lambda: metrics.exists() and metrics.stat().st_size, "the first row of the run")
        with urllib.request.urlopen(f"{process.stdout.split()[0]}/metrics") as answer:  # the address comes first
            assert 'thinwire_finished{run="long"} 0.0' in answer.read().decode()
        everyone = below(process.pid)
        os.kill(process.pid if who == "parent" else workers_of(process.pid)[-1], number)
        _, complaint = process.communicate(timeout=400)
        assert process.returncode == code, complaint
        assert complaint.count("\n") == 1 and expected in complaint
        wait_until(lambda: not any(Path(f"/proc/{p}").exists() for p in everyone), "the end of all processes")
    assert metrics.stat().st_size


def test_the_demo_compares_four_methods(tmp_path):
    done = thinwire("demo", "--workers", 2, "--max-steps", 8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for label in ("dense", "4-bit", "sparse", "sparse + 4-bit", "vs fp32", "vs bf16"):
        assert label in done.stdout
    assert (tmp_path / "demo" / "accuracy-against-bytes.png").read_bytes().startswith(b"\x89PNG")


def test_configuration_files_are_composed_in_order_and_options_come_last(tmp_path, monkeypatch, capsys):
    strategy = "Local(Mean(QSGD(bits=4)), every=2)"
    (tmp_path / "network.toml").write_text(f'strategy = "{strategy}"\n[optimizer]\nlearning_rate = 0.02\n')
    (tmp_path / "short.toml").write_text("workers = 1\nseed = 5\nmax_steps = 2\noptimizer.learning_rate = 0.03\n")
    files = ("--config", "network.toml", "--config=short.toml")
    done = thinwire("train", "digits", *files, "--seed", 3, "--name", "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "runs" / "one" / "config.json").read_text())
    assert (config["strategy"], config["workers"], config["seed"]) == (strategy, 1, 3)
    assert config["optimizer"]["learning_rate"] == 0.03
    again = thinwire("train", "digits", "--config", "runs/one/config.json", "--name", "two", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    one, two = (summary_of(tmp_path / "runs" / name) for name in ("one", "two"))
    assert one["final"] == two["final"]
    (tmp_path / "wrong.toml").write_text("optimiser.momentum = 1\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", "--config", "wrong.toml"]) == 2
    assert capsys.readouterr().err.startswith("thinwire: wrong.toml: unknown field 'optimiser'")


def test_an_option_takes_another_optimizer_with_its_own_options_and_advice_is_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "short.toml").write_text("workers = 1\nmax_steps = 1\n")
    chosen = ("--config", "short.toml", "--optimizer.kind", "Adam", "--optimizer.beta2", "0.9")
    done = thinwire(
        "train", "digits", *chosen, "--strategy", "Gradients(Mean(OneBit()))", "--name", "one", cwd=tmp_path
    )
    advice = "Mean(OneBit()) loses what OneBit() does not send; write Mean(OneBit(), ErrorFeedback())"
    assert done.returncode == 0 and done.stderr == f"thinwire: {advice}\n"
    used = json.loads((tmp_path / "runs" / "one" / "config.json").read_text())["optimizer"]
    assert (used["kind"], used["learning_rate"], used["beta2"]) == ("Adam", 7e-4, 0.9)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "digits", *chosen, "--help"])
    shown = capsys.readouterr().out
    assert "--optimizer.eps" in shown and "--optimizer.momentum" not in shown


def test_configuration_files_change_parts_of_an_averager_as_in_deep_gradient_compression(tmp_path, monkeypatch, capsys):
    """Its `wm5`, `fp16` and `nm` compose; a part on the command line comes last, and an unknown one is named."""
    files = {
        "dgc": 'strategy = "Gradients(dgc(0.01))"\noptimizer.momentum = 0.0\nworkers = 1\nmax_steps = 1',
        "wm5": "strategy.averager.warmup_epochs = 5",
        "fp16": '[strategy.averager]\nvalues = "float16"',
        "nm": "strategy.averager.masking = false",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    options = [word for name in files for word in ("--config", f"{name}.toml")]
    part = ("--strategy.averager.codec.sparsifier.ratio.final", "0.02", "--strategy.averager.min-ndim=1")
    done = thinwire("train", "digits", *options, *part, "--name", "one", "--suffix", ".e1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "runs" / "one.e1" / "config.json").read_text())["strategy"]
    assert tw.parse(saved).averager == tw.dgc(0.02, warmup_epochs=5, values="float16", masking=False, min_ndim=1)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", *options, "--strategy.averager.codec.ratoi", "0.1"]) == 2
    assert "unknown field 'strategy.averager.codec.ratoi'; Chain has sparsifier, values" in capsys.readouterr().err
    assert main(["train", "digits", "--strategy.averager.codec.ratio", "--workers", "1"]) == 2
    assert "--strategy.averager.codec.ratio needs a value" in capsys.readouterr().err


def test_a_mistake_of_one_machine_is_said_there(monkeypatch, capsys):
    """A worker of another machine than rank 0's ended without a word, and rank 0 waited for it."""
    command = ["train", "digits", "--credentials", "nowhere"]
    for rank, local_rank, error in ((2, 0, "thinwire: worker 2: nowhere has no certificate.pem"), (3, 1, "")):
        for name, value in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.startswith(error) and said.count("\n") == bool(error)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert fail(SharedError("all have said it"), 2) == 2 and not capsys.readouterr().err
