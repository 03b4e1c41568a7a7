"""What a trainer's worker takes over when it joins an elastic run: steps and schedules, each counted once."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import torch

from thinwire.integrations.elastic import ElasticState


def test_steps_that_a_joiner_leaves_out_are_counted_once():
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule, by_epoch = (torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10) for _ in range(2))
    comm = SimpleNamespace(num_skipped=3, share=lambda *parts, **options: lambda: None)
    steps = [4]
    state = ElasticState(
        Mock(models_differ=True), comm, [optimizer], [schedule, by_epoch], [schedule], lambda: steps[-1], steps.append
    )
    optimizer.step()
    for _ in range(2):  # twice for two batches of one step
        state.begin_step()
        assert steps[-1] == 7 and (schedule.last_epoch, by_epoch.last_epoch) == (3, 0)


def test_a_joiner_takes_over_steps_and_schedules():
    shared = {}
    comm = SimpleNamespace(share=lambda name, save, load, **options: shared.setdefault(name, (save, load)))

    def worker(steps):
        counted = [steps]
        optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=1.0, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
        for _ in range(steps):
            optimizer.step()
            schedule.step()
        shared.clear()
        schedules, strategy = [schedule], Mock(models_differ=False)
        ElasticState(strategy, comm, [optimizer], schedules, schedules, lambda: counted[-1], counted.append)
        # What `share` has returned ends it, with the strategy.
        assert [call.args[0] for call in strategy._on_detach.call_args_list] == list(shared.values())
        return counted, schedule, dict(shared)

    _, _, theirs = worker(4)
    counted, schedule, own = worker(0)
    for name, (save, _) in theirs.items():
        own[name][1](save())
    assert counted[-1] == 4 and schedule.last_epoch == 4 and schedule.optimizer.param_groups[0]["lr"] == 0.6
