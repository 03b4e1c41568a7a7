"""VGG-16 with batch-norm, in two sizes that share the convolutions and differ in the head.

    cifar      one linear layer:                     14,728,266 parameters (10 classes)
    imagenet   three linear layers of 4096, dropout: 138,365,992 parameters (1000 classes)

Source: Simonyan and Zisserman 2015, Very Deep Convolutional Networks for Large-Scale Image Recognition, arXiv 1409.1556;
batch-norm: Ioffe and Szegedy 2015, arXiv 1502.03167.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ....algorithm import require
from .base import Model

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@dataclass(frozen=True)
class VGG16(Model):
    """Thirteen 3x3 convolutions with batch-norm, then one or three linear layers.

    Raises:
        ValueError: an unknown size.

    Example:
        >>> from thinwire.lab.train.models import num_parameters
        >>> num_parameters(VGG16().build())
        14728266
    """

    size: str = "cifar"
    """Size of the head: "cifar" for 32x32 images, "imagenet" for 224x224."""

    def __post_init__(self):
        known = ("cifar", "imagenet")
        require(self.size in known, f"model.size must be one of {known}, got {self.size!r}")

    def build(self, num_classes: int | None = None) -> nn.Module:
        """Maps images (N, 3, H, W) to scores (N, num_classes); by default 10 classes for CIFAR, 1000 for ImageNet."""
        if self.size == "cifar":
            head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes or 10)]
        else:
            head = [nn.AdaptiveAvgPool2d(7), nn.Flatten(), *_hidden(512 * 49), *_hidden(4096)]
            head += [nn.Linear(4096, num_classes or 1000)]
        module = nn.Sequential(*_features(), *head)
        for layer in module:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                assert layer.bias is not None, "no convolution here leaves it out"
                nn.init.zeros_(layer.bias)
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        return module


def _features() -> list[nn.Module]:
    channels, layers = 3, []
    for stage in STAGES:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers


def _hidden(width: int) -> tuple[nn.Module, ...]:
    return nn.Linear(width, 4096), nn.ReLU(inplace=True), nn.Dropout()
