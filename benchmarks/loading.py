"""How many images a second reach a model: `python benchmarks/loading.py FOLDER`, a folder that CIFAR10 can load.

Prints images per second of augmented batches from memory, and, where the folder has image files, of batches that are
decoded by 0, 1 and 2 loader processes, which are given time to fill their queues first. One thread each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from script import run_script

from thinwire.lab.train.data import CIFAR10, Augmentation, Batch, ImageFolder

SECONDS = 2.0
QUEUED_BATCHES = 8


def images_per_second(batches: Iterator[Batch]) -> float:
    """Over about two seconds, after the batches that may have been made ahead of time."""
    # What loaders have queued would come without a wait.
    for _ in range(QUEUED_BATCHES):
        next(batches)
    began, num_images = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        num_images += len(next(batches).labels)
    return num_images / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    for border in ("zeros", "reflect"):
        data = CIFAR10(folder, Augmentation(cutout=8, border=border)).load()
        plan = data.plan(torch.randint(data.num_examples, (400 * 512,)), 512)
        speed = images_per_second(data.batches(plan, seed=0, rank=0, epoch=0))
        print(f"memory, crop ({border}), flip, cutout    {speed:8,.0f} images/s")
    for size in (32, 128) if (folder / "train").is_dir() else ():
        for num_loaders in (0, 1, 2):
            data = ImageFolder(folder, test="test", sizes=((0, size),), num_loaders=num_loaders).load()
            plan = data.plan(torch.randint(data.num_examples, (400 * 128,)), 128)
            speed = images_per_second(data.batches(plan, seed=0, rank=0, epoch=0))
            print(f"files, {size:3}x{size:<3}, {num_loaders} loader processes    {speed:8,.0f} images/s")


if __name__ == "__main__":
    run_script(main)
