"""ImageNet recipes of the layer-wise study, Deep Gradient Compression, SGP and ALQ.

Layer-wise study: images grow from 128 to 288 pixels. The study's batch per GPU shrank as images grew (512, 224, 128 on each of
8 GPUs), and the learning rate shrank with the batch. Here the batch is always 224, and the learning rate per image is the
study's. The study's random regions showed at least half of an image in the last three epochs; here they show at least 8 %
in all epochs.

Small versions train on any folder of images in class folders, for at most 300 steps: three epochs of 50,000 images. Images grow
from 36 to 40 and 48 pixels. ResNet-18 halves images five times, and needs 33 pixels or more: below that, its last 3x3 kernels
get inputs of 1x1 or 2x2 pixels, and some of their weights see only padding (`lab/train/step/image_sizes.py`). The small version
of ResNet-50 is a ResNet-18. That of VGG-16 has the small head and trains on 32 pixels, which it can halve five times. The
large networks would take too long because of their weights, not their images.
"""

from __future__ import annotations

from dataclasses import replace

from ..train import RunConfig
from ..train.data import ImageFolder
from ..train.models import VGG16, ResNet
from ..train.optimize import SGD, LearningRateSchedule
from . import adaptive, dgc, layerwise
from .base import Task, TaskMethod

SGP_SOURCE = "Assran et al. 2019, SGP, arXiv 1811.10792"

SMALL_DATA = ImageFolder(sizes=((0, 36), (1, 40), (2, 48)), test_size=48, min_area=0.35, num_loaders=1)

# (epoch, learning rate as a multiple of the first epoch's) of the study's schedule for 8 GPUs.
PHASES = ((0, 1), (5, 2), (5, 1), (16, 1), (16, 0.1), (27, 0.1), (27, 0.01), (33, 0.01), (33, 0.001), (35, 0.001))


def small(full: RunConfig, data: ImageFolder = SMALL_DATA, **changes) -> RunConfig:
    """The small version of a configuration."""
    schedule = LearningRateSchedule(1 / 6, "linear", scale_by_workers=True)
    optimizer = replace(full.optimizer, learning_rate=0.05, schedule=schedule)
    return replace(
        full, workers=4, epochs=3, max_steps=300, batch_size=128,
        data=data, optimizer=optimizer, precision="bf16", **changes,
    )  # fmt: skip


def _layerwise_task() -> Task:
    points = tuple((epoch / 35, multiple) for epoch, multiple in PHASES)
    schedule = LearningRateSchedule(0.0, "points", points=points)
    optimizer = SGD(224 / 512, 5e-5, undecayed=("norms",), schedule=schedule, nesterov=False)
    full = RunConfig(
        "imagenet-resnet50",
        workers=8, epochs=35, batch_size=224, precision="fp16", model=ResNet(50), optimizer=optimizer,
        data=ImageFolder(sizes=((0, 128), (14, 224), (32, 288)), test_size=288),
    )  # fmt: skip
    methods = layerwise.methods({})
    return Task(f"ResNet-50 on ImageNet: {layerwise.SOURCE}", full, methods, small(full, model=ResNet(18)))


def _dgc_task(name: str, model, small_model, batch_size: int, methods: dict[str, TaskMethod], **options) -> Task:
    schedule = LearningRateSchedule(5 / 90, "steps", scale_by_workers=True)
    # The authors' rate is for one worker with 32 images.
    optimizer = SGD(0.0125 * batch_size / 32, schedule=schedule, **options)
    full = RunConfig(
        f"imagenet-{name.lower().replace('-', '')}",
        workers=8, epochs=90, batch_size=batch_size, data=ImageFolder(), model=model, optimizer=optimizer,
    )  # fmt: skip
    data = replace(SMALL_DATA, sizes=((0, 32),), test_size=32) if isinstance(small_model, VGG16) else SMALL_DATA
    return Task(f"{name} on ImageNet: {dgc.SOURCE}", full, methods, small(full, model=small_model, data=data))


def _with_cosine(task: Task) -> Task:
    """The task with each method a second time, on a cosine schedule."""
    changes, small_changes = (_cosine(config) for config in (task.full, task.small))
    again = {
        f"{end}-cosine": replace(method, about=f"{method.about}; cosine", changes=changes, small_changes=small_changes)
        for end, method in task.methods.items()
    }
    return replace(task, methods={**task.methods, **again})


def _cosine(config: RunConfig | None) -> dict[str, SGD]:
    """Changes to a configuration: its optimizer on a cosine schedule."""
    assert config is not None and isinstance(config.optimizer, SGD), "all image recipes begin with SGD"
    return {"optimizer": replace(config.optimizer, schedule=replace(config.optimizer.schedule, shape="cosine"))}


def _sgp_task() -> Task:
    schedule = LearningRateSchedule(5 / 90, "steps", scale_by_workers=True)
    full = RunConfig(
        "imagenet-resnet50",
        workers=8, epochs=90, batch_size=256, data=ImageFolder(), model=ResNet(50, head_std=0.01),
        optimizer=SGD(0.1, 1e-4, undecayed=(), schedule=schedule),
    )  # fmt: skip
    push, after = "PushSum(Exponential(alternating=True))", "order='adapt_then_combine'"
    methods = {
        "sgp-dense": TaskMethod("gradients, averaged over all workers (AR-SGD in the paper)"),
        "sgp": TaskMethod("push-sum, one peer a step, exponential graph", f"Gossip({push}, {after})"),
        "osgp": TaskMethod(
            "likewise, messages fly during the next step", f"Gossip({push}, overlap=True, staleness=1, {after})"
        ),
        "sgp-2peer": TaskMethod("push-sum, two peers a step", f"Gossip(PushSum(Exponential(peers=2)), {after})"),
        "dpsgd": TaskMethod("D-PSGD, one peer a step", f"Gossip(Mix(OddExponential()), {after})"),
        "adpsgd": TaskMethod("AD-PSGD: with one neighbour, whenever it answers", "Asynchronous()"),
    }
    return Task(
        f"ResNet-50 on ImageNet, 8 nodes: {SGP_SOURCE}", full, methods, small(full, model=ResNet(18, head_std=0.01))
    )


def _adaptive_task() -> Task:
    schedule = LearningRateSchedule(0.0, "steps", drops=(0.5, 0.75))
    full = RunConfig(
        "imagenet-resnet18",
        # An epoch has 5,004 steps, so `max_steps` ends the run in the last one.
        workers=4, epochs=120, max_steps=600_000, batch_size=64, data=ImageFolder(), model=ResNet(18, False),
        optimizer=SGD(0.1, 1e-4, undecayed=(), schedule=schedule, nesterov=False),
    )  # fmt: skip
    methods = adaptive.methods(350, dense="alq-dense", update_every=50_000)
    return Task(f"ResNet-18 on ImageNet: {adaptive.SOURCE}", full, methods, small(full))


TASKS = (
    _layerwise_task(),
    _dgc_task(
        "ResNet-18", ResNet(18), ResNet(18), 64, dgc.methods(), weight_decay=5e-5, undecayed=(), nesterov=False
    ),
    _with_cosine(_dgc_task(
        "ResNet-50", ResNet(50), ResNet(18), 32, dgc.methods("dgc-dense", warmup_epochs=0),
        weight_decay=1e-4, undecayed=("norms",),
    )),  # both schedules are the authors'
    _dgc_task(
        "VGG-16", VGG16("imagenet"), VGG16(), 32, dgc.methods(warmup_epochs=0),
        weight_decay=5e-5, undecayed=(), nesterov=False,
    ),
    _sgp_task(),
    _adaptive_task(),
)  # fmt: skip
