"""What the training loop may rely on in every data set.

A data set's configuration is a frozen dataclass; its `load()` gives a `Dataset`, the same on all workers. An *example* is
what a worker's share is made of: an image with its class, a window of text, or a ready-made batch of sentence pairs.

    plan = data.plan(share, batch_size)                    (num_batches, batch_size) indices of examples
    for batch in data.batches(plan, seed, rank, epoch):    from `first` on, where an epoch is resumed
        scores, state = apply(module, batch.inputs, state)
        row_sums += data.sums(scores, batch.labels)
    data.metrics(comm.all_reduce(row_sums).wait())         {"loss": ..., "accuracy": ..., ...}
    data.metrics(comm.all_reduce(data.evaluate(module, rank, size, batch_size)).wait())

What is random in a batch (crops, flips) is a pure function of seed, rank, epoch and the batch's number, so it doesn't
depend on what was loaded before, nor on the number of loader processes. `evaluate` covers every test example once over all
workers; sums of all workers may be added up, and then say what one worker alone would have said.

Data that is `in_order` is text that a recurrent model reads on from batch to batch: a worker's share must be a contiguous,
ascending range, and the state passed to the first batch of an epoch is None.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ....kernels import mix_key
from ..interrupt import ignore_requests
from ..models import apply

AUGMENTATION_STREAM = zlib.crc32(b"augmentation of examples")
IGNORE = -100
"""Label of a place where no answer counts; it is PyTorch's own default."""


LOWER_IS_BETTER = ("loss", "perplexity")
"""Metrics of which a lower one is better; of all others, higher is."""


Shape = tuple[int, int, int]
"""Channels, height and width of an image."""


class Batch(NamedTuple):
    """What a model takes in one step.

    Args:
        inputs: the module's arguments.
        labels: (...) int64, the class of each row of scores, or IGNORE.
    """

    inputs: tuple[Tensor, ...]
    labels: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        inputs = tuple(x.to(device, non_blocking=True) for x in self.inputs)
        return Batch(inputs, self.labels.to(device, non_blocking=True))


class Dataset(ABC):
    """Training and test examples, ready to be dealt out."""

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    """What `metrics` reports."""
    best_metric: ClassVar[str] = "accuracy"
    """Which of them says how good a model is."""
    num_loaders: int = 0
    """Processes that make batches ahead of time; 0 => the training process makes them itself."""
    in_order: bool = False
    """A worker's share must be a contiguous range, for a model carries its state from batch to batch."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Scores for each label: classes, or entries of the vocabulary."""

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """Training examples, over all workers."""

    @property
    def labels(self) -> Tensor | None:
        """(num_examples,) int64, the class of each training example; None where examples have none."""
        return None

    def image_shapes(self, num_epochs: int) -> tuple[list[Shape], list[Shape]]:
        """Shapes (C, H, W) of the training images of the first epochs, in their order, and of the test images.

        Both lists are empty where examples are not images.
        """
        return [], []

    @abstractmethod
    def batch(self, indices: Tensor, generator: torch.Generator, epoch: int) -> Batch:
        """Training examples as a batch; whatever is random in it comes from `generator`."""

    @abstractmethod
    def test_batches(self, rank: int, size: int, batch_size: int) -> Iterator[Batch]:
        """This worker's part of the test set."""

    def plan(self, share: Tensor, batch_size: int) -> Tensor:
        """Cut a worker's share into full batches, (num_batches, batch_size).

        Data in order is cut into `batch_size` streams, so that row j + 1 of the plan goes on where row j ends.
        """
        num_batches = len(share) // batch_size
        share = share[: num_batches * batch_size]
        return share.view(batch_size, num_batches).T if self.in_order else share.view(num_batches, batch_size)

    def batches(self, plan: Tensor, seed: int, rank: int, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of a plan, from number `first` on; made ahead of time where there are loader processes."""
        ready_made = _Epoch(self, plan, seed, rank, epoch)
        if self.num_loaders == 0:
            return map(ready_made.__getitem__, range(first, len(plan)))
        return loaded(ready_made, range(first, len(plan)), self.num_loaders)

    @torch.no_grad()
    def evaluate(self, module: nn.Module, rank: int, size: int, batch_size: int) -> Tensor:
        """This worker's sums over the test set, (K,) float64, to be added up over workers and given to `metrics`."""
        module.eval()
        device, state = next(module.parameters()).device, None
        total = torch.zeros(4, dtype=torch.float64)
        for batch in self.test_batches(rank, size, batch_size):
            batch = batch.to(device)
            scores, state = apply(module, batch.inputs, state)
            total += self.sums(scores, batch.labels)
        return total

    def sums(self, scores: Tensor, labels: Tensor) -> Tensor:
        """A batch's sums for `metrics`, (4,) float64; see `sums`."""
        return sums(scores, labels, top5="top5_accuracy" in self.metric_names)

    def metrics(self, sums_K: Tensor) -> dict[str, float]:
        """The metrics of `metric_names` from sums over batches and workers."""
        loss, correct, correct_in_5, count = sums_K[:4].tolist()
        values = {"loss": loss / count, "accuracy": correct / count, "top5_accuracy": correct_in_5 / count}
        values["perplexity"] = (sums_K[0] / count).exp().item()
        return {name: values[name] for name in self.metric_names if name in values}


def channels_last(images: Tensor) -> Tensor:
    """The same images (N, C, H, W), but laid out pixel by pixel in memory: convolutions on CPUs are 1.3 times as fast so."""
    return images.contiguous(memory_format=torch.channels_last)


def sums(scores: Tensor, labels: Tensor, top5: bool = True) -> Tensor:
    """Loss (nats), answers that are right, right among the first five, and all that count: (4,) float64 on the CPU.

    Args:
        scores: (..., num_classes).
        labels: (...) int64; those that are IGNORE don't count.
        top5: whether to look for the first five; False => the third sum is 0, in half the time for a large vocabulary.

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


@dataclass(frozen=True)
class _Epoch:
    """The batches of an epoch by number, as PyTorch's loader processes ask for them."""

    data: Dataset
    plan: Tensor
    seed: int
    rank: int
    epoch: int

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> Batch:
        generator = batch_generator(self.seed, self.rank, self.epoch, number)
        return self.data.batch(self.plan[number], generator, self.epoch)


def loaded(batches: Any, numbers: range, num_loaders: int) -> Iterator[Batch]:
    """Items of `batches` in the order of `numbers`, made by `num_loaders` processes, each two items ahead.

    Raises:
        ValueError: what a process raised, in its own words.
    """
    loader = DataLoader(
        _Reported(batches),
        batch_size=None,
        sampler=numbers,
        num_workers=num_loaders,
        collate_fn=_as_it_is,
        worker_init_fn=ignore_requests,
        # Forked, loaders start at once, and PyTorch's watchdog ends them within seconds of their parent, however that ends.
        # Started by a fork server, as the worker's own start method would have it, they'd outlive it.
        multiprocessing_context="fork",
        generator=torch.Generator(),  # the loader draws a seed, and the run's random state is not its to advance
    )
    for item in loader:
        if isinstance(item, ValueError):
            raise item
        yield item


@dataclass(frozen=True)
class _Reported:
    """Hands over a user's mistake as a value: raised in a loader process, it would reach the user as a traceback."""

    batches: Any

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch | ValueError:
        try:
            return self.batches[number]
        except ValueError as error:
            return error


def _as_it_is(item: Any) -> Any:
    return item
