"""Combinators: codecs built from other codecs, and entropy coders."""

from .chain import chain
from .huffman import Huffman
from .rice import Rice

__all__ = ["Huffman", "Rice", "chain"]
