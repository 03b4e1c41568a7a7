"""The contract between data sets and the training loop.

The configuration of a data set is a frozen dataclass, a `Data`; its `load()` returns a `Dataset`, the same on all workers. The
share of a worker consists of *examples*: images with their classes, windows of text, or prepared batches of sentence pairs.

    plan = data.plan(share, batch_size)                    (num_batches, batch_size) indices of examples
    for batch in data.batches(plan, seed, rank, epoch):    of some `numbers` alone, if an epoch is resumed
        scores, state = apply(module, batch.inputs, state)
        row_sums += data.sums(scores, batch.labels)
    data.metrics(comm.all_reduce(row_sums).wait())         {"loss": ..., "accuracy": ..., ...}
    data.metrics(comm.all_reduce(data.evaluate(module, rank, size, batch_size)).wait())

A data set measures the scores as it likes. By default labels are classes, and `sums` gives four sums: of cross-entropy, right
answers, right ones among the first five, and labels. Others have `sums`, `num_sums` and `metrics` of their own.

Crops, flips and other random choices in a batch are a pure function of seed, rank, epoch and the number of the batch. They do
not depend on earlier batches or on the number of loader processes. The `evaluate` calls of all workers cover every test
example once. The sum of their results is the result of a single worker.

`in_order` data is text that a recurrent model reads continuously from batch to batch. The share of a worker must be a
contiguous, ascending range, and the state for the first batch of an epoch is None.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ....algorithm import require
from ....kernels import mix_key
from ..models import apply
from ..signals import ignore_requests

AUGMENTATION_STREAM = zlib.crc32(b"augmentation of examples")
IGNORE = -100
"""Label of a place where no answer counts; it is PyTorch's own default."""


Shape = tuple[int, int, int]
"""Channels, height and width of an image."""


class Batch(NamedTuple):
    """The inputs and labels of one step.

    Args:
        inputs: the arguments of the module, each (N, ...).
        labels: (N, ...), what the loss compares scores with. Classes are int64, one for each row of scores, or IGNORE.
    """

    inputs: tuple[Tensor, ...]
    labels: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device.

        Raises:
            ValueError: the inputs are a tensor, whose rows would be taken for the arguments of the module.
        """
        wrong = (
            f"the inputs of a batch are a tuple of tensors, got {type(self.inputs).__name__}; write Batch((x,), labels)"
        )
        require(isinstance(self.inputs, tuple), wrong)
        inputs = tuple(x.to(device, non_blocking=True) for x in self.inputs)
        return Batch(inputs, self.labels.to(device, non_blocking=True))


class Data(ABC):
    """A data set's configuration: a frozen dataclass of plain values."""

    @abstractmethod
    def load(self) -> Dataset:
        """Training and test examples, the same in every process: what is random in them follows from the configuration.

        Raises:
            ValueError: the data are wrong or missing; the message says what to do.
        """


