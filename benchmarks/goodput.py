"""What unequal workers get done together: asynchronous local updates beside synchronous ones and DDP.

    python benchmarks/goodput.py
    python benchmarks/goodput.py --workers 4 --slow 3 --step-seconds 0.05 --batches 1200
    python benchmarks/goodput.py --quota 0.4 --kill-seconds 20 --batches 3600            # root

Processes over Gloo train a classifier on data that a random network has labelled. A sleep stands for most of a step's
computation, so that a machine of few cores can hold several workers; the last worker sleeps `--slow` times as long. With
`--quota`, workers compute instead: each has a cgroup that gives it this part of a core, the last one `--slow` times less. What
it does to communicate counts too. Every method trains on the same number of batches, added up over workers. Reported are

    alone       batches a second that all workers make together without any communication, which is what they could do
    goodput     batches a second whose changes are merged, over those alone
    loss        of the final model, on data that no worker has seen
    lost        the rest of what they could do, by cause: "rounds" is the time in which they begin rounds, and are healed;
                "exchange" that in which they exchange and wait for others; "not merged" are steps whose changes no round has
                merged; "slower" is what is left, such as slower steps and those that were under way when a worker died

With `--kill-seconds`, a worker gets SIGKILL every so many seconds: the ranks 2, 1, 0, and again. DDP and synchronous local
updates then run in elastic rounds, and a killed worker is started again at once. With a quorum it does not come back, and
workers are killed as long as others can go on. What the workers could do is added up while they live: from when a process is
ready until it dies.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from script import run_script
from torch import nn
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.comm import ElasticCommunicator, Lighthouse
from thinwire.lab.bench.rows import as_parsed
from thinwire.strategy import Strategy

EVERY = 30
METHODS = ("asynchronous", "synchronous", "DDP")
PERIOD_SECONDS = 0.01  # in which a worker may compute for its part of a core
SHARES = 1 << 18  # of processor time, so that other work on the machine disturbs little
END_SECONDS = 20.0  # after the first worker's end, those that have just come back need not end
COUNTS = ("steps", "rounds", "exchange", "merged")
"""Of a worker: steps; seconds in which it began rounds; seconds of backward pass, exchange and step; merged batches of all."""


class Measured(NamedTuple):
    """What a run of one method has shown.

    Attributes:
        facts: what each worker that reached the end reports, by rank.
        counts: (W) dictionaries of `COUNTS`, over all processes of a rank.
        alive: seconds for which each worker lived.
        seconds: from the first step to the first worker's end.
        num_kills: how many got SIGKILL.
    """

    facts: dict[int, dict[str, Any]]
    counts: list[dict[str, float]]
    alive: list[float]
    seconds: float
    num_kills: int


def network(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))


def batch(teacher: nn.Module, seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, teacher(x).argmax(1)


# ---- a worker ----


def limit(group: Path, cores: float) -> None:
    """Give this process a part of a core, by a cgroup of its own."""
    microseconds = [round(1e6 * PERIOD_SECONDS * part) for part in (cores, 1)]
    group.mkdir()
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text("{} {}".format(*microseconds))
    else:  # version 1
        (group / "cpu.cfs_period_us").write_text(str(microseconds[1]))
        (group / "cpu.cfs_quota_us").write_text(str(microseconds[0]))
        (group / "cpu.shares").write_text(str(SHARES))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def group_of(pid: int) -> Path:
    """The cgroup of a worker's process."""
    old = Path("/sys/fs/cgroup/cpu")
    return (old if old.exists() else Path("/sys/fs/cgroup")) / f"goodput-{pid}"


def compute(seconds: float) -> None:
    """Use so much processor time, without Python's lock."""
    matrix, end = torch.ones(128, 128), time.thread_time() + seconds
    while time.thread_time() < end:
        torch.mm(matrix, matrix)


def is_elastic(options: argparse.Namespace, method: str) -> bool:
    return bool(options.kill_seconds) and method in ("DDP", "synchronous")


