"""Workers of elastic runs, each with a trainer of its own: who comes again takes over the run, and checkpoints go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thinwire.comm import Communicator, ElasticCommunicator, Lighthouse

from .spawn import spawn

STEPS, DIES, SAVES, SIZE, RATE = 12, 5, 6, 3, 0.05
STRATEGIES = [
    "Gradients(Mean(TopK(0.5), ErrorFeedback(), min_ndim=0))",
    "Local(Mean(), every=2, outer=OuterSGD())",
    "Gossip(Mix())",
    "Local(Mean(), every=4, delay=1, alpha=0.5)",
]


class Death(Exception):
    """A worker is gone."""


class Line(nn.Module):
    """A linear model whose loss is a mean of squares."""

    def __init__(self, number: int):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5.0) + number)

    def forward(self, x, labels):
        return {"loss": ((x @ self.weight - labels) ** 2).mean()}


@dataclass
class Part:
    """What one worker does in a part of a run.

    Attributes:
        comm: connects it with the others.
        folder: for checkpoints of all workers.
        strategy: in notation.
        stops: the last step of as many as the schedule is made for.
        at: called at the end of step `DIES`, with the communicator.
        resumes: whether it goes on from its last checkpoint.
    """

    comm: ElasticCommunicator
    folder: Path
    strategy: str
    stops: int = STEPS
    at: Callable[[ElasticCommunicator], None] | None = None
    resumes: bool = False

    @property
    def own_folder(self) -> Path:
        return self.folder / str(self.comm.number)

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(200, 5, generator=torch.Generator().manual_seed(self.comm.number))
        return x, x.sum(1)

    def ended(self, step: int) -> bool:
        """Called at the end of each step; whether training ends."""
        if step == DIES and self.at is not None:
            self.at(self.comm)
        return step == self.stops


def with_transformers(part: Part) -> tuple[list[float], int, list[float]]:
    """Train a worker's model with a Trainer; returns the weights, the steps, and the logged learning rates."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from thinwire.integrations.transformers import AttachStrategy

    class AtStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= part.ended(state.global_step)

    arguments = TrainingArguments(
        str(part.own_folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        optim="sgd",
        save_steps=SAVES,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"x": x, "labels": y} for x, y in zip(*part.data(), strict=True)]
    trainer = Trainer(Line(part.comm.number), arguments, train_dataset=data)
    AttachStrategy(trainer, part.strategy, comm=part.comm)
    trainer.add_callback(AtStep())
    trainer.train(resume_from_checkpoint=part.resumes or None)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    return trainer.model.weight.tolist(), trainer.state.global_step, rates


def with_lightning(part: Part) -> tuple[list[float], int, list[float]]:
    """The same with a Trainer of Lightning, whose steps have two batches each."""
    import lightning.pytorch as pl

    from thinwire.integrations.lightning import AttachStrategy

    rates: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = Line(part.comm.number)

        def training_step(self, batch, index):
            x, y = part.data()  # by the step: a resumed run of Lightning begins its data anew
            rows = slice(8 * self.global_step + 4 * (index % 2), None, None)
            return self.line(x[rows][:4], y[rows][:4])["loss"]

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class AtStep(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index % 2:
                rates.append(trainer.optimizers[0].param_groups[0]["lr"])
                trainer.should_stop |= part.ended(trainer.global_step)

    saved = pl.callbacks.ModelCheckpoint(part.own_folder, "{step}", every_n_train_steps=SAVES, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=2,
        max_steps=STEPS,
        min_epochs=0,
        callbacks=[AttachStrategy(part.strategy, comm=part.comm), AtStep(), saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*part.data()), batch_size=4)
    trainer.fit(module, data, ckpt_path=part.own_folder / f"step={SAVES}.ckpt" if part.resumes else None)
    return module.line.weight.tolist(), trainer.global_step, rates


TRAINERS = {"transformers": with_transformers, "lightning": with_lightning}


def train(trainer: str, address: str, number: int, *args: Any, late: bool = False, **options: Any) -> list[Any]:
    """What a trainer returns of one worker, and how often it was healed, and its communicator.

    Args:
        trainer: by name.
        address: of the Lighthouse.
        number: of the worker.
        late: whether it joins others that train.
    """
    comm = ElasticCommunicator(address, number, SIZE, timeout_seconds=60, is_late=late)
    return [*TRAINERS[trainer](Part(comm, *args, **options)), comm.counts.healings, comm]


def worker(comm: Communicator, trainer: str, strategies: list[str], folder: Path) -> list:
    """What `train` returns for each strategy, where worker 2 dies and comes again; without a stop; and in two parts."""

    def die(elastic):
        comm.barrier()
        elastic._groups.hang_up()
        elastic.close()
        raise Death

    def with_death(address, strategy):
        if comm.rank < 2:
            return train(trainer, address, comm.rank, folder / "death", strategy, at=lambda _: comm.barrier())
        with pytest.raises(Death):
            train(trainer, address, 2, folder / "death", strategy, at=die)
        return train(trainer, address, 2, folder / "death", strategy, late=True)

    def without(address, strategy, where="whole", **options):
        return train(trainer, address, comm.rank, folder / where / strategy, strategy, **options)

    found = []
    for strategy in strategies:
        ways = [with_death]
        if "delay" not in strategy:  # what flies when it saves is sent again
            ways += [
                without,
                *(partial(without, where="parts", **way) for way in ({"stops": SAVES}, {"resumes": True})),
            ]
        for way in ways:
            place = Lighthouse(SIZE, "127.0.0.1") if comm.rank == 0 else None
            address = comm.gather_objects(place and place.address)[0]
            *result, elastic = way(address, strategy)
            found.append(result)
            comm.barrier()
            elastic.close()
            comm.barrier()
            if place is not None:
                place.close()
    return found


def works(trainer: str, strategies: list[str], folder: Path) -> None:
    """Run three workers, and check what they return."""
    run = partial(worker, trainer=trainer, strategies=strategies, folder=folder)
    found = zip(*spawn(SIZE, run), strict=True)
    for strategy in strategies:
        first, second, again = next(found)
        assert [one[1] for one in (first, second, again)] == [STEPS] * 3, strategy
        assert [one[3] for one in (first, second, again)] == [0, 0, 1], strategy
        # It has the schedule of the others, from the step that it took over.
        assert first[2] == second[2] and len(first[2]) == STEPS and again[2] == first[2][DIES:], strategy
        if strategy.startswith("Gradients") or strategy == STRATEGIES[1]:
            assert first[0] == second[0] == again[0], strategy
        if "delay" not in strategy:
            whole, half, resumed = next(found), next(found), next(found)
            assert [one[1] for one in half] == [SAVES] * SIZE, strategy
            for one, same in zip(whole, resumed, strict=True):
                assert (*one[:2], one[2][-SAVES:]) == (*same[:2], same[2][-SAVES:]), strategy
