"""Sends the rows of metrics to a Weights & Biases project. Only runs with a project need the package."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ...files import plain
from ..config import RunConfig


def check_installed(config: RunConfig) -> None:
    """Check that the package is installed, if the configuration names a project.

    Raises:
        ValueError: it is not installed.
    """
    if config.wandb is not None:
        _package(config.wandb)


def _package(project: str) -> Any:
    try:
        return import_module("wandb")
    except ImportError as error:
        raise ValueError(
            f"wandb {project!r} needs a package that cannot be imported ({error}); pip install wandb, or leave --wandb out"
        ) from None


class WandB:
    """Sends a run's metrics to Weights & Biases. Only rank 0 has one. A resumed run continues there too.

    Args:
        config: of the run; `wandb` is the project.
        folder: the run's folder.
    """

    def __init__(self, config: RunConfig, folder: Path):
        remembered = folder / "wandb-id.txt"
        before = {"id": remembered.read_text(), "resume": "allow"} if remembered.exists() else {}
        assert config.wandb is not None, "only a run with a project has one of these"
        self._run = _package(config.wandb).init(
            project=config.wandb, name=folder.name, dir=str(folder), config=config.as_dict(), **before
        )
        remembered.write_text(self._run.id)

    def row(self, values: dict[str, float]) -> None:
        """Send a row."""
        self._run.log(plain(values), step=values["step"])

    info = row

    def close(self) -> None:
        """Wait until all rows are sent."""
        self._run.finish()
