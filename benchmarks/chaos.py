"""Faults in elastic runs, one after the other: who survives, how soon the others notice and go on, and what is lost.

    python benchmarks/chaos.py --faults 200 --seed 0            # processes on this machine
    python benchmarks/chaos.py --faults 40 --seed 0 --lab       # hosts of netlab.py, whose links can fail (root)
    python benchmarks/chaos.py --lab 100mbit,round_trip=100ms,loss=5% --kinds kill NaN "stop for 10 s"

Four workers train a small model, for each configuration in a run of its own. The seed chooses what happens, to whom and in
which phase of a round. After each fault, the victim is started again and the next one waits until all workers have committed
together. A fault is *survived* if

    1. all other workers commit a round within `--limit` seconds,
    2. workers that have committed the same round hold the same bits (averagers with one mean),
    3. no worker goes back to a round that it has committed,
    4. the victim comes back, and all workers commit together,
    5. no block of data is committed twice, and of an epoch that has ended none is left out.

The same seed gives the same faults; which message of a phase they hit depends on timing. `--scale` runs 4 -> 2 -> 6 workers.
With THINWIRE_CREDENTIALS=FOLDER, all of it goes over TLS.
`--train 2` kills workers in runs of `thinwire train digits --elastic` instead (`chaos_train.py`), with two seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from chaos_train import train
from chaos_worker import IN_DDP, IN_SHARDS, NUM_BLOCKS, Fault, serve, started, strategy_of, worker
from netlab import INTERFACE, Lab
from script import run_script
from tables import table_head, table_row

import thinwire as tw
from thinwire.comm import Credentials

WORKERS = 4
PRELOADED = ["thinwire", "torch._dynamo", "netlab", "chaos_worker"]
CONFIGURATIONS = {
    "no memory": "Gradients(Mean(TopK(0.2)))",
    "error feedback": "Gradients(Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback()))",
    "sparse all-reduce": "Gradients(Mean(TopK(0.1), ErrorFeedback(), exchange='sparse_reduce'))",
    "owner memory": "Gradients(Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback(), exchange='scatter_reduce'))",
    "momentum": "Gradients(dgc(0.1))",
    "PowerSGD": "Gradients(PowerSGD(rank=2))",
    "gossip": "Gossip(Mix(Exponential()))",
    "gossip with neighbour state": "Gossip(Choco(Ring(), TopK(0.2)))",
    "DDP": f"{IN_DDP}Gradients(Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback()))",
    "gossip with overlap": "Gossip(Mix(Exponential()), overlap=True)",
    "push-sum with overlap": "Gossip(PushSum(), overlap=True, staleness=2)",
    "local updates": "Local(Mean(TopK(0.2), ErrorFeedback()), every=2)",
    "local updates with delay": "Local(Mean(TopK(0.2), ErrorFeedback()), every=4, outer=OuterSGD(), delay=2, alpha=0.5)",
    "Streaming DiLoCo": "streaming_diloco(every=6, fragments=2, delay=2)",
    "Streaming DiLoCo, always in flight": "streaming_diloco(every=4, fragments=2, delay=3)",
    "averaged states": "Local(Mean(), every=4, fragments=2, state_every={'momentum_buffer': 3})",
    "NoLoCo with delay": "Local(Mix(RandomPairs()), every=4, outer=OuterSGD(), delay=2, alpha=0.5, pull=0.3)",
    "sharded local updates": f"{IN_SHARDS}Local(Mean(TopK(0.2), ErrorFeedback()), every=2, outer=OuterSGD())",
    "sharded gradients": f"{IN_SHARDS}Gradients(Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback()))",
}
PHASES = ("form", "compute", "send", "vote", "checkpoint", "heal")
FAULTS = {  # name -> how often, relative to the others
    "kill": 8,
    "kill two": 2,
    "stop for 10 s": 1,
    "stop for ever": 1,
    "stop one, kill another": 1,
    "NaN": 2,
    "ten times slower": 1,
    "stuck in Python": 1,
    "two stuck in Python": 1,
    "one worker more": 1,
    "Lighthouse restarts": 1,
    "out of descriptors, kill another": 1,
    "out of memory": 1,
    "two join, one dies healing": 1,
    "returns with another averager": 1,
    "returns with another seed": 1,
    "returns with other code": 1,
    "returns with other data": 1,
}
CHANGES: dict[str, dict[str, Any]] = {"seed": {"seed": 1}, "code": {"version": "0.0.1"}, "data": {"data": "other"}}
LAB_FAULTS = {"kill": 2, "link down for 8 s": 3, "link down for ever": 3}


class Outcome(NamedTuple):
    """What became of a fault: seconds, what was reported as lost, and the reason if it was not survived."""

    configuration: str
    fault: Fault
    detected: float | None = None
    committed: float | None = None
    lost: float | None = None
    failure: str = ""


# ---- the run of one configuration ----


class Run:
    """Workers of one configuration, and what they said."""

    def __init__(self, strategy: str, lab: Lab | None = None):
        self.strategy, self.lab = strategy, lab
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Connection] = {}
        self.events: dict[int, list[tuple[str, float, dict[str, Any]]]] = defaultdict(list)
        self.blocks: dict[int, set[tuple[tuple[int, int], ...]]] = defaultdict(set)  # of a round, as workers tell them
        self.epoch = 0
        self.host = "127.0.0.1" if lab is None else lab.address(WORKERS + 1)
        self.port = 0
        self.serve()
        for number in range(WORKERS):
            self.start(number)

    def serve(self) -> None:
        options = {"port": self.port, "join_seconds": 20.0, "credentials": Credentials.from_environment()}
        self.lighthouse, pipe = started(self.context, serve, self.namespace(WORKERS + 1), self.host, options)
        self.address = pipe.recv()
        self.port = int(self.address.rsplit(":", 1)[1])

    def start(self, number: int, strategy: str | None = None, **changed: Any) -> None:
        arguments = (self.address, number, strategy or self.strategy, self.namespace(number), changed)
        self.processes[number], self.pipes[number] = started(self.context, worker, *arguments)
        self.events[number] = []

    def namespace(self, number: int) -> str | None:
        """Of a host, if there is a lab."""
        return None if self.lab is None else self.lab.namespaces[number]

    def kill(self, number: int) -> None:
        self.processes.pop(number).kill()
        self.pipes.pop(number)

    def close(self) -> None:
        for process in [*self.processes.values(), self.lighthouse]:
            process.kill()
            process.join()

    def listen(self, seconds: float = 0.05) -> None:
        """Take in what workers say."""
        for pipe in wait(list(self.pipes.values()), seconds):
            number = next(number for number, known in self.pipes.items() if known is pipe)
            try:
                event = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                self.kill(number)
                continue
            self.events[number].append(event)
            if event[0] == "commit" and event[2]["blocks"]:  # else it was healed, and did not see the round
                self.blocks[event[2]["round"]].add(tuple(map(tuple, event[2]["blocks"])))
                self.epoch = max(self.epoch, event[2]["epoch"])

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.listen()
        return True

    def commits(self, number: int, since: float = 0.0) -> list[tuple[float, dict[str, Any]]]:
        """Times and facts of a worker's commits after a time."""
        return [(at, facts) for kind, at, facts in self.events[number] if kind == "commit" and at > since]

    def together(self, numbers: set[int], since: float) -> bool:
        """Whether all of these have committed a round of just so many workers."""
        return all(any(f["size"] == len(numbers) for _, f in self.commits(n, since)) for n in numbers)

    def differing(self, since: float) -> str:
        """The first round after which living workers held different bits."""
        # Gossip leaves workers with models of their own.
        if not strategy_of(self.strategy).averager.traits.gives_one_mean:
            return ""
        found: dict[int, set[str]] = defaultdict(set)
        for number in self.processes:
            for _, facts in self.commits(number, since):
                found[facts["round"]].add(facts["digest"])
        wrong = sorted(number for number, digests in found.items() if len(digests) > 1)
        return f"different bits after round {wrong[0]}" if wrong else ""

    def going_back(self) -> str:
        """The first worker that committed a round twice since it was started."""
        for number in self.processes:
            rounds = [facts["round"] for _, facts in self.commits(number)]
            if any(b <= a for a, b in zip(rounds, rounds[1:], strict=False)):
                return f"worker {number} has lost rounds"
        return ""

    def uncounted(self) -> str:
        """The first round whose workers disagree about its blocks, or block that was not committed once."""
        disputed = sorted(number for number, told in self.blocks.items() if len(told) > 1)
        if disputed:
            return f"workers disagree about the blocks of round {disputed[0]}: {sorted(self.blocks[disputed[0]])}"
        counts = Counter(block for told in self.blocks.values() for blocks in told for block in blocks)
        ended = {(epoch, number): 0 for epoch in range(self.epoch) for number in range(NUM_BLOCKS)}
        wrong = next((block for block, number in sorted((ended | counts).items()) if number != 1), None)
        return "" if wrong is None else f"block {wrong} was committed {counts[wrong]} times"


