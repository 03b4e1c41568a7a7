"""A report as one self-contained HTML page: figures are inline SVG, and there are no scripts.

It suits small screens (tables scroll sideways, figures shrink), print, and dark mode. The template is `page.html`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

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
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    finished = sum(run.finished for run in page.runs)
    return environment.get_template("page.html").render(
        page=page,
        finished=finished,
        unfinished=len(page.runs) - finished,
        num_methods=len(page.table.lines) if page.table else 0,
        heads=heads(page.table) if page.table else [],
        missing=[figure for figure in page.figures if figure.figure is None],
        svg=inline_svg,
        **_configurations(page.runs),
    )


def inline_svg(svg: str, name: str, title: str) -> Markup:
    """An SVG file as an element with the width of its container; `name` makes its ids unique on the page."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "Matplotlib writes a viewBox"
    opening = f'<svg {box.group()} role="img" aria-label="{escape(title)}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return Markup(opening + svg[svg.index(">") + 1 :])


def _configurations(runs: Sequence[Run]) -> dict[str, Any]:
    """The fields that all runs share, and the fields of each run that differ."""
    configs = [dict(flat(run.config)) for run in runs]
    # Seeds tell no methods apart, but readers look for them.
    keys = list(dict.fromkeys(key for config in configs for key in config if key not in IGNORED - {"seed"}))
    shared = {key: _value(configs[0], key) for key in keys if len({_value(config, key) for config in configs}) == 1}
    differing = [key for key in keys if key not in shared]
    values = [[_value(config, key) for key in differing] for config in configs]
    return {"shared": shared, "differing": differing, "configs": list(zip(runs, values, strict=True))}


def _value(config: dict[str, Any], key: str) -> str:
    value = config.get(key, "not set")
    return value if isinstance(value, str) else json.dumps(value)
