"""Image folders in ImageNet's layout, decoded as they are needed by processes of their own.

    <folder>/train/<class>/*.jpg    a random region, resized to a square; half of them mirrored
    <folder>/val/<class>/*.jpg      the middle of the image, after its shorter side was resized

A random region has `min_area` to 1 of the image's area and 3/4 to 4/3 as its ratio of sides, area and logarithm of the
ratio being uniform; a side that would be longer than the image's is cut to it. Training may start on small squares and go
on to larger ones ("progressive sizes"): fewer pixels at first make the first epochs cheap.

Source: regions, Szegedy et al. 2015, arXiv 1409.4842; sizes, Howard et al., fast.ai's DAWNBench entry of 2018.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....algorithm import require
from ....options import require_integer, require_number
from .augment import random_flip
from .base import Batch, Data, Dataset, Shape, channels_last, loaded
from .folders import ImageFiles, list_parts, open_image

MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
MAX_LOG_RATIO = math.log(4 / 3)


@dataclass(frozen=True)
class ImageFolder(Data):
    """Images in class folders, for training at one size or at several.

    Raises:
        ValueError: sizes that don't start at epoch 0 and ascend, a value out of range; when loading: missing or empty folders.

    Example:
        >>> data = ImageFolder(sizes=((0, 128), (14, 224), (32, 288)))
        >>> data.size_at(0), data.size_at(20)
        (128, 224)
    """

    folder: Path = Path("data/imagenet")
    """Holds the two parts."""
    train: str = "train"
    """Name of the folder of training images."""
    test: str = "val"
    """Name of the folder of test images."""
    sizes: tuple[tuple[int, int], ...] = ((0, 224),)
    """Pairs of the epoch from which a size holds, and the side of training images in pixels. Smaller => faster."""
    test_size: int = 224
    """Side of test images in pixels."""
    min_area: float = 0.08
    """Least share of an image that a random region shows; higher => less augmentation, for short runs and small sizes."""
    num_loaders: int = 4
    """Processes per worker that decode images; higher => faster, as long as there are cores. 0 => none."""

    def __post_init__(self):
        epochs = [epoch for epoch, _ in self.sizes]
        ascend = epochs[:1] == [0] and all(a < b for a, b in zip(epochs, epochs[1:], strict=False))
        require(ascend, f"data.sizes must start at epoch 0 and ascend, such as ((0, 128), (14, 224)), got {self.sizes}")
        for pixels in (*(pixels for _, pixels in self.sizes), self.test_size):
            require_integer("data.sizes and data.test_size", pixels, 1, hint=" pixels")
        require_number("data.min_area", self.min_area, above=0, most=1)
        require_integer("data.num_loaders", self.num_loaders, 0)

    def size_at(self, epoch: int) -> int:
        """Side of training images in an epoch, in pixels."""
        return [pixels for start, pixels in self.sizes if start <= epoch][-1]

    def load(self) -> FolderImages:
        """The list of all files; nothing is decoded yet."""
        return FolderImages(self, *list_parts(self.folder / self.train, self.folder / self.test))


class FolderImages(Dataset):
    """What `ImageFolder` loads."""

    metric_names = ("loss", "accuracy", "top5_accuracy")

    def __init__(self, config: ImageFolder, train: ImageFiles, test: ImageFiles):
        self._config, self._train, self._test = config, train, test
        self.num_classes, self.num_examples, self.labels = len(train.classes), len(train), train.labels
        self.num_loaders = config.num_loaders

    def image_shapes(self, num_epochs: int) -> tuple[list[Shape], list[Shape]]:
        sides = dict.fromkeys(side for start, side in self._config.sizes if start < num_epochs)
        return [(3, side, side) for side in sides], [(3, self._config.test_size, self._config.test_size)]

    def batch(self, indices: Tensor, generator: torch.Generator, epoch: int) -> Batch:
        size = self._config.size_at(epoch)
        regions = random_regions(len(indices), self._config.min_area, generator)
        paths = map(self._train.path, indices.tolist())
        pixels = torch.stack([read_region(*pair, size) for pair in zip(paths, regions.tolist(), strict=True)])
        return Batch((channels_last(_standardised(random_flip(pixels, generator))),), self._train.labels[indices])

    def test_batches(self, rank: int, size: int, batch_size: int) -> Iterator[Batch]:
        share = torch.arange(len(self._test))[rank::size]
        parts = [part for part in share.split(batch_size) if len(part)]

        def make(number: int) -> Batch:
            paths = map(self._test.path, parts[number].tolist())
            pixels = torch.stack([read_centre(path, self._config.test_size) for path in paths])
            return Batch((channels_last(_standardised(pixels)),), self._test.labels[parts[number]])

        return loaded(make, range(len(parts)), self.num_loaders)


def random_regions(num: int, min_area: float, generator: torch.Generator) -> Tensor:
    """Draw regions (num, 4): share of the area, ratio of width to height, and place (x, y), 0 left or top, 1 right or bottom.

    Example:
        >>> regions = random_regions(1000, 0.25, torch.Generator().manual_seed(0))
        >>> [round(v, 2) for v in regions.min(dim=0).values.tolist()]
        [0.25, 0.75, 0.0, 0.0]
    """
    area, ratio, x, y = torch.rand(4, num, generator=generator, dtype=torch.float64)
    area = min_area + (1 - min_area) * area
    ratio = torch.exp(MAX_LOG_RATIO * (2 * ratio - 1))
    return torch.stack([area, ratio, x, y], dim=1)


def region_box(width: int, height: int, region: list[float]) -> tuple[float, float, float, float]:
    """Left, top, right, bottom in pixels of a region of `random_regions` in an image.

    Example:
        >>> region_box(100, 200, [0.25, 1.0, 0.0, 1.0])
        (0.0, 129.28932188134524, 70.71067811865476, 200.0)
    """
    area, ratio, x, y = region
    w = min(width, math.sqrt(area * width * height * ratio))
    h = min(height, math.sqrt(area * width * height / ratio))
    left, top = x * (width - w), y * (height - h)
    return left, top, left + w, top + h


def read_region(path: Path, region: list[float], size: int) -> Tensor:
    """A region of an image file, resized to (3, size, size) uint8."""
    return _read(path, lambda width, height: region_box(width, height, region), size)


def read_centre(path: Path, size: int) -> Tensor:
    """The middle square of an image file, 7/8 of its shorter side, resized to (3, size, size) uint8."""

    def box(width: int, height: int) -> tuple[float, float, float, float]:
        side = min(width, height) * 7 / 8
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    return _read(path, box, size)


def _read(path: Path, box_of, size: int) -> Tensor:
    from PIL import Image

    with open_image(path) as image:
        # JPEG decodes to 1/2, 1/4 or 1/8 at a fraction of the cost; twice the size is left for the resizing.
        width, height = image.size
        left, top, right, bottom = box_of(width, height)
        shrink = min(right - left, bottom - top) / (2 * size)
        if shrink > 1:
            image.draft("RGB", (math.ceil(width / shrink), math.ceil(height / shrink)))
        # With a gap of 2 Pillow shrinks in two steps, which is faster and nearly the same.
        square = image.convert("RGB").resize(
            (size, size), Image.Resampling.BILINEAR, box_of(*image.size), reducing_gap=2.0
        )
    # The memory of a Pillow image is read-only, about which PyTorch warns.
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1)


def _standardised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (pixels.float() - mean) / std
