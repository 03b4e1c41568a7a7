"""Cuts of a line in each phase of each strategy: do all workers end with the bits of an undisturbed run?

    python benchmarks/cuts.py                                        # cuts of 1, 10 and 30 seconds; root
    python benchmarks/cuts.py --seconds 1 --only sparse "Gossip"     # some strategies
    THINWIRE_CREDENTIALS=keys python benchmarks/cuts.py              # over TLS

Each worker has a host of netlab.py, and all train over our own connections. Worker 1 stops at a place of each phase, its line
is cut, and it goes on; after so many seconds the line is mended. One run has a cut in each phase:

    meeting     before it goes to the store                   saving   before it saves its state; then all gather the sizes
    connecting  it knows the others' addresses                closing  its last message is on its way to all others; then it
    forward     between two layers                                     detaches and closes
    in flight   the first message of a step is on its way
    commit      before the averager commits

Where messages are on their way, the line is slow before it is cut, so that they cannot arrive first; the worker checks that.
The parameters of all workers after each cut must have the bits of the same run without cuts. Asynchronous methods have no such
bits, so there nothing may be lost or counted twice: under AD-PSGD the mean of all models is the start plus the mean of all
updates; with a quorum every change is merged once, and all end with the same anchor.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chaos_worker import call_before, enter, started
from netlab import INTERFACE, Lab
from script import run_script
from tables import table_head, table_row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.comm import Credentials
from thinwire.comm.store import connected_store, listening_store
from thinwire.comm.tcp import TcpCommunicator
from thinwire.comm.tcp.channel import TcpChannel
from thinwire.comm.tcp.connections import Connections

STRATEGIES = {
    "all-reduce": "Gradients(Mean())",
    "4 bits": "Gradients(Mean(chain(TopK(0.5), QSGD(bits=4)), ErrorFeedback()))",
    "sparse": "Gradients(Mean(TopK(0.3), ErrorFeedback(), exchange='sparse_reduce'))",
    "DDP": "Gradients(Mean(TopK(0.3), ErrorFeedback()))",
    "Gossip": "Gossip(Mix(Exponential()))",
    "Gossip with overlap": "Gossip(Mix(Exponential()), overlap=True)",
    "Local": "Local(Mean(), every=2)",
    "Local with delay": "Local(Mean(), every=2, outer=OuterSGD(), delay=1)",
    "Shards": "Shards()",
    "AD-PSGD": "Asynchronous()",
    "quorum": "Local(Mean(), every=2, outer=OuterSGD(), delay=1, quorum=Quorum(workers=2))",
}
UNORDERED = ("AD-PSGD", "quorum")
PHASES = ("meeting", "connecting", "forward", "in flight", "commit", "saving", "closing")
AT_STEP = {2: "forward", 4: "in flight", 6: "commit"}  # the other steps are undisturbed
STEPS = 9
VICTIM, PORT, LIMIT_SECONDS = 1, 29500, 120.0
FAST, SLOW = "200mbit", "60kbit"
LARGE = 10_000  # bytes of a message that takes a second and more on a slow line
PRELOADED = ["thinwire", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "cuts"]


def size_of(name: str) -> int:
    """AD-PSGD wants an even number of workers."""
    return 4 if name == "AD-PSGD" else 3


# ---- a worker ----


class Marks:
    """The places at which a worker waits for its line to be cut.

    Attributes:
        due: the phase that comes next; "" for none.
        was_in_flight: for each cut with messages on their way, whether some were still there afterwards.
    """

    def __init__(self, pipe: Connection, is_victim: bool):
        self._pipe, self._is_victim, self.due = pipe, is_victim, ""
        self.was_in_flight: list[bool] = []

    def reach(self, phase: str) -> None:
        """Have the line cut, if this phase is due."""
        if self.due == phase:
            self.due = ""
            self.tell(phase)

    def before(self, owner: Any, name: str, phase: str) -> None:
        """Reach a phase before each call of a method."""
        call_before(owner, name, lambda: self.reach(phase))

    def in_flight(self, owner: Any, name: str, num_bytes: Callable[..., int]) -> None:
        """Have the line cut after a method has sent a large message, which is still on its way then."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(comm: Any, *args: Any) -> Any:
            if self.due not in ("in flight", "closing") or num_bytes(*args) < LARGE:
                return original(comm, *args)
            phase, self.due = self.due, ""
            self.tell("slow")
            done = original(comm, *args)
            self.tell(phase)
            self.was_in_flight.append(not self._is_victim or num_unacknowledged() > 0)
            return done

        setattr(owner, name, wrapped)

    def tell(self, what: str) -> None:
        """Have the line cut, or made slow, now."""
        if self._is_victim:
            self._pipe.send(("at", what))
            self._pipe.recv()


class Net(nn.Module):
    """Two layers, and a place between them."""

    def __init__(self, marks: Marks):
        super().__init__()
        self.first, self.second, self.marks = nn.Linear(64, 128), nn.Linear(128, 64), marks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        self.marks.reach("forward")
        out: Tensor = self.second(x)
        return out


