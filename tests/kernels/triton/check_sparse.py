"""Selection, scatter, codes of indices, momentum and random subsets in Triton give what the reference gives."""

from __future__ import annotations

import pytest
import torch
from helpers.backends import clones
from helpers.on_triton import DEVICE, any_bits, assert_triton_agrees, gaussian, payload_of

from thinwire import kernels
from thinwire.kernels.momentum import Buffers, Momentum
from thinwire.kernels.triton import histograms


def ties(numel: int) -> torch.Tensor:
    return (gaussian(numel, seed=3) * 2).round() / 2


SMALL = [any_bits(300), torch.empty(0, device=DEVICE), ties(100), gaussian(1)]
LARGE = [gaussian(4100), ties(8320)]  # of several tiles, selected by histograms; the second is aligned
COUNTS = [30, 0, 25, 1, 41, 3000]


@pytest.mark.parametrize("counts", [COUNTS, [300, 0, 100, 1, 4100, 8320], [1, 0, 0, 0, 1, 0]], ids=str)
def test_topk(counts):
    assert_triton_agrees(lambda: [*kernels.select.topk(SMALL + LARGE, counts)])


def mostly_zeros(numel: int, rest: int) -> torch.Tensor:
    x = torch.zeros(numel, device=DEVICE)
    x[7 :: numel // rest][:rest] = gaussian(rest)
    return x


LARGER = {  # segment, how many are kept, and whether they are chosen from what reaches a bound
    "several groups of tiles": (gaussian(70_001), 700, True),
    "aligned": (gaussian(65_536), 6_000, True),
    "one element": (gaussian(40_000), 1, True),
    "candidates in few tiles": (gaussian(40_000).abs().sort(descending=True).values, 400, True),
    "any bits": (any_bits(40_000), 300, True),
    "ties at the threshold": (mostly_zeros(40_000, 1000).sign() * 2, 900, True),
    "more candidates than room": (torch.full((40_000,), -1.0, device=DEVICE), 400, False),
    "fewer candidates than are kept": (mostly_zeros(40_000, 300), 400, False),
    "zeros": (torch.zeros(5_000, device=DEVICE), 50, False),
    "a fourth": (gaussian(40_000), 10_000, False),
    "everything": (gaussian(9_000), 9_000, False),
}


@pytest.fixture
def num_candidates(monkeypatch):
    """Of the first segment of each selection."""
    numbers, start = [], histograms.launch

    def note(function, num_programs, device, *arguments, **constants):
        start(function, num_programs, device, *arguments, **constants)
        if function is histograms._write_kept:
            numbers.append(int(arguments[1][0]))

    monkeypatch.setattr(histograms, "launch", note)
    return numbers


@pytest.mark.parametrize("name", LARGER)
def test_topk_of_large_segments(name, num_candidates):
    x, count, is_bounded = LARGER[name]
    assert_triton_agrees(lambda: [*kernels.select.topk([x, gaussian(4_097)], [count, 40])])
    room = histograms._room(histograms._rank(count, x.numel()), x.numel())
    assert (count <= num_candidates[0] <= room) == is_bounded


def test_a_bound_serves_what_is_made_in_the_same_pass(num_candidates):
    x, zeros = gaussian(40_000), torch.zeros(40_000, device=DEVICE)

    def compute():
        made = [*kernels.momentum.add_topk([x], [zeros], [zeros.clone()], 2.0, [400])]
        for nesterov in (False, True):
            buffers = Buffers([x], [x], [zeros], [zeros.clone()], [zeros.clone()])
            made += kernels.momentum.correct_topk(buffers, Momentum(0.5, 1.0, nesterov), [400])
        return made

    assert_triton_agrees(compute)
    assert num_candidates == 3 * num_candidates[:1] and 400 <= num_candidates[0] <= 1475  # each makes a multiple of x


@pytest.mark.parametrize(("chunk", "count"), [(1, 1), (64, 3), (100, 100), (5000, 7)])
def test_topk_in_chunks(chunk, count):
    xs = SMALL if chunk == 1 else SMALL + LARGE[:1]
    last_counts = [min(2, x.numel() % chunk) for x in xs]
    assert_triton_agrees(lambda: [*kernels.select.topk_in_chunks(xs, chunk, count, last_counts)])


def hard_rows(chunk: int) -> torch.Tensor:
    """Rows of which some end the search for a threshold at once, and others need all of its passes."""
    few, one, nan = (torch.zeros(chunk, device=DEVICE) for _ in range(3))
    few[:: chunk // 5 + 1] = gaussian(len(few[:: chunk // 5 + 1]), seed=4)
    one[chunk // 2] = -1e-45
    nan[1::3], nan[2::3] = float("nan"), float("-inf")
    nan[:: chunk // 4 + 1] = torch.full((1,), -1, dtype=torch.int32, device=DEVICE).view(
        torch.float32
    )  # all bits are 1
    rows = [gaussian(chunk), ties(chunk), torch.full_like(few, -2.5), any_bits(chunk), nan, torch.zeros_like(few), few]
    rows += [one, -nan.flip(0), gaussian(chunk, scale=1e-40), gaussian(chunk, seed=5).exp().bfloat16().float()]
    # Elements that differ in their last bits only, and one that draws the first candidate away.
    rows += [torch.arange(0x3F800000, 0x3F800000 + chunk, dtype=torch.int32, device=DEVICE).view(torch.float32)]
    rows += [torch.cat([rows[-1][1:], torch.full((1,), 3e38, device=DEVICE)])]
    return torch.cat([*rows, gaussian(max(1, chunk // 3), seed=6)])


@pytest.mark.parametrize(("chunk", "count"), [(64, 1), (64, 5), (64, 63), (64, 64), (64, 0), (24, 11), (50, 7)])
def test_topk_of_hard_rows(chunk, count):
    rows = hard_rows(chunk)
    shifted = torch.cat([rows[:1], rows])[1:]  # begins at no multiple of 16 bytes
    xs = [rows, shifted, rows[: 2 * chunk], rows[: 3 * chunk + 1], rows[:7]]
    last_counts = [min(count, x.numel() % chunk) for x in xs]
    assert_triton_agrees(lambda: [*kernels.select.topk_in_chunks(xs, chunk, count, last_counts)])


@pytest.mark.parametrize(("chunk", "count"), [(4096, 64), (4096, 3000), (1000, 16)])
def test_topk_of_hard_rows_of_whole_programs(chunk, count):
    """`topk` has one row in each tile, and `topk_in_chunks` a tile for each row, or for two."""
    x = hard_rows(chunk)
    rows = [*x.split(chunk)]
    counts = [min(count, row.numel()) for row in rows]

    def compute():
        return [*kernels.select.topk(rows, counts), *kernels.select.topk_in_chunks([x], chunk, count, counts[-1:])]

    assert_triton_agrees(compute)


def test_above_and_largest():
    xs = SMALL + LARGE[:1]

    def compute():
        thresholds = [1.0, 1.0, 0.5, 0.0, 2.0]
        return [*kernels.select.above(xs, thresholds), torch.tensor(kernels.select.largest(xs))]

    assert_triton_agrees(compute)


def test_scatter():
    xs, counts = SMALL + LARGE, COUNTS
    indices, values = kernels.select.topk(xs, counts)

    def compute():
        added, written, rest = clones(xs), clones(xs), clones(xs)
        kernels.scatter.add(added, indices, values, counts, -0.3)
        kernels.scatter.write(written, indices, -values, counts)
        kernels.scatter.clear(rest, indices, counts)
        return [*added, *written, *rest, kernels.scatter.gather(xs, indices, counts)]

    assert_triton_agrees(compute)


def test_scattered_total():
    xs = [*SMALL, LARGE[0]]
    counts = [[30, 0, 25, 1, 41], [0, 0, 100, 0, 700], [300, 0, 1, 1, 0]]
    chosen = [kernels.select.topk(xs, count) for count in counts]

    def compute():
        sums = clones(xs)
        finite = kernels.scatter.total(sums, [i for i, _ in chosen], [v for _, v in chosen], counts, -0.3)
        finite_too = kernels.scatter.total(xs[2:4], [chosen[1][0][:100]], [chosen[1][1][:100]], [[100, 0]], 1.0)
        nothing = torch.empty(0, dtype=torch.int32, device=DEVICE), torch.empty(0, device=DEVICE)
        finite_without_segments = kernels.scatter.total([], [nothing[0]], [nothing[1]], [[]], 1.0)
        return [*sums, finite, finite_too, finite_without_segments]

    assert_triton_agrees(compute)


@pytest.mark.parametrize("index", [-1, 10, 2**31 - 1])
def test_an_index_outside_is_refused_and_touches_nothing(index):
    whole = torch.zeros(30, device=DEVICE)
    at = torch.tensor([3, index], dtype=torch.int32, device=DEVICE)
    with kernels.use_backend("triton"), pytest.raises(ValueError, match="outside"):
        kernels.scatter.add([whole[10:20]], at, torch.ones(2, device=DEVICE), [2], 1.0)
        kernels.flags.check_faults(whole.device)
    with kernels.use_backend("triton"), pytest.raises(ValueError, match="outside"):
        kernels.scatter.total([whole[10:20]], [at.sort().values], [torch.ones(2, device=DEVICE)], [[2]], 1.0)
        kernels.flags.check_faults(whole.device)
    assert not whole[:10].any() and not whole[20:].any()


def subset(count: int, numel: int) -> torch.Tensor:
    chosen = torch.randperm(min(numel, 10**5), generator=torch.Generator().manual_seed(count))[:count]
    return chosen.sort().values.int().to(DEVICE)


@pytest.mark.parametrize(
    ("counts", "numels"),
    [([3, 0, 10, 700, 40, 7], [100, 7, 10**6, 1000, 41, 7]), ([1, 1], [2, 2**31 - 1]), ([3000], [9000])],
    ids=str,
)
def test_indices(counts, numels):
    indices = torch.cat([subset(k, n) for k, n in zip(counts, numels, strict=True)])

    def compute():
        out = payload_of(sum(map(kernels.indices.nbytes, counts, numels)), offset=3)
        kernels.indices.encode(indices, counts, numels, out)
        return [out, kernels.indices.decode(out, counts, numels)]

    assert_triton_agrees(compute)


@pytest.mark.parametrize(("count", "numel"), [(3, 1000), (17, 40), (5, 64)])
def test_corrupt_codes_are_refused_as_by_the_reference(count, numel):
    nbytes, generator = kernels.indices.nbytes(count, numel), torch.Generator().manual_seed(count)
    codes = [torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).to(DEVICE) for _ in range(4)]
    for bit in range(4):  # nearly right ones
        codes.append(payload_of(nbytes))
        kernels.indices.encode(subset(count, numel), [count], [numel], codes[-1])
        codes[-1][-1 - bit % nbytes] ^= 1 << bit

    def compute():
        found = []
        for code in codes:
            try:
                indices = kernels.indices.decode(code, [count], [numel])
                kernels.flags.check_faults(code.device)
                found.append(indices)
            except ValueError:
                found.append(None)
        return found

    assert_triton_agrees(compute)


@pytest.mark.parametrize("numel", [10, 2])  # of two elements, both are kept, and nothing is sent
@pytest.mark.parametrize("indices", [[2, 1], [1, 1], [-1, 1], [1, 10]])
def test_indices_that_do_not_ascend_are_refused(indices, numel):
    out = payload_of(kernels.indices.nbytes(2, numel))
    with kernels.use_backend("triton"), pytest.raises(ValueError, match="ascending"):
        kernels.indices.encode(torch.tensor(indices, dtype=torch.int32, device=DEVICE), [2], [numel], out)
        kernels.flags.check_faults(out.device)


@pytest.mark.parametrize("bits", [0, 1, 5, 12, 31])
def test_words(bits):
    counts = [1301, 0, 3, 257]
    words = torch.randint(0, 2**31 - 1, (sum(counts),), generator=torch.Generator().manual_seed(bits)).int().to(DEVICE)

    def compute():
        out = payload_of(sum(kernels.words.nbytes(count, bits) for count in counts), offset=1)
        kernels.words.encode(words, counts, bits, out)
        return [out, kernels.words.decode(out, counts, bits)]

    assert_triton_agrees(compute)


@pytest.mark.parametrize("xs", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum(xs, nesterov):
    counts, rule = [x.numel() // 10 + 1 if x.numel() else 0 for x in xs], Momentum(0.9, 0.37, nesterov)

    def compute():
        made = []
        for select in (False, True):
            buffers = Buffers(xs, [x.flip(0) for x in xs], [x * 0.3 for x in xs], clones(xs), clones(xs))
            made += [*kernels.momentum.correct_topk(buffers, rule, counts)] if select else []
            if not select:
                kernels.momentum.correct(buffers, rule)
            made += [*buffers.new_us, *buffers.new_vs]
        outs = clones(xs)
        return [*made, *kernels.momentum.add_topk(xs, [x.flip(0) for x in xs], outs, 0.7, counts), *outs]

    assert_triton_agrees(compute)


@pytest.mark.parametrize("counts", [[50, 0, 30, 1], [999, 0, 60, 1]], ids=str)
def test_random_indices(counts):
    numels, keys = [1000, 0, 100, 1], [2**64 - 3, 0, 5, 7]

    def compute():
        on_device = kernels.random.keys_on(keys, DEVICE)
        return [kernels.permutation.random_indices(k, counts, numels, DEVICE) for k in (keys, on_device)]

    assert_triton_agrees(compute)


@pytest.mark.parametrize("numel", [31, 32, 33, 256, 257, 4096, 32769, 40_000])
def test_random_indices_of_words_and_tiles(numel):
    """Segments that end within a word of marks or with it; of a size above a power of two, most numbers fall outside."""
    counts = [1, numel // 10, numel // 2, numel - 3, numel]
    keys = kernels.random.keys_on([5, 2**63, 3, 2**64 - 1, 8], DEVICE)
    assert_triton_agrees(lambda: [kernels.permutation.random_indices(keys, counts, [numel] * 5, DEVICE)])


def test_finite():
    def compute():
        xs, counts = SMALL + LARGE, [2, 0, 3, 0, 1, 1]
        indices = torch.arange(sum(counts), dtype=torch.int32, device=DEVICE) % 2
        values = kernels.scatter.gather_marked(xs, indices, counts)
        elsewhere = torch.zeros(3, device="meta")  # no kernel may read it
        mixed = [[*xs, elsewhere], [elsewhere, *xs]]
        return [values, *(bool(kernels.all_finite(tensors)) for tensors in (xs, LARGE, [], *mixed))]

    assert_triton_agrees(compute)
