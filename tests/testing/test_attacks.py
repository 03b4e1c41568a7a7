"""Attacks of wrong workers: what they send, and that rules bear what the mean does not."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from thinwire.testing import check_robust
from thinwire.testing.attacks import (
    ALIE,
    IPM,
    Attacker,
    Huge,
    LabelFlip,
    LazyCopy,
    Mimic,
    NotFinite,
    Scene,
    SignFlip,
    StaleReplay,
)

HONEST = torch.tensor([[1.0, 4.0], [3.0, 0.0]])
OWN = torch.tensor([5.0, -1.0])


@pytest.mark.parametrize(
    ("attack", "sent"),
    [
        (SignFlip(scale=2.0), [-10.0, 2.0]),
        (ALIE(z=1.5), [2 - 1.5 * math.sqrt(2), 2 - 1.5 * math.sqrt(8)]),  # the deviation of two values, unbiased
        (IPM(epsilon=0.5), [-1.0, -1.0]),
        (Mimic(victim=1), [3.0, 0.0]),
        (LazyCopy(), [3.0, 0.0]),
        (Huge(value=7.0), [7.0, 7.0]),
        (NotFinite(), [math.nan, -1.0]),
        (LabelFlip(), [5.0, -1.0]),
    ],
    ids=repr,
)
def test_an_attack_sends_what_its_equation_says(attack, sent):
    forged = attack.forge(Scene(HONEST, OWN, index=1, num_faulty=2))
    torch.testing.assert_close(forged, torch.tensor(sent), equal_nan=True)


def test_flipped_labels_are_those_from_the_other_end():
    assert LabelFlip().labels(torch.tensor([0, 3, 1]), 4).tolist() == [3, 0, 2]


def test_a_stale_gradient_is_that_of_some_rounds_ago():
    def worker(comm):
        attacker, sent = Attacker(StaleReplay(delay=2), faulty=(0,)), []
        for step in range(4):
            x = torch.tensor([10.0 * step])
            attacker.corrupt([("x", x)], comm)
            sent.append(x.item())
        return sent

    assert tw.LocalWorld(2).run(worker) == [[0.0, 0.0, 0.0, 10.0], [0.0, 10.0, 20.0, 30.0]]


def test_a_rule_bears_every_attack():
    check_robust(tw.Mean(rule=tw.average.Median()), rounds=40)


def test_the_mean_bears_few():
    with pytest.raises(AssertionError) as error:
        check_robust(
            tw.Mean(), [SignFlip(scale=10.0), IPM(epsilon=3.0), NotFinite(), Huge(), Mimic()], rounds=60, bound=0.3
        )
    said = str(error.value)
    assert all(name in said for name in ("SignFlip(scale=10.0)", "IPM(epsilon=3.0)", "NotFinite()", "Huge()"))
    assert "Mimic()" not in said  # copies of an honest worker hardly hurt
