"""What one worker finds wrong ends the run on all of them, at once and in the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ...comm import Communicator

Result = TypeVar("Result")


class SharedMistake(ValueError):
    """A mistake of the user's that all workers raise alike, so that one of them may tell."""


@contextmanager
def alike() -> Iterator[None]:
    """Context in which all workers do the same, so that a ValueError of one is that of all.

    Raises:
        SharedMistake: in place of it.
    """
    try:
        yield
    except ValueError as error:
        raise SharedMistake(str(error)) from error


def together(comm: Communicator, do: Callable[[], Result]) -> Result:
    """What `do` returns on this worker, once it has succeeded on all; they call this together.

    Args:
        comm: connects the workers.
        do: something that may find a mistake, such as in the data, and raise a ValueError. It communicates with nobody.

    Raises:
        SharedMistake: on all workers alike; if only some found it, the message names the first of these.

    Example:
        >>> import thinwire as tw
        >>> tw.LocalWorld(2).run(lambda comm: together(comm, lambda: comm.rank + 1))
        [1, 2]
    """
    result, mistake = None, None
    try:
        result = do()
    except ValueError as error:
        mistake = error
    found = comm.gather_objects(mistake and str(mistake))
    if any(text is not None for text in found):
        rank, text = next((rank, text) for rank, text in enumerate(found) if text is not None)
        raise SharedMistake(text if len(set(found)) == 1 else f"worker {rank}: {text}") from mistake
    return result
