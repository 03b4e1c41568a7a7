"""A small convolutional network for 8x8 images.

It has three 3x3 convolutions and one linear layer without biases. All parameters are matrices or kernels, so the whole
gradient can be compressed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ....options import require_integer
from .base import Model


@dataclass(frozen=True)
class DigitsNet(Model):
    """Size of the network: `width` channels w give 90 w^2 + 169 w parameters, all in matrices and kernels."""

    width: int = 48
    """Channels of the first convolution; the next have twice and four times as many. Higher => more to learn and send."""

    def __post_init__(self):
        require_integer("model.width", self.width, 1)

    def build(self, num_classes: int = 10) -> nn.Module:
        """The network with random weights from PyTorch's global generator.

        Maps images (N, 1, 8, 8) to scores (N, num_classes).
        """
        w = self.width
        return nn.Sequential(
            _convolution(1, w),
            nn.ReLU(),
            _convolution(w, 2 * w),
            nn.ReLU(),
            nn.MaxPool2d(2),
            _convolution(2 * w, 4 * w),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * w, num_classes, bias=False),
        )


def _convolution(channels_in: int, channels_out: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
