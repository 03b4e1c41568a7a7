"""The counter-based random generator: keys and uniform numbers.

A random number is a pure function of a 64-bit key and an element's position. So nothing is stored, no global state is
read, and every backend draws the same numbers. `mix_key` makes a key of `(seed, stream, step)`; `uniform` turns
`(key, position)` into a number in [0, 1).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..streams import uploaded
from .backend import kernel

MASK32 = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1


class Key(NamedTuple):
    """Names one independent sequence of random numbers: pure data, the same on every machine and backend.

    Args:
        seed: the seed of the run.
        stream: tells tensors and workers apart.
        step: tells training steps apart.
    """

    seed: int = 0
    stream: int = 0
    step: int = 0

    @classmethod
    def of(cls, seed: int, name: str, rank: int, step: int) -> Key:
        """The key of a tensor on one worker, or on one edge in place of `rank`; workers that share a key pass 0."""
        # Not Python's `hash`, which differs from process to process.
        return cls(seed, zlib.crc32(name.encode()) | rank << 32, step)

    def mixed(self) -> int:
        """The 64-bit key of the counter-based generator."""
        return _mixed(_mixed_stream(self.seed, self.stream), self.step)


def mix_key(seed: int, stream: int, step: int) -> int:
    """Mix three integers (each taken modulo 2^64) into one 64-bit key: `h = f(f(f(seed) ^ stream) ^ step)`.

    Args:
        seed: the run's seed; the same on every worker, or not, as the codec needs.
        stream: tells tensors and workers apart.
        step: the training step.

    Returns:
        An integer in [0, 2^64).

    `f` is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

    Example:
        >>> hex(mix_key(0, 0, 0))
        '0x238275bc38fcbe91'
        >>> mix_key(0, 0, 1) == mix_key(0, 1, 0)
        False
    """
    return _mixed(_mixed_stream(seed, stream), step)


@lru_cache(maxsize=1 << 14)  # a step has the streams of the step before it
def _mixed_stream(seed: int, stream: int) -> int:
    return _mixed(_mixed(0, seed), stream)


def _mixed(h: int, number: int) -> int:
    h = ((h ^ (number & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK64
    return h ^ (h >> 31)


def keys_on(keys: Sequence[int], device: torch.device) -> Tensor:
    """64-bit keys as an int64 tensor on a device; no host waits for the upload to a GPU.

    Example:
        >>> keys_on([2**64 - 1, 7], torch.device("cpu"))
        tensor([-1,  7])
    """
    return uploaded(device, [key - (key >> 63 << 64) for key in keys])


def uniform(key: int, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-24; number i depends on `key` and i alone.

    Args:
        key: a 64-bit integer, best from `mix_key`.
        numel: how many numbers.
        device: where.

    Returns:
        A float32 tensor of shape (numel,).

    A counter-based generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
    with a two-round multiply-xorshift mixer.

    Example:
        >>> torch.equal(uniform(7, 100)[:10], uniform(7, 10))
        True
    """
    device = torch.device(device)
    return _uniform.on[device.type](key, numel, device)


@kernel
def _uniform(key: int, numel: int, device: torch.device) -> Tensor:
    return uniform_of(key, numel, device)


def uniform_of(key: int, numel: int, device: torch.device) -> Tensor:
    """`uniform` in plain PyTorch, for the references."""
    # 24 bits are all that a float32 holds exactly; with more, a number could round to 1.
    return (hash_of(key, torch.arange(numel, device=device)) >> 8).float() * 2.0**-24


def hash_of(key: int | Tensor, positions: Tensor) -> Tensor:
    """32 random bits for each position (int64); a key may be an int64 tensor, of the key's 64 bits."""
    # int64 with masks stands for uint32: an overflow changes none of the low 32 bits.
    k0, k1 = key & MASK32, (key >> 32) & MASK32
    h = (positions * 0x9E3779B9 + k0) & MASK32
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & MASK32
    h = h ^ (h >> 15) ^ k1
    h = (h * 0x846CA68B) & MASK32
    return h ^ (h >> 16)
