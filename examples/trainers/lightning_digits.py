"""Handwritten digits with Lightning: two workers that send a tenth of the gradient in 4 bits.

python examples/trainers/lightning_digits.py
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning import AttachStrategy


class Digits(pl.LightningModule):
    """A perceptron for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--strategy", default="Gradients(Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback()))")
    parser.add_argument("--output", default="runs/lightning")
    parser.add_argument("--resume", help="checkpoint to continue")
    options = parser.parse_args()

    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=options.epochs,
        default_root_dir=options.output,
        logger=CSVLogger(options.output),
        log_every_n_steps=10,
        callbacks=[AttachStrategy(options.strategy)],
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True), ckpt_path=options.resume)
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"loss {metrics['loss']:.4f}, {metrics['thinwire/fewer_than_fp32']:.1f} times less than fp32")


if __name__ == "__main__":
    main()
