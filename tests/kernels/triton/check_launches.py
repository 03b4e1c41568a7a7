"""What a bucket costs the host with Triton: launches, and calls of functions, of which machine and load change nothing."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.calls import num_calls
from helpers.on_triton import DEVICE

import thinwire as tw
from thinwire import kernels
from thinwire.average.mean.exchange.base import Job
from thinwire.average.mean.exchange.scatter_reduce import ScatterReduce
from thinwire.clock import Clock
from thinwire.codec import Key
from thinwire.kernels import flags
from thinwire.kernels.triton import launch as launches

PAYLOADS = 8
CASES = {  # codec: launches of encode, of decode_sum of eight payloads; calls for a segment of encode, of decode_sum
    "QSGD(bits=4)": (1, 1, 20, 10),
    "NUQSGD(bits=3)": (1, 1, 20, 10),
    "SignNorm()": (3, 1, 23, 12),
    "TernGrad()": (5, 1, 29, 37),
    "Cast('bfloat16')": (1, 1, 20, 10),
    "TopK(0.01)": (11, 3 + PAYLOADS, 31, 105),
    "BlockwiseTopK(0.0005)": (3, 1 + PAYLOADS, 44, 155),  # positions in blocks
    "BlockwiseTopK(0.015625)": (3, 3 + PAYLOADS, 42, 140),  # positions in segments
    "RandomK(0.01)": (7, 4 + PAYLOADS, 35, 95),
    "chain(TopK(0.01), QSGD(bits=4))": (12, 3 + 2 * PAYLOADS, 44, 155),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What is launched; nothing runs, so that only the host's part is left."""
    counter: Counter[str] = Counter()

    def count(function: Any, num_programs: int, *arguments: Any, **constants: Any) -> None:
        counter[function.__name__] += num_programs > 0

    found = launches.pointers

    def pointers(tensors: Sequence[torch.Tensor] | None, number: int = 0) -> tuple[int, ...]:
        """The same addresses in every step, as the GPU's allocator gives them, with the alignment of the tensors."""
        if tensors is None:
            return found(tensors, number)
        return tuple([4096 * (i + 1) + address % 64 for i, address in enumerate(found(tensors, number))])

    everywhere(monkeypatch, "launch", count)
    everywhere(monkeypatch, "pointers", pointers)
    monkeypatch.setattr(launches, "_KEPT", {})  # else what other tests have kept may leave too little space
    monkeypatch.setattr(launches, "_kept_numbers", 0)
    yield counter
    with contextlib.suppress(ValueError), kernels.use_backend("triton"):  # what nothing wrote was read as indices
        flags.check_faults(DEVICE)


