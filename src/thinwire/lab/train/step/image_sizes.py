"""Check, before a run starts, that the model can use every image size of the run.

A convolution or pool reads a padded image. Where the image is small, some places of the kernel meet padding at every
output and never a pixel. An example is a 3x3 kernel of stride 2 and padding 1 over a 1x1 image: only its centre meets the
pixel. Such a *blind* place learns nothing, because its gradient is zero. In bf16 on CPUs PyTorch can return uninitialised
memory for it instead, which ruins the run, so that such a run is refused (see docs/negative-results.md).

The check runs the model on PyTorch's meta device, which computes shapes and no values, so it takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from ..data.base import Shape
from ..models import Model
from ..models.base import within_memory

WINDOWED = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
MAX_SIDE = 512  # where the search for a sufficient image size ends


def check_image_sizes(
    model: Model, num_classes: int, train: Sequence[Shape], test: Sequence[Shape], bf16_on_cpu: bool
) -> list[str]:
    """Check that the model takes every image of a run, and that its kernels see them.

    Args:
        model: the configuration of the model.
        num_classes: scores for each image.
        train, test: shapes of the images of the run, in the order of its schedule.
        bf16_on_cpu: whether the run trains in bf16 on a CPU, where blind places can get wrong gradients.

    Returns:
        A warning for each training size with a blind layer; empty where there is none, and for data without images.

    Raises:
        ValueError: the model cannot take an image; or, with `bf16_on_cpu`, a layer is blind at a training size. The message
            names the layer, its kernel and input, the image size and the remedy.

    Example:
        >>> from thinwire.lab.train.models import ResNet
        >>> check_image_sizes(ResNet(18), 10, [(3, 64, 64)], [(3, 64, 64)], bf16_on_cpu=True)
        []
        >>> check_image_sizes(ResNet(18), 10, [(3, 32, 32)], [], bf16_on_cpu=False)[0].split(" gets")[0]
        'at images of 32x32 pixels, layer 7.residual.0 (Conv2d, kernel 3x3, stride 2x2, padding 1x1)'
    """
    if not train and not test:
        return []
    with torch.device("meta"), within_memory(model):
        # In training, batch-norm refuses one value per channel, as of a 1x1 image.
        network = model.build(num_classes).eval()
    warnings = []
    for shape in dict.fromkeys(train):
        if layers := blind_layers(network, shape):
            warnings.append(_text(shape, layers, _enough(network, shape)))
            if bf16_on_cpu:
                raise ValueError(
                    f"{warnings[-1]}, or compute in fp32 (--precision fp32): in bf16 on CPUs PyTorch can return "
                    "uninitialised memory for the gradients of these weights"
                )
    for shape in dict.fromkeys(test):
        blind_layers(network, shape)
    return warnings


def blind_layers(network: nn.Module, shape: Shape) -> list[str]:
    """Describe the layers whose kernels have positions that only see padding at an image size, in their order of use.

    Args:
        network: in evaluation mode, on the meta device or any other.
        shape: of an image, (C, H, W).

    Raises:
        ValueError: the network cannot take this image; the message names the layer that fails and a size that works.

    Example:
        >>> layers = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(1, 1, 3, padding=1))
        >>> blind_layers(layers, (1, 2, 2))
        ['layer 2 (Conv2d, kernel 3x3, stride 1x1, padding 1x1) gets an input of 1x1 pixels']
        >>> blind_layers(layers, (1, 4, 4))
        []
    """
    last, found, error = _forward(network, shape)
    if error is not None:
        size = _enough(network, shape)
        remedy = f"use images of {_by(size)} pixels or more" if size else "choose another image size or another model"
        raise ValueError(f"the model cannot take images of {_by(shape[1:])} pixels, {last} fails ({error}); {remedy}")
    return found


def _forward(network: nn.Module, shape: Shape) -> tuple[str, list[str], str | None]:
    """The last layer that ran, the blind layers, and the first line of the error that ended the forward pass."""
    last, found = ["the model"], []

    def before(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not list(module.children()):
            last.append(f"layer {name} ({type(module).__name__})")

    def after(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, WINDOWED) and _is_blind(module, inputs[0], output):
            found.append(_described(name, module, inputs[0]))

    device = next(network.parameters()).device
    with ExitStack() as hooks:
        for name, module in network.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(before, name)))
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        try:
            with torch.no_grad():
                network(torch.empty(1, *shape, device=device))
        except (RuntimeError, ValueError) as error:
            return last[-1], found, str(error).splitlines()[0]
    return last[-1], found, None


def _is_blind(module: nn.Module, x: Tensor, output: Tensor) -> bool:
    # An average pool has no dilation.
    options = [_pair(getattr(module, name, 1)) for name in ("kernel_size", "stride", "padding", "dilation")]
    sides = zip(x.shape[-2:], output.shape[-2:], *options, strict=True)
    return any(_has_blind_place(*side) for side in sides)


def _has_blind_place(size: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether a position of the kernel, along one side, lies outside the input for every output."""
    for place in range(kernel):
        pixels = (output * stride - padding + place * dilation for output in range(outputs))
        if not any(0 <= pixel < size for pixel in pixels):
            return True
    return False


def _described(name: str, module: nn.Module, x: Tensor) -> str:
    kernel, stride, padding = (_by(_pair(getattr(module, field))) for field in ("kernel_size", "stride", "padding"))
    options = f"kernel {kernel}, stride {stride}, padding {padding}"
    return f"layer {name} ({type(module).__name__}, {options}) gets an input of {_by(x.shape[-2:])} pixels"


def _enough(network: nn.Module, shape: Shape) -> tuple[int, int] | None:
    """The next larger square image size, height and width, without blind layers; None if there is none up to `MAX_SIDE`."""
    for side in range(max(shape[1:]) + 1, min(8 * max(shape[1:]), MAX_SIDE) + 1):
        _, found, error = _forward(network, (shape[0], side, side))
        if error is None and not found:
            return side, side
    return None


def _text(shape: Shape, layers: list[str], size: tuple[int, int] | None) -> str:
    others = f" (and {len(layers) - 1} more layers)" if len(layers) > 1 else ""
    remedy = (
        f"train on images of {_by(size)} pixels or more (--data.sizes)" if size else "choose a model for such images"
    )
    return f"at images of {_by(shape[1:])} pixels, {layers[0]}{others}: some of its weights see only padding; {remedy}"


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _by(size: Sequence[int]) -> str:
    return f"{size[0]}x{size[1]}"
