"""The tables of the studies in benchmarks/, and the pages that they go into."""

from __future__ import annotations

import math

import cifar
import studies
import torch
from tables import publish, table_head, table_row
from torch import nn

from thinwire.comm import LocalWorld
from thinwire.lab.report import Run
from thinwire.lab.train.optimize import SGD, LearningRateSchedule


def test_the_table_of_cifar10_names_each_strategy_whole():
    summary = {"final": {"test_accuracy": 0.5}, "bytes_sent_per_worker": 2e6, "dense_fp32_bytes": 8e6}
    (*_, line) = cifar.table([Run("4 bits", summary, [])])
    assert line == "| 4 bits | `Gradients(Mean(QSGD(bits=4)))` | 50.00% |  | 2.00 | 4.0 x |"


def test_only_the_named_part_of_a_page_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a: begin (command) -->\nold\n<!-- a: end -->\n<!-- b: begin -->\n<!-- b: end -->\n")
    publish(page, "a", [*table_head(["x"]), table_row([1])])
    expected = "before\n<!-- a: begin (command) -->\n| x |\n|---|\n| 1 |\n<!-- a: end -->\n<!-- b: begin -->\n<!-- b: end -->\n"
    assert page.read_text() == expected


def test_a_study_trains_as_a_plain_loop_does():
    """One worker, with a decayed learning rate and momentum, against the loop of PyTorch's documentation."""
    settings = SGD(0.5, weight_decay=0.0, nesterov=False, schedule=LearningRateSchedule(warmup_fraction=0.0))
    torch.manual_seed(0)
    initial = nn.Linear(3, 2)
    batches = [((torch.randn(4, 3),), torch.randint(2, (4,))) for _ in range(5)]
    (model, _), *_ = LocalWorld(1).run(
        lambda comm: studies.trained(comm, initial, settings, "Gradients(Mean())", 0, batches)
    )
    optimizer = torch.optim.SGD(initial.parameters(), lr=0.5, momentum=0.9)
    for step, ((inputs,), labels) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 0.25 * (1 + math.cos(math.pi * step / len(batches)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(initial(inputs), labels).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, initial.weight)
