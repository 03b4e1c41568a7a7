"""Handwritten digits with Accelerate: workers that send a tenth of the gradient in 4 bits.

torchrun --nproc-per-node 2 examples/trainers/accelerate_digits.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed, tqdm
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.accelerate import attach, log
from thinwire.integrations.numbers import summary


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--strategy", default="Gradients(Mean(chain(TopK(0.1), QSGD(bits=4)), ErrorFeedback()))")
    parser.add_argument("--output", default="runs/accelerate")
    parser.add_argument("--resume", help="folder of the checkpoint to continue")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=options.output)
    accelerator.init_trackers("digits")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    strategy = attach(accelerator, model, optimizer, options.strategy)
    if options.resume:
        accelerator.load_state(options.resume)

    step, bar = 0, tqdm(total=options.epochs * len(loader))
    for epoch in range(options.epochs):
        strategy.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            bar.update()
            if step % 10 == 0:
                log(accelerator, strategy, {"loss": loss.item()}, step, bar)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.save_state(options.output)
    accelerator.print(summary(strategy))
    strategy.detach()
    accelerator.end_training()


if __name__ == "__main__":
    main()
