"""Evaluates the model on the test set, on all workers together."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ....algorithm import require
from ....comm import Communicator
from ....comm.compare import differing_by_name
from ....strategy import AveragerAttachment
from ..config import RunConfig
from ..data import Dataset, load
from ..state_files import damaged_file, read_state


def evaluate(
    config: RunConfig,
    data: Dataset,
    model: nn.Module,
    strategy: AveragerAttachment,
    comm: Communicator,
    at_mean: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the metrics of the data set, each with the prefix `test_`.

    If models are equal, each worker tests a part of the test set. If they differ, each worker tests its own model on all of it;
    `test_...` are the means over the workers, and `mean_model_test_...` the metrics of the mean model. Running statistics are
    averaged over the workers for the test.

    Args:
        config, data, model, strategy, comm: of the run.
        at_mean: called while the model holds the mean, if models differ.
    """
    if not strategy.models_differ:
        with strategy.average_model(comm):
            return _named("test_", _shared_out(config, data, model, comm))
    sums = data.evaluate(model, 0, 1, config.test_batch_size)
    of_own = _metrics(data, comm.all_reduce(sums).wait())
    with strategy.average_model(comm):
        of_mean = _shared_out(config, data, model, comm)
        at_mean()
    return _named("test_", of_own) | _named("mean_model_test_", of_mean)


def models_apart(model: nn.Module, comm: Communicator) -> str | None:
    """Which parameters are not the same bits on all workers, and how far apart they are; None where all are the same.

    All workers call it. It costs a hash of the model and 32 bytes a message where nothing differs.
    """
    apart = differing_by_name(comm, dict(model.named_parameters()))
    if not apart:
        return None
    own = torch.cat([p.detach().double().view(-1) for p in apart.values()])
    mean = comm.all_reduce(own.clone()).wait() / comm.size
    squares = comm.all_reduce((own - mean).square().sum().view(1)).wait().item() / comm.size
    distance = math.sqrt(squares) / max(mean.norm().item(), torch.finfo(torch.float64).tiny)
    more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
    return f"{next(iter(apart))!r}{more}, which are {distance:.2g} of their length away from their mean"


def _shared_out(config: RunConfig, data: Dataset, model: nn.Module, comm: Communicator) -> dict[str, float]:
    sums = data.evaluate(model, comm.rank, comm.size, config.test_batch_size)
    return _metrics(data, comm.all_reduce(sums).wait())


def _metrics(data: Dataset, sums_K: Tensor) -> dict[str, float]:
    require(sums_K[data.num_sums - 1].item() > 0, "no label of the test set counts; give the data set test examples")
    return data.metrics(sums_K)


def _named(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in metrics.items()}


def evaluate_checkpoint(config: RunConfig, folder: Path) -> dict[str, float]:
    """The metrics of a checkpoint's model on the test set of the configuration, in this process.

    Where workers have models of their own, the checkpoint's shared model is their mean; it also has the mean running
    statistics.

    Args:
        config: whose data, model and `test_batch_size`; usually those of the run, with other data.
        folder: the checkpoint, such as `runs/digits/checkpoints/best`.

    Raises:
        ValueError: the folder is no checkpoint, it is damaged, or its model is another one than the configuration's.
    """
    file = folder / "shared.pt"
    require(file.is_file(), f"{folder} is no checkpoint: it has no shared.pt; give a folder such as checkpoints/best")
    state = read_state(file).get("model")
    if not isinstance(state, dict):
        raise damaged_file(file, "it has no model")
    data = load(config.data)
    model = config.model.build(data.num_classes)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{file} is not of this model: {error}") from None
    sums = data.evaluate(model, 0, 1, config.test_batch_size)
    return _named("test_", _metrics(data, sums))
