"""How far the gates open, and how sharply the streams are read: beta and alpha."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from .chart import Bars, Boxes, Chart, Line, Panel
from .probe import Step, watch
from .running import BINS, Array, Arrays, Histogram, Table

MEANS = 64
"""The most numbers a token has whose means are recorded one by one."""
SHOWN = 64
"""Bars of a drawn histogram."""
SMALL = 0.1

TITLES = {"beta": "Gates (beta)", "alpha": "Pool weights (alpha)"}
SHOWS = {
    "beta": "How much of a sublayer's output its gate lets into a stream",
    "alpha": "How much each stream, or each source, counts in what the next sublayer reads",
}
CLAIMS = {
    "beta": "Gate values are usually very small, the majority below 0.1; only a few outliers reach "
    "0.8 to 0.9. That the streams can be inverted rests on it.",
    "alpha": "",
}
ABSENT = {"beta": "has no gates", "alpha": "has no pool weights"}


class Gates:
    """Distribution over tokens and streams of the gates and of the pool weights of every step.

        s_k <- s_k + beta_k (y - s_k),    h = sum_k alpha_k s_k

    Recorded of each of the two that some step has, here of beta: `beta.counts` [depth, BINS], how
    many values fell into each bin from 0 to 1 (none for a step without); `beta.boxes` [depth, 6],
    see `Histogram.box`; and `beta.mean` [depth, m], of every stream by itself, if a token has at
    most `MEANS` of them. What does not exist is NaN.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._histograms: dict[str, dict[int, Histogram]] = {}
        self._means: dict[str, Table] = {}
        self._most: dict[str, int] = {}

    def see(self, step: Step) -> None:
        if step.i < 0:
            return
        self._depth = max(self._depth, step.i + 1)
        for name in TITLES:
            if name not in step.coefficients:
                continue
            values = step.coefficients[name]
            values = values.reshape(-1, values.shape[-1])
            histograms = self._histograms.setdefault(name, {})
            histograms.setdefault(step.i, Histogram()).add(values)
            self._means.setdefault(name, Table()).add(step.i, values)
            self._most[name] = max(self._most.get(name, 0), values.shape[-1])

    def result(self) -> Arrays:
        found: Arrays = {}
        for name, histograms in self._histograms.items():
            counts = np.zeros((self._depth, BINS), dtype=np.int64)
            boxes = np.full((self._depth, 6), np.nan)
            for i, histogram in histograms.items():
                counts[i], boxes[i] = histogram.result(), histogram.box()
            found |= {f"{name}.counts": counts, f"{name}.boxes": boxes}
            if self._most[name] <= MEANS:
                found[f"{name}.mean"] = self._means[name].result(self._depth)
        return found


def gate_statistics(model: nn.Module, tokens: Tensor, batch: int | None = None) -> Arrays:
    """`Gates` over `tokens` [samples, T]."""
    gates = Gates()
    watch(model, tokens, gates, batch=batch)
    return gates.result()


def charts(runs: Mapping[str, Arrays]) -> list[Chart]:
    """Of beta and of alpha: for each run a histogram over all sublayers, and a box for each."""
    drawn = [_chart(name, runs) for name in TITLES]
    if any(chart.panels for chart in drawn):
        return drawn
    absent = [f"{label} has neither gates nor pool weights." for label in runs]
    return [Chart("gates", "Gates and pool weights", f"{SHOWS['beta']}.", absent=absent)]


def _chart(name: str, runs: Mapping[str, Arrays]) -> Chart:
    panels, seen, absent = [], [], []
    for colour, (label, arrays) in enumerate(runs.items()):
        counts, boxes = arrays.get(f"{name}.counts"), arrays.get(f"{name}.boxes")
        if counts is None or boxes is None:
            absent.append(f"{label} {ABSENT[name]}.")
            continue
        if not np.isfinite(boxes[:, 4]).any():
            absent.append(f"The {name} of {label} are not finite.")
            continue
        numbers = np.arange(len(boxes)) + 1
        panels += [
            _histogram(name, label, counts, _mean(counts, boxes), colour),
            Panel(
                f"{label}: by sublayer", "sublayer", name, [Boxes(label, numbers, boxes, colour)]
            ),
        ]
        seen.append(_seen(label, counts, boxes))
    return Chart(
        name=f"gates-{name}",
        title=TITLES[name],
        shows=f"{SHOWS[name]}: all values of all sublayers (the dashed line is their mean), and a "
        "box of quartiles for each sublayer with its largest value as a circle.",
        panels=tuple(panels),
        claim=CLAIMS[name],
        seen=" ".join(seen),
        absent=absent,
    )


def _histogram(name: str, label: str, counts: Array, mean: float, colour: int) -> Panel:
    shares = counts.sum(0).reshape(SHOWN, -1).sum(1) / counts.sum()
    ends = np.linspace(0, 1, SHOWN + 1)
    notes = [
        f"{low:.3f} to {high:.3f}: {share:.3%}"
        for low, high, share in zip(ends, ends[1:], shares, strict=False)
    ]
    # A logarithmic axis has no place for bins without values.
    shares = np.where(shares > 0, shares, np.nan)
    bars = Bars(label, (ends[:-1] + ends[1:]) / 2, shares, colour, notes)
    heights = [float(np.nanmin(shares)), float(np.nanmax(shares))]
    line = Line("mean", [mean, mean], heights, colour, dashed=True)
    return Panel(f"{label}: mean {mean:.3f}", name, "share of values", [bars, line], log_y=True)


def _mean(counts: Array, boxes: Array) -> float:
    """Of all values, from the means of the steps."""
    values = counts.sum(1)
    return float(values @ np.where(values > 0, boxes[:, -1], 0.0) / values.sum())


def _seen(label: str, counts: Array, boxes: Array) -> str:
    small = counts[:, : round(SMALL * counts.shape[1])].sum() / counts.sum()
    largest = int(np.nanargmax(boxes[:, 4]))
    return (
        f"{label}: {_mean(counts, boxes):.3f} on average, {small:.1%} below {SMALL}, the largest "
        f"{boxes[largest, 4]:.2f} (sublayer {largest + 1})."
    )
