"""The conformance suite of codecs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import kernels
from ..codec import Codec, Key
from ..notation import parse

SHAPES = [(), (1,), (7,), (64,), (13, 5), (30, 40), (3, 4, 5), (1500,)]


def check_codec(codec: Codec, named: bool = True) -> None:
    """Check that a codec fulfils the contract of `thinwire.codec.base`.

    Sizes are exact or bounds; the input is not changed; the residual is `x - decode(encode(x))` and may be `x` itself;
    bytes are a function of input and key alone, the same from both kernel backends; `decode_add` and `decode_sum`
    accumulate; segments are independent; infinite and NaN elements are never lost; a payload of a wrong size is an error.

    Args:
        codec: the codec to check.
        named: whether `parse(repr(codec))` must equal it, as for a registered codec.

    Raises:
        AssertionError: the codec breaks the contract.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_codec
        >>> check_codec(tw.TopK(0.1))
    """
    if named:
        assert parse(repr(codec)) == codec, f"parse({codec!r}) gives another codec"
    for i, shape in enumerate(SHAPES):
        x = _normal(shape, seed=i)
        _check_encoding(codec, x, Key(seed=i))
        _check_encoding(codec, torch.zeros(shape), Key(seed=i))
        _check_sums(codec, [_normal(shape, seed=10 * i + j) for j in range(3)], Key(seed=i))
    _check_segments(codec)
    for bad in (math.inf, -math.inf, math.nan):
        for position in (0, 511, 1499):
            _check_not_finite(codec, bad, position)
    _check_wrong_size(codec)


def _check_encoding(codec: Codec, x: Tensor, key: Key) -> None:
    before, residual = x.clone(), torch.empty_like(x)
    payload = codec.encode(x, key, residual)
    where = f"{codec}, shape {tuple(x.shape)}"
    assert torch.equal(x, before), f"{where}: encode changed its input"
    assert payload.dtype == torch.uint8 and payload.ndim == 1, f"{where}: a payload is a vector of uint8"
    expected = codec.nbytes(x.shape)
    fits = payload.numel() == expected if codec.fixed_size else payload.numel() <= expected
    assert fits, f"{where}: the payload has {payload.numel()} bytes, nbytes says {expected}"
    decoded = codec.decode(payload, x.shape, key)
    assert isinstance(decoded, Tensor) and decoded.shape == x.shape
    assert torch.equal(residual, x - decoded), f"{where}: the residual is not x - decode(encode(x))"
    in_place = x.clone()
    assert torch.equal(codec.encode(in_place, key, in_place), payload), f"{where}: another payload in place"
    assert torch.equal(in_place, residual), f"{where}: another residual in place"
    with kernels.use_backend("reference"):
        assert torch.equal(codec.encode(x, key), payload), f"{where}: the reference kernels give other bytes"
        again = codec.decode(payload, x.shape, key)
        assert isinstance(again, Tensor) and torch.equal(again, decoded), f"{where}: other values from the reference"
    state = torch.get_rng_state()
    codec.encode(x, key)
    assert torch.equal(torch.get_rng_state(), state), f"{where}: encode touched the global random state"
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        y = x.to(dtype)
        assert torch.equal(codec.encode(y, key), codec.encode(y.float(), key)), f"{where}: {dtype} is encoded otherwise"


def _check_sums(codec: Codec, xs: list[Tensor], key: Key) -> None:
    payloads = [codec.encode(x, key) for x in xs]
    expected, out = torch.zeros(xs[0].shape), torch.full(xs[0].shape, math.nan)
    for payload in payloads:
        codec.decode_add(payload, expected, 0.25, key)
    assert codec.decode_sum(payloads, out, 0.25, key), f"{codec}: decode_sum calls a finite sum not finite"
    assert torch.equal(out, expected), f"{codec}: decode_sum is not the sum of decode_add"


def _check_segments(codec: Codec) -> None:
    """Keys and values of other segments must not change what a segment decodes to."""
    xs = [_normal(shape, seed=i) for i, shape in enumerate(((40,), (6, 7), (1,)))]
    keys = [Key(stream=i) for i in range(len(xs))]
    payload = codec.encode(xs, keys)
    together = codec.decode(payload, [x.shape for x in xs], keys)
    for x, key, decoded in zip(xs, keys, together, strict=True):
        alone = codec.decode(codec.encode(x, key), x.shape, key)
        assert torch.equal(torch.as_tensor(alone), decoded), f"{codec}: a segment depends on those beside it"


def _check_not_finite(codec: Codec, bad: float, position: int) -> None:
    x, key = _normal((1500,), seed=position), Key(seed=3)
    x[position] = bad
    decoded = torch.as_tensor(codec.decode(codec.encode(x, key), 1500, key))
    assert not decoded.isfinite().all(), f"{codec}: element {position}, {bad}, was lost"


def _check_wrong_size(codec: Codec) -> None:
    key, payload = Key(), codec.encode(_normal((64,), seed=0), Key())
    if not codec.fixed_size:
        return
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]])):
        try:
            codec.decode(wrong, 64, key)
        except ValueError:
            continue
        raise AssertionError(f"{codec}: a payload of {wrong.numel()} bytes, not {payload.numel()}, was accepted")


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
