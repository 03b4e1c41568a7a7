"""The notebook of the guide runs from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.one_core import one_core

TUTORIAL = Path(__file__).parents[1] / "docs" / "guide" / "tutorial.ipynb"


def outputs(notebook, kind):
    """The outputs of this MIME type, or the printed text."""
    found = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    if kind == "text":
        return [out.text for out in found if out.output_type == "stream" and out.name == "stdout"]
    return [out.data[kind] for out in found if kind in out.get("data", {})]


def last_numbers(notebook) -> tuple[float, float]:
    """Of sparse training in 4 bits: how many times fewer bytes, and the accuracy."""
    (table,) = outputs(notebook, "text")
    fewer, accuracy = re.search(r"^sparse, 4 bits .* ([\d.]+) times less .* accuracy ([\d.]+) %", table, re.M).groups()
    return float(fewer), float(accuracy)


def test_the_tutorial_runs_and_shows_what_is_stored(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    stored = nbformat.read(TUTORIAL, as_version=4)
    notebook = nbformat.read(TUTORIAL, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    with one_core():
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(outputs(notebook, "image/png")) == len(outputs(stored, "image/png")) == 3
    assert outputs(notebook, "text/plain")[0] == outputs(stored, "text/plain")[0]  # exact means and bytes
    fewer, accuracy = last_numbers(notebook)
    assert (fewer, accuracy) == (last_numbers(stored)[0], accuracy) and fewer > 15 and accuracy > 85
