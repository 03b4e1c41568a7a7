"""Workers may have different numbers of threads, by which PyTorch rounds products and decompositions; results stay equal."""

import pytest
import torch

import thinwire as tw
from thinwire.average import Dion
from thinwire.codec import DCT, SVD, BlockwiseTopK, LowRank
from thinwire.kernels.parallel import one_thread
from thinwire.testing.random import normal

SHAPES = ((600, 700), (1000, 40), (17, 3, 5, 5))


def results(comm, averager):
    before = torch.get_num_threads()
    torch.set_num_threads((1, 2, 4)[comm.rank])
    try:
        tensors = [(f"t{i}", normal(shape, 10 * i + comm.rank)) for i, shape in enumerate(SHAPES)]
        state = averager.init(tensors, comm)
        averager.step(state, tensors, comm).wait()
        averager.commit(state)
        assert torch.get_num_threads() == (1, 2, 4)[comm.rank]
        return [t for _, t in tensors]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "averager",
    [
        tw.PowerSGD(rank=4),
        tw.PowerSGD(rank=32),
        Dion(rank=32),
        tw.Mean(LowRank(rank=4)),
        tw.Mean(LowRank(rank=32)),
        tw.Mean(SVD(rank=4)),
        tw.Mean(SVD(rank=32)),
        tw.Mean(tw.chain(DCT(), BlockwiseTopK(0.0078125))),
    ],
    ids=repr,
)
def test_workers_with_different_numbers_of_threads_get_the_same_bits(averager):
    first, *others = tw.LocalWorld(3).run(results, averager)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_threads_come_back_after_an_error():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ZeroDivisionError), one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
