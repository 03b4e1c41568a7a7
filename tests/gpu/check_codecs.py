"""Codecs on a GPU, with Triton: the golden bytes, and the conformance suite."""

from __future__ import annotations

import json

import pytest
from codec.test_golden import AGREED, KEY, agreed_cases, golden_input, stored
from helpers.backends import clones
from helpers.codecs import every_codec
from helpers.on_triton import DEVICE, assert_triton_agrees, gaussian

import thinwire as tw
from thinwire import kernels
from thinwire.testing import check_codec


@pytest.mark.parametrize("text", stored())
def test_golden_bytes(text):
    segments = [x.to(DEVICE) for x in golden_input()]
    with kernels.use_backend("triton"):
        payload = tw.parse(text).encode(segments, [KEY, KEY._replace(stream=4)])
    assert bytes(payload.tolist()).hex() == stored()[text]


@pytest.mark.parametrize("name", agreed_cases())
def test_golden_bytes_of_what_is_added_on_the_wire(name):
    codec, num_workers = agreed_cases()[name]
    segments, keys = [x.to(DEVICE) for x in golden_input()], [KEY.mixed(), KEY._replace(stream=4).mixed()]
    with kernels.use_backend("triton"):
        total = codec.propose(segments) * (num_workers if codec.combined_by == "sum" else 1)
        payload = codec.agreed(total, num_workers).encode_segments(segments, keys, None)
    assert bytes(payload.tolist()).hex() == json.loads(AGREED.read_text())[name]


@every_codec
def test_coding(codec):
    """Two segments, encoded, decoded and summed as by the reference."""
    xs, keys = [gaussian(3000), gaussian(700, seed=1)], [KEY, KEY._replace(stream=4)]

    def compute():
        residuals, added, summed = clones(xs), clones(xs), clones(xs)
        payload = codec.encode(xs, keys, residuals)
        codec.decode_add(payload, added, 0.5, keys)
        finite = kernels.flags.read(codec.decode_sum([payload, payload], summed, -0.3, keys))
        return [payload, *residuals, *added, *summed, finite]

    assert_triton_agrees(compute)


@every_codec
def test_conformance(codec):
    with kernels.use_backend("triton"):
        check_codec(codec, device=DEVICE)
    kernels.flags.check_faults(DEVICE)
