"""`thinwire bench codecs`: the speed of every codec, as a ratio to a plain copy.

For each codec, in every repetition and in this order: copy the input with `Tensor.copy_`, encode it with the residual
written in place, `decode_add` the payload, and restore the input (not timed). The three alternate because the speed of
memory changes from second to second on a shared machine; the median of each is reported. All buffers are written before the
timing, so no page is touched for the first time during it. The three use different buffers in turn, so none finds its data
in a cache because another has just used it.

    encode_ratio = median copy seconds / median encode seconds        1 = as fast as copying the tensor
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...algorithm import require
from ...codec import Codec, Key
from ...kernels.parallel import MOST_THREADS
from ...options import require_integer
from .parts import check_device, measure_parts, seconds_of
from .rows import as_parsed, check_writable, print_rows, write_json

DEFAULT_CODECS = (
    "Identity()",
    "Cast()",
    "Cast(dtype='float16')",
    "Cast(dtype='float8_e4m3fn')",
    "Cast(dtype='float8_e5m2')",
    "TopK(ratio=0.001)",
    "TopK(ratio=0.01)",
    "TopK(ratio=0.1)",
    "TopK(ratio=0.01, sample=0.01)",
    "BlockwiseTopK(ratio=0.015625)",
    "CoarseGrainedTopK(ratio=0.01)",
    "RandomK(ratio=0.01)",
    "RandomK(ratio=0.1)",
    "Threshold(value=2.6)",
    "AdaptiveThreshold()",
    "QSGD(bits=1, zero=False)",
    *(f"QSGD(bits={bits})" for bits in range(2, 9)),
    "QSGD(levels=255)",
    "NUQSGD(bits=3)",
    "NUQSGD(bits=4)",
    "NUQSGD(bits=8)",
    "ALQ(bits=3)",
    "TernGrad()",
    "SignNorm()",
    "SignSGD()",
    "OneBit()",
    "chain(TopK(ratio=0.01), QSGD(bits=4))",
    "chain(TopK(ratio=0.01), QSGD(bits=4), Rice())",
    "chain(QSGD(bits=4), Huffman())",
)
COLUMNS = (
    ("codec", "codec", ""),
    ("times\nsmaller", "compression", ".1f"),
    ("encode\nGB/s", "encode_gb_per_s", ".2f"),
    ("of\ncopy", "encode_ratio", ".2f"),
    ("decode\nGB/s", "decode_gb_per_s", ".2f"),
    ("of\ncopy", "decode_ratio", ".2f"),
    ("encode in\nPyTorch", "reference_encode_gb_per_s", ".2f"),
    ("copy\nGB/s", "copy_gb_per_s", ".1f"),
)
PARTS_COLUMNS = (("part", "part", ""), ("ms", "milliseconds", ".2f"), ("of\ncopy", "copy_ratio", ".2f"))
CAPTION = "GB/s of float32. Encode writes the residual in place; 'of copy' is the speed as a share of Tensor.copy_."


@dataclass(frozen=True)
class CodecsBench:
    """Measure how fast codecs encode and decode, compared with a plain copy and with the plain-PyTorch reference."""

    codecs: tuple[str, ...] = DEFAULT_CODECS
    """Codecs in Python's notation, such as "QSGD(bits=4)"."""
    megabytes: float = 25.0
    """Size of the float32 input in MB (10^6 bytes); 25 is DDP's usual bucket."""
    repetitions: int = 31
    """Timed repetitions of each codec; more => steadier medians."""
    reference_repetitions: int = 1
    """The same for the plain-PyTorch reference, which takes seconds for some codecs; 0 leaves it out."""
    threads: int = 1
    """Threads that PyTorch (so also the copy) and the C++ kernels may use."""
    device: str = "cpu"
    """Where to measure: "cpu", or "cuda" for a GPU, whose kernels are timed by events."""
    parts: bool = True
    """Also measure what a step does beside coding: the kernel of Deep Gradient Compression, an update of ALQ's levels."""
    json: Path | None = None
    """Write the rows to this file."""

    def __post_init__(self):
        require(self.megabytes * 1e6 >= 4, f"megabytes must be at least one float (4e-6), got {self.megabytes}")
        require_integer("repetitions", self.repetitions, 1)
        require_integer("reference_repetitions", self.reference_repetitions, 0)
        require_integer("threads", self.threads, 1, MOST_THREADS)
        check_device(self.device)

    def run(self) -> list[dict[str, Any]]:
        """Measure, print the table, write the file, return the rows."""
        codecs = [as_parsed(text, Codec) for text in self.codecs]
        check_writable(self.json)
        with _threads(self.threads):
            x = torch.randn(int(self.megabytes * 1e6 / 4), generator=torch.Generator().manual_seed(0))
            x = x.to(self.device)
            rows = [self._row(codec, x) for codec in codecs]
            parts = measure_parts(x, self.repetitions) if self.parts else []
        if rows:
            print_rows(f"Codecs on {self.megabytes:.3g} MB of float32", COLUMNS, rows, CAPTION)
        if parts:
            print_rows("Beside the codecs", PARTS_COLUMNS, parts, "Median milliseconds.")
        write_json(self.json, rows + parts)
        return rows + parts

    def _row(self, codec: Codec, x: Tensor) -> dict[str, Any]:
        copy_seconds, encode_seconds, decode_seconds, payload_bytes = measure(codec, x, self.repetitions)
        reference_encode_seconds = measure_reference(codec, x, self.reference_repetitions)
        gigabytes = 4 * x.numel() / 1e9
        return {
            "codec": repr(codec),
            "backend": x.device.type,
            "num_elements": x.numel(),
            "encode_gb_per_s": gigabytes / encode_seconds,
            "decode_gb_per_s": gigabytes / decode_seconds,
            "copy_gb_per_s": gigabytes / copy_seconds,
            "encode_ratio": copy_seconds / encode_seconds,
            "decode_ratio": copy_seconds / decode_seconds,
            "reference_encode_gb_per_s": reference_encode_seconds and gigabytes / reference_encode_seconds,
            "payload_bytes": payload_bytes,
            "compression": 4 * x.numel() / payload_bytes,
        }


