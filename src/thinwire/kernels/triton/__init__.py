"""The backend in Triton for tensors on a GPU.

Each module runs kernels of one or two families of `thinwire.kernels`; arguments have been checked by the families' public
functions. Importing this package fails where Triton is not installed.
"""

from . import (  # noqa: F401  these modules add their functions to the kernels
    cast,
    indices,
    levels,
    momentum,
    permutation,
    quantize,
    reduce,
    scatter,
    select,
    signs,
    ternary,
    words,
)
