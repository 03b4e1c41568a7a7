"""A decoder that follows `docs/wire.md` alone decodes what the library decodes: the page is complete and right.

A failure here is a mistake of the page, or a change of the wire format that the page does not tell.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import documented_format
from helpers.codecs import CODECS
from torch import Tensor

import thinwire as tw
from thinwire.codec.compose.per_layer import PerLayer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "codecs.json").read_text())
AGREED = json.loads((Path(__file__).parents[1] / "golden" / "agreed.json").read_text())
KEY = tw.codec.Key(seed=1, stream=2, step=3)
WEIGHTS = (1.0, 1 / 3)
MORE = [
    tw.TopK(0.07),  # 0.07 * 100 is above 7 in binary
    tw.codec.BlockwiseTopK(0.07, block=100),
    tw.codec.BlockwiseTopK(0.5, block=3),
    tw.ALQ(bits=5, bucket_size=512, norm="max"),
    tw.AMQ(bits=4),
    tw.chain(tw.QSGD(bits=1, zero=False), tw.codec.Huffman()),
    tw.chain(tw.TopK(0.3), tw.codec.DenseLast(tw.QSGD(bits=4, bucket_size=64))),
    tw.chain(tw.TopK(0.3), tw.codec.BinMeans(bits=3)),
    tw.codec.CoarseGrainedTopK(0.07, chunk=1),
    tw.chain(tw.codec.Tiles(8, divisors=True), tw.codec.SignNorm()),
    tw.chain(tw.codec.Tiles(8), tw.RandomK(0.2, shared=True)),
]
SHAPES: list[list[tuple[int, ...]]] = [
    [(0,)],
    [(), (1,), (2,)],
    [(0,), (100,), (4, 5, 6), (0, 3), (700,)],
    [(64, 64), (20, 30)],
]
every_case = pytest.mark.parametrize("codec", [*CODECS, *MORE], ids=repr)


def check(codec: tw.codec.Codec, payload: bytes, shapes: list[tuple[int, ...]], keys: list[tw.codec.Key]) -> None:
    """Both decoders add the same float32 numbers, or NaN, to zeros. (Zero has two signs; its sum with zero has one.)"""
    data = torch.tensor(np.frombuffer(payload, np.uint8))
    for weight in WEIGHTS:
        outs = [torch.zeros(shape) for shape in shapes]
        codec.decode_add(data, outs, weight, keys)
        mixed = [documented_format.mix_key(*key) for key in keys]
        for found, out in zip(documented_format.decode(codec, payload, shapes, weight, mixed), outs, strict=True):
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, out.numpy().ravel())


def inputs(shapes: list[tuple[int, ...]]) -> list[list[Tensor]]:
    """Normal numbers; with large ones side by side; with what is not finite; so small that scales or all underflow; zeros."""
    g = torch.Generator().manual_seed(0)
    normal = [torch.randn(shape, generator=g) for shape in shapes]
    clustered = [x.clone() for x in normal]
    broken = [x.clone() for x in normal]
    for i, (x, y) in enumerate(zip(clustered, broken, strict=True)):
        x.view(-1)[: x.numel() // 3] *= 1e4
        y.view(-1)[y.numel() // 2 :][:1] = (float("nan"), float("inf"), -float("inf"))[i % 3]
    small = [[x * factor for x in normal] for factor in (1e-36, 1e-42, 0)]
    return [normal, clustered, broken, *small]


@pytest.mark.parametrize("text", GOLDEN)
def test_golden_payloads_are_decoded_as_documented(text):
    check(tw.parse(text), bytes.fromhex(GOLDEN[text]), [(300,), (21,)], [KEY, KEY._replace(stream=4)])


@every_case
def test_payloads_are_decoded_as_documented(codec):
    for shapes in SHAPES:
        keys = [KEY._replace(stream=i) for i in range(len(shapes))]
        for xs in inputs(shapes):
            check(codec, codec.encode(xs, keys).numpy().tobytes(), shapes, keys)


def test_layers_with_codecs_of_their_own_are_decoded_as_documented():
    fine, coarse, other = tw.QSGD(bits=4), tw.QSGD(bits=2), tw.QSGD(bits=4, bucket_size=30)
    codec = PerLayer((tw.TopK(0.1), fine, coarse, tw.Cast(), other, tw.TopK(0.1), fine, tw.TopK(0.2)))
    shapes = [(10, 20), (33,), (40, 10), (600,), (5, 4), (100,), (20, 30), (70,)]
    keys = [KEY._replace(stream=i) for i in range(len(shapes))]
    check(codec, codec.encode(inputs(shapes)[0], keys).numpy().tobytes(), shapes, keys)


@pytest.mark.parametrize("text", AGREED)
def test_what_is_added_on_the_wire_is_decoded_as_documented(text):
    """All workers send the golden payload, so that its int32 words, or floats, are added `size` times."""
    notation, size = text.removesuffix(" workers").rsplit(" of ", 1)
    codec, size, payload = tw.parse(notation), int(size), bytes.fromhex(AGREED[text])
    x, y = torch.linspace(-3, 2, 300), torch.linspace(1, 2, 21)
    proposal = codec.propose([x, y])
    agreed = codec.agreed(proposal, size)
    ternary = isinstance(codec, tw.TernGrad)
    total = np.frombuffer(payload, "<i4" if ternary and size > 1 else "u1" if ternary else "<f4")
    total = (total * (1 if size == 1 else size)).astype(total.dtype)
    for weight in WEIGHTS:
        outs = [torch.zeros(300), torch.zeros(21)]
        agreed.decode_add(torch.tensor(total).view(torch.uint8), outs, weight)
        found = documented_format.added_on_the_wire(codec, total, proposal.numpy(), [300, 21], size, weight)
        for a, out in zip(found, outs, strict=True):
            np.testing.assert_array_equal(a, out.numpy())


def test_the_numbers_and_examples_of_the_page():
    mixed, u = documented_format.mix_key(0, 0, 0), documented_format.hashed(1, np.arange(2)) >> 8
    assert mixed == 0x238275BC38FCBE91
    assert u.tolist() == [6850960, 10440790]
    assert documented_format.random_subset(mixed, 3, 1000).tolist() == [212, 447, 651]
    reader = documented_format.Reader
    assert documented_format.plain_indices(reader(b"\x69\x18"), 2, 100).tolist() == [3, 70]
    assert documented_format.rice_indices(reader(b"\x39\x04"), 2, 100).tolist() == [3, 70]


SUMMED = [
    tw.TopK(0.1),
    tw.TopK(0.1, indices="auto"),
    tw.chain(tw.TopK(0.1), tw.codec.Rice()),
    tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)),
]


@pytest.mark.parametrize("codec", SUMMED, ids=repr)
def test_messages_of_a_sparse_all_reduce_are_as_documented(codec, monkeypatch):
    """Steps 2 and 3 give what workers end with; without a second link, the kept values are the sums of those sent."""
    size, shapes = 3, {"a": (19, 16), "b": (1, 2), "c": (1, 61), "d": (13, 31), "scale": (5,)}
    names, sent = list(shapes)[:4], [[] for _ in range(size)]
    numels, counts = [304, 2, 61, 403], [31, 1, 7, 41]
    all_to_all, all_gather = tw.comm.Communicator.all_to_all, tw.comm.Communicator.all_gather

    def record_each(self, tensors, *args):
        sent[self.rank].append([t.numpy().copy() for t in tensors])
        return all_to_all(self, tensors, *args)

    def record_one(self, tensor, *args):
        sent[self.rank].append([tensor.numpy().copy()])
        return all_gather(self, tensor, *args)

    def worker(comm):
        g = torch.Generator().manual_seed(comm.rank)
        tensors = [(name, torch.randn(shape, generator=g)) for name, shape in shapes.items()]
        averager = tw.Mean(codec, tw.ErrorFeedback(), exchange="sparse_reduce")
        averager.step(averager.init(tensors, comm, seed=5), tensors, comm).wait()
        return dict(tensors)

    monkeypatch.setattr(tw.comm.Communicator, "all_to_all", record_each)
    monkeypatch.setattr(tw.comm.Communicator, "all_gather", record_one)
    results = tw.LocalWorld(size).run(worker)
    regions = documented_format.regions_of(numels, counts, size)
    sums, ends = [np.zeros(n, np.float32) for n in numels], [np.zeros(n, np.float32) for n in numels]
    means = []
    for owner, region in enumerate(regions):
        dense = len(np.array_split(np.zeros(5), size)[owner])
        for calls in sent:
            header, message = calls[0][owner].tolist(), calls[1][owner].tobytes()
            assert len(message) == header[0] + 4 * dense
            _, pieces = documented_format.region_message(codec, message, numels, region, header[1:], dense)
            for s, coordinates, values in pieces:
                sums[s][coordinates] += values
        kept = [k for _, _, _, k in region]
        message = sent[owner][-1][0].tobytes()
        vector, pieces = documented_format.region_message(codec, message, numels, region, kept, dense)
        means.append(vector)
        for s, coordinates, values in pieces:
            ends[s][coordinates] = values
    for result in results:
        np.testing.assert_array_equal(np.concatenate(means), result["scale"].numpy())
        for name, end, total in zip(names, ends, sums, strict=True):
            np.testing.assert_array_equal(end * np.float32(1 / size), result[name].numpy().ravel())
            if "QSGD" not in repr(codec):
                np.testing.assert_array_equal(end[end != 0], total[end != 0])


def test_the_message_inside_a_node_is_as_documented(monkeypatch):
    """Leaders 0 and 2 of two nodes tell their members all that these end with, and what their node delivered."""
    shapes, numels, dense = {"a": (20, 15), "b": (7, 9), "scale": (5,)}, [300, 63], 5
    told, exchange = {}, tw.comm.Communicator.exchange

    def recorded(self, sends, *args):
        told.update({to: t.numpy().copy() for to, t in sends.items() if to in (1, 3)})
        return exchange(self, sends, *args)

    def worker(comm):
        g = torch.Generator().manual_seed(comm.rank)
        tensors = [(name, torch.randn(shape, generator=g)) for name, shape in shapes.items()]
        before = {name: x.numpy().ravel().copy() for name, x in tensors}
        memory = tw.MomentumCorrection(0.9)
        averager = tw.Mean(tw.TopK(0.1), memory, exchange="hierarchical_sparse", workers_per_node=2)
        averager.step(averager.init(tensors, comm, seed=5), tensors, comm).wait()
        return before, {name: x.numpy().ravel() for name, x in tensors}

    monkeypatch.setattr(tw.comm.Communicator, "exchange", recorded)
    before, results = zip(*tw.LocalWorld(4).run(worker), strict=True)
    for member in (1, 3):
        data = documented_format.Reader(told[member].tobytes())
        np.testing.assert_array_equal(data.floats(dense), results[member]["scale"])
        sums = data.floats(30 + 7)
        indices = [documented_format.plain_indices(data, k, n) for k, n in zip([30, 7], numels, strict=True)]
        delivered = data.bits(30 + 7).astype(bool)
        assert data.at == len(data.data)
        for name, n, at, x, has in zip(
            "ab", numels, indices, np.split(sums, [30]), np.split(delivered, [30]), strict=True
        ):
            mean, node = np.zeros(n, np.float32), before[member - 1][name] + before[member][name]
            coordinates = documented_format.unshuffled(at, n)
            mean[coordinates] = x * np.float32(1 / 4)
            np.testing.assert_array_equal(mean, results[member][name])
            chosen = np.argsort(-np.abs(node), kind="stable")[: len(at)]
            np.testing.assert_array_equal(has, np.isin(coordinates, chosen))
