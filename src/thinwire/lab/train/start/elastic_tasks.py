"""An elastic run as tasks of a launcher (torchrun, srun, mpirun): this process is one worker, and nothing watches it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from ....algorithm import require
from ....comm.addresses import own_address
from ....comm.notice import said_if_late
from ....comm.store import ANSWER_SECONDS, answered
from ....messages import log
from ..config import RunConfig
from ..folder.checkpoint import latest
from ..folder.run_folder import make_folder
from ..results.callbacks import Callback
from ..run import loop
from ..run.interrupt import Interrupted, Interruption
from ..shared_errors import SharedError
from .connect import SECONDS, awaited, choose_interface, credentials_of, fresh, meeting_store, torchrun_has_store
from .environment import Environment
from .lighthouse import communicator, lighthouse_of
from .watch import WorkerError
from .worker import failure, ignore_file_errors

KEY = "thinwire/lighthouse"
# After an error of all workers the others wait, so that rank 0 can print it before the launcher kills it. Most launchers end
# them as soon as rank 0 has ended.
TELLING_SECONDS = 10.0


def join_elastic(
    config: RunConfig,
    environment: Environment,
    on_stop: Callable[[Interrupted], None],
    callbacks: Sequence[Callback],
    on_start: Callable[[Path], object] | None,
) -> Path:
    """Run as one of a launcher's tasks, and return the run's folder.

    Raises:
        ValueError: name or resume are missing, or the configuration or the data are wrong.
        WorkerError: this worker failed.
        Interrupted: a signal stopped the run.
    """
    require(
        config.name is not None and config.resume,
        f"elastic runs under {environment.launcher} need --name NAME --resume, so that a task that is started again goes on",
    )
    choose_interface(config.interface, environment.one_node)
    # The launcher numbers the workers of all machines.
    config = replace(config, workers=environment.size, first_worker=0)
    folder = make_folder(config)  # of this machine, or one that tasks share
    if on_start is not None and environment.rank == 0:
        on_start(folder)
    with as_task(environment.rank):
        try:
            with (
                Interruption(early_end(environment, on_stop, folder / "checkpoints")) as interruption,
                _lighthouse(config, environment) as address,
                communicator(config, address, environment.rank) as comm,
            ):
                loop.run(config, folder, comm, interruption, callbacks, is_restart=environment.rank > 0)
        except Interrupted as stop:
            if environment.rank == 0:
                on_stop(stop)
            raise
    return folder


@contextmanager
def as_task(rank: int) -> Iterator[None]:
    """Context in which this process is a launcher's worker.

    Raises:
        WorkerError: this worker failed.
        SharedError: all did; the first one tells it, and the others wait meanwhile.
    """
    threading.excepthook = ignore_file_errors
    try:
        yield
    except Interrupted:
        raise
    except SharedError:
        time.sleep(TELLING_SECONDS if rank else 0)
        raise
    except Exception as error:
        raise WorkerError(failure(rank, error)) from error


def early_end(
    environment: Environment, on_stop: Callable[[Interrupted], None], checkpoints: Path | None = None
) -> Callable[[int], None]:
    """What ends this process after a signal while it waits for others. The first worker of each machine says it."""

    def end(number: int) -> None:
        stop = Interrupted(number, None if checkpoints is None else latest(checkpoints))
        if environment.rank == 0:
            on_stop(stop)
        elif environment.local_rank == 0:
            log.warning(stop)
        os._exit(stop.exit_code)

    return end


@contextmanager
def _lighthouse(config: RunConfig, environment: Environment) -> Iterator[str]:
    """The address of the Lighthouse: the configured one, or that of task 0, which the others read from the launcher's store."""
    if config.lighthouse is not None:
        # `own_address` takes the interface that reaches it.
        os.environ["MASTER_ADDR"] = urlsplit(config.lighthouse).hostname or environment.master_address
        with lighthouse_of(config, environment.master_address) as address:
            yield address
        return
    credentials = credentials_of(config)
    with said_if_late(awaited(environment, credentials)):
        store = meeting_store(environment, credentials)
        if torchrun_has_store():  # after a restart it still has the address of the old Lighthouse
            store = fresh(store, environment.rank, environment.size)
        found = answered(partial(store.get, KEY), SECONDS + ANSWER_SECONDS).decode() if environment.rank > 0 else None
    if found is not None:
        yield found
        return
    with lighthouse_of(config, own_address()[1]) as address:
        store.set(KEY, address)
        yield address
