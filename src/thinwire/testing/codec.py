"""The conformance suite of codecs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .. import kernels
from ..codec import Codec, Key
from ..codec.base import add_sections, join_payloads, split_payload
from .algorithm import check_algorithm
from .random import normal, untouched_random_state

# 1500 and 9100 elements fill several buckets of 512 and leave a shorter last one.
SHAPES = [(), (1,), (0,), (7,), (13, 5), (3, 4, 5), (1500,), (70, 130)]
GUARD, NUM_CORRUPT, NUM_KEYS = 3.0, 30, 100


def check_codec(codec: Codec, named: bool = True, device: torch.device | str = "cpu") -> None:
    """Check that a codec fulfils the contract of `thinwire.codec.base`.

    Sizes are exact or bounds; the input is not changed; the residual is `x - decode(encode(x))` and may be `x` itself;
    bytes are a function of input and key alone, the same from both kernel backends; `decode_add` and `decode_sum`
    accumulate; segments are independent; the codec's traits hold; infinite and NaN elements are never lost; a payload may
    start at any address; a payload of a wrong size is an error; a corrupt payload changes nothing outside the output.

    Args:
        codec: the codec to check.
        named: whether `parse(repr(codec))` must equal it, as for a registered codec.
        device: of the tensors; "cuda" checks on a GPU.

    Raises:
        AssertionError: the codec breaks the contract.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_codec
        >>> check_codec(tw.TopK(0.1))
    """
    check_algorithm(codec, Codec, named)
    device = torch.empty(0, device=device).device  # with its index
    for i, shape in enumerate(SHAPES):
        check_encoding(codec, normal(shape, i, device), Key(seed=i))
    for i, x in enumerate(_hard_values()):
        check_encoding(codec, x.to(device), Key(seed=i))
    _check_input(codec, device)
    for bad in (None, math.inf, math.nan):
        _check_sums(codec, bad, device)
    _check_weight(codec, device)
    _check_segments(codec, device)
    check_traits(codec, device)
    _check_not_finite(codec, device)
    _check_addresses(codec, device)
    _check_wrong_size(codec, device)
    _check_corrupt(codec, device)


def check_encoding(codec: Codec, x: Tensor, key: Key) -> None:
    """Check what the contract says of one tensor: size, residual, untouched input, the same from both backends.

    `check_codec` calls it for many shapes and hard values. Call it with tensors of your own, such as those that a
    property-based test draws.

    Args:
        codec: the codec to check.
        x: finite float32 tensor of any shape.
        key: the random key to encode with.

    Raises:
        AssertionError: the codec breaks the contract.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.testing import check_encoding
        >>> check_encoding(tw.TopK(0.1), torch.tensor([1e-45, -3e38]), tw.codec.Key(seed=1))
    """
    before, residual = x.clone(), torch.empty_like(x)
    where = f"{codec}, shape {tuple(x.shape)}"
    try:
        payload = codec.encode(x, key, residual)
    except ValueError as error:  # such as of what is no payload
        raise AssertionError(f"{where}: {error}") from None
    assert _same_bits(x, before), f"{where}: encode changed its input"
    assert payload.is_contiguous(), f"{where}: a payload is contiguous, got strides {payload.stride()}"
    _check_size(codec, payload, codec.nbytes(x.shape), where)
    decoded = codec.decode(payload, x.shape, key)
    assert isinstance(decoded, Tensor) and decoded.shape == x.shape
    assert _same(residual, x - decoded), f"{where}: the residual is not x - decode(encode(x))"
    in_place = x.clone()
    assert torch.equal(codec.encode(in_place, key, in_place), payload), f"{where}: another payload in place"
    assert _same(in_place, residual), f"{where}: another residual in place"
    # The result of a round may be written into the input while its payload is still read.
    alone = codec.encode(overwritten := x.clone(), key)
    overwritten.fill_(math.nan)
    assert torch.equal(alone, payload), (
        f"{where}: without a residual the payload is another one, or it shares memory with the input, which may change"
    )
    with kernels.use_backend("reference"):
        assert torch.equal(codec.encode(x, key), payload), f"{where}: the reference kernels give other bytes"
        again = codec.decode(payload, x.shape, key)
        assert isinstance(again, Tensor) and _same_bits(again, decoded), f"{where}: other values from the reference"


def check_traits(codec: Codec, device: torch.device | str = "cpu") -> None:
    """Check what a codec says of itself in `traits`.

    Args:
        codec: the codec to check.
        device: of the tensors.

    Raises:
        AssertionError: a claim does not hold, or a demand is not needed.

    Example:
        >>> import thinwire as tw
        >>> from thinwire.testing import check_traits
        >>> check_traits(tw.chain(tw.RandomK(0.1, shared=True), tw.Cast()))
    """
    device = torch.empty(0, device=device).device  # with its index
    traits, key, xs = codec.traits, Key(seed=5), [normal((30, 20), i, device) for i in range(2)]
    payloads = [codec.encode(x, key) for x in xs]
    decoded = [_decoded(codec, payload, x.shape, key) for payload, x in zip(payloads, xs, strict=True)]
    _check_size(codec, payloads[0], codec.nbytes(xs[0].shape), f"{codec}")
    assert not traits.lossless or _same_bits(decoded[0], xs[0]), f"{codec} is not lossless"
    sends_floats = payloads[0].numel() == 4 * 600 and torch.equal(payloads[0], xs[0].view(-1).view(torch.uint8))
    assert not traits.sends_floats or sends_floats, f"{codec} does not send its elements as they are"
    if not traits.needs_shape:
        assert torch.equal(codec.encode(xs[0].view(-1), key), payloads[0]), (
            f"{codec} depends on shapes: set needs_shape"
        )
        assert codec.nbytes(torch.Size([30, 20])) == codec.nbytes(600), f"{codec} is not sized by numbers of elements"
    if traits.unbiased:
        _check_unbiased(codec, xs[0])
    if traits.sum_dtype is not None:
        _check_summed(codec, payloads, decoded, key)
    if traits.shared_key:
        assert _refuses(lambda: codec.decode(payloads[0], xs[0].shape), device), (
            f"{codec} decodes without its shared key"
        )
    if traits.votes:
        zeros = [torch.zeros(30, 20, device=device)]
        codec.combine(zeros)
        assert not zeros[0].any(), f"{codec}: a vote of nobody is not zero"
    if traits.agreement is not None:
        assert traits.agreement.combined_by in ("sum", "max"), f"{codec}: unknown {traits.agreement.combined_by}"


def _check_unbiased(codec: Codec, x: Tensor) -> None:
    """The mean of m decodings has an m-th of the squared error of one decoding, and a bias on top."""
    keys = [Key(seed=5, step=step) for step in range(NUM_KEYS)]
    decoded = torch.stack([*codec.decode(codec.encode([x] * NUM_KEYS, keys), [x.shape] * NUM_KEYS, keys)]).double()
    of_mean, of_one = ((each - x).square().sum().item() for each in (decoded.mean(0), decoded))
    rounding = x.numel() * 1e-12  # of elements of about 1 in float32
    # Twice, because it is random: the library's own codecs come within 1.2 times.
    assert of_mean <= 2 * of_one / NUM_KEYS**2 + rounding, f"{codec} is not unbiased"


def _check_summed(codec: Codec, payloads: list[Tensor], decoded: list[Tensor], key: Key) -> None:
    """Payloads that are added decode to the sum, but for two roundings in the type in which they are added."""
    dtype = codec.traits.sum_dtype
    assert dtype is not None
    total = (payloads[0].view(dtype) + payloads[1].view(dtype)).view(torch.uint8)
    error = (_decoded(codec, total, decoded[0].shape, key) - sum(decoded)).abs()
    rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    bound = rounding * sum(d.abs() for d in decoded)
    assert bool((error <= bound).all()), f"{codec}: added payloads do not decode to the sum"


def _check_size(codec: Codec, payload: Tensor, expected: int, where: str) -> None:
    assert type(expected) is int, f"{where}: nbytes must be an int, got {expected!r}"
    fits = payload.numel() == expected if codec.traits.fixed_size else payload.numel() <= expected
    assert fits, f"{where}: the payload has {payload.numel()} bytes, nbytes says {expected}"


def _check_input(codec: Codec, device: torch.device) -> None:
    """Float types, strides, and the global random state."""
    key, x = Key(seed=5), normal((40, 30), 3, device)
    with untouched_random_state(f"{codec}: encode or decode"):
        payload = codec.encode(x, key)
        codec.decode(payload, x.shape, key)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert torch.equal(codec.encode(x, key), payload), f"{codec}: bytes depend on the global random state"
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        y = x.to(dtype).t()
        expected = codec.encode(y.float().contiguous(), key)
        assert torch.equal(codec.encode(y, key), expected), f"{codec}: a strided {dtype} is encoded otherwise"


def _check_sums(codec: Codec, bad: float | None, device: torch.device) -> None:
    """`decode_sum` of three payloads is `decode_add` of each, and its flag says whether all of it is finite."""
    key, xs = Key(seed=5), [normal((30, 20), i, device) for i in range(3)]
    if bad is not None:
        xs[1][7, 7] = bad
    payloads = [codec.encode(x, key) for x in xs]
    # NaN in `out`, which `decode_sum` must overwrite.
    expected, out = torch.zeros(30, 20, device=device), torch.full((30, 20), math.nan, device=device)
    for payload in payloads:
        codec.decode_add(payload, expected, 0.25, key)
    finite = kernels.flags.read(codec.decode_sum(payloads, out, 0.25, key))
    assert _same(out, expected), f"{codec}: decode_sum is not the sum of decode_add"
    assert finite == bool(out.isfinite().all()), f"{codec}: decode_sum says finite={finite} of {bad}"
    assert _refuses(lambda: codec.decode_sum(payloads, out.double(), 0.25, key), device), f"{codec}: out may be float64"


def _check_weight(codec: Codec, device: torch.device) -> None:
    key, payload = Key(seed=1), codec.encode(normal((777,), 2, device), Key(seed=1))
    out, start = torch.arange(777.0, device=device), torch.arange(777, dtype=torch.float64, device=device)
    codec.decode_add(payload, out, 0.25, key)
    expected = start + 0.25 * _decoded(codec, payload, (777,), key).double()
    # Two roundings, of the product and of the sum: half a unit in the last place of numbers below 1024 each.
    error = (out.double() - expected).abs().max().item()
    assert error <= 2 * 2.0**-14, f"{codec}: decode_add is off by {error} from out + weight * decode"


def _check_segments(codec: Codec, device: torch.device) -> None:
    """Keys and values of other segments must not change what a segment decodes to."""
    xs = [normal(shape, i, device) for i, shape in enumerate(((1000,), (6, 7), (1,), (0,), (37,)))]
    keys = [Key(7, stream, 2) for stream in range(len(xs))]
    residuals, sizes = [torch.empty_like(x) for x in xs], [x.shape for x in xs]
    payload = codec.encode(xs, keys, residuals)
    _check_size(codec, payload, codec.nbytes(sizes), f"{codec}, {len(xs)} segments")
    assert codec.nbytes(sizes) == sum(map(codec.nbytes, sizes)) or not codec.traits.fixed_size, (
        f"{codec}: sizes do not add up"
    )
    seen = sizes if codec.traits.needs_shape else [x.numel() for x in xs]
    groups = [slice(0, 2), slice(2, 2), slice(2, 4), slice(4, 5)]  # one has no segments
    sections = [each for mine in groups if (each := add_sections(map(codec.section_nbytes, seen[mine]))) is not None]
    if len(sections) == len(groups):
        parts = [torch.cat(each) for each in split_payload(payload, sections)]
        for mine, part in zip(groups, parts, strict=True):
            # Codecs take the device from the first segment, so they cannot encode an empty list.
            alone = codec.encode(xs[mine], keys[mine]) if xs[mine] else part[:0]
            assert torch.equal(part, alone), f"{codec}: `section_nbytes` does not say how a payload is cut"
        assert torch.equal(join_payloads(parts, sections), payload), (
            f"{codec}: a payload that was cut is not joined again"
        )
    together = codec.decode(payload, sizes, keys)
    for x, key, decoded, residual in zip(xs, keys, together, residuals, strict=True):
        alone = _decoded(codec, codec.encode(x, key), x.shape, key)
        assert _same_bits(alone, decoded), f"{codec}: a segment depends on those beside it"
        assert _same_bits(residual, x - alone), f"{codec}: a residual depends on the segments beside it"


def _check_not_finite(codec: Codec, device: torch.device) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        # The first element, the last one of a bucket of 512, and the last one of all.
        for position in (0, 511, 1499):
            x, key = normal((1500,), position, device), Key(seed=3)
            x[position] = bad
            decoded = _decoded(codec, codec.encode(x, key), x.shape, key)
            assert not decoded.isfinite().all(), f"{codec}: element {position}, {bad}, was lost"
            if codec.traits.votes:
                codec.combine([decoded])
                assert not decoded.isfinite().all(), f"{codec}: element {position}, {bad}, was lost by `combine`"


def _check_addresses(codec: Codec, device: torch.device) -> None:
    """An unaligned payload reads as an aligned one; one that is cut short is refused."""
    x, key = normal((30, 20), 0, device), Key(seed=5)
    payload = codec.encode(x, key)

    def decoded(payload: Tensor) -> list[Tensor]:
        added, summed = torch.ones(30, 20, device=device), torch.empty(30, 20, device=device)
        codec.decode_add(payload, added, 0.5, key)
        codec.decode_sum([payload], summed, 0.5, key)
        kept = codec.support(payload, x.shape, key)
        plain = _decoded(codec, payload, x.shape, key)
        return [plain, added, summed] + ([] if kept is None else [kept.indices])

    truth = decoded(payload)
    for offset in (1, 2, 3):
        memory = torch.empty(payload.numel() + offset, dtype=torch.uint8, device=device)
        unaligned = memory[offset:].copy_(payload)
        try:
            same = all(map(_same_bits, decoded(unaligned), truth))
        except RuntimeError as error:
            raise AssertionError(
                f"{codec}: a payload at an address of {offset} modulo 4 is not decoded: {error}; read it with "
                "kernels.payload_as"
            ) from None
        assert same, f"{codec}: a payload at an address of {offset} modulo 4 decodes otherwise"
        for short in (unaligned[:offset], unaligned[:-offset], payload[: payload.numel() // 2]):
            _check_refused(codec, short, x.shape, key)
            _refuses(partial(codec.support, short, x.shape, key), device)  # it may be whole, or None


def _check_wrong_size(codec: Codec, device: torch.device) -> None:
    key = Key()
    payload = codec.encode(torch.ones(100, device=device), key)
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]])):
        _check_refused(codec, wrong, torch.Size([100]), key)


def _check_refused(codec: Codec, payload: Tensor, shape: torch.Size, key: Key) -> None:
    out, device = torch.empty(shape, device=payload.device), payload.device
    refused = _refuses(lambda: codec.decode(payload, shape, key), device)
    refused = refused and _refuses(lambda: codec.decode_sum([payload], out, 1.0, key), device)
    assert refused, f"{codec}: a payload of {payload.numel()} bytes was accepted for shape {tuple(shape)}"


def _check_corrupt(codec: Codec, device: torch.device) -> None:
    """Random bytes decode to something or raise ValueError, and elements beside the output stay as they were."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(NUM_CORRUPT):
        payload = torch.randint(0, 256, (codec.nbytes(500),), dtype=torch.uint8, generator=generator, device="cpu")
        memory = torch.full((700,), GUARD, device=device)
        for error in _errors(partial(codec.decode_add, payload.to(device), memory[100:600], key=Key()), device):
            assert "ind" in str(error) or "payload" in str(error), f"{codec}: {error} names neither payload nor indices"
        outside = torch.cat([memory[:100], memory[600:]])
        assert (outside == GUARD).all(), f"{codec}: a corrupt payload changed elements outside the output"


