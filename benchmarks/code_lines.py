"""Lines of code by package.

    python benchmarks/code_lines.py [src/thinwire]

Blank lines, docstrings, comments and imports do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from script import existing_folder, run_script

SOURCES = Path(__file__).parents[1] / "src" / "thinwire"
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines that hold code.

    Example:
        >>> code_lines('import os\\n\\nx = 1  # one\\n')
        1
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=existing_folder, default=SOURCES)
    root = parser.parse_args().folder
    counts: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        package = path.relative_to(root).parts[:-1] or (path.name,)
        counts["/".join(package[:2] if package[0] == "lab" else package[:1])] += code_lines(path.read_text())
    for package, count in sorted(counts.items()):
        print(f"{count:7,} {package}")
    print(f"{sum(counts.values()):7,} in all")


if __name__ == "__main__":
    run_script(main)
