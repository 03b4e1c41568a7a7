"""The backend in C++ for tensors in main memory.

Each module mirrors a family of `thinwire.kernels` and declares its kernels in `__all__`; arguments have been checked by
the family's public functions. Importing this package fails where the extension `_native` is not installed.
"""

from . import (
    cast,
    difference,
    entropy,
    indices,
    levels,
    low_rank,
    mix,
    modular,
    momentum,
    onebit,
    permutation,
    quantize,
    random,
    reduce,
    rice,
    scatter,
    select,
    sign,
    smallest,
    ternary,
    words,
)

FAMILIES = (
    cast,
    difference,
    entropy,
    indices,
    levels,
    low_rank,
    mix,
    modular,
    momentum,
    onebit,
    permutation,
    quantize,
    random,
    reduce,
    rice,
    scatter,
    select,
    sign,
    smallest,
    ternary,
    words,
)
