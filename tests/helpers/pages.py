"""The blocks of code of a page in Markdown, for tests and scripts that run what the docs show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<file>[^"]+)")?\n(?P<code>.*?)^```', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: the word after the fence, or "".
        file: the name that the page asks to save it under, or None.
        code: its text.
        line: the number of its first line on the page.
    """

    language: str
    file: str | None
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["file"], m["code"], text.count("\n", 0, m.start("code")) + 1)
        for m in FENCE.finditer(text)
    ]


class Following:
    """Runs the Python of a page as a reader would: saves its files, and runs the rest in order, in one namespace.

    Args:
        page: the page.
        folder: where its files are saved.
    """

    def __init__(self, page: Path, folder: Path):
        self.page, self.folder = page, folder
        self.names: dict[str, object] = {"__name__": page.name}

    def run(self, block: Block) -> None:
        """Save or run one block; errors name the line of the page."""
        if block.file:
            (self.folder / block.file).write_text(block.code, encoding="utf-8")
        else:
            exec(compile("\n" * (block.line - 1) + block.code, self.page, "exec"), self.names)
