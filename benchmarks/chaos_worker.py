"""A worker of `chaos.py`: it trains a small model, tells what happens, and does to itself what it is ordered to."""

from __future__ import annotations

import ctypes
import hashlib
import io
import logging
import os
import random
import resource
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.comm import Credentials, ElasticCommunicator, Lighthouse
from thinwire.strategy import strategy as declared
from thinwire.strategy.model.shards import local

PERIOD = 10  # rounds between two checkpoints
NUM_BLOCKS, BLOCKS_PER_STEP = 50, 4  # of an epoch of the data, and of a step
ROUND_SECONDS = 0.05  # of computation, so that faults hit rounds and not the pauses between them
FORM_SECONDS = 0.01  # within which a fault happens while workers agree on a quorum and connect
TIMEOUT_SECONDS = 6.0  # a worker may be silent so long
IN_DDP = "DDP "  # before a strategy whose workers wrap the model in DistributedDataParallel, each alone
IN_SHARDS = "FSDP2 "  # before a strategy whose workers are `PROCESSES` processes each, which hold shards of the model
PROCESSES = 2


class Fault(NamedTuple):
    """What happens to whom: `number` is the victim's, in `phase` of a round."""

    name: str
    phase: str
    number: int


def enter(namespace: str | None) -> None:
    """Move this process to a network namespace; do it before there are threads."""
    if namespace is not None:
        file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(file, 0) == 0, "setns failed"


def started(context: Any, target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process with one end of a pipe as its first argument; the process, and the pipe's other end."""
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # else reading would not end with the process
    return process, pipe


def serve(pipe: Connection, namespace: str | None, host: str, options: dict[str, Any]) -> None:
    """A Lighthouse in a process of its own, so that it can be killed; tells its address."""
    enter(namespace)
    lighthouse = Lighthouse(2, host, **options)
    pipe.send(lighthouse.address)
    threading.Event().wait()


def worker(
    pipe: Connection, address: str, number: int, strategy: str, namespace: str | None, changed: dict[str, Any]
) -> None:
    """Train until told to stop; send events, and do to itself what the parent orders.

    Args:
        changed: what is not as in other workers: "seed", "version" of thinwire, "data".
    """
    folder = tempfile.mkdtemp() if strategy.startswith(IN_SHARDS) else ""  # where the processes of this worker meet
    other = fork_other(pipe) if folder else None
    process = int(other == 0)
    seed = changed.get("seed", 0)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    enter(namespace)
    torch.manual_seed(number)
    credentials = Credentials.from_environment()
    mesh = None
    if other is not None:
        store = dist.FileStore(f"{folder}/store", PROCESSES)
        dist.init_process_group("gloo", store=store, rank=process, world_size=PROCESSES)
        mesh = dist.init_device_mesh("cpu", (PROCESSES,))
    comm = ElasticCommunicator(address, number, timeout_seconds=TIMEOUT_SECONDS, credentials=credentials, replica=mesh)
    comm.check_agreement({"training data": changed.get("data", "random")})
    if "version" in changed:
        declared.__version__ = changed["version"]
    model: nn.Module = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
    parsed = strategy_of(strategy)
    if strategy.startswith(IN_DDP):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DistributedDataParallel(model, bucket_cap_mb=0.001)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.0 if parsed.averager.traits.has_momentum else 0.9
    )
    handle: Any = tw.attach(model, optimizer, parsed, comm=comm, seed=seed)
    if not parsed.models_differ:
        comm.share("optimizer", optimizer.state_dict, optimizer.load_state_dict)
    sampler = tw.ElasticSampler(NUM_BLOCKS, handle, BLOCKS_PER_STEP)
    order = _Order(pipe, comm, other)
    losses = 0
    while True:
        order.receive()
        order.reached_in("form", handle.begin_round)
        sampler.take()
        before = comm.counts.committed
        generator = torch.Generator().manual_seed(1000 * before + comm.rank + 500 * process)
        x = torch.randn(16, 20, generator=generator)
        time.sleep(ROUND_SECONDS * (10 if order.is_slow else 1))
        order.reached("compute")
        loss = cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        (loss * (float("nan") if order.spoils() else 1.0)).backward()
        optimizer.step()
        if comm.counts.committed == before:
            continue
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in common(handle, model))).hexdigest()[:16]
        if mesh is not None:
            digests = [""] * PROCESSES
            dist.all_gather_object(digests, digest)
            digest = " ".join(digests)
        lost = [list(entry) for entry in comm.counts.losses[losses:]]
        losses += len(lost)
        facts = {"round": comm.counts.committed, "size": comm.size, "digest": digest, "lost": lost}
        facts["loss"] = loss.item()
        facts |= {"epoch": sampler.epoch, "blocks": sorted(b for some in sampler.last_committed.values() for b in some)}
        if not process:
            pipe.send(("commit", time.monotonic(), facts))
        if comm.counts.committed % PERIOD == 0 and not comm.in_round:  # else it was healed by those that checkpointed
            comm.between_rounds(partial(_checkpoint, comm, handle, order))


