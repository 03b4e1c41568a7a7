"""Examples that fit in memory, as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ....algorithm import require
from .base import Batch, Dataset


class Tensors(Dataset):
    """Training and test examples as tensors (N, ...), each with an entry for every example.

    Args:
        train, test: the inputs of the module, then the labels.
        num_classes: how many classes there are; 1 for a number.

    Raises:
        ValueError: there is no input, tensors have different lengths, or there is no test example.

    Example:
        >>> x, y = torch.arange(6.0), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> data = Tensors((x[:4], y[:4]), (x[4:], y[4:]), num_classes=2)
        >>> data.batch(torch.tensor([3, 0]), torch.Generator(), epoch=0)
        Batch(inputs=(tensor([3., 0.]),), labels=tensor([1, 0]))
    """

    def __init__(self, train: Sequence[Tensor], test: Sequence[Tensor], num_classes: int = 1):
        for part, tensors in (("training", train), ("test", test)):
            require(len(tensors) > 1, f"the {part} examples need inputs and labels, got {len(tensors)} tensors")
            lengths = [len(tensor) for tensor in tensors]
            require(len(set(lengths)) == 1, f"the {part} examples need as many labels as inputs, got {lengths}")
            require(lengths[0] > 0, f"there are no {part} examples")
        self._train, self._test = train, test
        self.num_classes, self.num_examples = num_classes, len(train[-1])
        is_class = train[-1].dtype == torch.int64 and train[-1].ndim == 1
        self.labels = train[-1] if is_class else None

    def batch(self, indices: Tensor, generator: torch.Generator, epoch: int) -> Batch:
        *inputs, labels = (tensor[indices] for tensor in self._train)
        return Batch(tuple(inputs), labels)

    def test_batches(self, rank: int, size: int, batch_size: int) -> Iterator[Batch]:
        mine = [tensor[rank::size].split(batch_size) for tensor in self._test]
        for *inputs, labels in zip(*mine, strict=True):
            if len(labels):  # no examples make one empty batch
                yield Batch(tuple(inputs), labels)
