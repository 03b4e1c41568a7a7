"""What dense training would have sent: ring all-reduces of all parameters in every step, of 2 (W-1)/W 4n bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import thinwire as tw
from thinwire.membership import State, nested, shared

WORKERS, STEPS, NUMEL = 4, 12, 6 * 5 + 5


@dataclass(kw_only=True)
class Record(State):
    averager: object = nested()
    num_steps: int = shared(default=0)


class EveryThird(tw.strategy.OwnModelAttachment):
    """As in the guide, "Add a strategy": nothing in it counts steps."""

    call = "Third"

    def attach(self):
        with self._attaching() as comm:
            self._follow(comm)
            self._state = self.averager.init(self._live.tensors(), comm, self._seed)
            self._record = Record(averager=self._state)

    def _after_step(self):
        self._record.num_steps += 1
        if self._record.num_steps % 3 == 0:
            self.averager.step(self._state, self._live.tensors(), self.comm).wait()
            self.averager.commit(self._state)

    def _averaged(self):
        return [(self._state, self._live.tensors())]

    def _finish(self):
        """Nothing is in flight."""

    def _abandon(self, error):
        """Nothing is in flight."""


@dataclass(frozen=True, repr=False)
class Third(tw.strategy.Averaging):
    """Averages parameters after every third step."""

    has_common_steps = False
    rhythm = tw.strategy.Rhythm(every=3)

    def _attached(self, model, optimizer, runtime):
        return tw.strategy.attach_together(model, runtime, lambda: EveryThird(self, model, optimizer, runtime))


def counted(comm, strategy):
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = tw.attach(model, optimizer, strategy, comm=comm)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, 6)).square().mean().backward()
        optimizer.step()
        found.append(handle.ledger.dense_fp32_bytes)
    handle.detach()
    return found


STRATEGIES = [
    tw.Gradients(tw.Mean()),
    tw.Gossip(tw.Mix()),
    tw.Gossip(tw.Mix(), order="adapt_then_combine"),
    tw.Gossip(tw.Mix(), overlap=True),
    tw.Gossip(tw.PushSum(), overlap=True, staleness=3),
    tw.Local(tw.Mean(), every=5),
    tw.Local(tw.Mean(), every=4, delay=2),
    Third(tw.Mean()),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_every_step_counts_once(strategy):
    """Also steps without a round, such as the first one of gossip, whose workers agree, and while a round flies."""
    of_a_step = 2 * (WORKERS - 1) * 4 * NUMEL // WORKERS
    expected = [of_a_step * step for step in range(1, STEPS + 1)]
    assert tw.LocalWorld(WORKERS).run(counted, strategy) == [expected] * WORKERS


def test_a_closure_counts_its_step_once():
    def worker(comm):
        model = torch.nn.Linear(6, 5)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
        handle = tw.attach(model, optimizer, tw.Gossip(tw.Mix()), comm=comm)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        dense = handle.ledger.dense_fp32_bytes
        handle.detach()
        return dense

    assert tw.LocalWorld(2).run(worker) == [4 * 4 * NUMEL] * 2
