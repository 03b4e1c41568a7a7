"""User errors that all workers raise together: an error on one worker ends the run on all, with one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ...comm import Communicator
from ...messages import error_place, error_text

Result = TypeVar("Result")


class SharedError(ValueError):
    """A user error that every worker raises with the same message, so one worker can report it for all."""


@contextmanager
def same_error_on_all() -> Iterator[None]:
    """Context for code that does the same on all workers, and so raises the same ValueError on all of them.

    Raises:
        SharedError: in place of the ValueError.
    """
    try:
        yield
    except ValueError as error:
        raise SharedError(_text(error)) from error


def run_on_all(comm: Communicator, do: Callable[[], Result]) -> Result:
    """Run `do` on every worker, and return this worker's result when all have succeeded. All workers call it.

    Args:
        comm: connects the workers.
        do: local work that may raise a ValueError, such as loading data. It must not communicate.

    Raises:
        SharedError: on all workers, where `do` raised a ValueError on any. If only some raised it, the message names the first.

    Example:
        >>> import thinwire as tw
        >>> tw.LocalWorld(2).run(lambda comm: run_on_all(comm, lambda: comm.rank + 1))
        [1, 2]
    """
    results: list[Result] = []
    mistake = None
    try:
        results.append(do())
    except ValueError as error:
        mistake = error
    if comm.all_true(mistake is None):
        return results[0]
    found = comm.gather_objects(mistake and _text(mistake))
    rank, text = next((rank, text) for rank, text in enumerate(found) if text is not None)
    # Where all say the same, no worker is to blame.
    raise SharedError(text if len(set(found)) == 1 else f"worker {rank}: {text}") from mistake


def _text(error: ValueError) -> str:
    return f"{error_text(error)}{error_place(error)}"
