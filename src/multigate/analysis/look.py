"""What the drawings and the page have in common: colours, and what of a chart can be seen."""

from collections.abc import Sequence

import numpy as np

from .chart import Bars, Boxes, Heat, Line, Mark, Panel
from .running import Array

PALETTE = (
    *("#0072b2", "#d55e00", "#21a694", "#4e2782", "#603008"),
    *("#ee35e6", "#091fd2", "#747474", "#585d04", "#814162"),
)
"""Ten colours that stay apart for colour-blind readers, each at least 3:1 on white."""

RISING = (
    *("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c"),
    *("#28ae80", "#5ec962", "#addc30", "#fde725"),
)
DIVERGING = (
    *("#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7"),
    *("#fddbc7", "#f4a582", "#d6604d", "#b2182b"),
)
SPAN = 30
MARKED = 32
"""A line of at most so many points shows them."""
TICKS = 12
"""At most so many numbers of blocks or names of rows are written on an axis."""
FAR = 150
"""A log axis ends at this power of ten, lest its ticks overflow."""
NUMBERED = 600
"""More whole numbers than blocks and sublayers are ever counted to."""


def shown(values: Sequence[float] | Array, log: bool = False) -> Array:
    """As float64, NaN for what has no place on the axis."""
    found = np.array(values, dtype=np.float64)
    found[~np.isfinite(found)] = np.nan
    if log:
        found[found <= 0] = np.nan
    return found


def far_apart(values: Array) -> bool:
    """Whether these need a logarithmic axis: what is above zero spans more than `SPAN` times."""
    values = values[np.isfinite(values) & (values > 0)]
    return bool(len(values) and values.max() > SPAN * values.min())


def whiskers(boxes: Array, log: bool = False) -> Array:
    """[x, 6]: lower whisker, quartile, median, quartile, upper whisker, largest if it is beyond.

    The whiskers reach 1.5 quartile distances, and never past the least and the largest, which is
    all that is known of the rest. On a log axis what is not above zero ends at the least of the
    box that is. A box that has no place on the axis is NaN.
    """
    found = np.array(boxes, dtype=np.float64).reshape(-1, 6)
    found[~np.isfinite(found).all(axis=1)] = np.nan
    least, low, middle, high, largest = found.T[:5]
    reach = 1.5 * (high - low)
    bottom, top = np.maximum(least, low - reach), np.minimum(largest, high + reach)
    drawn = np.stack([bottom, low, middle, high, top, largest], axis=1)
    if log:
        positive = np.where(drawn > 0, drawn, np.inf).min(axis=1, keepdims=True)
        drawn = np.where(drawn > 0, drawn, positive)
    drawn[~np.isfinite(drawn).all(axis=1)] = np.nan
    drawn[~(drawn[:, 5] > drawn[:, 4]), 5] = np.nan
    return drawn


def extent(mark: Mark, log: bool) -> Array:
    """Every value of a mark that has a place on the y axis (of a heat map, in its cells)."""
    match mark:
        case Heat():
            values = shown(mark.values)
        case Boxes():
            values = whiskers(mark.boxes, log)
        case Line():
            values = np.where(np.isfinite(shown(mark.x)), shown(mark.y, log), np.nan)
        case Bars():
            values = shown(mark.y, log)
    return values[np.isfinite(values)]


def empty(panel: Panel) -> bool:
    return not any(len(extent(mark, panel.log_y)) for mark in panel.marks)


def alike(panels: Sequence[Panel], axis: str) -> list[int]:
    """For each panel the first one whose axis, "x" or "y", means the same: they share a range."""
    first: dict[object, int] = {}
    keys: list[object] = [
        (getattr(panel, axis), panel.log_y and axis == "y")
        if not empty(panel) and not heats([panel])
        else i
        for i, panel in enumerate(panels)
    ]
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def y_range(panels: Sequence[Panel]) -> tuple[float, float]:
    """The ends of a y axis that these panels share; bars stand on its zero or have some height."""
    marks = [mark for panel in panels for mark in panel.marks]
    bars = any(isinstance(mark, Bars) for mark in marks)
    log = panels[0].log_y
    values = np.concatenate(
        [extent(mark, log) for mark in marks] + [np.zeros(int(bars and not log))]
    )
    values = np.log10(values) if log else values
    low, high = float(values.min()), float(values.max())
    space = 0.05 * (high - low) or (0.05 if log else 0.1 * abs(high) or 1.0)
    if not log:
        bottom = low - space * (low < 0 or not bars)
        return bottom, high + space * (high > 0 or not bars or bottom == high)
    bottom = np.floor(low - 0.1) if bars else low - space
    return 10.0 ** max(bottom, -FAR), 10.0 ** min(high + space, FAR)


