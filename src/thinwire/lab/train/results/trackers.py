"""Sends the rows of metrics to Weights & Biases and to MLflow. Only runs that name a project there need their packages.

A tracker remembers the run's id in the run's folder, so that a resumed run continues there too. Only rank 0 has one.
"""

from __future__ import annotations

import logging
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from ...fields import flat
from ...files import plain
from ..config import RunConfig

log = logging.getLogger("thinwire")

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""By the field that names the project: the package to install, whose module has the field's name."""


def check_installed(config: RunConfig) -> None:
    """Check that the packages of the projects that the configuration names are installed.

    Raises:
        ValueError: one is not installed.
    """
    for field, package in PACKAGES.items():
        project = getattr(config, field)
        if project is not None:
            try:
                import_module(field)
            except ImportError as error:
                raise ValueError(
                    f"{field} {project!r} needs a package that cannot be imported ({error}); pip install {package}, "
                    f"or leave --{field} out"
                ) from None


def trackers(config: RunConfig, folder: Path) -> list[WandB | MLflow]:
    """Those that the configuration asks for."""
    return [
        *([WandB(config, folder)] if config.wandb is not None else []),
        *([MLflow(config, folder)] if config.mlflow is not None else []),
    ]


class WandB:
    """Sends a run's metrics to Weights & Biases.

    Args:
        config: of the run; `wandb` is the project.
        folder: the run's folder.
    """

    def __init__(self, config: RunConfig, folder: Path):
        remembered = folder / "wandb-id.txt"
        # "allow" begins another run if the server does not know the old one any more.
        before = {"id": remembered.read_text(), "resume": "allow"} if remembered.exists() else {}
        self._run = import_module("wandb").init(
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


class MLflow:
    """Sends a run's metrics to the MLflow server of MLFLOW_TRACKING_URI, and the configuration as parameters.

    Args:
        config: of the run; `mlflow` is the experiment, which is made if there is none.
        folder: the run's folder.
    """

    def __init__(self, config: RunConfig, folder: Path):
        assert config.mlflow is not None, "only a run with an experiment has one of these"
        self._package = import_module("mlflow")
        self._client = self._package.MlflowClient()
        self._sent: list[Any] = []
        remembered = folder / "mlflow-id.txt"
        if remembered.exists():
            self._id = remembered.read_text()
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(config.mlflow)
        experiment = self._client.create_experiment(config.mlflow) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        remembered.write_text(self._id)
        settings = [self._package.entities.Param(key, str(value)) for key, value in flat(config.as_dict())]
        self._client.log_batch(self._id, params=settings)

    def row(self, values: dict[str, float]) -> None:
        """Send the row's numbers, in a thread of MLflow. It has no place for a list, and none for what is missing."""
        now, step = int(1000 * time.time()), int(values["step"])
        numbers = {key: value for key, value in plain(values).items() if isinstance(value, (int, float))}
        metric = self._package.entities.Metric
        metrics = [metric(key, value, now, step) for key, value in numbers.items()]
        self._sent.append(self._client.log_batch(self._id, metrics, synchronous=False))

    info = row

    def close(self) -> None:
        """Wait until all rows are sent, and say that the run is over; one that is resumed is running again."""
        try:
            for row in self._sent:
                row.wait()
            self._client.set_terminated(self._id)
        except self._package.MlflowException as error:  # a server that is gone must not end the training
            log.warning(f"MLflow has not taken all rows of run {self._id}: {error}; metrics.jsonl has them")
