"""Sparsifiers: few elements are sent, with their positions. `base` has what they share."""