def try_fault(run: Run, configuration: str, fault: Fault, limit: float) -> Outcome:
    """Let one fault happen, wait for the others, and bring the victim back."""
    everyone, began = set(run.processes), time.monotonic()
    victim = fault.number
    if not run.wait_until(lambda: run.together(everyone, began), 90):
        return Outcome(configuration, fault, failure="workers did not come together before the fault")
    at = time.monotonic()
    if fault.name == "Lighthouse restarts":
        run.lighthouse.kill()
        run.lighthouse.join()
        time.sleep(1.0)
        run.serve()
        survivors = everyone
    elif fault.name == "one worker more":
        run.start(victim)
        survivors = everyone
    elif fault.name.startswith("link"):
        assert run.lab is not None, "links fail in the lab"
        run.lab.cut(victim)
        survivors = everyone - {victim}
    elif fault.name.startswith("returns"):
        run.kill(victim)
        run.start(victim, **CHANGES.get(fault.name.split()[-1], {"strategy": other_than(run.strategy)}))
        process = run.processes[victim]
        if not run.wait_until(lambda: not process.is_alive(), 60):
            return Outcome(configuration, fault, failure="the victim was let in, or waits")
        at, survivors = time.monotonic(), everyone - {victim}
    elif fault.name == "two join, one dies healing":
        other = (victim + 1) % WORKERS
        for number in (victim, other):
            run.kill(number)
            run.start(number)
        run.pipes[victim].send(("kill", "heal", victim))
        survivors = everyone - {victim, other}
        if not run.wait_until(lambda: victim not in run.processes, 60):
            return Outcome(configuration, fault, failure="the victim was not healed")
        at = time.monotonic()
    else:
        run.pipes[victim].send(tuple(fault))
        other = (victim + 1) % WORKERS
        is_one_of_two = fault.phase == "heal" or any(word in fault.name for word in ("two", "another"))
        if fault.name == "two stuck in Python":
            run.pipes[other].send(tuple(fault))
        if fault.phase == "heal":  # somebody must be healed for it, once the victim has heard of its fault
            run.wait_until(lambda: len(run.commits(victim, at)) > 1, limit)
            run.kill(other)
            run.start(other)
        if not run.wait_until(lambda: any(kind == "fault" for kind, when, _ in run.events[victim] if when >= at), 60):
            return Outcome(configuration, fault, failure="the phase did not come")
        at = max(when for kind, when, _ in run.events[victim] if kind == "fault")
        if fault.name == "kill two" or fault.name.endswith("kill another"):
            run.kill(other)
        harmless = fault.name in ("NaN", "ten times slower")
        survivors = everyone if harmless else everyone - {victim} - ({other} if is_one_of_two else set())
    went_on = run.wait_until(lambda: all(run.commits(number, at) for number in survivors), limit)
    if not went_on:
        silent = [number for number in survivors if not run.commits(number, at)]
        return Outcome(configuration, fault, failure=f"workers {silent} committed nothing in {limit:g} s")
    committed = max(run.commits(number, at)[0][0] for number in survivors) - at
    told = [when - at for n in survivors for kind, when, _ in run.events[n] if kind == "gave up" and when > at]
    failure = restored(run, fault, everyone, at)
    lost = [entry[2] for n in survivors for _, f in run.commits(n, at) for entry in f["lost"] if entry[1] == victim]
    norm = max((value for value in lost if value is not None), default=None)
    failure = failure or run.differing(at) or run.going_back() or run.uncounted()
    return Outcome(configuration, fault, min(told, default=None), committed, norm, failure)


