"""Elastic training runs whose workers kill themselves; for tests."""

from __future__ import annotations

import hashlib
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import sys
import time
from pathlib import Path

import torch

from helpers.command import fork_server_or_spawn, fork_what_is_started
from helpers.program import wait_until
from thinwire import ElasticSampler
from thinwire.comm.process_world import worker_context
from thinwire.lab.cli import main
from thinwire.lab.recipes import recipes
from thinwire.lab.train import train
from thinwire.lab.train.folder import checkpoint
from thinwire.lab.train.models import DigitsNet
from thinwire.lab.train.start.spawn import PRELOADED

DYING = ((2, 2), (0, 8))  # workers, and the step after which each dies once, when all three are there


round_ended = ElasticSampler.round_ended


def record(sampler, claims):
    """Write down which blocks each committed round has, in the folder of the run: every worker that knows of it."""
    round_ended(sampler, claims)
    blocks = sorted(block for one in sampler.last_committed.values() for block in one)
    if claims is not None and Path("blocks").is_dir():
        with Path(f"blocks/{os.getpid()}").open("a") as file:
            file.write(json.dumps([sampler._elastic.counts.committed, blocks]) + "\n")


ElasticSampler.round_ended = record  # workers import this module with their callback
construct = ElasticSampler.__init__


def note(sampler, *arguments, **options):
    """Write down which processes have come so far as to join a round, in the folder of the run."""
    construct(sampler, *arguments, **options)
    if Path("begun").is_dir():
        Path(f"begun/{os.getpid()}").touch()


ElasticSampler.__init__ = note


def dying(model, row, comm):
    """A callback: workers die one after the other; else it counts how many different models there are."""
    for number, step in DYING if comm.size == 3 else ():
        died = Path(f"died-{number}")
        if not died.exists() and row["step"] >= step:
            if comm.number == number:
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            break
    if comm.size == 2:  # let the third come
        num_died = len(list(Path().glob("died-*")))
        wait_until(lambda: len(list(Path("begun").iterdir())) >= 3 + num_died, "the worker that is started again", 45)
        time.sleep(0.3)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"models": len(set(comm.gather_objects(digest)))}


def fork_the_server() -> None:
    """Fork the fork server from this process, which has imported what workers need, before threads of a run are there."""
    spawn, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, fork_server_or_spawn
    worker_context(PRELOADED)
    multiprocessing.forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = spawn


def elastic_run(folder: str, strategy: str, epochs: int, resume: bool) -> None:
    """Train in this folder, with a row after each step."""
    from dataclasses import replace

    fork_the_server()
    os.chdir(folder)
    for name in ("blocks", "begun"):
        os.makedirs(name, exist_ok=True)
    config = recipes()["digits"].config
    options = {"elastic": True, "workers": 3, "log_every": 1, "name": "run", "strategy": strategy, "timeout": 60.0}
    train(replace(config, **options, epochs=epochs, resume=resume), callbacks=[] if resume else [dying])


def command(folder: str, *arguments: str) -> None:
    """`thinwire ARGUMENTS` in this folder, with workers that are forked before torchft has threads."""
    fork_the_server()
    os.chdir(folder)
    sys.exit(main(arguments))


rename = checkpoint._rename


def rename_or_die(unfinished, finished):
    """Where a file says so: kill this worker and its launcher when a checkpoint is written, before it has its name."""
    if Path(f"dies-{finished.name}").exists():
        os.kill(int(Path("launcher").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    rename(unfinished, finished)


checkpoint._rename = rename_or_die


def nothing(model, row, comm):
    """A callback, so that workers import this module."""
    return {}


def on_own_disk(folder: str, number: int, lighthouse: str) -> None:
    """One worker of three, with a folder of its own, until step 12."""
    from dataclasses import replace

    fork_what_is_started()  # so that a fork server need not import all modules anew
    os.chdir(folder)
    Path("launcher").write_text(str(os.getpid()))
    options = {"elastic": True, "workers": 1, "first_worker": number, "lighthouse": lighthouse, "min_workers": 3}
    options |= {"strategy": "Gradients(Mean(TopK(0.1), ErrorFeedback()))", "model": DigitsNet(width=4)}
    options |= {"name": "run", "resume": True, "log_every": 1, "checkpoint_every": 2, "keep": 9, "max_steps": 12}
    train(replace(recipes()["digits"].config, **options), callbacks=[nothing])


def killing_the_fork_server(model, row, comm):
    """A callback: worker 0 kills the process that has started it, once, after a checkpoint."""
    died = Path("died-server")
    if row["step"] == 4 and comm.rank == 0 and not died.exists():
        died.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)
    return {}


def run_without_fork_server(folder: str, elastic: bool) -> None:
    """Train in this folder; the fork server is killed meanwhile."""
    from dataclasses import replace

    from thinwire.lab.train.start.watch import WorkerError

    fork_the_server()
    os.chdir(folder)
    options = {"elastic": elastic, "workers": 2, "log_every": 1, "checkpoint_every": 2, "name": "run", "max_steps": 8}
    try:
        train(replace(recipes()["digits"].config, **options), callbacks=[killing_the_fork_server])
    except WorkerError as error:
        print(f"WorkerError: {error}")
