"""Data sets so small that a run over them takes a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from thinwire.lab.train.data import CIFAR10, ParallelText, PlainText

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}


def text(folder: Path, train_words: int = 2000, test_words: int = 300, **options) -> PlainText:
    """Words of a language in which each depends on the one before it."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for name, num in (("train.txt", train_words), ("test.txt", test_words)):
        words = np.cumsum(random.integers(1, 4, num)) % 23
        (folder / name).write_text("\n".join(" ".join(f"w{i}" for i in words[k : k + 10]) for k in range(0, num, 10)))
    return PlainText(folder / "train.txt", folder / "test.txt", **options)


def images(folder: Path, train: int = 8, test: int = 2) -> CIFAR10:
    """Noise of 32x32 pixels in ten classes, each around a colour of its own."""
    random = np.random.default_rng(0)
    for part, num in (("train", train), ("test", test)):
        for label in range(10):
            (folder / part / f"class{label}").mkdir(parents=True)
            for i in range(num):
                pixels = random.integers(0, 56, (32, 32, 3), dtype=np.uint8) + np.uint8(20 * label)
                Image.fromarray(pixels).save(folder / part / f"class{label}" / f"{i}.png")
    return CIFAR10(folder)


def pairs(folder: Path, train: int = 200, test: int = 23) -> ParallelText:
    """Numbers in two languages."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for part, num in (("train", train), ("test", test)):
        rows = [[list(WORDS)[i] for i in random.integers(5, size=random.integers(3, 7))] for _ in range(num)]
        (folder / f"{part}.a").write_text("".join(" ".join(row) + "\n" for row in rows))
        (folder / f"{part}.b").write_text("".join(" ".join(WORDS[word] for word in row) + "\n" for row in rows))
    return ParallelText(folder, test="test", source="a", target="b", vocabulary_size=300, max_tokens=64, max_length=12)
