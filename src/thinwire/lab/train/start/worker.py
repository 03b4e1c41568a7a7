"""A worker process of this machine: it trains, tells the launcher how it ended, and exits with a code that says so."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ....comm.members import LeftOut
from ....comm.parent_death import end_with_parent
from ....comm.store import Store, connected_store
from ....messages import MORE_PROCESSES, error_place, error_text, install_for_warnings, lacks_processes, log
from ...output import FULL
from ..config import RunConfig
from ..results.callbacks import Callback
from ..run import loop
from ..run.interrupt import Interrupted, Interruption
from ..shared_errors import SharedError, same_error_on_all
from .connect import RENDEZVOUS, choose_interface, connected, credentials_of
from .environment import LOOPBACK, Environment
from .lighthouse import communicator

MISTAKEN = 2  # exit code of a worker after a user error that all workers found
LEFT_OUT = 3  # exit code of a worker of an elastic run that is left out of it, see `members.LeftOut`


def work(
    place: int,
    config: RunConfig,
    folder: Path,
    port: int,
    callbacks: Sequence[Callback],
    lighthouse: str | None,
    is_restart: bool,
) -> None:
    """The main function of a worker process.

    Args:
        place: of this worker among those of this machine, from 0 on.
        config: of the run.
        folder: of the run.
        port: of the launcher's store.
        callbacks: of the run.
        lighthouse: address of the Lighthouse of an elastic run; None for a fixed number of workers.
        is_restart: whether this worker replaces one that died.
    """
    end_with_parent()
    threading.excepthook = ignore_file_errors
    install_for_warnings()
    host = LOOPBACK if lighthouse is None else urlsplit(lighthouse).hostname or LOOPBACK
    environment = Environment("thinwire", place, config.workers, place, config.workers, host, port)
    os.environ.update(environment.variables())
    store, number = None, config.first_worker + place
    try:
        # An elastic worker may wait long for others, and cannot save alone.
        end_early = None if lighthouse is None else lambda number: os._exit(128 + number)
        with Interruption(end_early) as interruption:
            credentials = credentials_of(config)
            store = connected_store(LOOPBACK, port, RENDEZVOUS, credentials)
            if lighthouse is None:
                with connected(config, environment, store) as comm, telling_why(store, folder, number):
                    loop.run(config, folder, comm, interruption, callbacks)
                    interruption.settle()
            else:
                with same_error_on_all():
                    choose_interface(config.interface, one_node=host == LOOPBACK)
                with communicator(config, lighthouse, number, is_late=is_restart) as comm:
                    loop.run(config, folder, comm, interruption, callbacks, is_restart)
            store.set(f"finished/{number}", "")
    except Interrupted as stop:
        os._exit(128 + stop.signal)
    except SharedError as mistake:
        assert store is not None, "workers share an error only once they are connected"
        store.set("mistake", str(mistake))
        os._exit(MISTAKEN)
    except LeftOut as error:
        log.error(error)
        os._exit(LEFT_OUT)
    except BaseException as error:
        if isinstance(error, Exception):
            report_failure(store, folder, number, error)
        os._exit(1)  # at once: a normal exit would wait for threads that wait for other workers
    if lighthouse is not None:
        os._exit(0)  # at once: threads wait for others


@contextmanager
def telling_why(store: Store, folder: Path, number: int) -> Iterator[None]:
    """Context that tells the launcher of a failure while the connections are still open: without them, others fail too."""
    try:
        yield
    except (Interrupted, SharedError):
        raise
    except Exception as error:
        report_failure(store, folder, number, error)
        raise


def report_failure(store: Store | None, folder: Path, number: int, error: Exception) -> None:
    """Tell the launcher why this worker failed, unless it knows, and write the traceback to the folder if possible."""
    # The time tells the launcher who failed first.
    came, line = time.monotonic_ns(), failure(number, error)
    path = folder / f"worker-{number}-error.txt"
    with contextlib.suppress(OSError):
        path.write_text(f"{line}\n\n{traceback.format_exc()}", encoding="utf-8")
        line += f" (traceback in {path})"
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the launcher is gone
            store.compare_set(f"failed/{number}", "", f"{came} {line}")


def ignore_file_errors(raised: threading.ExceptHookArgs) -> None:
    """Hide the traceback of a thread that cannot write a file; TensorBoard raises the error again in the main thread."""
    if not isinstance(raised.exc_value, OSError):
        threading.__excepthook__(raised)


def failure(number: int, error: Exception) -> str:
    """Say in one line why this worker failed. A gradient that is not finite stops all workers; its error names the first.

    Example:
        >>> failure(3, ValueError("worker 3: the Lighthouse does not answer"))
        'worker 3 failed: the Lighthouse does not answer'
    """
    if isinstance(error, FloatingPointError):
        return str(error)
    return f"worker {number} failed: {in_one_line(error).removeprefix(f'worker {number}: ')}"


def in_one_line(error: Exception) -> str:
    """An error as one line, with the line of the user's code that raised it. An OSError gets the name of its number.

    What the system's limits cause gets a remedy.

    Example:
        >>> in_one_line(OSError(28, "No space left on device", "runs/a/metrics.jsonl"))
        "ENOSPC: No space left on device: 'runs/a/metrics.jsonl'; free some space, and go on with --resume"
    """
    place = error_place(error)
    if isinstance(error, OSError) and error.filename is not None and (name := errno.errorcode.get(error.errno or 0)):
        is_full = error.errno in FULL
        remedy = "; free some space, and go on with --resume" * is_full
        return f"{name}: {error.strerror}: {os.fsdecode(error.filename)!r}{place}{remedy}"
    text = " ".join(error_text(error).split())
    remedy = f"; {MORE_PROCESSES}" if lacks_processes(error) and MORE_PROCESSES not in text else ""
    return text + place + remedy
