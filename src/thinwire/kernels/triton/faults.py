"""The counters of faults, as kernels use them; see `thinwire.kernels.flags`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import flags


def faults_of(device: torch.device) -> Tensor:
    """Counters for kernels to add to: the device's own, or new ones for tensors in main memory."""
    if flags.in_main_memory(device):
        return torch.zeros(len(flags.Fault), dtype=torch.int32, device="cpu")
    return flags.fault_counters(device)


def raise_on_cpu(faults: Tensor) -> None:
    """Raise the faults that an interpreted kernel has counted, as any kernel for tensors in main memory does."""
    if flags.in_main_memory(faults.device):
        flags.raise_counted(faults, faults.tolist())
