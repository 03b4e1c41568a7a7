"""Residual networks: deep and narrow ones for CIFAR, wide ones for ImageNet.

    CIFAR     3x3 convolution to 16 channels; three stages of n blocks with 16, 32, 64 channels; mean; linear.
              depth = 6n + 2. Parameters with projection shortcuts (10 classes), and with identity shortcuts:
              8: 78,042 / 75,290   20: 272,474 / 269,722   32: 466,906 / 464,154   56: 855,770 / 853,018
              110: 1,730,714 / 1,727,962
    ImageNet  7x7 convolution to 64 channels, max-pooling; four stages with 64 .. 512 channels; mean; linear.
              Parameters (1000 classes): 18: 11,689,512   34: 21,797,672   50: 25,557,032

Source: He et al. 2016, Deep Residual Learning for Image Recognition, arXiv 1512.03385. The stride of a bottleneck
block is in its 3x3 convolution, as is now usual. Zero-initialised last norms: Goyal et al. 2017, arXiv 1706.02677.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ....options import require_choice, require_number
from .base import Model

CIFAR_DEPTHS = (8, 20, 32, 56, 110)
IMAGENET_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


@dataclass(frozen=True)
class CIFARResNet(Model):
    """Residual network for 32x32 images.

    Raises:
        ValueError: an unknown depth or shortcut.

    Example:
        >>> from thinwire.lab.train.models import num_parameters
        >>> num_parameters(CIFARResNet(depth=20).build())
        272474
    """

    depth: int = 20
    """Layers with weights, 8, 20, 32, 56 or 110; higher => better and slower."""
    shortcut: str = "projection"
    """Where channels double: "projection", a 1x1 convolution; "identity", every other pixel and zeros (no parameters)."""

    def __post_init__(self):
        require_choice("model.depth", self.depth, CIFAR_DEPTHS)
        require_choice("model.shortcut", self.shortcut, ("projection", "identity"))

    def build(self, num_classes: int = 10) -> nn.Module:
        """Maps images (N, 3, 32, 32) to scores (N, num_classes)."""
        shortcut = _projection if self.shortcut == "projection" else PaddedShortcut
        stem = nn.Sequential(*_convolution(3, 16, 3), nn.ReLU(inplace=True))
        channels, stages = 16, []
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            for i in range((self.depth - 2) // 6):
                stages.append(basic_block(channels, width, stride if i == 0 else 1, shortcut))
                channels = width
        module = nn.Sequential(stem, *stages, *_head(channels, num_classes))
        return _initialise(module)


@dataclass(frozen=True)
class ResNet(Model):
    """Residual network for images of about 224x224; it needs 33x33 or more for all weights to see pixels.

    Raises:
        ValueError: an unknown depth.
    """

    depth: int = 50
    """Layers with weights, 18, 34 or 50; higher => better and slower."""
    zero_init_residual: bool = True
    """Start the last norm of each block at 0, so that every block starts as the identity."""
    head_std: float | None = None
    """Standard deviation of the linear layer's first weights; None => PyTorch's uniform start. Lower => gentler start."""

    def __post_init__(self):
        require_choice("model.depth", self.depth, IMAGENET_BLOCKS)
        require_number("model.head_std", self.head_std, above=0, or_none=True)

    def build(self, num_classes: int = 1000) -> nn.Module:
        """Maps images (N, 3, H, W) to scores (N, num_classes)."""
        block, expansion = (bottleneck, 4) if self.depth == 50 else (basic_block, 1)
        stem = nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))
        channels, stages = 64, []
        for stage, num_blocks in enumerate(IMAGENET_BLOCKS[self.depth]):
            width = 64 * 2**stage
            for i in range(num_blocks):
                stages.append(block(channels, width, 2 if stage > 0 and i == 0 else 1, _projection))
                channels = width * expansion
        *pooling, linear = _head(channels, num_classes)
        module = _initialise(nn.Sequential(stem, *stages, *pooling, linear))
        if self.zero_init_residual:
            zero_last_norms(module)
        if self.head_std is not None:
            nn.init.normal_(linear.weight, std=self.head_std)
        return module


class ResidualBlock(nn.Module):
    """`relu(shortcut(x) + residual(x))`."""

    def __init__(self, residual: nn.Sequential, shortcut: nn.Module):
        super().__init__()
        self.residual, self.shortcut = residual, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x), inplace=True)


def basic_block(channels: int, width: int, stride: int, shortcut) -> ResidualBlock:
    """The residual is `norm(conv3x3(relu(norm(conv3x3(x)))))`."""
    residual = nn.Sequential(
        *_convolution(channels, width, 3, stride), nn.ReLU(inplace=True), *_convolution(width, width, 3)
    )
    return ResidualBlock(residual, _shortcut(channels, width, stride, shortcut))


def bottleneck(channels: int, width: int, stride: int, shortcut) -> ResidualBlock:
    """The residual is a 3x3 convolution between two 1x1 convolutions; the second one has four times as many channels."""
    residual = nn.Sequential(
        *_convolution(channels, width, 1),
        nn.ReLU(inplace=True),
        *_convolution(width, width, 3, stride),
        nn.ReLU(inplace=True),
        *_convolution(width, 4 * width, 1),
    )
    return ResidualBlock(residual, _shortcut(channels, 4 * width, stride, shortcut))


class PaddedShortcut(nn.Module):
    """Identity shortcut to more channels: every other pixel, and zeros for the new channels (option A)."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.stride, self.new = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        before = self.new // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new - before))


def zero_last_norms(module: nn.Module) -> None:
    """Set the scale of the last norm of every block to 0."""
    for block in module.modules():
        if isinstance(block, ResidualBlock):
            weight = block.residual[-1].weight
            assert isinstance(weight, Tensor), "the last layer of a block is a norm"
            nn.init.zeros_(weight)


def _shortcut(channels: int, width: int, stride: int, shortcut) -> nn.Module:
    return nn.Identity() if channels == width and stride == 1 else shortcut(channels, width, stride)


def _projection(channels: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(*_convolution(channels, width, 1, stride))


def _convolution(channels: int, width: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    # The norm has a bias of its own.
    return nn.Conv2d(channels, width, size, stride, size // 2, bias=False), nn.BatchNorm2d(width)


def _head(channels: int, num_classes: int) -> tuple[nn.Module, nn.Module, nn.Linear]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)


def _initialise(module: nn.Module) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return module
