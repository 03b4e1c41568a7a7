"""The library's own strategies pass the suite that authors of other packages run; a strategy with a fault does not."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

import thinwire as tw
from thinwire.strategy.nonfinite import NonfiniteSteps, first_nonfinite
from thinwire.testing import check_strategy


@pytest.mark.parametrize(
    "strategy",
    [
        tw.Gradients(tw.Mean(tw.chain(tw.TopK(0.1), tw.QSGD(bits=4)), tw.ErrorFeedback())),
        tw.Gradients(tw.Mean(rule=tw.average.Median())),
        tw.Local(tw.Mean(tw.QSGD(bits=4)), every=4, outer=tw.OuterSGD(momentum=0.9)),
        tw.Local(tw.Mean(), every=4, fragments=2, delay=1),
        tw.Gossip(tw.Choco(tw.Ring(), tw.QSGD(bits=4)), overlap=True),
        tw.Gossip(tw.PushSum(tw.Exponential())),
    ],
    ids=repr,
)
def test_strategies_keep_the_contract(strategy):
    check_strategy(strategy)


def test_strategies_whose_workers_wait_for_no_round_keep_the_contract():
    check_strategy(tw.Asynchronous())
    check_strategy(tw.strategy.asynchronous_diloco(every=4), sizes=(2,))


class Updates(tw.strategy.Attachment):
    """Averages weights every three steps."""

    def __init__(self, strategy, model, optimizer, runtime):
        self.tensors = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.strategy, self.optimizer = strategy, optimizer
        self.comm, self.num_steps = runtime.comm, 0
        self.agree()
        self.state = tw.Mean().init(self.tensors, self.comm)
        self._nonfinite = NonfiniteSteps("Weights", strategy.on_nonfinite, strategy.max_nonfinite)
        before, after = (lambda *_: self.before_step()), (lambda *_: self.after_step())
        self.hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    ledger = property(lambda self: self.comm.ledger)
    seconds = property(lambda self: self.state.clock.seconds)

    def agree(self):
        self.comm.check_agreement(self.strategy.options())

    def before_step(self):
        culprit = first_nonfinite([(name, t.grad) for name, t in self.tensors])
        self.act(self._nonfinite.record(culprit is None), culprit)

    def act(self, action, culprit):
        if action == "raise":
            raise self._nonfinite.error(culprit)
        if action == "skip":
            self.optimizer.zero_grad()

    def after_step(self):
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            self.average(self.tensors)

    def average(self, tensors):
        tw.Mean().step(self.state, tensors, self.comm).wait()
        tw.Mean().commit(self.state)

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, saved):
        self.num_steps = saved["num_steps"]

    def detach(self):
        for hook in self.hooks:
            hook.remove()


class Idle(Updates):
    def after_step(self):
        pass


class Blind(Updates):
    def average(self, tensors):
        super().average([(name, t.detach().clone()) for name, t in tensors])


class Uncounted(Updates):
    ledger = property(lambda self: self.own)

    def agree(self):
        super().agree()
        self.own = tw.comm.Ledger(self.comm.size)

    def average(self, tensors):
        super().average(tensors)
        self.own.record("all_reduce", 1, 100 * self.comm.rank + 100, 100)


class Inventing(Uncounted):
    def average(self, tensors):
        super().average(tensors)
        self.own.record("all_reduce", 0, 0, 1000)


class Uncounting(Updates):
    ledger = property(lambda self: tw.comm.Ledger(self.comm.size))


class Equal(Updates):
    models_differ = False


class Forgetful(Updates):
    def state_dict(self):
        return {"num_steps": 0}


class Busy(Updates):
    def state_dict(self):
        self.average(self.tensors)
        return super().state_dict()


class Drawing(Updates):
    def after_step(self):
        torch.rand(1)
        super().after_step()


class Counting(Updates):
    numbers = itertools.count()

    def after_step(self):
        super().after_step()
        with torch.no_grad():
            self.tensors[0][1].add_(1e-3 * next(self.numbers))


class Overflowing(Updates):
    def average(self, tensors):
        super().average(tensors)
        with torch.no_grad():
            self.tensors[0][1].fill_(float("inf"))


class Trusting(Updates):
    def before_step(self):
        pass


class Silent(Updates):
    num_skipped = 0


class Lenient(Updates):
    def act(self, action, culprit):
        super().act("skip" if action == "raise" else action, culprit)


class Unlike(Updates):
    def agree(self):
        pass


class Clinging(Updates):
    def detach(self):
        pass


class Doubling(Updates):
    def detach(self):
        super().detach()
        if self.hooks:
            self.hooks = []
            self.tensors[0][1].register_hook(lambda gradient: 2 * gradient)


@tw.notation.register
@dataclass(frozen=True, repr=False)
class Weights(tw.strategy.Strategy):
    fault: str = ""

    def _attached(self, model, optimizer, runtime):
        kinds = {kind.__name__: kind for kind in (*Updates.__subclasses__(), Inventing)}
        kinds |= {"": Updates, "Nothing": lambda *_: None}
        return kinds[self.fault](self, model, optimizer, runtime)


@tw.notation.register
@dataclass(frozen=True, repr=False)
class Commits(Weights):
    counts_commits = True


def test_a_strategy_of_another_package_keeps_the_contract():
    check_strategy(Weights())


@pytest.mark.parametrize(
    "fault, message",
    {
        "Nothing": "attach returns an Attachment, got NoneType",
        "Uncounting": "the ledgers count no bytes in 8 steps",
        "Idle": "after 8 steps models are",
        "Blind": "after 8 steps models are",
        "Uncounted": "the ledgers count 600 bytes sent and 400 received",
        "Equal": "2 workers: the model of rank 1 has other bits than that of rank 0",
        "Busy": "a second run, which saves nothing, ends with other bits",
        "Counting": "a second run, which saves nothing, ends with other bits",
        "Forgetful": "a run that goes on before step 4 ends with other bits",
        "Drawing": "touched the global random state",
        "Overflowing": "2 workers: a parameter of rank 0 is not finite",
        "Trusting": "a NaN in a gradient of rank 1 reached the model of rank 0",
        "Silent": "one step was not finite, and num_skipped is 0",
        "Lenient": "a step that is not finite is no error",
        "Unlike": "rank 0 accepts workers with other strategies",
        "Clinging": "bytes were sent in 8 steps after detach",
        "Doubling": "after detach the gradient of 'scale' is not the worker's own",
    }.items(),
)
def test_a_fault_is_named(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_strategy(Weights(fault), sizes=(2,))


def test_messages_to_workers_that_hung_up_need_not_be_received_under_a_quorum():
    check_strategy(Commits("Uncounted"), sizes=(2,))
    with pytest.raises(AssertionError, match="the ledgers count 600 bytes sent and 4400 received"):
        check_strategy(Commits("Inventing"), sizes=(2,))


def test_a_strategy_that_is_none_is_refused():
    with pytest.raises(AssertionError, match="expected an instance of a strategy, derived from Strategy, got Mean"):
        check_strategy(tw.Mean())
    with pytest.raises(ValueError, match="steps must be an integer, 5 or more, got 4"):
        check_strategy(tw.Asynchronous(), steps=4)
