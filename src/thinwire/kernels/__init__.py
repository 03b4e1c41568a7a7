"""Arithmetic on floats and bits: quantize, select, pack and their decoders, the same bytes from every backend.

One file per family: its checked functions, its records and its reference in plain PyTorch, which defines what is right.

| family | what |
|---|---|
| `quantize` | stochastic quantization to evenly spaced levels |
| `levels` | stochastic quantization to any levels |
| `sign`, `onebit` | a bit per element, with one scale per segment or two means per bucket |
| `bin_means` | a few bits per element, and the mean of each bin of a bucket |
| `ternary` | -1, 0 and 1 times a scale |
| `cast` | shorter float types |
| `select` | top-k, above a threshold, top-k in chunks |
| `indices`, `smallest`, `rice`, `words` | codes for indices |
| `entropy` | Huffman codes |
| `scatter` | selected elements out of dense segments, and back |
| `momentum` | momentum correction and error feedback, with top-k in the same pass |
| `low_rank`, `mix`, `difference`, `modular` | gossip's sums and updates, each in one pass over the tensors |
| `permutation`, `random` | random subsets and numbers, as functions of a key |
| `reduce` | whether all is finite; norms |

`flags` holds conditions that a kernel detects, such as a corrupt payload, until the host reads them.

A *segment* is a contiguous 1-D float32 tensor; each function takes a list of them on one device, so one call serves a
whole bucket of gradients. Tensors in main memory go to the C++ backend `cpu`, those on GPUs to `triton`, all others to
the reference; see `thinwire.kernels.backend`. The C++ kernels run on the calling thread, unless `set_threads` allows more.
Only GPU tables of addresses are kept between calls. All random numbers come from the given keys. The caller owns every
buffer; a residual may be its segment itself, and no other arguments may overlap. A payload may start at any address. Byte
layouts are documented in `docs/wire.md`.
"""

from . import (
    bin_means,
    cast,
    difference,
    entropy,
    flags,
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
from .backend import use_backend
from .checks import num_buckets, payload_as
from .flags import Flag
from .parallel import set_threads, threads
from .random import mix_key, uniform
from .reduce import all_finite

__all__ = [
    "Flag",
    "all_finite",
    "bin_means",
    "cast",
    "difference",
    "entropy",
    "flags",
    "indices",
    "levels",
    "low_rank",
    "mix",
    "mix_key",
    "modular",
    "momentum",
    "num_buckets",
    "onebit",
    "payload_as",
    "permutation",
    "quantize",
    "random",
    "reduce",
    "rice",
    "scatter",
    "select",
    "set_threads",
    "sign",
    "smallest",
    "ternary",
    "threads",
    "uniform",
    "use_backend",
    "words",
]
