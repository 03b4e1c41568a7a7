"""Combinators: codecs built from other codecs, and entropy coders."""

from .chain import chain
from .dense_last import DenseLast
from .huffman import Huffman
from .rice import Rice

__all__ = ["DenseLast", "Huffman", "Rice", "chain"]
