"""Holds the parts of a recipe to their contracts: what a run would find late, or not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithm import require
from ..fields import flat
from ..overrides import overridden
from ..train import RunConfig
from ..train.data import Batch, Dataset, load
from ..train.data.base import batch_generator
from ..train.models import apply
from ..train.step.training import built

SIZES = (2, 3)
"""Numbers of workers that share out the test set."""


def check_recipe(config: RunConfig) -> None:
    """Check data, model, loss and optimizer of a recipe, with random weights. It trains nothing and takes seconds.

    Args:
        config: of the recipe.

    Raises:
        ValueError: loading twice gives other data; a batch is not a function of its indices and generator; the loss is no
            number with a gradient; workers together do not test every example once; `metrics` has other names; or the
            configuration does not come back from its saved values.

    Example:
        >>> from thinwire.lab.recipes import check_recipe, recipes
        >>> check_recipe(recipes()["digits"].config)
    """
    again = overridden(config, {path: value for path, value in flat(config.as_dict()) if path != "recipe"})
    require(again.as_dict() == config.as_dict(), f"{config!r} does not come back from its saved values")
    data = load(config.data)
    batch = _check_batches(config, data)  # first: a digest may be that of a batch
    _check_loading(config, data)
    module, optimizer = built(config, data)
    scores, _ = apply(module, batch.inputs)
    loss = config.loss(scores, batch.labels)
    is_number = isinstance(loss, Tensor) and loss.ndim == 0 and bool(loss.isfinite())
    require(is_number, f"the loss of a batch must be a finite scalar tensor, got {loss!r:.100}")
    loss.backward()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    require(any(p.grad is not None for p in trained), "the loss gives no parameter of the optimizer a gradient")
    found = data.metrics(data.checked_sums(scores.detach(), batch.labels))
    _check_names(found, data)
    _check_test_set(data, module, config.test_batch_size)


def _check_loading(config: RunConfig, data: Dataset) -> None:
    kind = type(config.data).__name__
    again = load(config.data)
    is_same = (again.num_examples, again.num_classes, again.digest()) == (
        data.num_examples,
        data.num_classes,
        data.digest(),
    )
    require(is_same, f"{kind}.load() gives other data each time; let its random choices follow from a fixed seed")


def _check_batches(config: RunConfig, data: Dataset) -> Batch:
    """The first batch of a run."""
    share = torch.arange(data.num_examples)
    plan = data.plan(share, min(config.batch_size, data.num_examples))
    first, second = (data.batch(plan[0], batch_generator(config.seed, 0, 0, 0), 0).to("cpu") for _ in range(2))
    is_same = all(map(torch.equal, (*first.inputs, first.labels), (*second.inputs, second.labels)))
    name = type(data).__name__
    require(
        is_same, f"{name}.batch gives other batches for the same indices; draw random numbers from its generator alone"
    )
    return first


def _check_names(metrics: dict[str, float], data: Dataset) -> None:
    missing = [name for name in ("loss", *metrics) if name not in metrics or name not in data.metric_names]
    name = type(data).__name__
    require(not missing, f"{name}.metrics returns {sorted(metrics)}, and metric_names are {data.metric_names}")
    others = {metric: type(value).__name__ for metric, value in metrics.items() if not isinstance(value, (int, float))}
    require(not others, f"{name}.metrics must return numbers, got {others}; tensors have `item()`")


def _check_test_set(data: Dataset, module: torch.nn.Module, batch_size: int) -> None:
    """Check that the shares of several workers add up to the whole test set."""
    name = type(data).__name__
    whole = data.evaluate(module, 0, 1, batch_size)
    require(whole[data.num_sums - 1].item() > 0, f"the test set of {name} has no label that counts")
    metrics = data.metrics(whole)
    _check_names(metrics, data)
    tested = data.best_metric in metrics
    require(tested, f"{name}.metrics of the test set lacks the best_metric {data.best_metric!r}, got {sorted(metrics)}")
    for size in SIZES:
        shared = sum((data.evaluate(module, rank, size, batch_size) for rank in range(size)), torch.zeros_like(whole))
        # Streams of text begin at other places, which changes a recurrent model's scores, but not the number of labels.
        one = data.num_sums - 1 if data.in_order else slice(None)
        require(
            torch.allclose(shared[one], whole[one], rtol=1e-3, atol=1e-6),
            f"the test batches of {size} workers do not add up to the test set of one: {name} has sums {shared.tolist()}, "
            f"and {whole.tolist()} on one; a worker's part is [rank::size], and sums are no means",
        )
