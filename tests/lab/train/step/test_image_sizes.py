"""The check for layers whose kernel is larger than what it can see, against a computation with real gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import tiny
from helpers.interruptions import NEVER
from torch import nn

from thinwire.comm import ProcessGroupCommunicator
from thinwire.lab.recipes import recipes
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.data import ImageFolder
from thinwire.lab.train.models import VGG16, DigitsNet, Model, ResNet
from thinwire.lab.train.run import loop
from thinwire.lab.train.step.image_sizes import blind_layers, check_image_sizes

# kernel, stride, padding, dilation
CONVOLUTIONS = [(3, 1, 1, 1), (3, 2, 1, 1), (1, 2, 0, 1), (7, 2, 3, 1), (5, 1, 2, 1), (3, 1, 2, 2), (2, 2, 0, 1)]
CONVOLUTIONS += [((1, 3), 1, (0, 1), 1)]


@pytest.mark.parametrize("convolution", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("side", range(2, 9))
def test_blind_layers_are_those_with_a_weight_whose_gradient_is_always_zero(convolution, side):
    layer = nn.Conv2d(1, 1, *convolution[:3], dilation=convolution[3], bias=False)
    layer(torch.rand(1, 1, side, side) + 1).sum().backward()
    assert bool(blind_layers(layer, (1, side, side))) == (layer.weight.grad == 0).any().item()


def test_pools_count_and_the_layer_is_described():
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(3, stride=2, padding=1))
    (layer,) = blind_layers(network, (1, 1, 1))
    assert str(layer) == "layer 1 (MaxPool2d, kernel 3x3, stride 2x2, padding 1x1) gets an input of 1x1 pixels"
    assert blind_layers(network, (1, 3, 3)) == []


@pytest.mark.parametrize("side", [16, 24, 32])
def test_the_small_images_of_the_defect_are_refused_in_bf16_on_cpus_and_named_elsewhere(side):
    shapes = [(3, 48, 48), (3, side, side)]
    with pytest.raises(
        ValueError, match=rf"at images of {side}x{side} pixels, layer \S+ \(Conv2d, kernel 3x3.*33x33.*fp32"
    ):
        check_image_sizes(ResNet(18), 10, shapes, [], bf16_on_cpu=True)
    (warning,) = check_image_sizes(ResNet(18), 10, shapes, [], bf16_on_cpu=False)
    assert f"{side}x{side}" in warning and "33x33" in warning
    assert check_image_sizes(ResNet(18), 10, [(3, 33, 33)], [(3, side, side)], bf16_on_cpu=True) == []


def test_an_image_that_the_model_cannot_take_is_named_before_the_run():
    expected = (
        r"cannot take images of 24x24 pixels, layer 43 \(MaxPool2d\) fails \(.*\); use images of 32x32 pixels or more"
    )
    for train_shapes, test_shapes in (([(3, 24, 24)], []), ([(3, 32, 32)], [(3, 24, 24)])):
        with pytest.raises(ValueError, match=expected):
            check_image_sizes(VGG16(), 10, train_shapes, test_shapes, bf16_on_cpu=False)
    with pytest.raises(ValueError, match=r"layer 0 \(Conv2d\) fails .*choose another image size or another model"):
        check_image_sizes(DigitsNet(), 10, [(3, 8, 8)], [], bf16_on_cpu=False)


def test_the_check_draws_no_random_numbers():
    before = torch.get_rng_state()
    check_image_sizes(ResNet(18), 10, [(3, 64, 64)], [], bf16_on_cpu=True)
    assert torch.get_rng_state().equal(before)


@pytest.fixture
def config(tmp_path) -> RunConfig:
    """The small version of an ImageNet recipe on tiny images, with a first size that is too small."""
    tiny.images(tmp_path / "images")
    config = recipes()["imagenet-resnet18-dense-small"].config
    data = ImageFolder(tmp_path / "images", test="test", sizes=((0, 16), (1, 40)), test_size=40, num_loaders=0)
    return replace(config, data=data, workers=1, batch_size=4, epochs=1, max_steps=1, output=tmp_path / "runs")


def test_a_run_in_bf16_ends_before_its_first_step_and_leaves_no_folder(config):
    with pytest.raises(ValueError, match=r"at images of 16x16 pixels, layer"):
        train(config)
    assert not list(config.output.glob("*"))


def test_a_run_in_fp32_goes_on_and_rank_0_names_the_layer(config, tmp_path, capsys):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        with ProcessGroupCommunicator() as comm:
            (tmp_path / "run").mkdir()
            loop.run(replace(config, precision="fp32"), tmp_path / "run", comm, NEVER)
    finally:
        dist.destroy_process_group()
    assert "thinwire: at images of 16x16 pixels, layer" in capsys.readouterr().err
    assert (tmp_path / "run" / "summary.json").exists()


def test_only_sizes_that_the_run_reaches_count(config):
    data = replace(config.data, sizes=((0, 64), (2, 16)), test_size=32).load()
    assert data.image_shapes(2) == ([(3, 64, 64)], [(3, 32, 32)])
    assert data.image_shapes(3) == ([(3, 64, 64), (3, 16, 16)], [(3, 32, 32)])


def test_a_model_with_its_own_sizes_is_checked_as_it_is_built():
    class Tall(Model):
        def build(self, num_classes: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(1, num_classes, (1, 5), padding=(0, 2)), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )

    (warning,) = check_image_sizes(Tall(), 2, [(1, 9, 2)], [], bf16_on_cpu=False)
    assert "kernel 1x5" in warning and "9x2" in warning
