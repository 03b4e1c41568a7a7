"""CIFAR-10 recipes of the layer-wise study, Deep Gradient Compression, ALQ and PowerGossip.

A learning rate is for one worker if it grows with the workers (`scale_by_workers`), and else for all together. Small recipes
train for three epochs in bf16 with a learning rate of 0.2 for all workers together. In a few dozen steps of ResNet-9 it was
better than half and than double this rate; it suits the other networks too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..train import RunConfig
from ..train.data import CIFAR10, PER_IMAGE_STD, Augmentation
from ..train.models import VGG16, AlexNet, CIFARResNet, ResNet9
from ..train.optimize import SGD, LearningRateSchedule
from . import adaptive, dgc, layerwise, power_gossip
from .base import Task

NORMS_OF_BLOCKS = ("*.residual.1.*", "*.residual.4.*")  # the norms of the stem and of shortcuts are not among them

SMALL_SGD = SGD(0.05, 1e-4, schedule=LearningRateSchedule(1 / 3, "linear", scale_by_workers=True))


def small(full: RunConfig, batch_size: int = 64, **changes: Any) -> RunConfig:
    """The small recipe of a configuration: three epochs, with 256 images per step over four workers."""
    assert isinstance(full.optimizer, SGD), "all image recipes begin with SGD"
    optimizer = replace(SMALL_SGD, momentum=full.optimizer.momentum, nesterov=full.optimizer.nesterov)
    return replace(
        full, epochs=3, max_steps=None, batch_size=batch_size, optimizer=optimizer, precision="bf16", **changes
    )


def _layerwise(prefix: str, model) -> RunConfig:
    """A batch of 512 over all workers, so that four take as many steps as the single worker of DAWNBench's 94 %."""
    schedule = LearningRateSchedule(5 / 24, "linear")
    optimizer = SGD(0.4, 5e-4, undecayed=(), schedule=schedule, momentum=0.0, nesterov=False)
    data = CIFAR10(augmentation=Augmentation(padding=4, flip=True, cutout=8, border="reflect"))
    return RunConfig(prefix, workers=4, epochs=24, batch_size=128, data=data, model=model, optimizer=optimizer)


def _layerwise_tasks() -> tuple[Task, ...]:
    tasks = []
    for name, model, small_model in (
        ("ResNet-9", ResNet9(), ResNet9(16)),
        ("AlexNet", AlexNet(), None),
        ("VGG-16", VGG16("imagenet", batch_norm=False), VGG16()),
    ):
        full = _layerwise(f"cifar10-{name.lower().replace('-', '')}", model)
        slow = replace(full.optimizer, schedule=replace(full.optimizer.schedule, warmup_fraction=5 / 40))
        methods = layerwise.methods({"epochs": 40, "optimizer": slow}, summed_over=512)
        small_config = small(full, model=small_model or model)
        small_config = replace(small_config, optimizer=SMALL_SGD)  # three epochs without momentum would hardly learn
        tasks.append(Task(f"{name} on CIFAR-10: {layerwise.SOURCE}", full, methods, small_config))
    return tuple(tasks)


def _dgc_task(depth: int) -> Task:
    schedule = LearningRateSchedule(5 / 200, "cosine", scale_by_workers=True)
    optimizer = SGD(0.1, 1e-4, undecayed=(), schedule=schedule, nesterov=False)
    full = RunConfig(
        f"cifar10-resnet{depth}",
        workers=4, epochs=200, batch_size=128, data=CIFAR10(), model=CIFARResNet(depth), optimizer=optimizer,
    )  # fmt: skip
    small_config = small(full, model=CIFARResNet(min(depth, 20)))
    return Task(f"ResNet-{depth} on CIFAR-10: {dgc.SOURCE}", full, dgc.methods(), small_config)


def _adaptive_task(depth: int, num_components: int, bucket_size: int, dense: str) -> Task:
    schedule = LearningRateSchedule(0.0, "steps", drops=(0.5, 0.75))
    optimizer = SGD(0.1, 1e-4, undecayed=(), schedule=schedule, nesterov=False)
    full = RunConfig(
        f"cifar10-resnet{depth}",
        # An epoch has 97 steps, so `max_steps` ends the run in the last one.
        workers=4, epochs=825, max_steps=80_000, batch_size=128,
        data=CIFAR10(std=PER_IMAGE_STD), model=CIFARResNet(depth, "identity"), optimizer=optimizer,
    )  # fmt: skip
    methods = adaptive.methods(num_components, bucket_size, dense)
    small_config = small(full, model=CIFARResNet(min(depth, 32), "identity"))
    return Task(f"ResNet-{depth} on CIFAR-10: {adaptive.SOURCE}", full, methods, small_config)


def _power_gossip_task() -> Task:
    schedule = LearningRateSchedule(5 / 300, "steps", drops=(0.5, 0.75), scale_by_workers=True)
    full = RunConfig(
        "cifar10-resnet20",
        workers=8, epochs=300, batch_size=128, data=CIFAR10(std=PER_IMAGE_STD), model=CIFARResNet(20),
        optimizer=SGD(1.13 / 8, 1e-4, schedule=schedule, undecayed=NORMS_OF_BLOCKS),
    )  # fmt: skip
    config = small(full, batch_size=32)
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=SMALL_SGD.learning_rate / 2))
    return Task(f"ResNet-20 on CIFAR-10, a ring of 8: {power_gossip.SOURCE}", full, power_gossip.methods(full), config)


TASKS = (
    *_layerwise_tasks(),
    _dgc_task(20),
    _dgc_task(110),
    _adaptive_task(32, 50, bucket_size=8192, dense="dense"),
    _adaptive_task(110, 150, bucket_size=16384, dense="alq-dense"),
    _power_gossip_task(),
)
