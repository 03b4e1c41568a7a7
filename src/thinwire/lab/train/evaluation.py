"""Evaluates the model on the test set, on all workers together."""

from __future__ import annotations

from torch import nn

from ...comm import Communicator
from .config import RunConfig
from .data import Dataset
from .strategy import Strategy


def evaluate(
    config: RunConfig, data: Dataset, model: nn.Module, strategy: Strategy, comm: Communicator
) -> dict[str, float]:
    """Return the metrics of the data set, each with the prefix `test_`.

    If models are equal, each worker tests a part of the test set. If they differ, each worker tests its own model on all of it;
    `test_...` are the means over the workers, and `mean_model_test_...` the metrics of the mean model. Running statistics are
    averaged over the workers for the test.
    """
    if not strategy.models_differ:
        with strategy.handle.average_model(comm):
            return _named("test_", _shared_out(config, data, model, comm))
    sums = data.evaluate(model, 0, 1, config.test_batch_size)
    of_own = data.metrics(comm.all_reduce(sums).wait())
    with strategy.handle.average_model(comm):
        of_mean = _shared_out(config, data, model, comm)
    return _named("test_", of_own) | _named("mean_model_test_", of_mean)


def _shared_out(config: RunConfig, data: Dataset, model: nn.Module, comm: Communicator) -> dict[str, float]:
    sums = data.evaluate(model, comm.rank, comm.size, config.test_batch_size)
    return data.metrics(comm.all_reduce(sums).wait())


def _named(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in metrics.items()}
