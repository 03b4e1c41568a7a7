"""Gossip while training in real processes on Gloo: uneven workers, overlap, memory, death of a worker."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import sys
import time
from itertools import pairwise

import pytest
import torch
from helpers.spawn import run_threads, spawn
from torch import nn

import thinwire as tw
from thinwire.comm import CommunicationError

SIZE, NUM_STEPS, SETTLED = 4, 12, 500
DIRECTED = tw.PushSum(tw.topology.DirectedGraph(((0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0))))
AVERAGERS = [
    tw.Mix(),
    tw.Mix(tw.topology.Hierarchical(tw.Ring(), workers_per_node=2)),
    tw.PushSum(),
    tw.Choco(tw.Ring(), tw.TopK(0.01)),
    tw.DeepSqueeze(),
    tw.PowerGossip(tw.Ring(), iterations=2),
    tw.Moniqua(theta=4.0),
]


def make_model(comm, width=128):
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    generator = torch.Generator().manual_seed(comm.rank)  # the global one is shared by workers that are threads
    for p in model.parameters():
        nn.init.normal_(p, std=0.05, generator=generator)
    return model


OVERLAPPING = {
    "local": tw.Local(tw.Mean(), every=2, delay=1),
    "gossip": tw.Gossip(tw.PowerGossip(tw.Ring(), iterations=2), overlap=True),
    "gradients": tw.Gradients(tw.Mean()),
}


def train_models(comm, parts):
    """Models of some widths, each with its strategy over one communicator; rounds of one fly while another's begin."""
    random.seed(comm.rank)
    models = [make_model(comm, width) for _, width in parts]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with contextlib.ExitStack() as stack:
        for (name, _), model, optimizer in zip(parts, models, optimizers, strict=True):
            stack.enter_context(OVERLAPPING[name].attach(model, optimizer, comm=comm))
        for _ in range(60):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(4, 32)).square().mean().backward()
                optimizer.step()
                time.sleep(0.003 * random.random())
    return [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in models]


@pytest.mark.parametrize("names", [("local", "local"), ("local", "gossip"), ("local", "gradients")], ids=" and ".join)
def test_strategies_may_share_a_communicator(names):
    """Each trains its model as alone."""
    parts = list(zip(names, (128, 64), strict=True))
    alone = [spawn(2, train_models, [part]) for part in parts]
    for rank, together in enumerate(spawn(2, train_models, parts)):
        for mine, expected in zip(together, alone, strict=True):
            assert torch.equal(mine, expected[rank][0])


def train(comm, averager, num_steps, sleep_seconds=0.0, on_step=None, **options):
    """Steps of random length, a different one on every worker."""
    model = make_model(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = tw.gossip_parameters(model, optimizer, averager, comm=comm, **options)
    generator, sleeps = torch.Generator().manual_seed(comm.rank), random.Random(comm.rank)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 32, generator=generator)).square().mean()
        time.sleep(sleep_seconds * sleeps.random())
        loss.backward()
        optimizer.step()
        if on_step is not None:
            on_step(step)
    handle.detach()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train_in_thread(comm, averager, options):
    return train(comm, averager, NUM_STEPS, **options)


def train_in_process(comm, averager, options):
    return train(comm, averager, NUM_STEPS, 0.002, **options)


@pytest.mark.parametrize(
    ("averager", "options"),
    [
        *((averager, {"overlap": True}) for averager in AVERAGERS[1::2]),
        (DIRECTED, {"overlap": True, "staleness": 2}),
        (DIRECTED, {"overlap": True, "staleness": 1, "order": "adapt_then_combine"}),
        (DIRECTED, {}),
    ],
    ids=str,
)
def test_workers_of_uneven_speed_get_what_threads_get(averager, options):
    results = spawn(SIZE, train_in_process, averager, options)
    for result, expected in zip(results, run_threads(SIZE, train_in_thread, averager, options), strict=True):
        assert torch.equal(result, expected)


def growth_of_memory(comm, averager):
    """The least growth of resident bytes and of Python objects in six times 40 steps."""
    memory = []

    def measure(step):
        if step >= SETTLED and (step - SETTLED) % 40 == 0:
            gc.collect()  # the autograd engine's cycles wait for it
            pages = int(open("/proc/self/statm").read().split()[1])
            memory.append((pages * os.sysconf("SC_PAGE_SIZE"), sys.getallocatedblocks()))

    train(comm, averager, SETTLED + 241, 0.0, measure, overlap=True)
    growth = [[after - before for before, after in pairwise(kind)] for kind in zip(*memory, strict=True)]
    return [min(kind) for kind in growth]


@pytest.mark.parametrize("averager", AVERAGERS[2:], ids=str)
def test_memory_is_steady(averager):
    for resident_bytes, python_objects in spawn(2, growth_of_memory, averager):
        # Every 40 steps, a leaked copy of the parameters a step would add 3.3 MB, and a leaked handle, with its function,
        # more than 80 objects. Caches fill in hundreds of steps, and what is in flight when objects are counted varies.
        assert resident_bytes < 2e6
        assert python_objects < 80


def train_until_killed(comm, averager, options):
    def kill(step):
        if comm.rank == 2 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    train(comm, averager, 200, 0.003, kill, **options)


@pytest.mark.parametrize(
    ("averager", "options"),
    [(tw.Mix(), {"overlap": True}), (tw.PushSum(), {}), (tw.PowerGossip(tw.Ring(), iterations=2), {"overlap": True})],
    ids=str,
)
def test_a_killed_worker_stops_the_others_with_an_error_that_names_it(averager, options):
    began = time.monotonic()
    errors = spawn(SIZE, train_until_killed, averager, options, comm_timeout_seconds=600, return_errors=True)
    assert time.monotonic() - began < 400  # the connection tells, not the communicator's timeout of 600 seconds
    assert "exit code -9" in str(errors[2])
    others = [errors[rank] for rank in (0, 1, 3)]
    for error in others:
        # Its neighbours name it; those that lose a worker which stopped for that reason name that one.
        assert isinstance(error, CommunicationError)
        assert re.search(r"(from|to|with) rank \d", str(error))
    assert any(re.search(r"(from|to|with) rank 2", str(error)) for error in others)


def step_in_a_fork(comm, attach):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach(model, optimizer, comm)

    def step():
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    step()
    child = os.fork()
    if child == 0:
        try:
            step()
        except ValueError as error:
            os._exit(17 if "is a fork of the worker" in str(error) else 18)
        os._exit(19)
    _, status = os.waitpid(child, 0)
    step()  # the parent goes on
    handle.detach()
    return os.waitstatus_to_exitcode(status)


ATTACH = {
    "gradients": lambda model, optimizer, comm: tw.compress_gradients(model, tw.Mean(), comm=comm),
    "gossip": lambda model, optimizer, comm: tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm),
    "overlap": lambda model, optimizer, comm: tw.gossip_parameters(model, optimizer, tw.Mix(), comm=comm, overlap=True),
    "pairs": lambda model, optimizer, comm: tw.gossip_asynchronously(model, optimizer, comm=comm),
    "local": lambda model, optimizer, comm: tw.local_updates(model, optimizer, tw.Mean(), 2, comm=comm, delay=1),
}


def step_in_a_fork_of(comm, name):
    return step_in_a_fork(comm, ATTACH[name])


@pytest.mark.parametrize("name", ATTACH)
def test_a_fork_that_steps_with_its_parents_handle_is_told_so(name):
    assert spawn(2, step_in_a_fork_of, name) == [17, 17]
