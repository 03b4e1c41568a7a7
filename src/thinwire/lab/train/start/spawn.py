"""Starts the workers as processes on this machine. They end with their launcher, even if they are stopped (SIGSTOP)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from ....comm.addresses import own_address
from ....comm.process_world import start_process, worker_context
from ....messages import MORE_PROCESSES, error_text
from ...variables import variables_set
from ..config import RunConfig
from ..results.callbacks import Callback
from ..signals import SIGNALS, blocked
from .connect import credentials_of, loopback_store
from .environment import LOOPBACK
from .lighthouse import lighthouse_of
from .watch import Watch, WorkerError, requests_passed_on
from .worker import work

# The fork server imports these once, so that workers need not.
PRELOADED = [
    *("thinwire.comm.parent_death", "thinwire.lab.train.start.spawn"),
    *("sklearn.datasets", "torch.utils.tensorboard", "torch._dynamo"),
]


def spawn(config: RunConfig, folder: Path, callbacks: Sequence[Callback] = ()) -> None:
    """Start the workers and wait for the end of the run.

    Raises:
        ValueError: the port is taken, the credentials have expired when a worker is started again, or all workers found the
            same user error.
        WorkerError: a worker failed; all others have been stopped. In an elastic run: or it was killed too often.
        Interrupted: a signal stopped the run.
    """
    credentials = credentials_of(config)
    store = loopback_store(config.port, credentials)
    host = LOOPBACK if config.interface is None else own_address(config.interface)[1]
    meeting = (credentials and credentials.address) or (host, 0)
    context = worker_context(PRELOADED)
    workers: list[BaseProcess] = []
    with ExitStack() as stack:
        lighthouse = stack.enter_context(lighthouse_of(config, *meeting)) if config.elastic else None
        requests = stack.enter_context(requests_passed_on(workers))

        def start(place: int, is_restart: bool) -> BaseProcess:
            arguments = (place, config, folder, store.port, callbacks, lighthouse, is_restart)
            credentials_of(config)  # before a restart, they may have expired
            # Not a daemon, because it starts data loaders, which are processes.
            process = context.Process(target=work, args=arguments)
            try:
                with for_children(config):
                    _start(process)
            except (BlockingIOError, ConnectionError, EOFError) as error:
                raise WorkerError(f"worker {place} does not start ({error_text(error)}); {MORE_PROCESSES}") from error
            return process

        for place in range(config.workers):
            workers.append(start(place, False))
        try:
            restart = partial(start, is_restart=True) if config.elastic else None
            Watch(workers, folder, requests, store, config.timeout, restart, config.first_worker).until_the_end()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what was written so far is in {folder}") from None


def _start(process: BaseProcess, seconds: float = 10.0) -> None:
    """Start a process; try again while a fork server that was just killed refuses or hangs up, until another has started."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return start_process(process)
        except (ConnectionError, EOFError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def for_children(config: RunConfig) -> Iterator[None]:
    """Context that sets what child processes inherit: the number of threads, and blocked signals.

    Workers unblock the signals when their handlers are ready. The fork server never does, so SLURM's signals cannot end it.
    """
    variables = {"OMP_NUM_THREADS": str(config.threads)}
    # PyTorch logs each lost connection with a C++ stack, and the exception says the same.
    variables["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")
    with blocked(SIGNALS), variables_set(variables):
        yield
