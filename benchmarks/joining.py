"""How long a worker that joins holds up the others: a model of 100 MB on lines of 100 Mb/s.

    sudo python benchmarks/joining.py [--case CASE] [--megabytes 100] [--line 100mbit]

Three workers train by local updates on hosts of netlab.py; then a fourth joins. A step is a pause and an optimizer's update,
with gradients that are there already, so a round lasts `every` steps and its exchange. The state of the fourth is the model and
the outer optimizer's momentum. It prints how long the others took for each round, in steps beside the usual round. Cases:

    join      nothing else happens
    faults    one of the three sends wrong chunks, and the joiner's line is cut for 3 s in the midst of the transfer
    waiting   the joiner loads all before the round begins, as for strategies with a round in each step
    gradients gradients are averaged in every step, instead of local updates
    hash      only compares the time of the hashes of a model with that of copying it

Needs root, as netlab.py does.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from chaos_worker import enter, serve, started
from netlab import INTERFACE, Lab
from script import run_script
from torch import nn

import thinwire as tw
from thinwire.comm import ElasticCommunicator
from thinwire.comm.elastic.snapshot import Manifest
from thinwire.comm.elastic.state_bytes import packed

WORKERS, JOINER, LIAR, TIMEOUT_SECONDS, CUT_SECONDS = 3, 3, 1, 60.0, 3.0
WARM_ROUNDS, ROUNDS_AFTER = 2, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("join", "faults", "waiting", "gradients", "hash"), default="join")
    parser.add_argument("--megabytes", type=int, default=100, help="of the model's parameters")
    parser.add_argument("--line", default="100mbit")
    parser.add_argument("--every", type=int, default=50, help="steps of a round")
    parser.add_argument("--step", type=float, default=0.4, help="seconds of computation in a step")
    options = parser.parse_args()
    if options.case == "hash":
        print(hash_cost(options.megabytes))
        return
    with Lab(WORKERS + 2, options.line) as lab:
        print("\n".join(table(options, measure(options, lab))))


# ---- the workers ----


def worker(pipe: Connection, address: str, number: int, namespace: str, options: argparse.Namespace) -> None:
    """Train, and tell of each step and round, and of the transfer."""
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    handler = logging.Handler()
    handler.emit = lambda record: pipe.send(("log", time.monotonic(), record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    comm = ElasticCommunicator(address, number, timeout_seconds=TIMEOUT_SECONDS, is_late=number == JOINER)
    side = int((options.megabytes * 1e6 / 4) ** 0.5)
    torch.manual_seed(number)
    model = nn.Linear(side, side, bias=False)
    gradient = torch.randn(side, side) * 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback())
    local = tw.Local(averager, every=options.every, outer=tw.OuterSGD())
    handle: Any = tw.attach(
        model, optimizer, tw.Gradients(averager) if options.case == "gradients" else local, comm=comm
    )
    if number == JOINER:
        tell_of_transfer(pipe, comm, options.case == "waiting")
    if number == LIAR and options.case == "faults":
        lie(comm)
    steps, held = 0, [0.0, 0.0]
    while True:
        began = time.monotonic()
        handle.begin_round()
        held[0] += time.monotonic() - began
        time.sleep(options.step)
        if options.case == "gradients":
            (model.weight * gradient).sum().backward()
        else:
            # Gradients that are there already keep the computation out of the measurement.
            model.weight.grad = gradient
        before, began = comm.counts.committed, time.monotonic()
        pipe.send(("update", began, steps))
        optimizer.step()
        steps += 1
        pipe.send(("step", time.monotonic(), comm.counts.committed))
        if options.case == "gradients" or comm.counts.committed > before:
            held[1] = time.monotonic() - began
            digest = hashlib.sha256(model.weight.detach().numpy()).hexdigest()[:12]
            facts = (comm.counts.committed, comm.size, digest, steps, comm.counts.aborted, *held)
            pipe.send(("round", time.monotonic(), facts))
            steps, held = 0, [0.0, 0.0]


def joined_at(events: dict[int, list[tuple[str, float, Any]]]) -> int:
    """How many rounds worker 0 had ended before the joiner's first one."""
    return sum(what == "round" and facts[1] <= WORKERS for what, _, facts in events[0])


def tell_of_transfer(pipe: Connection, comm: ElasticCommunicator, waits: bool) -> None:
    """Say when the transfer begins, is half done and ends, and what came from where."""
    healing, come = comm._healing, [0]
    record = healing._record
    half = 1e6  # the transfer is under way

    def recorded(sent: int, received: int) -> None:
        if come[0] < half <= come[0] + received:
            pipe.send(("under way", time.monotonic(), None))
        come[0] += received
        record(sent, received)

    def told(what: str, do: Any) -> Any:
        def call(*arguments: Any) -> Any:
            pipe.send((f"{what} begins", time.monotonic(), come[0]))
            result = do(*arguments)
            pipe.send((f"{what} ends", time.monotonic(), come[0]))
            return result

        return call

    healing._record = recorded  # type: ignore[method-assign]
    healing.begin, healing.finish = told("begin", healing.begin), told("finish", healing.finish)  # type: ignore[method-assign]
    if waits:
        healing.shared = {name: shared._replace(is_late=False) for name, shared in healing.shared.items()}


def lie(comm: ElasticCommunicator) -> None:
    """Send a wrong byte in each chunk."""
    answer = comm._healing.snapshots.answer

    def wrong(question: list[bytes]) -> list[bytes]:
        what, *told = answer(question)
        return [what, bytes([told[0][0] ^ 1]) + told[0][1:]] if question[0] == b"chunk" and told else [what, *told]

    comm._healing._listener._answer = wrong


