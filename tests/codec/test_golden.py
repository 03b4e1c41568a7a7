"""Golden wire bytes: what every codec sends for one fixed input, held for ever.

A change of these bytes is a change of the wire format: a decision, made by running `python tests/test_golden.py`, that
shows in the diff of `golden/*.json` and belongs into `docs/wire.md`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire import kernels

GOLDEN = Path(__file__).parents[1] / "golden" / "codecs.json"
AGREED = Path(__file__).parents[1] / "golden" / "agreed.json"
KEY = tw.codec.Key(seed=1, stream=2, step=3)
# Sums have the rounding of the build of BLAS; test_lowrank.py holds their layout.
NOT_BITWISE = (tw.codec.SVD, tw.codec.LowRank)


def golden_input() -> list[torch.Tensor]:
    """Two segments of exactly representable numbers, with zeros and ties, from integer arithmetic alone."""
    i = torch.arange(300, dtype=torch.int64)
    x = ((i * 2654435761) % 2**32 - 2**31).div(2**20, rounding_mode="floor").float() / 256
    x[::7] = 0
    x[5] = x[12]
    return [x, -x[:21] / 4]


def encode(codec: tw.codec.Codec) -> str:
    keys = [KEY, KEY._replace(stream=4)]
    return bytes(codec.encode(golden_input(), keys).tolist()).hex()


def encode_agreed(codec: tw.codec.AgreedCodec, num_workers: int) -> str:
    """What is added on the wire, after all workers have proposed what this one does."""
    segments = golden_input()
    total = codec.propose(segments) * (num_workers if codec.combined_by == "sum" else 1)
    keys = [KEY.mixed(), KEY._replace(stream=4).mixed()]
    return bytes(codec.agreed(total, num_workers).encode_segments(segments, keys, None).tolist()).hex()


def agreed_cases() -> dict[str, tuple[tw.codec.AgreedCodec, int]]:
    codecs = (
        tw.TernGrad(shared=True),
        tw.TernGrad(bucket_size=100, shared=True),
        tw.codec.CoarseGrainedTopK(0.3, chunk=32),
    )
    return {f"{codec!r} of {size} workers": (codec, size) for codec in codecs for size in (1, 2, 4, 16)}


def stored() -> dict[str, str]:
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("text", stored())
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_wire_format_has_not_changed(text, backend):
    with kernels.use_backend(backend):
        assert encode(tw.parse(text)) == stored()[text]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_added_on_the_wire_has_not_changed(backend):
    with kernels.use_backend(backend):
        assert {name: encode_agreed(*case) for name, case in agreed_cases().items()} == json.loads(AGREED.read_text())


def test_every_codec_has_its_golden_bytes():
    from helpers.codecs import CODECS

    held = {type(tw.parse(text)) for text in stored()}
    missing = {type(c) for c in CODECS} - held - set(NOT_BITWISE)
    assert not missing


if __name__ == "__main__":
    from helpers.codecs import CODECS

    golden = {repr(c): encode(c) for c in CODECS if not isinstance(c, NOT_BITWISE)}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    agreed = {name: encode_agreed(*case) for name, case in agreed_cases().items()}
    AGREED.write_text(json.dumps(agreed, indent=1) + "\n")
