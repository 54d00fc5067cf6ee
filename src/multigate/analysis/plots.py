"""Charts as plotly figures in plain data; `page.js` gives them their theme and their places.

A colour is the name of one of the page's own ("c3" is number 3, "c3-soft" the same, faint).
"""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import look
from .chart import Bars, Boxes, Chart, Heat, Line, Panel
from .running import Array

SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up", "triangle-down"),
    *("cross", "x", "triangle-left", "triangle-right", "pentagon"),
)
MOST = 2000
"""Points of a line; longer ones are thinned."""

Trace = dict[str, Any]


def plot(chart: Chart) -> dict[str, Any]:
    """`data` and `layout` of a plotly figure, and `panels`, `columns` and `keys` to arrange it."""
    shared = {axis: look.alike(chart.panels, axis) for axis in ("x", "y")}
    layout: dict[str, Any] = {
        "hovermode": "closest" if look.heats(chart.panels) else "x unified",
        **_bars_of_colour(chart.panels),
    }
    data: list[Trace] = []
    panels = []
    for i, panel in enumerate(chart.panels):
        suffix = str(i + 1) if i else ""
        alike = {
            axis: [other for k, other in enumerate(chart.panels) if first[k] == first[i]]
            for axis, first in shared.items()
        }
        for axis, made in zip("xy", _axes(panel, alike["x"], alike["y"]), strict=True):
            layout[f"{axis}axis{suffix}"] = made
            if shared[axis][i] < i:
                made["matches"] = f"{axis}{shared[axis][i] + 1}" if shared[axis][i] else axis
        step = look.x_range(alike["x"])[0]
        traces = [] if look.empty(panel) else _traces(panel, step, list(look.heats(chart.panels)))
        data += [trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"} for trace in traces]
        panels.append(_note(panel))
    keys: dict[str, str] = {}
    for trace in data:
        group = trace.get("legendgroup", "")
        trace["showlegend"] = bool(group) and group not in keys
        if group:
            keys.setdefault(group, trace["name"])
    if len(keys) < 2:
        layout["showlegend"] = False
    return {
        "data": data,
        "layout": layout,
        "panels": panels,
        "columns": look.columns(len(panels)),
        "keys": [len(name) for name in keys.values()] if len(keys) > 1 else [],
    }


def _note(panel: Panel) -> dict[str, Any]:
    """What is written over and into a panel."""
    rows = [look.names(mark.y) for mark in panel.marks if isinstance(mark, Heat)]
    values = [end for mark in panel.marks for end in look.extent(mark, panel.log_y)]
    end = min(values) if panel.log_y and values else max(map(abs, values), default=1)
    tick = f"{end:.0f}0" if end >= 1 else f"{end:.1g}0"
    note = {
        "title": panel.title,
        "x": panel.x,
        "y": panel.y,
        "empty": look.empty(panel),
        "letters": max((len(name) for names in rows for name in names), default=len(tick)),
        "cells": max((len(mark.x) for mark in panel.marks if isinstance(mark, Heat)), default=0),
        "endless": [
            number(place)
            for mark in panel.marks
            if isinstance(mark, Bars)
            for place, value in zip(mark.x, mark.y, strict=True)
            if value == np.inf
        ],
        "missing": [
            [number(place), text(mark.missing)]
            for mark in panel.marks
            if isinstance(mark, Bars) and mark.missing
            for place, value in zip(mark.x, mark.y, strict=True)
            if np.isnan(value)
        ],
    }
    return {key: value for key, value in note.items() if value}


def _axes(
    panel: Panel, like_x: Sequence[Panel], like_y: Sequence[Panel]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The axes of a panel, with the ranges of the panels that have the same."""
    x: dict[str, Any] = {}
    y: dict[str, Any] = {}
    if look.empty(panel):
        return {"visible": False}, {"visible": False}
    heat = next((mark for mark in panel.marks if isinstance(mark, Heat)), None)
    if heat is not None:
        for axis, labels in ((x, heat.x), (y, heat.y)):
            shown = [text(name) for name in look.names(labels)]
            every = [shown[k] for k in look.thinned(len(shown), look.TICKS)]
            axis |= {"type": "category", "tickvals": every, "showgrid": False, "zeroline": False}
        if any(isinstance(label, str) for label in heat.y):
            y["autorange"] = "reversed"
        return x, y
    x["unifiedhovertitle"] = {"text": f"{text(panel.x)} %{{x}}"}
    x["range"] = numbers(look.x_range(like_x)[1:], 9)
    if ticks := look.ticks(like_x):
        x["tickvals"] = ticks
    ends = np.array(look.y_range(like_y))
    if panel.log_y:
        y |= {"type": "log", **_decades(np.log10(ends))}
    y["range"] = numbers(np.log10(ends) if panel.log_y else ends, 6)
    return x, y


def _decades(ends: Array) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 of a short log axis, at whole decades of a long one."""
    wide = ends[1] - ends[0]
    if wide > 2:
        return {"dtick": max(1, int(wide // 6)), "tickformat": "~g"}
    tens = 10.0 ** np.arange(np.floor(ends[0]), np.ceil(ends[1]))
    return {"tickvals": numbers(np.outer(tens, (1, 2, 5)).ravel())}


def _traces(panel: Panel, step: float, units: list[str]) -> list[Trace]:
    found: list[Trace] = []
    for mark in panel.marks:
        match mark:
            case Line():
                found.append(_line(mark, panel.log_y))
            case Bars():
                found.append(_bars(mark, panel, step))
            case Boxes():
                found += _boxes(mark, panel, step)
            case Heat() if mark.unit in units:
                found.append(_heat(mark, panel, units.index(mark.unit)))
    return found


def _line(line: Line, log: bool) -> Trace:
    x, y = thin(look.shown(line.x), look.shown(line.y, log))
    marked = (line.points or len(y) <= look.MARKED) and not line.dashed
    return _named(line.label, line.colour, line.dashed) | {
        "type": "scatter",
        "mode": "markers" if line.points else "lines+markers" if marked else "lines",
        "x": numbers(x, 9),
        "y": numbers(y),
        "line": {
            "color": _colour(line.colour),
            "width": 2,
            "dash": "dash" if line.dashed else "solid",
        },
        "marker": {
            "color": _colour(line.colour),
            "symbol": SYMBOLS[line.colour % len(SYMBOLS)],
            "size": 7 if line.points else 5,
        },
        # Points lie far apart, and hovering finds one from some way off: it says where it is.
        "hovertemplate": "%{y:.4~g} at %{x}" if line.points else "%{y:.4~g}",
    }


def _bars(bars: Bars, panel: Panel, step: float) -> Trace:
    wide, aside = _room(bars, panel, step)
    trace = _named(bars.label, bars.colour) | {
        "type": "bar",
        "width": number(0.94 * wide),
        "offset": number(aside - 0.47 * wide),
        "x": numbers(bars.x, 9),
        "y": numbers(look.shown(bars.y, panel.log_y)),
        "marker": {"color": _colour(bars.colour), "opacity": int(look.strength(panel), 16) / 255},
        "hovertemplate": "%{y:.4~g}",
    }
    if bars.notes:
        trace |= {"customdata": [text(note) for note in bars.notes]}
        trace |= {"hovertemplate": "%{customdata}<extra></extra>"}
    return trace


def _boxes(boxes: Boxes, panel: Panel, step: float) -> list[Trace]:
    """The boxes, the largest values beyond them, and what hovering says of both."""
    wide, aside = _room(boxes, panel, step)
    drawn = look.whiskers(boxes.boxes, panel.log_y)
    there = np.isfinite(drawn[:, 0])
    drawn, known = drawn[there], np.array(boxes.boxes, dtype=np.float64)[there]
    x = look.shown(boxes.x)[there]
    name, colour = _named(boxes.label, boxes.colour), _colour(boxes.colour)
    parts = ("lowerfence", "q1", "median", "q3", "upperfence")
    box = name | {part: numbers(drawn[:, i]) for i, part in enumerate(parts)}
    box |= {"type": "box", "x": numbers(x + aside, 9), "width": number(0.75 * wide)}
    box |= {"line": {"color": colour, "width": 1.3}, "fillcolor": f"{colour}-soft"}
    box |= {"hoverinfo": "skip", "whiskerwidth": 0.6}
    dots = name | {"type": "scatter", "mode": "markers"}
    beyond = dots | {"x": numbers(x + aside, 9), "y": numbers(drawn[:, 5]), "hoverinfo": "skip"}
    beyond |= {"marker": {"color": colour, "symbol": "circle-open", "size": 6}}
    said = dots | {"x": numbers(x, 9), "y": numbers(drawn[:, 2])}
    said |= {"marker": {"color": colour, "opacity": 0}}
    said |= {"customdata": [numbers(row) for row in known]}
    said["hovertemplate"] = (
        "median %{customdata[2]:.3~g}, mean %{customdata[5]:.3~g}"
        "<br>quartiles %{customdata[1]:.3~g} to %{customdata[3]:.3~g}"
        "<br>least %{customdata[0]:.3~g}, largest %{customdata[4]:.3~g}"
    )
    return [box, beyond, said]


def _room(mark: Bars | Boxes, panel: Panel, step: float) -> tuple[float, float]:
    """How wide a bar or box is where several stand side by side, and how far from their middle."""
    side = [other for other in panel.marks if isinstance(other, Bars | Boxes)]
    wide = 0.8 * step / len(side)
    place = next(k for k, other in enumerate(side) if other is mark)
    return wide, wide * (place - (len(side) - 1) / 2)


def _heat(heat: Heat, panel: Panel, unit: int) -> Trace:
    says = [f"<b>{text(panel.title)}</b>"] if panel.title else []
    says += [f"{text(panel.x)} %{{x}}", f"{text(panel.y)} %{{y}}"]
    says += [f"{text(heat.unit)} %{{z:.4~g}}<extra></extra>"]
    return {
        "type": "heatmap",
        "x": [text(name) for name in look.names(heat.x)],
        "y": [text(name) for name in look.names(heat.y)],
        "z": [numbers(row) for row in look.shown(heat.values)],
        "coloraxis": f"coloraxis{unit + 1}" if unit else "coloraxis",
        "hoverongaps": False,
        "hovertemplate": "<br>".join(says),
    }


def _bars_of_colour(panels: Sequence[Panel]) -> dict[str, Any]:
    found = {}
    for i, (unit, maps) in enumerate(look.heats(panels).items()):
        low, high, stops = look.scale(maps)
        found[f"coloraxis{i + 1}" if i else "coloraxis"] = {
            "cmin": number(low),
            "cmax": number(high),
            "colorscale": [[number(place), colour] for place, colour in stops],
            "colorbar": {"title": {"text": text(unit)}},
        }
    return found


def _named(label: str, colour: int, dashed: bool = False) -> Trace:
    group = f"{label} {colour} {dashed}"
    return {"name": text(label), "legendgroup": group}


def _colour(colour: int) -> str:
    return f"c{colour % len(look.PALETTE)}"


def thin(x: Array, y: Array, most: int = MOST) -> tuple[Array, Array]:
    """A long line by the least and the largest of each of many stretches, so that peaks stay."""
    if len(y) <= most:
        return x, y
    kept = {0, len(y) - 1}
    for stretch in np.array_split(np.arange(len(y)), most // 2):
        there = stretch[np.isfinite(y[stretch])]
        kept |= {there[y[there].argmin()], there[y[there].argmax()]} if len(there) else {stretch[0]}
    order = np.array(sorted(kept))
    return x[order], y[order]


def numbers(values: Sequence[float] | Array, digits: int = 5) -> list[float | None]:
    """For JSON: so many significant digits, and null for what is not finite."""
    return [number(value, digits) if np.isfinite(value) else None for value in values]


def number(value: float, digits: int = 5) -> float:
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def text(words: str) -> str:
    """Words that plotly writes as they are: no tag, no formula, no place to fill."""
    return html.escape(words, quote=False).replace("{", "&#123;").replace("$", "&#36;")
