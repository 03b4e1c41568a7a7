"""Dense codecs: every element is sent, in full precision, in fewer bits, or as a low-rank approximation."""

from .cast import Cast, Identity
from .svd import SVD

__all__ = ["Cast", "Identity", "SVD"]
