"""Job arrays through submitit, on its stand-ins for SLURM; a real SLURM is tried by scripts/try_cluster.sh."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.command import started, thinwire, with_forked_programs
from helpers.program import wait_until

from thinwire.lab.sweep import read_sweep, status_of
from thinwire.lab.sweep.execute import start, write_down
from thinwire.lab.sweep.slurm import minutes, parsed_options, queued, submit

submitit = pytest.importorskip("submitit")

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


def test_an_array_of_local_jobs(sweep_of):
    sweep_of(steps=2)
    with_forked_programs(["submitit"], run_an_array, Path.cwd())


def run_an_array(folder: Path) -> None:
    os.chdir(folder)
    sweep = read_sweep(Path("grid.toml"))
    jobs = submit(sweep.runs, "time=5,partition=anything", sweep.output / ".sweep" / "slurm", cluster="local")
    assert len(jobs) == len(set(jobs)) == 2
    wait_until(lambda: all(status_of(run).state == "finished" for run in sweep.runs), "the end of both runs")
    for run, job in zip(sweep.runs, jobs, strict=True):
        assert json.loads((run.records / "job.json").read_text()) == {"id": job}
        assert "step 2/2" in (run.records / "log.txt").read_text()


def test_what_is_waiting_names_its_job(sweep_of):
    sweep = sweep_of(steps=2)
    for run in sweep.runs:
        run.records.mkdir(parents=True)
    (sweep.runs[0].records / "job.json").write_text('{"id": "17_0"}')
    assert [status_of(run).detail for run in sweep.runs] == ["job 17_0", ""]


JOB = """
import pickle, signal, sys
from thinwire.lab.sweep.execute import start, write_down
from thinwire.lab.sweep.slurm import Job

def checkpoint(number, frame):
    again = job.checkpoint(sys.argv[1])
    sys.exit(7 if pickle.loads(pickle.dumps(again)).args == (sys.argv[1],) else 8)

job = Job()
signal.signal(signal.SIGUSR2, checkpoint)
job(sys.argv[1])
"""


def test_a_job_that_is_about_to_end_stops_its_run_and_can_be_requeued(sweep_of):
    run = sweep_of(steps=100_000).runs[0]
    write_down(run)
    with started(["-c", JOB, str(run.records / "run.json")], Path.cwd()) as job:
        job.wait_until(lambda: "step" in status_of(run).detail, "the first row of the run")
        assert start(run) is None  # a second job for the same run leaves it alone
        job.send_signal(signal.SIGUSR2)  # as submitit's handler gets it, in the midst of waiting
        assert job.wait(400) == 7, job.stderr
    assert status_of(run).state == "stopped"


# ---- what sbatch is told ----

SBATCH = """#!/bin/sh
cp "$1" submitted
echo "Submitted batch job 4711"
"""
SQUEUE = """#!/bin/sh
echo 4711_0
echo 4711_1
echo 12_3
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Programs with the names of SLURM's, which write down what they are told."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("srun", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")


def test_what_sbatch_is_told(slurm, sweep_of):
    sweep = sweep_of(steps=2)
    assert queued(sweep.runs) == []
    options = "partition=gpu,time=1-2:00:00,gres=gpu:2,cpus-per-task=3,licenses=a:1,array-parallelism=1"
    assert submit(sweep.runs, options, sweep.output / ".sweep" / "slurm") == ["4711_0", "4711_1"]
    lines = Path("submitted").read_text().splitlines()
    for expected in (
        *("--partition=gpu", "--time=1560", "--gres=gpu:2", "--cpus-per-task=3", "--licenses=a:1", "--array=0-1%1"),
        "--job-name=thinwire-sweep",
    ):
        assert f"#SBATCH {expected}" in lines, lines
    assert queued(sweep.runs) == list(sweep.runs)


def test_a_run_gets_a_processor_for_each_worker(slurm, tmp_path, monkeypatch):
    Path(tmp_path / "other.toml").write_text(
        'recipe = "digits"\noutput = "runs"\n[fixed]\nthreads = 2\n[grid]\nworkers = [1, 3]'
    )
    sweep = read_sweep(tmp_path / "other.toml")
    monkeypatch.chdir(tmp_path)
    submit(sweep.runs, "time=10", tmp_path / "slurm")
    assert "#SBATCH --cpus-per-task=6" in Path("submitted").read_text().splitlines()


def test_the_command_submits_what_is_not_queued(slurm, sweep_of):
    sweep = sweep_of(steps=2)
    first, second = (thinwire("sweep", "grid.toml", "--slurm", "time=10", cwd=Path.cwd()) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "2 runs submitted, 4711_0 to 4711_1" in first.stdout and "submitted" not in second.stdout
    assert "2 runs are finished, running or queued already" in second.stdout
    assert [status_of(run).detail for run in sweep.runs] == ["job 4711_0", "job 4711_1"]


@pytest.mark.parametrize(
    "options, complaint",
    [
        ("partition", "--slurm takes name=value"),
        ("partition=gpu", "--slurm needs a time"),
        ("time=soon", "time must be minutes"),
    ],
)
def test_wrong_options_get_one_line(slurm, options, complaint, sweep_of):
    with pytest.raises(ValueError, match=complaint):
        submit(sweep_of(steps=2).runs, options, Path("slurm"))


def test_without_slurm_or_submitit_one_line_says_what_is_missing(sweep_of, monkeypatch):
    sweep = sweep_of(steps=2)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="there is no sbatch here"):
        submit(sweep.runs, "time=10", Path("slurm"))
    with pytest.raises(ValueError, match="there is no sbatch here"):
        queued(sweep.runs)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install thinwire\[slurm\]"):
        submit(sweep.runs, "time=10", Path("slurm"))


def test_options_and_times():
    assert parsed_options("exclude=n1,n2,time=5") == {"exclude": "n1,n2", "time": "5"}
    assert minutes("0:30") == 1 and minutes("3-0:30:00") == 3 * 24 * 60 + 30
