"""Starts a run. Under a launcher this process is one worker; otherwise it starts the workers as child processes.

A launcher (torchrun, srun, mpirun) starts the same command once for each worker; see `environment.py`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from ....algorithm import require
from ....comm import Credentials
from ....comm.addresses import address_text
from ....comm.process_world import require_may_start
from ....comm.tcp.endpoint import require_engine
from ....messages import log
from ..config import RunConfig
from ..device import choose_device
from ..folder.checkpoint import remove_unfinished
from ..folder.run_folder import finished_run, folder_of, held_by_first, held_folder, is_finished_on_all
from ..results.callbacks import Callback, EachStep
from ..results.trackers import check_installed
from ..run import loop
from ..run.interrupt import Interrupted, Interruption, requeue
from ..shared_errors import run_on_all
from .connect import check_mpi, choose_interface, connected, credentials_of
from .elastic_tasks import as_task, early_end, join_elastic
from .environment import Environment, set_variables
from .spawn import spawn

MOST_WORKERS = 1024  # each takes more than 100 MB of memory
OnStop = Callable[[Interrupted], None]
OnStart = Callable[[Path], object] | None


def train(
    config: RunConfig, on_stop: OnStop | None = None, callbacks: Sequence[Callback] = (), on_start: OnStart = None
) -> Path:
    """Train and return the run's folder. Under a launcher, each of its processes calls this.

    With `config.resume` it continues from the last checkpoint, and returns at once if the run is finished.

    Args:
        config: everything that determines the run.
        on_stop: called once after a stopped run was saved, before any worker exits. (Launchers kill the other workers as
            soon as one exits.)
        callbacks: functions that add values of your own to each row of metrics, see `callbacks.Callback`; an `EachStep` logs
            between rows.
        on_start: called once with the run's folder, before it trains: by this process, or under a launcher by rank 0.

    Raises:
        ValueError: the configuration or the data are wrong, or the folder is taken; or it is called in another thread
            than the main one, or in a process that may not start workers.
        WorkerError: a worker failed; all others have been stopped.
        Interrupted: SIGINT, SIGTERM, SIGUSR1 or SIGHUP stopped the run, and it was saved.
    """
    require(
        threading.current_thread() is threading.main_thread(),
        "train() answers signals, which only the main thread can; call it there, or in a process of its own",
    )
    strategy = config.parsed_strategy()
    config = _with_credentials(config)
    require(
        not config.elastic or config.relay is None or config.credentials is not None,
        "an elastic run with a relay needs credentials; add --credentials FOLDER (see thinwire keys)",
    )
    between = any(isinstance(callback, EachStep) for callback in callbacks)
    require(
        not (config.elastic and between), "elastic runs call callbacks with rows only; leave EachStep or elastic out"
    )
    require(
        not (strategy.counts_commits and between),
        "with a quorum, callbacks are called only where all workers meet; leave EachStep or the quorum out",
    )
    check_installed(config)
    if config.transport == "mpi":
        check_mpi()
    if config.elastic:
        require_engine("elastic runs")
    environment = set_variables()
    if (environment is None or config.elastic) and (finished := finished_run(config)):
        return finished
    stopped = partial(_stopped, config, on_stop)
    if environment is None:
        return _spawn(config, stopped, callbacks, on_start)
    join = join_elastic if config.elastic else _join
    return join(config, environment, stopped, callbacks, on_start)


def _with_credentials(config: RunConfig) -> RunConfig:
    """The configuration with the credentials of the environment, and with the place where their run meets.

    Raises:
        ValueError: the credentials cannot be used.
    """
    if config.credentials is None and (found := Credentials.from_environment()):
        config = replace(config, credentials=Path(found.folder))
    credentials = credentials_of(config)
    if credentials is None or credentials.address is None or config.lighthouse is not None or config.first_worker == 0:
        return config
    return replace(config, lighthouse=f"https://{address_text(*credentials.address)}")


def _spawn(config: RunConfig, on_stop: OnStop, callbacks: Sequence[Callback], on_start: OnStart) -> Path:
    require_may_start()
    require(
        config.workers == 1 or config.listen or config.relay is not None,
        "several workers that take no connections need a relay; leave --no-listen out, or add --relay HOST:PORT",
    )
    require(
        config.workers <= MOST_WORKERS,
        f"a machine starts at most {MOST_WORKERS} workers, got {config.workers}; start more by torchrun, srun or mpirun",
    )
    credentials = credentials_of(config)
    meets_here = config.lighthouse is None and (credentials is None or credentials.address is None)
    choose_interface(config.interface, one_node=not config.elastic or meets_here)
    choose_device(config)  # a missing GPU is found before workers start
    with held_folder(config) as folder:
        try:
            if on_start is not None:
                on_start(folder)
            spawn(config, folder, callbacks)
        except Interrupted as stop:
            on_stop(stop)
            raise
        finally:
            remove_unfinished(folder / "checkpoints")  # all workers have ended
    return folder


def _join(
    config: RunConfig, environment: Environment, on_stop: OnStop, callbacks: Sequence[Callback], on_start: OnStart
) -> Path:
    """Run as one of a launcher's workers."""
    name, rank, size = environment.launcher, environment.rank, environment.size
    require(config.workers == size, f"{name} started {size} workers, not {config.workers}; leave --workers out")
    with (
        as_task(rank),
        ExitStack() as lock,
        Interruption(early_end(environment, on_stop)) as interruption,
        connected(config, environment) as comm,
    ):
        interruption.waits_since = None  # all have met: a signal that one gets stops all, after a step
        if is_finished_on_all(config, comm):
            return folder_of(config)
        folder, keeps_folder = held_by_first(config, comm, lock)
        try:
            run_on_all(comm, lambda: on_start(folder) if on_start is not None and rank == 0 else None)
            loop.run(config, folder, comm, interruption, callbacks, keeps_folder=keeps_folder)
            interruption.settle()
        except Interrupted as stop:
            if rank == 0:
                on_stop(stop)
            # Launchers kill the others as soon as one exits, so they wait for rank 0.
            comm.barrier()
            raise
    return folder


def _stopped(config: RunConfig, on_stop: OnStop | None, stop: Interrupted) -> None:
    if on_stop:
        on_stop(stop)
    if config.requeue and stop.signal == signal.SIGUSR1:
        log.info(requeue())