def heats(panels: Sequence[Panel]) -> dict[str, list[Heat]]:
    """The heat maps with a cell to show, by their unit; those of one unit share their colours."""
    found: dict[str, list[Heat]] = {}
    for panel in panels:
        for mark in panel.marks:
            if isinstance(mark, Heat) and len(extent(mark, False)):
                found.setdefault(mark.unit, []).append(mark)
    return found


def scale(maps: Sequence[Heat]) -> tuple[float, float, list[tuple[float, str]]]:
    """Least value, largest value, and the colours between them by their place from 0 to 1.

    Colours that diverge do so evenly: the same distance from the middle is as strong on both sides.
    """
    values = np.concatenate([extent(heat, False) for heat in maps])
    lows = [heat.low for heat in maps if heat.low is not None]
    highs = [heat.high for heat in maps if heat.high is not None]
    low = min(lows) if lows else float(values.min())
    high = max(highs) if highs else float(values.max())
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 2, low + (abs(low) or 1.0) / 2
    middles = [heat.middle for heat in maps if heat.middle is not None]
    if not middles:
        return low, high, _stops(RISING, np.linspace(0, 1, len(RISING)))
    reach = max(high - middles[0], middles[0] - low)
    ends = (np.array([low, high]) - middles[0]) / reach / 2 + 0.5
    inner = [place for place in np.linspace(0, 1, len(DIVERGING)) if ends[0] < place < ends[1]]
    return low, high, _stops(DIVERGING, np.array([ends[0], *inner, ends[1]]))


def _stops(colours: Sequence[str], places: Array) -> list[tuple[float, str]]:
    """The colours at `places` of an even scale, with these spread over 0 to 1."""
    parts = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours])
    grid = np.linspace(0, 1, len(colours))
    mixed = np.stack([np.interp(places, grid, part) for part in parts.T], axis=1).round()
    spread = (places - places[0]) / (places[-1] - places[0])
    return [
        (float(place), "#{:02x}{:02x}{:02x}".format(*rgb))
        for place, rgb in zip(spread, mixed.astype(int), strict=True)
    ]


def columns(count: int) -> int:
    """Of so many panels side by side on a wide sheet."""
    return {1: 1, 2: 2, 4: 2}.get(count, 3)


def names(labels: Sequence[float] | Sequence[str] | Array) -> list[str]:
    """The labels of rows or columns as text."""
    return [label if isinstance(label, str) else f"{label:g}" for label in labels]


def thinned(count: int, most: int) -> range:
    """At most `most` of `count` places, evenly."""
    return range(0, count, max(1, -(-count // most)))


def x_range(panels: Sequence[Panel]) -> tuple[float, float, float]:
    """The least distance of two places on an x axis that these panels share, and its ends.

    Places without a bar count, so that it is seen that nothing stands there.
    """
    found = _places(panels)
    if len(found) < 2:
        middle = found[0] if len(found) else 0.0
        return 1.0, middle - 1.5, middle + 1.5
    step = float(np.diff(found).min())
    marks = [mark for panel in panels for mark in panel.marks]
    side = any(isinstance(mark, Bars | Boxes) for mark in marks)
    space = 0.7 * step if side else 0.04 * (found[-1] - found[0])
    return step, float(found[0] - space), float(found[-1] + space)


def ticks(panels: Sequence[Panel]) -> list[int]:
    """Places on x to write, if these are numbers of blocks or sublayers; else nothing."""
    found = _places(panels)
    if not len(found) or not (found == found.round()).all():
        return []
    least, largest = int(found[0]), int(found[-1])
    step = -(-(largest - least + 1) // TICKS)
    if step > NUMBERED // TICKS:
        return []
    return [place for place in range(least, largest + 1) if place % step == 0]


def _places(panels: Sequence[Panel]) -> Array:
    """Where on x these panels have anything; lines over bars stand where they like."""
    marks = [mark for panel in panels for mark in panel.marks if not isinstance(mark, Heat)]
    side = [mark for mark in marks if isinstance(mark, Bars | Boxes)]
    found = np.unique(np.concatenate([shown(mark.x) for mark in side or marks] or [np.empty(0)]))
    return found[np.isfinite(found)]


def strength(panel: Panel) -> str:
    """The last two hex digits of a bar's colour: lighter where a line goes over it."""
    return "99" if any(isinstance(mark, Line) for mark in panel.marks) else "ff"
