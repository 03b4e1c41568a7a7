"""Moniqua's kernels: round values modulo a number to codes, and estimate two workers' difference from their codes.

A payload has one bucket, `[B/2 float32][codes of all elements, then of B/2]`, with `M = 2^bits - 1` steps: the bytes of
`quantize.encode` for the values modulo B and B/2. The *crossings* of two codes are their difference modulo M, from
`-(M - 1) / 2` to `(M - 1) / 2`. The check of a payload is `sum_e r_e (M turns_e + code_e)` modulo 2^64, with turns_e the
multiples of B taken off element e, and r_e odd 32-bit numbers from the random bits that also round element e.

A vector with an infinite or NaN element has B/2 = NaN and codes of zero. An element of more than 2^29 turns, which float32
cannot resolve, may get any code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import debug
from . import bits as bit
from . import quantize
from .backend import kernel
from .checks import MAX_SEGMENT_NUMEL, check_length, device_of, numels_of, payload_bytes, segments, vector
from .flags import Flag
from .mix import add_flat
from .quantize import Quantizer
from .random import hash_of
from .reduce import finite

MAX_TURNS = 2.0**30


def nbytes(numel: int, bits: int) -> int:
    """Size of the payload of `numel` elements.

    Example:
        >>> nbytes(7, bits=2)
        6
    """
    return 4 + ((numel + 1) * bits + 7) // 8


def encode(xs: Sequence[Tensor], out: Tensor, key: int, bits: int, modulus: float) -> tuple[Tensor, Tensor]:
    """Write the codes of all segments modulo `modulus`, rounded at random to `2^bits` levels from -B/2 to B/2.

    Args:
        xs: segments of float32.
        out: uint8 of `nbytes(...)` bytes, written.
        key: a 64-bit key; the position among all elements is the counter.
        bits: bits a code, 2 to 8.
        modulus: B.

    Returns:
        The check, int64, and the largest magnitude, float32; both 0-dimensional.

    Raises:
        ValueError: if a buffer has the wrong kind or size.

    Example:
        >>> x, payload = torch.tensor([0.5, 6.5]), torch.empty(nbytes(2, 2), dtype=torch.uint8)
        >>> _, largest = encode([x], payload, key=7, bits=2, modulus=6.0)
        >>> largest
        tensor(6.5000)
    """
    device = device_of(xs, out)
    checked = segments("xs", xs, device)
    out = payload_bytes("out", out, nbytes(sum(numels_of(xs)), bits), device)
    return _encode.on[device.type](checked, out, key, bits, modulus)


def sums(own: Tensor, theirs: Tensor, numel: int, key: int, bits: int) -> Tensor:
    """Of the crossings k_e between two payloads: `sum r_e k_e` modulo 2^64, `sum |k_e|` and `sum k_e^2`, int64.

    If the bound held for all elements, the first is the difference of the two checks.

    Args:
        own, theirs: payloads of `encode` with the same key.
        numel: elements.
        key, bits: as given to `encode`.
    """
    device = own.device
    checked = [payload_bytes(name, p, nbytes(numel, bits), device) for name, p in (("own", own), ("theirs", theirs))]
    return _sums.on[device.type](checked[0], checked[1], numel, key, bits)


def add(outs: Sequence[Tensor], payloads: Sequence[Tensor], weights: Sequence[float], bits: int) -> None:
    """`outs += sum_k weights[k] crossings(payloads[k + 1], payloads[0])`.

    Args:
        outs: segments of float32, changed.
        payloads: the own first.
        weights: one for each of the others.
        bits: as given to `encode`.
    """
    device = device_of(outs, payloads[0])
    checked, payloads = _checked(outs, payloads, weights, bits, device)
    _add.on[device.type](checked, payloads, list(weights), bits)


def recover_add(
    outs: Sequence[Tensor], own: Tensor, payloads: Sequence[Tensor], weights: Sequence[float], bits: int, modulus: float
) -> Flag:
    """`outs += sum_k weights[k] ((c_k - own) mod B - (c_own - own mod B))`, where c is a decoded payload.

    Args:
        outs: segments of float32, changed.
        own: float32 vector, the values that the first payload holds.
        payloads: the own first.
        weights: one for each of the others.
        bits, modulus: as given to `encode`.

    Returns:
        Whether all that was added is finite: a `bool` in main memory, elsewhere a flag on the device.
    """
    device = device_of(outs, payloads[0])
    checked, payloads = _checked(outs, payloads, weights, bits, device)
    own = vector("own", own, torch.float32, device)
    return _recover_add.on[device.type](checked, own, payloads, list(weights), bits, modulus)


def decode(payload: Tensor, numel: int, bits: int) -> Tensor:
    """The decoded values, from -B/2 to B/2: a new float32 vector.

    Args:
        payload: of `encode`.
        numel: elements.
        bits: as given to `encode`.
    """
    out = debug.empty(numel + 1, dtype=torch.float32, device=payload.device)
    quantize.decode_sum([payload], [out], 1.0, _quantizer(bits))
    return out[:-1]


def wrap(x: Tensor, modulus: float) -> Tensor:
    """x modulo B, in [-B/2, B/2).

    Example:
        >>> wrap(torch.tensor([0.5, 3.5, -4.0]), 6.0)
        tensor([ 0.5000, -2.5000,  2.0000])
    """
    half = modulus / 2
    return torch.remainder(x + half, modulus).sub_(half)


def _checked(
    outs: Sequence[Tensor], payloads: Sequence[Tensor], weights: Sequence[float], bits: int, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    checked = segments("outs", outs, device)
    size = nbytes(sum(numels_of(checked)), bits)
    check_length("weights", weights, len(payloads) - 1)
    return checked, [payload_bytes(f"payloads[{k}]", p, size, device) for k, p in enumerate(payloads)]


# ---- the reference ----


@kernel
def _encode(xs: list[Tensor], out: Tensor, key: int, bits: int, modulus: float) -> tuple[Tensor, Tensor]:
    x = torch.cat([torch.empty(0, dtype=torch.float32, device=out.device), *xs])
    wrapped = wrap(x, modulus)
    # The last value is the largest, so that the bucket's scale is B/2.
    values = torch.cat([wrapped, wrapped.new_full((1,), modulus / 2)])
    quantize.encode([values], out, [key], _quantizer(bits))
    turns = ((x.double() - wrapped.double()) / torch.full_like(x, modulus).double()).round()
    # A cast of NaN or infinity to an integer has no defined result.
    turns = turns.nan_to_num(-MAX_TURNS).clamp(-MAX_TURNS, MAX_TURNS).long()
    codes = _codes(out, x.numel(), bits)
    # Sums of int64 wrap, so this one is modulo 2^64.
    check = (_odd(key, codes) * (turns * ((1 << bits) - 1) + codes)).sum()
    return check, x.abs().max() if x.numel() else x.new_zeros(())


@kernel
def _sums(own: Tensor, theirs: Tensor, numel: int, key: int, bits: int) -> Tensor:
    k = _crossings(own, theirs, numel, bits)
    return torch.stack([(_odd(key, k) * k).sum(), k.abs().sum(), k.square().sum()])


@kernel
def _add(outs: list[Tensor], payloads: list[Tensor], weights: list[float], bits: int) -> None:
    numel = sum(numels_of(outs))
    change = torch.zeros(numel, dtype=torch.float32, device=payloads[0].device)
    for theirs, weight in zip(payloads[1:], weights, strict=True):
        change.add_(_crossings(payloads[0], theirs, numel, bits).float() * weight)
    add_flat(outs, change)


@kernel
def _recover_add(
    outs: list[Tensor], own: Tensor, payloads: list[Tensor], weights: list[float], bits: int, modulus: float
) -> Flag:
    change = torch.zeros_like(own)
    error = decode(payloads[0], own.numel(), bits) - wrap(own, modulus)
    for theirs, weight in zip(payloads[1:], weights, strict=True):
        change.add_((wrap(decode(theirs, own.numel(), bits) - own, modulus) - error) * weight)
    add_flat(outs, change)
    return finite([change])


def _quantizer(bits: int) -> Quantizer:
    # One bucket, whatever the size: a GPU's kernels are compiled for each size of buckets.
    return Quantizer(bits, (1 << bits) - 1, MAX_SEGMENT_NUMEL)


def _codes(payload: Tensor, numel: int, bits: int) -> Tensor:
    """The codes of all elements, int64."""
    return bit.from_bits(bit.unpack(payload[4:].clone())[: numel * bits], bits).long()


def _odd(key: int, like: Tensor) -> Tensor:
    """r_e of each element: odd numbers of 32 bits, with a sign."""
    # An odd factor r has an inverse modulo 2^64, so that r k is zero only if k is.
    odd = hash_of(key, torch.arange(like.numel(), device=like.device)) | 1
    return odd - ((odd >> 31) << 32)


def _crossings(own: Tensor, theirs: Tensor, numel: int, bits: int) -> Tensor:
    # Modulo the last code, not 2^bits: modulo B, the first and the last code are one value.
    last = (1 << bits) - 1
    half = (last - 1) // 2
    difference = _codes(theirs, numel, bits) - _codes(own, numel, bits)
    return torch.remainder(difference + half, last) - half