def work(
    rank: int, options: argparse.Namespace, method: str, place: str, shared: Any, results: Any, is_late: bool
) -> None:
    """Train, and report the facts; `place` is the Lighthouse's address or a file where workers meet."""
    torch.set_num_threads(1)
    slowness = options.slow if rank == options.workers - 1 else 1
    if options.quota:
        limit(group_of(os.getpid()), options.quota / slowness)
    comm = ElasticCommunicator(place, rank, is_late=is_late) if is_elastic(options, method) else None
    if comm is None:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=options.workers)
    teacher, model = network(64, 1000), network(options.width, options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    strategies = {"DDP": "Gradients(Mean())", "synchronous": options.synchronous, "asynchronous": options.asynchronous}
    handle: Any = None
    if method != "alone":
        handle = tw.attach(model, optimizer, strategies[method], comm=comm)
    if comm is not None and method == "DDP":
        comm.share("optimizer", optimizer.state_dict, optimizer.load_state_dict)
    per_step = None if method == "asynchronous" else options.workers
    sampler = tw.ElasticSampler(options.batches, handle, per_step) if handle is not None else None

    def count(name: str, amount: float) -> None:
        shared[rank * len(COUNTS) + COUNTS.index(name)] += amount

    def step(number: int) -> None:
        x, y = batch(teacher, 10**6 * (options.seed + 1) + 10**4 * number + rank, 32)
        if options.quota:
            compute(options.step_seconds * options.quota)
        else:
            time.sleep(options.step_seconds * slowness)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        began = time.perf_counter()
        loss.backward()
        optimizer.step()
        count("exchange", time.perf_counter() - began)
        count("steps", 1)

    def merged() -> int:
        """Batches of all workers that rounds have merged."""
        assert sampler is not None
        open_blocks = 0 if method == "asynchronous" else options.workers
        return options.batches if sampler.epoch else sampler.num_assigned - open_blocks

    def train() -> None:
        began, steps = time.perf_counter(), 0
        if sampler is None:
            while time.perf_counter() - began < options.alone_seconds:
                step(steps := steps + 1)
            return
        has_steps = comm is None and method != "asynchronous"
        while sampler.num_assigned < options.batches if has_steps else not sampler.epoch:
            if method != "asynchronous":
                began = time.perf_counter()
                handle.begin_round()
                count("rounds", time.perf_counter() - began)
                sampler.per_step = handle.comm.size
            if blocks := sampler.take():
                step(blocks[0].number)
            else:  # the others have the last ones
                handle.synchronize()
            shared[rank * len(COUNTS) + COUNTS.index("merged")] = merged()

    if comm is None:
        dist.barrier()
    results.put((rank, os.getpid(), None))
    train()
    facts = {"late": 0, "dropped": 0}
    if handle is not None:
        if comm is None and method != "DDP":
            handle.synchronize()
        if method == "asynchronous":
            facts |= {"late": handle.committed.num_late, "dropped": handle.committed.dropped_tokens}
        handle.detach()
        x, y = batch(teacher, 7, 16384)
        with torch.no_grad():
            facts["loss"] = cross_entropy(model(x), y).item()
    results.put((rank, os.getpid(), facts))
    if not options.kill_seconds:
        dist.destroy_process_group()


# ---- all workers ----


@contextlib.contextmanager
def meeting_place(elastic: bool) -> Iterator[str]:
    """Where workers meet."""
    if not elastic:
        with tempfile.TemporaryDirectory() as folder:
            yield f"{folder}/store"
        return
    lighthouse = Lighthouse(2, "127.0.0.1", join_seconds=20.0)
    yield lighthouse.address
    lighthouse.close()


def measure(options: argparse.Namespace, method: str) -> Measured:
    """Run the workers of a method to the end, and kill some on the way."""
    with meeting_place(is_elastic(options, method)) as place:
        return _Workers(options, method, place).run()


class _Workers:
    """The processes of one method."""

    def __init__(self, options: argparse.Namespace, method: str, place: str):
        self.options, self.method, self.place = options, method, place
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["thinwire", "torch._dynamo", "numpy"])
        self.results = self.context.Queue()
        self.shared = self.context.Array("d", len(COUNTS) * options.workers, lock=False)
        self.processes: dict[int, Any] = {}
        self.pids: set[int] = set()
        self.ready: dict[int, float] = {}
        self.alive = [0.0] * options.workers
        self.facts: dict[int, dict[str, Any]] = {}
        doomed = [2, 1, 0][: options.workers - 2]
        if not options.kill_seconds or method == "alone":
            doomed = []
        # Without elastic rounds a killed worker stays away, so each is killed once.
        self.doomed = doomed if method == "asynchronous" else doomed * 100
        self.num_kills = 0

    def run(self) -> Measured:
        everyone = range(self.options.workers)
        for rank in everyone:
            self._start(rank)
        while len(self.ready) < self.options.workers:
            self._listen(120.0)
        began = time.perf_counter()
        self.ready = dict.fromkeys(self.ready, began)
        end = began + self.options.most_seconds
        while not self.facts and time.perf_counter() < end:
            due = end
            if self.num_kills < len(self.doomed):
                due = min(end, began + self.options.kill_seconds * (self.num_kills + 1))
            if not self._listen(max(0.0, due - time.perf_counter())) and due < end:
                self._kill(self.doomed[self.num_kills])
        seconds = time.perf_counter() - began
        while self.facts and self.processes.keys() - self.facts.keys() and self._listen(END_SECONDS):
            pass
        for rank in list(self.ready):
            self._ended(rank)
        for process in self.processes.values():
            process.join(1.0 if self.facts else 0.0)
            process.kill()
            process.join()
        for pid in self.pids if self.options.quota else ():
            group_of(pid).rmdir()
        size = len(COUNTS)
        counts = [dict(zip(COUNTS, self.shared[size * rank : size * (rank + 1)], strict=True)) for rank in everyone]
        return Measured(self.facts, counts, self.alive, seconds, self.num_kills)

    def _start(self, rank: int, is_late: bool = False) -> None:
        arguments = (rank, self.options, self.method, self.place, self.shared, self.results, is_late)
        self.processes[rank] = self.context.Process(target=work, args=arguments)
        self.processes[rank].start()
        self.pids.add(self.processes[rank].pid)

    def _listen(self, seconds: float) -> bool:
        """Take in what a worker says; False if there is nothing for so long."""
        try:
            rank, pid, facts = self.results.get(timeout=seconds)
        except queue.Empty:
            return False
        if pid != self.processes[rank].pid:
            return True  # it was killed just then
        if facts is None:
            self.ready[rank] = time.perf_counter()
        else:
            self.facts[rank] = facts
            self._ended(rank)
        return True

    def _ended(self, rank: int) -> None:
        if rank in self.ready:
            self.alive[rank] += time.perf_counter() - self.ready.pop(rank)

    def _kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes.pop(rank).join()
        self._ended(rank)
        self.num_kills += 1
        if is_elastic(self.options, self.method):
            self._start(rank, is_late=True)


