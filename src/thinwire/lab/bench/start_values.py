"""Start values of consensus experiments: a float32 matrix for each worker, the same on every machine."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from ...algorithm import require
from ...kernels import mix_key

Shape = tuple[int, int]


def start_values(data: str, shape: Shape, rank: int, size: int, seed: int = 0) -> Tensor:
    """One worker's matrix.

    Args:
        data: a name in `KINDS`.
        shape: (n, m).
        rank, size: this worker and the number of workers.
        seed: seed of the random numbers.

    Raises:
        ValueError: an unknown name; a wrong shape for digits or faces, or more of them than there are; faces that cannot
            be downloaded.

    Example:
        >>> start_values("sparse", (8, 8), rank=1, size=4).count_nonzero().item()
        1
    """
    require(data in KINDS, f"data must be one of {', '.join(KINDS)}, got {data!r}")
    # A checksum, because the `hash` of a text differs between processes.
    generator = torch.Generator().manual_seed(mix_key(seed, zlib.crc32(data.encode()), rank))
    return KINDS[data](shape, rank, size, generator)


def _normal(shape: Shape, rank: int, size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _offset(shape: Shape, rank: int, size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) + rank


def _sparse(shape: Shape, rank: int, size: int, generator: torch.Generator) -> Tensor:
    x = torch.zeros(shape)
    x.view(-1)[torch.randint(x.numel(), (), generator=generator)] = 1.0
    return x


def _lognormal(shape: Shape, rank: int, size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).exp()


def _digits(shape: Shape, rank: int, size: int, generator: torch.Generator) -> Tensor:
    from ..train.data import Digits

    images = Digits().splits()[0].inputs.flatten(1)
    rows, columns = shape
    require(columns == images.shape[1], f"digits have {images.shape[1]} pixels: shape must be (n, 64), got {shape}")
    require(
        rows * size <= len(images),
        f"digits: {size} workers of {rows} images need {rows * size}, there are {len(images)}; "
        f"choose a shape of at most {len(images) // size} rows",
    )
    return images[rank * rows : (rank + 1) * rows].clone()


def _faces(shape: Shape, rank: int, size: int, generator: torch.Generator) -> Tensor:
    from sklearn.datasets import fetch_olivetti_faces

    try:
        images = torch.from_numpy(fetch_olivetti_faces().images).float()
    except OSError as error:
        raise ValueError(
            f"faces: cannot download the Olivetti faces ({error}); connect to the internet once, or copy "
            "olivetti_py3.pkz from a machine that has it, into scikit-learn's data folder (~/scikit_learn_data)"
        ) from None
    require(tuple(shape) == images.shape[1:], f"faces are images of 64 x 64: shape must be (64, 64), got {shape}")
    require(size <= len(images), f"faces: there are {len(images)} images, one for each worker, and {size} workers")
    return images[rank * len(images) // size].clone()


KINDS: dict[str, Callable[[Shape, int, int, torch.Generator], Tensor]] = {
    "normal": _normal,
    "offset": _offset,
    "sparse": _sparse,
    "lognormal": _lognormal,
    "digits": _digits,
    "faces": _faces,
}
"""Independent normal elements; the same plus the rank; one element that is 1; exp of normal; images, a row each; a face.

Faces are the 400 Olivetti faces of 64 x 64 pixels, of which PowerGossip's study starts (Vogels et al. 2020, arXiv 2008.01425).
Workers begin with those of different persons as far as possible. scikit-learn downloads them on first use.
"""
