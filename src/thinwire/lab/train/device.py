"""The device of a worker."""

from __future__ import annotations

import os

import torch

from ...algorithm import require
from .config import RunConfig


def choose_device(config: RunConfig) -> torch.device:
    """Choose the device of this worker. Workers on one machine share its GPUs.

    Raises:
        ValueError: the configuration asks for a GPU, and there is none.
    """
    found = torch.cuda.is_available()
    require(
        found or config.device != "cuda", "device 'cuda' was asked for, but PyTorch finds no GPU; leave --device out"
    )
    return local_gpu() if found and config.device != "cpu" else torch.device("cpu")


def local_gpu() -> torch.device:
    """The GPU of this worker. Workers on one machine share its GPUs."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