def report(options: argparse.Namespace, method: str, alone: Measured, found: Measured) -> str:
    """Goodput, loss, and what was lost, of a method."""
    rates = [one["steps"] / seconds for one, seconds in zip(alone.counts, alone.alive, strict=True)]
    own = [one["exchange"] / one["steps"] for one in alone.counts]  # backward pass and step, without others
    could = [rate * seconds for rate, seconds in zip(rates, found.alive, strict=True)]
    steps = [one["steps"] for one in found.counts]
    done = max(one["merged"] for one in found.counts)
    rounds = sum(rate * one["rounds"] for rate, one in zip(rates, found.counts, strict=True))
    exchange = sum(
        rate * (one["exchange"] - one["steps"] * seconds)
        for rate, one, seconds in zip(rates, found.counts, own, strict=True)
    )
    lost = {"rounds": rounds, "exchange": exchange, "not merged": sum(steps) - done}
    lost["slower"] = sum(could) - done - sum(lost.values())
    last = found.facts[max(found.facts)] if found.facts else {"loss": float("nan"), "late": 0, "dropped": 0}
    line = f"{method:13} {done / found.seconds:6.1f} batches/s  goodput {done / sum(could):.2f}"
    shares = ", ".join(f"{name} {amount / sum(could):.2f}" for name, amount in lost.items())
    alive = "/".join(f"{seconds:.1f}" for seconds in found.alive)
    return (
        f"{line}  loss {last['loss']:.4f}  steps {'/'.join(f'{n:.0f}' for n in steps)}  {found.num_kills} killed\n"
        f"    {done:.0f} batches in {found.seconds:.1f} s, alive {alive} s; late {last['late']}, dropped {last['dropped']}; "
        f"lost: {shares}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=3.0, help="how many times as long the last worker's steps take")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--quota", type=float, default=0.0, help="part of a core of each worker; 0 => steps sleep")
    parser.add_argument("--batches", type=int, default=1200, help="of all workers together")
    parser.add_argument("--alone-seconds", type=float, default=8.0)
    parser.add_argument("--kill-seconds", type=float, default=0.0, help="between two kills; 0 => nobody is killed")
    parser.add_argument(
        "--most-seconds", type=float, default=300.0, help="a method that takes longer ends without a loss"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--synchronous", default=f"diloco(every={EVERY})")
    parser.add_argument("--asynchronous", default=f"asynchronous_diloco(every={EVERY})")
    options = parser.parse_args()
    for text in (options.synchronous, options.asynchronous):  # a wrong one is found before the workers start
        as_parsed(text, Strategy)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("RUST_LOG", "error")
    alone = measure(options, "alone")
    could = sum(one["steps"] / seconds for one, seconds in zip(alone.counts, alone.alive, strict=True))
    text = f"{options.workers} workers, one {options.slow:g} times slower"
    print(f"{text}: {could:.1f} batches a second alone", flush=True)
    for method in options.methods:
        print(report(options, method, alone, measure(options, method)), flush=True)


if __name__ == "__main__":
    run_script(main)
