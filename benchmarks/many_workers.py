"""Many workers: what a sparse all-reduce sends and what it costs in accuracy, beside an all-gather of the same codec.

    python benchmarks/many_workers.py bytes      payloads sent by a worker, 2 to 64 workers, random and real gradients
    python benchmarks/many_workers.py accuracy   the digits on 8 workers, three seeds

Workers are threads of this process; the ledger counts what a network would carry. Each part prints a table and writes it
into docs/benchmarks.md, between two markers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import mean

import torch
from script import existing_folder, run_script
from studies import digit_accuracy, digit_batches, digits, trained
from tables import DOCS, publish, spread, table_head, table_row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.lab.recipes.digits import digits as digits_recipe
from thinwire.lab.train.models import DigitsNet

NUMEL, RATIO = 1_000_000, 0.01
SIZES = (2, 4, 8, 16, 32, 64)
CODECS = {"TopK(0.01)": tw.TopK(RATIO), "TopK(0.01), 4 bits": tw.chain(tw.TopK(RATIO), tw.QSGD(bits=4))}
EXCHANGES = ("all_gather", "sparse_reduce")
WORKERS, SEEDS, BATCH_SIZE, EPOCHS = 8, (0, 1, 2), 16, 30


# ---- bytes ----


def study_bytes() -> list[str]:
    """Mean and largest of the workers, in payloads of the codec."""
    rows = table_head(["codec", "gradients", *(f"W = {size}" for size in SIZES)])
    for label, codec in CODECS.items():
        for kind, gradient in {"random": random_gradient, "real": real_gradients()}.items():
            cells = []
            for size in SIZES:
                sent = [
                    n / codec.nbytes(NUMEL) for n in tw.LocalWorld(size, 600.0).run(bytes_of_a_step, codec, gradient)
                ]
                cells.append(f"{mean(sent):.2f} ({max(sent):.2f})")
                print(label, kind, size, cells[-1], flush=True)
            rows.append(table_row([f"`{codec}`", kind, *cells]))
    return rows


def bytes_of_a_step(comm: tw.comm.Communicator, codec: tw.codec.Codec, gradient: Callable[[int], Tensor]) -> int:
    """What a worker sends in the first round."""
    x = gradient(comm.rank).clone()
    averager = tw.Mean(codec, tw.ErrorFeedback(), exchange="sparse_reduce", min_ndim=0)
    state = averager.init([("x", x)], comm)
    # `init` has sent fingerprints, which are no part of a round.
    before = comm.ledger.snapshot()
    averager.step(state, [("x", x)], comm).wait()
    return comm.ledger.since(before).bytes_sent


def random_gradient(rank: int) -> Tensor:
    """Normal numbers, another draw on each worker."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def real_gradients() -> Callable[[int], Tensor]:
    """The gradients of a network for the digits, `NUMEL` elements of it, each worker from 16 images of its own."""
    images, labels = digits()[0]
    torch.manual_seed(0)
    model = DigitsNet(width=106).build()
    gradients = []
    for batch in torch.randperm(len(labels)).split(16)[: max(SIZES)]:
        model.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])[:NUMEL])
    assert gradients[0].numel() == NUMEL
    return lambda rank: gradients[rank]


# ---- accuracy ----


def study_accuracy() -> list[str]:
    """Test accuracy of each codec with each exchange, and what a worker sends."""
    rows = table_head(["codec, with `ErrorFeedback()`", "exchange", "test accuracy", "MB sent by a worker"])
    codec = tw.TopK(RATIO)
    for exchange in EXCHANGES:
        averager = tw.Mean(codec, tw.ErrorFeedback(), exchange=exchange)
        results = []
        for seed in SEEDS:
            results.append(train(averager, seed))
            print(averager, seed, results[-1], flush=True)
        percents, sent = zip(*results, strict=True)
        accuracy = f"{spread(percents, '.1f')} %"
        rows.append(table_row([f"`{codec}`", f"`{exchange}`", accuracy, f"{mean(sent) / 1e6:.2f}"]))
    return rows


def train(averager: tw.average.Averager, seed: int) -> tuple[float, float]:
    """Test accuracy in per cent after the digits recipe, and the mean of the bytes that workers sent."""
    torch.manual_seed(seed)
    model = DigitsNet().build()
    results = tw.LocalWorld(WORKERS, 600.0).run(train_worker, model, averager, seed)
    return results[0][0], mean(sent for _, sent in results)


def train_worker(
    comm: tw.comm.Communicator, model: nn.Module, averager: tw.average.Averager, seed: int
) -> tuple[float, int]:
    """One worker's share of the digits recipe."""
    batches = list(digit_batches(comm.rank, comm.size, seed, EPOCHS, BATCH_SIZE))
    model, ledger = trained(comm, model, digits_recipe().optimizer, tw.Gradients(averager), seed, batches)
    return digit_accuracy(model), ledger.bytes_sent


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["bytes", "accuracy"])
    parser.add_argument("--docs", type=existing_folder, default=DOCS, help="folder of benchmarks.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {"bytes": study_bytes, "accuracy": study_accuracy}[options.study]()
    publish(options.docs / "benchmarks.md", f"many workers, {options.study}", rows)


if __name__ == "__main__":
    run_script(main)