def everywhere(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    """Replace a function of `kernels.triton.launch` in all modules that import it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("thinwire.kernels.triton") and callable(getattr(module, name, None)):
            monkeypatch.setattr(module, name, function)


def steps(codec: tw.codec.Codec, num_segments: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Encoding of a bucket, and decoding of eight payloads."""
    xs, lost, outs = ([torch.zeros(128, 64, device=DEVICE) for _ in range(num_segments)] for _ in range(3))
    keys = [Key(0, i, 0) for i in range(num_segments)]
    payload = codec.encode(xs, keys, lost)
    return lambda: codec.encode(xs, keys, lost), lambda: codec.decode_sum([payload] * PAYLOADS, outs, 0.125, keys)


@pytest.mark.parametrize("text", CASES)
def test_launches_and_calls(text, launched):
    codec = tw.parse(text)
    with kernels.use_backend("triton"):
        few, many = steps(codec, 10), steps(codec, 40)
        for which in range(2):
            launched.clear()
            many[which]()
            assert launched.total() == CASES[text][which], launched
            assert (num_calls(many[which]) - num_calls(few[which])) / 30 <= CASES[text][2 + which]


@pytest.mark.parametrize("text", CASES)
def test_one_call_of_the_codec_for_all_owners(text, launched):
    """A worker launches as much to encode for eight owners, or to decode what they send, as for one payload of all pieces."""
    names, codec = [str(i) for i in range(10)], tw.parse(text)
    xs, dense = [torch.zeros(512, 128, device=DEVICE) for _ in names], torch.zeros(9, device=DEVICE)
    sent: list[torch.Tensor] = []
    comm, keys = SimpleNamespace(size=PAYLOADS, rank=0), [Key(0, i, 0) for i in range(10)]
    comm.all_to_all = lambda messages, sizes: sent.extend(messages)
    comm.all_gather = lambda message, sizes: SimpleNamespace(wait=lambda: sent)
    job = Job(comm, codec, Clock(), xs, names, keys, merged=False, keep_residual=True, dense=dense, scale=1.0)
    with kernels.use_backend("triton"):
        pieces, piece_keys = [piece for x in xs for piece in x.split(512 // PAYLOADS)], keys * PAYLOADS
        payload = codec.encode(pieces, piece_keys)
        launched.clear()
        codec.decode_sum([payload], pieces, key=piece_keys)
        num_once = launched.total()
        launched.clear()
        stages = ScatterReduce().begin(job)
        next(stages)
        assert len(sent) == PAYLOADS and launched.total() == CASES[text][0], launched
        with pytest.raises(StopIteration) as ended:
            stages.send([sent[0]] * PAYLOADS)
        launched.clear()
        ended.value.value(xs, dense)
        assert launched.total() == num_once, launched


@pytest.mark.parametrize("text", [*CASES, "modular"])
def test_kernels_are_compiled_once_for_all_sizes(text, launched, monkeypatch):
    """Triton compiles a kernel for each set of constants, which takes a second."""
    compiled: set[str] = set()
    everywhere(
        monkeypatch, "launch", lambda f, *_, **constants: compiled.add(f"{f.__name__} {sorted(constants.items())}")
    )
    found = []
    for numel in (128_000, 140_800):  # and their hundredths are multiples of 128
        x, key = torch.zeros(numel, device=DEVICE), Key(0, 0, 0)
        with kernels.use_backend("triton"):
            if text == "modular":  # of Moniqua; a payload has one element more
                payload = torch.zeros(kernels.modular.nbytes(numel - 1, 4), dtype=torch.uint8, device=DEVICE)
                kernels.modular.encode([x[1:]], payload, 7, 4, 1.0)
                kernels.modular.decode(payload, numel - 1, 4)
            else:
                codec = tw.parse(text)
                codec.decode_sum([codec.encode([x], [key])], [x], 1.0, [key])
        found.append(set(compiled))
        compiled.clear()
    assert found[0] == found[1] and found[0]


def test_tables_of_many_buckets_are_kept(launched, monkeypatch):
    """A gigabyte of parameters in 2,000 matrices, each a bucket of its own: a second step uploads keys only."""
    uploads = []
    monkeypatch.setattr(launches, "uploaded", lambda *arguments: uploads.append(1) or torch.empty(0))
    numels = tuple(range(128_000, 128_002))
    for step in range(2):
        uploads.clear()
        for bucket in range(2_000):
            launches.table(DEVICE, (bucket,), numels)
        assert len(uploads) == (0 if step else 2_000)


def test_what_is_kept_is_bounded(launched, monkeypatch):
    monkeypatch.setattr(launches, "MAX_KEPT_NUMBERS", 640)
    for size in (1, 200):  # a small table takes 512 bytes too, as 64 numbers do
        for i in range(50):
            launches.table(DEVICE, tuple(range(i, i + size)))
            assert sum(max(64, len(row)) for key in launches._KEPT for row in key[3:]) <= 640


def test_cuda_without_an_index_has_tables_of_the_current_gpu(launched, monkeypatch):
    """Each GPU's default stream has the same handle."""
    gpu = SimpleNamespace(device_index=0, cuda_stream=0)
    monkeypatch.setattr(launches, "current_stream", lambda device: gpu)
    monkeypatch.setattr(launches, "uploaded", lambda device, rows: torch.tensor([gpu.device_index]))
    for gpu.device_index in (0, 1, 0):
        assert launches.table(torch.device("cuda"), (7,)).item() == gpu.device_index


@pytest.mark.parametrize(
    ("num_tiles", "numels", "addresses", "expected"),
    [
        ([2, 1], [4096, 128], [64, 128], [(128, [2, 1])]),
        ([2, 1], [4096, 128], [64, 132], [(128, [2, 0]), (1, [0, 1])]),
        ([2, 1, 1], [4096, 7, 12], [64, 64, 64], [(128, [2, 0, 0]), (1, [0, 1, 1])]),
        ([1, 1], [8, 12], [64, 64], [(4, [1, 1])]),
        ([], [], [], [(128, [])]),
        ([0, 1], [0, 1], [0, 64], [(1, [0, 1])]),
    ],
)
def test_aligned_segments_have_a_launch_of_their_own(num_tiles, numels, addresses, expected):
    assert launches.by_alignment(num_tiles, numels, addresses) == expected
