"""What a configuration check finds before any worker starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import thinwire as tw
from thinwire.lab.recipes import recipes
from thinwire.lab.train import train
from thinwire.lab.train.data.digits import Digits
from thinwire.lab.train.optimize import DGCSGD, Adam, Muon
from thinwire.lab.train.run.check import check_without_data


class Bare(tw.strategy.Attachment):
    """Has what the base asks for, but not what a run needs."""

    ledger, seconds = property(lambda self: None), property(lambda self: {})

    def state_dict(self):
        return {}

    def load_state_dict(self, saved):
        pass

    def detach(self):
        pass


@dataclass(frozen=True, repr=False)
class BareAveraging(tw.strategy.Averaging):
    averager: tw.average.Averager = tw.Mean()

    rhythm = property(lambda self: tw.strategy.Rhythm())

    def _attached(self, model, optimizer, runtime):
        return Bare()


@pytest.mark.parametrize("optimizer", [Adam(undecayed=("layer1.*",)), Muon(), DGCSGD(momentum=0.0)])
def test_optimizers_that_go_with_the_strategy_are_built(optimizer):
    check_without_data(replace(recipes()["digits"].config, workers=2, optimizer=optimizer))


def test_fragments_that_only_the_real_model_has_are_no_mistake():
    check_without_data(recipes()["text-gpt-streaming-diloco"].config)
    named = "Local(Mean(), every=4, fragments=(('conv*',), ('*',)))"
    check_without_data(replace(recipes()["digits"].config, workers=2, strategy=named))


@dataclass(frozen=True)
class NoData(Digits):
    def load(self):
        raise AssertionError("the data are loaded")


@pytest.mark.parametrize(
    "strategy, text",
    [
        ("Gossip(Choco(Exponential()))", r"^Choco\(Exponential\(\)\): .* must not change with time"),
        ("Gradients(Mean(exchange='hierarchical', workers_per_node=3))", "^4 workers cannot form nodes of 3"),
    ],
)
def test_what_does_not_suit_the_number_of_workers_is_refused_before_data_are_loaded(strategy, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        train(replace(recipes()["digits"].config, workers=4, strategy=strategy, data=NoData(), output=tmp_path))


def test_a_strategy_whose_attachment_no_run_can_use_is_refused(monkeypatch):
    monkeypatch.setitem(tw.notation._registered, "BareAveraging", BareAveraging)
    config = replace(recipes()["digits"].config, workers=2, strategy="BareAveraging()")
    with pytest.raises(ValueError, match=r"BareAveraging attaches a Bare, .* derived from .*OwnModelAttachment"):
        check_without_data(config)
