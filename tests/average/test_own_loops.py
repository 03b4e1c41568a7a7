"""Averagers in a loop of one's own, without a strategy: what such a loop forgets is named."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import thinwire as tw


def stepped_without_commit(comm, averager):
    tensors = [("w", torch.randn(6, 4)), ("v", torch.randn(3, 4))]
    state = averager.init(tensors, comm)
    averager.step(state, tensors, comm).wait()
    averager.step(state, tensors, comm)


def committed_before_wait(comm, averager):
    state, tensors = averager.init([("w", torch.zeros(6, 4))], comm), [("w", torch.zeros(6, 4))]
    for _ in range(2):  # a round that is given up needs no wait
        averager.step(state, tensors, comm)
        averager.discard(state)
    averager.step(state, tensors, comm).wait()
    averager.commit(state)
    averager.step(state, tensors, comm)
    averager.commit(state)


def pairs_from_a_generator(comm, averager):
    averager.init(torch.nn.Linear(4, 4).named_parameters(), comm)


def pairs_from_a_generator_in_a_round(comm, averager):
    model = torch.nn.Linear(4, 4)
    state = averager.init(list(model.named_parameters()), comm)
    averager.step(state, model.named_parameters(), comm).wait()


def tensors_without_names(comm, averager):
    averager.init([torch.zeros(4, 4)], comm)


def no_tensors(comm, averager):
    averager.step(averager.init([("w", torch.zeros(4, 4))], comm), [], comm)


def stepped_under_another_name(comm, averager):
    state = averager.init([("w", torch.zeros(4, 4))], comm)
    averager.step(state, [("v", torch.zeros(4, 4))], comm).wait()


def stepped_in_another_shape(comm, averager):
    state = averager.init([("w", torch.zeros(4, 4))], comm)
    averager.step(state, [("w", torch.zeros(5, 4))], comm).wait()


def stepped_twice_in_one_call(comm, averager):
    state = averager.init([("w", torch.zeros(4, 4))], comm)
    averager.step(state, [("w", torch.zeros(4, 4)), ("w", torch.zeros(4, 4))], comm).wait()


GRADIENTS = (tw.Mean(), tw.Mean(tw.TopK(0.5), tw.ErrorFeedback()), tw.PowerSGD(), tw.average.Dion())
ALL = (*GRADIENTS, tw.ByName({"*": tw.Mean()}), tw.Mix())


@pytest.mark.parametrize(
    ("worker", "averagers", "message"),
    [
        (
            stepped_without_commit,
            (*GRADIENTS, tw.ByName({"*": tw.Mean()})),
            r"\['w', 'v'\] were stepped in this round already",
        ),
        (
            stepped_under_another_name,
            (*GRADIENTS, tw.ByName({"*": tw.Mean()})),
            r"step takes tensors of init, got 'v'.*init got the names \['w'\]",
        ),
        (
            stepped_in_another_shape,
            (*GRADIENTS, tw.ByName({"*": tw.Mean()})),
            r"got 'w' of shape \(5, 4\), and init got that name with shape \(4, 4\)",
        ),
        (
            stepped_twice_in_one_call,
            (*GRADIENTS, tw.ByName({"*": tw.Mean()})),
            r"step needs each tensor once, got \['w', 'w'\]",
        ),
        (
            committed_before_wait,
            (*GRADIENTS, tw.ByName({"*": tw.PowerSGD()})),
            r"commit\(state\) comes after the wait\(\) of each handle of the round, and 1 had none",
        ),
        (no_tensors, GRADIENTS, "step needs one tensor or more"),
        (
            pairs_from_a_generator,
            ALL,
            r"must be a list of pairs .*such as list\(model.named_parameters\(\)\), got generator",
        ),
        (pairs_from_a_generator_in_a_round, ALL, "must be a list of pairs .*got generator"),
        (tensors_without_names, ALL, "must be a list of pairs .*got list of something else"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_loop_of_ones_own_that_forgets_something_is_told(worker, averagers, message):
    """Without `commit` memory kept nothing and random numbers repeated; a generator was empty, so nothing was averaged."""
    for averager in averagers:
        with pytest.raises(ValueError, match=message):
            tw.LocalWorld(2).run(worker, averager)


@dataclass(frozen=True, repr=False)
class Undecodable(tw.ErrorFeedback):
    """A memory that fails where a damaged payload would: in `wait`."""

    def decoded(self, state, name, mean, scale=1.0, encoded=True):
        raise ValueError("damaged")


def committed_after_a_wait_that_failed(comm, averager):
    tensors = [("w", torch.ones(6, 4))]
    state = averager.init(tensors, comm)
    handle = averager.step(state, tensors, comm)
    with pytest.raises(ValueError, match="damaged"):
        handle.wait()
    with pytest.raises(ValueError, match="commit.* and 1 had none"):
        averager.commit(state)
    averager.discard(state)
    assert averager.commit(state)
    return state.memory.residual["w"].tolist()


@pytest.mark.parametrize("averager", [tw.Mean(tw.TopK(0.5), Undecodable()), tw.PowerSGD(memory=Undecodable())], ids=str)
def test_a_round_whose_wait_failed_is_not_committed(averager):
    """`Mean` committed it, and so its memory lost what the round had not delivered."""
    assert tw.LocalWorld(1).run(committed_after_a_wait_that_failed, averager) == [[0.0] * 24]
