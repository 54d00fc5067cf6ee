"""A report as one HTML file that opens without a network."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from multigate.data.optional import optional

from .chart import Chart, Report
from .look import PALETTE
from .plots import plot

THEMES = {
    "light": {
        "page": "#f6f7f9",
        "card": "#ffffff",
        "ink": "#1c2128",
        "quiet": "#57606a",
        "rule": "#d8dde3",
        "grid": "#e6e9ed",
        "link": "#0b5cad",
        "warn": "#fff6e0",
        "warn-rule": "#b07400",
        **{f"c{i}": colour for i, colour in enumerate(PALETTE)},
    },
    "dark": {
        "page": "#0f1318",
        "card": "#171c23",
        "ink": "#e8ebef",
        "quiet": "#a5afbb",
        "rule": "#323a44",
        "grid": "#2a313a",
        "link": "#7cb8ff",
        "warn": "#2b230f",
        "warn-rule": "#d9a03c",
        # The hues of the palette, lighter.
        **{
            f"c{i}": colour
            for i, colour in enumerate(
                (
                    *("#4aa8e8", "#ed8008", "#2a8a6c", "#9d64b8", "#cabd65"),
                    *("#ffb0d0", "#8874ff", "#9f9f9f", "#e0ef3f", "#e3393c"),
                )
            )
        },
    },
}
"""Colours by name: of text and lines, and of number i as `c` i."""


def page(report: Report) -> str:
    """The report as HTML: text, summary table, and every chart as a plotly figure.

    Scripts, styles and data are in it; nothing is loaded from elsewhere. Without JavaScript the
    text and the table remain.
    """
    jinja2 = optional("jinja2", "plot", "the report")
    offline = optional("plotly.offline", "plot", "the report")
    here = Path(__file__).parent
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")
    counted: Iterator[int] = iter(range(1, 1 + sum(len(s.charts) for s in report.sections)))
    return template.render(
        report=report,
        sections=[
            (section.title, [(next(counted), chart, inlined(chart)) for chart in section.charts])
            for section in report.sections
        ],
        right=[_numeric(column) for column in zip(*report.rows, strict=True)],
        themes=THEMES,
        style=jinja2.utils.markupsafe.Markup((here / "page.css").read_text("utf-8")),
        script=jinja2.utils.markupsafe.Markup((here / "page.js").read_text("utf-8")),
        plotly=jinja2.utils.markupsafe.Markup(offline.get_plotlyjs()),
    )


def inlined(chart: Chart) -> str:
    """The figure of a chart as JSON that cannot end the script element it stands in."""
    if not chart.panels:
        return ""
    figure = json.dumps(plot(chart), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return figure.replace("<", "\\u003c")


def _numeric(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers, with or without a unit."""
    said = [cell for cell in cells if cell.strip(" -–")]
    return bool(said) and all(cell.lstrip("+-−")[:1].isdigit() for cell in said)