def common(handle: Any, model: nn.Module) -> list[torch.Tensor]:
    """What all workers must hold alike after a round: the anchors of local updates, or else the parameters or their shards."""
    if isinstance(handle.strategy, tw.Local):
        return [anchor.detach() for anchor in handle._record.anchor.values()]
    handle._shards.reshard()
    return [local(p) for p in model.parameters()]


def strategy_of(text: str) -> Any:
    """The strategy of a configuration."""
    return tw.parse(text.removeprefix(IN_DDP).removeprefix(IN_SHARDS))


def fork_other(pipe: Connection) -> int:
    """Fork the other process of this worker, which ends with this one; returns what `os.fork` does."""
    other = os.fork()
    if not other:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        pipe.close()  # so that the parent learns when this worker's first process has ended
    return other


def _checkpoint(comm: ElasticCommunicator, handle: Any, order: _Order) -> None:
    torch.save(handle.state_dict(), io.BytesIO())
    order.reached("checkpoint")
    comm.barrier()


class _Order:
    """What the parent wants to happen to this worker, and the places where it does."""

    def __init__(self, pipe: Connection, comm: ElasticCommunicator, other: int | None):
        self._pipe, self._fault, self._spoils, self.is_slow, self._other = pipe, None, False, False, other
        if other == 0:  # the first process of the worker gets the orders
            return
        call_before(comm, "_vote", partial(self.reached, "vote"))
        call_before(comm, "heal", partial(self.reached, "heal"))
        call_before(comm, "_give_up", lambda: pipe.send(("gave up", time.monotonic(), {})))
        issue = comm._issue

        def issued(tensors: Any, start: Any) -> Any:
            done = issue(tensors, start)
            if comm.in_round:
                self.reached("send")
            return done

        comm._issue = issued  # type: ignore[method-assign]

    def receive(self) -> None:
        while self._other != 0 and self._pipe.poll():
            self._fault = Fault(*self._pipe.recv())

    def reached_in(self, phase: str, do: Callable[[], object]) -> None:
        """Let the fault happen, if it is due in this phase, while `do` waits for others."""
        fault = self._fault
        if fault is not None and fault.phase == phase:
            threading.Timer(FORM_SECONDS * random.random(), self.reached, (phase,)).start()
        do()

    def reached(self, phase: str) -> None:
        """Let the fault happen if it is due in this phase."""
        fault = self._fault
        if fault is None or fault.phase != phase:
            return
        self._fault = None
        self._pipe.send(("fault", time.monotonic(), {}))
        # A worker of two processes may lose either.
        victim = random.choice([os.getpid(), self._other or os.getpid()])
        if fault.name.startswith("kill"):
            os.kill(victim, signal.SIGKILL)
        elif fault.name == "stop for 10 s":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.name.startswith("stop"):
            os.kill(victim, signal.SIGSTOP)
        elif fault.name.startswith("out of descriptors"):
            limit_to(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")))
        elif fault.name == "out of memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit_to(resource.RLIMIT_AS, pages * resource.getpagesize() + (1 << 20))
        while fault.name.endswith("stuck in Python"):  # its heartbeats could go on
            time.sleep(0.1)
        self._spoils = fault.name == "NaN"
        self.is_slow = fault.name == "ten times slower"

    def spoils(self) -> bool:
        spoils, self._spoils = self._spoils, False
        return spoils


def limit_to(resource_: int, limit: int) -> None:
    """Let this process have so much of a resource from now on."""
    resource.setrlimit(resource_, (limit, resource.getrlimit(resource_)[1]))


def call_before(target: Any, name: str, call: Callable[[], None]) -> None:
    """Call something before each call of a method, of an object or a class."""
    original = getattr(target, name)

    @wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        call()
        return original(*args, **options)

    setattr(target, name, wrapped)
