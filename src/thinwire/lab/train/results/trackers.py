"""Sends the rows of metrics to Weights & Biases and to MLflow. Only runs that name a project there need their packages.

A tracker remembers the run's id in the run's folder, so that a resumed run continues there too. Only rank 0 has one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue

from ....messages import log
from ...fields import flat
from ...files import plain
from ..config import RunConfig

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""By the field that names the project: the package to install, whose module has the field's name."""

SILENT_SECONDS = 15.0
"""That the end of a run waits for a server which takes nothing. A worker that stops is killed after 30."""


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


def trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """Those that the configuration asks for."""
    return [
        *([Tracker("Weights & Biases", partial(WandB, config, folder))] if config.wandb is not None else []),
        *([Tracker("MLflow", partial(MLflow, config, folder))] if config.mlflow is not None else []),
    ]


class Tracker:
    """Sends rows in a thread of its own: a slow server delays no step, and one that is gone ends no run.

    After a failure it sends nothing more, and says so once.

    Args:
        name: for the warning.
        begin: connects; called in the thread.
    """

    def __init__(self, name: str, begin: Callable[[], WandB | MLflow]):
        self._name, self._rows = name, SimpleQueue[dict[str, float] | None]()
        self._thread = threading.Thread(target=self._send, args=(begin,), daemon=True, name=name)
        self._thread.start()

    def _send(self, begin: Callable[[], WandB | MLflow]) -> None:
        try:
            receiver = begin()
            while (row := self._rows.get()) is not None:
                receiver.row(row)
            receiver.close()
        except Exception as error:
            self._warn(" ".join(str(error).split()))

    def row(self, values: dict[str, float]) -> None:
        """Send a row."""
        if self._thread.is_alive():
            self._rows.put(values)

    info = row

    def close(self) -> None:
        """Wait until all rows are sent, unless the server takes none for `SILENT_SECONDS`."""
        self._rows.put(None)
        left = math.inf
        while self._thread.is_alive() and self._rows.qsize() < left:
            left = self._rows.qsize()
            self._thread.join(SILENT_SECONDS)
        if self._thread.is_alive():
            self._warn(f"it has not answered for {SILENT_SECONDS:g} seconds")

    def _warn(self, reason: str) -> None:
        log.warning(f"{self._name} has not taken all rows: {reason}; metrics.jsonl has them")


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
        self._last = -1  # step of the last row that the server had before a resume, or of what a callback logged
        remembered = folder / "mlflow-id.txt"
        if remembered.exists():
            self._id = remembered.read_text()
            self._client.update_run(self._id, status="RUNNING")
            self._last = int(self._client.get_run(self._id).data.metrics.get("step", -1))
            return
        found = self._client.get_experiment_by_name(config.mlflow)
        experiment = self._client.create_experiment(config.mlflow) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        remembered.write_text(self._id)
        settings = [self._package.entities.Param(key, str(value)) for key, value in flat(config.as_dict())]
        self._client.log_batch(self._id, params=settings)

    def row(self, values: dict[str, float]) -> None:
        """Send the row's numbers, unless the server has them from before a resume.

        MLflow has no place for a list, and none for what is missing.
        """
        now, step = int(1000 * time.time()), int(values["step"])
        if step <= self._last:
            return
        numbers = {key: value for key, value in plain(values).items() if isinstance(value, (int, float))}
        metric = self._package.entities.Metric
        self._client.log_batch(self._id, [metric(key, value, now, step) for key, value in numbers.items()])

    def close(self) -> None:
        """Say that the run is over; one that is resumed is running again."""
        self._client.set_terminated(self._id)
