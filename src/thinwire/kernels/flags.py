"""Conditions that kernels detect in their data: known at once in main memory, read once a round on other devices.

A `Flag` is a `bool` where data is in main memory, and a 0-dimensional bool tensor on any other device, where the host
would have to wait for it. Combine flags with `both`, and turn the result into a `bool` once a round, with `read`.

A *fault* is data that no kernel can use, such as a payload that holds no indices. In main memory it is a ValueError at
once. On other devices kernels count it and go on: they write nothing outside of their buffers, and what they give is
of no use. The next `read` on that device raises the ValueError. Ranks that are threads of one process and share a
device share its counters too, so that any of them may raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

Flag = bool | Tensor


class Fault(IntEnum):
    """Kinds of faults; the number is the place of a kind's counter."""

    CORRUPT_INDICES = 0
    OUTSIDE = 1
    UNSORTED = 2


MESSAGES = {
    Fault.CORRUPT_INDICES: "payload: its indices are corrupt; were sender and receiver configured alike?",
    Fault.OUTSIDE: "indices: one lies outside of its segment; is a payload corrupt?",
    Fault.UNSORTED: "indices: expected strictly ascending indices inside each segment; sort them first",
}


def both(a: Flag, b: Flag) -> Flag:
    """Whether both flags are set. No host waits.

    Example:
        >>> both(True, False)
        False
        >>> both(True, torch.tensor(True))
        tensor(True)
    """
    if isinstance(a, bool):
        # A `bool` decides here, without a kernel on the device.
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b.to(a.device)


def all_of(flags: Iterable[Flag]) -> Flag:
    """Whether all flags are set."""
    result: Flag = True
    for flag in flags:
        result = both(result, flag)
    return result


def flag_of(condition: Tensor) -> Flag:
    """A 0-dimensional bool tensor as a flag."""
    return bool(condition) if in_main_memory(condition.device) else condition


def read(flag: Flag) -> bool:
    """The flag as a `bool`, and the faults of its device in the same copy. The host waits for the device.

    A flag on the meta device has no value and counts as set.

    Raises:
        ValueError: if kernels have met a fault on this device since the last `read`.

    Example:
        >>> read(torch.tensor(True))
        True
    """
    if isinstance(flag, bool) or flag.is_meta:
        return flag is not False
    counters = fault_counters(flag.device)
    is_set, *counts = torch.cat([flag.view(1).to(torch.int32), counters]).tolist()
    raise_counted(counters, counts)
    return bool(is_set)


def check_faults(device: torch.device) -> None:
    """Raise the faults that kernels have met on a device since the last `read`; the host waits for the device.

    Args:
        device: of tensors; "cuda" without an index is the current GPU.

    Raises:
        ValueError: if there are any.
    """
    counters = fault_counters(torch.empty(0, device=device).device)  # a tensor's device has its index
    raise_counted(counters, counters.tolist())


def raise_counted(counters: Tensor, counts: list[int]) -> None:
    """Raise the faults in `counts`, the values of a device's counters, and reset the counters."""
    if any(counts):
        counters.zero_()  # before the error, or the next `read` would raise the same faults again
        raise ValueError("; ".join(MESSAGES[fault] for fault in Fault if counts[fault]))


def demand(condition: Tensor, fault: Fault, message: str) -> None:
    """Require a condition: raise at once in main memory, count a fault on any other device.

    Args:
        condition: a 0-dimensional bool tensor.
        fault: which fault it is if the condition does not hold.
        message: of the error in main memory.

    Raises:
        ValueError: in main memory, if the condition does not hold.
    """
    assert condition.dtype == torch.bool, condition.dtype  # of a byte, ~1 is 254
    if in_main_memory(condition.device):
        if not condition:
            raise ValueError(message)
        return
    counter = fault_counters(condition.device)[fault : fault + 1]
    # An atomic addition, for kernels on several streams share the counter.
    counter.index_add_(0, torch.zeros(1, dtype=torch.int64, device=condition.device), (~condition).view(1).int())


def in_main_memory(device: torch.device) -> bool:
    """Whether a device is main memory, where kernels raise faults themselves: a look at data costs no wait."""
    return device.type == "cpu"


# One tensor for each device: all kernels must add to the counters that `read` looks at.
@cache
def fault_counters(device: torch.device) -> Tensor:
    """The int32 counters of the faults of a tensor's device, for kernels to add to."""
    return torch.zeros(len(Fault), dtype=torch.int32, device=device)
