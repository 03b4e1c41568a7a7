"""Time to the same loss on a long line: methods over our own connections, beside Gloo.

    python benchmarks/time_to_loss.py                                    # `ocean`, under ten minutes; root
    python benchmarks/time_to_loss.py --line continent --only DDP Gossip

The GPT, its text and its batches are those of internet.py, in a smaller size. First each method trains on threads, without a
line, until the mean model's loss on held-out text is at most `--loss`; this gives its number of steps. Then it takes as many
steps on hosts of netlab.py, once over our connections and once over Gloo, each time on new connections. The time counts from
the first step until all workers have taken the last one. In each step a sleep stands for most of the computation, so that a
machine of few cores can hold all hosts. DDP is PyTorch's, on the backend "thinwire" or "gloo".
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from internet import GPT, Text, loss_of, tested, windows
from lines import LINES
from netlab import Lab
from script import run_script
from tables import table_head, table_row

import thinwire as tw
from thinwire.comm import Communicator, LocalWorld

METHODS = {
    "DDP": "Gradients(Mean())",
    "4 bits": "Gradients(Mean(QSGD(bits=4), ErrorFeedback()))",
    "Streaming DiLoCo": "streaming_diloco(every=10, fragments=2, delay=2)",
    "Gossip": "Gossip(Mix(Exponential()), overlap=True)",
}
CONTEXT, BATCH, RATE = 64, 8, 3e-3
TEST_EVERY, MOST_STEPS = 5, 1000
TEST = argparse.Namespace(test_windows=512, context=CONTEXT)


class Worker:
    """The model, its optimizer and its batches: the same at the start on all workers, but for the batches.

    Args:
        rank: which batches are its own.
        sleep: seconds of each step that stand for computation.
    """

    def __init__(self, rank: int, text: Text, sleep: float = 0.0):
        torch.manual_seed(0)
        self.model = GPT(layers=2, width=96, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, (0.9, 0.95), weight_decay=0.1)
        self.rank, self.text, self.sleep, self.steps = rank, text, sleep, 0

    def step(self, model: torch.nn.Module) -> None:
        """One step; `model` is our own or DDP around it."""
        generator = torch.Generator().manual_seed(1000 * self.steps + self.rank)
        starts = torch.randint(len(self.text.learn) - CONTEXT, (BATCH,), generator=generator)
        time.sleep(self.sleep)
        self.optimizer.zero_grad()
        loss_of(model, windows(self.text.learn, starts, CONTEXT)).backward()
        self.optimizer.step()
        self.steps += 1


def search(comm: Communicator, strategy: str, text: Text, goal: float) -> int:
    """The number of steps after which the loss is low enough."""
    worker = Worker(comm.rank, text)
    with tw.attach(worker.model, worker.optimizer, strategy, comm=comm) as handle:
        while worker.steps < MOST_STEPS:
            worker.step(worker.model)
            if worker.steps % TEST_EVERY == 0:
                with handle.average_model():
                    if tested(worker.model, text.test, comm, TEST) <= goal:
                        return worker.steps
    raise ValueError(f"{strategy} does not reach a loss of {goal} in {MOST_STEPS} steps; give a higher --loss")


def measured(method: str, transport: str, steps: int, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of so many steps on the line, and the loss after them."""
    with Lab(options.hosts, options.line, congestion="cubic") as lab:
        numbers = [str(n) for n in (steps, options.sleep, options.files)]
        command = [sys.executable, __file__, "--worker", method, transport, *numbers]
        seconds, loss = lab.ask(command)
    return seconds, loss


def work(method: str, transport: str, steps: str, sleep: str, files: str, file: str) -> None:
    """One host."""
    import thinwire.comm.backend  # noqa: F401
    from thinwire.comm.transport import connect

    torch.set_num_threads(1)
    dist.init_process_group("thinwire" if (method, transport) == ("DDP", "tcp") else "gloo")
    worker = Worker(dist.get_rank(), Text.read(int(files), torch.device("cpu")), float(sleep))
    with connect(transport) as comm:  # type: ignore[arg-type]
        model: Any = worker.model
        if method == "DDP":
            model, attached = torch.nn.parallel.DistributedDataParallel(model), nullcontext()
        else:
            attached = tw.attach(model, worker.optimizer, METHODS[method], comm=comm)
        with attached as handle:
            comm.barrier()
            began = time.perf_counter()
            while worker.steps < int(steps):
                worker.step(model)
            # Steps whose messages are under way are not done yet.
            if handle:
                handle.settle()
            comm.barrier()
            seconds = time.perf_counter() - began
            with handle.average_model() if handle else nullcontext():
                loss = tested(worker.model, worker.text.test, comm, TEST)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps([seconds, loss]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line", default="ocean", choices=list(LINES))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--loss", type=float, default=3.05, help="nats per byte to reach (default 3.05; 5.5 at first)")
    parser.add_argument("--sleep", type=float, default=0.2, help="seconds of a step that stand for computation")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--files", type=int, default=300, help="read about so many files of text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = Text.read(options.files, torch.device("cpu"))
    parameters = sum(p.numel() for p in Worker(0, text).model.parameters())
    print(f"{parameters:,} parameters, {options.hosts} hosts, {options.line}, CUBIC, loss {options.loss:g}\n")
    names = "method|steps|sleep alone, s|ours, s|Gloo, s|loss, ours|loss, Gloo|load"
    print(*table_head(names.split("|")), sep="\n", flush=True)
    for method in options.only:
        steps = LocalWorld(options.hosts, 600.0).run(search, METHODS[method], text, options.loss)[0]
        ours, gloo = (measured(method, transport, steps, options) for transport in ("tcp", "gloo"))
        cells = [f"{steps * options.sleep:.0f}", f"{ours[0]:.1f}", f"{gloo[0]:.1f}", f"{ours[1]:.3f}", f"{gloo[1]:.3f}"]
        print(table_row([method, steps, *cells, f"{os.getloadavg()[0]:.0f}"]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        run_script(main)
