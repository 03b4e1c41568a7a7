"""Ten thousand damaged payloads; `scripts/fuzz.py` tries millions, `scripts/sanitize.sh` under AddressSanitizer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.codecs import CODECS

import thinwire as tw
from thinwire.testing import fuzz_codec
from thinwire.testing.fuzz import SHAPES

NUM_INPUTS = 175  # of each codec: 10,000 of all


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_damaged_payloads_are_refused_or_decoded(codec):
    assert 0 < fuzz_codec(codec, NUM_INPUTS, seed=2, num_compared=5) < NUM_INPUTS


@pytest.mark.parametrize("codec", [tw.TernGrad(shared=True), tw.codec.CoarseGrainedTopK(0.3, chunk=32)], ids=repr)
def test_sums_of_agreed_codecs_are_refused_or_decoded(codec):
    segments = [torch.randn(shape.numel()) for shape in SHAPES]
    agreed = codec.agreed(codec.propose(segments), num_workers=3)
    assert 0 < fuzz_codec(agreed, NUM_INPUTS, seed=2) < NUM_INPUTS


@dataclass(frozen=True, repr=False)
class Careless(tw.Cast):
    """Does something else for one of its bytes."""

    mistake: str = "crash"

    def decode_add_segments(self, payload, outs, weight, keys):
        if payload[9] == 255:
            if self.mistake == "crash":
                raise RuntimeError("the payload holds 255")
            if self.mistake == "overrun":
                outs[0].untyped_storage().fill_(0)
        super().decode_add_segments(payload, outs, weight, keys)

    def decode_sum_segments(self, payloads, outs, weight, keys):
        super().decode_sum_segments(payloads, outs, weight, keys)
        if self.mistake != "overconfidence":
            return all(bool(out.isfinite().all()) for out in outs)
        return True


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("crash", "RuntimeError instead of a ValueError: the payload holds 255"),
        ("overrun", "memory outside of the outputs has changed"),
        ("overconfidence", "decode_sum says finite=True"),
    ],
)
def test_a_careless_decoder_is_found(mistake, message):
    with pytest.raises(AssertionError, match=message):
        fuzz_codec(Careless(mistake=mistake), 1000)


@pytest.mark.parametrize(
    ("codec", "payload", "message"),
    [
        (tw.QSGD(bits=4), torch.zeros(7, dtype=torch.uint8), r"QSGD\(bits=4\): .* 100 elements has 54 bytes, got 7"),
        (tw.Threshold(1.0), torch.zeros(999, dtype=torch.uint8), r"Threshold.*has at most 404 bytes, got 999"),
        (tw.codec.Identity(), torch.zeros(100), r"Identity\(\): a payload is a vector of uint8, got torch.float32"),
        (tw.TopK(0.1), torch.full((47,), 255, dtype=torch.uint8), r"TopK\(ratio=0.1\): .*ascending indices"),
    ],
)
def test_errors_name_codec_expected_and_got(codec, payload, message):
    with pytest.raises(ValueError, match=message):
        codec.decode(payload, 100)
