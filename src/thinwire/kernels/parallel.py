"""How many threads the C++ kernels use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .backend import backend_for

MOST_THREADS = 1024  # each has a stack; more end the process


def set_threads(number: int) -> None:
    """Let each call of a C++ kernel use up to `number` threads of this process; 1 by default.

    Payloads and results do not depend on it. Quantizers, signs, ternary values, casts, top-k, momentum and `all_finite`
    split calls of 131,072 elements or more, and only where buckets are shorter than that; all other work stays on the
    calling thread. So does a call that begins while another thread's call uses the threads. The setting does not pass to
    child processes that are spawned.

    Args:
        number: threads, the calling one included. More than the idle cores of this process => slower.

    Without the C++ kernels this has no effect; `torch.set_num_threads` then sets the threads of the reference.

    Raises:
        ValueError: if `number` is less than 1 or above `MOST_THREADS`.

    Example:
        >>> from thinwire import kernels
        >>> kernels.set_threads(2)
        >>> kernels.threads()
        2
        >>> kernels.set_threads(1)
    """
    if not 1 <= number <= MOST_THREADS:
        raise ValueError(f"threads must be an integer from 1 to {MOST_THREADS}, got {number}")
    if backend_for("cpu") == "cpu":
        from . import _native  # here, because the extension may be missing

        _native.set_threads(number)


def threads() -> int:
    """How many threads a call of a C++ kernel may use."""
    if backend_for("cpu") != "cpu":
        return 1
    from . import _native

    return _native.threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which PyTorch works on the calling thread alone.

    How it shares a product or a decomposition between threads changes the rounding, and workers may have different numbers of
    threads.

    Example:
        >>> import torch
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
