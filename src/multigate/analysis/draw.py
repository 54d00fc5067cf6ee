"""Charts as PNG and PDF files, by matplotlib and without a display."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigate.data.optional import optional

from . import look
from .chart import Bars, Boxes, Chart, Heat, Line, Panel
from .store import free_name

MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "p")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
INK = "#1c2128"
Key = tuple[str, int, bool]
"""What sets two things apart in a legend: label, colour, and whether dashed."""


def draw(
    charts: Iterable[Chart], folder: Path, kinds: Sequence[str] = ("png", "pdf"), dpi: int = 150
) -> list[Path]:
    """Every chart that has panels in `folder`, as a file of each kind; returns the files."""
    matplotlib = optional("matplotlib", "plot", "drawing figures")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, chart in named(charts).items():
        with matplotlib.rc_context(STYLE):
            drawn = figure(chart)
            drawn.get_layout_engine().execute(drawn)
            drawn.set_layout_engine("none")  # else every file pays for it anew
            for path in (folder / f"{name}.{kind}" for kind in kinds):
                drawn.savefig(path, dpi=dpi)
                files.append(path)
    return files


def named(charts: Iterable[Chart]) -> dict[str, Chart]:
    """Those that have panels, by the names of their files."""
    taken: set[str] = set()
    return {free_name(chart.name, taken): chart for chart in charts if chart.panels}


def figure(chart: Chart) -> Any:
    """The chart as a matplotlib Figure of its own, which belongs to no window."""
    count = len(chart.panels)
    columns = look.columns(count)
    rows = -(-count // columns)
    width = {1: 6.0, 2: 4.2, 3: 3.2}[columns]
    size = (width * columns, (3.4 if columns == 1 else 2.7) * rows + 0.8)
    whole: Any = optional("matplotlib.figure", "plot", "drawing figures").Figure(
        figsize=size, layout="constrained"
    )
    whole.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    whole.suptitle(_plain(textwrap.fill(chart.title, int(size[0] * 10))), fontsize=11, color=INK)
    grid = whole.add_gridspec(rows, columns)
    shared = {axis: look.alike(chart.panels, axis) for axis in ("x", "y")}
    axes: list[Any] = []
    keys: dict[Key, Any] = {}
    for i, panel in enumerate(chart.panels):
        place = grid[i // columns, i % columns]
        axes.append(whole.add_subplot(place))
        ranges = {
            axis: [other for k, other in enumerate(chart.panels) if first[k] == first[i]]
            for axis, first in shared.items()
        }
        _panel(axes[i], panel, ranges, int(width * 12), keys)
    _colours(whole, axes, chart.panels)
    _legend(whole, keys, size[0])
    return whole


def _panel(
    axes: Any, panel: Panel, alike: dict[str, list[Panel]], letters: int, keys: dict[Key, Any]
) -> None:
    """Draw a panel on the axes of those `alike`; add to `keys` what a legend shows of it."""
    axes.set_title(_plain(textwrap.fill(panel.title, letters)), loc="left", color=INK)
    axes.set(
        xlabel=_plain(textwrap.fill(panel.x, letters)), ylabel=_plain(textwrap.fill(panel.y, 32))
    )
    if look.empty(panel):
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center", color="#666")
        return
    if panel.log_y:
        axes.set_yscale("log", nonpositive="clip")
    if not look.heats([panel]):
        axes.grid(axis="y")
        axes.set_ylim(look.y_range(alike["y"]))
        axes.set_xlim(look.x_range(alike["x"])[1:])
        if ticks := look.ticks(alike["x"]):
            axes.set_xticks(ticks)
    side = [mark for mark in panel.marks if isinstance(mark, Bars | Boxes)]
    wide = 0.8 * look.x_range(alike["x"])[0] / max(1, len(side))
    left = -(len(side) - 1) / 2 * wide
    for mark in panel.marks:
        match mark:
            case Heat():
                _heat(axes, mark)
                continue
            case Line():
                handle = _line(axes, mark, panel.log_y)
            case Bars():
                handle = _bars(axes, mark, panel, look.shown(mark.x) + left, wide)
            case Boxes():
                handle = _boxes(axes, mark, panel, look.shown(mark.x) + left, wide)
        left += wide if isinstance(mark, Bars | Boxes) else 0
        if handle is not None:
            dashed = isinstance(mark, Line) and mark.dashed
            keys.setdefault((mark.label, mark.colour, dashed), handle)


def _line(axes: Any, line: Line, log: bool) -> Any:
    y = look.shown(line.y, log)
    marked = line.points or len(y) <= look.MARKED
    return axes.plot(
        look.shown(line.x),
        y,
        color=_colour(line.colour),
        linestyle="none" if line.points else (0, (4, 2)) if line.dashed else "-",
        linewidth=1.5,
        marker=MARKERS[line.colour % len(MARKERS)] if marked and not line.dashed else None,
        markersize=4 if line.points else 3.2,
    )[0]


def _bars(axes: Any, bars: Bars, panel: Panel, places: Any, wide: float) -> Any:
    y = look.shown(bars.y, panel.log_y)
    there = np.isfinite(y) & np.isfinite(places)
    colour = f"{_colour(bars.colour)}{look.strength(panel)}"
    drawn = axes.bar(places[there], y[there], wide * 0.94, color=colour)
    for place in places[np.isposinf(np.array(bars.y, dtype=np.float64))]:
        axes.text(
            *(place, 1, "∞"),
            fontsize=13,
            transform=axes.get_xaxis_transform(),
            color=_colour(bars.colour),
            ha="center",
            va="top",
        )
    for place in places[np.isnan(np.array(bars.y, dtype=np.float64))] if bars.missing else ():
        axes.text(
            *(place, 0.02, _plain(bars.missing)),
            fontsize=8,
            transform=axes.get_xaxis_transform(),
            color="#666",
            rotation=90,
            ha="center",
            va="bottom",
        )
    return drawn


def _boxes(axes: Any, boxes: Boxes, panel: Panel, places: Any, wide: float) -> Any:
    drawn = look.whiskers(boxes.boxes, panel.log_y)
    keys = ("whislo", "q1", "med", "q3", "whishi")
    there = np.isfinite(drawn[:, :5]).all(axis=1) & np.isfinite(places)
    stats = [
        dict(zip(keys, row, strict=False)) | {"fliers": row[5:][np.isfinite(row[5:])]}
        for row in drawn[there]
    ]
    colour = _colour(boxes.colour)
    line = {"color": colour, "linewidth": 1}
    parts = axes.bxp(
        stats,
        positions=places[there],
        widths=wide * 0.8,
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": f"{colour}40", "edgecolor": colour, "linewidth": 1},
        whiskerprops=line,
        capprops=line,
        medianprops=line | {"linewidth": 1.6},
        flierprops={"marker": "o", "markersize": 3.6, "mfc": "none", "mec": colour},
    )
    return parts["boxes"][0] if stats else None


def _heat(axes: Any, heat: Heat) -> None:
    values = look.shown(heat.values)
    words = any(isinstance(label, str) for label in heat.y)
    heat_map = axes.imshow(
        np.ma.masked_invalid(values),
        origin="upper" if words else "lower",
        aspect="auto",
        interpolation="none",
    )
    heat_map.set_gid(heat.unit)
    for axis, labels, most in ((axes.xaxis, heat.x, 8), (axes.yaxis, heat.y, 12)):
        every = look.thinned(len(labels), most)
        text = look.names(labels)
        axis.set_ticks(list(every), [_plain(text[k]) for k in every])


def _colours(whole: Any, axes: Sequence[Any], panels: Sequence[Panel]) -> None:
    """The same colours for all heat maps of a unit, and a bar that says what they mean."""
    colors = optional("matplotlib.colors", "plot", "drawing figures")
    units = look.heats(panels)
    for unit, maps in units.items():
        low, high, stops = look.scale(maps)
        drawn = [image for ax in axes for image in ax.get_images() if image.get_gid() == unit]
        for image in drawn:
            image.set_cmap(colors.LinearSegmentedColormap.from_list("multigate", stops))
            image.set_clim(low, high)
        holders = [image.axes for image in drawn]
        # Bars of several units beside all panels would lie on top of each other.
        for places in [holders] if len(units) == 1 else [[ax] for ax in holders]:
            bar = whole.colorbar(
                drawn[0], ax=places, label=_plain(unit), shrink=0.9, aspect=15 * len(places)
            )
            bar.outline.set_visible(False)


def _legend(whole: Any, keys: dict[Key, Any], width: float) -> None:
    """One below all panels, of what appears in any of them; none for a single thing."""
    if len(keys) < 2:
        return
    labels = [_plain(label) for label, _, _ in keys]
    most = max(1, int(width / (0.075 * max(map(len, labels)) + 0.55)))
    rows = -(-len(labels) // most)
    whole.legend(
        list(keys.values()), labels, loc="outside lower center", ncols=-(-len(labels) // rows)
    )


def _colour(number: int) -> str:
    return look.PALETTE[number % len(look.PALETTE)]


def _plain(text: str) -> str:
    """Text that matplotlib takes as it is: no formulas, and no label that it hides."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
