"""Keys of the counter-based random generator.

A random number is a pure function of a 64-bit key and an element's position, so nothing is stored, nothing global is
read, and every backend draws the same numbers. The key mixes ``(seed, stream, step)``; `thinwire.kernels.uniform`
turns ``(key, position)`` into a number in [0, 1).
"""

from __future__ import annotations

_MASK64 = (1 << 64) - 1


def _splitmix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def mix_key(seed: int, stream: int, step: int) -> int:
    """Mix three integers (each taken modulo 2^64) into one 64-bit key: ``h = f(f(f(seed) ^ stream) ^ step)``.

    Args:
        seed: the run's seed; the same on every worker, or not, as the codec needs.
        stream: what tells tensors (and workers) apart.
        step: the training step.

    Returns:
        An integer in [0, 2^64).

    `f` is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

    >>> hex(mix_key(0, 0, 0))
    '0x238275bc38fcbe91'
    >>> mix_key(0, 0, 1) == mix_key(0, 1, 0)
    False
    """
    h = _splitmix64(seed & _MASK64)
    h = _splitmix64(h ^ (stream & _MASK64))
    return _splitmix64(h ^ (step & _MASK64))