def measure(codec: Codec, x: Tensor, repetitions: int) -> tuple[float, float, float, int]:
    """Median seconds of a copy, of encode with the residual in place, and of decode_add; and the payload's bytes.

    Each uses memory that the previous two have not touched, so that none profits from cached data.
    """
    x.clone()  # freed at once, as in any training: from then on the allocator keeps the pages of payloads
    works, outs = [x.clone() for _ in range(3)], [torch.zeros_like(x) for _ in range(3)]
    for work, out in zip(works, outs, strict=True):  # the allocator keeps the pages of freed and reused memory
        payload = codec.encode(work, Key(), work)
        codec.decode_add(payload, out, key=Key())
        work.copy_(x)
    copies, encodes, decodes = [], [], []
    for step in range(repetitions):
        (a, _, b), (c, _, d) = works, outs
        copies.append(seconds_of(partial(c.copy_, a), x.device))
        encodes.append(seconds_of(partial(codec.encode, b, Key(step=step), residual=b), x.device))
        decodes.append(seconds_of(partial(codec.decode_add, payload, d, 0.5, Key()), x.device))
        b.copy_(x)  # the encoder wrote its residual there
        works, outs = works[1:] + works[:1], outs[1:] + outs[:1]
    return median(copies), median(encodes), median(decodes), payload.numel()


def measure_reference(codec: Codec, x: Tensor, repetitions: int) -> float | None:
    """Median seconds of the same encode in plain PyTorch; None for no repetitions."""
    seconds = []
    with kernels.use_backend("reference"):
        for step in range(repetitions):
            work = x.clone()
            seconds.append(seconds_of(partial(codec.encode, work, Key(step=step), residual=work), x.device))
    return median(seconds) if seconds else None


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads(), kernels.threads()
    torch.set_num_threads(number)
    kernels.set_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        kernels.set_threads(before[1])
