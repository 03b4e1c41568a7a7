"""All kernels with typical constants: what the compile tests and the table in docs/gpu.md walk over.

A call of a kernel's own function is recorded, in place of its launch. So the types of arguments and the constants are
described once, where the launch is. Here stands only what a count per element needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from thinwire.kernels.checks import MAX_SEGMENT_NUMEL
from thinwire.kernels.levels import Levels
from thinwire.kernels.momentum import Buffers, Momentum
from thinwire.kernels.quantize import Quantizer, Quantizers
from thinwire.kernels.scales import SUM_BLOCK
from thinwire.kernels.ternary import Ternary
from thinwire.kernels.triton import (
    cast,
    indices,
    launch,
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
from thinwire.kernels.triton.block_sums import BUCKET_NUMEL, KINDS, PROGRAM_BLOCKS, block_sums, fold
from thinwire.kernels.triton.buckets import MAX_BUCKET
from thinwire.kernels.triton.fields import SCAN_BLOCK
from thinwire.kernels.triton.histograms import GROUP, SAMPLE, WIDTH
from thinwire.kernels.triton.histograms import TILE as COUNTED
from thinwire.kernels.triton.ternary import TILE_WORDS

TYPES = {torch.bool: "*i1", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
TYPES |= {torch.float32: "*fp32", torch.float64: "*fp64"}
CPU = torch.device("cpu")
NUMEL = 1 << 14  # elements of an aligned segment
XS = [torch.zeros(NUMEL, device=CPU)]
BYTES = torch.zeros(4 * NUMEL, dtype=torch.uint8, device=CPU)
INDICES = torch.zeros(16, dtype=torch.int32, device=CPU)
COUNTS = [16]  # of kept elements


class Launched(NamedTuple):
    """A launch: the `triton.jit` function, its run-time arguments, and its constants."""

    function: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One kernel with one choice of constants.

    Args:
        name: `family.kernel: constants`, unique.
        launched: what starts it.
        launches: of the whole operation.
        numel: elements of the segments that one program serves.
        least_bytes: per element, the least to read and write: each input once, each output once.
        cached_bytes: per element, what the program reads a second time, then from the cache.
        loop_trips: how often the program runs its loop over elements, if it has one.
        passes: how often it runs the longest of its other loops, as measured for random normal numbers.
    """

    name: str
    launched: Launched
    launches: int
    numel: int
    least_bytes: float
    cached_bytes: float = 0.0
    loop_trips: int = 1
    passes: int = 1

    @property
    def function(self) -> Any:
        """The `triton.jit` function."""
        return self.launched.function

    @property
    def constants(self) -> Mapping[str, Any]:
        """Its arguments of type `tl.constexpr`, and those that are None."""
        absent = {name: None for name, value in self._arguments.items() if value is None}
        return {**self.launched.constants, **absent}

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument."""
        types = {name: _type_of(value) for name, value in self._arguments.items()}
        return {name: types.get(name, "constexpr") for name in self.function.arg_names}

    @property
    def _arguments(self) -> dict[str, Any]:
        return dict(zip(self.function.arg_names, self.launched.arguments, strict=False))


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return {int: "i32", float: "fp32", type(None): "constexpr"}[type(value)]


def recorded(call: Callable[..., object], *arguments: Any) -> list[Launched]:
    """What a call launches. Nothing runs; memory that kernels would have written, and the host reads, holds zeros."""
    launched: list[Launched] = []

    def note(function: Any, num_programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
        launched.append(Launched(function, arguments, constants))

    with ExitStack() as patches:
        patches.enter_context(patch.object(torch, "empty", torch.zeros))
        stream = SimpleNamespace(device_index=0, cuda_stream=0)  # tensors are in main memory, which has none
        patches.enter_context(patch.object(launch, "_require_gpu", lambda device: None))
        patches.enter_context(patch.object(launch, "current_stream", lambda device: stream))
        for name, module in list(sys.modules.items()):
            if name.startswith("thinwire.kernels.triton.") and hasattr(module, "launch"):
                patches.enter_context(patch.object(module, "launch", note))
        call(*arguments)
    return launched


def _launch(
    name: str, which: int, numel: int, least_bytes: float, call: Callable[..., object], *arguments: Any, **more: Any
) -> Variant:
    """The launch of number `which` that a call makes; it serves `numel` elements with each program."""
    launched = recorded(call, *arguments)
    return Variant(name, launched[which], len(launched), numel, least_bytes, **more)


def _numbers(name: str, call: Callable[..., object], *arguments: Any, numbers: int = 1) -> Variant:
    """The second launch of three, which stores the numbers of buckets."""
    return _launch(name, 1, BUCKET_NUMEL, 8 * numbers / SUM_BLOCK, call, *arguments)


def _coder(name: str, call: Callable[..., object], *arguments: Any, cached_bytes: float = 0.0) -> Variant:
    """An encoder, or a decoder, of `buckets.py`: what it reads and writes follows from its constants."""
    launched = recorded(call, *arguments)
    constants = launched[-1].constants
    payload = constants["BITS"] / 8 + 4 * constants["NUMBERS"] / constants["BUCKET"]
    dense = 4 + 4 * (constants.get("RESIDUAL") or constants.get("ADD") or False)
    trips = min(32, constants["WIDTH"] // 32) if "NORM" in constants else 1
    numel = constants["SIZE"] * constants["ROWS"]
    return Variant(name, launched[-1], len(launched), numel, dense + payload, cached_bytes, trips)


def _decoders(
    name: str, add: Callable[..., object], total: Callable[..., object], *options: Any, cached_bytes: float = 0.0
) -> Iterator[Variant]:
    """The decoders of one payload; `name` has `{}` in place of the function."""
    yield _coder(name.format("decode_add"), add, BYTES, XS, 1.0, *options, cached_bytes=cached_bytes)
    one = name.format("decode_sum, one payload")
    yield _coder(one, total, [BYTES], XS, 1.0, *options, cached_bytes=cached_bytes)


def _block_sums() -> Iterator[Variant]:
    for kind, numbers in KINDS.items():
        numel, least = PROGRAM_BLOCKS * SUM_BLOCK, 4 + 8 * numbers / SUM_BLOCK
        yield _launch(f"block_sums: {kind}", 0, numel, least, block_sums, XS, CPU, kind, loop_trips=32)
    for norm in ("max", "l2"):
        rule = Quantizers((Quantizer(4, 15, MAX_SEGMENT_NUMEL, norm),))
        yield _numbers(f"block_sums.store_scales: {norm}", quantize.encode, XS, BYTES, [0], rule, None)
    sums = torch.zeros(1, 2 * SUM_BLOCK, dtype=torch.float64, device=CPU)
    yield _launch("block_sums.fold", 0, BUCKET_NUMEL, 8 / SUM_BLOCK, fold, sums, [0], [2 * SUM_BLOCK], False)


def _cast() -> Iterator[Variant]:
    yield _numbers("cast.encode: scales", cast.encode, XS, BYTES, "float8_e4m3fn", None)
    for dtype in ("float16", "float8_e4m3fn"):
        yield _coder(f"cast.encode: {dtype}, residual", cast.encode, XS, BYTES, dtype, XS)
        yield from _decoders(f"cast.{{}}: {dtype}", cast.decode_add, cast.decode_sum, dtype)


def _indices() -> Iterator[Variant]:
    per_index, numel = 4 + 12 / 8, indices.BYTES * 8  # an index, and its code at one in a thousand
    encode, decode = (indices.encode, INDICES, COUNTS, [NUMEL], BYTES), (indices.decode, BYTES, COUNTS, [NUMEL])
    yield _launch("indices.encode", 0, numel // 12, per_index, *encode, cached_bytes=195)
    yield _launch("indices.decode: count", 0, numel // 2, 2 / 8, *decode, cached_bytes=2)
    yield _launch("indices.decode: write", 2, numel // 2, per_index, *decode, cached_bytes=28)


def _levels() -> Iterator[Variant]:
    for num_levels, bucket_size, norm in ((16, 512, "l2"), (7, 1000, "max")):
        rule = Levels(tuple(i / num_levels for i in range(num_levels)), bucket_size, norm)
        what = f"{num_levels} levels, buckets of {bucket_size}"
        # Levels stay in the cache: one for each step of the search, two neighbours, and the chosen one.
        cached_bytes = 4 * (rule.bits + 3) + (4 if norm == "l2" else 0)
        name = f"levels.encode: {what}, {norm}, residual"
        yield _coder(name, levels.encode, XS, BYTES, [0], rule, XS, cached_bytes=cached_bytes)
        yield from _decoders(f"levels.{{}}: {what}", levels.decode_add, levels.decode_sum, rule, cached_bytes=4)


def _select() -> Iterator[Variant]:
    """The bytes of what is written are those of a selection of everything."""
    topk = (select.topk, XS, COUNTS)
    feedback = (momentum.add_topk, XS, XS, XS, 1.0, COUNTS)
    yield _launch("scan", -2, SCAN_BLOCK, 2 * 8, *topk)  # a count of each kind is read and written
    yield _launch("select.topk: bound", 0, SAMPLE, 4, *topk, passes=31)
    yield _launch("select.topk: bound, feedback", 0, SAMPLE, 8, *feedback, passes=31)
    yield _launch("select.topk: candidates, none", 1, COUNTED, 12, *topk)
    yield _launch("select.topk: candidates, feedback", 1, COUNTED, 20, *feedback)
    for kind, rule in RULES.items():
        correct = (momentum.correct_topk, BUFFERS, rule, COUNTS)
        yield _launch(f"select.topk: candidates, {kind}", 1, COUNTED, 28, *correct)
    yield _launch("select.topk: first histogram", 2, COUNTED, 4, *topk)
    yield _launch("select.topk: last histogram", 5, COUNTED, 4, *topk)
    # All threads read the last histogram, and the numbers of a group's tiles.
    yield _launch("select.topk: count", -3, GROUP * WIDTH, 4 + 8 / WIDTH, *topk, cached_bytes=11)
    yield _launch("select.topk: write", -1, GROUP * WIDTH, 16, *topk, cached_bytes=16)
    yield _launch("select.topk: rows of 4096", 0, 4096, 12, select.topk, [XS[0][:4096]], COUNTS, passes=6)
    yield _launch("select.topk: rows of 64", 0, 2048, 12, select.topk, [XS[0][:64]], COUNTS, passes=11)
    yield _launch("select.above: count", 0, COUNTED, 4, select.above, XS, [1.0])
    yield _launch("select.above: write", 2, COUNTED, 12, select.above, XS, [1.0])
    yield _launch("select.largest", 0, COUNTED, 4, select.largest, XS)


BUFFERS = Buffers(XS, XS, XS, XS, XS)
RULES = {kind: Momentum(0.5, nesterov=kind == "nesterov") for kind in ("momentum", "nesterov")}


def _momentum() -> Iterator[Variant]:
    short = [XS[0][:4096]]  # no histogram makes it
    yield _launch("momentum: feedback", 0, momentum.TILE, 12, momentum.add_topk, short, short, short, 1.0, COUNTS)
    for kind, rule in RULES.items():
        yield _launch(f"momentum: {kind}", 0, momentum.TILE, 20, momentum.correct, BUFFERS, rule)


def _permutation() -> Iterator[Variant]:
    call = (permutation.random_indices, [0], COUNTS, [NUMEL], CPU)
    # The passes are those of a tenth of 250 million elements: seven in a hundred numbers are followed again.
    yield _launch("permutation: mark", 0, permutation.TILE, 4, *call, passes=5)
    yield _launch("permutation: count", 1, permutation.MARKS_TILE, 1 / 8, *call)
    # As if everything were kept.
    yield _launch("permutation: write", 3, permutation.MARKS_TILE, 4 + 1 / 8, *call, loop_trips=32, passes=9)


def _quantize() -> Iterator[Variant]:
    for bits, bucket_size, norm, residual, decodes in (
        (4, 512, "max", False, False),
        (4, 512, "max", True, True),
        (4, 512, "l2", True, False),
        (8, 512, "max", True, True),
        (3, 1000, "max", True, True),
        (2, 2048, "l2", False, False),
        (4, 16384, "max", True, False),
    ):
        what = f"{bits} bits, buckets of {bucket_size}"
        rule = Quantizers((Quantizer(bits, 2**bits - 1, bucket_size, norm),))
        # An L2 scale reads the elements twice; scales of large buckets are read for each element.
        cached_bytes = 4.0 if norm == "l2" or bucket_size > MAX_BUCKET else 0.0
        name, lost = f"quantize.encode: {what}, {norm}{', residual' if residual else ''}", XS if residual else None
        yield _coder(name, quantize.encode, XS, BYTES, [0], rule, lost, cached_bytes=cached_bytes)
        if decodes:
            yield from _decoders(f"quantize.{{}}: {what}", quantize.decode_add, quantize.decode_sum, rule)


def _reduce() -> Iterator[Variant]:
    yield _launch("reduce.all_finite", 0, reduce.TILE, 4, reduce.all_finite, XS)
    yield _launch("scatter.gather_marked: mark", 1, reduce.TILE, 4, scatter.gather_marked, XS, INDICES, COUNTS)


def _scatter() -> Iterator[Variant]:
    values = XS[0][:16]
    calls: list[tuple[str, int, tuple[Any, ...]]] = [
        ("gather", 12, (scatter.gather, XS, INDICES, COUNTS)),
        ("write", 12, (scatter.write, XS, INDICES, values, COUNTS)),
        ("clear", 8, (scatter.clear, XS, INDICES, COUNTS)),
        ("add", 16, (scatter.add, XS, INDICES, values, COUNTS, 1.0)),
        ("total", 16, (scatter.total, XS, [INDICES], [values], [COUNTS], 1.0)),
    ]
    for name, least_bytes, call in calls:
        yield _launch(f"scatter.{name}", 0, scatter.TILE, least_bytes, *call)


def _signs() -> Iterator[Variant]:
    encode = (signs.encode_signs, XS, BYTES, XS, None)
    yield _coder("sign.encode: whole segments, residual", *encode)
    yield from _decoders("sign.{}: whole segments", signs.add_signs, signs.sum_signs)
    yield _coder("onebit.encode: buckets of 512, residual", signs.encode_halves, XS, BYTES, 512, XS)
    yield from _decoders("onebit.{}: buckets of 512", signs.add_halves, signs.sum_halves, 512)
    yield _numbers("sign.encode: mean", *encode)
    halves = (signs.encode_halves, XS, BYTES, MAX_SEGMENT_NUMEL, XS)
    yield _numbers("onebit.encode: means", *halves, numbers=KINDS["halves"])


def _ternary() -> Iterator[Variant]:
    scales, (one,) = (ternary.scales, XS, 2.5, MAX_SEGMENT_NUMEL, 1), XS
    yield _launch("ternary.scales: limits", 1, BUCKET_NUMEL, 16 / 1024, *scales)
    yield _launch("ternary.scales: scales", 3, BUCKET_NUMEL, 8 / 1024, *scales)
    for rule, what in ((Ternary(), "base 3, whole segments"), (Ternary(17, 512), "base 17, buckets of 512")):
        numel, word_bytes = TILE_WORDS * rule.num_digits, (1 if rule.base == 3 else 4) / rule.num_digits
        # A scale per element where buckets have scales; words are read again for each digit.
        scale_bytes = 0.0 if rule.bucket_size is None else 4.0
        again = word_bytes * (rule.num_digits - 1) + scale_bytes
        calls: list[tuple[str, int, float, tuple[Any, ...]]] = [
            (f"encode: {what}, residual", 8, scale_bytes, (ternary.encode, XS, one, BYTES, [0], rule, XS)),
            (f"decode_add: {what}", 8, again, (ternary.decode_add, BYTES, one, XS, 1.0, rule)),
            (f"decode_sum, one payload: {what}", 4, again, (ternary.decode_sum, [BYTES], [one], XS, 1.0, rule)),
        ]
        for name, dense, cached_bytes, call in calls:
            yield _launch(f"ternary.{name}", 0, numel, dense + word_bytes, *call, cached_bytes=cached_bytes)


def _words() -> Iterator[Variant]:
    per_word, tile = 4 + 12 / 8, words.TILE
    yield _launch(
        "words.encode", 0, tile * 8 // 12, per_word, words.encode, INDICES, COUNTS, 12, BYTES, cached_bytes=44
    )
    yield _launch("words.decode", 0, tile, per_word, words.decode, BYTES, COUNTS, 12, cached_bytes=3.5)


_FIRST = (_block_sums, _cast, _indices, _levels, _select, _momentum, _permutation)
_LAST = (_quantize, _reduce, _scatter, _signs, _ternary, _words)
VARIANTS: list[Variant] = [variant for family in (*_FIRST, *_LAST) for variant in family()]
