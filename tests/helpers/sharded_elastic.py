"""A process of an elastic worker whose model is sharded, for tests."""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import thinwire as tw
from thinwire.comm import ElasticCommunicator
from thinwire.integrations.checkpoint import StrategyState, load

from .sharded import batch, fingerprint, sharded


def attach(model: nn.Module, strategy: str, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = tw.attach(model, optimizer, tw.parse(strategy), **options)
    if handle.comm.is_elastic and not handle.models_differ:
        handle.comm.share("optimizer", optimizer.state_dict, optimizer.load_state_dict)
    return optimizer, handle


def step(model: nn.Module, optimizer: torch.optim.Optimizer, place: int, number: int) -> None:
    """A step on a batch of this process's own."""
    x, y = batch(place, number)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def process(
    address: str,
    number: int,
    rank: int,
    folder: str,
    strategy: str,
    dies_after: int | None,
    together: int,
    size: int = 2,
    keys: str | None = None,
):
    """One of the two processes of a worker; prints each round as JSON, and at the end saves a checkpoint and waits.

    Args:
        address: of the Lighthouse.
        folder: where the worker's processes meet, and where its checkpoint is: it goes on from that if there is one.
        dies_after: this process kills itself in the round after so many; None never.
        together: the run ends after so many rounds of the same `size` workers.
        keys: the folder of the worker's credentials; None for a run without.
    """
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder, "store")), 2), rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    credentials = None if keys is None else tw.Credentials(keys)
    comm = ElasticCommunicator(address, number, 1, timeout_seconds=60, credentials=credentials, replica=mesh)
    model = sharded(mesh, seed=number)
    optimizer, handle = attach(model, strategy, comm=comm)
    checkpoint = Path(folder, "checkpoint")
    if checkpoint.exists():
        load_checkpoint(checkpoint, model, optimizer, handle)
    num_together, members = 0, None
    while num_together < together:
        handle.begin_round()
        before = comm.counts.committed
        if dies_after is not None and before >= dies_after and comm.size == size:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, 2 * comm.rank + rank, before)
        if comm.counts.committed > before:
            model.reshard()
            num_together = (num_together if comm.members is members else 0) + (comm.size == size)
            members = comm.members
            said = {"round": comm.counts.committed, "size": comm.size, "model": fingerprint(model)}
            print(json.dumps(said | {"healings": comm.counts.healings, "aborted": comm.counts.aborted}), flush=True)
    entries = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    entries |= {"rounds": comm.state_dict(), "thinwire": StrategyState(handle)}
    dcp.save(entries, checkpoint_id=checkpoint)
    print("done", flush=True)
    signal.pause()


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, handle) -> None:
    """Go on from a worker's own checkpoint, before the first round."""
    entries = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    entries |= {"rounds": handle.comm.state_dict()}
    dcp.load(entries, checkpoint_id=checkpoint)
    model.load_state_dict(entries["model"])
    set_optimizer_state_dict(model, optimizer, entries["optimizer"])
    handle.comm.load_state_dict(entries["rounds"])
    load(handle, checkpoint)