def _refuses(operation: Callable[[], object], device: torch.device) -> bool:
    return bool(_errors(operation, device))


def _errors(operation: Callable[[], object], device: torch.device) -> list[ValueError]:
    """What is raised, at once or for the faults that kernels have counted. No fault stays counted."""
    errors = []
    for act in (operation, lambda: kernels.flags.check_faults(device)):
        try:
            act()
        except ValueError as error:
            errors.append(error)
    return errors


def _decoded(codec: Codec, payload: Tensor, shape: tuple[int, ...], key: Key) -> Tensor:
    """What a payload of one tensor decodes to."""
    decoded = codec.decode(payload, torch.Size(shape), key)
    assert isinstance(decoded, Tensor)
    return decoded


def _hard_values() -> list[Tensor]:
    """Zeros of both signs, the smallest and the largest numbers, ties, and one large element among small ones."""
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    ties = normal((600,), 1).round()
    outlier = normal((600,), 2) * 1e-30
    outlier[100] = largest
    return [
        torch.zeros(13, 5, device="cpu"),
        torch.tensor([0.0, -0.0, smallest, -smallest, 2.0**-126, largest, -largest, 1.0], device="cpu"),
        torch.full((1025,), -smallest, device="cpu"),
        torch.full((9,), largest, device="cpu"),
        ties,
        outlier,
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal, and NaN where the other is."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether numbers of four bytes are the same: -0 is not 0, and a NaN equals itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
