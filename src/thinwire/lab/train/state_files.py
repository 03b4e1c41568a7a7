"""Reads the files of a checkpoint that PyTorch has written, and says which of them are damaged."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from ...algorithm import require
from ...messages import error_text


def read_state(path: Path) -> dict[str, Any]:
    """A saved dictionary, with its tensors in main memory.

    Raises:
        ValueError: the file is missing or damaged, or holds something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # PyTorch itself compares no checksums
            wrong = archive.testzip()
        require(wrong is None, f"checksum of {wrong}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        require(isinstance(state, dict), f"expected a dictionary, got {type(state).__name__}")
        return state
    except Exception as error:
        raise damaged_file(path, error_text(error)) from error


def damaged_file(path: Path, reason: str) -> ValueError:
    """The error of a file of a checkpoint that cannot be read."""
    return ValueError(f"{path} is missing, truncated or damaged ({' '.join(reason.split())[:200]})")