def num_unacknowledged() -> int:
    """Bytes that the kernels of other hosts do not have yet."""
    rows = (line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:])
    return sum(int(row[4].partition(":")[0], 16) for row in rows if row[3] == "01")


def work(pipe: Connection, rank: int, address: str, name: str, namespace: str) -> None:
    """Train, and tell the digests of the parameters after each phase."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    enter(namespace)
    try:
        pipe.send(("done", run(Marks(pipe, rank == VICTIM), rank, address, name)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    pipe.recv()  # nobody ends before all have


def run(marks: Marks, rank: int, address: str, name: str) -> dict[str, Any]:
    """The life of a worker; see the module's text."""
    size, credentials, limit = size_of(name), Credentials.from_environment(), timedelta(seconds=LIMIT_SECONDS)
    strategy: Any = tw.parse(STRATEGIES[name])
    marks.before(Connections, "open", "connecting")
    marks.in_flight(TcpCommunicator, "_issue", lambda tensors, start: sum(t.nbytes for t in tensors))
    marks.in_flight(TcpChannel, "send", lambda peer, kind, payload=None: 0 if payload is None else payload.nbytes)
    make = listening_store if rank == 0 else connected_store
    store = make(address, PORT, limit, credentials)
    marks.tell("meeting")
    marks.due = "connecting"
    in_group = name in ("DDP", "Shards")
    comm: Any
    if in_group:
        import thinwire.comm.backend  # noqa: F401

        dist.init_process_group("thinwire", store=store, rank=rank, world_size=size, timeout=limit)
        comm = dist.group.WORLD.communicator  # type: ignore[union-attr]
    else:
        comm = TcpCommunicator.from_store(store, rank, size, timeout_seconds=LIMIT_SECONDS, credentials=credentials)
    model, optimizer, handle = attached(marks, name, strategy, comm)
    if isinstance(strategy, (tw.Shards, tw.Asynchronous)):
        marks.before(optimizer, "step", "commit")
    else:
        marks.before(type(strategy.averager), "commit", "commit")
    start, updates = flat_of(model).double(), torch.zeros(flat_of(model).numel(), dtype=torch.float64)
    digests = {}
    for step in range(STEPS):
        marks.due = AT_STEP.get(step, "")
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        cross_entropy(model(x), x.argmax(1)).backward()
        if name == "AD-PSGD":
            updates -= LR * torch.cat([p.grad.flatten() for p in model.parameters()]).double()  # type: ignore[union-attr]
        optimizer.step()
        if step in AT_STEP:
            digests[AT_STEP[step]] = digest(model)
    if name == "quorum":
        handle.synchronize()  # what saving asks for
    marks.tell("saving")
    save(model, handle, comm, in_group)
    digests["saving"] = digest(model)
    last_words(marks, comm)
    facts = {"missed": marks.was_in_flight.count(False)}
    handle.detach()
    if in_group:
        dist.destroy_process_group()
    else:
        comm.close()
    digests["closing"] = digest(model)
    if name == "quorum":
        facts |= {key: int(getattr(handle.committed, key)) for key in ("num_merged", "num_dropped")}
    if name == "AD-PSGD":
        facts |= {"start": start, "updates": updates, "end": flat_of(model).double()}
    return {"digests": digests, **facts}


LR = 0.05


