"""Recipes beside the values of the papers and of their authors' code: sizes, schedules, hyperparameters."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from thinwire.codec.adaptive.statistics import prior
from thinwire.lab.recipes import recipes
from thinwire.lab.train.data import PER_IMAGE_STD
from thinwire.lab.train.models import num_parameters
from thinwire.topology import Ring
from thinwire.topology.speed import difference_rates

ALL = recipes()


def linear_down(epoch, epochs, warmup, peak):
    """From 0 to the peak in the warm-up, and to 0 at the end: DAWNBench's schedule, at the end of an epoch's first step."""
    return peak * epoch / warmup if epoch < warmup else peak * (1 - (epoch - warmup) / (epochs - warmup))


def cosine(epoch, epochs, warmup, peak, start):
    if epoch < warmup:
        return start + (peak - start) * epoch / warmup
    return peak * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup))) / 2


def steps(epoch, drops, warmup, peak, start):
    if epoch < warmup:
        return start + (peak - start) * epoch / warmup
    return peak * 0.1 ** sum(epoch >= drop for drop in drops)


def study_images(epoch):
    """Per image, the layer-wise study's learning rate on ImageNet: 1 to 2 for 512 images, then 1, and falls at 16, 27, 33."""
    rate = 1 + epoch / 5 if epoch < 5 else 0.1 ** sum(epoch >= drop for drop in (16, 27, 33))
    return rate / 512