def restored(run: Run, fault: Fault, everyone: set[int], at: float) -> str:
    """Bring the victim back; returns why this failed, or ""."""
    victim = fault.number
    if fault.name.endswith(("10 s", "8 s")):
        time.sleep(max(0.0, at + float(fault.name.split()[-2]) - time.monotonic()))
    if fault.name.startswith("link") and run.lab is not None:
        run.lab.mend(victim)
    if fault.name == "stop for 10 s":
        os.kill(run.processes[victim].pid, signal.SIGCONT)
    if fault.name.endswith(("for ever", "kill another", "of memory")) and victim in run.processes:
        run.kill(victim)
    if "stuck" in fault.name:
        for number in (victim, (victim + 1) % WORKERS)[: 2 if "two" in fault.name else 1]:
            run.kill(number)
    if fault.name.startswith("kill"):  # of a worker of two processes, the other one notices and ends
        run.wait_until(lambda: victim not in run.processes, 30)
    run.listen(0.5)
    if victim in run.processes and not run.processes[victim].is_alive():
        run.kill(victim)
    # Workers that died beside the victim are started again too.
    for number in everyone - set(run.processes):
        run.start(number)
    came_back = time.monotonic()
    if fault.name == "one worker more":
        everyone = everyone | {victim}
        if not run.wait_until(lambda: run.together(everyone, at), 60):
            return "the new worker did not join"
        run.kill(victim)
        everyone, came_back = everyone - {victim}, time.monotonic()
    if fault.name == "ten times slower":
        run.kill(victim)  # it would stay slow
        run.start(victim)
    return "" if run.wait_until(lambda: run.together(everyone, came_back), 90) else "the victim did not come back"


