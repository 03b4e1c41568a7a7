"""The two small fast networks of the layer-wise study, for 32x32 images.

    ResNet-9   6,573,120 parameters (10 classes)
    AlexNet    2,255,296 parameters (10 classes): AlexNet's widths, all kernels 3x3, batch-norm, one linear layer

Their scores are multiplied by 1/8, which makes the softmax softer. Linear layers have no bias.

Source: Dutta et al. 2020, On the Discrepancy between the Theoretical Analysis and Practical Implementations of Compressed
Communication for Distributed Deep Learning, arXiv 1911.08250. ResNet-9 is D. Page's DAWNBench entry of 2018, "How to
train your ResNet".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ....options import require_integer
from .base import Model

SCORE_SCALE = 0.125


@dataclass(frozen=True)
class ResNet9(Model):
    """Nine layers, two of their blocks residual; 94 % on CIFAR-10 in 24 epochs.

    Example:
        >>> from thinwire.lab.train.models import num_parameters
        >>> num_parameters(ResNet9().build())
        6573120
    """

    width: int = 64
    """Channels of the first layer; the next have 2, 4 and 8 times as many. Higher => better, slower, more to send."""

    def __post_init__(self):
        require_integer("model.width", self.width, 1)

    def build(self, num_classes: int = 10) -> nn.Module:
        """Maps images (N, 3, 32, 32) to scores (N, num_classes)."""
        w = self.width
        return nn.Sequential(
            *_layer(3, w),
            *_layer(w, 2 * w),
            nn.MaxPool2d(2),
            Residual(2 * w),
            *_layer(2 * w, 4 * w),
            nn.MaxPool2d(2),
            *_layer(4 * w, 8 * w),
            nn.MaxPool2d(2),
            Residual(8 * w),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(8 * w, num_classes, bias=False),
            Scale(),
        )


@dataclass(frozen=True)
class AlexNet(Model):
    """Five convolutional layers with batch-norm and one linear layer."""

    def build(self, num_classes: int = 10) -> nn.Module:
        """Maps images (N, 3, 32, 32) to scores (N, num_classes)."""
        return nn.Sequential(
            *_layer(3, 64, stride=2),
            nn.MaxPool2d(2),
            *_layer(64, 192),
            nn.MaxPool2d(2),
            *_layer(192, 384),
            *_layer(384, 256),
            *_layer(256, 256),
            nn.MaxPool2d(2),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, num_classes, bias=False),
            Scale(),
        )


class Residual(nn.Module):
    """`x + layer(layer(x))`, without a ReLU after the sum."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(*_layer(width, width), *_layer(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Scale(nn.Module):
    """Multiplies scores by 1/8."""

    def forward(self, scores: Tensor) -> Tensor:
        return SCORE_SCALE * scores


def _layer(channels: int, width: int, stride: int = 1) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
