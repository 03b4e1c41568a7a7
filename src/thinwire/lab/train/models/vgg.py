"""VGG-16, in two sizes that share the convolutions and differ in the head, with and without batch-norm.

    size       head                                  parameters with batch-norm, and without
    cifar      one linear layer                      14,728,266 / 14,719,818 (10 classes)
    imagenet   three linear layers of 4096, dropout  138,365,992 / 138,357,544 (1000 classes); 134,309,962 / 134,301,514 (10)

Source: Simonyan and Zisserman 2015, Very Deep Convolutional Networks for Large-Scale Image Recognition, arXiv 1409.1556;
batch-norm: Ioffe and Szegedy 2015, arXiv 1502.03167.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ....options import require_choice
from .base import Model

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@dataclass(frozen=True)
class VGG16(Model):
    """Thirteen 3x3 convolutions, then one or three linear layers.

    Raises:
        ValueError: an unknown size.

    Example:
        >>> from thinwire.lab.train.models import num_parameters
        >>> num_parameters(VGG16().build())
        14728266
    """

    size: str = "cifar"
    """Size of the head: "cifar" for 32x32 images, "imagenet" for 224x224."""
    batch_norm: bool = True
    """Whether a batch-norm follows each convolution; without, deep networks learn slowly at first."""

    def __post_init__(self):
        require_choice("model.size", self.size, ("cifar", "imagenet"))

    def build(self, num_classes: int | None = None) -> nn.Module:
        """Maps images (N, 3, H, W) to scores (N, num_classes); by default 10 classes for CIFAR, 1000 for ImageNet."""
        if self.size == "cifar":
            head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes or 10)]
        else:
            head = [nn.AdaptiveAvgPool2d(7), nn.Flatten(), *_hidden(512 * 49), *_hidden(4096)]
            head += [nn.Linear(4096, num_classes or 1000)]
        module = nn.Sequential(*_features(self.batch_norm), *head)
        for layer in module:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                assert layer.bias is not None, "no convolution here leaves it out"
                nn.init.zeros_(layer.bias)
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.01)
                nn.init.zeros_(layer.bias)
        return module


def _features(batch_norm: bool) -> list[nn.Module]:
    channels: int = 3
    layers: list[nn.Module] = []
    for stage in STAGES:
        for width in stage:
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width)] if batch_norm else []
            layers.append(nn.ReLU(inplace=True))
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers


def _hidden(width: int) -> tuple[nn.Module, ...]:
    return nn.Linear(width, 4096), nn.ReLU(inplace=True), nn.Dropout()