def other_than(strategy: str) -> str:
    """A strategy of the same kind with another averager."""
    changed = {
        tw.Gradients: "Gradients(Mean(TopK(0.3)))",
        tw.Gossip: "Gossip(Mix(Ring()))",
        tw.Local: "Local(Mean(), every=2)",
    }
    return (IN_SHARDS if strategy.startswith(IN_SHARDS) else "") + changed[type(strategy_of(strategy))]


# ---- the table ----


def draw_fault(random_: random.Random, faults: dict[str, int]) -> Fault:
    """Draw a fault."""
    name = random_.choices(list(faults), list(faults.values()))[0]
    phases = {"kill": PHASES, "NaN": PHASES[1:2], "stuck in Python": PHASES[1:3], "two stuck in Python": PHASES[1:3]}
    phases["link down for 8 s"] = PHASES[:4]
    phase = random_.choice(phases.get(name, PHASES[:3]))
    return Fault(name, phase, WORKERS if name == "one worker more" else random_.randrange(WORKERS))


def chaos(
    configuration: str, faults: list[Fault], limit: float, lab: Lab | None, out: Path | None = None
) -> list[Outcome]:
    """The outcomes of these faults, one after the other in one run; each is added to the file `out` at once."""
    outcomes, strategy = [], CONFIGURATIONS[configuration]
    run = Run(strategy, lab)
    try:
        for fault in faults:
            outcome = try_fault(run, configuration, fault, limit)
            outcomes.append(outcome)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(outcome) + "\n")
            mark = outcome.failure or f"committed after {outcome.committed:.1f} s"
            print(f"{configuration:28} {fault.name:20} {fault.phase:10} worker {fault.number}: {mark}", flush=True)
            if outcome.failure:  # begin anew
                run.close()
                if lab is not None:
                    lab.mend(fault.number)
                run = Run(strategy, lab)
    finally:
        run.close()
    return outcomes


def scale(strategy: str) -> str:
    """Run on 4 workers, kill two, and let four join; says how it went.

    Raises:
        RuntimeError: a number of workers was not reached, or bits differ.
    """
    run = Run(strategy)
    try:
        for numbers in (range(4), (2, 3), range(6)):
            for number in set(run.processes) - set(numbers):
                run.kill(number)
            for number in set(numbers) - set(run.processes):
                run.start(number)
            began = time.monotonic()
            if not run.wait_until(partial(run.together, set(numbers), began), 90):
                raise RuntimeError(f"{len(numbers)} workers did not commit together")
            print(f"{len(numbers)} workers committed together after {time.monotonic() - began:.1f} s", flush=True)
        if wrong := run.differing(began):
            raise RuntimeError(wrong)
        return "4 -> 2 -> 6 workers in one run: no error, the same bits"
    finally:
        run.close()


