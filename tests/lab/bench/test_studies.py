"""The tables of the studies in benchmarks/, and the pages that they go into."""

from __future__ import annotations

import cifar
from tables import publish, table_head, table_row

from thinwire.lab.report import Run


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
