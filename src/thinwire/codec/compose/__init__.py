"""Combinators: codecs built from other codecs, and entropy coders."""
