"""Batch files of SLURM and their jobs, with programs that stand for SLURM's; a real one is tried by scripts/try_cluster.sh."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import started, thinwire

from thinwire.lab.sweep import read_sweep, status_of
from thinwire.lab.sweep.execute import start
from thinwire.lab.sweep.slurm import parsed_options, queued, submit

GRID = """
recipe = "digits"
output = "runs"
[fixed]
workers = 1
max_steps = {steps}
epochs = 5000
log_every = 1
[grid]
seed = [1, 2]
"""


@pytest.fixture
def sweep_of(tmp_path, monkeypatch):
    """A sweep of two runs with so many steps; the working directory is its."""

    def make(steps: int):
        monkeypatch.chdir(tmp_path)
        Path("grid.toml").write_text(GRID.format(steps=steps))
        return read_sweep(Path("grid.toml"))

    return make


SBATCH = """#!/bin/sh
cp "$2" submitted
echo "4711;cluster"
"""
SQUEUE = """#!/bin/sh
echo 4711_0
echo 4711_1
echo 12_3
"""
SRUN = """#!/bin/sh
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "$@" > requeued
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Programs with the names of SLURM's, which write down what they are told."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")


def of_array(task: int) -> dict[str, str]:
    """The environment of one job of the array."""
    return os.environ | {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": str(task)}


# ---- the jobs ----


def test_a_job_of_the_array_runs_its_part_and_fails_after_a_failed_run(slurm, sweep_of):
    """The first of two jobs for three runs; where the folder of its first run should be, there is a file."""
    runs = read_more(sweep_of(steps=2), seeds=[1, 2, 3]).runs
    jobs = submit(runs, "time=5", pack=2)
    assert jobs == ["4711_0", "4711_0", "4711_1"]
    runs[0].folder.parent.mkdir(exist_ok=True)
    runs[0].folder.write_text("no folder")
    python, *words = what_the_job_starts(0)
    assert python == sys.executable
    with started(words, Path.cwd()) as job:
        assert job.wait(400) == 1, job.stdout + job.stderr
    assert [status_of(run).state for run in runs] == ["failed", "finished", "waiting"]
    for run, job in zip(runs, jobs, strict=True):
        assert json.loads((run.records / "job.json").read_text()) == {"id": job}
    assert "step 2/2" in (runs[1].records / "log.txt").read_text()


def what_the_job_starts(task: int) -> list[str]:
    """The command that the batch file gives to `srun`, which would import everything anew; the file's exit code is its."""
    srun = Path("programs/srun")
    srun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 3\n")
    done = subprocess.run(["bash", "submitted"], env=of_array(task), capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("number, requeued", [(signal.SIGUSR2, True), (signal.SIGTERM, False)])
def test_a_job_that_is_about_to_end_stops_its_run_and_is_requeued(slurm, sweep_of, number, requeued, monkeypatch):
    runs = sweep_of(steps=100_000).runs
    submit(runs, "time=5", pack=2)
    for name, value in of_array(0).items():
        monkeypatch.setenv(name, value)
    names = [run.folder.name for run in runs]
    with started(["-m", "thinwire.lab.sweep", "job", str(runs[0].records.parent), *names], Path.cwd()) as job:
        job.wait_until(lambda: "step" in status_of(runs[0]).detail, "the first row of the run")
        assert start(runs[0]) is None  # a second job for the same run leaves it alone
        job.send_signal(number)
        assert job.wait(400) == 75, job.stderr
    assert [status_of(run).state for run in runs] == ["stopped", "waiting"]
    assert Path("requeued").exists() is requeued
    if requeued:
        assert Path("requeued").read_text() == "requeue 4711_0\n"


def test_what_is_waiting_names_its_job(sweep_of):
    sweep = sweep_of(steps=2)
    for run in sweep.runs:
        run.records.mkdir(parents=True)
    (sweep.runs[0].records / "job.json").write_text('{"id": "17_0"}')
    assert [status_of(run).detail for run in sweep.runs] == ["job 17_0", ""]


# ---- the batch file ----


def test_what_sbatch_is_told(slurm, sweep_of):
    sweep = sweep_of(steps=2)
    assert queued(sweep.runs) == []
    options = "partition=gpu,time=1-2:00:00,gres=gpu:2,cpus_per_task=3,licenses=a:1,array-parallelism=1"
    assert submit(sweep.runs, options) == ["4711_0", "4711_1"]
    lines = Path("submitted").read_text().splitlines()
    for expected in (
        *(
            "--partition=gpu",
            "--time=1-2:00:00",
            "--gres=gpu:2",
            "--cpus-per-task=3",
            "--licenses=a:1",
            "--array=0-1%1",
        ),
        *("--job-name=runs", "--signal=USR2@90", "--requeue", f"--chdir={Path.cwd()}"),
    ):
        assert f"#SBATCH {expected}" in lines, lines
    assert queued(sweep.runs) == list(sweep.runs)


def test_names_with_spaces_and_quotes_reach_sbatch_whole(slurm, tmp_path, monkeypatch):
    place = tmp_path / 'my "first" runs \\ it\'s #1'
    place.mkdir()
    monkeypatch.chdir(place)
    Path("grid.toml").write_text('recipe = "digits"\noutput = "all runs"\n[grid]\nseed = [1, 2]')
    submit(read_sweep(Path("grid.toml")).runs, "time=10,comment=a b")
    lines = Path("submitted").read_text().splitlines()
    told = dict(as_sbatch_reads(line).partition("=")[::2] for line in lines if line.startswith("#SBATCH --"))
    assert told["--job-name"] == "all runs" and told["--chdir"] == str(place) and told["--comment"] == "a b"
    assert told["--output"] == "all runs/.sweep/slurm/%A_%a.log" and told["--time"] == "10"


def as_sbatch_reads(line: str) -> str:
    """The first word after "#SBATCH", read as sbatch does it: a backslash escapes, in single quotes too."""
    reader = shlex.shlex(line.removeprefix("#SBATCH"), posix=True, punctuation_chars=False)
    reader.whitespace_split, reader.escapedquotes = True, "\"'"
    return next(reader)


def test_where_squeue_fails_nothing_is_submitted_again(slurm, sweep_of, tmp_path):
    sweep = sweep_of(steps=2)
    submit(sweep.runs, "time=10")
    (tmp_path / "programs" / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: no answer' >&2\nexit 1\n")
    with pytest.raises(
        ValueError, match="squeue does not say which jobs are queued: slurm_load_jobs error: no answer; "
    ):
        queued(sweep.runs)


def test_a_run_gets_a_processor_for_each_worker(slurm, tmp_path, monkeypatch):
    Path(tmp_path / "other.toml").write_text(
        'recipe = "digits"\noutput = "runs"\n[fixed]\nthreads = 2\n[grid]\nworkers = [1, 3]'
    )
    sweep = read_sweep(tmp_path / "other.toml")
    monkeypatch.chdir(tmp_path)
    submit(sweep.runs, "time=10")
    assert "#SBATCH --cpus-per-task=6" in Path("submitted").read_text().splitlines()


def test_a_dry_run_writes_a_file_to_read_and_submits_nothing(sweep_of):
    """It needs no SLURM."""
    sweep = sweep_of(steps=2)
    done = thinwire("sweep", "grid.toml", "--slurm", "time=10", "--pack", 2, "--dry-run", cwd=Path.cwd())
    assert done.returncode == 0 and done.stdout == "  sbatch runs/.sweep/slurm/runs.sbatch\n", done.stderr
    text = Path("runs/.sweep/slurm/runs.sbatch").read_text()
    assert "#SBATCH --array=0-0\n" in text and "pack=2 " in text
    assert [line.strip() for line in text.splitlines() if line.startswith("  ")] == [r.folder.name for r in sweep.runs]
    assert subprocess.run(["bash", "-n", "runs/.sweep/slurm/runs.sbatch"]).returncode == 0
    assert not list(Path("runs/.sweep").glob("*/job.json"))
    alone = thinwire("sweep", "grid.toml", "--pack", 2, cwd=Path.cwd())
    assert alone.returncode == 2 and "--pack is for the jobs of --slurm" in alone.stderr


def test_the_command_submits_what_is_not_queued(slurm, sweep_of):
    sweep = sweep_of(steps=2)
    first, second = (thinwire("sweep", "grid.toml", "--slurm", "time=10", cwd=Path.cwd()) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "2 runs submitted, 4711_0 to 4711_1" in first.stdout and "submitted" not in second.stdout
    assert "2 runs are finished, running or queued already" in second.stdout
    assert [status_of(run).detail for run in sweep.runs] == ["job 4711_0", "job 4711_1"]


@pytest.mark.parametrize(
    "options, complaint",
    [("partition", "--slurm takes name=value"), ("partition=gpu", "--slurm needs a time")],
)
def test_wrong_options_get_one_line(slurm, options, complaint, sweep_of):
    with pytest.raises(ValueError, match=complaint):
        submit(sweep_of(steps=2).runs, options)


def test_what_slurm_refuses_gets_one_line(slurm, sweep_of, tmp_path):
    (tmp_path / "programs" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(ValueError, match=r"SLURM refused runs/.*sbatch: sbatch: error: invalid partition"):
        submit(sweep_of(steps=2).runs, "time=1")


def test_without_slurm_one_line_says_what_is_missing(sweep_of, monkeypatch):
    sweep = sweep_of(steps=2)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="there is no sbatch here"):
        submit(sweep.runs, "time=10")
    with pytest.raises(ValueError, match="there is no sbatch here"):
        queued(sweep.runs)


def test_options_with_commas():
    assert parsed_options("exclude=n1,n2,time=5") == {"exclude": "n1,n2", "time": "5"}


def read_more(sweep, seeds: list[int]):
    """The sweep with these seeds."""
    text = sweep.file.read_text().replace("seed = [1, 2]", f"seed = {seeds}")
    sweep.file.write_text(text)
    return read_sweep(sweep.file)
