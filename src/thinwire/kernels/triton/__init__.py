"""The backend in Triton for tensors on a GPU; with `TRITON_INTERPRET=1`, also for tensors in main memory.

Each module mirrors a family of `thinwire.kernels` and declares its kernels in `__all__`; arguments have been checked by
the family's public functions. Importing this package fails where Triton is not installed.
"""

from . import (
    cast,
    indices,
    levels,
    momentum,
    onebit,
    permutation,
    quantize,
    reduce,
    scatter,
    select,
    sign,
    ternary,
    words,
)

FAMILIES = (
    cast,
    indices,
    levels,
    momentum,
    onebit,
    permutation,
    quantize,
    reduce,
    scatter,
    select,
    sign,
    ternary,
    words,
)
