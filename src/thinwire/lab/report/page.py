"""A report as one self-contained HTML page: figures are inline SVG, and there are no scripts.

It suits small screens (tables scroll sideways, figures shrink), print, and dark mode.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..fields import flat
from .captioned_figures import CaptionedFigure
from .groups import IGNORED
from .runs import Problem, Run
from .tables import Comparison, heads


class Page(NamedTuple):
    """The content of a page.

    Args:
        title: its heading.
        made_by: name and version of the program.
        table: the table of methods; None without runs.
        figures: all figures, including those without data.
        svgs: the SVG file of each figure that has data, by the figure's name.
        runs: all runs that could be read.
        problems: the problems of runs.
    """

    title: str
    made_by: str
    table: Comparison | None
    figures: Sequence[CaptionedFigure]
    svgs: Mapping[str, str]
    runs: Sequence[Run]
    problems: Sequence[Problem]


def as_html(page: Page) -> str:
    """The whole page."""
    parts = [
        f"<h1>{_text(page.title)}</h1>",
        f'<p class="quiet">{_text(_counted(page))}</p>',
        *_problems(page.problems),
        *([_table(page.table)] if page.table else []),
        *(_figure(figure, page.svgs[figure.name]) for figure in page.figures if figure.figure is not None),
        *_left_out(page.figures),
        *_configurations(page.runs),
        f'<p class="quiet">Made by {_text(page.made_by)}.</p>',
    ]
    return _FRAME.format(title=_text(page.title), style=_STYLE, body="\n".join(parts))


def _counted(page: Page) -> str:
    finished = sum(run.finished for run in page.runs)
    said = f"{finished} finished run{'s' * (finished != 1)}"
    unfinished = len(page.runs) - finished
    methods = len(page.table.lines) if page.table else 0
    return said + f" of {methods} method{'s' * (methods != 1)}" + (f", {unfinished} unfinished" if unfinished else "")


def _problems(problems: Sequence[Problem]) -> Iterable[str]:
    if problems:
        items = "".join(f"<li><code>{_text(path)}</code> {_text(text)}</li>" for path, text in problems)
        yield f'<section class="problems"><h2>What is wrong with runs</h2><ul>{items}</ul></section>'


def _table(table: Comparison) -> str:
    head = "".join(f'<th scope="col">{_text(head)}</th>' for head in heads(table))
    body = "".join(
        f'<tr><th scope="row">{_text(line.label)}</th><td>{line.num_runs}</td>'
        + "".join(f"<td>{f'<b>{_text(c.text)}</b>' if c.is_best else _text(c.text)}</td>" for c in line.cells)
        + "</tr>"
        for line in table.lines
    )
    return (
        '<section><h2>Methods</h2><div class="scroll" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        '<p class="quiet">Mean and sample standard deviation over the finished runs of a method, which differ in their seed '
        "alone; the best of a column is bold. MB are 10⁶ bytes; vs fp32 and vs bf16: how many times fewer bytes than a dense "
        "ring all-reduce would have sent; seconds are wall-clock.</p></section>"
    )


def _figure(figure: CaptionedFigure, svg: str) -> str:
    svg = inline_svg(svg, figure.name, figure.title)
    caption = f"<b>{_text(figure.title)}.</b> {_text(figure.caption)}"
    return f'<figure id="{figure.name}"><div class="paper">{svg}</div><figcaption>{caption}</figcaption></figure>'


def inline_svg(svg: str, name: str, title: str) -> str:
    """An SVG file as an element with the width of its container; `name` makes its ids unique on the page."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "Matplotlib writes a viewBox"
    opening = f'<svg {box.group()} role="img" aria-label="{_text(title)}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return opening + svg[svg.index(">") + 1 :]


def _left_out(figures: Sequence[CaptionedFigure]) -> Iterable[str]:
    missing = [figure for figure in figures if figure.figure is None]
    if missing:
        items = "".join(f"<li>{_text(d.title)}: no run has {_text(d.needs)}.</li>" for d in missing)
        yield f"<section><h2>Not drawn</h2><ul>{items}</ul></section>"


def _configurations(runs: Sequence[Run]) -> Iterable[str]:
    """The fields that all runs share, and the fields of each run that differ."""
    if not runs:
        return
    configs = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config if key not in IGNORED - {"seed"}))
    shared = [key for key in keys if len({_value(config, key) for config in configs}) == 1]
    rest = [key for key in keys if key not in shared]
    items = _rows((key, [_value(configs[0], key)]) for key in shared)
    head = "".join(f'<th scope="col">{_text(key)}</th>' for key in ["folder", *rest])
    pairs = zip(runs, configs, strict=True)
    body = _rows((run.folder, [_value(config, key) for key in rest]) for run, config in pairs)
    yield (
        "<section><h2>What was run</h2><details><summary>Runs</summary>"
        f'<div class="scroll" tabindex="0"><table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div></details><details><summary>What their configurations share</summary>"
        f'<div class="scroll" tabindex="0"><table class="plain"><tbody>{items}</tbody></table></div></details></section>'
    )


def _rows(lines: Iterable[tuple[object, list[str]]]) -> str:
    cells = ((first, "".join(f"<td>{_text(cell)}</td>" for cell in rest)) for first, rest in lines)
    return "".join(f'<tr><th scope="row">{_text(first)}</th>{rest}</tr>' for first, rest in cells)


def _value(config: dict[str, Any], key: str) -> str:
    value = config.get(key, "not set")
    return value if isinstance(value, str) else json.dumps(value)


def _text(value: object) -> str:
    return html.escape(str(value))


_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --quiet: #5c5c5c; --line: #ddd; --page: #fff; --warn: #fff4e0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --quiet: #a8a8a8; --line: #444; --page: #181818; --warn: #3a2c10; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 1rem 0 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.quiet, figcaption { color: var(--quiet); font-size: .875rem; }
code { overflow-wrap: anywhere; }
.problems { background: var(--warn); border-radius: 6px; padding: .1rem 1rem; margin-top: 1.5rem; }
.problems h2 { margin-top: .8rem; }
ul { padding-left: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; min-width: 4.5rem; }
th:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 400; white-space: normal; min-width: 11rem; overflow-wrap: anywhere; }
table.plain td { text-align: left; white-space: normal; }
table.plain thead th { text-align: left; }
figure { margin: 2.2rem 0 0; }
figcaption { max-width: 42rem; margin-top: .3rem; }
figcaption b { color: var(--ink); }
.paper { background: #fff; border-radius: 6px; max-width: 38rem; }
.paper svg { display: block; width: 100%; height: auto; }
.paper svg text { font-family: "DejaVu Sans", system-ui, sans-serif !important; }
summary { cursor: pointer; padding: .3rem 0; }
@media (max-width: 30rem) { tbody th { min-width: 8.5rem; } th, td { padding: .35rem .4rem; } thead th { min-width: 3.5rem; } }
@media print {
  body { font-size: 10pt; background: #fff; color: #000; }
  main { max-width: none; padding: 0; }
  figure, tr, .problems { break-inside: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .3rem; }
  .paper { max-width: 14cm; }
}
"""
