"""Workers of elastic runs that ail, for tests."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.comm import ElasticCommunicator
from thinwire.comm.elastic import forming, patience


def train(
    comm,
    averager="Mean()",
    seed=0,
    rounds=5,
    before_round=lambda: None,
    is_over=lambda: False,
    among=0,
    local=0,
    version="",
    **options,
):
    """Train a small model until so many rounds are committed among at least `among` workers, or `is_over`."""
    warnings.simplefilter("ignore")
    if version:
        check = comm.check_agreement
        comm.check_agreement = lambda what: check(what | ({"thinwire": version} if "thinwire" in what else {}))
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if local:
        handle = tw.local_updates(model, optimizer, tw.parse(averager), every=local, comm=comm, seed=seed, **options)
    else:
        handle = tw.compress_gradients(model, tw.parse(averager), comm=comm, seed=seed, **options)
    sizes, together, slowest = [], 0, 0.0
    before, began = 0, time.monotonic()
    while together < rounds and not is_over():
        before_round()
        handle.begin_round()
        x = torch.randn(16, 20)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
        optimizer.step()
        if comm.counts.committed > before:
            slowest, before, began = max(slowest, time.monotonic() - began), comm.counts.committed, time.monotonic()
            together += comm.size >= among
            sizes.append(comm.size)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"sizes": sizes, "sum": flat.double().sum().item(), "slowest": slowest, "losses": comm.counts.losses}


def ailing(address: str, number: int, ails: str, at: int, among: int, rounds: int) -> None:
    """A worker that ails once there were `among` workers for `at` rounds; others train until there were fewer for `rounds`.

    Args:
        address: of the Lighthouse.
        number: of the worker.
        ails: "stuck" in Python, out of "descriptors", or "" for a worker that does not ail.
        at: see above.
        among: see above.
        rounds: see above.
    """
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    patience.MIN_SECONDS = forming.CONNECT_SECONDS = 1.0
    comm = ElasticCommunicator(address, number, timeout_seconds=60, quorum_seconds=100)
    together, fewer = 0, 0

    def before_round():
        nonlocal together, fewer
        time.sleep(0.02)
        together += comm.size == among
        fewer = fewer + 1 if together > at and comm.size < among else 0
        if together == at + 1:
            print("together", flush=True)
            together += 1
            while ails == "stuck":
                time.sleep(0.1)
            if ails == "descriptors":
                leave_no_descriptors()
        if fewer == rounds + 1:
            print(json.dumps({"done": True}), flush=True)

    try:
        train(comm, rounds=10**6, before_round=before_round)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
    os._exit(0)


def leave_no_descriptors() -> None:
    """Take all free descriptors away: what the process closes is enough to meet the others, and not to connect with them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))


class Fatal(dist.Store):
    """A store whose process is killed as soon as it waits there for what others say; they have heard of it by then."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.set, self.add, self.compare_set = store.set, store.add, store.compare_set

    def _die(self, *_):
        os.kill(os.getpid(), signal.SIGKILL)

    wait = get = multi_get = _die


def dies_before_it_dials(address: str, number: int) -> None:
    """A worker that is killed when it has met the others, and has connected with none of them."""
    comm = ElasticCommunicator(address, number, timeout_seconds=60)
    connect = comm._groups.connect
    comm._groups.connect = lambda store, *place: connect(Fatal(store), *place)
    train(comm)
