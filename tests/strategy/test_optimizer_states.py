"""`state_every`: states of the inner optimizer are averaged where all workers have them, and nobody waits for a state."""

from __future__ import annotations

import pytest
import torch
from helpers.spawn import run_threads, spawn
from torch import nn

import thinwire as tw

SHAPES = {"a": (3, 4), "b": (2, 5)}


class RowSums(torch.optim.Optimizer):
    """Keeps sums of gradients over rows: a state in another shape than its parameter, made in the first step."""

    def __init__(self, parameters, dtype=torch.float32, key="rows"):
        super().__init__(parameters, {"dtype": dtype, "key": key})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = self.state[p].setdefault(group["key"], torch.zeros(len(p), dtype=group["dtype"]))
                    rows.add_(p.grad.sum(1).to(rows.dtype))


class Attached:
    """A worker whose gradients are given: all ones times `value`, of the parameters named."""

    def __init__(self, comm, optimizer=RowSums, key="rows", scaled=False, every=1):
        self.keys = key if isinstance(key, tuple) else (key,)
        self.model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        self.optimizer = optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000) if scaled else None
        strategy = tw.Local(tw.Mean(), 1000, state_every=dict.fromkeys(self.keys, every))
        self.handle = tw.attach(self.model, self.optimizer, strategy, comm=comm, scaler=self.scaler)

    def step(self, value, names=("a", "b")):
        """The states after a step: the first element of each, None where there is none."""
        value *= 1.0 if self.scaler is None else self.scaler.get_scale()
        for name, p in self.model.items():
            p.grad = torch.full(SHAPES[name], value) if name in names else None
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.scale(torch.zeros(()))  # as before a backward pass
            self.scaler.step(self.optimizer)
            self.scaler.update()
        states = [self.optimizer.state.get(p, {}).get("rows") for p in self.model.values()]
        return [None if rows is None else rows[0].item() for rows in states]

    def collectives(self):
        return {name: one.calls for name, one in self.handle.ledger.collectives.items()}


def skips_its_first_step(comm, scaled):
    worker = Attached(comm, scaled=scaled)
    return [worker.step(float("inf") if comm.rank == 1 and step == 0 else 1 + 2 * comm.rank) for step in range(3)]


# The rows of a and b have 4 and 5 elements. Worker 0 has (4, 5) alone. Then the means are ((4 + 4) + 12) / 2 = 10 and 12.5,
# and each step adds (1 + 3) / 2 = 2 for each element.
FIRST = [[[4, 5], [10, 12.5], [18, 22.5]], [[None, None], [10, 12.5], [18, 22.5]]]


@pytest.mark.parametrize("scaled", [True, False], ids=["by its scaler", "by Local"])
@pytest.mark.filterwarnings("ignore:Local. a step was not finite")
def test_nobody_waits_for_a_worker_that_skipped_its_first_step(scaled):
    assert run_threads(2, skips_its_first_step, scaled) == FIRST


def test_nor_do_processes():
    assert spawn(2, skips_its_first_step, True) == FIRST


def test_a_parameter_without_a_gradient_on_one_worker_keeps_its_states():
    def work(comm):
        worker = Attached(comm)
        names = ("a", "b") if comm.rank == 0 else ("a",)
        return [worker.step(1 + 2 * comm.rank, names) for _ in range(2)] + [worker.step(1 + 2 * comm.rank)]

    # Worker 1 has its first state of b in step 3, when worker 0 has 3 x 5: the mean is (15 + 15) / 2.
    assert run_threads(2, work) == [[[8, 5], [16, 10], [24, 15]], [[8, None], [16, None], [24, 15]]]


def test_a_state_that_is_lost_later_is_averaged_again_once_all_have_it():
    def work(comm):
        worker = Attached(comm)
        found = [worker.step(1 + 2 * comm.rank)]
        if comm.rank == 1:
            worker.optimizer.state.clear()
        found += [worker.step(1 + 2 * comm.rank, ("a", "b") if comm.rank == 0 else ())]
        return found + [worker.step(1 + 2 * comm.rank) for _ in range(2)]

    kept, lost = run_threads(2, work)
    assert kept == [[8, 10], [12, 15], [14, 17.5], [22, 27.5]]
    assert lost == [[8, 10], [None, None], [14, 17.5], [22, 27.5]]


def test_rounds_in_which_all_have_the_same_states_compare_them_in_a_few_bytes():
    def work(comm):
        worker, counts = Attached(comm, every=2), []
        for _ in range(6):
            before, sent = worker.collectives(), worker.handle.ledger.bytes_sent
            worker.step(1)
            calls = {name: n - before.get(name, 0) for name, n in worker.collectives().items()}
            counts.append(({name: n for name, n in calls.items() if n}, worker.handle.ledger.bytes_sent - sent))
        return counts

    states = 4 * (SHAPES["a"][0] + SHAPES["b"][0])
    found = run_threads(2, work)
    assert [[calls for calls, _ in one] for one in found] == 2 * [3 * [{}, {"check_agreement": 1, "all_reduce": 1}]]
    sums = [sum(sent) for sent in zip(*[[sent for _, sent in one] for one in found], strict=True)]
    assert sums == 3 * [0, 2 * (states + 32)]


def test_all_states_of_a_step_travel_together():
    def work(comm):
        worker = Attached(comm, optimizer=torch.optim.Adam, key=("exp_avg", "exp_avg_sq"))
        before = worker.collectives()
        worker.step(1 + comm.rank)
        means = [
            worker.optimizer.state[p][key].flatten()[0].item() for p in worker.model.values() for key in worker.keys
        ]
        return {name: n - before.get(name, 0) for name, n in worker.collectives().items()}, means

    for calls, means in run_threads(2, work):
        assert calls["check_agreement"] == calls["all_reduce"] == 1
        assert means == pytest.approx(2 * [0.15, 0.0025])


@pytest.mark.parametrize(
    ("optimizer", "key", "message"),
    [
        (lambda comm: RowSums, "row", r"state_every names 'row', and the states of RowSums are \['rows'\]"),
        (
            lambda comm: lambda p: RowSums(p, torch.float64 if comm.rank else torch.float32),
            "rows",
            r"for parameter 'a' it is float32 \(3,\) on rank 0; float64 \(3,\) on rank 1; use the same RowSums on all",
        ),
        (
            lambda comm: lambda p: RowSums(p, torch.int64),
            "rows",
            r"which RowSums keeps for parameter 'a' as int64 \(3,\); only tensors of floating point have a mean",
        ),
    ],
    ids=["unknown", "differs", "integers"],
)
def test_what_cannot_be_averaged_is_one_error_on_all_workers(optimizer, key, message):
    def work(comm):
        worker = Attached(comm, optimizer(comm), key, scaled=True)
        with pytest.raises(ValueError, match=message):
            worker.step(float("inf") if comm.rank == 1 and key == "row" else 1)
        return True

    assert run_threads(2, work) == [True, True]
