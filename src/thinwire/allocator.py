"""Memory that a training step frees and asks for again: every gradient, and every message."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of options in glibc's malloc.h
_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have this process keep freed memory for its next allocations, instead of giving it back to the system.

    A step frees its gradients and messages, and the next one asks for as much. Where the C library returns large blocks in
    between, the system must find and zero their pages anew in every step, which costs a tenth of a step of a large model on
    CPUs. The command line's workers call this; in a program of your own call it before training, or set
    MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ in its environment. The process keeps as much memory as it ever used.

    Returns:
        Whether it had an effect: with glibc (most of Linux) it has.

    Example:
        >>> from thinwire.allocator import keep_freed_memory
        >>> kept = keep_freed_memory()
    """
    try:
        option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return bool(option(_TRIM_THRESHOLD, _MOST)) and bool(option(_MMAP_THRESHOLD, _MOST))
