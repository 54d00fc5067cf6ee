"""A report as plain data: what `draw.py` makes files of and `page.py` a page."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .running import Array


@dataclass(frozen=True)
class Line:
    """y over x, in the colour of number `colour`; points that are not finite are gaps."""

    label: str
    x: Sequence[float] | Array
    y: Sequence[float] | Array
    colour: int = 0
    dashed: bool = False
    points: bool = False
    """Marks instead of a line."""


@dataclass(frozen=True)
class Bars:
    """A bar for each x; several sets stand side by side. `notes` replaces what hovering shows.

    Where y is NaN the word `missing`, if there is one, stands in the place of the bar.
    """

    label: str
    x: Sequence[float] | Array
    y: Sequence[float] | Array
    colour: int = 0
    notes: Sequence[str] = ()
    missing: str = ""


@dataclass(frozen=True)
class Heat:
    """values [rows, columns] as colours between `low` and `high`; not finite is empty.

    `middle` set, colours diverge from there.
    """

    values: Array
    x: Sequence[float] | Sequence[str] | Array
    y: Sequence[float] | Sequence[str] | Array
    unit: str
    low: float | None = None
    high: float | None = None
    middle: float | None = None


@dataclass(frozen=True)
class Boxes:
    """A box for each x: quartiles, whiskers at most 1.5 of their distance away, and the largest
    value as a circle where it is beyond. `boxes` [x, 6] as `running.Histogram.box` gives them."""

    label: str
    x: Sequence[float] | Array
    boxes: Array
    colour: int = 0


Mark = Line | Bars | Heat | Boxes


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x: str
    y: str
    marks: Sequence[Mark]
    log_y: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure: panels side by side, and what a reader should know."""

    name: str
    """Of its files."""
    title: str
    shows: str
    """One sentence: what is drawn."""
    panels: Sequence[Panel] = ()
    claim: str = ""
    """What the paper says of it; empty for what it does not have."""
    seen: str = ""
    """What these runs show."""
    absent: Sequence[str] = field(default_factory=tuple)
    """A sentence for each run to which the figure does not apply."""


@dataclass(frozen=True)
class Section:
    """Figures of one kind."""

    title: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Report:
    """All that a page shows."""

    title: str
    subtitle: str
    """What was compared, on what text, when and by which command."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The summary table, a row for each run."""
    sections: Sequence[Section]
    problems: Sequence[str] = ()
    """A sentence for each thing that could not be had."""
