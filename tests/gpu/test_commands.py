"""`scripts/gpu.py` without a GPU: it lists its parts, says that there is no GPU, and its dry run needs none."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script's functions, with results in a folder of their own."""
    functions = runpy.run_path(str(ROOT / "scripts" / "gpu.py"))
    functions["run"].__globals__["RESULTS"] = tmp_path
    return functions


def test_the_parts_fit_one_half_hour(script, capsys):
    assert script["main"]([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [part.name for part in script["PARTS"]]
    assert all(part.minutes < 9 for part in script["PARTS"])
    assert sum(part.minutes for part in script["PARTS"] if part.name != "sanitizer") <= 30  # which is of least worth


def test_without_a_gpu(script, monkeypatch):
    monkeypatch.setitem(script["main"].__globals__, "device", lambda: "")
    with pytest.raises(SystemExit, match="^no GPU: .*$") as exit:
        script["main"](["kernels"])
    assert "\n" not in str(exit.value)


def test_the_table_lists_what_was_not_run(script, capsys):
    assert script["main"](["--dry-run", "overhead"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line}
    assert "passed (dry)" in rows["overhead"] and "Mean(QSGD(bits=4))" in printed
    assert all("not run" in rows[part.name] for part in script["PARTS"] if part.name != "overhead")
    trace = json.loads((script["run"].__globals__["RESULTS"] / "timeline.json").read_text())
    assert any(event["name"] == "thinwire::encode" for event in trace["traceEvents"])


def test_the_study_leaves_out_what_another_process_trains(script, tmp_path, capsys, monkeypatch):
    """This process has claimed one of the seven runs; once it has let go of it, the next call trains that one alone."""
    monkeypatch.setitem(script["main"].__globals__, "device", lambda: "")
    import internet

    options = internet.options_of([str(tmp_path), *script["DRY_STUDY"].split()])
    ours = internet.path_of(internet.Run("4 bits", 3e-3, options.steps, 0), options)
    with internet.claimed(ours) as file:
        assert file is not None
        assert script["main"](["--dry-run", "study"]) == 0
    printed = capsys.readouterr().out
    assert "| 4 bits | 0.003 |  | not run yet |" in printed and "6 of 7 runs are finished" in printed
    before = {path: path.stat().st_mtime_ns for path in ours.parent.glob("*.jsonl")}
    internet.study(options)
    assert "7 of 7 runs are finished" in capsys.readouterr().out
    assert [path for path, time in before.items() if path.stat().st_mtime_ns != time] == [ours]


def test_a_part_ends_at_its_limit_and_counts_what_it_reached(script, tmp_path, monkeypatch):
    monkeypatch.setitem(script["run"].__globals__, "LIMIT_SECONDS", 8)
    lines = "created: 2/2 workers\\n2 workers [3 items]\\n[gw0] [ 33%] PASSED a\\n[gw1] [ 66%] FAILED b \\n"
    hanging = [sys.executable, "-c", f"import time; print('{lines}', flush=True); time.sleep(60)"]
    monkeypatch.setitem(script["run"].__globals__, "_command", lambda part, dry: hanging)
    (result,) = script["run"](script["PARTS"][:1], dry=True, name="no GPU")
    assert (result["state"], result["shown"]) == ("not finished", "1 of 3 checks passed")


def test_the_table_says_why_a_check_failed(script):
    printed = """[3 items]
[gw0] [ 33%] PASSED check.py::a
[gw1] [ 66%] FAILED check.py::b[Mean(SignNorm(), ErrorFeedback())]
[gw1] [100%] FAILED check.py::c
=========================== short test summary info ============================
FAILED check.py::b[Mean(SignNorm(), ErrorFeedback())] - AssertionError: assert 1 == 2
FAILED check.py::c
========================= 2 failed, 1 passed in 1.00s ==========================
"""
    result = script["_summary"](script["PARTS"][0], 1, printed)
    assert (result["state"], result["shown"]) == ("failed", "1 of 3 checks passed")
    assert result["failed"] == [
        "check.py::b[Mean(SignNorm(), ErrorFeedback())] - AssertionError: assert 1 == 2",
        "check.py::c",
    ]


def test_a_codec_that_would_take_minutes_is_left_out(monkeypatch):
    monkeypatch.setenv("THINWIRE_DRY_RUN", "1")
    speed = runpy.run_path(str(ROOT / "scripts" / "gpu_speed.py"))
    monkeypatch.setitem(
        speed["speed"].__globals__, "seconds_to_encode", lambda codec, x: 90.0 * ("Sign" in repr(codec))
    )
    kept = []
    rows = speed["speed"](lambda rows: kept.append(len(rows)))
    assert [row for row in rows if "left out" in row] == [f"{'SignNorm()':48} left out: encoding takes about 90 s"]
    assert kept[-1] == len(rows)
    monkeypatch.setitem(speed["speed"].__globals__, "MOST_SECONDS", -1)
    assert all("left out" in row for row in speed["speed"](lambda rows: None)[1:])


def test_checks_run_side_by_side_and_what_measures_runs_alone(script, tmp_path, monkeypatch):
    order, logs = tmp_path / "order", tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setitem(script["run"].__globals__, "RESULTS", logs)
    meets = (
        "import sys, time, pathlib; at = pathlib.Path(sys.argv[1]); at.open('a').write(f'{sys.argv[2]} begins\\n')\n"
    )
    # Those that run side by side wait for each other; the others take a while.
    meets += "while sys.argv[2] in ('kernels', 'codecs') and at.read_text().count('begins') < 2: time.sleep(0.02)\n"
    meets += "time.sleep(0.5); at.open('a').write(f'{sys.argv[2]} ends\\n'); print('PASSED x')"
    command = [sys.executable, "-c", meets, str(order)]
    monkeypatch.setitem(script["run"].__globals__, "_command", lambda part, dry: [*command, part.name])
    assert script["main"](["--dry-run", "speed", "overhead", "codecs", "kernels"]) == 0
    lines = [line.split() for line in order.read_text().splitlines()]
    assert {tuple(line) for line in lines[:2]} == {("kernels", "begins"), ("codecs", "begins")}
    assert [" ".join(line) for line in lines[4:]] == ["overhead begins", "overhead ends", "speed begins", "speed ends"]


def test_checks_are_found_where_the_script_looks(script):
    assert all((ROOT / file).exists() for part in script["PARTS"] for file in part.files)


BARE = """
import importlib.abc, importlib.metadata, sys
has = {"torch", "numpy", "triton", "pytest", "pytest-xdist", "hypothesis"}
distribution = {name: whose for name, whose in importlib.metadata.packages_distributions().items()}
todo = list(has)
while todo:  # what these depend on themselves
    for line in importlib.metadata.requires(todo.pop()) or []:
        name = __import__("re").match("[A-Za-z0-9_.-]+", line)[0].lower().replace("_", "-")
        if "extra ==" not in line and name not in has:
            has.add(name)
            todo += [name] if any(name == d.name.lower().replace("_", "-") for d in importlib.metadata.distributions()) else []


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        whose = {d.lower().replace("_", "-") for d in distribution.get(name.partition(".")[0], [])} - {"thinwire"}
        if (whose and not whose & has) or name in ("thinwire.kernels._native", "thinwire.comm.tcp._engine"):
            raise ModuleNotFoundError(f"not on a bare machine: {name}", name=name)


sys.meta_path.insert(0, Absent())
import pytest
code = pytest.main(["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "ignore", *sys.argv[1:]])
sys.path[:0] = ["scripts", "benchmarks"]
import gpu_speed, internet
sys.exit(code)
"""


def test_checks_and_measurements_need_what_a_bare_machine_has(script):
    """No package but those that `scripts/gpu.py` names and what they depend on, and no C++ kernels."""
    files = sorted({file for part in script["PARTS"] for file in part.files})
    env = script["environment"](True) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    simulated = [] if torch.version.cuda else ["-p", "helpers.compile_launches"]
    command = [sys.executable, "-W", "ignore", "-c", BARE, *simulated, *files]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize(("program", "expected"), [("compute-sanitizer", "1"), ("python3", "unset")])
def test_memcheck_sees_the_end_of_each_tensor(script, tmp_path, program, expected):
    """PyTorch's allocator would hide what lies beyond a tensor, so it is off."""
    command = tmp_path / program
    command.write_text("#!/bin/sh\necho ${PYTORCH_NO_CUDA_MEMORY_CACHING-unset}\n")
    command.chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    if program != "compute-sanitizer":
        assert script["_started"]([str(command)], tmp_path / "log", environment).wait() == 0
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(tmp_path), prepend=":")
            assert script["_started"]([program], tmp_path / "log", environment).wait() == 0
    assert (tmp_path / "log").read_text().strip() == expected


def test_make_runs_all_parts(script):
    makefile = (ROOT / "Makefile").read_text()
    named = [word for line in makefile.splitlines() if "scripts/gpu.py" in line for word in line.split()[2:]]
    assert sorted(named) == sorted(part.name for part in script["PARTS"])


def test_a_bare_python_runs_the_script(tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "scripts/gpu.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and "kernels" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["sm90"], "unknown target 'sm90'; did you mean 'sm_90'?"),
        (["sm_90", "tpu"], "unknown target 'tpu'; known are gfx90a, gfx942, sm_100, sm_80, sm_90"),
        (["gfx942"], "instructions and bytes are counted in NVIDIA's code; name one of its targets too, such as sm_90"),
    ],
)
def test_the_table_of_kernels_refuses_targets_that_it_cannot_show(targets, expected, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", *targets])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / "scripts" / "gpu_table.py"), run_name="__main__")
    assert exit.value.code == expected


def test_the_benchmark_of_codecs_refuses_a_gpu_that_is_not_there(monkeypatch):
    from thinwire.lab.bench import CodecsBench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU"):
        CodecsBench(device="cuda")
