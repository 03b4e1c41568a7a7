"""CIFAR-10: 50,000 training and 10,000 test images of 32x32 pixels in ten classes.

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

import importlib
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ....algorithm import require
from .augment import Augmentation
from .base import Data
from .cache import cached_tensors, fingerprint
from .download import download
from .folders import ImageFiles, list_parts, open_image
from .images import Images
from .shards import Split

ARCHIVE = "cifar-10-python.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
ARCHIVE_BYTES = 170_498_071
ARCHIVE_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"

SIDE = 32
CLASSES = 10
MEAN = (125.3, 123.0, 113.9)
STD = (63.0, 62.1, 66.7)
PER_IMAGE_STD = (51.6, 50.9, 51.3)  # 0.2023, 0.1994 and 0.2010 of 255: the mean of the images' own deviations


@dataclass(frozen=True)
class CIFAR10(Data):
    """CIFAR-10 from the official archive, or from a folder of image files.

    Images are decoded once and cached (see `cache`); afterwards they are read from memory.

    Raises:
        ValueError: when loading: files are missing and cannot be downloaded, or are damaged.
    """

    folder: Path = Path("data/cifar10")
    """Holds cifar-10-python.tar.gz, or train/<class>/*.jpg and test/<class>/*.jpg; if neither, the archive is fetched."""
    augmentation: Augmentation = Augmentation()
    """Random changes of a training image."""
    std: tuple[float, float, float] = STD
    """Standard deviation of red, green and blue, by which images are divided."""

    def load(self) -> Images:
        """All images, (N, 3, 32, 32) uint8."""
        train, test = (Split(*pair) for pair in self._decoded())
        return Images(train, test, CLASSES, MEAN, self.std, self.augmentation)

    def _decoded(self) -> Any:
        if (self.folder / "train").is_dir():
            parts = list_parts(self.folder / "train", self.folder / "test")
            made_from = fingerprint([path for part in parts for path in map(part.path, range(len(part)))])
            return cached_tensors("cifar10-files.pt", made_from, lambda: [decode(part) for part in parts])
        archive = self.folder / ARCHIVE
        if not archive.exists():
            download(URL, archive, ARCHIVE_BYTES, ARCHIVE_SHA256)
        return cached_tensors("cifar10-archive.pt", fingerprint([archive]), lambda: read_archive(archive))


def decode(files: ImageFiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (N, 3, 32, 32) uint8 and classes of image files.

    Raises:
        ValueError: a file isn't an image of 32x32 pixels.
    """
    pixels = np.empty((len(files), SIDE, SIDE, 3), dtype=np.uint8)
    for i, path in enumerate(map(files.path, range(len(files)))):
        with open_image(path) as image:
            require(
                image.size == (SIDE, SIDE), f"{path} must be {SIDE}x{SIDE} pixels, got {'x'.join(map(str, image.size))}"
            )
            pixels[i] = np.asarray(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), files.labels


def read_archive(path: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Training and test images of the official archive, in its order, each with their classes.

    Raises:
        ValueError: the archive is truncated or damaged, or lacks a batch.
    """
    batches = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = Path(member.name).name
                if name.startswith("data_batch_") or name == "test_batch":
                    file = archive.extractfile(member) if member.isfile() else None
                    if file is None:
                        raise ValueError(f"{member.name} must be a file")
                    batches[name] = _read_batch(file)
            while archive.fileobj.read(1 << 20):  # to the end, where gzip compares its checksum
                pass
        train = [batches[f"data_batch_{i}"] for i in range(1, 6)]
        pixels, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
        return [(pixels, labels), batches["test_batch"]]
    except Exception as error:  # pickles of other things raise nearly anything
        raise ValueError(
            f"{path} is truncated or damaged: {path.stat().st_size:,} bytes, expected {ARCHIVE_BYTES:,} "
            f"({type(error).__name__}: {error}); remove it and fetch {URL} again"
        ) from error


def _read_batch(file: IO[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = _Arrays(file, encoding="bytes").load()
    require(isinstance(batch, dict), f"a batch must be a dictionary, got {type(batch).__name__}")
    pixels = torch.from_numpy(np.array(batch[b"data"], dtype=np.uint8)).view(-1, 3, SIDE, SIDE)
    labels = torch.tensor(batch[b"labels"], dtype=torch.int64)
    require(len(labels) == len(pixels), f"a batch has {len(pixels)} images and {len(labels)} labels")
    require(bool(((labels >= 0) & (labels < CLASSES)).all()), f"labels must be 0..{CLASSES - 1}")
    return pixels, labels


class _Arrays(pickle.Unpickler):
    """Reads only arrays and plain values, because an unrestricted pickle can run any code."""

    ALLOWED = {("multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[-1], name) not in self.ALLOWED or module.split(".")[0] not in ("numpy", "_codecs"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        module = module.replace("numpy.core.", "numpy._core.")  # the name in NumPy 2 of a module of NumPy 1
        return getattr(importlib.import_module(module), name)