def table(outcomes: list[Outcome], by: Callable[[Outcome], str], title: str) -> list[str]:
    """A table in Markdown, with a row for each kind of outcome."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[by(outcome)].append(outcome)
    lines = table_head([title, "survived", "noticed after (s)", "next commit after (s)", "largest norm lost"])
    for name, found in groups.items():
        survived = sum(not outcome.failure for outcome in found)
        cells = [_seconds([getattr(o, key) for o in found]) for key in ("detected", "committed")]
        lost = max((o.lost for o in found if o.lost is not None), default=None)
        cells.append("-" if lost is None else f"{lost:.2g}")
        lines.append(table_row([name, f"{survived} of {len(found)}", *cells]))
    return lines


def _seconds(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}, at most {max(known):.1f}" if known else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=18, help="number of faults, shared out over the configurations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=40.0, help="seconds within which the others must commit")
    parser.add_argument("--only", choices=CONFIGURATIONS, nargs="+", help="these configurations alone")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS | LAB_FAULTS, help="these faults alone, such as kill NaN")
    parser.add_argument("--at-once", type=int, default=1, help="configurations that run at the same time")
    parser.add_argument(
        "--lab", nargs="?", const="100mbit", metavar="LINE", help="on hosts of netlab.py, whose links fail; needs root"
    )
    parser.add_argument(
        "--scale", action="store_true", help="4 -> 2 -> 6 workers, for the first configuration with memory"
    )
    parser.add_argument(
        "--train", type=int, metavar="SEEDS", help="runs of `thinwire train`, with so many seeds from --seed on"
    )
    parser.add_argument("--out", type=Path, help="append each outcome to this file, as JSON")
    parser.add_argument(
        "--table", type=Path, nargs="*", help="only print the tables of what --out wrote to these files"
    )
    options = parser.parse_args()
    if options.table:
        print("\n".join(report([outcome for path in options.table for outcome in _read(path)])))
        return 0
    os.environ.update(MASTER_ADDR="127.0.0.1", RUST_LOG="error")
    if options.train:
        return int(train(range(options.seed, options.seed + options.train), options.only, options.out) > 0)
    if options.scale:
        print(scale(CONFIGURATIONS["error feedback"]))
        return 0
    kinds = LAB_FAULTS if options.lab else FAULTS
    if options.kinds is not None:
        known = FAULTS | LAB_FAULTS | kinds
        kinds = {name: known[name] for name in options.kinds}
    configurations = options.only or list(CONFIGURATIONS)
    draws = random.Random(options.seed)
    drawn = [(configurations[i % len(configurations)], draw_fault(draws, kinds)) for i in range(options.faults)]
    outcomes: list[Outcome] = []
    with Lab(WORKERS + 2, options.lab) if options.lab else contextlib.nullcontext() as lab:
        if lab is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        shares = {c: [fault for name, fault in drawn if name == c] for c in configurations}
        with ThreadPoolExecutor(1 if options.lab else options.at_once) as pool:
            runs = [
                pool.submit(chaos, c, faults, options.limit, lab, options.out) for c, faults in shares.items() if faults
            ]
            for found in runs:
                outcomes += found.result()
    print("\n".join(report(outcomes)))
    return int(any(outcome.failure for outcome in outcomes))


def _read(path: Path) -> list[Outcome]:
    return [Outcome(c, Fault(*f), *rest) for c, f, *rest in map(json.loads, path.read_text().splitlines())]


def report(outcomes: list[Outcome]) -> list[str]:
    """The tables, by fault and by configuration, and the failures."""
    lines = table(outcomes, lambda o: f"{o.fault.name}, {o.fault.phase}", "fault, phase")
    lines += ["", *table(outcomes, lambda o: o.configuration, "configuration"), ""]
    return lines + [
        f"not survived: {o.configuration}: {o.fault.name}, {o.fault.phase}, worker {o.fault.number}: {o.failure}"
        for o in outcomes
        if o.failure
    ]


if __name__ == "__main__":
    run_script(main)
