"""Data sets, one file each, and the distribution of their examples over workers."""

from .augment import Augmentation
from .base import IGNORE, Batch, Data, Dataset, load, sums
from .cifar import CIFAR10, PER_IMAGE_STD
from .digits import Digits
from .image_folder import ImageFolder
from .images import Images
from .shards import Split, contiguous_shard, num_batches, shard, uneven_shard
from .tensors import Tensors
from .text import PlainText, Text, WikiText2
from .translation import ParallelText

__all__ = [
    "CIFAR10",
    "IGNORE",
    "PER_IMAGE_STD",
    "Augmentation",
    "Batch",
    "Data",
    "Dataset",
    "Digits",
    "ImageFolder",
    "Images",
    "ParallelText",
    "PlainText",
    "Split",
    "Tensors",
    "Text",
    "WikiText2",
    "contiguous_shard",
    "load",
    "num_batches",
    "shard",
    "sums",
    "uneven_shard",
]
