"""Damaged payloads: a codec refuses them, or decodes them to some numbers, and does nothing else.

Damage is random bytes, a payload of another length, flipped bits, bytes and words set to special values, and parts of
two payloads joined. All of it follows from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..codec import Codec, Key, Selection

SHAPES = [torch.Size(shape) for shape in ((300,), (0,), (1,), (13, 5))]
GUARD, GAP = 3.0, 16  # value and number of the guard elements between two outputs
KEYS = [Key(seed=5, stream=i) for i in range(len(SHAPES))]
# Infinities, NaN, numbers that are almost too large or too small, and integers at the ends of their range.
WORDS = np.array(
    [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x00000001, 1 << 20],
    dtype=np.uint32,
)

Bytes = NDArray[np.uint8]
Damage = Callable[[Bytes, list[Bytes], np.random.Generator], Bytes]


def fuzz_codec(codec: Codec, num_inputs: int, seed: int = 0, num_compared: int = 0) -> int:
    """Decode damaged payloads, and check that each is refused or decoded, and that nothing else happens.

    A refusal is a ValueError that names the codec. `decode_add`, `decode_sum` and `support` are called with every
    payload. Guard elements around the outputs must stay as they are. `decode_sum` must tell whether its result is finite,
    and refuse the payloads that `decode_add` refuses.

    Args:
        codec: the codec to check.
        num_inputs: how many damaged payloads to try.
        seed: chooses the damage.
        num_compared: how many of the first inputs are also decoded by the reference kernels, which are slow and must agree.

    Returns:
        How many payloads were refused.

    Raises:
        AssertionError: the codec does something else; the message has the input's number and seed.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import fuzz_codec
        >>> fuzz_codec(tw.QSGD(bits=4), num_inputs=100) < 100
        True
    """
    rng, valid = np.random.default_rng(seed), _valid_payloads(codec)
    memory, outs = _guarded_outputs()
    intact = torch.from_numpy(valid[0].copy())
    num_refused = 0
    for number in range(num_inputs):
        damage = DAMAGES[int(rng.integers(len(DAMAGES)))]
        payload = torch.from_numpy(damage(valid[int(rng.integers(len(valid)))], valid, rng))
        where = f"{codec}, input {number} of seed {seed} ({damage.__name__}, {payload.numel()} bytes)"
        memory.fill_(GUARD)
        refused = _refuses(partial(codec.decode_add, payload, outs, 0.5, KEYS), codec, where)
        num_refused += refused
        _check_guard(memory, outs, where)
        added = [out.clone() for out in outs]
        _check_sum(codec, payload, intact, memory, outs, refused, where)
        _check_support(codec, payload, where)
        if number < num_compared:
            _check_reference(codec, payload, added, refused, where)
    return num_refused


def _check_sum(
    codec: Codec, payload: Tensor, intact: Tensor, memory: Tensor, outs: list[Tensor], refused: bool, where: str
) -> None:
    memory.fill_(GUARD)
    flags: list[bool] = []

    def decode_sum() -> None:
        # Behind an intact payload: a damaged one must be found among others too.
        flags.append(kernels.flags.read(codec.decode_sum([intact, payload], outs, 0.5, KEYS)))

    assert _refuses(decode_sum, codec, where) == refused, f"{where}: decode_sum and decode_add differ"
    _check_guard(memory, outs, where)
    if not refused:
        finite = all(bool(out.isfinite().all()) for out in outs)
        assert flags == [finite], f"{where}: decode_sum says finite={flags[0]}"


def _check_support(codec: Codec, payload: Tensor, where: str) -> None:
    found: list[Selection | None] = []
    _refuses(lambda: found.append(codec.support(payload, SHAPES, KEYS)), codec, where)
    for kept in found:
        if kept is None:
            continue
        for index, shape in zip(kept.indices.split(kept.counts), SHAPES, strict=True):
            inside = not index.numel() or (int(index.min()) >= 0 and int(index.max()) < shape.numel())
            assert inside, f"{where}: the support lies outside of its segment"


def _check_reference(codec: Codec, payload: Tensor, expected: list[Tensor], refused: bool, where: str) -> None:
    # Filled as the other outputs are, because `decode_add` adds to what is there.
    outs = [torch.full(shape, GUARD, device="cpu") for shape in SHAPES]
    with kernels.use_backend("reference"):
        same = _refuses(lambda: codec.decode_add(payload, outs, 0.5, KEYS), codec, where) == refused
    assert same, f"{where}: the kernels and their reference disagree on whether to refuse it"
    if not refused:
        for a, b in zip(outs, expected, strict=True):
            assert bool(((a == b) | (a.isnan() & b.isnan())).all()), f"{where}: the reference decodes other numbers"


def _refuses(operation: Callable[[], object], codec: Codec, where: str) -> bool:
    """Whether `operation` raises a ValueError that names the codec; any other error is a defect."""
    try:
        operation()
    except ValueError as error:
        assert str(error).startswith(f"{codec}: "), f"{where}: the error names no codec: {error}"
        return True
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__} instead of a ValueError: {error}") from error
    return False


def _guarded_outputs() -> tuple[Tensor, list[Tensor]]:
    """One buffer, and the outputs inside it with gaps between them."""
    memory = torch.empty(sum(shape.numel() + GAP for shape in SHAPES) + GAP, device="cpu")
    outs, at = [], GAP
    for shape in SHAPES:
        outs.append(memory[at : at + shape.numel()].view(shape))
        at += shape.numel() + GAP
    return memory, outs


def _check_guard(memory: Tensor, outs: Sequence[Tensor], where: str) -> None:
    at = 0
    for shape in SHAPES:
        assert bool((memory[at : at + GAP] == GUARD).all()), f"{where}: memory outside of the outputs has changed"
        at += GAP + shape.numel()
    assert bool((memory[at:] == GUARD).all()), f"{where}: memory outside of the outputs has changed"


def _valid_payloads(codec: Codec) -> list[Bytes]:
    """Payloads of usual tensors, of zeros, of few values, and of tensors that are not finite; the first is usual."""
    generator = torch.Generator().manual_seed(1)
    usual = [[torch.randn(shape, generator=generator, device="cpu") for shape in SHAPES] for _ in range(4)]
    zeros = [torch.zeros(shape, device="cpu") for shape in SHAPES]
    rounded = [x.round() for x in usual[0]]
    infinite = [x.masked_fill(x > 2, torch.inf) for x in usual[1]]
    return [codec.encode(xs, KEYS).numpy() for xs in (*usual, zeros, rounded, infinite)]


# ---- damage; each returns new bytes ----


def _random(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    return rng.integers(0, 256, payload.size, dtype=np.uint8)


def _random_of_any_length(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    # + 9, so that an empty payload gets longer too.
    return rng.integers(0, 256, int(rng.integers(2 * payload.size + 9)), dtype=np.uint8)


def _cut(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    # Mostly 0, a cut at the end alone; 1 to 3 move all that follows.
    start = int(rng.integers(4)) * int(rng.integers(2))
    return payload[start : int(rng.integers(payload.size + 1))].copy()


def _extended(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    return np.concatenate([payload, rng.integers(0, 256, int(rng.integers(1, 20)), dtype=np.uint8)])


def _flipped(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    damaged = payload.copy()
    if damaged.size:
        for at in rng.integers(0, 8 * damaged.size, int(rng.integers(1, 9))):
            damaged[at // 8] ^= np.uint8(1 << at % 8)
    return damaged


def _flipped_near_end(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    """Where lengths and counts are."""
    damaged = payload.copy()
    end = min(damaged.size, 24)
    if end:
        damaged[damaged.size - 1 - int(rng.integers(end))] ^= np.uint8(1 << int(rng.integers(8)))
    return damaged


def _overwritten(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    damaged = payload.copy()
    start, stop = sorted(int(at) for at in rng.integers(0, damaged.size + 1, 2))
    damaged[start:stop] = rng.choice(np.array([0, 1, 127, 128, 255], dtype=np.uint8))
    return damaged


def _special_word(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    damaged = payload.copy()
    if damaged.size >= 4:
        at = int(rng.integers(damaged.size - 3))
        # At least half of the time a multiple of four, to replace whole numbers.
        at -= at % 4 * int(rng.integers(2))
        damaged[at : at + 4] = WORDS[[int(rng.integers(len(WORDS)))]].view(np.uint8)
    return damaged


def _joined(payload: Bytes, valid: list[Bytes], rng: np.random.Generator) -> Bytes:
    other, at = valid[int(rng.integers(len(valid)))], int(rng.integers(payload.size + 1))
    return np.concatenate([payload[:at], other[at:]])


DAMAGES: list[Damage] = [
    _random,
    _random_of_any_length,
    _cut,
    _extended,
    _flipped,
    _flipped_near_end,
    _overwritten,
    _special_word,
    _joined,
]
