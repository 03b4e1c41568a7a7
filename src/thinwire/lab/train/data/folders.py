"""Image files in class folders: `part/<class>/<any name>.jpg`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....algorithm import require

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")


class ImageFiles(NamedTuple):
    """The images of one part of a data set, in the order of their names.

    Args:
        folder: what holds the class folders.
        classes: their names, sorted; a class is its place here.
        names: (N,) file names as bytes. One array, for a million Python objects would be copied into every loader process.
        labels: (N,) int64.
    """

    folder: Path
    classes: tuple[str, ...]
    names: np.ndarray
    labels: Tensor

    def path(self, i: int) -> Path:
        """The file of image i."""
        return self.folder / self.classes[self.labels[i]] / os.fsdecode(self.names[i])

    def __len__(self) -> int:
        return len(self.names)


def list_images(folder: Path) -> ImageFiles:
    """All images of a folder of class folders.

    Raises:
        ValueError: the folder is missing, has no class folders, or one of these has no images.
    """
    require(
        folder.is_dir(),
        f"{folder.absolute()} is not there; put images into {folder}/<class>/, or say where they are: --data.folder",
    )
    classes = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))
    require(len(classes) > 0, f"{folder} has no class folders; images belong into {folder}/<class>/")
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        # The order in a folder differs between file systems, and all workers need the same.
        found = sorted(entry.name for entry in os.scandir(folder / name) if entry.name.endswith(SUFFIXES))
        require(len(found) > 0, f"{folder / name} has no images ({', '.join(SUFFIXES[:3])}); fill or remove the folder")
        names += map(os.fsencode, found)
        labels += [label] * len(found)
    return ImageFiles(folder, classes, np.array(names), torch.tensor(labels))


def list_parts(train: Path, test: Path) -> tuple[ImageFiles, ImageFiles]:
    """Training and test images, which must have the same classes.

    Raises:
        ValueError: as `list_images`, or the classes differ.
    """
    parts = list_images(train), list_images(test)
    alone = sorted(set(parts[0].classes) ^ set(parts[1].classes))
    require(
        not alone, f"{train} and {test} must have the same class folders; in one of them alone: {', '.join(alone[:3])}"
    )
    return parts


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Context with a Pillow image, not yet decoded.

    Raises:
        ValueError: the file isn't an image, or cannot be decoded in the context.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow raises them
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read as an image ({reason}); replace or remove it") from error