def hash_cost(megabytes: int) -> str:
    """How long the hashes of a state take, beside a copy of it."""
    state, seconds = torch.randn(megabytes * 250_000), {"copy": [], "pack": [], "hash": []}
    for _ in range(7):
        for what, do in (
            ("copy", state.clone),
            ("pack", lambda: packed(state)),
            ("hash", lambda: Manifest.of(packed(state))),
        ):
            began = time.monotonic()
            do()
            seconds[what].append(time.monotonic() - began)
    copy, pack, both = (statistics.median(one) for one in seconds.values())
    times = f"packing {pack / copy:.1f} and with hashes {both / copy:.1f} times as long"
    return f"{megabytes} MB: a copy {1000 * copy:.0f} ms; {times}"


# ---- the run ----


def measure(options: argparse.Namespace, lab: Lab) -> dict[int, list[tuple[str, float, Any]]]:
    """What the workers told, until the joiner has committed some rounds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos_worker", "netlab"])
    lighthouse, pipe = started(context, serve, lab.namespaces[WORKERS + 1], lab.address(WORKERS + 1), {})
    processes, pipes, address = [lighthouse], {}, pipe.recv()
    events: dict[int, list[tuple[str, float, Any]]] = {number: [] for number in range(WORKERS + 1)}
    mend_at = float("inf")

    def start(number: int) -> None:
        process, pipes[number] = started(context, worker, address, number, lab.namespaces[number], options)
        processes.append(process)

    def rounds(number: int) -> int:
        return sum(what == "round" for what, *_ in events[number])

    try:
        for number in range(WORKERS):
            start(number)
        while rounds(JOINER) < 1 + ROUNDS_AFTER or rounds(0) < 1 + joined_at(events) + ROUNDS_AFTER:
            for pipe in wait(list(pipes.values()), 0.1):
                number = next(number for number, known in pipes.items() if known is pipe)
                events[number].append(pipe.recv())  # type: ignore[union-attr]
                if events[number][-1][0] not in ("step", "update", "round"):
                    print(number, events[number][-1], file=sys.stderr, flush=True)
                if options.case == "faults" and events[number][-1][0] == "under way":
                    lab.cut(JOINER)
                    mend_at = time.monotonic() + CUT_SECONDS
            if time.monotonic() > mend_at:
                lab.mend(JOINER)
                mend_at = float("inf")
            warm = sum(what == "round" and facts[1] == WORKERS for what, _, facts in events[0])
            if JOINER not in pipes and warm >= WARM_ROUNDS:
                start(JOINER)
    finally:
        for process in processes:
            process.kill()
    return events


def table(options: argparse.Namespace, events: dict[int, list[tuple[str, float, Any]]]) -> list[str]:
    """Of each round: how long the slowest of the three began it and exchanged, in steps beside the usual rounds."""
    steps = [at for what, at, _ in events[0] if what == "step"]
    step = statistics.median(b - a for a, b in zip(steps, steps[1:], strict=False))
    rounds: dict[int, list[Any]] = {}
    for number in range(WORKERS):
        # Workers that start sooner than the others begin with rounds of their own.
        for facts in (facts for what, _, facts in events[number] if what == "round" and facts[1] >= WORKERS):
            rounds.setdefault(facts[0], []).append(facts)
    joined = min(committed for committed, facts in rounds.items() if facts[0][1] > WORKERS)
    began = statistics.median(held(facts)[0] for committed, facts in rounds.items() if 1 < committed != joined)
    exchanged = {  # it takes longer with more workers
        size: statistics.median(held(f)[1] for n, f in rounds.items() if 1 < n != joined and f[0][1] == size)
        for size in (WORKERS, WORKERS + 1)
    }
    told = {what: (at, came) for what, at, came in reversed(events[JOINER]) if what.endswith(("begins", "ends"))}
    took = told["finish ends"][0] - told["begin begins"][0]
    own = next(facts for what, _, facts in events[JOINER] if what == "round")
    *others, came = (last_update(events[number], joined) for number in range(WORKERS + 1))
    models = {n: {f[2] for w, _, f in sum(events.values(), []) if w == "round" and f[0] == n} for n in rounds}
    lines = [
        f"{options.case}: {told['finish ends'][1] / 1e6:.0f} MB in {took:.1f} s, then {own[3]} of {options.every} steps",
        f"a step {step:.2f} s; a round {began:.2f} s to begin, and {exchanged[WORKERS]:.1f} s to exchange with {WORKERS} "
        f"workers, {exchanged[WORKERS + 1]:.1f} s with one more; equal models: "
        f"{all(len(found) == 1 for found in models.values())}",
        f"the joiner came to its first exchange {(came - max(others)) / step:+.2f} steps after the last of the others",
    ]
    for committed, facts in sorted(rounds.items()):
        usual = (began, exchanged[facts[0][1]])
        begin, exchange = ((one - usually) / step for one, usually in zip(held(facts), usual, strict=True))
        mark = ", joins" if committed == joined else ""
        lines.append(
            f"round {committed}: {facts[0][1]} workers{mark}; begin {begin:+.2f} steps, exchange {exchange:+.2f} steps; "
            f"{facts[0][4]} rounds given up"
        )
    return lines


def last_update(events: list[tuple[str, float, Any]], committed: int) -> float:
    """When a worker came to the exchange of a round."""
    end = next(i for i, (what, _, facts) in enumerate(events) if what == "round" and facts[0] == committed)
    return next(at for what, at, _ in reversed(events[:end]) if what == "update")


def held(facts: list[Any]) -> tuple[float, float]:
    """Seconds of the slowest worker in the begin of a round, and in its exchange."""
    return max(fact[5] for fact in facts), max(fact[6] for fact in facts)


if __name__ == "__main__":
    run_script(main)
