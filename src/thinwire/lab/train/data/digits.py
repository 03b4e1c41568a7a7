"""Handwritten digits: the 1797 grey images of 8x8 pixels that come with scikit-learn. Nothing is downloaded.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....options import require_number
from .base import Data
from .images import Images
from .shards import Split


@dataclass(frozen=True)
class Digits(Data):
    """Which part of the digits is held out for the test."""

    test_fraction: float = 0.3
    """Share of the images held out for the test; higher => steadier test accuracy, fewer images to learn from."""
    split_seed: int = 0
    """Which images are held out; the seed of the run has no part in it, so runs are tested on the same images."""

    def __post_init__(self):
        require_number("data.test_fraction", self.test_fraction, above=0, below=1)

    def load(self) -> Images:
        """Training and test images, in ten classes."""
        return Images(*self.splits(), num_classes=10)

    def splits(self) -> tuple[Split, Split]:
        """Training and test images, (N, 1, 8, 8) with the training pixels' mean 0 and standard deviation 1."""
        from sklearn.datasets import load_digits  # a second of imports that the command line's help can do without

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
        labels = torch.tensor(digits.target, dtype=torch.int64)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.split_seed))
        test, train = order.tensor_split([round(self.test_fraction * len(images))])
        images = (images - images[train].mean()) / images[train].std()
        return Split(images[train], labels[train]), Split(images[test], labels[test])
