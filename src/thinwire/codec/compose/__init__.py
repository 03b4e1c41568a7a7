"""Combinators: codecs built from other codecs, and entropy coders."""

from .chain import chain
from .dense_last import DenseLast
from .huffman import Huffman
from .rice import Rice
from .transform import DCT, Tiles, Transform

__all__ = ["DCT", "DenseLast", "Huffman", "Rice", "Tiles", "Transform", "chain"]
