"""Models: one file per family, each with a frozen configuration that builds it."""

from .base import Model, apply, num_parameters
from .digits import DigitsNet
from .gpt import GPT
from .layerwise import AlexNet, ResNet9
from .lstm import LSTMLanguageModel
from .resnet import CIFARResNet, ResNet
from .transformer import Transformer
from .vgg import VGG16

__all__ = [
    "AlexNet",
    "CIFARResNet",
    "DigitsNet",
    "GPT",
    "LSTMLanguageModel",
    "Model",
    "ResNet",
    "ResNet9",
    "Transformer",
    "VGG16",
    "apply",
    "num_parameters",
]
