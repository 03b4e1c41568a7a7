"""Conditions that kernels detect in their data: known at once in main memory, read once a round on other devices.

A `Flag` is a `bool` where data is in main memory. On any other device, where the host would have to wait, it is `Unread`.
Combine flags with `both`, which starts no kernel, and turn the result into a `bool` once a round, with `read`.

A *fault* is data that no kernel can use, such as a payload that holds no indices. In main memory it is a ValueError at
once. On other devices kernels count it and go on: they write nothing outside of their buffers, and what they give is
of no use. The next `read` on that device raises the ValueError. Ranks that are threads of one process and share a
device share its counters too, so that any of them may raise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor

from ..streams import current_stream, has_streams


class Unread(tuple[Tensor, ...]):
    """Conditions on a device, 0-dimensional bool tensors: whether all of them hold. Taken as a `bool`, it is read."""

    def __bool__(self) -> bool:
        return read(self)


Flag = bool | Unread


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
        >>> both(True, Unread([torch.tensor(True)]))
        (tensor(True),)
    """
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return Unread(a + b)


def all_of(flags: Iterable[Flag]) -> Flag:
    """Whether all flags are set."""
    result: Flag = True
    for flag in flags:
        result = both(result, flag)
    return result


def flag_of(condition: Tensor) -> Flag:
    """A 0-dimensional bool tensor as a flag."""
    return bool(condition) if in_main_memory(condition.device) else Unread([condition])


def read(flag: Flag) -> bool:
    """The flag as a `bool`, and the faults of its device in the same copy. The host waits for the device.

    A flag on the meta device has no value and counts as set.

    Raises:
        ValueError: if kernels have met a fault on this device since the last `read`.

    Example:
        >>> read(Unread([torch.tensor(True), torch.tensor(False)]))
        False
    """
    if isinstance(flag, bool):
        return flag
    if any(part.is_meta for part in flag):
        return True
    counters = fault_counters(flag[0].device)
    conditions = torch.stack([part.to(counters.device) for part in flag]).to(torch.int32)
    numbers = torch.cat([conditions, counters]).tolist()
    _raise_counted(counters, numbers[len(flag) :])
    return all(numbers[: len(flag)])


def check_faults(device: torch.device) -> None:
    """Raise the faults that kernels have met on a device since the last `read`; the host waits for the device.

    Args:
        device: of tensors; "cuda" without an index is the current GPU.

    Raises:
        ValueError: if there are any.
    """
    counters = fault_counters(
        torch.empty(0, dtype=torch.float32, device=device).device
    )  # a tensor's device has its index
    _raise_counted(counters, counters.tolist())


def _raise_counted(counters: Tensor, counts: list[int]) -> None:
    """Raise the faults in `counts`, the values of a device's counters, and reset the counters."""
    if any(counts):
        counters.zero_()  # before the error, or the next `read` would raise the same faults again, on any stream
        _finish(counters.device)
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


_COUNTERS: dict[torch.device, Tensor] = {}
_LOCK = threading.Lock()


def fault_counters(device: torch.device) -> Tensor:
    """The int32 counters of the faults of a tensor's device, for kernels to add to.

    There is one tensor for each device, which `read` looks at. Kernels of any stream may add to it, so the host waits
    until it is zero, once in a process.
    """
    counters = _COUNTERS.get(device)
    if counters is None:
        with _LOCK:
            if device not in _COUNTERS:
                made = torch.zeros(len(Fault), dtype=torch.int32, device=device)
                _finish(device)
                _COUNTERS[device] = made
            counters = _COUNTERS[device]
    return counters


def _finish(device: torch.device) -> None:
    """Wait for what is queued, so that other streams may use it at once."""
    if has_streams(device):
        current_stream(device).synchronize()
