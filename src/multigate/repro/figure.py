"""The figure of a study: the curves of its first table, or where the rows of all tables end."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigate.data.optional import optional

from .kept import EVERY, Kept
from .results import Finished, compared

Curve = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
SMOOTH = 5
"""Kept steps that a point of the training curve is the mean of, where there are enough."""
ENOUGH = 20
BARS = "dots: seeds; bars: 95%, its own thin, pooled thick"


def draw(
    rows: Sequence[Mapping[str, Any]], found: Finished, split: str, path: Path, title: str
) -> bool:
    """Training loss by step; val loss, and at the end that of `split`, less those of the first row.

    Means over seeds, differences over the seeds that both have. Returns whether there was anything
    to draw.
    """
    cells = {row["cell"]: row["label"] for row in rows if found.of(row["cell"])}
    if not cells:
        return False
    figures = optional("matplotlib.figure", "plot", "the figure of the losses")
    figure = figures.Figure(figsize=(12.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    first, name = next(iter(cells.items()))
    for k, cell in enumerate(cells):
        runs = found.of(cell)
        style = {"color": f"C{k % 10}", "linestyle": "-" if k < 10 else "--", "linewidth": 1.2}
        panels[0].plot(*mean_curve(list(runs.values()), "train", SMOOTH), **style)
        panels[1].plot(*apart(runs, found.of(first)), marker=".", **style)
        if cell != first and (difference := found.differences(cell, first).get(split)):
            interval(panels[2], k, f"C{k % 10}", difference)
    titles = ("training loss", f"val loss - {name}", f"{split} loss - {name}, at the end")
    for panel, text in zip(panels, titles, strict=True):
        panel.set_title(text, fontsize=10)
        panel.grid(alpha=0.3)
    for panel in panels[:2]:
        panel.set_xlabel("step")
    panels[0].set_ylabel("nats a token")
    zoom(panels[0])
    name_rows(panels[2], list(cells.values()))
    save(figure, path, title)
    return True


def draw_differences(
    groups: Iterable[Mapping[str, Any]], split: str, path: Path, title: str
) -> bool:
    """Of every row, how far it ends from the one it is compared with, table by table."""
    drawn = [(of["title"], compared(of["rows"], split)) for of in groups]
    tables = [(name, rows) for name, rows in drawn if rows]
    if not tables:
        return False
    figures = optional("matplotlib.figure", "plot", "the figure of the losses")
    names = [name for of, rows in tables for name in (of, *(row["label"] for row in rows))]
    figure = figures.Figure(figsize=(9, 1.2 + 0.24 * len(names)), layout="constrained")
    panel = figure.subplots()
    place, headings = 0, []
    for k, (_, rows) in enumerate(tables):
        headings.append(place)
        for row in rows:
            place += 1
            interval(panel, place, f"C{k % 10}", row["differences"][split])
        place += 1
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.tick_params(axis="y", length=0)
    for heading in headings:
        panel.get_yticklabels()[heading].set_fontweight("bold")
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlabel(f"{split} loss less that of what it is compared with; {BARS}", fontsize=9)
    panel.grid(axis="x", alpha=0.3)
    save(figure, path, title)
    return True


def save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=11)
    # Without the version of matplotlib: the same logs make the same file.
    figure.savefig(path, dpi=120, metadata={"Software": None})


def apart(runs: Mapping[int, Kept], others: Mapping[int, Kept]) -> Curve:
    """Val loss less that of `others`, over the seeds and the steps that both have."""
    seeds = sorted(set(runs) & set(others))
    if not seeds:
        return np.array([]), np.array([])
    (steps, losses), (at, beside) = (
        mean_curve([of[seed] for seed in seeds], "val", 1) for of in (runs, others)
    )
    same = np.intersect1d(steps, at)
    return same, losses[np.isin(steps, same)] - beside[np.isin(at, same)]


def name_rows(panel: Any, labels: Sequence[str]) -> None:
    """The names at the right, in the colours of all panels, the first on top."""
    panel.axvline(0, color="black", linewidth=0.8)
    panel.yaxis.tick_right()
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    for k, label in enumerate(panel.get_yticklabels()):
        label.set_color(f"C{k % 10}")
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.set_xlabel(BARS)


def interval(panel: Any, place: int, color: str, difference: Mapping[str, Any]) -> None:
    """A difference: its seeds as dots, its mean as a line, its two intervals as bars."""
    mean = difference["mean"]
    faint = {"color": color, "alpha": 0.35, "solid_capstyle": "butt"}
    for half, width in ((difference["half"], 2), (difference["pooled"], 8)):
        if half is not None:
            ends = [mean - half, mean + half]
            panel.plot(ends, [place] * 2, linewidth=width, **faint)
    panel.plot(difference["each"], [place] * len(difference["each"]), ".", color=color)
    panel.plot([mean], [place], "|", color=color, markersize=16)


def mean_curve(runs: Sequence[Kept], event: str, smooth: int) -> Curve:
    """Over the steps that all `runs` have, the mean of their losses."""
    curves = [{r["step"]: r["loss"] for r in run.of(event) if r.get("loss")} for run in runs]
    steps = np.array(sorted(set.intersection(*map(set, curves))), int)
    # The last steps are kept all, the others one in so many: here they count alike.
    if event == "train" and len(steps) > ENOUGH * EVERY:
        steps = steps[steps % EVERY == 0]
    losses = np.array([[curve[step] for step in steps.tolist()] for curve in curves]).mean(0)
    whole = len(steps) // smooth * smooth
    if whole < ENOUGH * smooth:
        return steps, losses
    return (
        steps[:whole].reshape(-1, smooth).mean(1),
        losses[:whole].reshape(-1, smooth).mean(1),
    )


def zoom(panel: Any) -> None:
    """Leave out the steep beginning: from the lowest loss to that at a tenth of the steps."""
    lines = [line.get_xydata() for line in panel.get_lines()]
    late = [xy[xy[:, 0] >= 0.1 * xy[-1, 0], 1] for xy in lines if len(xy) > 1]
    if late:
        low, high = min(y.min() for y in late), max(y.max() for y in late)
        panel.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low) or high + 1)