def attached(marks: Marks, name: str, strategy: Any, comm: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The same model on all workers, its optimizer, and the strategy at work."""
    torch.manual_seed(0)
    model: nn.Module = Net(marks)
    if name == "Shards":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (comm.size,))
        for layer in (*list(model.children()), model):
            fully_shard(layer, mesh=mesh)
    if name == "DDP":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.04)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    options = {} if name in ("DDP", "Shards") else {"comm": comm}
    return model, optimizer, tw.attach(model, optimizer, strategy, **options)


def save(model: nn.Module, handle: Any, comm: Any, in_group: bool) -> None:
    """Save the strategy's state, and under `Shards` the model in shards; then all gather the sizes."""
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    comm.gather_objects(file.tell())
    if in_group:
        from torch.distributed.checkpoint import save as save_shards

        folder = comm.gather_objects(tempfile.mkdtemp(prefix="cuts-"))[0]
        save_shards({"model": model.state_dict()}, checkpoint_id=folder)


def last_words(marks: Marks, comm: Any) -> None:
    """Worker 1 sends all others a message, and does not wait until it has arrived."""
    message = torch.arange(16_384, dtype=torch.int32)
    others = [peer for peer in range(comm.size) if peer != VICTIM]
    if comm.rank == VICTIM:
        marks.due = "closing"
        comm.exchange(dict.fromkeys(others, message), {}).wait()
    else:
        got = torch.zeros_like(message)
        comm.exchange({}, {VICTIM: got}).wait()
        assert torch.equal(got, message), "the last message is wrong"


def flat_of(model: nn.Module) -> Tensor:
    local = [tw.strategy.model.shards.local(p) for p in model.parameters()]
    return torch.cat([p.flatten() for p in local])


def digest(model: nn.Module) -> str:
    return hashlib.sha256(flat_of(model).numpy().tobytes()).hexdigest()[:16]


# ---- a run, and what became of it ----


def outcome(name: str, seconds: float) -> list[dict[str, Any]] | str:
    """What each worker told at the end of a run with cuts of so many seconds, 0 for none; or why it failed, and where."""
    size, context = size_of(name), multiprocessing.get_context("forkserver")
    phase, until = "start", time.monotonic() + LIMIT_SECONDS + 3 * len(PHASES) * (seconds + 5)
    processes, told = [], dict[int, dict[str, Any]]()
    with Lab(size, FAST) as lab:
        pipes = {}
        try:
            for rank in range(size):
                process, pipe = started(context, work, rank, lab.address(0), name, lab.namespaces[rank])
                processes.append(process)
                pipes[pipe] = rank
            while len(told) < size:
                ready = wait([pipe for pipe, rank in pipes.items() if rank not in told], until - time.monotonic())
                if not ready:
                    return f"hung after {phase!r}"
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    kind, what = pipe.recv()
                    if kind == "failed":
                        return f"rank {pipes[pipe]} failed after {phase!r}: {what.strip().splitlines()[-1]}"
                    if kind == "done":
                        told[pipes[pipe]] = what
                        continue
                    phase = what
                    disturb(lab, pipe, phase, seconds)
            for pipe in pipes:
                pipe.send("end")
        except EOFError:
            return f"a worker died after {phase!r}"
        finally:
            for process in processes:
                process.join(5) if len(told) == size else process.kill()
                process.kill()
    return [told[rank] for rank in range(size)]


def disturb(lab: Lab, pipe: Connection, phase: str, seconds: float) -> None:
    """Make the victim's line slow, or cut it, let the victim go on, and mend the line in time."""
    if not seconds:
        pipe.send("go")
    elif phase == "slow":
        lab.set_line(VICTIM, SLOW)
        pipe.send("go")
    else:
        lab.cut(VICTIM)
        pipe.send("go")
        time.sleep(seconds)
        lab.set_line(VICTIM, FAST)
        lab.mend(VICTIM)


def faults(name: str, told: list[dict[str, Any]] | str, undisturbed: list[dict[str, Any]] | str) -> dict[str, str]:
    """Phase -> what was wrong after its cut."""
    if isinstance(told, str) or isinstance(undisturbed, str):
        return {"run": told if isinstance(told, str) else f"undisturbed: {undisturbed}"}
    wrong = {}
    if sum(one["missed"] for one in told):
        wrong["in flight"] = "the messages arrived before the cut"
    if name not in UNORDERED:
        for phase in told[0]["digests"]:
            for rank, (one, other) in enumerate(zip(told, undisturbed, strict=True)):
                if one["digests"][phase] != other["digests"][phase]:
                    wrong[phase] = f"rank {rank} has other bits"
    elif name == "quorum":
        if len({one["digests"]["closing"] for one in told}) != 1:
            wrong["closing"] = "the models differ"
        if any(one["num_dropped"] or one["num_merged"] != told[0]["num_merged"] for one in told):
            wrong["closing"] = f"changes were lost: {told}"
    else:
        mean = {key: sum(one[key] for one in told) / len(told) for key in ("start", "updates", "end")}
        error = float((mean["start"] + mean["updates"] - mean["end"]).abs().max())
        if error > 1e-5:
            wrong["closing"] = f"the mean of the models is off by {error:.1e}"
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 10.0, 30.0], help="lengths of the cuts")
    parser.add_argument("--only", choices=STRATEGIES, nargs="+", help="these strategies alone")
    parser.add_argument("--at-once", type=int, default=len(STRATEGIES), help="runs at the same time")
    options = parser.parse_args()
    os.environ.update(GLOO_SOCKET_IFNAME=INTERFACE, TORCH_CPP_LOG_LEVEL="ERROR")
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    names = options.only or list(STRATEGIES)
    with ThreadPoolExecutor(options.at_once) as pool:
        plain = dict(zip(names, pool.map(lambda name: outcome(name, 0.0), names), strict=True))
        cases = [(name, seconds) for seconds in options.seconds for name in names]
        found = dict(zip(cases, pool.map(lambda case: outcome(*case), cases), strict=True))
    print(*table_head(["strategy", *(f"{seconds:g} s" for seconds in options.seconds)]), sep="\n")
    failures = []
    for name in names:
        cells = []
        for seconds in options.seconds:
            wrong = faults(name, found[name, seconds], plain[name])
            cells.append(f"{len(PHASES)} of {len(PHASES)} phases" if not wrong else ", ".join(wrong))
            failures += [f"{name}, {seconds:g} s, {phase}: {why}" for phase, why in wrong.items()]
        print(table_row([name, *cells]))
    print("", *failures, sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    run_script(main)