class Dataset(ABC):
    """Training and test examples, ready to be distributed."""

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    """Names of the metrics that `metrics` returns; "loss" is one."""
    best_metric: ClassVar[str] = "accuracy"
    """The metric that selects the best model."""
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "perplexity")
    """Metrics of which a lower one is better; of all others, higher is."""
    num_sums: ClassVar[int] = 4
    """How many sums a batch has; the last one is the number of labels that count."""
    num_loaders: int = 0
    """Processes that prepare batches in advance; 0 => the training process makes them."""
    in_order: bool = False
    """Whether a worker's share must be a contiguous range, because the model keeps its state between batches."""
    num_classes: int = 1
    """The number of scores per label: classes, entries of the vocabulary, or 1 for a number."""
    num_examples: int
    """The number of training examples over all workers."""
    labels: Tensor | None = None
    """(num_examples,) int64, the class of each training example; None if examples have no class."""

    def image_shapes(self, num_epochs: int) -> tuple[list[Shape], list[Shape]]:
        """Shapes (C, H, W) of the training images of the first epochs, in their order, and of the test images.

        Both lists are empty if examples are not images.
        """
        return [], []

    def digest(self) -> str:
        """Of all labels, or of 64 examples of text. Pixels are left out: machines may decode them differently."""
        tensors: tuple[Tensor, ...] = () if self.labels is None else (self.labels,)
        if not tensors:
            # Spread over the whole text, because files may differ in a late part.
            places = torch.linspace(0, self.num_examples - 1, min(64, self.num_examples), dtype=torch.float64).long()
            inputs, labels = self.batch(places, torch.Generator().manual_seed(0), 0)
            tensors = (*inputs, labels)
        found = hashlib.sha256(f"{self.num_examples} {self.num_classes}".encode())
        for tensor in tensors:
            found.update(tensor.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    @abstractmethod
    def batch(self, indices: Tensor, generator: torch.Generator, epoch: int) -> Batch:
        """Make a batch of training examples; all random choices use `generator`."""

    @abstractmethod
    def test_batches(self, rank: int, size: int, batch_size: int) -> Iterator[Batch]:
        """The batches of this worker's part of the test set."""

    def plan(self, share: Tensor, batch_size: int) -> Tensor:
        """Cut a worker's share into full batches, (num_batches, batch_size).

        `in_order` data is cut into `batch_size` streams, so that row j + 1 of the plan continues row j.
        """
        num_batches = len(share) // batch_size
        share = share[: num_batches * batch_size]
        return share.view(batch_size, num_batches).T if self.in_order else share.view(num_batches, batch_size)

    def batches(
        self, plan: Tensor, seed: int, rank: int, epoch: int, numbers: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        """The batches of a plan with these numbers, or all; loader processes make them in advance."""

        def make(number: int) -> Batch:
            return self.batch(plan[number], batch_generator(seed, rank, epoch, number), epoch)

        return loaded(make, range(len(plan)) if numbers is None else numbers, self.num_loaders)

    @torch.no_grad()
    def evaluate(self, module: nn.Module, rank: int, size: int, batch_size: int) -> Tensor:
        """This worker's sums over the test set, (K,) float64; pass their sum over workers to `metrics`."""
        module.eval()
        device, state = next(module.parameters()).device, None
        total = torch.zeros(self.num_sums, dtype=torch.float64)
        for batch in self.test_batches(rank, size, batch_size):
            batch = batch.to(device)
            scores, state = apply(module, batch.inputs, state if self.in_order else None)
            total += self.checked_sums(scores, batch.labels)
        return total

    def checked_sums(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The result of `sums`, (num_sums,) float64 on the CPU.

        Raises:
            ValueError: it has another shape.
        """
        found = self.sums(scores, labels).detach().double().cpu()
        wrong = (
            f"{type(self).__name__}.sums must return {self.num_sums} sums (num_sums), got a tensor {tuple(found.shape)}"
        )
        require(found.shape == (self.num_sums,), wrong)
        return found

    def sums(self, scores: Tensor, labels: Tensor) -> Tensor:
        """A batch's sums for `metrics`, (num_sums,), to be added over batches and workers; see `sums`.

        Raises:
            ValueError: the labels are no classes.
        """
        require(
            labels.dtype == torch.int64 and labels.shape == scores.shape[:-1],
            f"{type(self).__name__} has labels {tuple(labels.shape)} of {labels.dtype} for scores {tuple(scores.shape)}, "
            f"which are no classes, int64 {tuple(scores.shape[:-1])}; give it metrics of its own: `sums`, `num_sums` and "
            "`metrics`",
        )
        return sums(scores, labels, top5="top5_accuracy" in self.metric_names)

    def metrics(self, sums_K: Tensor) -> dict[str, float]:
        """The metrics of `metric_names` from sums over batches and workers."""
        loss, correct, correct_in_5, count = sums_K[:4].tolist()
        values = {"loss": loss / count, "accuracy": correct / count, "top5_accuracy": correct_in_5 / count}
        values["perplexity"] = (sums_K[0] / count).exp().item()
        return {name: values[name] for name in self.metric_names if name in values}


def load(config: Data) -> Dataset:
    """The data set of a configuration.

    Raises:
        ValueError: it cannot be loaded, or is not what the training loop needs.
    """
    data, kind = config.load(), type(config).__name__
    require(isinstance(data, Dataset), f"{kind}.load() must return a Dataset, got {type(data).__name__}")
    name, names = type(data).__name__, data.metric_names
    for needed in ("loss", data.best_metric):
        require(needed in names, f"{name}.metric_names must have {needed!r}, got {names}")
    count = getattr(data, "num_examples", None)
    require(isinstance(count, int) and count > 0, f"{name}.num_examples must be a number from 1 on, got {count!r}")
    return data


def channels_last(images: Tensor) -> Tensor:
    """The same images (N, C, H, W) with channels last in memory, which makes convolutions on CPUs 1.3 times as fast."""
    return images.contiguous(memory_format=torch.channels_last)


def sums(scores: Tensor, labels: Tensor, top5: bool = True) -> Tensor:
    """Sums of loss (nats), correct answers, correct among the first five, and counted labels: (4,) float64 on the CPU.

    Args:
        scores: (..., num_classes).
        labels: (...) int64; IGNORE is not counted.
        top5: whether to compute the first five; False => the third sum is 0, and a large vocabulary takes half the time.

    Example:
        >>> sums(torch.eye(3) * 100, torch.tensor([0, 2, IGNORE])).tolist()
        [100.0, 1.0, 2.0, 2.0]
    """
    counted = labels != IGNORE
    scores, labels = (
        (x[counted] for x in (scores, labels)) if not counted.all() else (scores.flatten(0, -2), labels.flatten())
    )
    if len(labels) == 0:
        return torch.zeros(4, dtype=torch.float64)
    scores = scores.float()
    loss = F.cross_entropy(scores, labels, reduction="sum")
    first = scores.max(dim=1).indices == labels
    in_5 = (scores.topk(min(5, scores.shape[1])).indices == labels[:, None]).sum() if top5 else torch.zeros_like(loss)
    return torch.stack([loss.double(), first.sum(), in_5, counted.sum()]).double().cpu()


def batch_generator(seed: int, rank: int, epoch: int, number: int) -> torch.Generator:
    """The generator of one batch of one worker."""
    key = mix_key(mix_key(seed, AUGMENTATION_STREAM, rank), epoch, number)
    return torch.Generator().manual_seed(key)


def loaded(make: Callable[[int], Batch], numbers: Sequence[int], num_loaders: int) -> Iterator[Batch]:
    """The batches `make(number)` in the order of `numbers`, made by `num_loaders` processes, each two batches ahead.

    Raises:
        ValueError: a process raised it; the message is the same.
    """
    if num_loaders == 0:
        yield from map(make, numbers)
        return
    loader: DataLoader[Any] = DataLoader(
        _Reported(make),
        batch_size=None,
        sampler=numbers,
        num_workers=num_loaders,
        collate_fn=lambda item: item,  # PyTorch's own makes lists of tuples
        worker_init_fn=partial(_begin, os.getpid()),
        # Forked loaders start at once. PyTorch's watchdog ends them within seconds after their parent. Loaders of a fork
        # server, the worker's own start method, would outlive it.
        multiprocessing_context="fork",
        generator=torch.Generator(),  # the loader draws a seed, which must not advance the run's random state
    )
    for item in loader:
        # The error of a loader process, which is one line here.
        if isinstance(item, ValueError):
            raise item
        yield item


def _begin(parent: int, place: int) -> None:
    """Begin a loader process of this parent."""
    ignore_requests()
    # PyTorch's watchdog, which begins next, takes the present parent for the right one.
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class _Reported(torch.utils.data.Dataset[Any]):
    """Returns a user error as a value, because an error raised in a loader process would be shown as a traceback."""

    make: Callable[[int], Batch]

    def __getitem__(self, number: int) -> Batch | ValueError:
        try:
            return self.make(number)
        except ValueError as error:
            return error
