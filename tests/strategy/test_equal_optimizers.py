"""Averaged gradients keep models equal only if all optimizers do the same with them: options and states are compared."""

from __future__ import annotations

import copy
import warnings

import torch
from helpers.spawn import spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

STRATEGIES = ("Gradients(Mean())", "Local(Mean(), every=2)")


def stepped_on(*ranks):
    """Makes optimizers, of which those on these ranks have a state, as if it had been loaded there alone."""

    def make(model, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if rank in ranks:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    return make


def attached(make, strategy=STRATEGIES[0], gives=True):
    """What two workers are told as they attach, None if nothing, and how many bytes each has sent."""

    first = nn.Linear(2, 2)  # not in the threads, which share one generator

    def worker(comm):
        model = copy.deepcopy(first)
        optimizer = make(model, comm.rank)
        try:
            handle = tw.attach(model, optimizer if gives else None, strategy, comm=comm)
        except ValueError as error:
            return str(error), 0
        handle.detach()
        return None, handle.ledger.bytes_sent

    return tw.LocalWorld(2).run(worker)


def test_a_state_that_was_loaded_on_one_worker_alone_is_refused_on_all():
    (first, _), (second, _) = attached(stepped_on(0))
    assert first == second and first.startswith("workers disagree on 1 of ")
    assert "SGD: what it remembers (a new one: nothing): '2 tensors, sha256 " in first
    assert "on rank 0; '0 tensors' on rank 1" in first
    assert first.endswith("the same configuration and checkpoint, and the same tensors in the same order.")


def test_options_that_differ_are_refused_by_name():
    def groups(model, rank):
        return torch.optim.AdamW(
            [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.1 * rank}],
            lr=torch.tensor(0.1 + rank),
        )

    (text, _), _ = attached(groups)
    assert "  AdamW: weight_decay of group 1: 0.0 on rank 0; 0.1 on rank 1" in text
    assert "  AdamW: lr: 0.1" in text and " on rank 0; 1.1" in text and "workers disagree on 3 of" in text


def test_equal_optimizers_attach_and_the_comparison_costs_no_byte():
    (none, with_it), (nor_here, _) = attached(stepped_on(0, 1))
    (_, without), _ = attached(stepped_on(0, 1), gives=False)
    assert none is nor_here is None and with_it == without


def test_workers_with_models_of_their_own_may_have_optimizers_of_their_own():
    assert [text for text, _ in attached(stepped_on(0), STRATEGIES[1])] == [None, None]


def zero_redundancy_worker(comm) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imports FSDP, which the other tests need not wait for

    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tw.attach(model, optimizer, STRATEGIES[0]).detach()


def test_a_zero_redundancy_optimizer_has_a_state_of_its_own_on_each_worker():
    spawn(2, zero_redundancy_worker)
