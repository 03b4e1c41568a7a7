"""Workers of elastic runs, each with a Trainer of Transformers: who comes again takes over the run, and checkpoints go on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from thinwire.comm import Communicator, ElasticCommunicator, Lighthouse

from .spawn import spawn

STEPS, DIES, SAVES, SIZE = 12, 5, 6, 3
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


def train(
    address: str, number: int, folder: Path, strategy: str, stops: int = STEPS, at=None, resumes=False, late=False
):
    """Train a worker's model; returns the weights, the steps, how often it was healed, and the logged learning rates.

    Args:
        address: of the Lighthouse.
        number: of the worker.
        folder: for checkpoints of all workers.
        strategy: in notation.
        stops: the last step of as many as the schedule is made for.
        at: called at the end of step `DIES`, with the communicator.
        resumes: whether it goes on from its last checkpoint.
        late: whether it joins others that train.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from thinwire.integrations.transformers import AttachStrategy

    class AtStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == stops
            if state.global_step == DIES and at is not None:
                at(comm)

    arguments = TrainingArguments(
        str(folder / str(number)),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        lr_scheduler_type="linear",
        optim="sgd",
        save_steps=SAVES,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(number))
    trainer = Trainer(Line(number), arguments, train_dataset=[{"x": row, "labels": row.sum()} for row in x])
    comm = ElasticCommunicator(address, number, SIZE, timeout_seconds=60, is_late=late)
    AttachStrategy(trainer, strategy, comm=comm)
    trainer.add_callback(AtStep())
    trainer.train(resume_from_checkpoint=resumes or None)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    return trainer.model.weight.tolist(), trainer.state.global_step, comm.counts.healings, rates, comm


def worker(comm: Communicator, folder: Path) -> list:
    """What `train` returns for each strategy, where worker 2 dies and comes again; without a stop; and in two parts."""

    def die(elastic):
        comm.barrier()
        elastic._groups.hang_up()
        elastic.close()
        raise Death

    def with_death(address, strategy):
        if comm.rank < 2:
            return train(address, comm.rank, folder / "death", strategy, at=lambda _: comm.barrier())
        with pytest.raises(Death):
            train(address, 2, folder / "death", strategy, at=die)
        return train(address, 2, folder / "death", strategy, late=True)

    def without(address, strategy, where="whole", **options):
        return train(address, comm.rank, folder / where / strategy, strategy, **options)

    found = []
    for strategy in STRATEGIES:
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


def works(folder: Path) -> None:
    """Run three workers, and check what they return."""
    found = zip(*spawn(SIZE, partial(worker, folder=folder)), strict=True)
    for strategy in STRATEGIES:
        first, second, again = next(found)
        assert [counts for _, *counts, _ in (first, second, again)] == [[STEPS, 0], [STEPS, 0], [STEPS, 1]], strategy
        # It has the schedule of the others, from the step that it took over.
        assert first[3] == second[3] and len(first[3]) == STEPS and again[3] == first[3][DIES:], strategy
        if strategy.startswith("Gradients") or strategy == STRATEGIES[1]:
            assert first[0] == second[0] == again[0], strategy
        if "delay" not in strategy:
            whole, half, resumed = next(found), next(found), next(found)
            assert [one[1] for one in half] == [SAVES] * SIZE and whole == resumed, strategy
