"""The loss curves of a study's first table, and how far each is from the first one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigate.data.optional import optional

from .kept import EVERY, Kept
from .results import Finished

Curve = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
SMOOTH = 5
"""Kept steps that a point of the training curve is the mean of, where there are enough."""
ENOUGH = 20


def draw(rows: Sequence[Mapping[str, Any]], found: Finished, path: Path, title: str) -> bool:
    """Training and val loss by step, and val loss less that of the first row; means over seeds.

    Returns whether there was anything to draw.
    """
    runs = {row["label"]: list(found.of(row["cell"]).values()) for row in rows}
    runs = {label: kept for label, kept in runs.items() if kept}
    if not runs:
        return False
    figures = optional("matplotlib.figure", "plot", "the figure of the losses")
    figure = figures.Figure(figsize=(12.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    reference = mean_curve(next(iter(runs.values())), "val", 1)
    for k, (label, kept) in enumerate(runs.items()):
        style = {"color": f"C{k % 10}", "linestyle": "-" if k < 10 else "--", "linewidth": 1.2}
        panels[0].plot(*mean_curve(kept, "train", SMOOTH), **style)
        steps, losses = mean_curve(kept, "val", 1)
        panels[1].plot(steps, losses, **style)
        same = np.intersect1d(steps, reference[0])
        apart = losses[np.isin(steps, same)] - reference[1][np.isin(reference[0], same)]
        panels[2].plot(same, apart, marker=".", label=label, **style)
    names = ("training loss", "val loss", f"val loss - {next(iter(runs))}")
    for panel, name in zip(panels, names, strict=True):
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("nats a token")
    for panel in panels[:2]:
        zoom(panel)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    # Without the version of matplotlib: the same logs make the same file.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return True


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