LAYERWISE = {"weight_decay": 5e-4, "momentum": 0.0, "nesterov": False, "undecayed": ()}
DGC_CIFAR = {"weight_decay": 1e-4, "momentum": 0.9, "nesterov": False, "undecayed": ()}
ALQ = DGC_CIFAR
SGP = {"weight_decay": 1e-4, "momentum": 0.9, "nesterov": True, "undecayed": ()}
PAPERS = {
    # recipe: parameters, workers, images a worker and step, epochs, optimizer, learning rate by epoch of all workers
    "cifar10-resnet9-topk": (6_573_120, 4, 128, 24, LAYERWISE, lambda e: linear_down(e, 24, 5, 0.4)),
    "cifar10-resnet9-randomk": (6_573_120, 4, 128, 40, LAYERWISE, lambda e: linear_down(e, 40, 5, 0.4)),
    "cifar10-vgg16-qsgd-model": (134_301_514, 4, 128, 24, LAYERWISE, lambda e: linear_down(e, 24, 5, 0.4)),
    "cifar10-alexnet-fp16": (2_255_296, 4, 128, 24, LAYERWISE, lambda e: linear_down(e, 24, 5, 0.4)),
    "imagenet-resnet50-qsgd-4bit": (
        25_557_032, 8, 224, 35, {"weight_decay": 5e-5, "momentum": 0.9, "nesterov": False, "undecayed": ("norms",)},
        lambda e: 224 * study_images(e),
    ),
    "cifar10-resnet110-dgc": (1_730_714, 4, 128, 200, DGC_CIFAR, lambda e: cosine(e, 200, 5, 0.4, 0.1)),
    "imagenet-resnet50-dgc": (
        25_557_032, 8, 32, 90, {"weight_decay": 1e-4, "momentum": 0.9, "nesterov": True, "undecayed": ("norms",)},
        lambda e: steps(e, (30, 60, 80), 5, 0.1, 0.0125),
    ),
    "imagenet-resnet50-dgc-cosine": (
        25_557_032, 8, 32, 90, {"weight_decay": 1e-4, "momentum": 0.9, "nesterov": True, "undecayed": ("norms",)},
        lambda e: cosine(e, 90, 5, 0.1, 0.0125),
    ),
    "imagenet-resnet18-dgc": (
        11_689_512, 8, 64, 90, {"weight_decay": 5e-5, "momentum": 0.9, "nesterov": False, "undecayed": ()},
        lambda e: steps(e, (30, 60, 80), 5, 0.2, 0.025),
    ),
    "imagenet-vgg16-dgc": (
        138_365_992, 8, 32, 90, {"weight_decay": 5e-5, "momentum": 0.9, "nesterov": False, "undecayed": ()},
        lambda e: steps(e, (30, 60, 80), 5, 0.1, 0.0125),
    ),
    "imagenet-resnet50-sgp": (25_557_032, 8, 256, 90, SGP, lambda e: steps(e, (30, 60, 80), 5, 0.8, 0.1)),
    "cifar10-resnet32-alq": (464_154, 4, 128, 825, ALQ, lambda e: steps(e, (412.5, 618.75), 0, 0.1, 0.1)),
    "cifar10-resnet110-amq": (1_727_962, 4, 128, 825, ALQ, lambda e: steps(e, (412.5, 618.75), 0, 0.1, 0.1)),
    "cifar10-resnet20-powergossip": (
        272_474, 8, 128, 300,
        {"weight_decay": 1e-4, "momentum": 0.9, "nesterov": True, "undecayed": ("*.residual.1.*", "*.residual.4.*")},
        lambda e: steps(e, (150, 225), 5, 1.13, 0.1),
    ),
    "cifar10-resnet20-choco": (
        272_474, 8, 128, 300, {"weight_decay": 1e-4, "momentum": 0.9}, lambda e: steps(e, (150, 225), 5, 1.6, 0.1),
    ),
    "wikitext2-lstm-powergossip": (
        None, 16, 64, 90, {"weight_decay": 0.0, "momentum": 0.0}, lambda e: steps(e, (60, 80), 5, 47.5, 1.25),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_has_the_values_of_its_original(name):
    parameters, workers, batch_size, epochs, optimizer, rate = PAPERS[name]
    config = ALL[name].config
    if parameters is not None:
        with torch.device("meta"):
            assert num_parameters(config.model.build(10 if name.startswith("cifar10") else 1000)) == parameters
    assert (config.workers, config.batch_size, config.epochs) == (workers, batch_size, epochs)
    assert {key: getattr(config.optimizer, key) for key in optimizer} == optimizer
    for epoch in (epochs * i // 10 for i in range(10)):  # 100 steps an epoch
        found = config.optimizer.learning_rate_at(100 * epoch, 100 * epochs, workers)
        assert found == pytest.approx(rate(epoch), rel=0.05, abs=0.01 * rate(epochs // 4)), epoch


def test_quantizers_of_the_alq_paper():
    """Buckets through the whole network, its short last one dense; no zero level, nothing clipped."""
    strategies = {end: ALL[f"cifar10-resnet32-{end}"].config.strategy for end in ("alq", "alq-gd", "nuqsgd", "qsgdinf")}
    assert strategies == {
        end: f"Gradients(Mean(DenseLast({codec}), granularity='model', min_ndim=0))"
        for end, codec in {
            "alq": "ALQ(bucket_size=8192, num_buckets=50)",
            "alq-gd": "ALQ(bucket_size=8192, num_buckets=50, search='gradient')",
            "nuqsgd": "NUQSGD(bits=3, bucket_size=8192, zero=False)",
            "qsgdinf": "QSGD(bits=3, norm='max', bucket_size=8192, zero=False)",
        }.items()
    }
    components = {"cifar10-resnet32": 50, "cifar10-resnet110": 150, "imagenet-resnet18": 350}
    for name, end, small in itertools.product(components, ("alq", "alq-gd", "alq-n", "amq", "amq-n"), ("", "-small")):
        codec = ALL[f"{name}-{end}{small}"].config.parsed_strategy().averager.codec.codec
        assert codec.num_buckets == components[name], f"{name}-{end}{small}"
    assert "TernGrad(clip=None" in ALL["cifar10-resnet32-terngrad"].config.strategy
    assert "update_every=50000" in ALL["imagenet-resnet18-alq"].config.strategy
    assert "shortcut='identity'" in repr(ALL["cifar10-resnet110-alq"].config.model)


def relative_error(codec, num_buckets=64):
    """Squared error of one encoding of normal coordinates, relative to their square."""
    x = torch.randn(num_buckets * codec.bucket_size, generator=torch.Generator().manual_seed(0))
    return ((codec.decode(codec.encode(x), x.numel()) - x).norm() / x.norm()).item() ** 2


@pytest.mark.parametrize("network", ["cifar10-resnet32", "cifar10-resnet110", "imagenet-resnet18"])
def test_small_nuqsgd_has_less_noise_than_gradient(network):
    """Under a smallest level without zero, each coordinate costs a 64th of its bucket's square: d / 64 - 1 for d of them."""
    full = ALL[f"{network}-nuqsgd"].config.parsed_strategy().averager.codec.codec
    assert relative_error(full) == pytest.approx(full.bucket_size / 64 - 1, rel=0.01), "the paper's: over a hundred"
    small = ALL[f"{network}-nuqsgd-small"].config
    codec = small.parsed_strategy().averager.codec.codec
    coordinate = prior(codec.bucket_size, "l2")  # relative to the L2 norm of its bucket
    expected = codec.bucket_size * coordinate.quantization_variance(torch.tensor(codec.level_values)).item()
    assert relative_error(codec) == pytest.approx(expected, rel=0.05)
    assert expected / small.workers < 0.5, "of the mean over the workers"


def test_step_sizes_of_the_power_gossip_study():
    """1.308 on the ring of 8 for all that the study does not tune; 1 on the ring of 16; the tuned ones of the others."""
    assert pytest.approx(2 / sum(difference_rates(Ring(), 8)), abs=5e-4) == 1.308, "the fastest without compression"
    expected = {
        "cifar10-resnet20-dpsgd": 1.308, "cifar10-resnet20-powergossip": 1.308, "cifar10-resnet20-powergossip-2it": 1.308,
        "cifar10-resnet20-powergossip-random": 1.308, "cifar10-resnet20-powergossip-2it-random": 1.308,
        "cifar10-resnet20-choco": 0.45, "cifar10-resnet20-choco-topk": 0.0375, "cifar10-resnet20-deepsqueeze": 0.01,
        "cifar10-resnet20-moniqua": 0.005, "wikitext2-lstm-dpsgd": 1.0, "wikitext2-lstm-powergossip": 1.0,
        "wikitext2-lstm-choco": 0.8, "wikitext2-lstm-choco-topk": 0.01,
    }  # fmt: skip
    assert {name: ALL[name].config.parsed_strategy().averager.step_size for name in expected} == expected
    assert not ALL["cifar10-resnet20-powergossip-random"].config.parsed_strategy().averager.warm_start


def test_d_psgd_mixes_on_the_graph_of_its_authors():
    """Run by them: on 8 workers 0.25 of the distance is left after 4 steps, and 0.016 after 12."""
    graph = ALL["imagenet-resnet50-dpsgd"].config.parsed_strategy().averager.topology
    product = torch.eye(8, dtype=torch.float64) - 1 / 8
    for step in range(12):
        product = torch.from_numpy(graph.matrix(step, 8)) @ product
        if step in (3, 11):
            assert torch.linalg.matrix_norm(product, 2).item() == pytest.approx({3: 0.25, 11: 0.016}[step], abs=5e-4)


def test_deep_gradient_compression():
    """ResNet-50 and VGG-16 send 0.1 % from the first epoch, with plain momentum in the memory; the others warm up."""
    assert ALL["imagenet-resnet50-dgc"].config.strategy == "Gradients(dgc(0.001, warmup_epochs=0))"
    assert ALL["imagenet-vgg16-dgc"].config.strategy == "Gradients(dgc(0.001, warmup_epochs=0))"
    assert ALL["cifar10-resnet110-dgc"].config.strategy == "Gradients(dgc(0.001, warmup_epochs=5))"
    assert ALL["imagenet-resnet18-dgc"].config.strategy == "Gradients(dgc(0.001, warmup_epochs=5))"
    assert ALL["imagenet-resnet50-dgc"].config.optimizer.nesterov, "of weight decay's own momentum"


@pytest.mark.parametrize("end", ["dgc", "dgc-dense", "dgc-small", "dgc-dense-small"])
def test_the_second_schedule_of_deep_gradient_compression_falls_along_a_cosine(end):
    name, small = f"imagenet-resnet50-{end}".removesuffix("-small"), "-small" * end.endswith("-small")
    first, second = (ALL[f"{name}{cosine}{small}"].config for cosine in ("", "-cosine"))
    schedule = replace(first.optimizer.schedule, shape="cosine")
    assert second == replace(first, recipe=second.recipe, optimizer=replace(first.optimizer, schedule=schedule))
    assert first.optimizer.schedule.shape != "cosine"


def test_images_are_divided_by_the_deviation_that_the_authors_took():
    for name, std in (("alq", PER_IMAGE_STD), ("dgc", None)):
        data = ALL[f"cifar10-resnet{'32' if name == 'alq' else '20'}-{name}"].config.data
        assert (data.std == PER_IMAGE_STD) == (std is not None)
    assert ALL["cifar10-resnet20-powergossip"].config.data.std == PER_IMAGE_STD


def test_quantizers_of_the_layer_wise_study():
    """One norm for each layer or for the entire model: 8 bits and a sign, or 4 bits with the sign; and plain float16."""
    strategies = {end: ALL[f"imagenet-resnet50-{end}"].config.strategy for end in ("qsgd-model", "qsgd-4bit", "fp16")}
    assert strategies == {
        "qsgd-model": "Gradients(Mean(QSGD(levels=255, norm='l2', bucket_size=None), granularity='model', min_ndim=0))",
        "qsgd-4bit": "Gradients(Mean(QSGD(levels=7, norm='l2', bucket_size=None), granularity='layer', min_ndim=0))",
        "fp16": "Gradients(Mean(Cast('float16'), min_ndim=0))",
    }


def test_thresholds_are_those_of_a_summed_loss():
    """The gradient of a loss summed over 512 images is 512 times that of its mean, and so is the threshold."""
    recipe = ALL["cifar10-resnet9-threshold"]
    assert recipe.config.parsed_strategy().averager.codec.value * 512 == pytest.approx(0.001)
    assert "0.001 of a loss summed over 512 images" in recipe.about


def test_the_head_of_sgps_network_starts_small():
    torch.manual_seed(0)
    weight = ALL["imagenet-resnet50-sgp-small"].config.model.build(1000)[-1].weight
    assert weight.std().item() == pytest.approx(0.01, rel=0.01)
