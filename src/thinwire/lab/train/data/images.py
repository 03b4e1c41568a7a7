"""Images that fit in memory, all of one size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .augment import Augmentation
from .base import Batch, Dataset, Shape, channels_last
from .shards import Split


class Images(Dataset):
    """Training and test images as two tensors each.

    Args:
        train, test: images (N, C, H, W), uint8 or float32, and their classes.
        num_classes: how many classes there are.
        mean, std: of each channel, in the units of the stored pixels; batches are standardised by them.
        augmentation: what is random about training images.

    Raises:
        ValueError: a cutout or a mirrored border that is larger than the images.
    """

    metric_names = ("loss", "accuracy", "top5_accuracy")

    def __init__(
        self,
        train: Split,
        test: Split,
        num_classes: int,
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
        augmentation: Augmentation = Augmentation(padding=0, flip=False),
    ):
        augmentation.check(*train.inputs.shape[2:])
        self._train, self._test, self._augmentation = train, test, augmentation
        self.num_classes, self.num_examples, self.labels = num_classes, len(train.labels), train.labels
        self._mean, self._std = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))

    def image_shapes(self, num_epochs: int) -> tuple[list[Shape], list[Shape]]:
        return [_shape(self._train)], [_shape(self._test)]

    def batch(self, indices: Tensor, generator: torch.Generator, epoch: int) -> Batch:
        images, labels = (part[indices] for part in self._train)
        images = self._standardised(self._augmentation.before(images, generator))
        return Batch((channels_last(self._augmentation.after(images, generator)),), labels)

    def test_batches(self, rank: int, size: int, batch_size: int) -> Iterator[Batch]:
        images, labels = (part[rank::size].split(batch_size) for part in self._test)  # no images make one empty batch
        return (
            Batch((channels_last(self._standardised(x)),), y) for x, y in zip(images, labels, strict=True) if len(y)
        )

    def _standardised(self, images: Tensor) -> Tensor:
        return (images.float() - self._mean) / self._std


def _shape(split: Split) -> Shape:
    _, channels, height, width = split.inputs.shape
    return channels, height, width
