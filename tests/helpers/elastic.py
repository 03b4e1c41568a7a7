"""A worker of an elastic run, for tests: it trains a small model until enough rounds are committed, or kills itself."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import signal
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn

import thinwire as tw
from thinwire.comm import ElasticCommunicator, LocalWorld

from .listeners import listening
from .program import wait_until


def serve(port: int, min_workers: int = 2, folder: str | None = None):
    """A Lighthouse in a process of its own, with the credentials of a folder if there is one; print its port."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    credentials = None if folder is None else tw.Credentials(folder)
    lighthouse = tw.comm.Lighthouse(min_workers, "127.0.0.1", port, credentials=credentials)
    print(lighthouse.address.rsplit(":", 1)[1], flush=True)
    signal.pause()


def die_among(comm, size, sizes, after):
    """Kill this process if there are so many workers now, and were `after` before."""
    if comm.size == size and after in sizes:
        os.kill(os.getpid(), signal.SIGKILL)


def regroup_and_die(comm, size, sizes, after, regroup, *args):
    """Regroup, so that all others have connected with this worker; then `die_among`, before the others know that it has."""
    regroup(*args)
    die_among(comm, size, sizes, after)


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model, and its optimizer."""
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    """Take a step, on examples that its number and the rank determine."""
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * number + rank))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
    optimizer.step()


def digest_of(model: nn.Module) -> str:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def undisturbed(averager: str, size: int, rounds: int) -> str:
    """The digest of the model that so many workers end with, as threads of this process; the first one's begins."""

    def run(comm):
        model, optimizer = copy.deepcopy(first)
        tw.compress_gradients(model, tw.parse(averager), comm=comm)
        for number in range(rounds):
            step(model, optimizer, number, comm.rank)
        return digest_of(model)

    torch.manual_seed(0)
    first = new_model()
    digests = LocalWorld(size).run(run)
    assert len(set(digests)) == 1
    return digests[0]


def worker(
    address: str,
    number: int,
    averager: str,
    size: int,
    rounds: int = 20,
    dies_among: int | None = None,
    dies_in: str = "round",
    min_workers: int = 2,
    folder: str | None = None,
    dies_after: int = 4,
    goes_on: str | None = None,
    **place,
):
    """Print each new number of workers on a line, and at the end what this worker saw, as JSON.

    Args:
        address: of the Lighthouse.
        number: of the worker.
        averager: of the gradients, in Python's notation.
        size: the run ends with so many workers,
        rounds: after so many rounds of theirs.
        dies_among: kills itself in a round of so many workers, once there have been `dies_after`; None never.
        dies_in: "round", or "regroup" for before it, when all have connected.
        min_workers: fewer do not begin.
        folder: of keys; None for a run without credentials.
        dies_after: see `dies_among`.
        goes_on: a file; after the first round of `size` workers it waits until this is there.
        place: further arguments of the communicator, such as how others reach it.
    """
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(number)
    credentials = None if folder is None else tw.Credentials(folder)
    options = {"timeout_seconds": 60, "credentials": credentials} | place
    comm = ElasticCommunicator(address, number, min_workers, **options)
    model, optimizer = new_model()
    parsed = tw.parse(averager)
    handle = tw.compress_gradients(model, parsed, comm=comm)
    comm.share("optimizer", optimizer.state_dict, optimizer.load_state_dict)
    sizes, slowest = [], 0.0
    if dies_in == "regroup":
        type(parsed).regroup = partial(regroup_and_die, comm, dies_among, sizes, dies_after, parsed.regroup)
    began = time.monotonic()
    before = together = 0
    while together < rounds:
        handle.begin_round()
        if comm.counts.committed >= 3:
            die_among(comm, dies_among, sizes, dies_after)
        step(model, optimizer, comm.counts.committed, comm.rank)
        if comm.counts.committed > before:
            slowest, began, before = max(slowest, time.monotonic() - began), time.monotonic(), comm.counts.committed
            together = together + 1 if comm.size == size else 0
        if not sizes or sizes[-1] != comm.size:
            sizes.append(comm.size)
            print(comm.size, flush=True)
        if goes_on and together == 1:
            wait_until(Path(goes_on).exists, "the word to go on")
    result = {"number": number, "model": digest_of(model), "sizes": sizes}
    result |= {"slowest": slowest, "healings": comm.counts.healings, "aborted": comm.counts.aborted}
    result |= {"losses": comm.counts.losses, "listeners": len(listening())}
    print(json.dumps(result), flush=True)
    comm.close()  # else its end can cut the last vote of others, who would wait for it then
    os._exit(0)


class Tally(nn.Module):
    """Has a weight for each block of all epochs. Its loss moves those of a batch alone, so weights tell what was merged."""

    def __init__(self, num_places: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_places))

    def forward(self, places):
        return self.weight[places].mean()


def sampled(address: str, number: int, strategy: str, num_blocks: int, epochs: int, per_step: int, is_late: bool):
    """Train `Tally` on the blocks of an `ElasticSampler` until all epochs are committed; print each round, and the weights."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm = ElasticCommunicator(address, number, timeout_seconds=60, is_late=is_late)
    model = Tally((epochs + 2) * num_blocks)
    parsed = tw.parse(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 if parsed.models_differ else float(per_step))
    handle = tw.attach(model, optimizer, parsed, comm=comm)
    if not parsed.models_differ:
        comm.share("optimizer", optimizer.state_dict, optimizer.load_state_dict)
    sampler = tw.ElasticSampler(num_blocks, handle, per_step, seed=3)
    while sampler.epoch < epochs:
        before = comm.counts.committed
        handle.begin_round()
        places = [block.epoch * num_blocks + block.number for block in sampler.take()]
        optimizer.zero_grad()
        (model(places) * sampler.weight).backward()
        time.sleep(0.01)
        optimizer.step()
        if comm.counts.committed > before:
            print(json.dumps([comm.counts.committed, comm.size, list(sampler.last_committed.items())]), flush=True)
    print(json.dumps({"weights": model.weight.tolist(), "sampler": sampler.state_dict()}), flush=True)
    comm.close()
    os._exit(0)
