"""What an averager gives does not depend on how a tensor lies in memory, nor on its number of dimensions."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw

AVERAGERS = [
    tw.Mean(),
    tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback()),
    tw.Mean(tw.TopK(0.3), tw.MomentumCorrection(0.9)),
    tw.Mean(tw.codec.SVD(rank=1), tw.ErrorFeedback()),
    tw.PowerSGD(rank=1),
    tw.average.Dion(rank=1),
    tw.Mix(tw.Ring()),
    tw.PushSum(tw.Ring()),
    tw.Choco(tw.Ring(), tw.QSGD(bits=8)),
    tw.PowerGossip(tw.Ring()),
]


@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_transposed_tensors_are_averaged_as_contiguous_ones(averager):
    def worker(comm, transposed):
        generator = torch.Generator().manual_seed(comm.rank)
        xs = [torch.randn(shape, generator=generator) for shape in ((12, 9), (2, 3), (6, 5, 4))]
        if transposed:
            xs = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in xs]
        tensors = [(f"x{i}", x) for i, x in enumerate(xs)]
        state = averager.init(tensors, comm, seed=3)
        for _ in range(2):
            averager.step(state, tensors, comm).wait()
            averager.commit(state)
        return xs

    found, expected = (tw.LocalWorld(2).run(lambda comm, t=t: worker(comm, t)) for t in (True, False))
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_a_tensor_without_dimensions_is_averaged(averager, dtype):
    def worker(comm):
        x = torch.tensor(2.0 * comm.rank, dtype=dtype)
        tensors = [("scale", x), ("weight", torch.ones(2, 3))]
        averager.step(averager.init(tensors, comm), tensors, comm).wait()
        return x.item()

    found = tw.LocalWorld(2).run(worker)
    assert sum(found) == pytest.approx(2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("averager", AVERAGERS, ids=repr)
def test_autograd_refuses_a_graph_that_has_saved_a_tensor_from_before_it_was_averaged(averager, dtype):
    def worker(comm):
        weight = torch.full((4, 4), float(comm.rank), dtype=dtype)
        loss = (torch.ones(4, 4, dtype=dtype, requires_grad=True) * weight).sum()
        tensors = [("weight", weight)]
        averager.step(averager.init(tensors, comm), tensors, comm).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    tw.LocalWorld(2).run(worker)


@pytest.mark.parametrize(
    "averager",
    [
        *AVERAGERS,
        tw.Mean(tw.TopK(0.3), tw.ErrorFeedback(), min_ndim=0),
        tw.Mean(tw.TopK(0.3), exchange="sparse_reduce", min_ndim=0),
        tw.Mean(tw.chain(tw.TopK(0.3), tw.codec.ALQ(update_steps=(1,))), min_ndim=0),
        tw.PowerSGD(rank=1, memory=None),
    ],
    ids=repr,
)
def test_every_second_element_is_averaged_as_a_copy_of_it(averager):
    """A vector of such elements is flat already, and yet not contiguous; so is a matrix, once it is seen as a vector."""

    def worker(comm, strided):
        generator = torch.Generator().manual_seed(comm.rank)
        xs = [torch.randn(shape, generator=generator)[..., ::2] for shape in ((14,), (6, 10), (9, 2), (2,), (0,))]
        tensors = [(f"x{i}", x if strided else x.clone()) for i, x in enumerate(xs)]
        state = averager.init(tensors, comm, seed=3)
        for _ in range(2):
            averager.step(state, tensors, comm).wait()
            averager.commit(state)
        return [x for _, x in tensors]

    found, expected = (tw.LocalWorld(2).run(lambda comm, s=s: worker(comm, s)) for s in (True, False))
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
