"""Augmentation of small images: tensor operations on whole batches, with a generator that the caller seeds.

Crops and flips take images of any dtype. A cutout writes zeros, which are the mean colour of standardised images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ....algorithm import require
from ....options import require_choice, require_integer

BORDERS = ("zeros", "reflect")


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a training image; `Augmentation(0, False)` => none.

    Raises:
        ValueError: a negative size, or an unknown border.
    """

    padding: int = 4
    """Pixels added at each edge before a random crop to the old size; 0 => no crop."""
    flip: bool = True
    """Whether to mirror half of the images, left to right."""
    cutout: int = 0
    """Side in pixels of a square that is blanked at a random place; 0 => none."""
    border: str = "zeros"
    """Content of the padding: "zeros" (black), or "reflect", the image mirrored at its edge."""

    def __post_init__(self):
        for name in ("padding", "cutout"):
            require_integer(f"augmentation.{name}", getattr(self, name), 0)
        require_choice("augmentation.border", self.border, BORDERS)

    def check(self, height: int, width: int) -> None:
        """Check that it suits images of this size.

        Raises:
            ValueError: a cutout or a mirrored border that is larger than they are.
        """
        images, side = f"images of {width}x{height} pixels", min(height, width)
        require(self.cutout <= side, f"augmentation.cutout must be at most {side} for {images}, got {self.cutout}")
        fits = self.border != "reflect" or self.padding < side
        require(fits, f"augmentation.padding must be below {side} to reflect {images}, got {self.padding}")

    def before(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Crop and flip the stored pixels."""
        if self.padding:
            images = random_crop(images, self.padding, self.border, generator)
        return random_flip(images, generator) if self.flip else images

    def after(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Cut out a square of the standardised pixels."""
        return random_cutout(images, self.cutout, generator) if self.cutout else images


def random_crop(images: Tensor, padding: int, border: str, generator: torch.Generator) -> Tensor:
    """Pad each edge, then crop each image to the old size at its own random place.

    Args:
        images: (N, C, H, W).
        padding: pixels; with border "reflect" less than H and W.
        border: "zeros" or "reflect".
        generator: draws two integers of 0 .. 2 * padding for each image.

    Returns:
        (N, C, H, W), of the same dtype.

    Example:
        >>> images = torch.ones(2, 1, 4, 4)
        >>> random_crop(images, 1, "reflect", torch.Generator()).equal(images)
        True
    """
    height, width = images.shape[2:]
    top, left = torch.randint(2 * padding + 1, (2, len(images)), generator=generator).to(images.device)
    if border == "zeros":
        padded = F.pad(images, (padding,) * 4)
    else:
        rows, columns = (_mirrored(side, padding, images.device) for side in (height, width))
        padded = images.index_select(2, rows).index_select(3, columns)
    # A view of all crops of every image, (N, C, 2p+1, 2p+1, H, W); one crop of each image is copied.
    crops = padded.unfold(2, height, 1).unfold(3, width, 1)
    return crops[torch.arange(len(images), device=images.device), :, top, left]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image (N, C, H, W) left to right with probability 1/2."""
    flip = (torch.rand(len(images), generator=generator) < 0.5).to(images.device)
    return torch.where(flip[:, None, None, None], images.flip(-1), images)


def random_cutout(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Set a square of `side` pixels to 0 in each image (N, C, H, W), wholly inside it, at a random place.

    Example:
        >>> cut = random_cutout(torch.ones(3, 2, 8, 8), 5, torch.Generator())
        >>> (cut == 0).sum(dim=(1, 2, 3)).tolist()
        [50, 50, 50]
    """
    inside = []
    for length in images.shape[2:]:
        start = torch.randint(length - side + 1, (len(images), 1), generator=generator).to(images.device)
        place = torch.arange(length, device=images.device)
        inside.append((place >= start) & (place < start + side))
    rows, columns = inside
    return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


def _mirrored(length: int, padding: int, device: torch.device) -> Tensor:
    """Index of the pixel that each place of a padded side shows: 2 1 0 1 2 ... for padding 2."""
    place = torch.arange(-padding, length + padding, device=device).abs()
    return (length - 1) - ((length - 1) - place).abs()
