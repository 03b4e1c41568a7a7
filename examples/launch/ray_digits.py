"""Ray Train with a thin wire: a worker loop as Ray knows it, and one line of thinwire.

    pip install 'ray[train]'
    python examples/launch/ray_digits.py --workers 2

Ray starts the workers and the process group. The line stands after `prepare_model`, which wraps the model in DDP.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.lab.train.data import Digits
from thinwire.lab.train.models import DigitsNet


def train(config: dict[str, Any]) -> None:
    """One worker: its share of the handwritten digits, for some epochs."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = prepare_model(DigitsNet(24).build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = tw.attach(model, optimizer, config["strategy"])
    (images, labels), (test_images, test_labels) = Digits().splits()
    generator = torch.Generator().manual_seed(0)  # the same order on all workers, who take every n-th
    for epoch in range(config["epochs"]):
        for chosen in torch.randperm(len(images), generator=generator)[rank::size].split(32):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        ray.train.report({"epoch": epoch, "accuracy": accuracy, "bytes_sent": handle.ledger.bytes_sent})
        print(f"rank {rank}, epoch {epoch}: accuracy {accuracy:.4f}, {handle.ledger.bytes_sent:,} bytes sent")
    handle.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--strategy", default="Gradients(Mean(QSGD(bits=4)))")
    options = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs, "strategy": options.strategy},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    ).fit()


if __name__ == "__main__":
    main()
